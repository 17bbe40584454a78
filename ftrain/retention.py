"""Which checkpoints stay. No jax: the command line and the saver read folders with it.

A checkpoint that the restore passed over counts for nothing: it neither fills the quota nor lives
longer than a good one of its age would. One that is newer than the newest good one stays until its
step is saved again, which replaces it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from errno import ENOENT
from pathlib import Path
from typing import NamedTuple

from ftrain.events import METRICS_FILE

PART = ".part"  # <step>.part is being written, or was when its writer died
OLD = ".old"  # <step>.old is being replaced by <step>
_WRITERS = re.compile(r"(\d+)(\.part|\.old|\.orbax-checkpoint-tmp)")


def checkpoint_folder(run_dir: str) -> Path:
    """Where a run keeps its checkpoints; absolute, as Orbax wants it."""
    return Path(run_dir).absolute() / "checkpoints"


def steps_in(folder: Path) -> list[int]:
    """The steps that are there, whole, newest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted((int(e.name) for e in os.scandir(folder) if e.name.isdigit()), reverse=True)
    return []


class Place(NamedTuple):
    """Which folder a run began in; another may come to its path, or its disk may go."""

    device: int
    inode: int
    checkpoints_device: int

    @classmethod
    def of(cls, run_dir: str) -> Place:
        """The folder as it is now. Makes `checkpoints` in it.

        Raises:
          OSError: it cannot.
        """
        run, folder = os.stat(run_dir), checkpoint_folder(run_dir)
        folder.mkdir(exist_ok=True)
        return cls(run.st_dev, run.st_ino, os.stat(folder).st_dev)

    def check(self, run_dir: str) -> None:
        """Raises OSError if `run_dir` is another folder now, or `checkpoints` on another disk."""
        run, folder = os.stat(run_dir), checkpoint_folder(run_dir)
        if (run.st_dev, run.st_ino) != self[:2]:
            raise FileNotFoundError(ENOENT, "it is another folder than when the run began", run_dir)
        folder.mkdir(exist_ok=True)
        if os.stat(folder).st_dev != self.checkpoints_device:
            why = "it is on another disk than when the run began"
            raise FileNotFoundError(ENOENT, why, str(folder))


def superfluous(
    steps: Iterable[int],
    newest: int,
    *,
    keep: int,
    keep_every: int | None = None,
    best: int | None = None,
    bad: Collection[int] = (),
) -> list[int]:
    """The steps to remove.

    Args:
      steps: those that are there.
      newest: the one that was just saved, so good; it always stays.
      keep: how many of the newest good ones stay.
      keep_every: steps that it divides stay for good.
      best: the step that the config's metric likes best stays.
      bad: steps that the restore passed over.
    """
    older = sorted((s for s in steps if s <= newest), reverse=True)
    good = [s for s in older if s not in bad or s == newest]
    stay = {*good[:keep], best}
    if keep_every:
        stay |= {s for s in good if s % keep_every == 0}
    oldest = min(good[:keep])
    return [s for s in older if s not in stay and (s in good or s < oldest)]


def best_of(values: Mapping[int, float], steps: Iterable[int], mode: str) -> int | None:
    """The step with the largest (`max`) or smallest value, of equal ones the newest; or None."""
    sign = 1 if mode == "max" else -1
    there = [s for s in steps if s in values and values[s] == values[s]]  # a nan is no value
    return max(there, key=lambda s: (sign * values[s], s), default=None)


class MetricValues:
    """A metric by step, from the run's `metrics.jsonl`, of which each line is read once."""

    def __init__(self, run_dir: str, metric: str):
        self._path, self._metric = os.path.join(run_dir, METRICS_FILE), metric
        self._read = 0  # bytes
        self.values: dict[int, float] = {}

    def update(self) -> dict[int, float]:
        """Reads what has been written since the last call; a later line of a step wins."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            for row in map(json.loads, whole.splitlines()):
                self.values.pop(row["step"], None)
                if row.get(self._metric) is not None:
                    self.values[row["step"]] = row[self._metric]
        return self.values


def remove(path: Path, staging: Path | None = None) -> None:
    """Removes a checkpoint: gone at once, whatever becomes of the rest."""
    old = (staging or path.parent) / (path.name + OLD)
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def clean_up(folder: Path, staging: str | os.PathLike[str] | None = None) -> None:
    """Removes what writers that died have left. Only the one who writes there may call it.

    Args:
      folder: of checkpoints.
      staging: where they are written, if it is not there.
    """
    staging = Path(staging or folder)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(staging):
            found = _WRITERS.match(name)
            if found is None:
                continue
            step = folder / found[1]
            if name == f"{found[1]}{PART}" and not step.exists():
                os.rename(staging / name, step)  # whole: only its last rename is missing
            else:
                shutil.rmtree(staging / name, ignore_errors=True)
