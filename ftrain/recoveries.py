"""Each death of a run, and what came after it: when the others went on, when it was back. Pure."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

from ftrain.records import Commit, Event, Session

END_OF_RUN = "the end of the run"  # the reason of an exit that is no death


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """One death, and the way out.

    Attributes:
      worker: who died; None: the coordinator, and all with it.
      incarnation: which life of it; None for the coordinator.
      t: when its end was seen, unix seconds.
      cause: in words.
      stuck_s: how long it had been stuck when it was found so; 0.0 if it was not ended for that.
      took_part: it had committed the newest step, so the others lost an attempt by it.
      survivors: the others who had committed the newest step and did not end before the next.
      went_on: the next commit, None if the session had no other.
      back: the first commit that it took part in again, None if it was in none.
      synced: how it got the state for that, if it was given any.
    """

    worker: int | None
    incarnation: int | None
    t: float
    cause: str
    stuck_s: float
    took_part: bool
    survivors: tuple[int, ...]
    went_on: Commit | None
    back: Commit | None
    synced: Event | None

    @property
    def went_on_s(self) -> float | None:
        """Seconds to the next commit."""
        return None if self.went_on is None else max(0.0, self.went_on.t - self.t)

    @property
    def back_s(self) -> float | None:
        """Seconds until it had committed a step again."""
        return None if self.back is None else max(0.0, self.back.t - self.t)


def is_death(event: Event) -> bool:
    """Whether a `worker_exited` is one: at the end of the run every process ends."""
    return event["reason"] != END_OF_RUN


def recoveries(session: Session) -> list[Recovery]:
    """Every death of a session, in order."""
    return list(_recoveries(session))


def _recoveries(session: Session) -> Iterator[Recovery]:
    times = [c.t for c in session.commits]
    for i, event in enumerate(session.events):
        if event.name == "coordinator_exited":
            cause = event.get("signal") or f"exit code {event.get('exit_code')}"
            worker = None
        elif event.name == "worker_exited" and is_death(event):
            cause, worker = event["reason"], event["worker"]
        else:
            continue
        yield _recovery(session, times, i, worker, cause)


def _recovery(
    session: Session, times: list[float], i: int, worker: int | None, cause: str
) -> Recovery:
    event = session.events[i]
    at = bisect.bisect_right(times, event.t)
    # One commit that was under way as it ended may name it still.
    went_on = next((c for c in session.commits[at:] if worker not in c.workers), None)
    started = _next(session, i, "worker_started", worker)
    back = synced = None
    if worker is not None and started is not None:
        first = bisect.bisect_right(times, started.t)
        again = _next(session, i, "worker_exited", worker)
        until = again.t if again else float("inf")
        back = next(
            (c for c in session.commits[first:] if worker in c.workers and c.t <= until), None
        )
        went_on = min(filter(None, [went_on, back]), key=lambda c: c.t, default=None)
        synced = _next(session, i, "state_synced", worker)
        synced = synced if back is not None and synced and synced.t <= back.t + 1.0 else None
    before = session.commits[at - 1] if at else None
    had_state = set(before.workers) if before else set()
    until = went_on.t if went_on else float("inf")
    since = min(event.t, before.t) if before else event.t  # several may have died at once
    ended = {e["worker"] for e in session.named("worker_exited") if since <= e.t <= until}
    return Recovery(
        worker=worker,
        incarnation=_incarnation(session, i, worker),
        t=event.t,
        cause=cause.splitlines()[0] if cause else "",
        stuck_s=_stuck_s(session, i, worker),
        took_part=worker in had_state,
        survivors=() if worker is None else tuple(sorted(had_state - ended)),
        went_on=went_on,
        back=back,
        synced=synced,
    )


def _next(session: Session, i: int, name: str, worker: int | None) -> Event | None:
    for event in session.events[i + 1 :]:
        if event.name == name and event.get("worker") == worker:
            return event
    return None


def _incarnation(session: Session, i: int, worker: int | None) -> int | None:
    for event in reversed(session.events[:i]):
        if event.name == "worker_started" and event["worker"] == worker:
            return event["incarnation"]
    return None


def _stuck_s(session: Session, i: int, worker: int | None) -> float:
    """Of the same life: `hang_detected` comes between its start and its end."""
    for event in reversed(session.events[:i]):
        if event.get("worker") == worker and event.name in ("worker_started", "hang_detected"):
            return event["seconds"] if event.name == "hang_detected" else 0.0
    return 0.0
