"""Gradients begun ahead of the barrier: used for the state they are of, and for no other (R1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftrain.config import Config
from ftrain.mesh import Summing
from ftrain.outcome import Progress
from ftrain.state import Committed
from ftrain.step import Begun
from ftrain.stepping import Stepping
from ftrain.target import Target

BATCH = 6
FIRST = Committed(0, 0, ["leaf"])


class Programs:
    """Records of which state each gradient was computed; an update makes a state of its own."""

    at_once = 1

    def __init__(self):
        self.began: list[Committed] = []
        self.one_by_one: list[bool] = []
        self.stop, self.found = False, None

    def gradients(self, state, batches, *, stop, one_by_one):
        self.began.append(state)
        self.one_by_one.append(one_by_one)
        return [(state, [shard for shard, _ in batches])]

    def update(self, state, sums, samples):
        self.used = sums
        return Begun(Committed(state.step + 1, state.cursor + samples, [object()]), None)

    def result(self, state, begun, sums):
        return {"loss": 1.0}, self.stop, self.found


class Reader:
    """Has every batch at once, but for those of `late`."""

    def __init__(self):
        self.late: set[int] = set()

    def ready(self, cursor, shards):
        return None if cursor in self.late else self.shards(cursor, shards)

    def shards(self, cursor, shards):
        return [(shard, ["batch"]) for shard in shards]

    def read_ahead(self, cursor, shards):
        pass


@pytest.fixture
def parts() -> Any:
    config = Config(
        trainer="a.py:T",
        run_dir="r",
        steps=9,
        batch_size=BATCH,
        batch_shards=3,
        on_nonfinite="skip",
    )
    programs, reader = Programs(), Reader()
    programs.lacks = lambda batch: False
    beat = SimpleNamespace(phase=lambda name: None)
    target = Target(9, None, BATCH)
    digests = lambda state: b""  # noqa: E731
    stepping = Stepping(config, target, programs, digests, reader, beat, lambda: False, None)
    return SimpleNamespace(stepping=stepping, programs=programs, reader=reader)


def plane(workers: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(
        workers=list(range(workers)), rank=rank, begin_sum=lambda own, ready: Summing(own)
    )


def step(parts: Any, state: Committed, on: Any = None) -> Committed:
    return parts.stepping.step(on or plane(), state, Progress()).state


def test_a_committed_steps_gradients_were_begun_before_its_barrier(parts):
    """Each is computed once, and of the state that its step starts from."""
    second = step(parts, FIRST)
    assert parts.programs.began == [FIRST, second]
    third = step(parts, second)
    assert parts.programs.began == [FIRST, second, third]
    assert parts.programs.used[0][0] is second


def test_a_step_that_was_not_committed_leaves_nothing_to_the_next(parts):
    """The state is the old one: what was begun of the new one is not used."""
    step(parts, FIRST)
    step(parts, FIRST)
    assert parts.programs.used[0][0] is FIRST


def test_a_state_that_only_looks_the_same_is_another(parts):
    """From a sync, or with a bit flipped: equal numbers say nothing."""
    second = step(parts, FIRST)
    copied = second._replace(leaves=list(second.leaves))
    step(parts, copied)
    assert parts.programs.used[0][0] is copied


def test_other_shards_are_computed_anew(parts):
    """A worker that has joined takes some of them."""
    second = step(parts, FIRST)
    step(parts, second, plane(3, 1))
    assert parts.programs.used[0] == (second, [1])


def test_nothing_is_begun_without_its_samples(parts):
    """A data set that is slow, or broken, must not hold up the step before."""
    parts.reader.late = {BATCH}
    step(parts, FIRST)
    assert parts.programs.began == [FIRST]


def test_nothing_is_begun_for_the_step_after_the_last(parts):
    """Nor kept once somebody was asked to stop, or a step was skipped."""
    step(parts, Committed(8, 8 * BATCH, []))
    assert len(parts.programs.began) == 1
    parts.programs.stop = True
    second = step(parts, FIRST)
    parts.programs.began.clear()
    step(parts, second)
    assert parts.programs.began[0] is second


def test_a_step_that_is_not_finite_with_several_shards_at_once_is_taken_again_in_the_next_block(
    parts,
):
    """Nothing is committed but that; a cancelled collective may show it to one member alone."""
    parts.programs.at_once, parts.programs.found = 3, object()
    new = parts.stepping.step(plane(), FIRST, Progress(skipped=2))
    assert new.state is FIRST and new.metrics is None
    assert new.progress == Progress(skipped=2, one_by_one=True)
    parts.programs.found = None
    again = parts.stepping.step(plane(), FIRST, new.progress)
    assert parts.programs.one_by_one == [False, False, True, False]
    assert again.state.step == 1 and again.progress == Progress()
