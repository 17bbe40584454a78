"""Several faults at once or in a row, and at the moments that are hardest."""

from __future__ import annotations

import os
import signal

import pytest

from ftrain.chaos.orders import order
from tests.checks import (
    check_deaths_explained,
    check_each_step_once,
    check_nothing_left,
    check_nothing_lost,
    check_replicas_agree,
)
from tests.runs import ENDLESS, running

ORDERED = "trainer=tests/trainers.py:Ordered"


def test_the_donor_dies_while_it_gives_its_state(tmp_path):
    """The next of those who have the state gives it; nothing is rewound."""
    with running("tests/paced.yaml", tmp_path / "run", ORDERED, ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        run.kill(3)
        run.wait_until("three train", lambda: run.metrics()[-1]["workers"] == [0, 1, 2])
        path = order(run.run_dir, "kill", "sync", 0)
        synced = run.wait_back(3, seen)
        run.wait_back(0, seen)
        assert not path.exists() and synced["donor"] != 0
        check_nothing_lost(run, run.stop())


@pytest.mark.parametrize(
    "worker, before_end",
    [(0, 1)]
    + [pytest.param(*p, marks=pytest.mark.slow) for p in ((0, 2), (0, 3), (2, 1), (2, 2), (2, 3))],
)
def test_a_death_in_one_of_the_last_steps(tmp_path, before_end, worker):
    """The run ends at its target with every step once, saved, whoever died."""
    with running("tests/paced.yaml", tmp_path / "run", ORDERED, "steps=40") as run:
        order(run.run_dir, "kill", "update", worker, after_step=40 - before_end)
        assert run.finish() == 0
        died = [e for e in run.events("worker_exited") if "signal" in e]
        assert [e["worker"] for e in died] == [worker]
        check_each_step_once(run, 40)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert run.events("checkpoint_saved")[-1]["step"] == 40


def test_a_worker_that_always_dies_is_put_in_quarantine_and_the_others_train(tmp_path):
    """It is no reason to stop: told once it is over its budget, and tried again now and then."""
    sets = [ORDERED, ENDLESS, "restart={max_failures: 2, backoff_s: 0.1, backoff_max_s: 1}"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(10)
        for incarnation in range(1, 30):
            order(run.run_dir, "kill", "gradient", 3, incarnation=incarnation)
            if incarnation == 1:
                run.kill(3)
            path = run.run_dir / "orders" / "3-gradient"
            run.wait_until("it dies again", lambda path=path: not path.exists())
            if len(run.events("worker_quarantined")) >= 2:
                break
        run.wait_for_steps(10)
        check_each_step_once(run, run.stop())
        check_replicas_agree(run)
        assert len(run.events("worker_quarantined")) >= 2
        assert "worker 3 has failed more than max_failures=2 times in a row" in run.output


def test_every_signal_that_ends_a_worker_gives_a_replacement(tmp_path):
    """Aborted, segmentation fault, bus error, or an exit code that looks like one."""
    with running("tests/paced.yaml", tmp_path / "run", ORDERED, ENDLESS) as run:
        run.wait_for_step(20)
        for worker, number in ((1, signal.SIGABRT), (2, signal.SIGSEGV), (3, signal.SIGBUS)):
            seen = len(run.events())
            run.kill(worker, number=number)
            died = run.wait_for_event("worker_exited", after=seen, worker=worker)
            assert died["signal"] == number.name
            run.wait_back(worker, seen)
        seen = len(run.events())
        order(run.run_dir, "leave", "gradient", 0, code=139)
        assert run.wait_for_event("worker_exited", after=seen, worker=0)["exit_code"] == 139
        run.wait_back(0, seen)
        steps = run.stop()
        check_each_step_once(run, steps)
        check_replicas_agree(run)
        check_deaths_explained(run)


@pytest.mark.parametrize(
    "at", ["sync", *(pytest.param(p, marks=pytest.mark.slow) for p in ("update", "save"))]
)
def test_the_coordinator_dies_at_a_bad_moment(tmp_path, at):
    """In a step, in a rejoin, in the last checkpoint: all come back from the newest one."""
    sets = [ORDERED, "steps=240", "checkpoint.every_steps=25"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        saved = run.wait_for_event("checkpoint_saved")
        pid = run.events("coordinator_started")[-1]["pid"]
        order(run.run_dir, "coordinator", at, pid=pid)
        if at == "sync":
            run.kill(2)
        assert run.finish() == 0
        assert [e["signal"] for e in run.events("coordinator_exited")] == ["SIGKILL"]
        restored = run.events("checkpoint_restored")[-1]["step"]
        assert restored >= saved["step"]
        assert sorted({m["step"] for m in run.metrics()}) == list(range(1, 241))
        again = [m["step"] for m in run.metrics() if m.get("rewound")]
        assert again == list(range(restored + 1, restored + 1 + len(again)))
        assert "the coordinator died of SIGKILL" in run.output
        check_nothing_left(run)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGABRT,
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in (signal.SIGSEGV, signal.SIGQUIT, signal.SIGUSR1)
        ),
    ],
    ids=lambda n: n.name,
)
def test_the_supervisor_dies_by_any_signal_and_leaves_nothing(tmp_path, number):
    """Those it catches stop the run in order; after any other one all processes are gone."""
    with running("tests/paced.yaml", tmp_path / "run", ORDERED, "steps=4000") as run:
        run.wait_for_step(5)
        os.kill(run.process.pid, number)
        assert run.process.wait(10) == -number
        run.wait_gone(15)
