"""One flipped bit in one worker's parameters: found, named, and mended by those without it."""

from __future__ import annotations

import pytest

from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import ENDLESS, running


def flips(worker: int, step: int) -> list[str]:
    return [
        "trainer=tests/trainers.py:BitFlips",
        f"trainer_args={{worker: {worker}, step: {step}, pause_s: 0.006}}",
        "digest_every_steps=20",
    ]


@pytest.mark.parametrize("worker, step", [(2, 20), pytest.param(0, 47, marks=pytest.mark.slow)])
def test_the_outlier_is_replaced_and_gets_the_state_of_most(tmp_path, worker, step):
    """At the next digest; the lowest too, which would be the donor. All agree from then on."""
    sets = [*flips(worker, step), ENDLESS]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        due = -(-step // 20) * 20
        died = run.wait_for_event("worker_exited", worker=worker)
        assert died["reason"].startswith(
            f"ReplicaDivergedError: the state of worker {worker} at step {due} has digest "
        )
        back = run.wait_back(worker, run.events().index(died))
        run.wait_until(
            "a digest of all four",
            lambda: any(
                e["step"] > back["step"] and e["workers"] == [0, 1, 2, 3]
                for e in run.events("digest_agreed")
            ),
        )
        last = run.stop()
        synced = [e for e in run.events("state_synced") if e["step"] >= due]
        assert [e["worker"] for e in synced] == [worker] and synced[0]["donor"] != worker
        check_each_step_once(run, last)
        check_nothing_left(run)
        agreed = [e["step"] for e in run.events("digest_agreed")]
        assert set(range(due + 20, last, 20)) <= set(agreed)
        aborted = [(e["step"], e["failed"]) for e in run.events("step_aborted")]
        assert aborted == [(due + 1, [worker])]
        check_replicas_agree(run)


def test_of_two_workers_nobody_can_say_which_is_right(tmp_path):
    """Exit 3, both named with their digests, and the checkpoint before it is untouched."""
    sets = [*flips(1, 47), "cluster.workers=2", "checkpoint.every_steps=20", ENDLESS]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 3
        assert "replicas differ at step 60, and none is that of most" in run.output
        assert "worker 0 has digest" in run.output and "worker 1 has digest" in run.output
        assert max(e["step"] for e in run.events("checkpoint_saved")) == 40
        check_nothing_left(run)
