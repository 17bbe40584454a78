"""A disk that is full: the run's checkpoints lie on a file system of their own that can be shrunk.

A tmpfs, mounted over `checkpoints` in a mount namespace that only the run sees, and that goes with
the last process in it. Full, it has the size of what is in it: the next write gets ENOSPC, as on
any full disk. What the run has saved is copied into its folder at the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from ftrain.chaos.network import end_holder, hold_namespace

ROOM = "50%"  # of the memory, as tmpfs has it by default; taken only as it is used


@functools.cache
def why_not() -> str:
    """Why this machine cannot fill a disk on purpose, or ""."""
    for tool in ("unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    if os.geteuid():
        return "only root may mount a file system"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Disk(folder) as disk:
                disk.fill()
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"mounts are not allowed: {error}"


class Disk:
    """The file system of a run's checkpoints. A context manager.

    Attributes:
      folder: the checkpoints, as this process reaches them.
      prefix: a command that begins with it has them at their usual place.
    """

    def __init__(self, run_dir: str | Path):
        self._real = Path(run_dir).absolute() / "checkpoints"

    def __enter__(self) -> Disk:
        self._real.mkdir(parents=True, exist_ok=True)
        there = shlex.quote(str(self._real))
        with contextlib.ExitStack() as undo:
            before = undo.enter_context(tempfile.TemporaryDirectory())
            if any(self._real.iterdir()):
                shutil.copytree(self._real, before, dirs_exist_ok=True)
            self._holder = hold_namespace(
                "--mount",
                f"mount -t tmpfs -o size={ROOM} ftrain-chaos {there}; "
                f"cp -a {shlex.quote(before)}/. {there}",
            )
        self.folder = Path(f"/proc/{self._holder.pid}/root{self._real}")
        self._enter = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt"]
        # There it begins at the root, and a folder that is entered before has the mounts of here.
        self.prefix = [*self._enter, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Not the folder itself: that would take the mount away with it.
            for path in self._real.iterdir():
                shutil.rmtree(path)
            shutil.copytree(self.folder, self._real, dirs_exist_ok=True)
        finally:
            end_holder(self._holder)

    def fill(self) -> None:
        """From now on nothing more can be written."""
        end = time.monotonic() + 2.0
        while True:
            room = os.statvfs(self.folder)
            # Never 0, which would mean without limit.
            used = max(1, room.f_blocks - room.f_bfree) * room.f_frsize
            try:
                self._resize(str(used))
            except subprocess.CalledProcessError:  # it has grown meanwhile
                if time.monotonic() > end:
                    raise
            else:
                return

    def free(self) -> None:
        """There is room again."""
        self._resize(ROOM)

    def _resize(self, size: str) -> None:
        command = ["mount", "-o", f"remount,size={size}", str(self._real)]
        subprocess.run([*self._enter, *command], check=True, capture_output=True)
