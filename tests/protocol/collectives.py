"""The data plane: gloo on cpu, NCCL on gpu, as far as their failures matter.

Both: an error is not atomic (one member may see it while the others complete), and a communicator
that failed once is dead for ever. gloo: only ring neighbours notice a death; ftrain's own abort
key of the view cancels the rest (rule R7). NCCL: JAX cancels it when an incarnation changes, and
a cancelled collective may *complete*, with garbage (rule R1).
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .calls import Collective, CollectiveFailed, Meet, Name, Violation
from .process import Process, State
from .rules import Rules
from .service import CoordinationService


class Garbage(NamedTuple):
    """What a cancelled NCCL collective, or a sync with no or two donors, leaves in the buffer."""

    reason: str


class Reduced(NamedTuple):
    """A step's reduced buffer. Its value depends on who took part (rounding)."""

    source: Any
    stopping: bool  # some member's buffer said so


@dataclass
class Operation:
    posted: dict[int, tuple[Process, Collective]] = field(default_factory=dict)


@dataclass
class Communicator:
    key: Any
    name: Name  # of the view that made it
    members: dict[int, int]
    broken: bool = False
    dying: bool = False  # gpu: a member's incarnation changed; the cancellation is on its way
    operations: dict[int, Operation] = field(default_factory=dict)  # by number, incomplete ones
    calls: dict[int, int] = field(default_factory=dict)  # operations posted, by incarnation

    def waiting(self) -> list[Process]:
        posted = [process for op in self.operations.values() for process, _ in op.posted.values()]
        return [process for process in posted if isinstance(process.waiting, Collective)]

    def withdraw(self, process: Process) -> None:
        for operation in self.operations.values():
            if operation.posted.get(process.id, (None,))[0] is process:
                del operation.posted[process.id]


class DataPlane:
    def __init__(
        self,
        style: str,
        rules: Rules,
        rng: random.Random,
        service: CoordinationService,
        note: Callable,
    ):
        self.style = style
        self.rules = rules
        self.service = service
        service.on_change = self.on_incarnation_change
        self.rng = rng
        self.note = note
        self.communicators: dict[Any, Communicator] = {}
        self.active: dict[Any, Communicator] = {}  # those that may need `progress`
        self.partial_error_rate = 0.0  # set to 0.03 while faults are on

    def post(self, process: Process, call: Collective) -> None:
        comm = self._communicator(call)
        if comm.broken:
            self._fail(process, comm, "communicator is dead")
            return
        number = comm.calls[process.incarnation] = comm.calls.get(process.incarnation, 0) + 1
        operation = comm.operations.setdefault(number, Operation())
        operation.posted[process.id] = (process, call)
        if operation.posted.keys() == comm.members.keys():
            del comm.operations[number]
            self._complete(comm, number, operation)

    def _communicator(self, call: Collective) -> Communicator:
        if self.style == "gpu":
            key = ("nccl", call.name)  # JAX keys them by incarnations
        elif self.rules.r7_new_communicators:
            key = ("gloo", call.name, call.use)
        else:
            key = ("gloo", tuple(sorted(call.view)))  # what JAX does by itself: by device ids
        if key not in self.communicators:
            self.communicators[key] = Communicator(key, call.name, dict(call.view))
        self.active[key] = self.communicators[key]
        return self.communicators[key]

    def _complete(self, comm: Communicator, number: int, operation: Operation) -> None:
        kinds = {call.kind for _, call in operation.posted.values()}
        if len(kinds) != 1:
            raise Violation(f"MISMATCH: one collective, called as {sorted(kinds)}")
        for id, (process, _) in operation.posted.items():
            if process.incarnation != comm.members[id] and self.rules.r7_new_communicators:
                raise Violation(f"IMPOSTOR: {process} in the place of {id}#{comm.members[id]}")
        payloads = [call.payload for _, call in operation.posted.values()]
        result = _broadcast(payloads) if kinds == {"sync"} else _reduce(payloads, comm, number)
        loser = None
        if len(operation.posted) > 1 and self.rng.random() < self.partial_error_rate:
            loser = self.rng.choice(list(operation.posted))
            comm.broken = True
        for id, (process, call) in operation.posted.items():
            if id == loser:
                self.note("COLLECTIVE", call.kind, "fails at", process, "only")
                self._fail(process, comm, "partial error")
            else:
                process.answer(result)

    def _fail(self, process: Process, comm: Communicator, why: str) -> None:
        if comm.dying and self.rng.random() < 0.3:
            process.answer(Garbage(why))  # seen on H200: the body ends without an exception
        else:
            process.fail(CollectiveFailed(why))

    def cancel(self, comm: Communicator, why: str) -> None:
        comm.broken = True
        self.note("COLLECTIVE cancelled:", why)
        for process in comm.waiting():
            self._fail(process, comm, why)
        comm.operations.clear()

    def on_incarnation_change(self) -> None:
        """JAX on gpu: the communicators of an incarnation that is gone are to be cancelled."""
        if self.style != "gpu":
            return
        for comm in self.active.values():
            if not all(self.service.is_connected_as(*member) for member in comm.members.items()):
                comm.dying = True

    def is_aborted(self, comm: Communicator) -> bool:
        return self.style == "cpu" and self.service.get("abort", comm.name) is not None

    def progress(self, processes: Iterable[Process]) -> None:
        """One tick of what happens by itself."""
        for comm in list(self.active.values()):
            if comm.broken:
                del self.active[comm.key]
            elif self.style == "gpu":
                if comm.dying and (not comm.operations or self.rng.random() < 0.1):
                    self.cancel(comm, "incarnation changed")
            elif not comm.operations:
                del self.active[comm.key]  # nothing can happen to it before the next `post`
            elif self.is_aborted(comm) and self.rng.random() < 0.2:
                self.cancel(comm, "abort key")  # ftrain's listener thread shuts the sockets
            elif self.rng.random() < 0.05:
                self._notice_closed_peer(comm, processes)

    def _notice_closed_peer(self, comm: Communicator, processes: Iterable[Process]) -> None:
        # Only one neighbour notices at a time; the others hang until the abort key.
        there = {(p.id, p.incarnation) for p in processes if p.alive}
        waiting = comm.waiting()
        if waiting and not there.issuperset(comm.members.items()):
            self.time_out(waiting[0], "closed by peer")

    def time_out(self, process: Process, why: str) -> None:
        """One member of a gloo collective gives up; nobody else learns of it by itself."""
        for comm in self.active.values():
            comm.withdraw(process)
        self.note("COLLECTIVE fails at", process, "-", why)
        process.fail(CollectiveFailed(why))

    def deadlock(self, processes: Iterable[Process]) -> str | None:
        """Members in a collective wait for one who waits, in the same life, in the barrier.

        Only a timeout ends that, so it is not a stall; but no rule-abiding run may come to it.
        """
        meeting = {(p.id, p.incarnation): p for p in processes if isinstance(p.waiting, Meet)}
        for comm in self.active.values():
            if comm.broken or comm.dying or self.is_aborted(comm):
                continue
            for operation in comm.operations.values():
                for member in comm.members.items():
                    if member[0] not in operation.posted and member in meeting and comm.waiting():
                        return f"{comm.waiting()} wait in a collective, {meeting[member]} meets"
        return None


def _broadcast(payloads: list[State | None]) -> State | Garbage:
    """The sync: the donor contributes its bits, the others zeros."""
    donors = [state for state in payloads if state is not None]
    return donors[0] if len(donors) == 1 else Garbage(f"{len(donors)} donors")


def _reduce(payloads: list[tuple[State, bool]], comm: Communicator, number: int) -> Reduced:
    states = {state for state, _ in payloads}
    if len(states) != 1:
        raise Violation(f"DIVERGED: one step from {sorted(states)}")
    return Reduced((comm.key, number), any(stopping for _, stopping in payloads))
