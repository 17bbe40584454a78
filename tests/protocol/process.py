"""One operating system process of a worker, as the scheduler and the service see it."""

from collections.abc import Generator
from typing import Any, NamedTuple


class State(NamedTuple):
    """Committed training state: two states are equal to the bit if their values are."""

    step: int
    value: int  # names the bits; 0 is the initial state


class Process:
    """One life of worker `id`. Its program is `loop`; its memory dies with it."""

    def __init__(self, id: int, incarnation: int):
        self.id = id
        self.incarnation = incarnation  # the newest it registered (rule R3 makes more than one)
        self.loop: Generator | None = None

        # Memory: what the worker's program keeps.
        self.state: State | None = None  # committed; None is blank, which is not step 0
        self.uncommitted_copy: State | None = None  # held only if R6 is left out
        self.stop_requested = False  # its own SIGTERM handler ran
        self.stopping = False  # a view it committed in had agreed to stop
        self.barrier_calls: dict[Any, int] = {}  # of its client: last counter of each name

        # Where it is. At most one of these three is set.
        self.request: Any = None  # made, not yet at its destination
        self.waiting: Any = None  # at its destination, unanswered
        self.reply: tuple[Any, Exception | None] | None = (None, None)
        self.waiting_since = 0

        self.alive = True
        self.stopped = False  # SIGSTOP
        self.registered = False
        self.zombie = False  # declared dead and replaced, but not killed
        self.left = False  # its program ended by agreement
        self.last_holder = False  # the others left it alone with the state (R8 left out)
        self.last_commit = -1  # time

    def __repr__(self) -> str:
        return f"{self.id}#{self.incarnation}"

    @property
    def runnable(self) -> bool:
        has_work = self.request is not None or self.reply is not None
        return has_work and self.alive and not self.stopped

    def answer(self, value: Any) -> None:
        self._deliver((value, None))

    def fail(self, error: Exception) -> None:
        self._deliver((None, error))

    def _deliver(self, reply: tuple[Any, Exception | None]) -> None:
        if self.alive and self.waiting is not None:  # else nobody is there to hear it
            self.waiting = None
            self.reply = reply
