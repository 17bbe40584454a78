"""One supervisor a run directory: a lock that dies with its holders, so none is ever stale."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time

from ftrain.errors import RunInUseError

REMAINS_S = 15.0  # how long the remains of a killed supervisor may take to go


class RunLock:
    """Holds `run_dir/lock`. The coordinator inherits it: it ends a dead supervisor's workers first.

    Args:
      run_dir: the run's folder.
      path: another file to hold, for a host that is not the head's: `host_lock`.

    Raises:
      RunInUseError: a live supervisor holds it.
    """

    def __init__(self, run_dir: str, path: str | None = None):
        self._path = path = path or os.path.join(run_dir, "lock")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + REMAINS_S
        while not self._try():
            holder = self._holder()
            # Held, and the supervisor that took it is dead: its coordinator is cleaning up.
            if holder is None or _is_alive(holder) or time.monotonic() > deadline:
                os.close(self._fd)
                raise RunInUseError(run_dir, holder)
            time.sleep(0.05)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if os.path.exists(self._path) and not os.path.samestat(
            os.stat(self._path), os.fstat(self._fd)
        ):  # a head has put its nameplate there meanwhile
            os.close(self._fd)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            return self._try()
        return True

    def _holder(self) -> int | None:
        text = os.pread(self._fd, 32, 0).strip()
        return int(text) if text.isdigit() else None

    def fileno(self) -> int:
        """The descriptor for the coordinator to inherit."""
        return self._fd

    def identity(self) -> str:
        """Which lock this is: whoever holds it knows that all who held it before have ended."""
        there = os.fstat(self._fd)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {there.st_dev} {there.st_ino}"


def put_nameplate(run_dir: str, staging: str) -> int:
    """Puts a lock of one's own in the place of `run_dir/lock`, held while this process lives.

    For a head that has a lease: one that is stopped or cut off may hold the file that was there.
    Runs without a lease are kept out by it, and others see whose run it is.

    Returns:
      Its descriptor.
    """
    own = os.path.join(staging, "lock")
    fd = os.open(own, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    os.rename(own, os.path.join(run_dir, "lock"))
    return fd


def host_lock(run_dir: str, rank: int) -> str:
    """The file that the agent of a rank holds: on its own host, whether run_dir is shared or not.

    So an agent that follows a dead one begins when nothing that this one started is left here.
    """
    name = hashlib.sha256(os.fsencode(os.path.abspath(run_dir))).hexdigest()[:16]
    return os.path.join(tempfile.gettempdir(), f"ftrain-{os.getuid()}-{name}-host-{rank}.lock")


def running_supervisor(run_dir: str) -> int | None:
    """The process that holds the run directory, as far as can be seen without taking the lock.

    It is not taken, not even for a moment: a supervisor that starts just then would be refused.
    """
    try:
        with open(os.path.join(run_dir, "lock"), encoding="ascii", errors="replace") as file:
            text = file.read(32).strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() and _is_alive(int(text)) else None


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # reaped before, or while, it is read
        return False
