"""Where a run ends, and that every sample is used once an epoch on the way there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.board import Board
from ftrain.config import Config
from ftrain.data import ShardReader, Source, shards_of
from ftrain.errors import ConfigError
from ftrain.panel import one_line
from ftrain.records import Commit, Event
from ftrain.target import Target, target_of

QUICK = settings(max_examples=200, deadline=None, database=None)
ends = st.integers(1, 2000)
sizes = st.integers(1, 100)


def config(**keys: int) -> Config:
    return Config(**{"trainer": "a.py:T", "run_dir": "r", "batch_size": 50, **keys})


def test_epochs_are_steps_of_which_the_last_may_be_smaller():
    """Three times 1,003 samples in batches of 50: sixty whole ones and one of nine."""
    target = target_of(config(epochs=3, batch_shards=10), 1003)
    assert target == Target(61, 3009, 50)
    assert [target.batch(cursor) for cursor in (0, 2950, 3000)] == [50, 50, 9]
    assert target.shorter_shard(0, 10) == 4  # nine are a whole shard of five, and four
    assert target.shorter_shard(0, 50) == 0  # nine whole shards of one
    assert not target.reached(60, 3000) and target.reached(61, 3009)


def test_steps_have_whole_batches_whatever_the_length():
    """Nothing but the step ends the run, and no shard is shorter."""
    target = target_of(config(steps=7), 1003)
    assert target == Target(7, None, 50)
    assert target.batch(10**6) == 50 and target.shorter_shard(3, 10) == 0
    assert not target.reached(6, 10**6) and target.reached(7, 0)
    assert target.last_step(3, 150) == 7


def test_a_run_that_is_beyond_its_target_is_at_its_end():
    """The target was lowered, or is counted otherwise now: nothing is left to do."""
    target = Target(61, 3009, 50)
    assert target.reached(70, 3500)
    assert target.last_step(70, 3500) == 70
    assert target.shorter_shard(3500, 10) == 0


def test_more_steps_than_can_be_counted_are_refused():
    """The step is an int32 on the device."""
    with pytest.raises(ConfigError) as caught:
        target_of(config(epochs=10**9, batch_size=1), 100)
    assert str(caught.value) == (
        "epochs: 1000000000 of 100 samples are 100000000000 steps of batch_size=1; "
        "at most 2147483647 can be counted"
    )


@QUICK
@given(ends, sizes, st.lists(ends, max_size=3))
def test_the_last_step_is_foretold_at_every_step(first, size, more):
    """Also for a run that is made longer when it has ended, with smaller batches on the way."""
    step = cursor = 0
    for end in sorted([first, *more]):
        target = Target(-(-end // size), end, size)
        foretold = {target.last_step(step, cursor)}
        while not target.reached(step, cursor):
            assert 0 < target.batch(cursor) <= size
            step, cursor = step + 1, cursor + target.batch(cursor)
            foretold.add(target.last_step(step, cursor))
        assert cursor == end and foretold == {step}
    assert more or step == target.steps


@QUICK
@given(
    length=st.integers(1, 60),
    shard_size=st.integers(1, 7),
    shards=st.integers(1, 9),
    epochs=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_every_sample_is_read_once_an_epoch_over_all_workers_and_steps(
    length, shard_size, shards, epochs, shuffle, data
):
    """With any number of workers at each step; also if the run ends and is then made longer."""
    read: list[int] = []
    source = Source({"x": np.arange(length)}, "dataset()")
    step = cursor = 0
    for end in sorted(epochs):
        size = shard_size * shards
        target = target_of(config(epochs=end, batch_size=size, batch_shards=shards), length)
        reader = ShardReader(
            source,
            seed=3,
            shuffle=shuffle,
            batch_size=size,
            batch_shards=shards,
            prefetch_steps=0,
            threads=1,
            end=target.samples,
        )
        shorter = target.shorter_shard(cursor, shards)
        while not target.reached(step, cursor):
            ranks = data.draw(st.integers(1, 5))
            held = [s for rank in range(ranks) for s in shards_of(rank, ranks, shards)]
            batches = [batch[0].tolist() for _, batch in reader.shards(cursor, held) if batch]
            counts = [len(batch) for batch in batches]
            assert sum(counts) == target.batch(cursor)
            assert counts[:-1] == [shard_size] * (len(counts) - 1)
            read += sum(batches, [])
            step, cursor = step + 1, cursor + sum(counts)
            assert counts[-1] == (target.reached(step, cursor) and shorter or shard_size)
        assert cursor == end * length == len(read)
        reader._pool.shutdown()
    for epoch in range(max(epochs)):
        used = Counter(read[epoch * length : (epoch + 1) * length])
        assert used == Counter(range(length))


def test_status_line_shows_the_last_step_and_the_time_left():
    """Of epochs the supervisor knows what a worker has found out: here 21 steps, the last of 3."""
    board = Board("r")
    board.event(Event(0.0, "run_started", {"config": config(epochs=1).model_dump()}))
    fields = {"loss": 1.0, "workers": (0,), "step_time_s": 0.1}
    fields |= {"digest": "", "rewound": False, "metrics": {}}
    board.commit(Commit(t=1.0, step=1, samples=50, **fields))
    assert board.now(1.0).target is None
    known = {"steps": 21, "samples": 1003, "dataset_length": 1003}
    board.event(Event(1.5, "target_known", known))
    board.commit(Commit(t=2.0, step=2, samples=100, **fields))
    line = one_line(board.now(2.0))
    assert line.startswith("step 2/21  loss 1") and "0:19 left" in line
