"""`ftrain checkpoints`: each checkpoint once, with what is known of its health."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ftrain.checkpoints import Entry, age_text, as_json, entries, size_text, table
from ftrain.cli import main
from ftrain.errors import ConfigError
from tests.runs import plain_process
from tests.test_checkpoint import NEWER, OLDER, empty, flip_bit, lose_data, lose_metadata
from tests.test_checkpoint import run_dir as run_dir
from tests.test_checkpoint import two_checkpoints as two_checkpoints

# Orbax does not wait for its other reads when one has failed; they end in a closed event loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def healths(run_dir: Path, **options: bool) -> list[tuple[int, str]]:
    return [(e.step, e.health) for e in entries(str(run_dir), **options)]


def test_whole_checkpoints_are_committed_and_verified_when_read(run_dir):
    """Newest first, with the bytes that they take."""
    assert healths(run_dir) == [(NEWER, "committed"), (OLDER, "committed")]
    assert healths(run_dir, verify=True) == [(NEWER, "verified"), (OLDER, "verified")]
    newest = entries(str(run_dir))[0]
    files = (f for f in Path(newest.path).rglob("*") if f.is_file())
    assert newest.size == sum(f.stat().st_size for f in files) > 8192 * 4
    assert newest.tier == "disk" and newest.t > entries(str(run_dir))[1].t


def test_a_copy_keeps_its_age(run_dir, tmp_path):
    """The time of the save is in the checkpoint."""
    before = [e.t for e in entries(str(run_dir))]
    copy = shutil.copytree(run_dir, tmp_path / "copy", copy_function=shutil.copyfile)
    assert [e.t for e in entries(str(copy))] == before


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (empty, "nothing of a checkpoint is in it"),
        (lose_metadata, "no _METADATA"),
        (lambda p: shutil.rmtree(p / "d"), "no d"),
        (lambda p: (p / "manifest.ocdbt").write_bytes(b""), "manifest.ocdbt is empty"),
        (lambda p: (shutil.rmtree(p), p.write_text("x")), "it is a file, not a folder"),
    ],
)
def test_what_lacks_a_part_is_torn_without_reading_it(run_dir, damage, why):
    """The others stay as they are."""
    damage(run_dir / "checkpoints" / str(NEWER))
    newest, older = entries(str(run_dir))
    assert (newest.health, newest.why, older.health) == ("torn", why, "committed")


@pytest.mark.parametrize("damage", [flip_bit, lose_data])
def test_what_only_reading_finds_needs_verify(run_dir, damage):
    """A flipped bit: committed at a glance, torn by its digest."""
    damage(run_dir / "checkpoints" / str(NEWER))
    assert healths(run_dir)[0] == (NEWER, "committed")
    newest, older = entries(str(run_dir), verify=True)
    assert (newest.health, older.health) == ("torn", "verified")
    assert newest.why and "\n" not in newest.why


def test_what_a_dead_writer_left_is_named_as_unfinished(run_dir):
    """It counts for no restore, and takes room."""
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / str(NEWER), folder / "300.orbax-checkpoint-tmp-1")
    (folder / "notes.txt").write_text("the user's")
    assert healths(run_dir) == [(300, "unfinished"), (NEWER, "committed"), (OLDER, "committed")]
    assert entries(str(run_dir), verify=True)[0].health == "unfinished"


def test_the_table_fits_80_columns():
    """A long reason has a line of its own."""
    rows = [
        Entry(1234567, "disk", "p", 2_345_678_901, 0.0, "verified"),
        Entry(900, "memory", "p", 74_600, 4000.0, "torn", "no d"),
        Entry(90, "disk", "p", 12, 9990.0, "torn", "w" * 70),
    ]
    assert table(rows, 10_000.0) == (
        "   step     size      age  tier    health\n"
        "1234567   2.3 GB      3 h  disk    verified\n"
        "    900  74.6 kB  100 min  memory  torn: no d\n"
        "     90     12 B     10 s  disk    torn\n"
        f"    {'w' * 70}\n"
    )
    assert max(map(len, table(rows, 10_000.0).splitlines())) <= 80
    assert table([], 0.0) == "no checkpoint yet\n"


def test_json_has_every_field():
    """For programs: numbers, not words."""
    [row] = json.loads(as_json([Entry(5, "disk", "p", 12, 90.0, "torn", "no d")], 100.0))
    assert row == {
        "step": 5, "tier": "disk", "path": "p", "size": 12, "t": 90.0,
        "health": "torn", "why": "no d", "age_s": 10.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5e14, "500.0 TB")]
)
def test_sizes_are_in_decimal_units(size, text):
    """As disks have them."""
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_ages_are_in_the_largest_unit_of_which_there_are_two(seconds, text):
    """Never 0 of anything but seconds."""
    assert age_text(seconds) == text


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    """Exit 2, one line; a run that has not saved yet is a run."""
    with pytest.raises(ConfigError, match="gone is not there; give the run_dir of a run"):
        entries(str(tmp_path / "gone"))
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is no run's folder; give the run_dir of a run\n"
    (tmp_path / "events.jsonl").touch()
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no checkpoint yet\n"


def test_the_command_exits_3_when_verify_finds_a_torn_one(run_dir, capsys):
    """Without --verify the list is all that was asked for."""
    flip_bit(run_dir / "checkpoints" / str(OLDER))
    assert main(["checkpoints", str(run_dir), "--verify"]) == 3
    assert main(["checkpoints", str(run_dir)]) == 0
    assert "torn" in capsys.readouterr().out


def test_listing_imports_no_jax(run_dir):
    """It is quick, and takes nothing from a run."""
    code = "import sys\nfrom ftrain.cli import main\nmain(['checkpoints', sys.argv[1], '--json'])\n"
    listed = plain_process(code + "assert 'jax' not in sys.modules", run_dir)
    assert [row["step"] for row in listed] == [NEWER, OLDER]
