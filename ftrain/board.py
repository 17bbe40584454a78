"""Keeps count of where a run is, from the same facts that become its records.

The supervisor tells it each event and commit as it writes them, and once a second asks for a
RunNow with the phases of the workers' beats. Told the records of a run it gives the same without
phases, so that `ftrain status` shows a run that has ended as it showed it live.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from ftrain.beat import Reading
from ftrain.goodput import Goodput
from ftrain.records import Commit, Event, Records
from ftrain.recoveries import is_death
from ftrain.run_now import RunNow, WorkerNow
from ftrain.target import Target

RATE_WINDOW_S = 10.0
STATE_IN = {  # by phase, of a worker that lives; in the others it is as the events say
    "start": "starting",
    "open": "starting",
    "connect": "starting",
    "compile": "starting",
    "ready": "ready",
    "settle": "syncing",
    "sync": "syncing",
    "restore": "syncing",
    "pause": "waiting",
    "save": "saving",
}


class Board:
    """Told every fact in the order of times, by `event` and `commit`; see `now`."""

    def __init__(self, run_dir: str):
        self._run_dir = run_dir
        self._goodput = Goodput()
        self._config: dict[str, Any] = {}
        self._workers: dict[int, WorkerNow] = {}
        self._recent: collections.deque[tuple[float, int]] = collections.deque()  # t, samples
        self._newest: Commit | None = None
        self._target: Target | None = None
        self._state = "starting"
        self._saved: tuple[int, float] | None = None
        self._evaluated: dict[str, Any] = {}
        self._deaths = 0
        self._end: Event | None = None

    def read(self, records: Records) -> None:
        """Takes in what has been recorded so far."""
        for fact in (fact for session in records.sessions for fact in session.in_order()):
            if isinstance(fact, Event):
                self.event(fact)
            else:
                self.commit(fact)

    def commit(self, commit: Commit) -> None:
        """Takes in a committed step."""
        self._goodput.commit(commit)
        if self._newest is not None and commit.step <= self._newest.step:
            self._recent.clear()
        self._newest = commit
        self._recent.append((commit.t, commit.samples))
        while self._recent[0][0] < commit.t - RATE_WINDOW_S:
            self._recent.popleft()
        if self._state in ("starting", "waiting"):
            self._state = "training"

    def event(self, event: Event) -> None:
        """Takes in an event."""
        self._goodput.event(event)
        handler = getattr(self, f"_on_{event.name}", None)
        if handler is not None:
            handler(event)

    def now(
        self,
        now: float,
        readings: Mapping[int, Reading] | None = None,
        clock: float = 0.0,
        pid: int | None = None,
    ) -> RunNow:
        """The run at this moment.

        Args:
          now: unix seconds.
          readings: the beats of the workers that live.
          clock: time.monotonic(), on which the beats are.
          pid: of the supervisor.
        """
        found = self._goodput.at(now)
        newest, rate = self._newest, self._samples_per_s(now)
        step, samples = (newest.step, newest.samples) if newest else (0, 0)
        target = self._target and self._target.last_step(step, samples)
        return RunNow(
            t=now,
            run_dir=self._run_dir,
            pid=pid,
            state=self._state,
            step=step,
            target=target,
            samples=samples,
            loss=newest and newest.loss,
            samples_per_s=rate,
            eta_s=self._eta_s(target, step, rate),
            goodput=found.goodput,
            wall_s=found.wall_s,
            parts={part: s for part, s in found.parts.items() if s > 0},
            checkpoint=self._saved and self._saved[0],
            checkpoint_t=self._saved and self._saved[1],
            evaluated=self._evaluated,
            deaths=self._deaths,
            exit_code=self._end and self._end["exit_code"],
            reason=self._end["reason"] if self._end else "",
            workers=[
                _with_beat(w, (readings or {}).get(w.worker), clock)
                for _, w in sorted(self._workers.items())
            ],
        )

    def _samples_per_s(self, now: float) -> float:
        if self._end is not None or len(self._recent) < 2 or self._recent[-1][0] < now - 10.0:
            return 0.0
        (t0, before), (t1, after) = self._recent[0], self._recent[-1]
        return (after - before) / (t1 - t0) if t1 > t0 else 0.0

    def _eta_s(self, target: int | None, step: int, rate: float) -> float | None:
        if target is None or rate <= 0:
            return None
        return (target - step) * self._config["batch_size"] / rate

    # Events, by name.

    def _on_run_started(self, event: Event) -> None:
        self._config, self._state, self._end = event["config"], "starting", None
        before = self._workers
        self._workers = {w: WorkerNow(w) for w in range(self._config["cluster"]["workers"])}
        for worker in self._workers.keys() & before.keys():
            old, new = before[worker], self._workers[worker]
            new.deaths, new.fault, new.fault_t = old.deaths, old.fault, old.fault_t

    def _on_target_known(self, event: Event) -> None:
        self._target = Target(event["steps"], event["samples"], self._config["batch_size"])

    def _on_worker_started(self, event: Event) -> None:
        worker = self._workers[event["worker"]]
        worker.state, worker.pid = "starting", event["pid"]
        worker.incarnation = event["incarnation"]

    def _on_worker_ready(self, event: Event) -> None:
        self._workers[event["worker"]].state = "ready"

    def _on_view_changed(self, event: Event) -> None:
        few = len(event["workers"]) < self._config["cluster"]["min_workers"]
        if self._state in ("starting", "training", "waiting"):
            self._state = "waiting" if few else "training"
        for worker in event["workers"]:
            if self._workers[worker].pid is not None:
                self._workers[worker].state = "waiting" if few else "training"

    def _on_hang_detected(self, event: Event) -> None:
        self._workers[event["worker"]].state = "stuck"

    def _on_worker_exited(self, event: Event) -> None:
        worker = self._workers[event["worker"]]
        worker.pid = None
        worker.state = "down" if is_death(event) else "ended"
        if is_death(event):
            self._deaths += 1
            worker.deaths += 1
            worker.fault = (event["reason"].splitlines() or [""])[0]
            worker.fault_t = event.t

    def _on_worker_quarantined(self, event: Event) -> None:
        self._workers[event["worker"]].state = "quarantined"

    def _on_coordinator_exited(self, event: Event) -> None:
        self._state = "starting" if self._state != "stopping" else self._state

    def _on_evaluated(self, event: Event) -> None:
        self._evaluated = {"step": event["step"], **event["metrics"]}

    def _on_checkpoint_saved(self, event: Event) -> None:
        self._saved = event["step"], event.t

    def _on_stop_requested(self, event: Event) -> None:
        self._state = "stopping"

    def _on_run_finished(self, event: Event) -> None:
        self._state, self._end = "finished", event


def _with_beat(worker: WorkerNow, reading: Reading | None, clock: float) -> WorkerNow:
    if reading is None or worker.pid is None:
        return worker
    state = worker.state
    if state != "stuck":
        state = STATE_IN.get(reading.phase, state)
    return dataclasses.replace(
        worker, state=state, phase=reading.phase, phase_s=max(0.0, clock - reading.since)
    )
