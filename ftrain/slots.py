"""A worker's place in the run, whichever process fills it."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING, Any, Protocol

from ftrain.beat import Reading
from ftrain.errors import (
    WORKER_LOCAL_ERROR,
    WORKER_LOST_MEMBERSHIP,
    WORKER_REFUSED,
    WORKER_STUCK,
)
from ftrain.processes import Exit
from ftrain.stacks import crashed, read_stacks

if TYPE_CHECKING:
    from ftrain.tcp_sockets import TcpSocket

COORDINATOR = -1  # beside the ids of workers, where the coordinator is counted with them
CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
# The last words of C++ code that ends its process (absl's log, jaxlib 0.10.2 to 0.12.0.1).
_FATAL = re.compile(r"^F\d{4} [^\]]*\] (.*)")

# With this line a client of JAX's coordination service begins to end its process, and then writes
# its stack, which takes up to half a second (jaxlib 0.10.2, 0.12.0.1).
CLIENT_GAVE_UP = "JAX distributed service detected fatal errors"
WHY_GAVE_UP = {  # by the status at the line's end
    "DEADLINE_EXCEEDED": "its heartbeats were not answered in time",
    "UNAVAILABLE": "it could not be reached",
    "ABORTED": "which had not heard from it in time",
}


def tells(line: str) -> bool:
    """Whether a line of a worker's stderr says why its process ends."""
    return CLIENT_GAVE_UP in line or _FATAL.match(line) is not None


class Process(Protocol):
    """A worker's process, here or on another host."""

    pid: int  # on its host; 0 if that is not known yet

    def send(self, line: str) -> None:
        """A line for its control pipe."""

    def signal(self, number: int) -> None:
        """Sends it a signal."""

    def kill(self) -> None:
        """SIGKILL to it and to all in its process group."""

    def is_stopped(self) -> bool:
        """Whether its kernel has stopped it."""

    def sockets(self) -> list[TcpSocket]:
        """Its TCP connections."""


class Pulse(Protocol):
    """Its beat, likewise."""

    def read(self) -> Reading:
        """What the process was doing when it was last heard of."""

    def new_stacks(self) -> str:
        """What it has written of them since the last call."""

    def close(self) -> None:
        """Lets go of it."""


@dataclasses.dataclass
class Slot:
    """One worker id. `child` is None from the process's end until its replacement starts (R9)."""

    worker: int
    child: Process | None = None
    beat: Pulse | None = None
    incarnation: int = -1  # starts so far, from 0
    started_at: float = 0.0  # time.monotonic()
    ready: bool = False  # it could take part
    going: bool = False  # and may
    fences: int = 0  # killed and reaped; the service has not acknowledged so many yet
    fence_by: float = 0.0  # time.monotonic() by which it should have
    restart_at: float | None = None  # when to start it again, once fenced
    died_at: float = float("-inf")  # time.monotonic() of its last failure
    died_step: int = -1  # the newest committed step then
    left: str | None = None  # why it says the run is over
    commits: int = 0  # of this incarnation
    refused: dict[str, Any] | None = None
    local_error: dict[str, Any] | None = None
    hung: str = ""  # why the watchdog ended it
    fatal: str = ""  # what C++ code said as it ended the process
    lost: str = ""  # why its host counts as lost
    gave_up: str = ""  # what its client of the coordination service ended it with

    def begin(self, child: Process, beat: Pulse) -> None:
        """A new process fills the slot."""
        if self.beat is not None:
            self.beat.close()
        self.child, self.beat = child, beat
        self.started_at, self.restart_at = time.monotonic(), None
        self.ready = self.going = False
        self.commits = 0
        self.hung = self.fatal = self.gave_up = self.lost = ""
        self.refused = self.local_error = None

    @property
    def fencing(self) -> bool:
        """Whether it may not be started yet for that (R9)."""
        return self.fences > 0

    @property
    def is_refused_by_all(self) -> bool:
        """Whether what it could not use is told for all workers; not if it alone is different."""
        return self.refused is not None and not self.refused["others_go_on"]

    def reading(self) -> Reading | None:
        """What its process is doing, or None."""
        return self.beat.read() if self.child is not None and self.beat is not None else None

    def new_stacks(self) -> str:
        """The Python stacks that its process has written since the last call."""
        return self.beat.new_stacks() if self.beat is not None else ""

    def hear(self, line: str) -> None:
        """A line of its process's stderr."""
        if found := _FATAL.match(line):
            self.fatal = found[1]
        if CLIENT_GAVE_UP in line:
            status = line.rpartition("absl::Status: ")[2]
            self.gave_up = WHY_GAVE_UP.get(status.partition(":")[0], status)

    def take_crash(self, ended: Exit, reading: Reading | None, dump: str) -> None:
        """A fatal signal raised by what the process itself did is an error of its own (rule R3).

        C++ code that gives up, as JAX's client does without its coordinator, says so and is not
        executing Python: that is no error of the user's code.
        """
        stack = crashed(read_stacks(dump))
        if ended.signal not in CRASHES or self.hung or (stack is None and self.fatal):
            return
        where = f" in {stack.frames[-1].function}" if stack else ""
        self.local_error = {
            "step": reading.step + 1 if reading else 0,
            "phase": reading.phase if reading else "start",
            "error": f"{ended.signal}{where}",
            "traceback": f"{stack}\n{ended.signal}" if stack else "",
        }

    def cause(self, ended: Exit) -> str:
        """What it died of, in words."""
        if self.lost or self.hung:
            return self.lost or self.hung
        if self.local_error is not None:
            return self.local_error["error"]
        if self.refused is not None:
            return self.refused["message"]
        if self.gave_up:
            return f"losing the coordinator ({self.gave_up})"
        if ended.signal is not None:
            said = self.fatal if ended.signal == "SIGABRT" else ""
            return f"SIGABRT: {said}" if said else ended.signal
        known = {
            WORKER_REFUSED: "its trainer or data",
            WORKER_LOCAL_ERROR: "an error of its own",
            WORKER_LOST_MEMBERSHIP: "being declared dead",
            WORKER_STUCK: "a cancelled collective that did not let it go",
        }
        early = " before the end of the run" if ended.exit_code == 0 else ""
        return known.get(ended.exit_code or 0, f"exit code {ended.exit_code}{early}")
