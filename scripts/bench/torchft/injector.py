"""SIGKILL to a worker that a seed draws; the same draws for every side."""

from __future__ import annotations

import os
import random
import signal
import time

from sides import WORKERS, Side


class Injector:
    """Draws workers uniformly, by a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def draw(self) -> int:
        return self.random.randrange(WORKERS)

    def kill_every(self, side: Side, every_s: float, start: float, end: float) -> int:
        """Kills at `start` and every so often until `end`; how many it killed.

        Who has not been restarted yet is not there to die.
        """
        at, killed = start, 0
        while at < end:
            time.sleep(max(0.0, at - time.time()))
            killed += kill(side, self.draw()) is not None
            at += every_s
        time.sleep(max(0.0, end - time.time()))
        return killed


def kill(side: Side, worker: int) -> float | None:
    """When it was killed, unix seconds; None if it has no process now."""
    t, pid = time.time(), side.pid(worker)
    if pid is None:
        return None
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return t
