"""The beat: a few bytes of shared memory that tell the supervisor what a worker is doing.

The supervisor can read them whatever the worker's interpreter does: it may be stopped, spin in C
with its lock held, or be stuck in a device call. Behind them, in the same memory, the worker's
Python stacks when it crashes or is asked for them (`stacks`). No jax: both sides import this file.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import struct
import time
from typing import NamedTuple

from ftrain.stacks import STACK_SIGNAL

PHASES = (
    "start",  # importing, the user's constructor, the data set, the backend
    "open",  # opening the backend: its own devices
    "connect",  # opening the backend: waits for every worker of the run to have come once
    "compile",  # tracing and compiling, or waiting for the worker that does
    "ready",  # waiting for the supervisor's word, at the start of a run
    "barrier",  # in live_devices, from the end of one block to the beginning of the next
    "settle",  # meeting the members of a new view
    "restore",  # reading a checkpoint or computing the first state, for all
    "sync",  # state on its way between workers
    "compare",  # every worker's digest of the committed state with every other's
    "hook",  # the user's after_commit
    "copy",  # the state to the host, for a checkpoint
    "data",  # waiting for its samples
    "gradient",  # its own shards
    "reduce",  # the sum over the workers
    "update",  # the next state
    "evaluate",  # a part of an evaluation
    "save",  # at the end: the last checkpoint is being written
    "pause",  # too few workers
    "profile",  # the profiler starts, or stops and writes its trace
)
WAITING = frozenset({"barrier", "settle", "sync", "compare", "reduce"})  # a culprit is elsewhere
COLLECTIVES = frozenset({"sync", "compare", "reduce", "evaluate"})
UNHURRIED = frozenset({"open", "compile", "restore", "save", "profile"})  # long, and not stuck
UNTIMED = frozenset({"start", "connect", "ready", "pause"})  # others see to these

_LAYOUT = struct.Struct("<qqqd")  # round, step, phase, since
SIZE = 8 + 2 * _LAYOUT.size  # a counter, and two readings of which it names the one that is whole


class Reading(NamedTuple):
    """A beat as read: committed blocks, committed step, phase, and when the phase began."""

    round: int
    step: int
    phase: str
    since: float  # time.monotonic(), one clock for all processes of a host


class Beat:
    """A beat in the shared memory behind a file descriptor; one process writes, one reads.

    It keeps the descriptor, until it is closed.
    """

    def __init__(self, fd: int):
        self._fd, self._memory = fd, mmap.mmap(fd, SIZE)
        self._stacks_read = SIZE
        self._spent = dict.fromkeys(PHASES, 0.0)  # seconds since they were taken last
        self._phase, self._since = "start", time.monotonic()
        self.round, self.step = -1, -1

    @staticmethod
    def create(name: str) -> int:
        """A new descriptor for a beat, to be handed to a worker process."""
        fd = os.memfd_create(name)
        os.truncate(fd, SIZE)
        Beat(fd).phase("start")
        return fd

    def phase(self, name: str) -> None:
        """The worker enters phase `name`. About two microseconds."""
        # Written beside the reading that is valid, then made valid by one byte: whoever reads, and
        # wherever the writer is stopped, sees a whole one.
        now = time.monotonic()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = name, now
        count = (self._memory[0] + 1) % 256
        start = 8 + (count % 2) * _LAYOUT.size
        self._memory[start : start + _LAYOUT.size] = _LAYOUT.pack(
            self.round, self.step, PHASES.index(name), now
        )
        self._memory[0] = count

    def take_spent(self) -> dict[str, float]:
        """The writer's seconds in each phase since the last call."""
        now = time.monotonic()
        self._spent[self._phase] += now - self._since
        self._since = now
        spent = {phase: seconds for phase, seconds in self._spent.items() if seconds}
        for phase in spent:
            self._spent[phase] = 0.0
        return spent

    def read(self) -> Reading:
        """What the worker last wrote."""
        while True:
            count = self._memory[0]
            round_, step, phase, since = _LAYOUT.unpack_from(
                self._memory, 8 + (count % 2) * _LAYOUT.size
            )
            if self._memory[0] == count:
                return Reading(round_, step, PHASES[phase], since)

    def keep_stacks(self) -> None:
        """The worker's stacks are written here when a fatal signal or `STACK_SIGNAL` comes."""
        os.lseek(self._fd, SIZE, os.SEEK_SET)
        faulthandler.enable(self._fd)
        faulthandler.register(STACK_SIGNAL, self._fd)

    def new_stacks(self) -> str:
        """What has been written there since the last call; the supervisor's side."""
        chunks = []
        while chunk := os.pread(self._fd, 1 << 16, self._stacks_read):
            self._stacks_read += len(chunk)
            chunks.append(chunk)
        return b"".join(chunks).decode("utf-8", "backslashreplace")

    def close(self) -> None:
        """Lets go of the memory."""
        self._memory.close()
        os.close(self._fd)
