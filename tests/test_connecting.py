"""Sums on GPU: the first of a view, which may be too early, and those that are only queued."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ftrain.communicators import Cutter
from ftrain.errors import AttemptFailedError
from ftrain.mesh import DataPlane

THREE, FOUR = [jnp.zeros((1, 1, 3))], [jnp.zeros((1, 1, 4))]
STALE = "FAILED_PRECONDITION: Incarnation id 6319764610957958989 is stale [executable_name='f']"


class Plane(DataPlane):
    """Its program fails with the `errors`, one after the other, and then succeeds."""

    def __init__(self, *errors: str):
        self._errors, self.calls = list(errors), 0
        self._cutter = SimpleNamespace(failed=threading.Event())

    def _run(self, program, joined):
        self.calls += 1
        if self._errors:
            raise jax.errors.JaxRuntimeError(self._errors.pop(0))
        return joined


def test_an_incarnation_that_is_not_known_yet_is_waited_for():
    """The others are in NCCL already: an attempt that failed for this would leave them there."""
    plane = Plane(STALE, STALE)
    assert plane._run_known(None, ["sums"]) == ["sums"] and plane.calls == 3


def test_a_view_that_has_failed_is_not_waited_for():
    """Then the incarnation may be stale indeed."""
    plane = Plane(STALE, STALE)
    plane._cutter.failed.set()
    with pytest.raises(jax.errors.JaxRuntimeError, match="is stale"):
        plane._run_known(None, [])
    assert plane.calls == 1


def test_an_incarnation_that_stays_unknown_fails_the_attempt(monkeypatch):
    """After a bounded wait: its worker may have failed an attempt of its own meanwhile."""
    monkeypatch.setattr("ftrain.mesh.WATCH_LATE_S", 0.05)
    plane = Plane(*[STALE] * 1000)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is stale"):
        plane._run_known(None, [])
    assert 1 < plane.calls < 1000


def test_other_errors_are_not_waited_out():
    """Gloo's, for one."""
    plane = Plane("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        plane._run_known(None, [])
    assert plane.calls == 1


class Queueing(DataPlane):
    """As on a GPU, of a view of two, with the `program` for all that it is asked to do."""

    def __init__(self, cutter, program):
        self.workers, self._home = [0, 1], SimpleNamespace(platform="gpu")
        self._cutter, self._program_of_all, self._ran = cutter, program, set()

    def _joined(self, buffer):
        return buffer

    def _own(self, array):
        return array

    def _program(self, key, body, buffers):
        return self._program_of_all


@pytest.fixture
def failed():
    """Set when the view has failed."""
    return threading.Event()


@pytest.fixture
def queueing(failed):
    """Makes a plane that has connected for sums of three already."""
    cutters = []

    def made(program, stuck=lambda: None) -> Queueing:
        cutters.append(Cutter(failed.wait, set, set(), stuck))
        plane = Queueing(cutters[-1], lambda joined: joined)
        plane.begin_sum(THREE)
        plane._program_of_all = program
        return plane

    yield made
    for cutter in cutters:
        cutter.end()
    failed.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ftrain-"):
            thread.join(20)


def test_the_first_sum_of_each_size_is_waited_for_and_the_others_are_queued(queueing):
    """NCCL connects in the first, and holds whoever launches it until the others have come too."""
    plane, told = queueing(lambda joined: joined), []
    for buffers, waits in ((THREE, False), (FOUR, True), (THREE, False), (FOUR, False)):
        summing = plane.begin_sum(buffers, lambda: told.append(1))
        assert bool(told) == waits
        summing.result()
        assert told == [1]
        told.clear()


def test_a_launch_that_the_failure_of_the_view_does_not_end_ends_the_process(
    monkeypatch, failed, queueing
):
    """It holds the device, and with it whoever meets this worker next."""
    monkeypatch.setattr("ftrain.communicators.STUCK_S", 0.05)
    over, launching = threading.Event(), threading.Event()

    def hangs(joined):
        launching.set()
        assert over.wait(20)
        return joined

    plane = queueing(hangs, stuck=over.set)
    threading.Thread(target=lambda: launching.wait(20) and failed.set(), daemon=True).start()
    plane.begin_sum(THREE)
    assert over.is_set()


def test_nothing_is_launched_in_a_view_that_has_failed(failed, queueing):
    """Nobody would meet it there."""
    plane = queueing(None)
    failed.set()
    assert plane._cutter.failed.wait(20)
    with pytest.raises(AttemptFailedError, match="another member's"):
        plane.begin_sum(THREE)
