"""Which saved states count once hosts have memories of their own, and what a head was not told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftrain.admission import Admission
from ftrain.config import Checkpoint
from ftrain.digests import Digests
from ftrain.events import EventLog, LineFile, read_lines
from ftrain.history import begun_in, belongs
from ftrain.journal import Journal
from ftrain.memory_tier import (
    Part,
    adopt,
    fallback_folder,
    has_snapshots,
    memory_folder,
    snapshots_in,
)
from ftrain.recorder import Recorder, write_late
from ftrain.records import read_records
from ftrain.restore import newest_step, restore_newest
from ftrain.saving import Saving
from ftrain.snapshots import read_meta, write_snapshot
from tests.test_checkpoint import LENGTH, Reports, described, weights
from tests.test_lease import take

BEGUN = [("a", 0), ("b", 300), ("c", 290)]


@pytest.mark.parametrize(
    ("history", "step", "counts"),
    [
        ("c", 400, True),  # the newest: all of it
        ("b", 290, True),  # up to where the next one began
        ("b", 291, False),
        ("a", 290, True),
        ("a", 295, False),  # b began after it, c went back before it
        ("a", 350, False),  # of the host that missed both beginnings
        ("never recorded", 10, False),
        ("", 10, False),
    ],
)
def test_a_snapshot_counts_up_to_where_each_later_history_began(history, step, counts):
    """What lies beyond was given up, whoever has it still."""
    assert belongs(history, step, BEGUN) == counts


def test_each_beginning_is_recorded_once_with_the_name_that_snapshots_carry(tmp_path):
    """By the first report of its first view."""
    lease = take(tmp_path, 1)
    log = EventLog(str(tmp_path), lease.staging)
    log("run_started", config={}, changed={})
    recorder = Recorder(str(tmp_path), log, lambda kind, fields: None, lease)
    for view, lineage, step, generation in (("v", 1, 0, 0), ("w", 1, 9, 0), ("x", 1, 5, 1)):
        for worker in (0, 1):
            record = {"view": view, "workers": [0, 1], "step": step, "lineage": lineage, "t": 1.0}
            record |= {"record": "view_changed", "seconds": 0.1, "sync_s": 0.1, "connect_s": 0.0}
            recorder.take(worker, record, generation)
    holder = lease.claim.holder
    assert begun_in(read_records(tmp_path)) == [(f"{holder}.0.1", 0), (f"{holder}.1.1", 5)]


def test_a_state_is_restored_from_the_history_of_the_records_alone(tmp_path):
    """A newer one, of a host that had missed a beginning, is named and passed over."""
    memory = tmp_path / "memory"
    memory.mkdir()
    for step, history in ((290, "b"), (350, "a"), (9, "c")):
        spec, state = weights(step)
        meta, arrays = described(spec, state)
        write_snapshot(memory, {**meta, "history": history}, arrays)
    assert newest_step(str(tmp_path), [memory], BEGUN) == 290
    assert newest_step(str(tmp_path), [memory], [("d", 100)]) == -1
    report = Reports()
    found = restore_newest(
        str(tmp_path), spec, dataset_length=LENGTH, report=report, memory=[memory], begun=BEGUN
    )
    assert found.state.step == 290
    skipped = report.of("checkpoint_skipped")
    assert [(s["step"], s["why"]) for s in skipped] == [
        (350, "it is of a history that was given up")
    ]


def test_of_hosts_without_state_the_one_with_the_newest_gives_it():
    """Whoever has state comes first, and then the lowest, whatever a memory holds."""
    admission = Admission(None, {"code": "x"}, 1)
    prints = dict.fromkeys(range(4), admission.fingerprint)
    blank = dict.fromkeys(range(4), -1)
    assert admission.donor(blank, prints, dict.fromkeys(range(4), 100)) == 0
    assert admission.donor(blank, prints, {0: 100, 1: 100, 2: 120, 3: 120}) == 2
    assert admission.donor({**blank, 3: 90}, prints, {0: 100, 1: 100, 2: 120, 3: 0}) == 3
    assert admission.donor({**blank, 1: 90, 3: 90}, prints, {0: 5, 1: 1, 2: 9, 3: 7}) == 1


def test_the_lowest_of_each_host_keeps_snapshots_and_one_of_all_gives_them_to_the_saver(tmp_path):
    """In its own host's memory, but what another host's saver reads in the shared folder."""
    spec, state = weights(10)
    digests, report = Digests(spec), Reports()
    digests.lower()
    digests.compile(lambda lowered: lowered.compile())
    memory, shared = tmp_path / "memory", tmp_path / "snapshots/2"
    saving = Saving(
        spec,
        digests,
        Checkpoint(every_steps=10),
        folder=memory,
        fallback=shared,
        run_dir=str(tmp_path),
        dataset_length=LENGTH,
        patience_s=5.0,
        report=report,
        news=SimpleNamespace(durable=lambda: None, save_failed=lambda: None),
        handover=shared,
        neighbours=[2, 3],
        history="holder.0",
    )
    assert saving.is_of(2, [0, 1, 2, 3]) and saving.is_of(3, [0, 3]) and saving.is_of(3, [3])
    assert not saving.is_of(3, [0, 2, 3])
    for for_disk in (False, True):
        saving.after_commit(state, 0, for_disk=for_disk, lineage=4)
        if saving._thread is not None:
            saving._thread.join()
    assert [s for s, _ in snapshots_in(memory)] == [10] == [s for s, _ in snapshots_in(shared)]
    assert [r["path"] for r in report.of("snapshot")] == [str(shared / "10.save")]
    assert read_meta(memory / "10")["history"] == "holder.0.4"


def commit(step: int, lineage: int = 1) -> str:
    fields = {"record": "commit", "t": float(step), "step": step, "lineage": lineage}
    fields |= {"samples": step * 8, "workers": [0, 1], "step_time_s": 0.1, "eval_due": False}
    return json.dumps(fields | {"metrics": {"loss": 1.0 / step}})


def test_what_an_agent_kept_is_what_the_head_may_not_have():
    """Of the workers that lived last, in the newest history; another head's numbers are others."""
    journal = Journal()
    for child, line in ((1, commit(9)), (2, commit(3, 2)), (2, '{"record": "ready"}')):
        journal.add(child, child + 10, line)
    journal.add(2, 12, commit(4, 2))
    assert [(w, r["step"]) for w, r in journal.commits({2})] == [(12, 3), (12, 4)]
    assert [(w, r["step"]) for w, r in journal.commits({1, 2})] == [(12, 3), (12, 4)]
    journal.forget(2)
    assert [e.seq for e in journal] == [3, 4]
    journal.clear()
    assert list(journal) == []


def test_commits_that_a_lost_head_was_not_told_of_follow_its_own(tmp_path):
    """Only those that follow without a gap; each once, whoever reported it."""
    staging = take(tmp_path, 1).staging
    metrics = LineFile(str(tmp_path / "metrics.jsonl"), staging)
    metrics.append({"t": 1.0, "step": 1, "samples": 8})
    told = [(w, json.loads(commit(s))) for s in (3, 2, 1, 5) for w in (2, 3)]
    assert write_late(str(tmp_path), staging, told) == [2, 3]
    rows = list(read_lines(str(tmp_path / "metrics.jsonl")))
    assert [(r["step"], r["samples"]) for r in rows] == [(1, 8), (2, 16), (3, 24)]
    assert rows[1]["loss"] == 0.5 and rows[1]["workers"] == [0, 1]
    assert write_late(str(tmp_path), staging, told) == []


def test_each_host_has_a_memory_of_its_own_and_a_new_head_adopts_what_is_shared(tmp_path):
    """Who wrote into the old head's folder cannot any more, and what lay there is kept."""
    run_dir, setting = str(tmp_path / "run"), str(tmp_path / "memory")
    Path(run_dir).mkdir()
    mine, other = (memory_folder(run_dir, setting, Part(rank, 1)) for rank in (0, 1))
    assert mine != other and not has_snapshots(run_dir, setting)
    old = fallback_folder(run_dir, Part(1, 1))
    old.mkdir(parents=True)
    for name in ("7", "9.save", "9.123.part"):
        (old / name).write_text(name)
    assert has_snapshots(run_dir, setting)
    adopt(run_dir, Part(1, 2))
    new = fallback_folder(run_dir, Part(1, 2))
    assert sorted(f.name for f in new.iterdir()) == ["7", "9.save"]
    assert not old.exists()
