"""`commit: lean`: one state beside the sums, and the same steps to the bit, also under kills."""

from __future__ import annotations

import pytest

from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import running

SETS = ["reduction=reproducible", "digest_every_steps=5", "steps=120"]


def digests(run) -> dict[int, str]:
    return {m["step"]: m["digest"] for m in run.metrics() if "digest" in m}


def test_under_kills_every_digest_is_that_of_an_undisturbed_run_with_two_states(tmp_path):
    """Three of four workers die, 0 among them; snapshots are copied between the steps."""
    with running("tests/paced.yaml", tmp_path / "calm", *SETS) as calm:
        assert calm.finish() == 0
    lean = ["commit=lean", "checkpoint.memory_every_s=0.2"]
    with running("tests/paced.yaml", tmp_path / "run", *SETS, *lean) as run:
        for worker, step in ((0, 8), (2, 20), (3, 30)):
            run.wait_for_step(step)
            run.kill(worker)
        assert run.finish() == 0
        check_each_step_once(run, 120)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert run.events("checkpoint_restored") == []
        assert digests(run) == digests(calm)
        assert [m["loss"] for m in run.metrics()] == [m["loss"] for m in calm.metrics()]


@pytest.mark.parametrize("where, call", [("ftrain.stepping:Stepping._apply", 30)])
def test_a_death_between_the_commit_and_the_update_loses_nothing(tmp_path, where, call):
    """The others have the step's sums too, and make the same state of them."""
    dies = f"{{where: '{where}', worker: 1, call: {call}, pause_s: 0.006}}"
    sets = ["trainer=tests/trainers.py:DiesAt", f"trainer_args={dies}", "commit=lean", "steps=60"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 60)
        check_replicas_agree(run)
        assert run.events("checkpoint_restored") == []
        assert [e["worker"] for e in run.events("worker_exited") if "signal" in e] == [1]
