"""Deaths at places inside the protocol that no signal from outside would hit."""

from __future__ import annotations

import pytest

from tests.checks import (
    check_each_step_once,
    check_nothing_left,
    check_nothing_lost,
    check_replicas_agree,
)
from tests.runs import ENDLESS, running

REJOINING = [
    "ftrain.membership:Members.join",
    "ftrain.membership:Members.settle",
    "ftrain.membership:Members.open_devices",
    "ftrain.runtime:Runtime.new_view_devices",
    "ftrain.mesh:DataPlane.gather",
    "ftrain.sync:_broadcast",
]
# Well under the deadline of a settle (10 s) and gloo's for connecting (30 s).
SOON_S = 4.0


def dies_at(where: str, incarnation: int, call: int, worker: int = 3) -> list[str]:
    return [
        "trainer=tests/trainers.py:DiesAt",
        f"trainer_args={{where: '{where}', worker: {worker}, incarnation: {incarnation}, "
        f"call: {call}, pause_s: 0.006}}",
    ]


@pytest.mark.parametrize("where", REJOINING)
def test_a_rejoiner_that_dies_on_its_way_holds_nobody_up(tmp_path, where):
    """Whatever the others were waiting for it in, they go on at once; its next try succeeds."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS, *dies_at(where, 1, 1)) as run:
        run.wait_for_step(10)
        run.kill(3)
        died = run.wait_until(
            "its second death",
            lambda: [e for e in run.events("worker_exited") if e["worker"] == 3][1:],
        )[0]
        commit = run.wait_until(
            "the others' next commit",
            lambda: next((m for m in run.metrics() if m["t"] > died["t"]), None),
        )
        assert commit["t"] - died["t"] < SOON_S
        run.wait_back(3, run.events().index(died))
        check_nothing_lost(run, run.stop())


@pytest.mark.parametrize(
    "where, worker, call",
    [
        ("ftrain.step:StepPrograms.update", 0, 30),  # the reduction is done, nothing is committed
        ("ftrain.loop:StepLoop._commit", 0, 30),  # the barrier has spoken, this one has not heard
        ("ftrain.evaluation:Evaluation.part", 1, 2),  # in an evaluation
        ("ftrain.run_keys:RunKeys.set_finished", 0, 1),  # saved, and nobody knows
        ("ftrain.saving:Saving._take", 0, 1),  # in the last snapshot
    ],
)
def test_a_death_inside_a_block_commits_all_or_nothing(tmp_path, where, worker, call):
    """Between the reduction and the barrier, after the barrier, in an evaluation, at the end."""
    sets = dies_at(where, 0, call, worker)
    with running("tests/paced.yaml", tmp_path / "run", "steps=60", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 60)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert run.events("checkpoint_restored") == []
        assert [e["worker"] for e in run.events("worker_exited") if "signal" in e] == [worker]
        assert "eval_error" in run.metrics()[-1]
