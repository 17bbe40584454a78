"""Which checkpoints stay, and what writers that died leave: on folders, without any content."""

from __future__ import annotations

import json

import pytest

from ftrain.retention import MetricValues, best_of, clean_up, steps_in, superfluous


@pytest.mark.parametrize(
    ("steps", "newest", "options", "removed"),
    [
        ([10, 20, 30, 40], 40, {}, [20, 10]),  # the last two stay
        ([10, 20, 30, 40], 40, {"keep_every": 20}, [10]),  # and every 20th, for good
        ([10, 20, 30, 40], 40, {"best": 10}, [20]),  # and the best
        ([10], 10, {}, []),
        # A torn one does not fill the quota, and goes when good ones of its age go.
        ([10, 20, 30, 40], 40, {"bad": {30}}, [10]),
        ([10, 20, 30, 40, 50], 50, {"bad": {20}}, [30, 20, 10]),
        # Torn ones of a future that was given up: they wait for their steps to be saved again.
        ([10, 20, 900, 1000], 20, {"bad": {900, 1000}}, []),
        ([10, 20, 30, 1000], 30, {}, [10]),
        # What was just saved stays, even if the restore had passed over the one of that step.
        ([10, 20, 30], 30, {"bad": {30}}, [10]),
    ],
)
def test_the_newest_good_ones_stay(steps, newest, options, removed):
    """With keep=2: what is removed after `newest` was saved."""
    assert superfluous(steps, newest, keep=2, **options) == removed


def test_the_newest_good_one_is_never_removed():
    """Whatever else there is."""
    for newest in range(1, 8):
        for bad in ({5, 6, 7}, {newest}, set(range(8))):
            gone = superfluous(range(1, 8), newest, keep=1, bad=bad)
            assert newest not in gone and not [s for s in gone if s > newest]


@pytest.mark.parametrize(("mode", "best"), [("max", 30), ("min", 20)])
def test_the_best_of_those_that_are_there(mode, best):
    """Of equal ones the newest; a nan and a step that is not there are none."""
    values = {10: 0.9, 20: 0.1, 30: 0.9, 40: float("nan"), 50: 7.0}
    assert best_of(values, [10, 20, 30, 40], mode) == best
    assert best_of({}, [10], mode) is None


def test_a_metric_is_read_once_and_a_later_line_wins(tmp_path):
    """After a rewind a step has two lines; a step without the metric has none."""
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0, "eval_a": 0.5}]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 3, "lo')
    values = MetricValues(str(tmp_path), "eval_a")
    assert values.update() == {2: 0.5}
    with open(file, "a") as more:
        more.write('ss": 1.0, "eval_a": 0.7}\n' + json.dumps({"step": 2, "eval_a": 0.1}) + "\n")
    assert values.update() == {2: 0.1, 3: 0.7}


def test_what_dead_writers_left_is_removed(tmp_path):
    """Half-written folders go; a whole one that only lacked its name gets it; others stay."""
    for name in (
        "10",
        "20.part.orbax-checkpoint-tmp-1",
        "30.part",
        "10.part",
        "40.old",
        "50.orbax-checkpoint-tmp-9",
        "mine",
        "60.backup",
    ):
        (tmp_path / name).mkdir()
    clean_up(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "30", "60.backup", "mine"]
    assert steps_in(tmp_path) == [30, 10]
