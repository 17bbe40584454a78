"""A worker's place in the run, whichever process fills it."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from ftrain.beat import Beat, Reading
from ftrain.errors import WORKER_LOCAL_ERROR, WORKER_LOST_MEMBERSHIP, WORKER_REFUSED
from ftrain.processes import Child, Exit

# With this line a client of JAX's coordination service begins to end its process, and then writes
# its stack, which takes up to half a second (jaxlib 0.10.2, 0.12.0.1).
CLIENT_GAVE_UP = "JAX distributed service detected fatal errors"
WHY_GAVE_UP = {  # by the status at the line's end
    "DEADLINE_EXCEEDED": "its heartbeats were not answered in time",
    "UNAVAILABLE": "it could not be reached",
    "ABORTED": "which had not heard from it in time",
}


@dataclasses.dataclass
class Slot:
    """One worker id. `child` is None from the process's end until its replacement starts (R9)."""

    worker: int
    child: Child | None = None
    beat: Beat | None = None
    incarnation: int = -1  # starts so far, from 0
    started_at: float = 0.0  # time.monotonic()
    ready: bool = False  # it could take part
    going: bool = False  # and may
    fencing: bool = False  # killed and reaped; the service has not acknowledged yet
    restart_at: float | None = None  # when to start it again, once fenced
    died_at: float = float("-inf")  # time.monotonic() of its last failure
    died_step: int = -1  # the newest committed step then
    left: str | None = None  # why it says the run is over
    commits: int = 0  # of this incarnation
    refused: dict[str, Any] | None = None
    local_error: dict[str, Any] | None = None
    hung: str = ""  # why the watchdog ended it
    gave_up: str = ""  # what its client of the coordination service ended it with

    def begin(self, child: Child, beat_fd: int) -> None:
        """A new process fills the slot."""
        self.child, self.beat = child, Beat(beat_fd)
        os.close(beat_fd)
        self.started_at, self.restart_at = time.monotonic(), None
        self.ready = self.going = False
        self.commits, self.hung, self.gave_up = 0, "", ""
        self.refused = self.local_error = None

    def reading(self) -> Reading | None:
        """What its process is doing, or None."""
        return self.beat.read() if self.child is not None and self.beat is not None else None

    def hear(self, line: str) -> None:
        """A line of its process's stderr."""
        if CLIENT_GAVE_UP in line:
            status = line.rpartition("absl::Status: ")[2]
            self.gave_up = WHY_GAVE_UP.get(status.partition(":")[0], status)

    def cause(self, ended: Exit) -> str:
        """What it died of, in words."""
        if self.hung:
            return self.hung
        if self.local_error is not None:
            return self.local_error["error"]
        if self.refused is not None:
            return self.refused["message"]
        if self.gave_up:
            return f"losing the coordinator ({self.gave_up})"
        if ended.signal is not None:
            return ended.signal
        known = {
            WORKER_REFUSED: "its trainer or data",
            WORKER_LOCAL_ERROR: "an error of its own",
            WORKER_LOST_MEMBERSHIP: "being declared dead",
        }
        return known.get(ended.exit_code or 0, f"exit code {ended.exit_code}")
