"""The records of a run: each commit once, each fact once, replicas held against one another."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ftrain.events import EVENTS_FILE, METRICS_FILE, EventLog, LineFile, read_lines
from ftrain.recorder import OPEN_DIGESTS, Recorder


class Records:
    """A run folder with a recorder, fed by workers."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.told = run_dir, []
        self.recorder = Recorder(
            str(run_dir),
            EventLog(str(run_dir)),
            lambda kind, fields: self.told.append((kind, fields)),
        )

    def take(self, worker: int, record: str, *, generation: int = 0, **fields: Any) -> None:
        self.recorder.take(worker, {"record": record, "t": 100.0 + worker, **fields}, generation)

    def commit(
        self,
        worker: int,
        step: int,
        *,
        lineage: int = 1,
        generation: int = 0,
        workers: tuple[int, ...] = (0, 1),
        eval_due: bool = False,
        digest: str = "",
        loss: float = 0.5,
        skipped: dict[str, Any] | None = None,
        **metrics: float,
    ) -> None:
        metrics = {"loss": loss, **metrics, **({"digest": digest} if digest else {})}
        self.take(
            worker,
            "commit",
            generation=generation,
            lineage=lineage,
            step=step,
            samples=step * 48,
            workers=list(workers),
            step_time_s=0.01,
            eval_due=eval_due,
            metrics=metrics,
            skipped=skipped,
        )

    def lines(self) -> list[dict[str, Any]]:
        return list(read_lines(str(self.run_dir / METRICS_FILE)))

    def steps(self) -> list[int]:
        return [row["step"] for row in self.lines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(str(self.run_dir / EVENTS_FILE)) if row["event"] == name]


@pytest.fixture
def records(tmp_path) -> Records:
    return Records(tmp_path)


# Commits.


def test_a_commit_becomes_one_line_with_the_fields_of_the_contract(records):
    """t of the commit, step, loss, cursor, workers, seconds, then the user's metrics."""
    records.commit(0, 1, loss=0.25, accuracy=0.5, digest="ab")
    assert records.lines() == [
        {
            "t": 100.0,
            "step": 1,
            "loss": 0.25,
            "samples": 48,
            "workers": [0, 1],
            "step_time_s": 0.01,
            "accuracy": 0.5,
            "digest": "ab",
        }
    ]


def test_every_member_reports_and_one_line_is_written(records):
    """The first that comes; so it survives the death of any of them."""
    for worker in (1, 0, 2):
        records.commit(worker, 1, loss=float(worker))
    assert [(row["step"], row["loss"]) for row in records.lines()] == [(1, 1.0)]


def test_a_report_read_late_writes_no_line(records):
    """A slow worker's pipe, two steps behind."""
    for step in (1, 2, 3):
        records.commit(0, step)
    records.commit(1, 1)
    assert records.steps() == [1, 2, 3]


def test_a_rewind_says_so_on_every_line_it_replaces(records):
    """Steps committed again after a checkpoint was restored; a reader takes the later line."""
    for step in (1, 2, 3):
        records.commit(0, step)
    for step in (2, 3, 4):
        records.commit(0, step, lineage=2)
    assert records.steps() == [1, 2, 3, 2, 3, 4]
    assert [row.get("rewound", False) for row in records.lines()] == [False] * 3 + [True] * 2 + [
        False
    ]


def test_a_second_rewind_says_so_up_to_the_highest_step_ever(records):
    """Step 3 of the first history is still in the file."""
    for step, lineage in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 3), (3, 3)):
        records.commit(0, step, lineage=lineage)
    assert [row.get("rewound", False) for row in records.lines()] == [False] * 3 + [True] * 4


@pytest.mark.parametrize("late", [{"lineage": 1}, {"lineage": 9, "generation": -1}])
def test_a_commit_of_a_history_that_was_given_up_is_dropped(records, late):
    """A dead worker's pipe, read after the rewind; of an older lineage or coordinator."""
    records.commit(0, 1)
    records.commit(0, 1, lineage=2)
    records.commit(1, 7, **late)
    assert records.steps() == [1, 1] and records.recorder.step == 1


def test_lineages_of_a_new_coordinator_are_newer_than_all_before(records):
    """It counts them from 1 again."""
    records.commit(0, 5, lineage=3, generation=0)
    records.commit(0, 3, lineage=1, generation=1)
    assert records.steps() == [5, 3] and records.lines()[-1]["rewound"]


def test_a_continued_run_goes_on_after_its_last_line(tmp_path):
    """A new supervisor reads where the file ends, and marks what it replaces."""
    first = Records(tmp_path)
    for step in (1, 2, 3):
        first.commit(0, step)
    second = Records(tmp_path)
    assert (second.recorder.step, second.recorder.committed) == (3, False)
    for step in (3, 4):
        second.commit(0, step)
    assert [row.get("rewound", False) for row in second.lines()] == [False] * 3 + [True, False]


def test_each_commit_is_told_once(records):
    """The screen is no second place to count in."""
    for worker in (0, 1):
        records.commit(worker, 1)
    assert [kind for kind, _ in records.told] == ["commit"]
    assert records.recorder.committed


# Lines that wait for their evaluation.


def test_a_line_waits_for_the_evaluation_of_its_step(records):
    """It is written once, with `eval_` metrics; nothing is written meanwhile."""
    records.commit(0, 4, eval_due=True)
    assert records.lines() == []
    records.take(0, "evaluated", step=4, metrics={"accuracy": 0.9}, seconds=1.0)
    assert [(row["step"], row["eval_accuracy"]) for row in records.lines()] == [(4, 0.9)]


def test_an_evaluation_is_recorded_once(records):
    """Every member reports it."""
    records.commit(0, 4, eval_due=True)
    for worker in (0, 1):
        records.take(worker, "evaluated", step=4, metrics={"accuracy": 0.9}, seconds=1.0)
    [event] = records.events("evaluated")
    assert {k: event[k] for k in ("step", "metrics", "seconds")} == {
        "step": 4,
        "metrics": {"accuracy": 0.9},
        "seconds": 1.0,
    }
    assert records.steps() == [4]


def test_a_step_evaluated_again_after_a_rewind_is_recorded_again(records):
    """With its new values, on its new line."""
    for lineage, accuracy in ((1, 0.5), (2, 0.75)):
        records.commit(0, 4, lineage=lineage, eval_due=True)
        records.take(0, "evaluated", step=4, metrics={"accuracy": accuracy}, seconds=1.0)
    assert [row["eval_accuracy"] for row in records.lines()] == [0.5, 0.75]
    assert len(records.events("evaluated")) == 2


def test_a_line_that_waits_is_written_when_the_run_goes_on_without_it(records):
    """The evaluation was lost with a history: its line comes before the next, in order."""
    records.commit(0, 4, eval_due=True)
    records.commit(0, 5)
    assert records.steps() == [4, 5]


def test_a_line_that_waits_is_written_when_the_run_ends(records):
    """A stop in the middle of an evaluation."""
    records.commit(0, 4, eval_due=True)
    records.recorder.close()
    records.recorder.close()
    assert records.steps() == [4]


def test_an_evaluation_of_another_step_leaves_the_line_waiting(records):
    """Read late, from the step before."""
    records.commit(0, 4, eval_due=True)
    records.take(1, "evaluated", step=3, metrics={"accuracy": 0.1}, seconds=1.0)
    assert records.lines() == []


# Replicas.


def test_equal_digests_of_all_members_are_agreed_once(records):
    """The event names them all."""
    for worker in (1, 0):
        records.commit(worker, 100, digest="aa")
    [event] = records.events("digest_agreed")
    assert (event["step"], event["workers"], event["digest"]) == (100, [0, 1], "aa")
    assert records.events("replicas_differ") == []


def test_nothing_is_agreed_before_all_members_have_reported(records):
    """One of three is missing."""
    for worker in (0, 1):
        records.commit(worker, 100, digest="aa", workers=(0, 1, 2))
    assert records.events("digest_agreed") == []


def test_different_digests_are_found_and_named(records):
    """Whoever reports last; with both sides."""
    records.commit(0, 100, digest="a" * 64, workers=(0, 1, 2))
    records.commit(2, 100, digest="b" * 64, workers=(0, 1, 2))
    [event] = records.events("replicas_differ")
    assert (event["step"], event["digests"]) == (100, {"0": "a" * 64, "2": "b" * 64})
    assert records.events("digest_agreed") == []


def test_a_member_that_died_before_its_report_keeps_nobody_waiting(records):
    """The next step's agreement stands by itself; the open one waits, but not without bounds."""
    records.commit(0, 100, digest="aa")
    for worker in (0, 2):
        records.commit(worker, 200, digest="bb", workers=(0, 2))
    assert [e["step"] for e in records.events("digest_agreed")] == [200]
    records.commit(1, 100, digest="aa")  # from a host that was cut off
    assert [e["step"] for e in records.events("digest_agreed")] == [200, 100]
    for step in range(300, 300 + 2 * OPEN_DIGESTS):
        records.commit(0, step, digest="cc")
    assert len(records.recorder._digests) == OPEN_DIGESTS


def test_digests_of_a_history_that_was_given_up_are_not_held_against_the_new_one(records):
    """Other workers, other rounding: a step that is computed again may have other bits."""
    records.commit(0, 100, digest="aa", workers=(0, 1))  # and worker 1 died before it reported
    for worker in (1, 2):
        records.commit(worker, 100, lineage=2, digest="bb", workers=(1, 2))
    assert records.events("replicas_differ") == []


# Other facts.


def test_a_view_is_recorded_once(records):
    """Every member reports it under the same name; the next is another."""
    for view, workers in (("v1", [0, 1]), ("v2", [1])):
        for worker in workers:
            records.take(
                worker,
                "view_changed",
                view=view,
                workers=workers,
                step=3,
                lineage=1,
                seconds=0.5,
                sync_s=0.25,
                connect_s=0.125,
            )
    events = records.events("view_changed")
    assert [e["workers"] for e in events] == [[0, 1], [1]]
    assert [(e["t"], e["seconds"], e["sync_s"]) for e in events] == [
        (100.0, 0.5, 0.25),
        (101.0, 0.5, 0.25),
    ]


def test_an_abort_is_recorded_once_with_who_failed(records):
    """Per attempt, not per member."""
    for worker in (0, 1):
        records.take(worker, "step_aborted", view="v1", step=8, failed=[2], seconds=0.5)
    [event] = records.events("step_aborted")
    assert (event["step"], event["failed"], event["seconds"]) == (8, [2], 0.5)


def test_aborts_with_nobody_dead_are_counted_until_something_moves(records):
    """Ten of them at one step are a crash loop; a death or a commit begins the count anew."""

    def abort(view: str, failed: list[int]) -> int:
        records.take(0, "step_aborted", view=view, step=8, failed=failed, seconds=0.5)
        return records.recorder.aborts_in_place

    assert [abort("a", []), abort("b", []), abort("c", [1]), abort("d", [])] == [1, 2, 0, 1]
    records.commit(0, 8)
    assert records.recorder.aborts_in_place == 0


FACTS = {
    "state_synced": {"donor": 1, "step": 5, "bytes": 8, "seconds": 0.1, "digest": "aa"},
    "checkpoint_saved": {"step": 5, "seconds": 0.1, "tier": "disk"},
    "checkpoint_restored": {"step": 5, "tier": "disk"},
    "parameters_loaded": {"source": "runs/a", "leaves": 2, "fresh": ["head/w"], "unused": []},
    "checkpoint_skipped": {"step": 5, "why": "torn", "tier": "disk"},
    "memory_full": {"folder": "/x", "error": "no space", "instead": "/y"},
    "snapshot_failed": {"step": 5, "error": "no space"},
    "save_failed": {"step": 5, "error": "OSError: no space"},
}


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_is_recorded_with_its_fields_and_told(records, name):
    """Exactly the contract's fields; the screen hears of it too."""
    records.take(3, name, **FACTS[name])
    [event] = records.events(name)
    wanted = FACTS[name] | ({"worker": 3} if name == "state_synced" else {})
    assert {k: v for k, v in event.items() if k not in ("t", "event")} == wanted
    assert records.told == [(name, {**wanted, "t": 103.0})]


def test_a_record_nobody_knows_is_told_and_does_no_harm(records):
    """A newer worker's: the screen may make something of it."""
    records.take(3, "surprise", size=1)
    assert records.told == [("surprise", {"worker": 3, "t": 103.0, "size": 1})]


# The files.


def test_a_torn_last_line_is_cut_off_at_the_start(tmp_path):
    """A supervisor died in its write: the next one does not append to half a line."""
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    Records(tmp_path).commit(0, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 1}\n', '{"é'.encode()[:-1]])
def test_whatever_is_left_of_a_file_whole_lines_follow(tmp_path, torn):
    """Nothing, half a line, a whole one, half a character."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(torn)
    LineFile(str(path)).append({"step": 2, "text": "é\n"})
    assert [json.loads(line) for line in path.read_bytes().splitlines()][-1] == {
        "step": 2,
        "text": "é\n",
    }


def test_a_line_that_is_being_written_is_left_out_by_readers(tmp_path):
    """Whoever watches a run sees whole lines."""
    (tmp_path / "x.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}')
    assert list(read_lines(str(tmp_path / "x.jsonl"))) == [{"step": 1}]


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    """A run that has just been started."""
    assert list(read_lines(str(tmp_path / "x.jsonl"))) == []


def test_an_event_has_its_time_and_name(tmp_path):
    """t in unix seconds, then the fields."""
    EventLog(str(tmp_path))("worker_fenced", worker=3)
    [event] = read_lines(str(tmp_path / EVENTS_FILE))
    assert list(event) == ["t", "event", "worker"] and event["t"] > 1.7e9


def strict(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_null(records, value):
    """JSON has no nan: a reader in another language would stop at that line."""
    records.commit(0, 1, loss=value, accuracy=value, eval_due=True)
    metrics = {"error": value, "mean": 0.5}
    records.take(0, "evaluated", step=1, metrics=metrics, seconds=0.1)
    for name in (METRICS_FILE, EVENTS_FILE):
        for line in (records.run_dir / name).read_text().splitlines():
            json.loads(line, parse_constant=strict)
    [line] = records.lines()
    assert [line[k] for k in ("loss", "accuracy", "eval_error", "eval_mean")] == [None] * 3 + [0.5]
    assert records.events("evaluated")[0]["metrics"] == {"error": None, "mean": 0.5}


def test_a_skipped_step_is_one_event_however_many_report_it(records):
    """And again when its history was given up and it is committed anew."""
    skipped = {"shards": [3, 4], "workers": [1], "what": "loss nan; shard 3 of worker 1"}
    for worker in (0, 1):
        records.commit(worker, 1, skipped=skipped)
        records.commit(worker, 2)
    assert [(e["step"], e["shards"], e["workers"]) for e in records.events("step_skipped")] == [
        (1, [3, 4], [1])
    ]
    assert [kind for kind, _ in records.told] == ["commit", "step_skipped", "commit"]
    records.commit(0, 1, lineage=2, skipped=skipped)
    assert [e["step"] for e in records.events("step_skipped")] == [1, 1]


def test_lines_that_a_full_disk_refuses_are_written_once_there_is_room(tmp_path, monkeypatch):
    """In order and whole, a line that was half written too; the run goes on meanwhile."""
    file = LineFile(str(tmp_path / "lines"))
    real, room = os.write, [5]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr("ftrain.events.os.write", write)
    for step in (1, 2):
        file.append({"step": step})
    assert (tmp_path / "lines").read_bytes() == b'{"ste'
    room[0] = 1000
    file.append({"step": 3})
    assert [row["step"] for row in read_lines(file.path)] == [1, 2, 3]
