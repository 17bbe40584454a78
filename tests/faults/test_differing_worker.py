"""A worker with other code, settings, versions or data is named, and takes no part."""

from __future__ import annotations

import pytest

from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import ENDLESS, running


def differs(worker: int, what: str, **more: str) -> list[str]:
    arguments = {"worker": worker, "what": what, "pause_s": 0.006, **more}
    given = ", ".join(f"{k}: {v}" for k, v in arguments.items())
    return ["trainer=tests/trainers.py:Differs", f"trainer_args={{{given}}}"]


SAYS = {
    "x64": "worker {0} has JAX_ENABLE_X64=1, worker {1} has 0",
    "version": "worker {0} has optax 0.0.1, worker {1} has ",
    "loss": "loss of worker {0} compiles to another program than that of worker {1}",
    "data": "dataset(): worker {0} has 97 samples of ",
}


@pytest.mark.parametrize(
    "worker, what",
    [
        (2, "x64"),
        pytest.param(0, "loss", marks=pytest.mark.slow),
        pytest.param(2, "version", marks=pytest.mark.slow),
        pytest.param(3, "data", marks=pytest.mark.slow),
    ],
)
def test_one_of_four_is_refused_at_the_start_and_the_others_train(tmp_path, worker, what):
    """Before the first step; be it the lowest, which would be the donor. Nobody computes twice."""
    sets = [*differs(worker, what), "steps=60"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        says = SAYS[what].format(worker, 0 if worker else 1)
        died = run.wait_for_event("worker_exited", worker=worker)
        assert died["reason"].startswith(says) and died["exit_code"] == 12
        assert "the others go on without it" in died["reason"]
        assert run.finish() == 0
        assert says in run.output
        assert run.metrics()[0]["workers"] == [w for w in range(4) if w != worker]
        assert len(run.events("step_aborted")) <= 1  # the view that had it as a member
        check_each_step_once(run, 60)
        check_replicas_agree(run)
        check_nothing_left(run)


@pytest.mark.parametrize("sets", [["cluster.workers=2"], ["cluster.min_workers=4"]])
def test_a_run_that_cannot_go_on_without_it_is_refused(tmp_path, sets):
    """Of two nobody can say who is right; or too few would be left. Exit 2, told once."""
    with running("tests/paced.yaml", tmp_path / "run", *differs(1, "x64"), *sets) as run:
        assert run.finish() == 2
        says = "worker 1 has JAX_ENABLE_X64=1, worker 0 has 0"
        assert run.output.count(says) == 1 and "no run begins with that" in run.output
        assert run.metrics() == []
        check_nothing_left(run)


@pytest.mark.slow
def test_a_rejoiner_with_an_edited_model_is_refused_until_it_is_mended(tmp_path):
    """It is told by the leaf and tried again with back-off, and the others lose no step by it."""
    mended = tmp_path / "mended"
    sets = [*differs(2, "layer", mended=str(mended)), ENDLESS]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(20)
        run.kill(2)
        says = "params['extra']: worker 2 has float32[3], worker 0 has none"

        def is_refused_again() -> bool:
            return sum(e["reason"].startswith(says) for e in run.events("worker_exited")) >= 2

        run.wait_until("it is refused twice", is_refused_again)
        assert len(run.events("step_aborted")) <= 1  # that of the kill
        seen = len(run.events())
        mended.touch()
        run.wait_back(2, seen)
        run.process.terminate()
        assert run.finish() == 75
        check_each_step_once(run, run.metrics()[-1]["step"])
        check_replicas_agree(run)
        check_nothing_left(run)
