"""What a step sums over the workers, as flat buffers: one per dtype, [1, 1, n] on each device.

gradients             in the reduce dtype, times the shard's weight
loss, metrics, weight float32, times the weight
model state           changed floating leaves in float32, times the weight; other changed leaves
as the bits of shard 0's, in uint32, where a sum with zeros is exact
flags                 float32, one a shard: what of it is not finite (see `nonfinite`); none
if nothing is judged
stop                  float32: how many workers have been asked to stop
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

WIDTHS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes of an item


@dataclasses.dataclass(frozen=True)
class Slot:
    """One array's place: buffer `group`, elements `start` .. `start + size - 1`."""

    group: int
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))


class Layout:
    """Places arrays in buffers, one buffer per dtype, in the order they were added."""

    def __init__(self) -> None:
        self.dtypes: list[jnp.dtype] = []
        self.sizes: list[int] = []
        self.padding: Slot | None = None

    def add(self, shape: Sequence[int], dtype: jnp.dtype) -> Slot:
        """A place for an array of this shape in the buffer of this dtype."""
        dtype = jnp.dtype(dtype)
        if dtype not in self.dtypes:
            self.dtypes.append(dtype)
            self.sizes.append(0)
        group = self.dtypes.index(dtype)
        slot = Slot(group, self.sizes[group], tuple(shape))
        self.sizes[group] += slot.size
        return slot

    def reserve(self, size: int, dtype: jnp.dtype) -> None:
        """Makes the buffer of this dtype at least so large, for other uses of its program."""
        missing = size - self.sizes[self.dtypes.index(jnp.dtype(dtype))]
        if missing > 0:
            self.padding = self.add((missing,), dtype)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The buffers' shapes."""
        return [
            jax.ShapeDtypeStruct((1, 1, size), dtype)
            for size, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]

    def pack(self, placed: Sequence[tuple[Slot, jax.Array]]) -> list[jax.Array]:
        """Buffers holding every array at its slot; every slot of the layout once. Traced."""
        parts: list[list[jax.Array]] = [[] for _ in self.dtypes]
        if self.padding is not None:
            placed = [*placed, (self.padding, jnp.zeros(self.padding.shape))]
        for slot, array in sorted(placed, key=lambda item: item[0].start):
            parts[slot.group].append(jnp.ravel(array).astype(self.dtypes[slot.group]))
        return [jnp.concatenate(part).reshape(1, 1, -1) for part in parts]

    def take(self, buffers: Sequence[jax.Array], slot: Slot) -> jax.Array:
        """The array at `slot`. Traced."""
        flat = buffers[slot.group].reshape(-1)
        return flat[slot.start : slot.start + slot.size].reshape(slot.shape)


def to_bits(x: jax.Array) -> jax.Array:
    """The bits of any leaf, as unsigned integers of its items' width. Traced.

    Keys are uint32 words, complex numbers two floats behind one another, of 8 bytes two uint32.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return to_bits(jnp.stack([x.real, x.imag]))
    return jax.lax.bitcast_convert_type(x, WIDTHS[x.dtype.itemsize])


def from_bits(bits: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The leaf whose bits `to_bits` gave. Traced."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bits, impl=like.dtype._impl.name)
    if like.dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        part = jnp.finfo(like.dtype).dtype
        real, imag = from_bits(bits, jax.ShapeDtypeStruct((2, *like.shape), part))
        return jax.lax.complex(real, imag)
    return jax.lax.bitcast_convert_type(bits, like.dtype)


def to_words(x: jax.Array) -> jax.Array:
    """The bits of any leaf as uint32, a word an item. Traced; undone by `from_words`."""
    return to_bits(x).astype(jnp.uint32)


def from_words(words: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The leaf whose bits `to_words` gave. Traced."""
    return from_bits(words.astype(jax.eval_shape(to_bits, like).dtype), like)
