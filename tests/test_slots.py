"""What a worker's process died of, in words."""

from __future__ import annotations

import os

from ftrain.beat import Beat
from ftrain.processes import Exit
from ftrain.slots import Slot

LAST_WORDS = (
    "F1130 06:48:59.638203   29784 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died; see the "
    "other task logs for more details. absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded"
)
ABORTED, KILLED = Exit(None, "SIGABRT"), Exit(None, "SIGKILL")


def test_an_abort_of_the_coordination_client_is_told_as_what_it_is():
    """A signal's name says nothing to whoever reads the screen; the line before it does."""
    slot = Slot(0)
    slot.hear("something else")
    assert slot.cause(ABORTED) == "SIGABRT"
    slot.hear(LAST_WORDS)
    for ended in (ABORTED, KILLED):  # by itself, or by the supervisor, who has read the line
        assert slot.cause(ended) == (
            "losing the coordinator (its heartbeats were not answered in time)"
        )


def test_a_new_process_has_not_said_what_the_last_one_did():
    """Its own abort may have another cause."""
    slot = Slot(0)
    slot.hear(LAST_WORDS)

    class Pid:
        pid = os.getpid()

    slot.begin(Pid(), Beat(Beat.create("test-slot")))
    assert slot.cause(ABORTED) == "SIGABRT"
