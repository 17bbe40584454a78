"""Real runs on GPUs: deaths, failed attempts and hangs while the others are inside NCCL.

On a machine with one GPU the two workers share it (CUDA_VISIBLE_DEVICES=0,0).
"""

from __future__ import annotations

import glob
import importlib.util
import os
import signal

import pytest

from tests.checks import (
    check_each_step_once,
    check_nothing_left,
    check_nothing_lost,
)
from tests.faults.test_attempt_failed import PLACES, failing, failures
from tests.faults.test_hangs import check_device_hang
from tests.runs import ENDLESS, running

HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*")) and any(
    importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no /dev/nvidia*, or no CUDA plugin of jax"),
]
ON_GPU = ["cluster.platform=gpu", "cluster.workers=2"]
# The watchdog would let everybody go after 30 s; nothing may need it.
PATIENT = [*ON_GPU, "cluster.hang_timeout_s=30"]
SOON_S = 8.0


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """Two GPUs, or the only one twice."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ and len(glob.glob("/dev/nvidia[0-9]*")) == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")


@pytest.mark.parametrize("config", ["linear", "digits"])
def test_recipe_trains(tmp_path, config):
    """To its end, on two workers."""
    with running(f"configs/{config}.yaml", tmp_path / "run", *PATIENT) as run:
        assert run.finish() == 0
        check_each_step_once(run, run.metrics()[-1]["step"])
        check_nothing_left(run)


def test_no_attempt_fails_by_itself(tmp_path):
    """XLA called 3 of 1,000 sums' own devices unknown as long as a thread launched them."""
    sets = ["steps=4000", "trainer_args={pause_s: 0.0}", *PATIENT]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_nothing_lost(run, 4000)
        assert run.events("attempt_failed", "step_aborted") == []


def test_killed_workers_leave_the_other_training_and_come_back(tmp_path):
    """Worker 1 and worker 0 in turn: the other leaves the cancelled all-reduce at once."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS, *PATIENT) as run:
        for worker in (1, 0, 1):
            run.wait_for_step((run.metrics() or [{"step": 0}])[-1]["step"] + 25)
            seen = len(run.events())
            t = run.kill(worker)
            alone = [1 - worker]
            commit = run.wait_until(
                "the other's next commit",
                lambda t=t, a=alone: next(
                    (m for m in run.metrics() if m["t"] > t and m["workers"] == a), None
                ),
            )
            assert commit["t"] - t < SOON_S
            run.wait_back(worker, seen)
        check_nothing_lost(run, run.stop())


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("where", PLACES.values(), ids=PLACES)
def test_failed_attempts_end_no_process(tmp_path, where, worker):
    """Nobody dies: the other is let out of NCCL, and both try again."""
    sets = ["steps=300", *PATIENT, *failing(where, worker)]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_nothing_lost(run, 300)
        assert len(failures(run)) >= 5
        of_itself = [e for e in run.events("attempt_failed") if "not found" in e["reason"]]
        assert not of_itself
        for failure in failures(run):
            commit = next(m for m in run.metrics() if m["t"] > failure["t"])
            assert commit["t"] - failure["t"] < SOON_S
        assert [e["incarnation"] for e in run.events("worker_started")] == [0, 0]


@pytest.mark.parametrize("worker", [0, 1])
def test_stopped_worker_is_named_ended_and_replaced(tmp_path, worker):
    """SIGSTOP while the other is inside NCCL."""
    sets = [ENDLESS, *ON_GPU, "cluster.hang_timeout_s=3"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(25)
        seen = len(run.events())
        run.kill(worker, number=signal.SIGSTOP)
        run.wait_for_event("hang_detected", worker=worker)
        run.wait_back(worker, seen)
        check_nothing_lost(run, run.stop())
        assert len(run.events("hang_detected")) == 1


@pytest.mark.parametrize("worker", [0, 1])
def test_gpu_that_computes_for_ever_is_its_worker_s_fault(tmp_path, worker):
    """The other waits in the reduction, and is not taken for the culprit."""
    check_nothing_lost(check_device_hang(tmp_path / "run", worker, "steps=300", *ON_GPU), 300)
