"""`ftrain checkpoints RUN_DIR`: what is saved of a run, and whether it is whole.

Without `--verify` only names and sizes are looked at: Orbax renames a checkpoint to its step once
all of it is written, so one with all its parts is committed. `--verify` reads each and compares its
digest; only then jax is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ftrain.config import read_resolved
from ftrain.errors import EXIT_GAVE_UP, EXIT_OK, CheckpointUnreadableError, ConfigError
from ftrain.memory_tier import memory_folders, snapshots_in

# What Orbax 0.12 leaves in a folder that it has written to the end; `d` holds the arrays.
PARTS = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "d")
GOOD = ("committed", "verified")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One checkpoint, or what is left of one."""

    step: int
    tier: str  # where it lies: disk or memory
    path: str
    size: int  # bytes
    t: float  # when it was written, unix seconds
    health: str  # committed, verified, torn; unfinished: being written, or its writer died
    why: str = ""

    @property
    def is_good(self) -> bool:
        """Whether a run would continue from it, as far as is known."""
        return self.health in GOOD


def entries(run_dir: str, *, verify: bool = False) -> list[Entry]:
    """All checkpoints of a run, newest step first, of every tier.

    Raises:
      ConfigError: that folder is no run's.
    """
    folder = Path(run_dir)
    if not (folder / "checkpoints").is_dir() and not (folder / "events.jsonl").is_file():
        what = "is not there" if not folder.exists() else "is no run's folder"
        raise ConfigError(f"{run_dir} {what}; give the run_dir of a run")
    found = [*_on_disk(folder / "checkpoints"), *_in_memory(folder)]
    if verify:
        found = [_verified(e) if e.is_good else e for e in found]
    return sorted(found, key=lambda e: (e.step, e.t), reverse=True)


def table(found: Sequence[Entry], now: float) -> str:
    """The entries as lines for a terminal; the reason of a torn one below it, if it is long."""
    if not found:
        return "no checkpoint yet\n"
    rows = [("step", "size", "age", "tier", "health")]
    rows += [(str(e.step), size_text(e.size), age_text(now - e.t), e.tier, e.health) for e in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, entry in zip(rows, [None, *found], strict=True):
        cells = [c.rjust(w) for c, w in zip(row[:3], widths, strict=False)]
        line = "  ".join([*cells, row[3].ljust(widths[3]), row[4]])
        why = entry.why if entry is not None else ""
        fits = len(line) + len(why) + 2 <= 80
        lines += [f"{line}: {why}"] if why and fits else [line, *([f"    {why}"] if why else [])]
    return "\n".join(lines) + "\n"


def as_json(found: Sequence[Entry], now: float) -> str:
    """The entries as one JSON list, with `age_s`."""
    rows = [{**dataclasses.asdict(e), "age_s": round(now - e.t, 3)} for e in found]
    return json.dumps(rows, indent=1) + "\n"


def main(arguments: argparse.Namespace) -> int:
    """Prints the list; 3 if one was read and is not good."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # to read takes no accelerator, and none from a run
    found, now = entries(arguments.run_dir, verify=arguments.verify), time.time()
    sys.stdout.write(as_json(found, now) if arguments.json else table(found, now))
    all_good = all(e.is_good for e in found)
    return EXIT_OK if all_good or not arguments.verify else EXIT_GAVE_UP


def size_text(size: float) -> str:
    """`74.6 kB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def age_text(seconds: float) -> str:
    """`3 min`: the largest unit of which there are two or more, or seconds."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _on_disk(folder: Path) -> Iterator[Entry]:
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            number, _, rest = path.name.partition(".")
            if number.isdecimal():
                health, why = ("unfinished", path.name) if rest else _looks(path)
                yield Entry(
                    int(number), "disk", str(path), _size(path), _written(path), health, why
                )


def _looks(path: Path) -> tuple[str, str]:
    """The health of a committed folder by its parts alone."""
    if not path.is_dir():
        return "torn", "it is a file, not a folder"
    missing = [part for part in PARTS if not (path / part).exists()]
    empty = [p for p in PARTS[:3] if p not in missing and not (path / p).stat().st_size]
    if not missing and not any((path / "d").iterdir()):
        empty.append("d")
    told = [f"no {', '.join(missing)}"] * bool(missing) + [f"{p} is empty" for p in empty]
    if len(missing) == len(PARTS):
        told = ["nothing of a checkpoint is in it"]
    return ("torn", "; ".join(told)) if told else ("committed", "")


def _in_memory(folder: Path) -> Iterator[Entry]:
    """The snapshots of the run as this host has them."""
    config = folder / "config.yaml"
    setting = read_resolved(config).checkpoint.memory_folder if config.is_file() else "auto"
    for place in memory_folders(str(folder), setting):
        for step, path in snapshots_in(place):
            yield Entry(step, "memory", str(path), _size(path), _written(path), "committed")


def _verified(entry: Entry) -> Entry:
    from ftrain.checkpoint import check_digest, read_unchecked
    from ftrain.snapshots import read_snapshot

    path = Path(entry.path).absolute()
    try:
        meta, arrays = read_unchecked(path) if entry.tier == "disk" else read_snapshot(path)
        check_digest(path, meta, arrays)
    except CheckpointUnreadableError as error:
        return dataclasses.replace(entry, health="torn", why=error.why)
    return dataclasses.replace(entry, health="verified")


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # being written or removed
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _written(path: Path) -> float:
    """When Orbax committed it, by its own note, so that a copy keeps its age; else the file's."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stamp = json.loads((path / "_CHECKPOINT_METADATA").read_bytes())["commit_timestamp_nsecs"]
        return stamp / 1e9
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return time.time()
