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


def _lanes(xp: Any, words: Any, place: int | Any) -> list[Any]:
    """Each lane's sum over uint32 words that begin at `place` of the whole; numpy's or traced."""
    places = xp.arange(words.size, dtype=xp.uint32) + xp.uint32(place & 0xFFFFFFFF)
    sums = []
    for factor, offset in LANES:
        x = words ^ (places * xp.uint32(factor) + xp.uint32(offset))
        x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
        x = (x ^ (x >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
        sums.append(xp.sum(x ^ (x >> xp.uint32(16)), dtype=xp.uint32))
    return sums


def _device_sums(leaves: Sequence[jax.Array]) -> jax.Array:
    """uint32[lanes]. Traced."""
    total = jnp.zeros(len(LANES), jnp.uint32)
    small: list[jax.Array] = []
    place = 0

    def add(words: jax.Array) -> None:
        nonlocal total, place
        total = total + jnp.stack(_lanes(jnp, words, place))
        place += words.size

    for leaf in leaves:
        words = to_words(leaf).reshape(-1)
        if words.size < SMALL:
            small.append(words)
            continue
        if small:
            add(jnp.concatenate(small))
            small = []
        add(words)
    if small:
        add(jnp.concatenate(small))
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
