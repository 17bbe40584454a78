"""Stacks as faulthandler writes them, and which of them is worth showing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ftrain.beat import Beat
from ftrain.processes import Exit
from ftrain.slots import Slot
from ftrain.stacks import crashed, culprit, read_stacks
from tests.runs import environment

READING = """Thread 0x00007f90a35586c0 (most recent call first):
  File "recipes/slow.py", line 5 in __getitem__
  File "/x/ftrain/data.py", line 230 in _fetch
  File "/python3.11/threading.py", line 982 in run

Thread 0x00007f90a3558aaa (most recent call first):
  <no Python frame>

Current thread 0x00007f90a3fefb80 (most recent call first):
  File "/python3.11/concurrent/futures/_base.py", line 451 in result
  File "/x/ftrain/data.py", line 220 in shards
  File "/x/ftrain/loop.py", line 259 in _step
"""


BEFORE = """
import ctypes, os, signal, sys, threading
from ftrain.beat import Beat
from ftrain.stacks import STACK_SIGNAL

Beat(int(sys.argv[1])).keep_stacks()


def ask():
    signal.raise_signal(STACK_SIGNAL)

"""


def dump_of(work: str) -> tuple[str, int]:
    """What a process that keeps stacks leaves when it does `work`, and how it ended."""
    fd = Beat.create("test")
    beat = Beat(fd)
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + work, str(fd)], pass_fds=[fd], env=environment()
    )
    try:
        return beat.new_stacks(), done.returncode
    finally:
        beat.close()


def test_a_worker_that_waits_for_samples_shows_the_thread_that_reads_them():
    """The main thread only waits."""
    stack = culprit(read_stacks(READING), "data")
    assert [f.function for f in stack.frames] == ["run", "_fetch", "__getitem__"]
    assert str(stack).endswith('  File "recipes/slow.py", line 5, in __getitem__')


def test_in_any_other_phase_it_is_the_main_thread():
    """The step loop runs there."""
    assert culprit(read_stacks(READING), "hook").frames[-1].function == "result"


@pytest.mark.parametrize("dump", ["", "no stacks", "Current thread 0x1 (most recent call first):"])
def test_without_frames_there_is_nothing_to_show(dump):
    """A process that never answered."""
    assert culprit(read_stacks(dump), "data") is None and crashed(read_stacks(dump)) is None


def test_a_process_that_is_asked_writes_its_stacks_and_goes_on():
    """The lock of its interpreter need not be free: the handler runs in C."""
    dump, code = dump_of("ask()")
    assert code == 0
    assert culprit(read_stacks(dump), "hook").frames[-1].function == "ask"


def test_stacks_of_several_threads_are_told_apart():
    """The main thread is the last."""
    work = """
stop = threading.Event()


def wait_beside():
    stop.wait()


threading.Thread(target=wait_beside, daemon=True).start()
ask()
"""
    stacks = read_stacks(dump_of(work)[0])
    assert any(f.function == "wait_beside" for f in stacks[0].frames)
    assert not any(f.function == "wait_beside" for f in stacks[-1].frames)


@pytest.mark.parametrize(
    "crash, name", [("ctypes.string_at(0)", "SIGSEGV"), ("os.abort()", "SIGABRT")]
)
def test_a_crash_of_user_code_is_an_error_of_its_own_with_its_place(crash, name):
    """So the same crash again at the same step ends the run like the same exception."""
    dump, code = dump_of(crash)
    slot = Slot(2)
    slot.take_crash(Exit(None, signal.Signals(-code).name), None, dump)
    assert slot.local_error["error"].startswith(name)
    assert slot.local_error["traceback"].endswith(name)


def test_c_code_that_gives_up_is_no_error_of_the_users():
    """JAX's client ends its process when the coordinator is gone, from a thread without Python."""
    slot = Slot(2)
    slot.hear("F1130 04:05:06.789 12 client.h:80] Terminating process because of it")
    slot.take_crash(Exit(None, "SIGABRT"), None, "")
    assert slot.local_error is None
    assert slot.cause(Exit(None, "SIGABRT")) == "SIGABRT: Terminating process because of it"


def test_a_killed_process_has_not_crashed():
    """SIGKILL says nothing about the user's code."""
    slot = Slot(2)
    slot.take_crash(Exit(None, "SIGKILL"), None, "")
    assert slot.local_error is None
