"""Alive but stuck: the culprit is told from those that wait for it, shown, ended and replaced."""

from __future__ import annotations

import signal

import pytest

from ftrain.chaos.orders import order
from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import ENDLESS, Run, running

HANG_TIMEOUT_S = 3
BOUND_S = HANG_TIMEOUT_S + 1
ORDERED = "trainer=tests/trainers.py:Ordered"
CONFIG = (ORDERED, f"cluster.hang_timeout_s={HANG_TIMEOUT_S}")


@pytest.mark.parametrize(
    "fault, at, function",
    [
        pytest.param("sleep", "dataset", "batch_at", marks=pytest.mark.slow),
        pytest.param("sleep", "hook", "phase", marks=pytest.mark.slow),
        ("spin", "update", "_spin"),
        pytest.param("device", "gradient", "_device", marks=pytest.mark.slow),
        ("stop", "reduce", None),
    ],
)
def test_a_stuck_worker_is_shown_ended_and_replaced(tmp_path, fault, at, function):
    """Blocked in the data set or a hook, spinning in C, in a device call, stopped."""
    run_dir = tmp_path / "run"
    worker = 0 if at == "hook" else 2
    with running("tests/paced.yaml", run_dir, *CONFIG, ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        path = order(run_dir, fault, at, worker, seconds=3600)
        run.wait_until("the order is taken", lambda: not path.exists())
        last = run.metrics()[-1]["t"]
        hang = run.wait_for_event("hang_detected", after=seen)
        assert hang["worker"] == worker
        assert hang["t"] - last < BOUND_S + 1  # it may have been at work for a moment before
        run.wait_back(worker, seen)
        steps = run.stop()
        check_each_step_once(run, steps)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert [e["worker"] for e in run.events("hang_detected")] == [worker]
        told = run.output
        assert f"worker {worker} (pid " in told and "no progress in" in told
        if function is None:
            assert "it was stopped by a signal" in told
        else:
            assert f", in {function}" in told
            assert function in run.log(worker)


@pytest.mark.slow
def test_a_stopped_worker_that_is_continued_commits_and_writes_nothing(tmp_path):
    """It is fenced and killed while it is stopped: SIGCONT comes to a process that has ended."""
    with running("tests/paced.yaml", tmp_path / "run", *CONFIG, ENDLESS) as run:
        run.wait_for_step(20)
        seen, pid = len(run.events()), run.pid(1)
        run.kill(1, number=signal.SIGSTOP)
        run.wait_for_event("worker_fenced", after=seen, worker=1)
        with pytest.raises(ProcessLookupError):
            run.signal_pid(pid, signal.SIGCONT)
        run.wait_back(1, seen)
        check_each_step_once(run, run.stop())
        check_replicas_agree(run)


def test_a_worker_that_was_stopped_for_a_while_goes_on_as_if_nothing_were(tmp_path):
    """Continued before the timeout, it costs the time it was stopped and nobody's membership."""
    with running("tests/paced.yaml", tmp_path / "run", *CONFIG, "steps=300") as run:
        run.wait_for_step(20)
        run.kill(1, number=signal.SIGSTOP)
        run.wait_until("the others wait for it", lambda: run.is_stuck())
        run.kill(1, number=signal.SIGCONT)
        assert run.finish() == 0
        check_each_step_once(run, 300)
        assert run.events("worker_exited", "step_aborted") == run.events("worker_exited")
        assert {e["reason"] for e in run.events("worker_exited")} == {"the end of the run"}


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [12, 45])
def test_a_slow_peer_is_not_a_dead_peer(tmp_path, late_s):
    """Later with its batch than the heartbeat, or gloo's 30 s: it costs that, and no membership."""
    sets = [ORDERED, "steps=60", "cluster.heartbeat_timeout_s=5"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(20)
        path = order(run.run_dir, "sleep", "dataset", 2, seconds=late_s)
        run.wait_until("the order is taken", lambda: not path.exists())
        assert run.finish() == 0
        check_each_step_once(run, 60)
        slowest = max(m["step_time_s"] for m in run.metrics())
        assert slowest > late_s - 1
        assert run.events("hang_detected", "step_aborted") == []
        assert {e["reason"] for e in run.events("worker_exited")} == {"the end of the run"}
        assert len(run.events("view_changed")) == 1


@pytest.mark.parametrize(
    "at", [pytest.param(p, marks=pytest.mark.slow) for p in ("open", "restore", "compile")]
)
def test_a_start_that_never_ends_is_bounded_and_named(tmp_path, at):
    """Ten times the timeout where much may take long: then it is ended, and tried again."""
    sets = [ORDERED, "steps=40", "cluster.hang_timeout_s=1"]
    order(tmp_path / "run", "sleep", at, 0, seconds=3600)
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        hang = run.wait_for_event("hang_detected")
        assert (hang["worker"], hang["phase"]) == (0, at) and 10 < hang["seconds"] < 12
        assert run.finish() == 0
        check_each_step_once(run, 40)


@pytest.mark.slow
def test_who_waits_for_a_slow_start_is_not_stuck(tmp_path):
    """However long: a start has its own limit, and those that are further are not at fault."""
    sets = [ORDERED, "steps=40", "cluster.hang_timeout_s=1"]
    order(tmp_path / "run", "sleep", "start", 2, seconds=14)
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 40)
        assert run.events("hang_detected") == []
        assert {e["reason"] for e in run.events("worker_exited")} == {"the end of the run"}


@pytest.mark.parametrize(
    "at", ["evaluate", *(pytest.param(p, marks=pytest.mark.slow) for p in ("save", "compile"))]
)
def test_what_is_slow_by_nature_is_no_hang(tmp_path, at):
    """A compilation, a checkpoint: untimed. A part of an evaluation: as long as a step may take."""
    seconds = 2.5 if at == "evaluate" else HANG_TIMEOUT_S + 1.5
    with running("tests/paced.yaml", tmp_path / "run", *CONFIG, "steps=40") as run:
        order(run.run_dir, "sleep", at, 0, seconds=seconds)
        assert run.finish() == 0
        assert list((run.run_dir / "orders").glob("*.taken-0"))
        check_each_step_once(run, 40)
        assert run.events("hang_detected") == []


def check_device_hang(run_dir, worker: int, *sets: str) -> Run:
    """The device of one of two workers computes for ever, and that one is taken for the culprit."""
    sets = [
        "trainer=tests/trainers.py:SpinsOnDevice",
        f"trainer_args={{worker: {worker}, pause_s: 0.006}}",
        "cluster.hang_timeout_s=3",
        *sets,
    ]
    with running("tests/paced.yaml", run_dir, *sets) as run:
        hang = run.wait_for_event("hang_detected")
        assert (hang["worker"], hang["phase"]) == (worker, "gradient")
        assert run.finish() == 0
        assert len(run.events("hang_detected")) == 1
        return run


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
def test_device_that_computes_for_ever_is_its_worker_s_fault(tmp_path, worker):
    """The others wait in the reduction, and are not taken for the culprit: nothing is lost."""
    run = check_device_hang(tmp_path / "run", worker, "cluster.workers=2", "steps=200")
    check_each_step_once(run, 200)
    assert run.events("checkpoint_restored") == []
