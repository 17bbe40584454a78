"""The digest of a committed state: 32 bytes over tree, dtypes, shapes, step, cursor and every bit.

Computed where the state is, on the device, since it is due after every death and now and then in
between, and a state may have gigabytes; and by numpy for arrays on the host, with the same result.
Each word is mixed with its place in the whole (the finalizer of MurmurHash3) and all are added up
modulo 2**32, in two lanes: integer sums come out the same in any order, so neither the device nor
the compiler has a say. It finds accidents, one flipped bit always; it keeps no secrets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.layout import to_words
from ftrain.state import Committed, StateSpec, fingerprint_of

LANES = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))  # odd: of the place, and added
SMALL = 1 << 16  # words; thousands of smaller leaves are joined, or each would cost a kernel
CHUNK = 1 << 18  # words that numpy mixes at a time
# XLA's CPU backend sums a fused reduction one word at a time, 0.7 GB/s on two cores, but adds and
# mixes whole vectors at 4.5 GB/s (jax 0.10.2, 0.12.0.1). So there a large leaf is added up in a
# loop, part by part, into one part. A loop costs 70 ms to compile: not for every leaf.
LOOPED = 1 << 20  # words
PART = 1 << 16


def digest_of(lines: Sequence[str], step: int, cursor: int, arrays: Sequence[np.ndarray]) -> bytes:
    """The digest of a state whose leaves are on the host, as `state.to_host` gives them.

    Args:
      lines: the spec's, see `StateSpec.lines`.
      step: committed.
      cursor: samples consumed.
      arrays: the bits of each leaf.
    """
    sums, place = np.zeros(len(LANES), np.uint32), 0
    for words in _chunks(arrays):
        sums += np.array(_lanes(np, words, place), np.uint32)
        place += words.size
    return _finish(lines, step, cursor, sums)


class Digests:
    """The compiled digest of one spec's states; compiled once per process (rule R10)."""

    def __init__(self, spec: StateSpec):
        self._spec, self._lines = spec, spec.lines()

    def lower(self) -> None:
        """Traces the program."""
        self._lowered = jax.jit(_device_sums).lower(list(self._spec.leaves))

    def compile(self, compile: Callable[[Any], Any]) -> None:
        """Compiles what `lower` traced, or loads it from the compilation cache."""
        self._program = compile(self._lowered)
        del self._lowered

    def __call__(self, state: Committed) -> bytes:
        """The digest of a state on this worker's device. Waits for it."""
        return self.begin(state)()

    def begin(self, state: Committed) -> Callable[[], bytes]:
        """Has the device compute it; what is returned waits for it."""
        sums, step, cursor = self._program(list(state.leaves)), state.step, state.cursor
        return lambda: _finish(self._lines, step, cursor, np.asarray(sums))


def _finish(lines: Sequence[str], step: int, cursor: int, sums: np.ndarray) -> bytes:
    whole = f"{fingerprint_of(lines)} {step} {cursor} {sums.tolist()}"
    return hashlib.sha256(whole.encode()).digest()


def _mixed(xp: Any, words: Any, place: int | Any) -> list[Any]:
    """Each lane's mix of uint32 words that begin at `place` of the whole; numpy's or traced."""
    places = xp.arange(words.size, dtype=xp.uint32) + place
    lanes = []
    for factor, offset in LANES:
        x = words ^ (places * xp.uint32(factor) + xp.uint32(offset))
        x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
        x = (x ^ (x >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
        lanes.append(x ^ (x >> xp.uint32(16)))
    return lanes


def _lanes(xp: Any, words: Any, place: int) -> list[Any]:
    """Each lane's sum over uint32 words that begin at `place` of the whole; numpy's or traced."""
    return [xp.sum(x, dtype=xp.uint32) for x in _mixed(xp, words, xp.uint32(place & 0xFFFFFFFF))]


def _lanes_in_parts(flat: jax.Array, place: int) -> list[jax.Array]:
    """As `_lanes`, of the words of a leaf that has one for each item. Traced."""
    parts = flat.size // PART

    def add(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        words = to_words(jax.lax.dynamic_slice(flat, (i * PART,), (PART,)))
        at = jnp.uint32(place & 0xFFFFFFFF) + i.astype(jnp.uint32) * jnp.uint32(PART)
        return [a + b for a, b in zip(sums, _mixed(jnp, words, at), strict=True)]

    sums = jax.lax.fori_loop(0, parts, add, [jnp.zeros(PART, jnp.uint32) for _ in LANES])
    rest = _lanes(jnp, to_words(flat[parts * PART :]), place + parts * PART)
    return [jnp.sum(a, dtype=jnp.uint32) + b for a, b in zip(sums, rest, strict=True)]


def _goes_in_parts(leaf: jax.Array) -> bool:
    if jax.default_backend() != "cpu" or leaf.size < LOOPED:
        return False
    return jax.eval_shape(to_words, leaf).shape == leaf.shape


def _device_sums(leaves: Sequence[jax.Array]) -> jax.Array:
    """uint32[lanes]. Traced."""
    total = jnp.zeros(len(LANES), jnp.uint32)
    small: list[jax.Array] = []
    place = 0

    def add(lanes: list[jax.Array], size: int) -> None:
        nonlocal total, place
        total = total + jnp.stack(lanes)
        place += size

    def add_small() -> None:
        if small:
            words = jnp.concatenate(small)
            add(_lanes(jnp, words, place), words.size)
            small.clear()

    for leaf in leaves:
        if _goes_in_parts(leaf):
            add_small()
            add(_lanes_in_parts(leaf.reshape(-1), place), leaf.size)
            continue
        words = to_words(leaf).reshape(-1)
        if words.size < SMALL:
            small.append(words)
            continue
        add_small()
        add(_lanes(jnp, words, place), words.size)
    add_small()
    return total


def _chunks(arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The words of all arrays in order: small ones joined, large ones cut."""
    small: list[np.ndarray] = []
    size = 0
    for words in map(_host_words, arrays):
        if words.size < SMALL and size < CHUNK:
            small.append(words)
            size += words.size
            continue
        if small:
            yield np.concatenate(small)
            small, size = [], 0
        yield from (words[start : start + CHUNK] for start in range(0, words.size, CHUNK))
    if small:
        yield np.concatenate(small)


def _host_words(array: np.ndarray) -> np.ndarray:
    """The bits of an array, as `layout.to_words` gives those of a leaf: short items with zeros."""
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype == np.bool_ or array.dtype.itemsize == 1:
        return flat.view(np.uint8).astype(np.uint32)
    if array.dtype.itemsize == 2:
        return flat.view(np.uint16).astype(np.uint32)
    return flat.view(np.uint32)
