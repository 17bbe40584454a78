"""The order of samples: each epoch a permutation of its own, found per index, without a history."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.order import TOGETHER, ShardOrder, sample_indices

QUICK = settings(max_examples=60, deadline=None, database=None)
LARGE = (4095, 4096, 4097, 65_537, 100_003)
BILLION = 10**9
PINNED = [0, 5, 3, 7, 6, 1, 9, 8, 4, 2]

seeds = st.integers(0, 2**32 - 1)
epochs = st.integers(0, 2**33)


def order(start: int, stop: int, length: int, *, seed: int = 7, shuffle: bool = True) -> np.ndarray:
    return sample_indices(np.arange(start, stop), length, seed=seed, shuffle=shuffle)


def epoch_of(length: int, seed: int, epoch: int = 0) -> np.ndarray:
    return order(epoch * length, (epoch + 1) * length, length, seed=seed) - epoch * length


def is_permutation(values: np.ndarray) -> bool:
    return np.array_equal(np.sort(values), np.arange(len(values)))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_every_sample_of_a_small_epoch_comes_once(seed):
    """For each length from 1 to 300 an epoch is a permutation of its samples."""
    bad = [n for n in range(1, 301) if not is_permutation(epoch_of(n, seed))]
    assert bad == []


@pytest.mark.parametrize("length", LARGE)
def test_every_sample_of_a_large_epoch_comes_once(length):
    """Lengths at and around powers of two, and primes, are permuted too."""
    assert is_permutation(epoch_of(length, 3, 5))


@QUICK
@given(st.integers(1, 5000), seeds, epochs)
def test_any_key_permutes_any_length(length, seed, epoch):
    """No length, seed or epoch breaks the permutation."""
    assert is_permutation(epoch_of(length, seed, epoch))


@QUICK
@given(st.integers(1, 2**60), seeds, st.data())
def test_different_positions_of_a_huge_epoch_are_different_samples(length, seed, data):
    """Injective and inside the range where nobody can list the whole epoch."""
    draw = st.integers(0, length - 1)
    values = data.draw(st.lists(draw, min_size=1, max_size=50, unique=True))
    out = sample_indices(np.array(values), length, seed=seed, shuffle=True)
    assert len(set(out.tolist())) == len(values)
    assert out.min() >= 0 and out.max() < length


def test_epochs_have_orders_of_their_own():
    """The order depends on the epoch."""
    first, second = order(0, 200, 100).reshape(2, 100) % 100
    assert not np.array_equal(first, second)


def test_seeds_have_orders_of_their_own():
    """The order depends on the seed."""
    assert not np.array_equal(order(0, 100, 100, seed=1), order(0, 100, 100, seed=2))


def test_order_looks_random():
    """Neighbours are torn apart and no sample stays at its place more often than chance has it."""
    out = order(0, 10_000, 10_000)
    fixed, kept = np.sum(out == np.arange(10_000)), np.sum(np.diff(out) == 1)
    assert fixed < 10 and kept < 10  # one of each is expected


def test_order_stays_what_it_was():
    """A run that one version of ftrain or numpy began goes on with the next."""
    assert order(0, 10, 10, seed=0).tolist() == PINNED


def test_without_shuffle_samples_come_in_the_data_s_own_order():
    """shuffle=False: every epoch in order."""
    assert order(0, 7, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4, 5, 6]


@QUICK
@given(st.integers(1, 50), st.integers(1, 20), seeds)
def test_steps_run_over_the_end_of_an_epoch_without_a_gap(length, batch, seed):
    """Cut into batches of any size, three epochs give each sample exactly three times."""
    total = 3 * length
    parts = [order(a, min(a + batch, total), length, seed=seed) for a in range(0, total, batch)]
    whole = np.concatenate(parts)
    assert np.array_equal(whole // length, np.repeat(np.arange(3), length))
    assert all(is_permutation(epoch % length) for epoch in whole.reshape(3, length))


@QUICK
@given(st.lists(st.integers(0, 400), min_size=1, max_size=30), seeds)
def test_a_sample_depends_on_its_position_alone(positions, seed):
    """Whatever else is asked for in the same call, and in whatever order."""
    together = sample_indices(np.array(positions), 100, seed=seed, shuffle=True)
    alone = [int(order(p, p + 1, 100, seed=seed)[0]) for p in positions]
    assert together.tolist() == alone


@QUICK
@given(
    st.integers(1, 3 * TOGETHER),
    st.integers(1, 5),
    st.sampled_from([1, 40, TOGETHER // 2, TOGETHER, TOGETHER + 1]),
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.integers(0, 7),
    seeds,
)
def test_a_shard_s_samples_are_the_same_found_with_others(length, shards, size, steps, first, seed):
    """Whatever steps are asked for, over the end of an epoch, from whatever cursor on."""
    batch = shards * size
    found = ShardOrder(
        length, seed=seed, shuffle=True, batch_size=batch, shard_size=size, shards=shards
    )
    for step in steps:
        start = first + step * batch + (shards - 1) * size
        assert np.array_equal(found.samples(start), order(start, start + size, length, seed=seed))


def test_a_batch_of_a_billion_samples_takes_the_memory_of_a_batch():
    """The permutation is not stored: under 200 kB for 240 indices of 10^9."""
    positions = np.arange(BILLION - 120, BILLION + 120)  # over the end of an epoch
    sample_indices(positions, BILLION, seed=1, shuffle=True)  # numpy's own first-use allocations
    tracemalloc.start()
    try:
        indices = sample_indices(positions, BILLION, seed=1, shuffle=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(indices.tolist())) == 240
    assert peak < 200_000
