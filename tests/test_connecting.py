"""The first sum of a view on GPU, where a backend may not have heard of its members yet."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import jax
import pytest

from ftrain.mesh import DataPlane

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
