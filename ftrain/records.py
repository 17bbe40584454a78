"""A run's records, read back: what `events` wrote, as plain values. Never jax.

`events.jsonl` and `metrics.jsonl` may hold several supervisors' lives, one after the other, the
last of them still writing. A last line without its end is left out; a whole line that is no JSON is
kept as a `Problem`, for `verify` to tell, and skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ftrain.errors import FtrainError
from ftrain.events import EVENTS_FILE, METRICS_FILE

_OWN = frozenset({"t", "step", "loss", "samples", "workers", "step_time_s", "digest", "rewound"})


class NoRunError(FtrainError):
    """Raised when a folder holds no run that a supervisor has recorded."""

    def __init__(self, run_dir: str):
        self.run_dir = run_dir
        what = (
            "is not a folder"
            if not os.path.isdir(run_dir)
            else f"has no {EVENTS_FILE} that begins with run_started"
        )
        super().__init__(
            f"{run_dir} {what}, so it is not a run directory; give the run_dir of an `ftrain run`"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One line of `events.jsonl`.

    Attributes:
      t: unix seconds.
      name: see `ftrain.events`.
      fields: all but those two.
    """

    t: float
    name: str
    fields: dict[str, Any]

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]

    def get(self, field: str, default: Any = None) -> Any:
        """A field that not every event of that name has."""
        return self.fields.get(field, default)


@dataclasses.dataclass(slots=True)  # not frozen: a run may have millions
class Commit:
    """One line of `metrics.jsonl`: a committed step.

    Attributes:
      t: of the commit, unix seconds.
      step: committed steps, this one included.
      loss: None if it was not finite.
      samples: the cursor after the step.
      workers: ids that committed it.
      step_time_s: seconds of the block that committed it.
      digest: of the committed state where that was due, else "".
      rewound: the line takes the place of an earlier one of that step.
      metrics: the user's, and `eval_...`.
    """

    t: float
    step: int
    loss: float | None
    samples: int
    workers: tuple[int, ...]
    step_time_s: float
    digest: str
    rewound: bool
    metrics: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A whole line that cannot be read; `line` counts from 1."""

    file: str
    line: int
    what: str


@dataclasses.dataclass(slots=True)
class Session:
    """One supervisor's life: from `run_started` to `run_finished`, or to its own end.

    Attributes:
      config: as it was resolved.
      events: in the order of the file, `run_started` first.
      commits: in the order of the file.
    """

    config: dict[str, Any]
    events: list[Event]
    commits: list[Commit] = dataclasses.field(default_factory=list)

    @property
    def started(self) -> float:
        """When it began, unix seconds."""
        return self.events[0].t

    @property
    def finished(self) -> Event | None:
        """Its `run_finished`; None if it died, or lives."""
        last = self.events[-1]
        return last if last.name == "run_finished" else None

    @property
    def last_t(self) -> float:
        """When the last that is known of it happened."""
        return max([self.events[-1].t, *(c.t for c in self.commits[-1:])])

    def in_order(self) -> Iterator[Event | Commit]:
        """Its events and commits, in the order of times."""
        return heapq.merge(self.events, self.commits, key=lambda fact: fact.t)

    def named(self, *names: str) -> Iterator[Event]:
        """Its events of those names, in order."""
        return (e for e in self.events if e.name in names)


@dataclasses.dataclass
class Records:
    """All of a run's records."""

    run_dir: str
    sessions: list[Session]
    problems: list[Problem]

    @property
    def config(self) -> dict[str, Any]:
        """Of the last session."""
        return self.sessions[-1].config

    @functools.cached_property
    def events(self) -> list[Event]:
        """Of all sessions, in order."""
        return [e for session in self.sessions for e in session.events]

    @functools.cached_property
    def commits(self) -> list[Commit]:
        """Of all sessions, in order; a rewound step is there as often as it was committed."""
        return [c for session in self.sessions for c in session.commits]

    @functools.cached_property
    def history(self) -> list[Commit]:
        """What the run has come to: the later line of a step wins, and ends what came after it."""
        kept: list[Commit] = []
        for commit in self.commits:
            while kept and kept[-1].step >= commit.step:
                kept.pop()
            kept.append(commit)
        return kept


def read_records(run_dir: str | os.PathLike[str]) -> Records:
    """Reads the records of a run, finished or not.

    Raises:
      NoRunError: there is no run in that folder.
    """
    run_dir = os.fspath(run_dir)
    path = os.path.join(run_dir, EVENTS_FILE)
    problems: list[Problem] = []
    commits = [
        commit_of(row)
        for row in _rows(os.path.join(run_dir, METRICS_FILE), problems, ("t", "step", "samples"))
    ]
    events = [event_of(row) for row in _rows(path, problems, ("t", "event"))]
    if not events or events[0].name != "run_started":
        raise NoRunError(run_dir)
    sessions = _sessions(events)
    _share_out(commits, sessions)
    return Records(run_dir, sessions, problems)


def event_of(row: dict[str, Any]) -> Event:
    """A row of `events.jsonl`."""
    return Event(row["t"], row["event"], {k: v for k, v in row.items() if k not in ("t", "event")})


def commit_of(row: dict[str, Any]) -> Commit:
    """A row of `metrics.jsonl`."""
    return Commit(
        t=row["t"],
        step=row["step"],
        loss=row.get("loss"),
        samples=row["samples"],
        workers=tuple(row.get("workers", ())),
        step_time_s=row.get("step_time_s", 0.0),
        digest=row.get("digest", ""),
        rewound=row.get("rewound", False),
        metrics={k: v for k, v in row.items() if k not in _OWN},
    )


def _rows(path: str, problems: list[Problem], needed: Sequence[str]) -> Iterator[dict[str, Any]]:
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # still being written, or torn by its supervisor's death
            try:
                row = json.loads(line)
                missing = [key for key in needed if key not in row]
                what = f"it has no {missing[0]}" if missing else ""
            except (ValueError, TypeError) as error:
                what = str(error)
            if what:
                problems.append(Problem(os.path.basename(path), number, what))
            else:
                yield row


def _sessions(events: list[Event]) -> list[Session]:
    sessions: list[Session] = []
    for event in events:
        if event.name == "run_started":
            sessions.append(Session(event["config"], []))
        sessions[-1].events.append(event)
    return sessions


def _share_out(commits: list[Commit], sessions: list[Session]) -> None:
    """Gives each commit to the session that ran when it was made."""
    current = 0
    for commit in commits:
        while current + 1 < len(sessions) and commit.t >= sessions[current + 1].started:
            current += 1
        sessions[current].commits.append(commit)
