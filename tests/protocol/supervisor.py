"""The supervisor: replaces a dead worker (R9) and lets a finished run end (R8)."""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .world import World

# A fence is a client with the dead task's id: it registers, then says shutdown. Between the two
# the service shows a ghost's incarnation for the task.
FENCE_THEN_START = ("connect", "shutdown", "start")
ANY_ORDER = (FENCE_THEN_START, ("connect", "start", "shutdown"), ("start", "connect", "shutdown"))


class Supervisor:
    def __init__(self, world: "World"):
        self.world = world
        self.jobs: dict[int, deque[str]] = {}  # what is left to do for a dead worker
        self.late_fences: list[tuple[int, deque[str]]] = []  # only if R9's order is left out
        self.finished = False  # it saw a worker end by agreement; nobody is started any more

    def forget(self, id: int) -> None:
        """Another process of `id` died: begin anew."""
        self.jobs.pop(id, None)

    def look_after(self, id: int) -> None:
        """One small action for worker `id`, if it needs any."""
        process = self.world.current[id]
        if process is not None and process.alive:
            return
        if process is not None and process.left:
            self.finished = self.finished or self.world.rules.r8_leaving_is_agreed
            if not self.world.service.connected.get(id):
                return
        if id not in self.jobs:
            self.jobs[id] = deque(self._order())
        job = self.jobs[id]
        connected = self.world.service.connected.get(id)
        if job and job[0] == "connect" and not connected:  # it never registered, or is gone
            job = self.jobs[id] = deque(action for action in job if action == "start")
        if job:
            self._do(id, job)

    def _order(self) -> tuple[str, ...]:
        if self.world.rules.r9_fence_before_start:
            return FENCE_THEN_START
        return self.world.rng.choice((*ANY_ORDER, ("start",)))

    def _do(self, id: int, job: deque[str]) -> None:
        action = job.popleft()
        service = self.world.service
        if action == "connect":
            ghost = self.world.new_incarnation()
            self.world.note("FENCE of", id, "connects as", ghost)
            service.register(id, ghost)
        elif action == "shutdown":
            self.world.note("FENCE of", id, "shuts down")
            service.disconnect(id)
        elif self._is_wanted(id):
            rest = deque(job)
            self.world.start(id)
            if rest:
                self.late_fences.append((id, rest))

    def _is_wanted(self, id: int) -> bool:
        process = self.world.current[id]
        return not self.starts_nobody and not (process is not None and process.left)

    @property
    def starts_nobody(self) -> bool:
        stopping = self.world.faults.stop_was_requested
        return self.finished or stopping and not self.world.setting.replace_after_stop

    def finish_late_fences(self) -> None:
        for late in list(self.late_fences):
            if self.world.rng.random() < 0.02:
                self._do(*late)
                if not late[1]:
                    self.late_fences.remove(late)
