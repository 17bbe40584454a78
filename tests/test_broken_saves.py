"""Ways to break what a run has saved: what is said of it, and the step that is continued from.

The run has checkpoints of steps 100 and 200 on disk and snapshots of 210 and 220 in memory, as
after the death of the whole process tree. `docs/durability.md` shows the same table.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from ftrain import checkpoint
from ftrain.digests import Digests
from ftrain.errors import CheckpointUnreadableError, FtrainError, StateMismatchError
from ftrain.restore import Restored, restore_newest
from ftrain.retention import clean_up
from ftrain.snapshots import hand_over, write_snapshot
from tests.runs import REPOSITORY
from tests.test_checkpoint import (
    LENGTH,
    Reports,
    described,
    empty,
    flip_bit,
    lose_data,
    lose_metadata,
    same_bits,
    truncate,
    weights,
)
from tests.test_state import state_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DISK, MEMORY = (100, 200), (210, 220)


class Saved(NamedTuple):
    """The folders of one run; tests damage a copy."""

    run_dir: Path
    memory: Path

    def disk(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / str(step)

    def snapshot(self, step: int) -> Path:
        return self.memory / str(step)

    def without_memory(self) -> Saved:
        """After the host's restart."""
        shutil.rmtree(self.memory)
        return self

    def restore(self, report: Callable[..., None]) -> Restored | None:
        spec, _ = weights(1)
        digests = Digests(spec)
        digests.lower()
        digests.compile(lambda lowered: lowered.compile())
        return restore_newest(
            str(self.run_dir),
            spec,
            dataset_length=LENGTH,
            report=report,
            memory=[self.memory],
            digest=digests,
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Saved:
    """Undamaged."""
    top = tmp_path_factory.mktemp("saved")
    saved = Saved(top / "run", top / "memory")
    saved.memory.mkdir()
    for step in DISK:
        checkpoint.write_checkpoint(saved.disk(step), *described(*weights(step)))
    for step in MEMORY:
        write_snapshot(saved.memory, *described(*weights(step)))
    return saved


@pytest.fixture
def saved(whole, tmp_path) -> Saved:
    """A copy of `whole`."""
    for folder in whole:
        shutil.copytree(folder, tmp_path / folder.name)
    return Saved(tmp_path / "run", tmp_path / "memory")


def change(file: Path, edit: Callable[[bytearray], None]) -> None:
    data = bytearray(file.read_bytes())
    edit(data)
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_in_memory(file: Path) -> None:
    change(file, lambda data: data.__setitem__(-9, data[-9] ^ 16))


def write_foreign(saved: Saved, step: int, **options: Any) -> None:
    """A checkpoint of another model or data set, under this run's name."""
    spec, state = weights(step) if options else state_of({"v": jnp.ones(5)}, step=step)
    shutil.rmtree(saved.disk(step))
    checkpoint.write_checkpoint(saved.disk(step), *described(spec, state, **options))


def write_future(saved: Saved, step: int) -> None:
    meta, arrays = described(*weights(step))
    shutil.rmtree(saved.disk(step))
    checkpoint.write_checkpoint(saved.disk(step), {**meta, "format": 99}, arrays)


def write_future_snapshot(saved: Saved, step: int) -> None:
    meta, arrays = described(*weights(step))
    write_snapshot(saved.memory, {**meta, "format": 99}, arrays)


def rename(saved: Saved, old: int, new: int) -> None:
    saved.disk(old).rename(saved.disk(new))


def lie_about_shapes(saved: Saved, step: int) -> None:
    meta, arrays = described(*weights(step))
    meta["shapes"] = [[[4, 2048], "float32"]]
    write_snapshot(saved.memory, meta, arrays)


# What is done to it; what is said, of step and tier and why; the step that is continued from.
WAYS: dict[str, tuple[Callable[[Saved], Any], list[tuple[int, str, str]], int]] = {
    "nothing": (lambda s: None, [], 220),
    "memory: the newest is cut": (
        lambda s: cut(s.snapshot(220)),
        [(220, "memory", "bytes, 33")],
        210,
    ),
    "memory: the newest is empty": (
        lambda s: s.snapshot(220).write_bytes(b""),
        [(220, "memory", "it is empty")],
        210,
    ),
    "memory: the newest is zeros": (
        lambda s: s.snapshot(220).write_bytes(bytes(40000)),
        [(220, "memory", "it is empty")],
        210,
    ),
    "memory: the newest is something else": (
        lambda s: s.snapshot(220).write_bytes(b"x" * 40000),
        [(220, "memory", "it is no snapshot of ftrain's")],
        210,
    ),
    "memory: a bit of the newest is flipped": (
        lambda s: flip_in_memory(s.snapshot(220)),
        [(220, "memory", "its content has changed since it was written (digest)")],
        210,
    ),
    "memory: the header of the newest lies": (
        lambda s: lie_about_shapes(s, 220),
        [(220, "memory", "its content has changed since it was written (digest)")],
        210,
    ),
    "memory: a writer died half way": (
        lambda s: s.snapshot(220).rename(s.memory / "220.4242.part"),
        [],
        210,
    ),
    "memory: the newest waits for the disk": (
        lambda s: (hand_over(s.snapshot(220)), s.snapshot(220).unlink()),
        [],
        220,
    ),
    "memory: of a later ftrain": (
        lambda s: write_future_snapshot(s, 220),
        [(220, "memory", "its format is 99, this ftrain reads 2")],
        210,
    ),
    "memory: both are torn": (
        lambda s: (cut(s.snapshot(220)), flip_in_memory(s.snapshot(210))),
        [(220, "memory", "bytes, 33"), (210, "memory", "its content has changed")],
        200,
    ),
    "memory: it is gone, as after the host's restart": (lambda s: s.without_memory(), [], 200),
    "disk: the largest file of the newest is halved": (
        lambda s: truncate(s.without_memory().disk(200)),
        [(200, "disk", "")],
        100,
    ),
    "disk: a bit of the newest is flipped": (
        lambda s: flip_bit(s.without_memory().disk(200)),
        [(200, "disk", "")],
        100,
    ),
    "disk: the newest is an empty folder": (
        lambda s: empty(s.without_memory().disk(200)),
        [(200, "disk", "")],
        100,
    ),
    "disk: the newest is a file": (
        lambda s: (shutil.rmtree(s.without_memory().disk(200)), s.disk(200).write_text("")),
        [(200, "disk", "")],
        100,
    ),
    "disk: the newest has lost its metadata": (
        lambda s: lose_metadata(s.without_memory().disk(200)),
        [(200, "disk", "")],
        100,
    ),
    "disk: the newest has lost a data file": (
        lambda s: lose_data(s.without_memory().disk(200)),
        [(200, "disk", "")],
        100,
    ),
    "disk: the newest is of another model": (
        lambda s: write_foreign(s.without_memory(), 200),
        [
            (
                200,
                "disk",
                "params['w']: this trainer has float32[8192], checkpoint 200 has no such leaf",
            )
        ],
        100,
    ),
    "disk: the newest is of another data set": (
        lambda s: write_foreign(s.without_memory(), 200, dataset_length=7),
        [(200, "disk", "len(dataset()): this trainer has 960, checkpoint 200 has 7")],
        100,
    ),
    "disk: the newest is of a later ftrain": (
        lambda s: write_future(s.without_memory(), 200),
        [(200, "disk", "its format is 99, this ftrain reads 2")],
        100,
    ),
    "disk: an older one was renamed to look newer": (
        lambda s: rename(s.without_memory(), 100, 900),
        [(900, "disk", "it is the state of step 100")],
        200,
    ),
    "disk: a writer died half way": (
        lambda s: s.without_memory().disk(200).rename(s.disk(200).with_name("200.part.x")),
        [],
        100,
    ),
    "disk: a writer died before the last rename": (
        lambda s: (
            s.without_memory().disk(200).rename(s.disk(200).with_name("200.part")),
            clean_up(s.run_dir / "checkpoints"),  # as the saver does when it starts
        ),
        [],
        200,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_broken_is_named_and_the_next_older_is_used(saved, way):
    """One line for each that is passed over, and the whole state of the one that is not."""
    damage, wanted, step = WAYS[way]
    damage(saved)
    report = Reports()
    restored = saved.restore(report)
    skipped = report.of("checkpoint_skipped")
    assert [(r["step"], r["tier"]) for r in skipped] == [(s, t) for s, t, _ in wanted]
    for row, (_, _, why) in zip(skipped, wanted, strict=True):
        assert why in row["why"] and row["why"] and "\n" not in row["why"]
    assert same_bits(restored.state, weights(step)[1])
    [told] = report.of("checkpoint_restored")
    assert (told["step"], told["tier"]) == (step, restored.tier)


# Nothing good is left: it is refused, with what to do.


def break_all(saved: Saved, damage: Callable[[Path], None]) -> None:
    for step in MEMORY:
        cut(saved.snapshot(step))
    for step in DISK:
        damage(saved.disk(step))


def foreign(saved: Saved) -> None:
    saved.without_memory()
    for step in DISK:
        write_foreign(saved, step)


def no_folder(saved: Saved) -> None:
    shutil.rmtree(saved.without_memory().run_dir / "checkpoints")
    (saved.run_dir / "checkpoints").write_text("")


REFUSED: dict[str, tuple[Callable[[Saved], Any], type[FtrainError], str]] = {
    "all are torn": (
        lambda s: break_all(s, truncate),
        CheckpointUnreadableError,
        "none of the steps [220, 210, 200, 100] can be read; to start afresh on purpose move",
    ),
    "memory is torn and there is no checkpoint": (
        lambda s: (break_all(s, truncate), shutil.rmtree(s.run_dir / "checkpoints")),
        CheckpointUnreadableError,
        "none of the steps [220, 210] can be read",
    ),
    "all are of another model": (
        foreign,
        StateMismatchError,
        "params['w']: this trainer has float32[8192], checkpoint 200 has no such leaf",
    ),
    "checkpoints is a file": (no_folder, CheckpointUnreadableError, "Not a directory"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_a_run_with_nothing_good_left_never_starts_over_by_itself(saved, way):
    """The supervisor ends with exit 2 then (`worker.local_error`)."""
    damage, kind, words = REFUSED[way]
    damage(saved)
    with pytest.raises(kind) as caught:
        saved.restore(Reports())
    assert words in str(caught.value)


def test_one_that_may_not_be_read_is_passed_over(saved, monkeypatch):
    """Its owner is another user; root, who runs tests in containers, may read all."""
    real = checkpoint.checkpointer

    def refuse() -> Any:
        raise PermissionError(13, "Permission denied", str(saved.disk(200)))

    calls = iter([refuse, real])
    monkeypatch.setattr(checkpoint, "checkpointer", lambda: next(calls)())
    saved.without_memory()
    report = Reports()
    assert saved.restore(report).state.step == 100
    assert "Permission denied" in report.of("checkpoint_skipped")[0]["why"]


def test_of_one_step_memory_is_read(saved):
    """It is quicker, and as good."""
    write_snapshot(saved.memory, *described(*weights(230)))
    checkpoint.write_checkpoint(saved.disk(230), *described(*weights(230)))
    assert saved.restore(Reports()).tier == "memory"


def test_disk_wins_where_it_is_newer(saved):
    """What memory has may be from before the coordinator's death but one."""
    checkpoint.write_checkpoint(saved.disk(300), *described(*weights(300)))
    restored = saved.restore(Reports())
    assert (restored.state.step, restored.tier) == (300, "disk")


def test_the_last_evaluation_comes_back(saved):
    """So that one that a stop has dropped is done first."""
    write_snapshot(saved.memory, *described(*weights(240), evaluated=200))
    assert saved.restore(Reports()).evaluated == 200


def test_every_way_has_a_line_in_the_documents():
    """docs/durability.md is the table of this file."""
    text = (REPOSITORY / "docs" / "durability.md").read_text()
    assert [way for way in [*WAYS, *REFUSED] if f"| {way} |" not in text] == []


def test_a_snapshot_and_a_checkpoint_hold_the_same(saved):
    """Whichever is read, the state and its description are equal."""
    meta, arrays = described(*weights(250))
    checkpoint.write_checkpoint(saved.disk(250), meta, arrays)
    path = write_snapshot(saved.memory, meta, arrays)
    from ftrain.snapshots import read_snapshot

    (m1, a1), (m2, a2) = checkpoint.read_checkpoint(saved.disk(250)), read_snapshot(path)
    assert m1 == m2 == json.loads(json.dumps(meta))
    assert (
        [a.tobytes() for a in a1] == [a.tobytes() for a in a2] == [np.asarray(arrays[0]).tobytes()]
    )
