"""The order of samples: a keyed permutation of an epoch, evaluated per index.

A stored permutation of 10^8 samples is 762 MiB and 6.4 s in every worker and at every restart; a
Feistel network (Luby and Rackoff, 1988) with cycle walking (Black and Rogaway, 2002) is a pure
function of (seed, epoch, index), so any worker finds any sample of any step without a history.
"""

from __future__ import annotations

import functools

import numpy as np

TOGETHER = 4096  # samples that are found at a time
EPOCHS = 16  # that they may lie in: each has keys of its own

ROUNDS = 6  # four suffice in theory for ideal round functions; ours is a plain integer mix


class ShardOrder:
    """The samples of a step's shards: as `sample_indices`, found for several steps at a time.

    For a shard of 40 samples numpy's calls take as long as for thousands: half a millisecond of
    every step, with the interpreter's lock held.

    Args:
      length, seed, shuffle: as `sample_indices` has them.
      batch_size: positions from a shard to that of the next step.
      shard_size: samples of a shard.
      shards: of a step.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int,
        shuffle: bool,
        batch_size: int,
        shard_size: int,
        shards: int,
    ):
        self._find = functools.partial(sample_indices, length=length, seed=seed, shuffle=shuffle)
        self._steps = max(1, min(TOGETHER // shard_size, EPOCHS * length // batch_size))
        self._batch_size, self._shard_size = batch_size, shard_size
        # Those in use, and those of the next steps, which are read ahead.
        self._together = functools.lru_cache(2 * shards)(self._find_together)

    def samples(self, start: int) -> np.ndarray:
        """Those of the shard that begins at position `start`."""
        number, rest = divmod(start, self._steps * self._batch_size)
        step, offset = divmod(rest, self._batch_size)
        return self._together(number, offset)[step]

    def _find_together(self, number: int, offset: int) -> np.ndarray:
        steps = number * self._steps + np.arange(self._steps)
        starts = steps * self._batch_size + offset
        positions = starts[:, None] + np.arange(self._shard_size)
        return self._find(positions.reshape(-1)).reshape(positions.shape)


def sample_indices(positions: np.ndarray, length: int, *, seed: int, shuffle: bool) -> np.ndarray:
    """The samples at `positions` of the endless sequence of epochs.

    Args:
      positions: int64, counted from the start of the run; epoch e begins at e * length.
      length: samples in the data set, >= 1.
      seed: of the run.
      shuffle: False gives every epoch in order.

    Returns:
      int64 `epoch * length + index`, with index in 0 .. length - 1: what grain calls the index of a
      repeated data set, so that its seeded transformations differ from epoch to epoch.
    """
    positions = np.asarray(positions, np.int64)
    if not shuffle:
        return positions
    epochs, offsets = np.divmod(positions, length)
    each, which = np.unique(epochs, return_inverse=True)
    round_keys = np.stack([_round_keys(seed, int(epoch)) for epoch in each], axis=1)[:, which]
    return epochs * length + _permute(offsets, length, round_keys)


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    return np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64)


def _permute(values: np.ndarray, length: int, round_keys: np.ndarray) -> np.ndarray:
    """A bijection of 0 .. length - 1 for each column of keys, uint64[ROUNDS, values]."""
    half = max(1, (max(1, int(length - 1).bit_length()) + 1) // 2)
    out = _feistel(np.asarray(values, np.uint64), half, round_keys)
    # The network permutes 0 .. 4**half - 1, less than 4 * length numbers: who falls outside walks
    # on along its cycle until it is inside.
    outside = np.flatnonzero(out >= length)
    while outside.size:
        out[outside] = _feistel(out[outside], half, round_keys[:, outside])
        outside = outside[out[outside] >= length]
    return out.astype(np.int64)


def _feistel(values: np.ndarray, half: int, round_keys: np.ndarray) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & mask
    for keys in round_keys:
        left, right = right, left ^ (_mix(right ^ keys) & mask)
    return (left << np.uint64(half)) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
