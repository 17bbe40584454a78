"""Each kind of fault: how it is injected into a live run, how long it lasts, how it is healed.

at_work = Inject(live)
at_work.begin(fault)    as often as there are faults
at_work.tick()          often: what lasts is kept up and ended in time
at_work.heal()          nothing is broken any more
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrain.chaos import disk, network, orders
from ftrain.chaos.live import LiveRun, send_signal
from ftrain.chaos.plan import PLACES, Fault

ORDERED = {kind: kind for kind in PLACES} | {"exception": "bug", "bit_flip": "flip"}
DUTY_S = (0.08, 0.02)  # of a slow worker: stopped and running, in turn


def refusals() -> dict[str, str]:
    """The kinds that this machine does not allow, and why."""
    found = {"partition": network.why_not(), "full_disk": disk.why_not()}
    return {kind: why for kind, why in found.items() if why}


@dataclasses.dataclass
class Injection:
    """A fault of the plan and what has become of it.

    Attributes:
      told: when it was recorded, for the plan that is written down (time.monotonic()).
      t: the same in unix seconds; of the last thing it did to the run.
      row: what the records say of it.
      tick: what it still does; True once it has done all.
      heal: takes it back.
    """

    fault: Fault
    told: float
    t: float
    row: dict[str, Any]
    tick: Callable[[], bool] = lambda: True
    heal: Callable[[], None] = lambda: None
    is_over: bool = False

    def outcome(self, words: str) -> None:
        """What became of it, where that is not what was planned."""
        self.row["outcome"] = words


class Injector:
    """Injects faults into one run."""

    def __init__(self, live: LiveRun):
        self._live = live
        self._torn: set[tuple[str, int]] = set()
        self.injections: list[Injection] = []

    def begin(self, fault: Fault) -> None:
        """Injects a fault; one whose victim is away comes as soon as it is back."""
        live = self._live
        told = {"kind": fault.kind, "step": live.step}
        if fault.worker is not None:
            told["worker"] = fault.worker
        more = {"place": fault.place, "from": fault.peer, "seconds": fault.for_s}
        live.tell(fault.text(), **told, **{k: v for k, v in more.items() if v not in (None, "")})
        row = fault.fields() | {"step": live.step}
        injection = Injection(fault, time.monotonic(), time.time(), row)
        self.injections.append(injection)
        if fault.kind in ORDERED:
            self._order(injection)
        else:
            getattr(self, f"_{fault.kind}")(injection)
        self._tick(injection)

    def tick(self) -> None:
        """Keeps up what lasts, and ends it when its time is over."""
        for injection in self.injections:
            if not injection.is_over:
                self._tick(injection)

    def heal(self) -> None:
        """Takes everything back that still lasts."""
        for injection in self.injections:
            if not injection.is_over:
                self._end(injection)

    def _tick(self, injection: Injection) -> None:
        for_s = injection.fault.for_s
        if injection.tick() or (for_s is not None and time.monotonic() > injection.told + for_s):
            self._end(injection)

    def _end(self, injection: Injection) -> None:
        injection.is_over, injection.t = True, max(injection.t, time.time())
        injection.heal()

    # Of processes.

    def _kill(self, injection: Injection) -> None:
        injection.tick = lambda: self._signal(injection, signal.SIGKILL)

    def _coordinator(self, injection: Injection) -> None:
        victim = dataclasses.replace(injection.fault, worker="coordinator")
        injection.tick = lambda: self._signal(injection, signal.SIGKILL, victim)

    def _signal(self, injection: Injection, number: int, fault: Fault | None = None) -> bool:
        """Signals the victim's process as soon as there is one."""
        pid = self._live.pid((fault or injection.fault).worker)
        if pid is None or not send_signal(pid, number):
            return False
        injection.row["pid"], injection.t = pid, time.time()
        return True

    def _stop(self, injection: Injection) -> None:
        def tick() -> bool:
            if "pid" not in injection.row:
                return self._signal(injection, signal.SIGSTOP) and False
            return self._live.pid(injection.fault.worker) != injection.row["pid"]

        injection.tick, injection.heal = tick, lambda: self._continue(injection)

    def _continue(self, injection: Injection) -> None:
        pid = injection.row.get("pid")
        if pid is not None and self._live.pid(injection.fault.worker) == pid:
            send_signal(pid, signal.SIGCONT)

    def _slow(self, injection: Injection) -> None:
        state = {"number": signal.SIGCONT, "until": 0.0}

        def tick() -> bool:
            if time.monotonic() >= state["until"]:
                stop = state["number"] == signal.SIGCONT
                state["number"] = signal.SIGSTOP if stop else signal.SIGCONT
                state["until"] = time.monotonic() + DUTY_S[not stop]
                self._signal(injection, state["number"])
            return False

        injection.tick, injection.heal = tick, lambda: self._continue(injection)

    def _supervisor(self, injection: Injection) -> None:
        """The same command is run again at once."""
        injection.row["pid"] = self._live.process.pid
        self._live.signal(signal.SIGKILL)
        self._live.process.wait()
        self._live.start()

    # Those that a worker commits itself.

    def _order(self, injection: Injection) -> None:
        fault = injection.fault
        path = orders.order(self._live.run_dir, ORDERED[fault.kind], fault.place, fault.worker)
        injection.outcome("not taken: the worker did not come to that place")

        def tick() -> bool:
            taken = orders.taken_at(path)
            if taken is not None:
                injection.t = taken
                del injection.row["outcome"]
            return taken is not None

        injection.tick, injection.heal = tick, lambda: orders.withdraw(path)

    # Of the surroundings.

    def _partition(self, injection: Injection) -> None:
        injection.outcome("not injected: one of the two was not there")

        def tick() -> bool:
            if "outcome" in injection.row and self._cut(injection.fault):
                del injection.row["outcome"]
            return False

        injection.tick, injection.heal = tick, lambda: self._join(injection)

    def _cut(self, fault: Fault) -> bool:
        try:
            if fault.peer is None:
                network.cut_all(self._live, fault.worker)
            elif isinstance(fault.peer, int):
                network.cut_peer(self._live, fault.worker, fault.peer)
            else:
                network.cut_coordinator(self._live, fault.worker)
        except (subprocess.CalledProcessError, IndexError):
            return False  # a process that has not entered its cgroup yet, or was never started
        return True

    def _join(self, injection: Injection) -> None:
        """Rules are taken back all at once: with the last partition that still lasts."""
        others = [i for i in self.injections if i.fault.kind == "partition" and not i.is_over]
        if not others:
            network.heal(self._live)

    def _full_disk(self, injection: Injection) -> None:
        self._live.disk.fill()
        injection.heal = self._live.disk.free
        injection.tick = lambda: False

    def _torn_checkpoint(self, injection: Injection) -> None:
        """Half of every file of the newest checkpoint, and then nobody is left who has the state.

        Only where an older one is whole: with none left the run rightly ends.
        """
        injection.outcome("not injected: there were never two checkpoints")

        def tick() -> bool:
            whole = [p for p in _checkpoints(self._live.checkpoints) if _key(p) not in self._torn]
            if len(whole) < 2:
                return False
            self._torn.add(_key(whole[-1]))
            for path in filter(Path.is_file, whole[-1].rglob("*")):
                os.truncate(path, path.stat().st_size // 2)
            for pid in self._live.pids():
                send_signal(pid, signal.SIGKILL)
            injection.t = time.time()
            injection.outcome(f"checkpoint of step {whole[-1].name}")
            return True

        injection.tick = tick


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints there, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def _key(path: Path) -> tuple[str, int]:
    return path.name, path.stat().st_ino
