"""SIGTERM and SIGINT to a worker: the supervisor's if it got one too, else this worker's death.

SLURM and systemd send the signal that asks a job to stop to every process of it, and a worker that
died of it could not save what it has. But whoever signals one worker by hand gets a replacement.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

SUPERVISOR_S = 2.0  # for the supervisor to say that the run is to stop


def leave_stop_to_supervisor(
    stop_requested: Callable[[], bool], wait_s: float = SUPERVISOR_S
) -> None:
    """Dies of a SIGTERM or SIGINT only if the supervisor does not say "stop" within `wait_s`.

    A handler, and not a mask or SIG_IGN, which what user code executes would inherit; what it forks
    dies of the signal at once. Call from the main thread.

    Args:
      stop_requested: whether the supervisor has said so.
      wait_s: how long to wait for it.
    """
    worker = os.getpid()

    def on_signal(number: int, frame: object) -> None:
        if os.getpid() != worker:
            _die(number)
        threading.Thread(target=wait, args=(number,), daemon=True).start()

    def wait(number: int) -> None:
        end = time.monotonic() + wait_s
        while not stop_requested():
            if time.monotonic() > end:
                _die(number)
            time.sleep(0.02)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _die(number: int) -> None:
    # libc's own: Python's signal() is for the main thread, which may be in a collective.
    ctypes.CDLL(None).signal(number, 0)  # SIG_DFL
    os.kill(os.getpid(), number)
