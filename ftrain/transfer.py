"""Leaves on their way between workers: cut into buckets of one size, and joined again.

A bucket is uint32[1, 1, words], the same whatever the state, so that one small program sums them
all. Large leaves are cut and joined on the device, by a pair of programs for each kind of leaf that
hold no collective and are compiled at the start (rule R10); small ones travel together by way of
the host. Beside the state this takes a copy of its largest leaf, and a few buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.layout import from_bits, to_bits
from ftrain.state import StateSpec, cut_bytes, host_shape, join_bytes, leaves_from_host, to_host

# Large enough for the link to be busy, small enough that a leaf's last bucket wastes little.
BUCKET_WORDS = {"cpu": 1 << 20, "gpu": 1 << 22}
SMALL_PART = 4  # leaves below this part of a bucket travel together

Buckets = list[jax.Array]


class Transfer:
    """Cuts and joins the states of one spec, on this worker's device.

    Args:
      spec: the states'.
      words: of a bucket at most; None for what suits the device.
    """

    def __init__(self, spec: StateSpec, words: int | None = None):
        self._spec, self._home = spec, jax.local_devices()[0]
        most = words or BUCKET_WORDS[self._home.platform]
        sizes = [_bytes(leaf) for leaf in spec.leaves]
        self._large = [i for i, size in enumerate(sizes) if size * SMALL_PART >= 4 * most]
        self._small = [i for i in range(len(sizes)) if i not in set(self._large)]
        small_words = -(-sum(sizes[i] for i in self._small) // 4)
        few = most if self._large else 1 << max(0, small_words - 1).bit_length()
        self.words = min(most, few)
        self._small_buckets = -(-small_words // self.words)
        self._programs: dict[Any, tuple[Any, Any]] = {}

    @property
    def counts(self) -> list[int]:
        """The number of buckets of each part of the state: of each large leaf, of the rest."""
        words = [-(-_bytes(self._spec.leaves[i]) // 4) for i in self._large]
        return [*(-(-n // self.words) for n in words), self._small_buckets]

    def lower(self) -> None:
        """Traces the programs."""
        bucket = jax.ShapeDtypeStruct((1, 1, self.words), jnp.uint32)
        for i, count in zip(self._large, self.counts[:-1], strict=True):
            leaf = self._spec.leaves[i]
            if _kind(leaf) not in self._programs:
                join = jax.jit(lambda buckets, leaf=leaf: _joined(buckets, leaf))
                self._programs[_kind(leaf)] = (
                    jax.jit(self._cut).lower(leaf),
                    join.lower([bucket] * count),
                )

    def compile(self, compile: Callable[[Any], Any]) -> None:
        """Compiles what `lower` traced, or loads it from the compilation cache."""
        for kind, (cut, join) in self._programs.items():
            self._programs[kind] = compile(cut), compile(join)

    def empty(self) -> jax.Array:
        """The bucket of who has nothing to give."""
        return jax.device_put(np.zeros((1, 1, self.words), np.uint32), self._home)

    def cut(self, part: int, leaves: Sequence[jax.Array]) -> Buckets:
        """The buckets of one part, of those that `counts` counts."""
        if part < len(self._large):
            leaf = leaves[self._large[part]]
            return self._programs[_kind(leaf)][0](leaf)
        data = join_bytes(to_host([leaves[i] for i in self._small]))
        padded = np.zeros(4 * self.words * self._small_buckets, np.uint8)
        padded[: data.size] = data
        rows = padded.view(np.uint32).reshape(-1, 1, 1, self.words)
        return [jax.device_put(row, self._home) for row in rows]

    def is_by_host(self, part: int) -> bool:
        """Whether `join` needs the buckets of that part to be there: so it is for the last one."""
        return part >= len(self._large)

    def join(self, part: int, buckets: Buckets) -> dict[int, jax.Array]:
        """The leaves of one part, by their place in the state, from the buckets `cut` gave."""
        if part < len(self._large):
            i = self._large[part]
            return {i: self._programs[_kind(self._spec.leaves[i])][1](buckets)}
        few = [self._spec.leaves[i] for i in self._small]
        arrays = cut_bytes(join_bytes(map(np.asarray, buckets)), map(host_shape, few))
        return dict(zip(self._small, leaves_from_host(few, arrays), strict=True))

    def _cut(self, leaf: jax.Array) -> Buckets:
        bits = to_bits(leaf).reshape(-1)
        items = 4 // bits.dtype.itemsize
        whole = jnp.pad(bits, (0, -bits.size % (items * self.words)))
        if items > 1:
            whole = jax.lax.bitcast_convert_type(whole.reshape(-1, items), jnp.uint32)
        return list(whole.reshape(-1, 1, 1, self.words))


def _joined(buckets: Buckets, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The leaf that `Transfer._cut` was given. Traced."""
    bits = jax.eval_shape(to_bits, like)
    words = jnp.concatenate([bucket.reshape(-1) for bucket in buckets])
    if bits.dtype.itemsize < 4:
        words = jax.lax.bitcast_convert_type(words, bits.dtype).reshape(-1)
    return from_bits(words[: bits.size].reshape(bits.shape), like)


def _kind(leaf: jax.ShapeDtypeStruct) -> tuple[Any, Any]:
    return leaf.shape, leaf.dtype


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape, dtype = host_shape(leaf)
    return math.prod(shape) * dtype.itemsize
