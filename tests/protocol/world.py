"""One schedule: a seed, rules and a setting; a phase of chaos, a quiet one, and a verdict."""

import itertools
import random
from collections import Counter
from typing import Any, NamedTuple

from .calls import Violation
from .checks import INITIAL, Checks
from .collectives import DataPlane, Garbage, Reduced
from .faults import Faults
from .process import Process, State
from .rules import Rules, Setting
from .scheduler import Scheduler
from .service import CoordinationService
from .supervisor import Supervisor
from .worker import Worker

ENOUGH_QUIET_TICKS = 1200
FAULTS_AFTER_FINISH_TICKS = 300


class Verdict(NamedTuple):
    violation: str | None
    stall: bool
    deadlock: str | None  # the first one; only a timeout ended it
    count: Counter[str]

    @property
    def caught(self) -> str | None:
        """The kind of what went wrong: the violation's first word, STALL, or None."""
        if self.violation:
            return self.violation.split(":")[0]
        if self.stall:
            return "STALL"
        return "DEADLOCK" if self.deadlock else None


class World:
    def __init__(
        self,
        seed: int,
        rules: Rules = Rules(),  # noqa: B008 (frozen)
        setting: Setting = Setting(),  # noqa: B008 (frozen)
        trace: bool = False,
    ):
        self.rules = rules
        self.setting = setting
        self.rng = rng = random.Random(seed)
        self.time = 0
        self.transcript: list[str] = []
        self.trace = trace
        self.count: Counter[str] = Counter()
        self._incarnations = itertools.count(1)

        self.workers = rng.choice([2, 3, 3, 4, 5])
        self.style = setting.style or rng.choice(["cpu", "gpu"])
        self.min_workers = min(self.workers, setting.min_workers or rng.choice([1, 1, 2]))
        self.settle_deadline = rng.choice([25, 80, 300])  # often too short: it must only be safe
        self.speed = [1.0] * self.workers
        if rng.random() < 0.5:
            self.speed[rng.randrange(self.workers)] = 0.12

        self.deadlock: str | None = None
        self.quiet_from = setting.chaos_ticks
        self.disk: State | None = None
        self.processes: list[Process] = []
        self.current: list[Process | None] = [None] * self.workers
        self.checks = Checks()
        self.service = CoordinationService(self.note)
        self.data = DataPlane(self.style, rules, rng, self.service, self.note)
        self.supervisor = Supervisor(self)
        self.faults = Faults(self)
        self.scheduler = Scheduler(self)
        for id in range(self.workers):
            self.start(id)

    # What the other parts need -----------------------------------------------------------

    @property
    def quiet(self) -> bool:
        return self.time >= self.quiet_from

    def note(self, *words: Any) -> None:
        if self.trace:
            self.transcript.append(f"{self.time:6d} " + " ".join(map(str, words)))

    def new_incarnation(self) -> int:
        return next(self._incarnations)

    def alive(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def holders(self) -> list[Process]:
        """Who could serve the committed state to others."""
        return [p for p in self.alive() if (p.state or p.uncommitted_copy) and not p.zombie]

    def start(self, id: int) -> None:
        process = Process(id, self.new_incarnation())
        process.loop = Worker(self, process).loop()
        self.processes.append(process)
        self.current[id] = process
        self.note("START", process)

    def kill(self, process: Process, why: str) -> None:
        if not process.alive:
            return
        self.note("DIES", process, why)
        if process.request is not None and self.rng.random() < 0.5:
            self.scheduler.carry_out(process)  # it was already on the wire
        self.end(process)
        if why != "SIGKILL":
            self.count["exits"] += 1

    def end(self, process: Process) -> None:
        process.alive = False
        process.waiting = process.request = process.reply = None
        if self.current[process.id] is process:
            self.supervisor.forget(process.id)

    def commit(self, process: Process, state: State, word: Reduced | Garbage | None) -> None:
        process.uncommitted_copy = None
        if word is None:  # an empty block
            self.adopt(process, state)
            return
        self.checks.commit(process, state, word)
        process.state = state
        process.last_commit = self.time
        self.count["commits"] += 1
        self.note("  commit", process, tuple(state))
        self.checks.one_lineage(process, self.processes)
        if state.step % 15 == 0 and self.rng.random() < 0.7:
            self.disk = state

    def adopt(self, process: Process, state: State) -> None:
        if process.state != state:
            process.state = state
            self.note("  adopts", process, tuple(state))
            self.checks.one_lineage(process, self.processes)

    def restore(self, process: Process) -> State:
        state = self.disk or INITIAL
        self.count["restores"] += 1
        self.note("  restores", process, tuple(state))
        self.checks.restore(process, state, [p for p in self.holders() if p is not process])
        return state

    def finish(self, process: Process) -> None:
        """`process` says that the last checkpoint is durable."""
        self.note("FINISHED by", process, process.state)
        self.checks.finish(process, process.state)
        # Later faults would only free, by a kill, whoever is not able to leave.
        self.quiet_from = min(self.quiet_from, self.time + FAULTS_AFTER_FINISH_TICKS)

    # One run -----------------------------------------------------------------------------

    def run(self) -> Verdict:
        violation = None
        done = False
        horizon = self.setting.chaos_ticks + self.setting.quiet_ticks
        try:
            while self.time < horizon and not done:
                self.tick()
                done = self._ended() if self.setting.ends else self._recovered()
        except Violation as error:
            violation = str(error)
            self.note("VIOLATION", violation)
        stall = not violation and not done
        if stall:
            self.note("STALL")
        self.count.update(ghosts=self.service.ghosts, settle_failures=self.service.settle_failures)
        return Verdict(violation, stall, self.deadlock, self.count)

    def tick(self) -> None:
        self.time += 1
        self.data.partial_error_rate = 0.0 if self.quiet else 0.03
        self.faults.tick()
        if self.rng.random() < (0.15 if self.quiet else 0.08):
            self.supervisor.look_after(self.rng.randrange(self.workers))
        self.supervisor.finish_late_fences()
        self.service.expire_named_barriers(self.time, 600 if self.quiet else self.settle_deadline)
        self.data.progress(self.processes)
        if self.time % 64 == 0:
            self._look_for_deadlock()
            self.processes = self.alive()
        self.scheduler.run_one()

    # Liveness ----------------------------------------------------------------------------

    def _look_for_deadlock(self) -> None:
        found = self.data.deadlock(self.processes)
        if found is not None and self.deadlock is None:
            self.deadlock = found
            self.note("DEADLOCK", found)

    def _ended(self) -> bool:
        """Everybody left, and what is durable is the last commit."""
        if self.alive():
            return False
        everybody_left = all(process is not None and process.left for process in self.current)
        if not (self.supervisor.starts_nobody or everybody_left):
            return False
        self.checks.end(self.disk)
        return True

    def _recovered(self) -> bool:
        """Quiet for a while, and every worker is there and has committed several steps in it."""
        began = self.setting.chaos_ticks
        if self.time % 50 or self.time < began + ENOUGH_QUIET_TICKS:
            return False
        there = all(
            p is not None and p.alive and p.last_commit > self.time - ENOUGH_QUIET_TICKS // 2
            for p in self.current
        )
        return there and not any(p.zombie for p in self.alive())
