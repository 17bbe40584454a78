"""Where snapshots of the committed state lie: a folder in memory, which outlives every process.

After the death of the coordinator, of all workers or of the whole process tree, the newest of them
and the newest checkpoint continue the run. The host's end takes them with it. No jax.

The folder's name holds the run folder's path and its number on its device, so that another folder
that comes to have that path, in a container that shares /dev/shm or after this one was removed,
never finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import time
from pathlib import Path
from typing import NamedTuple

MEMORY = Path("/dev/shm")
RUN = "run_dir"  # in the folder: whose it is
SAVE = ".save"  # <step>.save: a snapshot that waits to be written to disk
PART = ".part"
FORGOTTEN_S = 86400.0  # after which the snapshots of a run folder that has gone are removed


class Part(NamedTuple):
    """Whose snapshots, in a run over several hosts whose heads hold a lease."""

    rank: int  # of the host
    generation: int  # of the head


def memory_folder(run_dir: str, setting: str, part: Part | None = None) -> Path:
    """Where a run's snapshots are to lie.

    Args:
      run_dir: the run's folder, which must exist.
      setting: the config's `memory_folder`.
      part: of several hosts; two of them may be on one machine.
    """
    base = MEMORY if setting == "auto" else Path(setting).absolute()
    if setting == "auto" and not base.is_dir():
        return fallback_folder(run_dir, part)
    path, there = os.path.realpath(run_dir), os.stat(run_dir)
    name = hashlib.sha256(f"{path} {there.st_dev} {there.st_ino}".encode()).hexdigest()[:16]
    return base / f"ftrain-{os.getuid()}-{name}{'' if part is None else f'-host-{part.rank}'}"


def fallback_folder(run_dir: str, part: Part | None = None) -> Path:
    """Where they lie if memory has no room, and what another host's saver is to read."""
    folder = Path(run_dir).absolute() / "snapshots"
    return folder if part is None else folder / str(part.generation)


def memory_folders(run_dir: str, setting: str, part: Part | None = None) -> list[Path]:
    """All places where there may be snapshots of a run that this host can read."""
    return list(
        dict.fromkeys([memory_folder(run_dir, setting, part), fallback_folder(run_dir, part)])
    )


def has_snapshots(run_dir: str, setting: str) -> bool:
    """Whether there is one here, of whatever host or head."""
    memory, fallback = memory_folders(run_dir, setting)
    folders = [memory, *memory.parent.glob(f"{memory.name}-host-*"), fallback, *_below(fallback)]
    return any(map(snapshots_in, folders))


def adopt(run_dir: str, part: Part) -> None:
    """A new head takes over what is in `run_dir/snapshots`; who wrote there before no longer can.

    Its folder is another one than that of the heads before, whose workers may live on for a while.
    """
    own = fallback_folder(run_dir, part)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (own.parent, *_below(own.parent)):
        if folder == own:
            continue
        for name in os.listdir(folder):
            if name.removesuffix(SAVE).isdigit() and not (folder / name).is_dir():
                (folder / name).replace(own / name)
        if folder != own.parent:
            shutil.rmtree(folder, ignore_errors=True)


def _below(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [f for f in folder.iterdir() if f.name.isdigit() and f.is_dir()]
    return []


def open_folder(folder: Path, run_dir: str) -> None:
    """Makes the folder, for this user's eyes alone.

    Raises:
      OSError: it cannot be made, or is another user's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = os.lstat(folder)
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {there.st_uid}")
    (folder / RUN).write_text(os.path.realpath(run_dir))


def snapshots_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of each whole snapshot, newest first; one that waits for the disk counts."""
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            step = name.removesuffix(SAVE)
            if step.isdigit() and (name == step or int(step) not in found):
                found[int(step)] = folder / name
    return sorted(found.items(), reverse=True)


def settle_folder(folder: Path) -> None:
    """At a run's start: takes in what the processes before it left half done."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            if name.endswith(PART):
                (folder / name).unlink()
            elif name.endswith(SAVE):
                (folder / name).replace(folder / name.removesuffix(SAVE))


def remove_all(run_dir: str, setting: str, part: Part | None = None) -> None:
    """Removes a run's snapshots: it has ended with its state on disk, or begins afresh."""
    for folder in (memory_folder(run_dir, setting, part), fallback_folder(run_dir)):
        shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path = MEMORY, forgotten_s: float = FORGOTTEN_S) -> None:
    """Removes what is left of this user's runs whose folders were removed without it."""
    with contextlib.suppress(FileNotFoundError):
        for folder in base.glob(f"ftrain-{os.getuid()}-*"):
            with contextlib.suppress(OSError):
                newest = max(f.stat().st_mtime for f in folder.iterdir())
                gone = not os.path.exists((folder / RUN).read_text())
                if gone and time.time() - newest > forgotten_s:
                    shutil.rmtree(folder, ignore_errors=True)
