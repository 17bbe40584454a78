"""One supervisor a run folder; a stale lock is not in the way, remains are waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ftrain import run_lock
from ftrain.errors import RunInUseError
from ftrain.run_lock import RunLock
from tests.runs import REPOSITORY

HOLD = (
    "import os, subprocess, sys\nfrom ftrain.run_lock import RunLock\nlock = RunLock(sys.argv[1])\n"
)
DEADLINE_S = 20.0


def release(lock: RunLock) -> None:
    """What the death of its holder does."""
    os.close(lock.fileno())


@pytest.fixture
def other(tmp_path) -> Iterator[subprocess.Popen]:
    """A process that holds the lock until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD + "print('held', flush=True)\nsys.stdin.read()", str(tmp_path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as held:
        assert held.stdout.readline() == b"held\n"
        yield held
        held.kill()


def test_a_free_run_folder_is_locked_with_our_pid(tmp_path):
    """So that the next one can say who holds it."""
    lock = RunLock(str(tmp_path))
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    release(lock)


def test_a_held_run_folder_is_refused_with_its_holder(tmp_path, other):
    """At once; with the pid and the way out."""
    started = time.monotonic()
    with pytest.raises(RunInUseError) as caught:
        RunLock(str(tmp_path))
    assert time.monotonic() - started < 5
    assert str(caught.value) == (
        f"{tmp_path} is in use by process {other.pid}, and a run directory has one supervisor; "
        "stop that one first, or give another folder with --run-dir"
    )


def test_a_refused_attempt_leaves_the_holder_s_lock_and_name(tmp_path, other):
    """A second refusal names the same process."""
    for _ in range(2):
        with pytest.raises(RunInUseError, match=f"process {other.pid}"):
            RunLock(str(tmp_path))


def test_a_killed_holder_s_lock_is_free(tmp_path, other):
    """SIGKILL: nothing was cleaned up, and nothing is in the way."""
    other.kill()
    other.wait(DEADLINE_S)
    release(RunLock(str(tmp_path)))


@pytest.mark.parametrize("left", ["", "99999999\n", "12345678901234567890\n", "no number\n"])
def test_a_stale_lock_file_is_not_in_the_way(tmp_path, left):
    """Whatever it says: only a holder counts. Its text is replaced whole."""
    (tmp_path / "lock").write_text(left)
    lock = RunLock(str(tmp_path))
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    release(lock)


def test_run_folders_are_locked_apart(tmp_path, other):
    """Two runs side by side."""
    (tmp_path / "b").mkdir()
    release(RunLock(str(tmp_path / "b")))


# A dead supervisor's coordinator holds the lock for as long as it takes to end the workers.
REMAINS = HOLD + (
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import sys;"
    "sys.stdin.read()'], pass_fds=[lock.fileno()])\n"
    "print(child.pid, flush=True)\nos._exit(0)"
)


@pytest.fixture
def remains(tmp_path) -> Iterator[subprocess.Popen]:
    """A supervisor that has died and left a coordinator, which ends with our end of the pipe."""
    with subprocess.Popen(
        [sys.executable, "-c", REMAINS, str(tmp_path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as dead:
        assert int(dead.stdout.readline())
        dead.wait(DEADLINE_S)
        yield dead


def test_the_remains_of_a_dead_supervisor_are_waited_for(tmp_path, remains, monkeypatch):
    """Its coordinator is still ending workers: the new run starts when that is done."""
    tried = []
    real = RunLock._try

    def try_and_end_the_remains(self: RunLock) -> bool:
        tried.append(real(self))
        remains.stdin.close()  # only after the first attempt has been refused
        return tried[-1]

    monkeypatch.setattr(RunLock, "_try", try_and_end_the_remains)
    release(RunLock(str(tmp_path)))
    assert tried[0] is False and tried[-1] is True


def test_remains_that_do_not_go_are_refused_in_the_end(tmp_path, remains, monkeypatch):
    """A coordinator that hangs: no endless wait."""
    monkeypatch.setattr(run_lock, "REMAINS_S", 0.2)
    with pytest.raises(RunInUseError):
        RunLock(str(tmp_path))


def test_a_holder_that_dies_while_it_is_looked_at_is_dead(monkeypatch):
    """Reading /proc/<pid>/stat of a process that has just been reaped fails with ESRCH."""

    class Gone:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def read(self):
            raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(run_lock, "open", lambda path: Gone(), raising=False)
    assert run_lock._is_alive(12345) is False
