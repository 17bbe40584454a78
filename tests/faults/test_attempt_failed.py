"""Attempts that fail in one member while nobody dies: all abort together and try again."""

from __future__ import annotations

import os

import pytest

from scripts.bench.cycles import held_by
from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import ENDLESS, Run, running

# Around the sum while the others are inside it; in the sync that follows, before its first sum and
# at its check; in the settle. Each counts its own calls, so that failures fall into recoveries too.
PLACES = {
    "in_a_step": "{'ftrain.mesh:DataPlane.begin_sum': 12}",
    "in_the_sync": "{'ftrain.mesh:DataPlane.begin_sum': 25, 'ftrain.mesh:DataPlane.gather': 2}",
    "at_its_check": "{'ftrain.mesh:DataPlane.begin_sum': 25, 'ftrain.sync:differ': 2}",
    "in_the_settle": (
        "{'ftrain.mesh:DataPlane.begin_sum': 25, 'ftrain.membership:Members._meet': 2}"
    ),
}
OFTEN = ("in_a_step", "in_the_sync")  # the others with `-m slow`
TIMES = 10
NEXT_COMMIT_S = 4.0  # under the deadlines of a settle (10 s) and of gloo's connecting (30 s)


def failing(where: str, worker: int) -> list[str]:
    return [
        "trainer=tests/trainers.py:FailsAttempt",
        f"trainer_args={{where: {where}, worker: {worker}, times: {TIMES}, pause_s: 0.006}}",
    ]


def failures(run: Run) -> list[dict]:
    """The aborts that nobody's death caused."""
    return [e for e in run.events("step_aborted") if not e["failed"]]


@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "where",
    [
        pytest.param(where, id=name, marks=[pytest.mark.slow] * (name not in OFTEN))
        for name, where in PLACES.items()
    ],
)
def test_all_abort_together_and_no_process_ends(tmp_path, where, worker, sets=()):
    """Ten failures in one run: each step once, replicas agree, each retry at once."""
    sets = ["steps=400", "cluster.workers=2", *failing(where, worker), *sets]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 400)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert len(failures(run)) >= TIMES // 2  # one abort may answer two failures
        told = [e["reason"] for e in run.events("attempt_failed") if e["worker"] == worker]
        assert len([reason for reason in told if reason.startswith("injected at")]) == TIMES
        for failure in failures(run):
            commit = next(m for m in run.metrics() if m["t"] > failure["t"])
            assert commit["t"] - failure["t"] < NEXT_COMMIT_S
        assert [e["incarnation"] for e in run.events("worker_started")] == [0, 0]
        assert run.events("worker_exited", "checkpoint_restored") == [
            e for e in run.events("worker_exited") if e["reason"] == "the end of the run"
        ]


@pytest.mark.slow
def test_failed_attempts_leave_nothing_behind(tmp_path, sets=()):
    """Descriptors and threads of both after the last failure as after the third."""
    where = "{'ftrain.mesh:DataPlane.begin_sum': 12}"
    sets = [ENDLESS, "cluster.workers=2", *failing(where, 1), *sets]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        pids = [run.wait_for_event("worker_started", worker=w)["pid"] for w in (0, 1)]
        held = []
        for count in (3, TIMES):
            run.wait_until(f"{count} failures", lambda n=count: len(failures(run)) >= n)
            run.wait_for_step(run.metrics()[-1]["step"] + 5)
            held.append([held_by(pid) for pid in pids])
        os.kill(run.process.pid, 15)
        assert run.finish() == 75
        for before, after in zip(*held, strict=True):
            assert after["descriptors"] <= before["descriptors"] + 3
            assert after["threads"] <= before["threads"] + 3
