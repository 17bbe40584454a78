"""The saver's side: what it writes, removes and answers; in this process."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftrain import saver as saver_module
from ftrain.checkpoint import read_checkpoint, steps_in
from ftrain.retention import Place
from ftrain.saver import DiskWriter, serve
from ftrain.snapshots import hand_over, write_snapshot
from tests.test_checkpoint import Reports, described, flip_bit, weights

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Host:
    """A run's folder and its memory tier, with a writer."""

    def __init__(self, tmp_path: Path, **rules: Any):
        self.run_dir, self.memory = tmp_path / "run", tmp_path / "memory"
        self.run_dir.mkdir()
        self.memory.mkdir()
        self.rules = {"keep": 2, **rules}
        self.place = Place.of(str(self.run_dir))
        self.writer = DiskWriter(str(self.run_dir), self.place, **self.rules)
        self.reports = Reports()

    def snapshot(self, step: int) -> dict[str, Any]:
        """A snapshot that waits for the disk, as the order to write it."""
        meta, arrays = described(*weights(step))
        path = hand_over(write_snapshot(self.memory, meta, arrays))
        return {"step": step, "path": str(path), "digest": meta["digest"]}

    def serve(self, *orders: dict[str, Any]) -> None:
        serve(self.writer, io.StringIO("".join(json.dumps(o) + "\n" for o in orders)), self.reports)

    @property
    def steps(self) -> list[int]:
        return steps_in(self.run_dir / "checkpoints")

    def errors(self) -> list[str]:
        return [r["error"] for r in self.reports.of("save_failed")]


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(tmp_path)


def test_a_snapshot_becomes_a_checkpoint_and_its_file_goes(host):
    """Bit for bit, told once it is durable; what is for memory alone stays."""
    order = host.snapshot(7)
    host.serve(order)
    [saved] = host.reports.of("saved")
    assert (saved["step"], saved["digest"]) == (7, order["digest"]) and saved["seconds"] > 0
    meta, arrays = read_checkpoint(host.run_dir / "checkpoints" / "7")
    assert meta["digest"] == order["digest"] and meta["cursor"] == 7 * 48
    assert arrays[0].tobytes() == described(*weights(7))[1][0].tobytes()
    assert sorted(p.name for p in host.memory.iterdir()) == ["7"]


def test_the_newest_are_kept_and_steps_saved_again_replace_the_old(host):
    """keep=2; the second content of a step is the one that stays."""
    host.serve(*(host.snapshot(step) for step in (8, 9, 10)))
    assert host.steps == [10, 9]
    flip_bit(host.run_dir / "checkpoints" / "10")
    host.serve({"bad": 10}, host.snapshot(10))
    read_checkpoint(host.run_dir / "checkpoints" / "10")
    assert host.steps == [10, 9] and host.writer.bad == set()


def test_torn_ones_do_not_fill_the_quota(host):
    """The restore passed over 9 and 20, and went on from 8."""
    host.serve(*(host.snapshot(step) for step in (8, 9)))
    shutil.copytree(host.run_dir / "checkpoints" / "9", host.run_dir / "checkpoints" / "20")
    host.serve({"bad": 9}, {"bad": 20}, host.snapshot(12))
    assert host.steps == [20, 12, 9, 8]  # 8 and 12 are the two good ones
    host.serve(host.snapshot(14))
    assert host.steps == [20, 14, 12]


def test_the_best_by_a_metric_stays(tmp_path):
    """`keep_best: min loss` with keep 1."""
    host = Host(tmp_path, keep=1, keep_best="min loss")
    rows = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 4.0}]
    (host.run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    host.serve(*(host.snapshot(step) for step in (1, 2, 3)))
    assert host.steps == [3, 2]


def test_a_snapshot_that_changed_in_memory_is_not_written(host):
    """One bit: told, and no checkpoint claims to be it."""
    order = host.snapshot(7)
    path = Path(order["path"])
    data = bytearray(path.read_bytes())
    data[-9] ^= 16
    path.write_bytes(data)
    host.serve(order)
    assert host.errors() == [
        f"{host.writer.folder}/7: ValueError: {path}: "
        "its content has changed since it was written (digest)"
    ]
    assert host.steps == []


@pytest.mark.parametrize("what", ["run", "checkpoints"])
def test_another_folder_in_the_place_of_the_first_is_not_written_to(host, what):
    """A share that was unmounted leaves an empty folder on the disk below."""
    if what == "run":
        host.run_dir.rename(host.run_dir.with_name("old"))
        host.run_dir.mkdir()
        why = f"{host.run_dir}: it is another folder than when the run began"
    else:
        host.writer._place = host.place._replace(checkpoints_device=-1)
        why = f"{host.run_dir}/checkpoints: it is on another disk than when the run began"
    host.serve(host.snapshot(7))
    assert host.errors() == [why] and host.steps == []


def test_a_folder_that_is_no_folder_and_then_is(host):
    """The path and the system's text; the next save works."""
    folder = host.run_dir / "checkpoints"
    folder.rmdir()
    folder.write_text("in the way")
    host.serve(host.snapshot(7))
    assert host.errors() == [f"{folder}: File exists"]
    folder.unlink()
    host.serve(host.snapshot(8))
    assert host.steps == [8]


def test_a_write_that_fails_half_way_leaves_what_was_there(host, monkeypatch):
    """The step's old checkpoint, and no half of a new one that takes the room."""
    host.serve(host.snapshot(7))
    before = read_checkpoint(host.run_dir / "checkpoints" / "7")[0]["digest"]

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("ftrain.checkpoint._sync", full)
    host.serve(host.snapshot(7))
    [error] = host.errors()
    assert error.endswith("7.part: No space left on device")
    assert os.listdir(host.run_dir / "checkpoints") == ["7"]
    assert read_checkpoint(host.run_dir / "checkpoints" / "7")[0]["digest"] == before


def test_what_waits_no_more_is_removed(host):
    """Snapshots that were passed over for a newer one, whether or not that was written."""
    orders = [host.snapshot(step) for step in (5, 6, 7)]
    (host.run_dir / "checkpoints").rmdir()
    (host.run_dir / "checkpoints").write_text("in the way")
    host.serve(orders[1])
    assert sorted(p.name for p in host.memory.glob("*.save")) == ["6.save", "7.save"]
    (host.run_dir / "checkpoints").unlink()
    host.serve(orders[2])
    assert list(host.memory.glob("*.save")) == []


def test_any_exception_is_told_and_the_next_save_works(host, monkeypatch):
    """Of whatever type."""

    def broken(*args: Any) -> None:
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(saver_module, "write_checkpoint", broken)
    host.serve(host.snapshot(7))
    assert "MemoryError: no memory for the copy" in host.errors()[0]
    monkeypatch.undo()
    host.serve(host.snapshot(8))
    assert host.steps == [8]
