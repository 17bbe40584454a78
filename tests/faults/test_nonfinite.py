"""A loss that is not finite: stopped before it is committed, or skipped, by all alike."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ftrain
from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import Run, running
from tests.test_commands import ftrain as command

SIZE = 48  # samples a step, 4 a shard
SETS = ("trainer=tests/trainers.py:Poisoned", "data.shuffle=false", "digest_every_steps=10")


def poisoned(first: int, last: int, pause_s: float = 0.006) -> list[str]:
    arguments = {"first": first, "last": last, "pause_s": pause_s}
    return [*SETS, *(f"trainer_args.{name}={value}" for name, value in arguments.items())]


SAMPLE = 20 * SIZE + 4 * 7 + 2  # in step 21, shard 7, which is worker 2's of four
STEP = 21


def check_saved_state(run: Run, step: int, count: int) -> None:
    """The newest checkpoint is of `step`, finite, and has counted `count` steps."""
    state = ftrain.load_state(str(run.run_dir))
    assert int(state.step) == step and int(state.cursor) == step * SIZE
    assert int(state.model_state["count"]) == count
    assert np.isfinite(state.params["w"]).all() and np.isfinite(state.model_state["walk"]).all()


def check_strict_json(run: Run) -> None:
    """No NaN or Infinity, which are no JSON, in any record."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for name in ("metrics.jsonl", "events.jsonl"):
        for line in (run.run_dir / name).read_text().splitlines():
            json.loads(line, parse_constant=refuse)


def test_stop_keeps_the_last_good_state_and_names_shard_worker_and_samples(tmp_path):
    """Exit 3, again when rerun; with skip the same command then passes the step."""
    sets = ["steps=40", "checkpoint.every_steps=4", *poisoned(SAMPLE, SAMPLE)]
    for attempt in range(2):
        with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
            assert run.finish() == 3
            assert run.output.rstrip().splitlines()[-5:] == [
                "stopped with exit code 3:",
                f"step {STEP} is not finite: loss inf, gradient of params['w'] -inf",
                "  shard 7 of worker 2: loss and gradient, from 4 samples from cursor 988 on, "
                "988 989 990 991 of dataset()",
                "it was not committed; the last good state is that of step 20",
                "look at the samples of that shard; on_nonfinite: skip goes on without such steps",
            ], attempt
            check_each_step_once(run, STEP - 1)
            check_saved_state(run, STEP - 1, count=STEP - 1)
            check_nothing_left(run)
    assert [e["step"] for e in run.events("checkpoint_restored")] == [STEP - 1]
    with running("tests/paced.yaml", tmp_path / "run", *sets, "on_nonfinite=skip") as run:
        assert run.finish() == 0
        check_each_step_once(run, 40)
        check_saved_state(run, 40, count=39)


def test_skip_goes_on_with_the_state_as_it_was(tmp_path):
    """The step is committed, its samples are passed, nothing is learned; said once."""
    sets = ["steps=40", "on_nonfinite=skip", *poisoned(SAMPLE, SAMPLE)]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 40)
        check_replicas_agree(run)
        check_strict_json(run)
        check_saved_state(run, 40, count=39)
        [skipped] = run.events("step_skipped")
        assert (skipped["step"], skipped["shards"], skipped["workers"]) == (STEP, [7], [2])
        rows = {m["step"]: m for m in run.metrics()}
        assert [s for s, m in rows.items() if "nonfinite" in m] == [STEP]
        assert rows[STEP]["nonfinite"] == [7] and rows[STEP]["loss"] is None
        assert all(m["loss"] is not None for s, m in rows.items() if s != STEP)
        assert run.output.count(f"step {STEP} skipped, the state stays: loss inf") == 1


@pytest.mark.slow
def test_first_step_that_is_not_finite_saves_the_beginning(tmp_path):
    """There is always a good state: that of step 0."""
    sets = ["steps=40", "cluster.workers=2", *poisoned(0, 10**6)]
    for _ in range(2):
        with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
            assert run.finish() == 3
            assert "every shard gave it" in run.output.rstrip().splitlines()[-1]
            assert run.metrics() == []
            check_saved_state(run, 0, count=0)


def test_kill_in_a_row_of_skipped_steps_changes_nothing(tmp_path):
    """A rejoiner counts on where the others are: the run ends after 100 in a row, not later."""
    sets = ["steps=300", "on_nonfinite=skip", "cluster.min_workers=4", *poisoned(20 * SIZE, 10**6)]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_event("step_skipped", step=30)
        seen = len(run.events())
        run.kill(0)
        back = run.wait_back(0, seen)
        run.kill(1)  # who gave it the state: from here on the count is worker 0's to give
        assert run.finish() == 3
        assert 30 <= back["step"] < 120
        check_each_step_once(run, 120)
        check_replicas_agree(run)
        check_saved_state(run, 120, count=20)
        assert [e["step"] for e in run.events("step_skipped")] == list(range(21, 121))
        assert "100 steps in a row were skipped, and step 121 is not finite" in run.output


@pytest.mark.slow
def test_kill_in_skipped_steps_leaves_the_same_steps_learned(tmp_path):
    """The rejoiner passes the rest of them with the others; all learn from the next good one."""
    sets = ["steps=140", "on_nonfinite=skip", "cluster.min_workers=4"]
    sets += poisoned(20 * SIZE, 90 * SIZE - 1)
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_event("step_skipped", step=25)
        seen = len(run.events())
        run.kill(2)
        run.wait_back(2, seen)
        assert run.finish() == 0
        check_each_step_once(run, 140)
        check_replicas_agree(run)
        check_saved_state(run, 140, count=70)
        assert [e["step"] for e in run.events("step_skipped")] == list(range(21, 91))


@pytest.mark.slow
def test_ignore_commits_what_comes(tmp_path):
    """The user's word: nothing is said, and the records are JSON all the same."""
    sets = ["steps=30", "cluster.workers=2", "on_nonfinite=ignore", *poisoned(SAMPLE, SAMPLE)]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 30)
        check_strict_json(run)
        rows = run.metrics()
        assert rows[STEP - 1]["loss"] is None and all("nonfinite" not in m for m in rows)
        assert not np.isfinite(ftrain.load_params(str(run.run_dir))["w"]).any()


@pytest.mark.parametrize(
    ("reaction", "code"), [("stop", 3), pytest.param("skip", 0, marks=pytest.mark.slow)]
)
def test_debug_does_the_same_with_one_worker(tmp_path, reaction, code):
    """Its exit code and last lines are those of a run."""
    sets = ["steps=30", f"on_nonfinite={reaction}", *poisoned(SAMPLE, SAMPLE)]
    done = command(
        "debug", "tests/paced.yaml", "--run-dir", str(tmp_path / "run"),
        *(part for item in sets for part in ("--set", item)),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    says = {"stop": "shard 7 of worker 0: loss and gradient", "skip": f"step {STEP} skipped"}
    assert says[reaction] in done.stdout
