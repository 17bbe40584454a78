"""Runs without faults: the records, the exit codes, what is printed, and continuing."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest

import ftrain
from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import Run, running

EVENT_FIELDS = {
    "run_started": {"config", "changed"},
    "coordinator_started": {"pid", "address"},
    "worker_started": {"worker", "pid", "incarnation"},
    "worker_ready": {"worker", "pid", "seconds", "cpu_s", "compile_s"},
    "worker_exited": {"worker", "pid", "exit_code", "reason"},
    "worker_fenced": {"worker"},
    "view_changed": {"workers", "step", "seconds", "sync_s", "connect_s"},
    "time_spent": {"step", "steps", "seconds"},
    "state_synced": {"worker", "donor", "step", "bytes", "seconds", "digest"},
    "evaluated": {"step", "metrics", "seconds"},
    "saver_started": {"pid"},
    "checkpoint_saved": {"step", "seconds", "tier"},
    "digest_agreed": {"step", "workers", "digest"},
    "run_finished": {"step", "exit_code", "reason"},
    "target_known": {"steps", "samples", "dataset_length"},
}


def test_line_is_fitted_by_one_worker(tmp_path):
    """The smallest run: exit 0, the answer in the checkpoint, each step once."""
    with running("configs/linear.yaml", tmp_path / "run", "cluster.workers=1") as run:
        assert run.finish() == 0
        check_each_step_once(run, 200)
        check_nothing_left(run)
        params = ftrain.load_params(str(run.run_dir))
        assert np.allclose([params["w"], params["b"]], [3, 1], atol=1e-3)
        state = ftrain.load_state(str(run.run_dir))
        assert (int(state.step), int(state.cursor)) == (200, 9600)


def test_four_workers_train_and_record_what_the_design_says(tmp_path):
    """Events and metrics have exactly their fields; the first view has all; replicas agree."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=60", "eval.every_steps=40") as run:
        assert run.finish() == 0
        check_each_step_once(run, 60)
        check_replicas_agree(run)
        check_nothing_left(run)
        for event in run.events():
            assert set(event) == {"t", "event"} | EVENT_FIELDS[event["event"]], event
        assert [e["workers"] for e in run.events("view_changed")] == [[0, 1, 2, 3]]
        rows = run.metrics()
        fields = {"t", "step", "loss", "samples", "workers", "step_time_s", "bias"}
        evals = {"eval_error", "eval_mean"}
        for row in rows:
            digest = {"digest"} if row["step"] % 20 == 0 else set()
            assert set(row) == fields | digest | (evals if row["step"] in (40, 60) else set())
        # Every held-out sample once, in parts and over four workers: the mean of all 100.
        assert rows[-1]["eval_mean"] == pytest.approx(np.arange(100).mean() / 96, rel=1e-5)
        assert json.loads(json.dumps(rows)) == rows
        output = run.output
        assert "evaluation at step 60: error" in output
        assert f"checkpoint in {run.run_dir}/checkpoints/60" in output
        assert "Gloo" not in output


def test_number_of_workers_does_not_change_the_loss(tmp_path):
    """One, two and three workers see the same batches, keys and means, up to rounding."""
    losses = []
    for workers in (1, 3):
        with running(
            "tests/paced.yaml",
            tmp_path / f"run{workers}",
            "steps=40",
            "trainer_args.pause_s=0.0",
            f"cluster.workers={workers}",
        ) as run:
            assert run.finish() == 0
            losses.append([r["loss"] for r in run.metrics()])
    assert np.allclose(losses[0], losses[1], rtol=1e-4)


def test_finished_run_says_so_and_larger_steps_continue(tmp_path):
    """The same command again exits 0 at once and changes nothing; more steps go on from there."""
    sets = ["cluster.workers=1", "trainer_args.pause_s=0.0"]
    with running("tests/paced.yaml", tmp_path / "run", "steps=30", *sets) as run:
        assert run.finish() == 0
        before = (run.events(), run.metrics())
    with running("tests/paced.yaml", tmp_path / "run", "steps=30", *sets) as run:
        assert run.finish(20) == 0
        assert "has finished: step 30" in run.output
        assert (run.events(), run.metrics()) == before
    config = (run.run_dir / "config.yaml").read_bytes()
    with running("tests/paced.yaml", tmp_path / "run", "steps=20", *sets) as run:
        assert run.finish(20) == 0  # fewer steps than are done
        assert (run.events(), run.metrics()) == before
        assert (run.run_dir / "config.yaml").read_bytes() == config
    with running("tests/paced.yaml", tmp_path / "run", "steps=50", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 50)
        assert run.events("checkpoint_restored")[0]["step"] == 30
        assert run.events("run_started")[1]["changed"] == {"steps": [30, 50]}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_stop_saves_exits_75_and_the_same_command_continues(tmp_path, number):
    """A signal ends the run at a step that all agree on; no step is lost or done twice."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=120") as run:
        run.wait_for_step(20)
        os.kill(run.process.pid, number)
        assert run.finish(30) == 75
        stopped_at = run.metrics()[-1]["step"]
        assert run.events("checkpoint_saved")[-1]["step"] == stopped_at
        check_nothing_left(run)
    with running("tests/paced.yaml", tmp_path / "run", "steps=120") as run:
        assert run.finish() == 0
        assert run.events("checkpoint_restored")[0]["step"] == stopped_at
        check_each_step_once(run, 120)


def test_stop_before_training_exits_75(tmp_path):
    """A signal while workers start: nothing to save, nothing left, the same command starts over."""
    with running("tests/paced.yaml", tmp_path / "run") as run:
        run.wait_for_event("worker_started", worker=3)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(30) == 75
        check_nothing_left(run)


def test_unreadable_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    """A torn newest checkpoint costs its steps, is named, and is written anew."""
    sets = ["cluster.workers=1", "trainer_args.pause_s=0.0", "checkpoint.every_steps=20"]
    with running("tests/paced.yaml", tmp_path / "run", "steps=60", *sets) as run:
        assert run.finish() == 0
    largest = max(
        (run.run_dir / "checkpoints" / "60" / "d").rglob("*"),  # Orbax's data that is read
        key=lambda p: p.stat().st_size if p.is_file() else -1,
    )
    os.truncate(largest, largest.stat().st_size // 2)
    with running("tests/paced.yaml", tmp_path / "run", "steps=80", *sets) as run:
        assert run.finish() == 0
        skipped = run.events("checkpoint_skipped")
        assert [e["step"] for e in skipped] == [60] and skipped[0]["why"]
        restored = run.events("checkpoint_restored")[0]["step"]
        assert restored < 60
        rows = run.metrics()
        again = [r["step"] for r in rows if r.get("rewound")]
        assert again == list(range(restored + 1, 61))
        assert "60" in run.output and "passed over" in run.output
        assert [int(ftrain.load_state(str(run.run_dir), s).step) for s in (60, 80)] == [60, 80]


def test_no_good_checkpoint_never_starts_over_silently(tmp_path):
    """With every checkpoint emptied the run refuses, and says how to start afresh on purpose."""
    sets = ["cluster.workers=1", "trainer_args.pause_s=0.0"]
    with running("tests/paced.yaml", tmp_path / "run", "steps=20", *sets) as run:
        assert run.finish() == 0
    for path in (run.run_dir / "checkpoints" / "20").rglob("*"):
        if path.is_file():
            path.unlink()
    with running("tests/paced.yaml", tmp_path / "run", "steps=40", *sets) as run:
        assert run.finish() in (2, 3)
        assert "start afresh on purpose" in run.output
        assert len(run.metrics()) == 20


def test_checkpoints_of_a_run_that_is_not_known_are_left_alone(tmp_path):
    """Steps 900 and 1000 lie there without a config.yaml: it never trains beside them."""
    for step in ("900", "1000"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
    with running("tests/paced.yaml", tmp_path / "run", "steps=20") as run:
        assert run.finish(20) == 2
        assert "has steps 1000, 900" in run.output and "--run-dir" in run.output
        assert run.events() == []
        assert sorted(os.listdir(run.run_dir)) == ["checkpoints", "lock"]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    """Before anything is started: the path, the system's text, what to do."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with running("tests/paced.yaml", tmp_path / "run", "steps=20") as run:
        assert run.finish(20) == 2
        assert f"run_dir: {run.run_dir}/checkpoints: File exists; give" in run.output


def test_what_may_not_change_is_refused_with_both_values(tmp_path):
    """Continuing with another seed is exit 2 and starts nothing."""
    sets = ["cluster.workers=1", "trainer_args.pause_s=0.0"]
    with running("tests/paced.yaml", tmp_path / "run", "steps=20", *sets) as run:
        assert run.finish() == 0
        events = run.events()
    with running("tests/paced.yaml", tmp_path / "run", "steps=40", "seed=1", *sets) as run:
        assert run.finish(20) == 2
        assert "seed: 0 when the run began, 1 now" in run.output
        assert run.events() == events


def test_second_run_on_a_run_directory_in_use_is_refused(tmp_path):
    """The lock names the process that holds it; the first run is not disturbed."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=60") as first:
        first.wait_for_event("worker_started")
        second = Run("tests/paced.yaml", tmp_path / "run")
        second.output_file = first.output_file
        assert second.finish(20) == 2
        assert f"in use by process {first.process.pid}" in first.output
        assert first.finish() == 0
        check_each_step_once(first, 60)


def test_compile_cache_makes_later_starts_quicker(tmp_path):
    """Some worker, whichever compiled first, fills the cache; later processes add nothing to it."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=20") as run:
        assert run.finish() == 0
        cache = tmp_path / "run" / "compile_cache"
        big = {p.name for p in cache.iterdir() if "shard" in p.name or "update" in p.name}
        assert big
    with running("tests/paced.yaml", tmp_path / "run", "steps=30") as run:
        assert run.finish() == 0
        now = {p.name for p in cache.iterdir() if "shard" in p.name or "update" in p.name}
        assert {n for n in now if n.endswith("-cache")} == {n for n in big if n.endswith("-cache")}


def test_nothing_heavy_is_imported_before_the_first_commit(tmp_path):
    """Orbax, grain, scikit-learn, flax: a worker that needs none of them pays for none of them."""
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys\nimport recipes.linear as linear\n"
        "class Looks(linear.LinearTrainer):\n"
        "    def after_commit(self, step, metrics, state):\n"
        "        if step == 1:\n"
        "            heavy = ['orbax', 'grain', 'sklearn', 'flax', 'pandas', 'rich']\n"
        "            print('heavy:', [m for m in heavy if m in sys.modules])\n"
    )
    with running(
        "configs/linear.yaml",
        tmp_path / "run",
        f"trainer={script}:Looks",
        "steps=20",
        "cluster.workers=1",
    ) as run:
        assert run.finish() == 0
        assert "heavy: []" in run.output


def test_user_prints_come_once_and_logs_keep_all(tmp_path):
    """The screen has the lowest worker's print, marked with its number; every log has its own."""
    with running(
        "tests/paced.yaml",
        tmp_path / "run",
        "trainer=tests/trainers.py:Forks",
        "steps=20",
        "trainer_args.pause_s=0.0",
    ) as run:
        assert run.finish() == 0
        assert run.output.count("forked ") == 1 and "[0] forked " in run.output
        for worker in range(4):
            assert "forked " in run.log(worker)


def test_start_is_told_within_seconds(tmp_path):
    """Progress is a plain line where there is no terminal: step, loss, samples/s, time, workers."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=400") as run:
        run.wait_for_step(2)
        line = run.wait_until(
            "a progress line",
            lambda: next((x for x in run.output.splitlines() if "samples/s" in x), None),
            30,
        )
        for word in ("/400", "loss", "samples/s", "left", "workers 0 1 2 3"):
            assert word in line
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(30) == 75
        assert time.time() - run.events("stop_requested")[0]["t"] < 25
