"""`profile`: a trace of some steps of one worker, which a death costs and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.beat import Beat
from ftrain.config import Config
from ftrain.profiling import Profiler
from tests.checks import check_each_step_once
from tests.runs import running


def traces(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "profile").rglob("*.xplane.pb"))


def profiler(monkeypatch, calls: list) -> Profiler:
    import jax

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    values = {"trainer": "a.py:T", "run_dir": "r", "steps": 100, "batch_size": 12}
    config = Config.model_validate({**values, "profile": {"step": 5, "steps": 3}})
    return Profiler(config, Beat(Beat.create("test")))


def test_it_goes_from_its_first_step_to_its_last_attempts_included(monkeypatch):
    """Whoever becomes the lowest later, or comes back to a step, begins no second one."""
    calls: list[str] = []
    one = profiler(monkeypatch, calls)
    for step in (3, 4, 5, 5, 6, 7):
        one.before(step, True)
    assert calls == ["start"]
    one.before(8, False)
    one.before(9, True)
    assert calls == ["start", "stop"]


def test_it_ends_with_the_run(monkeypatch):
    calls: list[str] = []
    one = profiler(monkeypatch, calls)
    one.before(5, True)
    one.before(None, False)
    one.before(None, False)
    assert calls == ["start", "stop"]


def test_others_than_the_lowest_make_no_trace(monkeypatch):
    calls: list[str] = []
    one = profiler(monkeypatch, calls)
    for step in range(1, 10):
        one.before(step, False)
    assert calls == []


def test_a_run_leaves_a_trace_of_one_worker(tmp_path):
    sets = ["steps=40", "profile.step=10", "profile.steps=3", "cluster.workers=2"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 40)
    assert len(traces(run.run_dir)) == 1


@pytest.mark.slow
def test_a_death_during_it_costs_the_trace_alone(tmp_path):
    """The worker that traces is killed: the others go on, and no one begins another."""
    sets = ["steps=120", "profile.step=10", "profile.steps=90", "cluster.workers=2"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(30)
        run.kill(0)
        assert run.finish() == 0
        check_each_step_once(run, 120)
    assert traces(run.run_dir) == []
