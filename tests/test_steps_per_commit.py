"""Several steps that one barrier commits: the same steps, all of them or none."""

from __future__ import annotations

import re
import signal

import pytest

from ftrain.config import load_config
from ftrain.errors import ConfigError
from tests.checks import (
    check_each_step_once,
    check_nothing_left,
    check_nothing_lost,
    check_replicas_agree,
)
from tests.faults.test_attempt_failed import failing, failures
from tests.faults.test_nonfinite import SAMPLE, STEP, check_saved_state, poisoned
from tests.runs import ENDLESS, running

FOUR = "steps_per_commit=4"
TELLS = "trainer=tests/trainers.py:TellsInHook"


def test_the_steps_are_the_same_and_end_where_something_is_due(tmp_path):
    """A digest at 15, 30, 45, an evaluation at 10, 20, ..., a checkpoint at 25 and 50; the end."""
    sets = ["cluster.workers=2", "steps=51", "digest_every_steps=15", TELLS]
    sets += ["eval.every_steps=10", "checkpoint.every_steps=25"]
    learned = {}
    for count in (1, 4):
        folder = tmp_path / f"run{count}"
        with running("tests/paced.yaml", folder, *sets, f"steps_per_commit={count}") as run:
            assert run.finish() == 0
            check_each_step_once(run, 51)
            check_replicas_agree(run)
            rows = run.metrics()
            learned[count] = [(row["loss"], row.get("digest"), row.get("eval_x")) for row in rows]
            evaluated = [e["step"] for e in run.events("evaluated")]
            assert evaluated == [10, 20, 30, 40, 50, 51]
            assert [e["step"] for e in run.events("checkpoint_saved")] == [25, 50, 51]
    assert learned[1] == learned[4] and learned[4][44][1]
    ends = [4, 8, 10, 14, 15, 19, 20, 24, 25, 29, 30, 34, 38, 40, 44, 45, 49, 50, 51]
    hooks = re.findall(r"hook after step (\d+): \1 ", run.output)
    assert [int(step) for step in hooks] == ends


def test_a_death_takes_back_the_steps_that_were_not_committed_and_no_other(tmp_path):
    """Of any worker: every step once, in order, and the others go on with the same samples."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS, FOUR) as run:
        run.wait_for_step(20)
        for worker in (2, 0):
            seen = len(run.events())
            run.kill(worker)
            run.wait_back(worker, seen)
            run.wait_for_step(run.metrics()[-1]["step"] + 10)
        check_nothing_lost(run, run.stop())
        # A digest is due every 20 steps, so all commits but the last end at a multiple of four.
        aborted = [e["step"] for e in run.events("step_aborted") if e["failed"]]
        assert {step % 4 for step in aborted} == {1}


def test_a_stop_ends_them_at_one_step_for_all(tmp_path):
    """It travels in a sum; the same command goes on from there."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=60", FOUR) as run:
        run.wait_for_step(10)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75
        check_nothing_left(run)
    with running("tests/paced.yaml", tmp_path / "run", "steps=60", FOUR) as run:
        assert run.finish() == 0
        check_each_step_once(run, 60)
        check_replicas_agree(run)


@pytest.mark.parametrize("reaction", ["stop", "skip"])
def test_a_step_that_is_not_finite_among_them(tmp_path, reaction):
    """Step 21 is the first of a commit, 23 its third: those before it are kept, by themselves."""
    sample = SAMPLE + 2 * 48
    sets = [FOUR, f"on_nonfinite={reaction}", "steps=40", *poisoned(sample, sample)]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == {"stop": 3, "skip": 0}[reaction]
        last = {"stop": STEP + 1, "skip": 40}[reaction]
        check_each_step_once(run, last)
        check_saved_state(run, last, count={"stop": STEP + 1, "skip": 39}[reaction])
        assert [e["step"] for e in run.events("step_skipped")] == [STEP + 2] * (reaction == "skip")


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
def test_attempts_that_fail_among_them_are_taken_back_by_all(tmp_path, worker):
    """Ten times, in the sum of any of the four steps, while the other is in that or the next."""
    sets = ["steps=400", "cluster.workers=2", FOUR]
    sets += failing("{'ftrain.mesh:DataPlane.begin_sum': 13}", worker)
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 400)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert len(failures(run)) >= 5
        assert [e["incarnation"] for e in run.events("worker_started")] == [0, 0]


def test_lean_has_nothing_to_take_them_from():
    """Its update waits for the barrier."""
    with pytest.raises(ConfigError, match="commit=lean has no state before the barrier"):
        load_config("configs/linear.yaml", ["commit=lean", FOUR])
