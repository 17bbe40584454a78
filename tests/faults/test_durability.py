"""What is lost, and what is not, when everything dies, the disk is full or the run is to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ftrain
from ftrain.chaos.orders import order
from ftrain.checkpoint import read_checkpoint, steps_in
from ftrain.memory_tier import memory_folder, snapshots_in
from tests.checks import check_each_step_once, check_history, check_nothing_left
from tests.runs import ENDLESS, REPOSITORY, Run, environment, is_alive, running

PACED = "tests/paced.yaml"


def kill_everything(run: Run) -> None:
    """The supervisor first, so that it cannot see the others die; then all, in no time."""
    for pid in (run.process.pid, *run.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    run.wait_gone(15)


def test_when_everything_is_killed_memory_continues_and_goes_at_the_end(tmp_path):
    """No checkpoint on disk: at most the interval of snapshots is lost, and done again."""
    sets = ["steps=150", "checkpoint.memory_every_s=0.2"]
    run_dir = tmp_path / "run"
    with running(PACED, run_dir, *sets) as run:
        run.wait_for_step(60)
        kill_everything(run)
        last = run.metrics()[-1]
        assert steps_in(run_dir / "checkpoints") == []
    with running(PACED, run_dir, *sets) as run:
        assert run.finish() == 0
        [restored] = run.events("checkpoint_restored")
        assert restored["tier"] == "memory"
        at = next(m["t"] for m in run.metrics() if m["step"] == restored["step"])
        assert last["t"] - at < 2.0
        check_history(run)
        assert {m["step"] for m in run.metrics()} == set(range(1, 151))
        assert f"continuing from the snapshot in memory of step {restored['step']}" in run.output
        check_nothing_left(run)
        assert not memory_folder(str(run_dir), "auto").exists()


def test_a_save_outlives_its_worker_and_is_begun_again_when_its_saver_dies(tmp_path):
    """The saver is stopped while a save is due, the worker that asked is killed, then the saver."""
    with running(PACED, tmp_path / "run", ENDLESS, "checkpoint.every_steps=100") as run:
        saver = run.wait_for_event("saver_started")["pid"]
        os.kill(saver, signal.SIGSTOP)
        run.wait_for_step(105)
        run.kill(0)
        run.wait_for_event("worker_exited", worker=0)
        os.kill(saver, signal.SIGKILL)
        run.wait_for_event("saver_exited", signal="SIGKILL")
        run.wait_for_event("checkpoint_saved", step=200)
        last = run.stop()
        check_each_step_once(run, last)
        saved = [e["step"] for e in run.events("checkpoint_saved")]
        assert saved[:2] == [100, 200] and saved[-1] == last
        assert run.events("save_failed") == []
        check_nothing_left(run)


@pytest.fixture
def small_disk(tmp_path):
    """A run whose checkpoints lie on a file system of a few megabytes."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    argv = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all the room there is."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def test_a_full_disk_is_told_at_once_training_goes_on_and_saves_resume(small_disk):
    """Then it is full at the end: exit 3, not 0, and memory has the last step for a rerun."""
    run_dir = small_disk.parent
    sets = ["checkpoint.every_steps=20", "grace_s=8", "digest_every_steps=0"]
    with running(PACED, run_dir, ENDLESS, *sets) as run:
        run.wait_for_event("checkpoint_saved")
        ballast = fill(small_disk)
        failed = run.wait_for_event("save_failed")
        assert "No space left on device" in failed["error"] or "ENOSPC" in failed["error"]
        assert str(small_disk) in failed["error"]
        assert f"could not be written: {failed['error']}; the next save tries again" in run.output
        run.wait_for_steps(5)
        ballast.unlink()
        run.wait_for_event("checkpoint_saved", after=len(run.events()))
        assert "saving works again" in run.output
        ballast = fill(small_disk)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(30) == 3
        assert "the last save failed: " in run.output
        stopped_at = run.metrics()[-1]["step"]
        check_nothing_left(run)
    ballast.unlink()
    with running(PACED, run_dir, f"steps={stopped_at + 5}", *sets) as run:
        assert run.finish() == 0
        restored = run.events("checkpoint_restored")[-1]
        assert (restored["step"], restored["tier"]) == (stopped_at, "memory")
        check_each_step_once(run, stopped_at + 5)


@pytest.mark.slow
def test_on_save_error_stop_ends_the_run(small_disk):
    """With the reason; nothing is left, and memory has the state."""
    sets = [ENDLESS, "checkpoint.every_steps=20", "checkpoint.on_save_error=stop"]
    with running(PACED, small_disk.parent, *sets, "grace_s=6") as run:
        run.wait_for_event("checkpoint_saved")
        fill(small_disk)
        assert run.finish(60) == 3
        assert "the run stops (on_save_error: stop)" in run.output
        check_nothing_left(run)
        [(step, _), *_] = snapshots_in(memory_folder(str(small_disk.parent), "auto"))
        assert step == run.metrics()[-1]["step"]


def test_a_stop_in_an_evaluation_drops_it_and_it_is_done_first_later(tmp_path):
    """By a signal to the whole process group, as Ctrl-C in a terminal."""
    run_dir = tmp_path / "run"
    sets = ["steps=60", "eval.every_steps=40", "trainer=tests/trainers.py:Ordered"]
    slept = order(run_dir, "sleep", "evaluate", worker=1, seconds=1.0)
    with running(PACED, run_dir, *sets) as run:
        run.wait_until("the evaluation", lambda: not slept.exists())
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.finish(30) == 75
        assert run.metrics()[-1]["step"] == 40 and run.events("evaluated") == []
        assert [e["step"] for e in run.events("checkpoint_saved")] == [40]
        assert len(run.events("worker_exited")) == 4  # nobody was hit by it
        check_nothing_left(run)
    with running(PACED, run_dir, *sets) as run:
        assert run.finish() == 0
        assert [e["step"] for e in run.events("evaluated")] == [40, 60]
        check_each_step_once(run, 60)


PHASES = ["start", "open", "connect", "compile", "ready", "settle", "restore", "sync", "hook"]
PHASES += ["data", "gradient", "reduce", "update", "evaluate", "save", "barrier"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_at_any_phase_exits_75_or_0_and_the_same_command_continues(tmp_path, phase, number):
    """A worker is held in the phase as the signal comes to the whole group."""
    run_dir = tmp_path / "run"
    sets = ["steps=60", "eval.every_steps=40", "trainer=tests/trainers.py:Ordered", "grace_s=15"]
    held = order(run_dir, "sleep", phase, seconds=1.5)
    with running(PACED, run_dir, *sets) as run:
        run.wait_until(f"{phase}", lambda: not held.exists())
        os.killpg(run.process.pid, number)
        code = run.finish(30)
        assert code == 75 or (code, phase) == (0, "save")
        steps = [m["step"] for m in run.metrics()]
        assert steps == list(range(1, len(steps) + 1))
        if steps:
            assert run.events("checkpoint_saved")[-1]["step"] == steps[-1]
        check_nothing_left(run)
    with running(PACED, run_dir, *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 60)
        assert [e["step"] for e in run.events("evaluated")] == [40, 60]


@pytest.mark.slow
def test_a_stop_while_a_worker_comes_back(tmp_path):
    """The others save; the one that is on its way is ended."""
    with running(PACED, tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        run.kill(2)
        run.wait_until("its return", lambda: len(run.events("worker_started")) == 5)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(30) == 75
        step = run.metrics()[-1]["step"]
        assert run.events("checkpoint_saved")[-1]["step"] == step
        check_each_step_once(run, step)
        check_nothing_left(run)


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_memory_keeps_what_it_has(tmp_path):
    """Exit 75; the snapshot continues."""
    sets = [ENDLESS, "checkpoint.memory_every_s=0.2"]
    with running(PACED, tmp_path / "run", *sets) as run:
        saver = run.wait_for_event("saver_started")["pid"]
        os.kill(saver, signal.SIGSTOP)  # the last save takes for ever
        run.wait_for_step(20)
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait_for_event("stop_requested")
        run.wait_until("all wait for the save", lambda: run.is_stuck(1.0))
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(10) == 75
        stopped_at = run.metrics()[-1]["step"]
        check_nothing_left(run)
    with running(PACED, tmp_path / "run", f"steps={stopped_at + 5}") as run:
        assert run.finish() == 0
        restored = run.events("checkpoint_restored")[-1]
        assert (restored["step"], restored["tier"]) == (stopped_at, "memory")


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_as_process_1_of_a_container_it_hears_signals_and_reaps_orphans(tmp_path):
    """A signal that process 1 does not handle is lost; nobody else reaps what user code leaves."""
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("making a namespace of processes is not allowed here")
    run_dir = tmp_path / "run"
    argv = [*inside, sys.executable, "-m", "ftrain", "run", PACED, "--run-dir", str(run_dir)]
    argv += ["--set", "trainer=tests/trainers.py:Orphans", "--set", "cluster.workers=2"]
    with open(tmp_path / "out", "wb") as out:
        outer = subprocess.Popen(argv, cwd=REPOSITORY, env=environment(), stdout=out, stderr=out)
    try:
        end = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").exists() or not (
            (run_dir / "metrics.jsonl").read_text().count("\n") > 20
        ):
            assert time.monotonic() < end and outer.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.05)
        [first] = children_of(outer.pid)
        while any(not is_alive(pid) for pid in children_of(first)):
            assert time.monotonic() < end, "zombies are left"
            time.sleep(0.05)
        os.kill(first, signal.SIGTERM)
        assert outer.wait(30) == 75, (tmp_path / "out").read_text()
    finally:
        if outer.poll() is None:
            outer.kill()  # and with it, --kill-child, all of them
            outer.wait()
    assert int(ftrain.load_state(str(run_dir)).step) > 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_saved_while_training_goes_on_is_the_state_of_its_own_step(tmp_path):
    """50 MB at every step: each checkpoint has the digest that the workers had at that step."""
    sets = ["trainer=tests/trainers.py:Large", "cluster.workers=2", "steps=30"]
    sets += ["digest_every_steps=1", "checkpoint={every_steps: 1, keep: 100}"]
    with running(PACED, tmp_path / "run", *sets) as run:
        assert run.finish(200) == 0
        digests = {m["step"]: m["digest"] for m in run.metrics()}
        folder = run.run_dir / "checkpoints"
        steps = steps_in(folder)
        assert len(steps) > 3 and steps[0] == 30 and run.events("save_failed") == []
        for step in steps:
            assert read_checkpoint(folder / str(step))[0]["digest"] == digests[step]
