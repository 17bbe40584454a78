"""A worker's snapshots: when they are taken, what is in them, and how the last save ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftrain import saving as saving_module
from ftrain.config import Checkpoint
from ftrain.digests import Digests
from ftrain.memory_tier import snapshots_in
from ftrain.saving import Saving
from ftrain.snapshots import read_meta, read_snapshot
from ftrain.worker_pipes import Told
from tests.test_checkpoint import Reports, weights
from tests.test_state import state_of

DEADLINE_S = 30.0


class Clock:
    """`time.monotonic`, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class News:
    """What the supervisor has said."""

    def __init__(self) -> None:
        self.is_durable: Told | None = None
        self.has_failed: Told | None = None

    def durable(self) -> Told | None:
        return self.is_durable

    def save_failed(self) -> Told | None:
        return self.has_failed


class Bench:
    """One worker's `Saving`, with what is around it."""

    def __init__(self, folder: Path, spec: Any, patience_s: float = 5.0, **rules: Any):
        digests = Digests(spec)
        digests.lower()
        digests.compile(lambda lowered: lowered.compile())
        self.memory, self.fallback = folder / "memory", folder / "run" / "snapshots"
        (folder / "run").mkdir()
        self.reports, self.news = Reports(), News()
        self.saving = Saving(
            spec,
            digests,
            Checkpoint(**rules),
            folder=self.memory,
            fallback=self.fallback,
            run_dir=str(folder / "run"),
            dataset_length=960,
            patience_s=patience_s,
            report=self.reports,
            news=self.news,
        )

    def wait(self) -> None:
        thread = self.saving._thread
        if thread is not None:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def commit(self, state: Any, evaluated: int = 0) -> None:
        self.saving.after_commit(state, evaluated)
        self.wait()

    def steps(self) -> list[int]:
        return [step for step, _ in snapshots_in(self.memory)]

    def asked(self) -> list[int]:
        return [r["step"] for r in self.reports.of("snapshot")]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(saving_module, "time", clock)
    return clock


def small(step: int) -> Any:
    return state_of({"w": jnp.full(3, float(step))}, step=step, cursor=48 * step)


def test_a_snapshot_holds_the_state_and_the_digest_of_the_device(tmp_path):
    """Every bit, and what a run needs to go on: cursor, data set, the last evaluation."""
    spec, state = weights(7)
    bench = Bench(tmp_path, spec)
    bench.commit(state, evaluated=5)
    [(step, path)] = snapshots_in(bench.memory)
    meta, arrays = read_snapshot(path)
    assert (step, meta["step"], meta["cursor"], meta["evaluated"]) == (7, 7, 7 * 48, 5)
    assert meta["dataset_length"] == 960 and meta == read_meta(path)
    assert arrays[0].tobytes() == np.asarray(state.leaves[0]).tobytes()
    assert meta["digest"] == bench.saving._digests(state).hex()
    assert bench.asked() == []  # for memory alone


def test_the_newest_two_are_kept_by_the_order_of_writing(tmp_path, clock):
    """A snapshot with a larger number, of a history that was given up, is not the newest."""
    bench = Bench(tmp_path, small(1)[0], memory_every_s=5.0)
    bench.memory.mkdir()
    (bench.memory / "900").write_bytes(b"torn")
    (bench.memory / "8.1.part").write_bytes(b"its writer has died")
    for step in (1, 2, 3):
        clock.now += 5.0
        bench.commit(small(step)[1])
        assert not (bench.memory / "900").exists()
    assert bench.steps() == [3, 2]
    assert [p.name for p in bench.memory.glob("*.part")] == ["8.1.part"]  # process 1 lives
    assert not any(Path(f"/proc/{2**22 + 1}").glob("*"))
    (bench.memory / f"8.{2**22 + 1}.part").write_bytes(b"its writer has died")
    clock.now += 5.0
    bench.commit(small(4)[1])
    assert [p.name for p in bench.memory.glob("*.part")] == ["8.1.part"]


def test_snapshots_come_every_so_many_seconds_and_not_twice_of_a_step(tmp_path, clock):
    """Between them nothing is taken, whatever is committed."""
    bench = Bench(tmp_path, small(1)[0], memory_every_s=5.0)
    for step, seconds in ((1, 0.0), (2, 4.9), (3, 0.2), (3, 9.0)):
        clock.now += seconds
        bench.commit(small(step)[1])
    assert bench.steps() == [3, 1]


def test_who_has_become_the_lowest_does_not_begin_with_a_copy_that_is_waited_for(tmp_path, clock):
    """On a GPU: the one before took a snapshot not long ago, and the others wait in that step."""
    bench = Bench(tmp_path, small(1)[0], memory_every_s=5.0)
    bench.saving._training_waits = True
    for step, seconds in ((7, 0.0), (8, 4.9), (9, 0.2)):
        clock.now += seconds
        bench.commit(small(step)[1])
    assert bench.steps() == [9]


def test_what_is_slow_comes_more_rarely(tmp_path, clock):
    """At most a tenth of the time goes into snapshots."""
    bench = Bench(tmp_path, small(1)[0], memory_every_s=5.0)
    bench.commit(small(1)[1])
    bench.saving._seconds = 2.0
    for seconds, steps in ((10.0, [1]), (9.0, [1]), (1.1, [2, 1])):
        clock.now += seconds
        bench.commit(small(2)[1])
        assert bench.steps() == steps


def test_what_training_waits_for_comes_more_rarely_still(tmp_path, clock, monkeypatch):
    """A device's copies take at most a hundredth of its time."""
    bench = Bench(tmp_path, small(1)[0], memory_every_s=5.0)

    real = saving_module.to_host

    def slow(leaves):
        clock.now += 2.0
        return real(leaves)

    monkeypatch.setattr(saving_module, "to_host", slow)
    bench.commit(small(1)[1])
    for seconds, steps in ((190.0, [1]), (11.0, [2, 1])):
        clock.now += seconds
        bench.commit(small(2)[1])
        assert bench.steps() == steps


def test_a_checkpoint_is_due_every_so_many_steps_or_seconds(tmp_path, clock):
    """Seconds are counted from the last that reached the disk, whoever took it."""
    rules = {"every_steps": 10, "every_s": 60.0, "memory_every_s": 0.0}
    bench = Bench(tmp_path, small(1)[0], **rules)
    for step, now in ((9, 1), (10, 2), (11, 3), (12, 61), (13, 62.5)):
        clock.now = 1000.0 + now
        bench.commit(small(step)[1])
    assert bench.asked() == [10, 13]
    bench.news.is_durable = Told(13, "", 1100.0)
    for step, now in ((14, 159), (15, 161)):
        clock.now = 1000.0 + now
        bench.commit(small(step)[1])
    assert bench.asked() == [10, 13, 15]


def test_without_a_memory_tier_only_what_waits_for_the_disk_is_there(tmp_path):
    """memory_every_s: 0. The saver removes it."""
    bench = Bench(tmp_path, small(1)[0], every_steps=1, memory_every_s=0.0)
    bench.commit(small(1)[1])
    [record] = bench.reports.of("snapshot")
    assert [p.name for p in bench.memory.iterdir() if p.name != "run_dir"] == ["1.save"]
    assert record["path"] == str(bench.memory / "1.save")


def test_what_waits_for_the_disk_outlives_newer_snapshots(tmp_path, clock):
    """The saver is slow; memory goes on."""
    bench = Bench(tmp_path, small(1)[0], every_steps=10, memory_every_s=1.0)
    for step in (10, 11, 12, 13):
        clock.now += 1.0
        bench.commit(small(step)[1])
    assert bench.steps() == [13, 12, 10]
    assert read_meta(bench.memory / "10.save")["step"] == 10


def test_training_does_not_wait_and_the_newest_wins(tmp_path, monkeypatch):
    """While one is being written, of those that are due for the disk the newest is kept waiting."""
    bench = Bench(tmp_path, small(1)[0], every_steps=1)
    began, held, real = threading.Event(), threading.Event(), saving_module.write_snapshot

    def slow(*args: Any) -> Path:
        began.set()
        assert held.wait(DEADLINE_S)
        return real(*args)

    monkeypatch.setattr(saving_module, "write_snapshot", slow)
    for step in (1, 2, 3):
        bench.saving.after_commit(small(step)[1], 0)  # returns
        assert began.wait(DEADLINE_S)
    held.set()
    bench.wait()
    assert bench.asked() == [1, 3]


def test_no_room_in_memory_falls_back_to_the_run_s_folder_and_says_so_once(tmp_path, clock):
    """Here its folder cannot be made."""
    bench = Bench(tmp_path, small(1)[0], memory_every_s=1.0)
    bench.memory.write_text("in the way")
    for step in (1, 2):
        clock.now += 1.0
        bench.commit(small(step)[1])
    [told] = bench.reports.of("memory_full")
    assert told["error"] == f"{bench.memory}: File exists"
    assert told["instead"] == str(bench.fallback)
    assert [step for step, _ in snapshots_in(bench.fallback)] == [2, 1]


def test_a_snapshot_that_cannot_be_written_anywhere_is_reported(tmp_path):
    """With the path and the system's text; the next is tried again."""
    bench = Bench(tmp_path, small(1)[0], every_steps=1)
    bench.memory.write_text("in the way")
    bench.fallback.write_text("in the way")
    bench.commit(small(1)[1])
    [failed] = bench.reports.of("snapshot_failed")
    assert failed["for_disk"] and failed["error"] == f"{bench.fallback}: File exists"
    bench.fallback.unlink()
    bench.commit(small(2)[1])
    assert bench.asked() == [2]


# The last save.


def test_the_last_state_is_asked_for_once_and_durable_when_the_saver_says_so(tmp_path):
    """By its digest, so that it is the same for whoever is lowest then."""
    spec, state = small(4)
    bench = Bench(tmp_path, spec)
    for _ in range(3):
        assert bench.saving.finish(state, 4) is None
        bench.wait()
    [asked] = bench.reports.of("snapshot")
    bench.news.is_durable = Told(4, "of an earlier history", 0.0)
    assert bench.saving.finish(state, 4) is None
    bench.news.is_durable = Told(4, asked["digest"], 0.0)
    assert bench.saving.finish(state, 4) == ""


def test_one_that_takes_over_asks_again(tmp_path):
    """It does not know what the one before it has asked for."""
    spec, state = small(4)
    first = Bench(tmp_path, spec)
    first.saving.finish(state, 4)
    first.wait()
    other = tmp_path / "other"
    other.mkdir()
    second = Bench(other, spec)
    second.saving.finish(state, 4)
    second.wait()
    assert first.reports.of("snapshot")[0]["digest"] == second.reports.of("snapshot")[0]["digest"]


def test_a_last_save_that_fails_is_tried_again_for_a_while(tmp_path, clock):
    """A second after each failure until `patience_s` is over; then the reason is final."""
    spec, state = small(4)
    bench = Bench(tmp_path, spec, patience_s=3.0)
    answered, result = 0, None
    while result is None:
        result = bench.saving.finish(state, 4)
        bench.wait()
        assert clock.now < 1010.0
        clock.now += 0.25
        if len(bench.asked()) > answered:
            answered += 1
            digest = bench.reports.of("snapshot")[-1]["digest"]
            bench.news.has_failed = Told(4, digest, clock.now, "no room")
    assert result == "no room" and len(bench.asked()) == 3
    assert clock.now - 1000.0 > 3.0


def test_a_restored_state_is_not_written_again(tmp_path):
    """It came from its checkpoint; one from memory is not on disk yet."""
    spec, state = small(100)
    bench = Bench(tmp_path, spec, every_steps=100)
    digest = bench.saving._digests(state).hex()
    bench.saving.restored(100, "disk", digest)
    bench.commit(state)
    assert bench.saving.finish(state, 0) == ""
    assert bench.steps() == [] and bench.asked() == []
    other = tmp_path / "other"
    other.mkdir()
    bench = Bench(other, spec, every_steps=0)
    bench.saving.restored(100, "memory", digest)
    bench.commit(state)
    assert bench.steps() == []
    assert bench.saving.finish(state, 0) is None
    bench.wait()
    assert bench.asked() == [100]


def test_on_save_error_stop_asks_for_the_end_until_a_save_works(tmp_path):
    """And `continue` never does."""
    spec, _ = small(1)
    bench = Bench(tmp_path, spec, on_save_error="stop")
    assert not bench.saving.wants_stop()
    bench.news.has_failed = Told(1, "a", 10.0, "no room")
    assert bench.saving.wants_stop()
    bench.news.is_durable = Told(2, "b", 11.0)
    assert not bench.saving.wants_stop()
    bench.saving._rules = Checkpoint(on_save_error="continue")
    bench.news.has_failed = Told(3, "c", 12.0, "no room")
    assert not bench.saving.wants_stop()


def test_arrays_may_be_dropped_while_they_are_written(tmp_path, monkeypatch):
    """No program takes the memory of committed arrays: the thread's hold keeps it as it is."""
    spec, state = weights(7)
    bench = Bench(tmp_path, spec)
    held, real = threading.Event(), saving_module.write_snapshot

    def slow(*args: Any) -> Path:
        assert held.wait(DEADLINE_S)
        return real(*args)

    monkeypatch.setattr(saving_module, "write_snapshot", slow)
    wanted = np.asarray(state.leaves[0]).copy()
    bench.saving.after_commit(state, 0)
    del state
    for _ in range(20):  # steps that come and go meanwhile
        jax.block_until_ready(jnp.asarray(np.random.default_rng(0).normal(size=8192)))
    held.set()
    bench.wait()
    assert read_snapshot(bench.memory / "7")[1][0].tobytes() == wanted.tobytes()
