"""Every sample exactly once an epoch, as counted by the state of real runs with deaths in them.

Scenarios A31 (samples when members come and go), A32 (batch and loss when they do), A22 (the count
of steps over stops).
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import numpy as np
import optax
import pytest

import ftrain
from ftrain.chaos.orders import order
from ftrain.order import sample_indices
from tests.checks import check_nothing_left, check_replicas_agree
from tests.ledger import LENGTH
from tests.runs import ENDLESS, Run, running
from tests.test_reproducible import lines

CONFIG = "tests/ledger.yaml"
SIZE = 50


def check_ledger(run: Run, epochs: int | None = None) -> None:
    """Each sample was used as often as the cursor says, on the way and where the run ended.

    No sample was ahead of another, so each epoch by itself used each sample once: the uses of two
    samples differ by one at most, and by none where an epoch ends.
    """
    state = ftrain.load_state(str(run.run_dir))
    samples_by_uses = Counter(state.params["uses"].tolist())
    print(f"{run.run_dir.name}: samples by how often they were used: {dict(samples_by_uses)}")
    cursor = int(state.cursor)
    assert epochs is None or cursor == epochs * LENGTH
    least, part = divmod(cursor, LENGTH)
    assert samples_by_uses == Counter({least: LENGTH - part, least + 1: part})
    steps = -(-cursor // SIZE)
    assert int(state.step) == optax.tree_utils.tree_get(state.opt_state, "count") == steps
    rows = [json.loads(row) for row in (run.run_dir / "ledger.jsonl").read_text().splitlines()]
    assert len(rows) > steps / 2  # a hook is passed over when its worker dies
    for row in rows:
        least, part = divmod(row["cursor"], LENGTH)
        assert (row["least"], row["most"], row["sum"], row["count"]) == (
            least,
            least + (part > 0),
            row["cursor"],
            row["step"],
        ), row
    metrics = run.metrics()
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    assert [row["samples"] for row in metrics] == [
        min(step * SIZE, cursor) for step in range(1, steps + 1)
    ]
    assert {row["loss"] for row in metrics} == {1.0}


def test_each_sample_counts_twice_after_two_epochs_with_deaths_at_their_ends(tmp_path):
    """A worker dies mid-epoch, in the epoch's last batch, its next one, and the run's last.

    That one has six samples: a shard of five and one of one, whose worker dies compiling for it.
    """
    run_dir = tmp_path / "run"
    deaths = [
        order(run_dir, "kill", "gradient", after_step=10),
        order(run_dir, "kill", "reduce", after_step=20),  # step 21 has the end of epoch 1 in it
        order(run_dir, "kill", "update", after_step=21),
        order(run_dir, "kill", "compile", after_step=40),
    ]
    with running(CONFIG, run_dir, "cluster.min_workers=3") as run:
        assert run.finish() == 0
        check_ledger(run, epochs=2)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert not any(path.exists() for path in deaths)
        assert {e["step"] for e in run.events("step_aborted")} >= {22, 41}
        [target] = run.events("target_known")
        assert (target["steps"], target["samples"], target["dataset_length"]) == (41, 2006, LENGTH)
    with running(CONFIG, run_dir) as run:
        assert run.finish(20) == 0
        assert "has finished: step 41 of 2 epochs is saved; set a larger `epochs`" in run.output


@pytest.mark.slow
def test_constant_loss_stays_one_and_weights_are_those_of_the_batch(tmp_path):
    """Four workers, two, and four again: one global batch, and its weighted mean, at every step."""
    sets = ["trainer=tests/ledger.py:Weighted", ENDLESS]
    with running(CONFIG, tmp_path / "run", *sets) as run:
        run.wait_for_step(10)
        seen = len(run.events())
        run.kill(1, 3)
        for worker in (1, 3):
            run.wait_back(worker, seen)
        run.wait_for_steps(1)
        last = run.stop()
        rows = run.metrics()
        assert {len(row["workers"]) for row in rows} >= {2, 4}
        cursor = 0
        for row in rows:
            batch = sample_indices(np.arange(cursor, row["samples"]), LENGTH, seed=0, shuffle=True)
            index = batch % LENGTH
            mask = index % 3
            assert row["loss"] == 1.0
            assert row["index"] == pytest.approx((mask * index).sum() / mask.sum(), rel=1e-5)
            cursor = row["samples"]
        assert cursor == last * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
def test_ledger_over_four_three_two_and_four_workers(tmp_path, reduction):
    """Three epochs; each number of workers sees a death mid-epoch and, but the last, a stop."""
    run_dir = tmp_path / reduction
    sets = ["epochs=3", f"reduction={reduction}", "trainer_args.pause_s=0.02"]
    for workers, kill_after, stop_at in ((4, 4, 15), (3, 22, 30), (2, 38, 45), (4, 52, None)):
        death = order(run_dir, "kill", "reduce", after_step=kill_after)
        with running(CONFIG, run_dir, *sets, f"cluster.workers={workers}") as run:
            if stop_at is not None:
                run.wait_for_step(stop_at)
                os.kill(run.process.pid, signal.SIGTERM)
            assert run.finish() == (0 if stop_at is None else 75)
            assert not death.exists()
            check_nothing_left(run)
    check_ledger(run, epochs=3)


@pytest.mark.slow
def test_a_run_that_ended_with_a_smaller_batch_is_made_longer(tmp_path):
    """One epoch, then two, then steps: the cursor goes on where it was, a step more is needed."""
    sets = ["trainer=tests/trainers.py:Paced", "batch_size=40", "batch_shards=10"]
    sets += ["cluster.workers=2"]  # 96 samples: 40, 40, 16
    ends = {"epochs=1": 96, "epochs=2": 192, "steps=8": 272}
    for item, cursor in ends.items():
        with running(CONFIG, tmp_path / "run", *sets, item) as run:
            assert run.finish() == 0
            assert run.metrics()[-1]["samples"] == cursor
    assert [row["samples"] for row in run.metrics()] == [40, 80, 96, 136, 176, 192, 232, 272]
    with running(CONFIG, tmp_path / "run", *sets, "epochs=2") as run:
        assert run.finish() == 0  # it is beyond that: nothing is done, nothing is lost
        assert len(run.metrics()) == 8
        assert run.events("checkpoint_restored")[-1]["step"] == 8


@pytest.mark.slow
def test_smaller_last_batch_is_bit_identical_for_any_workers(tmp_path):
    """`reproducible`: eight samples are left, a shard of five and one of three, five without.

    Of three workers the one that has both shards dies in that step.
    """
    sets = ["trainer=tests/ledger.py:MixedOrdered", "reduction=reproducible", "epochs=3"]
    sets += ["batch_size=35", "batch_shards=7", "digest_every_steps=1", "reduce_dtype=param"]
    rows = []
    for workers in (1, 2, 3):
        run_dir = tmp_path / f"run{workers}"
        death = order(run_dir, "kill", "reduce", worker=0, after_step=8) if workers == 3 else None
        with running(CONFIG, run_dir, *sets, f"cluster.workers={workers}") as run:
            assert run.finish() == 0
            rows.append(lines(run))
        assert death is None or not death.exists()
    assert rows[0][-1]["samples"] == 288
    assert rows[1:] == rows[:1] * 2


@pytest.mark.slow
def test_steps_are_counted_alike_by_optimizer_step_and_folder_over_five_stops(tmp_path):
    """Each count is used once, and a stop moves no later checkpoint."""
    sets = ["cluster.workers=1", "checkpoint={every_steps: 5, keep: 100}"]
    ends = [3, 7, 8, 15, 20]
    for steps in ends:
        with running(CONFIG, tmp_path / "run", *sets, f"steps={steps}") as run:
            assert run.finish() == 0
    assert [row["count"] for row in run.metrics()] == list(range(20))
    labels = sorted(int(path.name) for path in (run.run_dir / "checkpoints").iterdir())
    assert labels == sorted({*ends, 5, 10, 15, 20})
    for label in labels:
        state = ftrain.load_state(str(run.run_dir), label)
        count = int(optax.tree_utils.tree_get(state.opt_state, "count"))
        assert int(state.step) == count == label
        assert int(state.cursor) == state.params["uses"].sum() == label * SIZE
