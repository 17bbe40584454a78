"""A signal that asks to stop: survived when the supervisor says so too, deadly when it does not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.runs import REPOSITORY, environment

CODE = """
import os, sys, threading, time
from ftrain.worker_signals import leave_stop_to_supervisor
stop = threading.Event()
leave_stop_to_supervisor(stop.is_set, wait_s=0.3)
{before}
print(os.getpid(), flush=True)
sys.stdin.readline()
{after}
"""


def end_of(number: int, before: str = "", after: str = "") -> tuple[int, str]:
    """How a process ends, and what it prints, that gets the signal while it waits for a line."""
    code = CODE.format(before=before, after=after)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.send_signal(number)
        output, _ = process.communicate("\n", timeout=60)
        return process.returncode, output.strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_worker_alone_is_its_death(number):
    """Of that signal, as its supervisor sees it."""
    assert end_of(number, after="time.sleep(60)")[0] == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_of_a_run_is_the_supervisor_s(number):
    """It has said "stop" before the time is up: the worker saves and ends by itself."""
    assert end_of(number, after="stop.set(); time.sleep(1); print('saved')") == (0, "saved")


def test_what_user_code_starts_dies_of_it_at_once():
    """Whether forked or executed: terminate() of a loader's process works."""
    before = "pid = os.fork()\nif pid == 0: time.sleep(60); os._exit(0)"
    after = """
stop.set()
import subprocess
os.kill(pid, 15)
print(os.waitpid(pid, 0)[1])
child = subprocess.Popen(["sleep", "60"])
child.terminate()
print(child.wait())
"""
    assert end_of(signal.SIGTERM, before, after) == (0, "15\n-15")
