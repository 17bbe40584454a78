"""The coordination service: registration, liveness barrier, named barriers, key-value store.

The rules are those of XLA's `coordination_service.cc` with `recoverable=True`. None of its
requests but the registration carries an incarnation: a call counts for the *task id*, whoever
makes it. Rules R2, R4 and R9 exist because of what is modelled here.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .calls import Name, SettleFailed
from .process import Process


@dataclass
class NamedBarrier:
    """One id of `wait_at_barrier`; instance number `counter` is the one that counts now."""

    name: Name
    counter: int
    began: int
    arrived: dict[int, bool]
    waiting: dict[int, Process] = field(default_factory=dict)
    passed: bool = False
    error: str | None = None


class CoordinationService:
    def __init__(self, note: Callable):
        self.note = note
        self.on_change: Callable[[], None] = lambda: None  # an incarnation appeared or went
        self.connected: dict[int, bool] = {}
        self.incarnation: dict[int, int] = {}  # the last one registered, connected or not
        self.liveness_arrived: set[int] = set()
        self.liveness_callers: list[Process] = []
        self.barriers: dict[Name, NamedBarrier] = {}
        self.open_barriers: dict[Name, NamedBarrier] = {}  # those of `barriers` not yet passed
        self.folders: dict[Any, dict[Any, Any]] = defaultdict(dict)
        self.ghosts = 0
        self.settle_failures = 0

    # Registration ------------------------------------------------------------------------

    def register(self, task: int, incarnation: int) -> None:
        # A reconnect withdraws the task from named barriers, but not from the arrived set of
        # the liveness barrier: its former life's arrival goes on counting (rule R4).
        self.connected[task] = True
        self.incarnation[task] = incarnation
        self._leave_named_barriers(task)
        self.on_change()

    def disconnect(self, task: int) -> None:
        if not self.connected.get(task):
            return
        self.connected[task] = False
        self._leave_named_barriers(task)
        self._finish_liveness_barrier()
        self.on_change()

    def is_connected_as(self, task: int, incarnation: int) -> bool:
        return self.connected.get(task, False) and self.incarnation[task] == incarnation

    # Liveness barrier --------------------------------------------------------------------

    def meet(self, process: Process) -> None:
        # Any caller counts as its task, registered or not, and keeps its place if it dies.
        self.liveness_arrived.add(process.id)
        self.liveness_callers.append(process)
        self._finish_liveness_barrier()

    def _finish_liveness_barrier(self) -> None:
        alive = sorted(task for task, connected in self.connected.items() if connected)
        if not self.liveness_callers or not self.liveness_arrived.issuperset(alive):
            return
        # The incarnations are those of now, not those that arrived.
        answer = {task: self.incarnation[task] for task in alive}
        callers, self.liveness_callers, self.liveness_arrived = self.liveness_callers, [], set()
        self.note("BARRIER ->", answer, "to", callers)
        present = {(caller.id, caller.incarnation) for caller in callers}
        for absent in set(answer.items()) - present:
            self.ghosts += 1
            self.note("   ghost:", absent[0], "counts as arrived, its incarnation never called")
        for caller in callers:
            caller.answer(dict(answer))

    # Named barriers ----------------------------------------------------------------------

    def settle(self, process: Process, name: Name, time: int) -> None:
        """`wait_at_barrier(name)`: each client counts its own calls of a name."""
        counter = process.barrier_calls.get(name, -1) + 1
        barrier = self.barriers.get(name)
        joins = False
        if barrier is None or barrier.passed and counter == barrier.counter + 1:
            barrier = self._open(name, counter, time)
        elif barrier.passed and counter == 0:
            # A client that never called this name has "likely just restarted": next instance.
            counter = barrier.counter + 1
            barrier = self._open(name, counter, time)
        else:
            joins = True
        earlier = barrier.waiting.get(process.id)
        if earlier is not None and earlier is not process:
            earlier.fail(SettleFailed("a more recent call from the same task"))
        barrier.waiting[process.id] = process
        if joins and counter != barrier.counter and counter != 0:
            self._close(barrier, "counter mismatch")
        elif barrier.passed:
            # A name is never used twice: it would give its stored result for ever.
            self._close(barrier, barrier.error)
        elif not barrier.arrived[process.id]:
            barrier.arrived[process.id] = True
            if all(barrier.arrived.values()):
                self._close(barrier, None)

    def expire_named_barriers(self, time: int, deadline: int) -> None:
        # A participant's death does not fail a named barrier; only its deadline does.
        for barrier in list(self.open_barriers.values()):
            if time - barrier.began > deadline:
                self._close(barrier, "deadline")

    def _open(self, name: Name, counter: int, time: int) -> NamedBarrier:
        arrived = dict.fromkeys((task for task, _ in name), False)
        barrier = NamedBarrier(name, counter, time, arrived)
        self.barriers[name] = self.open_barriers[name] = barrier
        return barrier

    def _close(self, barrier: NamedBarrier, error: str | None) -> None:
        barrier.passed = True
        barrier.error = error
        self.open_barriers.pop(barrier.name, None)
        self.settle_failures += error is not None
        self.note("SETTLE", dict(barrier.name), "FAILED: " + error if error else "passed")
        for process in barrier.waiting.values():
            process.barrier_calls[barrier.name] = barrier.counter
            if error:
                process.fail(SettleFailed(error))
            else:
                process.answer(None)
        barrier.waiting = {}

    def _leave_named_barriers(self, task: int) -> None:
        for barrier in self.open_barriers.values():
            if task not in barrier.arrived:
                continue
            barrier.arrived[task] = False
            process = barrier.waiting.pop(task, None)
            if process is not None:
                process.barrier_calls[barrier.name] = barrier.counter
                process.fail(SettleFailed("stale call cancelled"))

    # Key-value store ---------------------------------------------------------------------

    def put(self, folder: Any, key: Any, value: Any) -> None:
        self.folders[folder][key] = value

    def get(self, folder: Any, key: Any) -> Any:
        return self.folders[folder].get(key)

    def list(self, folder: Any) -> dict:
        return dict(self.folders[folder])
