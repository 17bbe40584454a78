"""What `init_from.path` names: a run, an Orbax checkpoint or safetensors. No jax, nothing is read.

So the supervisor refuses a wrong path before anything starts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from ftrain.errors import InitFromError

SUFFIX = ".safetensors"
ORBAX_MARKS = ("_METADATA", "manifest.ocdbt")  # in the folder of one tree
KNOWN = (
    "a run's folder (or FOLDER@STEP), an Orbax checkpoint's, a .safetensors file, or a folder of "
    "such files"
)


class Source(NamedTuple):
    """Where parameters are to come from."""

    kind: Literal["run", "orbax", "safetensors"]
    path: str
    step: int | None = None  # of a run; None: its newest that is whole

    def __str__(self) -> str:
        return self.path if self.step is None else f"{self.path}, step {self.step}"


def find_source(path: str) -> Source:
    """The source that `path` names.

    Raises:
      InitFromError: there is nothing, or nothing of a kind that is known.
    """
    if "://" in path:
        raise InitFromError(f"{path} is a URL, and only files are read; copy or mount it first")
    if os.path.isdir(path):
        return _folder(Path(path))
    if os.path.isfile(path):
        if path.endswith(SUFFIX):
            return Source("safetensors", path)
        raise InitFromError(f"{path} is a file of another kind; give {KNOWN}")
    run, at, step = path.rpartition("@")
    if at and step.isdecimal() and os.path.isdir(run):
        return _run(Path(run), int(step))
    raise InitFromError(f"{path} is not there; give {KNOWN}")


def safetensors_files(path: str) -> list[str]:
    """The files of a safetensors source, sorted."""
    if os.path.isfile(path):
        return [path]
    return sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(SUFFIX))


def _folder(folder: Path) -> Source:
    if (folder / "checkpoints").is_dir():
        return _run(folder, None)
    if _is_tree(folder):
        return Source("orbax", str(folder))
    if safetensors_files(str(folder)):
        return Source("safetensors", str(folder))
    below = sorted(entry.name for entry in folder.iterdir() if _is_tree(entry))
    if len(below) == 1:  # one item: `default`, as Orbax's CheckpointManager calls it
        return Source("orbax", str(folder / below[0]))
    if below:
        raise InitFromError(f"{folder} holds {', '.join(below)}; give the path of one of them")
    steps = sorted((e.name for e in folder.iterdir() if e.name.isdecimal() and e.is_dir()), key=int)
    if steps:
        one = folder / steps[-1]
        raise InitFromError(f"{folder} holds the steps {', '.join(steps)}; give one, as {one}")
    raise InitFromError(f"{folder} holds nothing that is known; give {KNOWN}")


def _run(folder: Path, step: int | None) -> Source:
    checkpoints = folder / "checkpoints"
    names = [entry.name for entry in checkpoints.iterdir()] if checkpoints.is_dir() else []
    steps = sorted((int(name) for name in names if re.fullmatch(r"\d+", name)), reverse=True)
    if not steps or (step is not None and step not in steps):
        what = f"{folder} has no checkpoint" + ("" if step is None else f" of step {step}")
        instead = f"use one of the steps {', '.join(map(str, steps))}" if steps else f"give {KNOWN}"
        raise InitFromError(f"{what}; {instead}")
    return Source("run", str(folder), step)


def _is_tree(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in ORBAX_MARKS)
