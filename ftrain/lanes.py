"""What each worker was doing when: the swim lanes of a report, from the records alone. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ftrain.records import Event, Records, Session
from ftrain.recoveries import is_death

STATES = ("starting", "syncing", "training", "waiting", "stuck", "down")


class Span(NamedTuple):
    """A worker in one state.

    Attributes:
      start, end: unix seconds.
      state: of `STATES`.
      incarnation: the life that it belongs to; of `down`, the one that ended.
      what: what it ended with, for `stuck` and `down`; else "".
    """

    start: float
    end: float
    state: str
    incarnation: int
    what: str


def lanes(records: Records, now: float | None = None) -> dict[int, list[Span]]:
    """The spans of every worker, in order and without overlap.

    Args:
      records: of the run.
      now: unix seconds, up to which the last span of a live run reaches; None: its last record.
    """
    found: dict[int, list[Span]] = {}
    for i, session in enumerate(records.sessions):
        last = i + 1 == len(records.sessions)
        end = now if last and now is not None and session.finished is None else session.last_t
        for worker in range(session.config["cluster"]["workers"]):
            found.setdefault(worker, []).extend(_lane(session, worker, end))
    return found


def _lane(session: Session, worker: int, end: float) -> list[Span]:
    lane = _Lane()
    few = session.config["cluster"]["min_workers"]
    for event in session.events:
        if event.name == "view_changed" and worker in event["workers"]:
            lane.enter(event, "waiting" if len(event["workers"]) < few else "training")
        elif event.get("worker") == worker:
            lane.take(event)
    lane.close(end)
    return lane.spans


class _Lane:
    """One worker's spans as they come."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._since: float | None = None
        self._state, self._incarnation, self._what = "", -1, ""

    def take(self, event: Event) -> None:
        """An event of this worker."""
        if event.name == "worker_started":
            self._go(event.t, "starting")
            self._incarnation = event["incarnation"]
        elif event.name == "state_synced" and self._state == "starting":
            self._go(event.t - event["seconds"], "syncing")
        elif event.name == "hang_detected":
            self._go(event.t - event["seconds"], "stuck", f"in {event['phase']}")
        elif event.name == "worker_exited" and is_death(event):
            self._go(event.t, "down", (event["reason"].splitlines() or [""])[0])
        elif event.name == "worker_exited":
            self.close(event.t)

    def enter(self, event: Event, state: str) -> None:
        """A view that has this worker."""
        if self._state in ("starting", "syncing", "training", "waiting") and self._state != state:
            self._go(event.t, state)

    def _go(self, t: float, state: str, what: str = "") -> None:
        self.close(t)
        self._since, self._state, self._what = t, state, what

    def close(self, t: float) -> None:
        """The span that is open ends. One that began after `t` was never seen: it goes."""
        if self._since is not None and t > self._since:
            self.spans.append(Span(self._since, t, self._state, self._incarnation, self._what))
        while self.spans and self.spans[-1].end > t:
            last = self.spans.pop()
            if last.start < t:
                self.spans.append(last._replace(end=t))
        self._since, self._state = None, ""
