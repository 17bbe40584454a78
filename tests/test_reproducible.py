"""`reduction: reproducible` in real runs: every committed bit is that of one worker undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import ENDLESS, Run, running

STEPS = 200
SETS = [
    "trainer=tests/trainers.py:Mixed",
    "reduction=reproducible",
    "reduce_dtype=param",
    "digest_every_steps=10",
    "eval.every_steps=100",
]
SOON_S = 4.0  # well under what gloo and a settle wait by themselves


def lines(run: Run) -> list[dict[str, Any]]:
    """What a run committed, but for who and when: loss, metrics, evaluations, digests."""
    return [
        {k: v for k, v in row.items() if k not in ("t", "workers", "step_time_s")}
        for row in run.metrics()
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict[str, Any]]:
    """What all of its steps are."""
    return alone(tmp_path_factory.mktemp("alone") / "run", STEPS)


def alone(run_dir: Path, steps: int) -> list[dict[str, Any]]:
    """One worker, no fault."""
    sets = [*SETS, f"steps={steps}", "cluster.workers=1", "trainer_args.pause_s=0.0"]
    with running("tests/paced.yaml", run_dir, *sets) as run:
        assert run.finish() == 0
        rows = lines(run)
    assert len({row["digest"] for row in rows[:STEPS] if "digest" in row}) == STEPS // 10
    return rows


def test_a_run_with_kills_commits_the_bits_of_one_worker_undisturbed(tmp_path):
    """Four workers; 0 dies, then 1 and 3 at once: views of two, three and four members."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS, *SETS) as run:
        run.wait_for_step(20)
        for workers in ([0], [1, 3]):
            seen = len(run.events())
            run.kill(*workers)
            for worker in workers:
                run.wait_back(worker, seen)
        run.wait_for_step(STEPS)
        last = run.stop()
        check_each_step_once(run, last)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert {len(m["workers"]) for m in run.metrics()} >= {3, 4}
        # A stop drops the evaluation of the last step, if one was due there.
        assert lines(run)[:-1] == alone(tmp_path / "alone", last)[: last - 1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_any_number_of_workers_commits_the_bits_of_one(tmp_path, undisturbed, workers):
    """Without a fault; 12 shards on 2, 3 and 4."""
    sets = [*SETS, f"steps={STEPS}", f"cluster.workers={workers}"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        assert lines(run) == undisturbed


@pytest.mark.slow
def test_shards_that_do_not_divide_by_the_workers(tmp_path):
    """Seven on three and on two, so that some workers have more nodes than others."""
    rows = []
    for workers in (1, 2, 3):
        sets = ["batch_size=49", "batch_shards=7", "steps=20", f"cluster.workers={workers}"]
        with running("tests/paced.yaml", tmp_path / f"run{workers}", *SETS, *sets) as run:
            assert run.finish() == 0
            rows.append(lines(run))
    assert rows[1:] == rows[:1] * 2


@pytest.mark.slow
def test_who_dies_before_its_slices_are_sent_holds_nobody_up(tmp_path):
    """The others wait for it in the exchange; they drop the step and go on."""
    sets = [
        "trainer=tests/trainers.py:DiesAt",
        "trainer_args={where: 'ftrain.mesh:DataPlane.begin', worker: 3, call: 30}",
        "reduction=reproducible",
        "steps=60",
    ]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        assert run.finish() == 0
        check_each_step_once(run, 60)
        check_replicas_agree(run)
        [died] = [e for e in run.events("worker_exited") if e["worker"] == 3 and "signal" in e]
        later = next(m for m in run.metrics() if m["t"] > died["t"])
        assert later["t"] - died["t"] < SOON_S


@pytest.mark.slow
def test_a_member_that_comes_40_seconds_late_is_waited_for(tmp_path):
    """Longer than the 30 s that gloo waits where nobody tells it how long."""
    sets = ["trainer=tests/trainers.py:Late", "trainer_args={late_s: 40}", "steps=20"]
    with running("tests/paced.yaml", tmp_path / "run", *sets, "reduction=reproducible") as run:
        assert run.finish() == 0
        check_each_step_once(run, 20)
        assert max(m["step_time_s"] for m in run.metrics()) > 30
        assert run.events("step_aborted") == []
