"""Deaths of the coordinator and the supervisor, and what logs must take."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.checks import check_each_step_once, check_nothing_left
from tests.runs import ENDLESS, is_alive, running


def test_coordinator_death_restarts_all_from_the_newest_checkpoint(tmp_path):
    """All workers come back with the saved state; nothing starts over silently."""
    with running(
        "tests/paced.yaml", tmp_path / "run", "steps=300", "checkpoint.every_steps=25"
    ) as run:
        saved = run.wait_for_event("checkpoint_saved")
        os.kill(run.events("coordinator_started")[-1]["pid"], signal.SIGKILL)
        restored = run.wait_for_event("checkpoint_restored")
        assert restored["step"] >= saved["step"]
        assert run.finish() == 0
        assert sorted({m["step"] for m in run.metrics()}) == list(range(1, 301))
        assert run.events("coordinator_exited")[0]["signal"] == "SIGKILL"
        assert "the coordinator died of SIGKILL" in run.output
        check_nothing_left(run)


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_is_replaced(tmp_path):
    """Its workers end, since it does not answer; it would never acknowledge their fences."""
    sets = ["cluster.heartbeat_timeout_s=2", "checkpoint.every_steps=25", "steps=200"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_event("checkpoint_saved", step=50)
        os.kill(run.events("coordinator_started")[0]["pid"], signal.SIGSTOP)
        assert run.finish() == 0
        assert run.events("coordinator_exited")[0]["signal"] == "SIGKILL"
        assert "the coordinator has not acknowledged a fence for 10 s" in run.output
        assert sorted({m["step"] for m in run.metrics()}) == list(range(1, 201))
        check_nothing_left(run)


def test_supervisor_death_leaves_no_process_and_the_same_command_continues(tmp_path):
    """After its SIGKILL, workers, coordinator and what user code forked are gone; a rerun works."""
    sets = ["trainer=tests/trainers.py:Forks", "steps=300", "checkpoint.every_steps=20"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_event("checkpoint_saved")
        logs = [run.log(w) for w in range(4)]
        forked = [int(log.split("forked ")[1].split()[0]) for log in logs]
        assert all(is_alive(pid) for pid in forked)
        run.process.kill()
        run.process.wait()
        end = time.monotonic() + 15
        while (run.processes() or any(map(is_alive, forked))) and time.monotonic() < end:
            time.sleep(0.02)
        assert run.processes() == [] and not any(map(is_alive, forked))
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        assert sorted({m["step"] for m in run.metrics()}) == list(range(1, 301))


def test_rerun_right_after_the_supervisor_was_killed_waits_for_its_remains(tmp_path):
    """A stale lock is not in the way, and two runs never share a run directory."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=150") as run:
        run.wait_for_step(10)
        run.process.kill()
        run.process.wait()
        with running("tests/paced.yaml", tmp_path / "run", "steps=150") as again:
            assert again.finish() == 0
            assert sorted({m["step"] for m in again.metrics()}) == list(range(1, 151))


def test_terminated_worker_is_replaced_like_a_killed_one(tmp_path):
    """SIGTERM or SIGINT to one worker is that worker's death, nobody else's."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        for worker, number in ((1, signal.SIGTERM), (3, signal.SIGINT)):
            seen = len(run.events())
            run.kill(worker, number=number)
            run.wait_back(worker, seen)
        steps = run.stop()
        check_each_step_once(run, steps)
        assert [e["signal"] for e in run.events("worker_exited") if "signal" in e] == [
            "SIGTERM",
            "SIGINT",
        ]


def test_logs_keep_whole_lines_and_the_last_words(tmp_path):
    """200 long lines, bytes that are no text and an unfinished line, then SIGKILL: all is kept."""
    with running(
        "tests/paced.yaml", tmp_path / "run", "trainer=tests/trainers.py:Talks", "steps=100"
    ) as run:
        assert run.finish() == 0
        lines = (run.run_dir / "logs" / "worker-0.log").read_text().splitlines()
        for i in range(200):
            assert f"line {i:03d} " + "x" * 200 in lines
        assert "\\xff\\xfe not text" in lines and "the last words" in lines
        check_nothing_left(run)
