"""Where a run's wall time went: committed compute, and each thing that took the rest. Pure.

A running account: it is told each event and each commit in the order of their times, and gives
every moment since the run's start to exactly one part, so that the parts add up to the wall time
whatever happened. What a fact says of its own duration (`step_time_s`, `seconds`) is taken from the
time that ends with it; what is left before that goes to what the run was doing. docs/goodput.md
defines the parts, and says what others call them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ftrain.records import Commit, Event, Records
from ftrain.recoveries import is_death

PARTS = {
    "train": "steps that were committed and count",
    "lost": "steps that were committed and given up: a checkpoint before them was restored",
    "start": "processes starting, while nobody has the state",
    "compile": "compiling, or waiting for the worker that does",
    "data": "waiting for samples",
    "abort": "attempts that were dropped, up to the fault that they were dropped for",
    "detection": "from a fault until the others have left what they waited in",
    "settle": "meeting the members that are left",
    "sync": "new communicators and state, after a death",
    "rejoin": "the same for a worker that comes back: the others wait for it",
    "evaluation": "held-out data",
    "hook": "the user's after_commit",
    "checkpoint": "copying the state to be saved, and the last save",
    "waiting": "fewer than min_workers",
    "stop": "from the last save to the end of the last process",
    "between": "the run was not running",
    "other": "none of these",
}
OF_A_STEP = {"data": "data", "hook": "hook", "copy": "checkpoint", "compile": "compile"}


@dataclasses.dataclass(frozen=True, slots=True)
class Breakdown:
    """A run's wall time, in seconds, by parts that add up to it.

    Attributes:
      wall_s: from the first `run_started` on.
      parts: seconds by name, each of `PARTS`.
    """

    wall_s: float
    parts: dict[str, float]

    @property
    def goodput(self) -> float:
        """Committed compute time over wall time, 0 to 1."""
        return self.parts["train"] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def goodput_running(self) -> float:
        """The same without the time in which the run was not running."""
        running_s = self.wall_s - self.parts["between"]
        return self.parts["train"] / running_s if running_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "goodput": self.goodput,
            "goodput_running": self.goodput_running,
            "wall_s": self.wall_s,
            "parts": self.parts,
        }


class Goodput:
    """The account of a run. Tell it everything, in the order of times; ask it at any time."""

    def __init__(self) -> None:
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._began: float | None = None
        self._mark = 0.0  # all before it has been given to a part
        self._last_t = 0.0
        self._doing = "between"
        self._members: set[int] = set()  # of the view, those who live
        self._min_workers = 1
        self._fault_t: float | None = None  # since when a member is dead or stuck
        self._saved_t: float | None = None  # when the newest step was saved
        self._step = 0
        self._away_s = 0.0  # between the last session and this one
        self._trained: list[float] = []  # seconds of each step up to the newest

    def event(self, event: Event) -> None:
        """Takes in one event."""
        if event.name == "run_started":
            self._on_run_started(event)
        elif self._began is not None:
            handler = getattr(self, f"_on_{event.name}", None)
            if handler is not None:
                handler(event)
        self._last_t = max(self._last_t, event.t)

    def commit(self, commit: Commit) -> None:
        """Takes in one committed step."""
        if self._began is None:
            return
        before = self._parts["train"]
        self._spend(commit.t, ("train", commit.step_time_s))
        self._doing, self._saved_t = "step", None
        self._rewind(commit.step - 1)
        self._trained.append(max(0.0, self._parts["train"] - before))
        self._step, self._last_t = commit.step, max(self._last_t, commit.t)

    def at(self, now: float | None = None) -> Breakdown:
        """The breakdown up to the last that was told, or up to `now`, unix seconds.

        What is under way counts as what it will be if it succeeds.
        """
        parts = dict(self._parts)
        if self._began is None:
            return Breakdown(0.0, parts)
        end = self._mark
        if self._doing != "between":
            end = max(self._mark, self._last_t if now is None else now)
        parts["train" if self._rest() == "other" else self._rest()] += end - self._mark
        return Breakdown(math.fsum(parts.values()), parts)

    def _spend(self, t: float, *last: tuple[str, float], rest: str = "") -> None:
        """Gives the time up to `t`: its last seconds as told, the others to `rest`."""
        left = max(0.0, t - self._mark)
        for part, seconds in reversed(last):
            taken = min(max(0.0, seconds), left)
            self._parts[part] += taken
            left -= taken
        self._parts[rest or self._rest()] += left
        self._mark = max(self._mark, t)

    def _rest(self) -> str:
        """What the run is doing that no fact has told yet."""
        if self._doing == "step":
            return "other" if self._fault_t is None else "detection"
        return self._doing

    def _rewind(self, step: int) -> None:
        """The history now ends with `step`: what was committed after it is lost."""
        behind = self._step - step
        if 0 < behind:
            lost = min(math.fsum(self._trained[-behind:]), self._parts["train"])
            del self._trained[-behind:]
            self._parts["train"] -= lost
            self._parts["lost"] += lost

    # Events, by name.

    def _on_run_started(self, event: Event) -> None:
        if self._began is None:
            self._began = self._mark = event.t
        elif self._doing != "between":  # that supervisor died
            self._spend(self._last_t)
        before = self._parts["between"]
        self._spend(event.t, rest="between")
        self._away_s = self._parts["between"] - before
        self._min_workers = event["config"]["cluster"]["min_workers"]
        self._begin_anew()

    def _on_head_taken_over(self, event: Event) -> None:
        """The run was not stopped: its head was lost, and the other hosts had to find out."""
        self._parts["between"] -= self._away_s
        self._parts["detection"] += self._away_s
        self._away_s = 0.0

    def _begin_anew(self) -> None:
        self._doing, self._fault_t, self._saved_t = "start", None, None
        self._members.clear()

    def _on_worker_ready(self, event: Event) -> None:
        if self._doing == "start":
            self._spend(event.t, ("compile", event.get("compile_s", 0.0)))

    def _on_hang_detected(self, event: Event) -> None:
        if event["worker"] in self._members:
            self._fault(event.t - event["seconds"])

    def _on_worker_exited(self, event: Event) -> None:
        if event["worker"] not in self._members or not is_death(event):
            return
        self._fault(event.t)
        self._members.discard(event["worker"])
        if not self._members:
            self._lose_all(event.t)

    def _on_coordinator_exited(self, event: Event) -> None:
        if self._members:
            self._fault(event.t)
            self._lose_all(event.t)

    def _fault(self, t: float) -> None:
        self._fault_t = t if self._fault_t is None else min(t, self._fault_t)

    def _lose_all(self, t: float) -> None:
        """Nobody is left who has the state."""
        rest = "waiting" if self._doing == "waiting" else "abort"
        self._spend(t, ("detection", t - self._fault_t), rest=rest)
        self._begin_anew()

    def _on_step_aborted(self, event: Event) -> None:
        seconds = event.get("seconds", 0.0)
        late = 0.0 if self._fault_t is None else event.t - self._fault_t
        self._spend(event.t, ("abort", seconds - late), ("detection", late))
        self._fault_t = None

    def _on_view_changed(self, event: Event) -> None:
        workers, seconds = set(event["workers"]), event.get("seconds", 0.0)
        sync_s = event.get("sync_s", 0.0)
        if self._doing == "start":
            self._spend(event.t)
        elif workers - self._members:
            self._spend(event.t, ("rejoin", seconds))
        else:
            self._spend(event.t, ("settle", seconds - sync_s), ("sync", sync_s))
        self._members, self._fault_t = workers, None
        self._doing = "waiting" if len(workers) < self._min_workers else "step"

    def _on_evaluated(self, event: Event) -> None:
        self._spend(event.t, ("evaluation", event["seconds"]))

    def _on_time_spent(self, event: Event) -> None:
        """What the lowest worker says of the inside of its steps, which count as `train` so far."""
        for phase, part in OF_A_STEP.items():
            moved = min(event["seconds"].get(phase, 0.0), self._parts["train"])
            self._parts["train"] -= moved
            self._parts[part] += moved

    def _on_checkpoint_saved(self, event: Event) -> None:
        if event["step"] == self._step:
            self._saved_t = event.t

    def _on_run_finished(self, event: Event) -> None:
        if self._doing == "step":
            if self._saved_t is not None:
                self._spend(self._saved_t, rest="checkpoint")
            self._doing = "stop"
        self._spend(event.t)
        self._doing = "between"


def breakdown(records: Records, now: float | None = None) -> Breakdown:
    """Where the wall time of a run went, up to its last record or, while it runs, up to `now`."""
    account = Goodput()
    for fact in (fact for session in records.sessions for fact in session.in_order()):
        if isinstance(fact, Event):
            account.event(fact)
        else:
            account.commit(fact)
    return account.at(now)
