"""A death at the beginning of every phase there is: a new phase is covered by itself."""

from __future__ import annotations

import time

import pytest

from ftrain.beat import PHASES
from ftrain.chaos.orders import order
from tests.checks import check_nothing_lost
from tests.runs import ENDLESS, running

CONFIG = (
    "trainer=tests/trainers.py:Ordered",
    ENDLESS,
    "cluster.workers=4",
    "cluster.min_workers=3",
    "eval.every_steps=40",
    "digest_every_steps=10",
    "restart.backoff_s=0.2",
)


BEFORE_TRAINING = ("start", "open", "connect", "compile", "ready", "restore")
# All of them with `-m slow`; here those in which the others are most entangled with the dead one.
OFTEN = ("settle", "sync", "reduce", "update")


@pytest.mark.parametrize(
    "phase",
    [p if p in OFTEN else pytest.param(p, marks=pytest.mark.slow) for p in PHASES],
)
def test_death_at_the_beginning_of_a_phase(tmp_path, phase):
    """Whoever comes to it first dies there: at the start, and again when two of four are killed."""
    run_dir = tmp_path / "run"
    orders = [order(run_dir, "kill", phase)]
    profile = ["profile.step=15"] * (phase == "profile")
    with running("tests/paced.yaml", run_dir, *CONFIG, *profile) as run:
        run.wait_for_step(20)
        if phase not in BEFORE_TRAINING and phase not in ("save", "pause"):
            taken(run, orders[0])
        if not orders[0].exists():
            run.wait_until("the death", lambda: run.events("worker_exited"))
        run.wait_until("all train", lambda: all_train(run))
        seen = len(run.events())
        if phase not in ("connect", "restore", "save", "profile"):  # once in a run
            orders.append(order(run_dir, "kill", phase))
        run.kill(1, 2)
        for worker in (1, 2):
            run.wait_back(worker, seen)
        if phase != "save":
            taken(run, orders[-1])
        last = run.stop()
        assert not any(path.exists() for path in orders)
        check_nothing_lost(run, last)


def all_train(run):
    """Whether every process that was started is alive and has been in the newest commit."""
    started, exited = run.events("worker_started"), run.events("worker_exited")
    newest = run.metrics()[-1]
    last = max(e["t"] for e in started)
    return (
        len(started) - len(exited) == 4 and newest["t"] > last and newest["workers"] == [0, 1, 2, 3]
    )


def taken(run, path):
    end = time.monotonic() + 20
    while path.exists():
        assert time.monotonic() < end and run.process.poll() is None, f"nobody came to {path.name}"
        time.sleep(0.02)
