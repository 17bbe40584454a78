"""The rules of `verify` about committed steps.

records   every whole line of both files is a record
lineage   steps count up by one from 1. Where they do not, a checkpoint of the step before was
          restored, or everything began anew, and nobody who had committed the newest step was
          alive; the lines say `rewound` up to the highest step that there had been. Lines that a
          supervisor took with it as it died are unknown: the restored checkpoint shows they were.
cursor    a step takes `batch_size` samples, in order; fewer only where the last epoch ends
members   who commits is one of the run's workers, alive, and there are `min_workers` of them; they
          are the workers of the newest view
digests   wherever a digest was due there is one, and all who committed the step reported the same;
          one that did not is replaced before the next step. Whoever died before its report leaves
          it unknown.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator

from ftrain.findings import FAIL, NOTE, UNKNOWN, Finding
from ftrain.records import Commit, Event, Records, Session
from ftrain.recoveries import is_death

CROSSED_S = 0.2  # by which the times of two workers' reports may be the wrong way round
TOLD_S = 2.0  # by which the supervisor may hear of a death before the slowest member commits


def records(run: Records) -> Iterator[Finding]:
    """Every whole line is a record."""
    for problem in run.problems:
        yield Finding(
            "records", FAIL, f"{problem.file}:{problem.line} is no record: {problem.what}"
        )


def lineage(run: Records) -> Iterator[Finding]:
    """One history, whose restores explain where it goes back."""
    before: Commit | None = None
    highest = 0
    for number, session in enumerate(run.sessions):
        for commit in session.commits:
            last = before.step if before is not None else 0
            if commit.step != last + 1:
                yield from _jump(run, number, before, commit)
            if commit.rewound != (commit.step <= highest):
                says, was = ("rewound", "is the first") if commit.rewound else ("new", "is not")
                yield _lineage(
                    FAIL, f"its line says {says}, and it {was} of that step", commit.step
                )
            before, highest = commit, max(highest, commit.step)


def _jump(run: Records, number: int, before: Commit | None, after: Commit) -> Iterator[Finding]:
    """What is there to explain that `after` does not follow `before`."""
    last, to = (before.step if before else 0), after.step - 1
    since = before.t if before else 0.0
    events = _between(run, number, since, after.t)
    restored = any(e.name == "checkpoint_restored" and e["step"] == to for e in events)
    if before is not None and after.step == before.step:
        what = f"it was committed twice, with {before.samples} and {after.samples} samples"
    elif to > last:
        what = f"steps {last + 1} to {to} are missing" if to > last + 1 else f"step {to} is missing"
    else:
        what = f"it follows step {last}"
    if to > last:
        if restored and any(e.name == "run_started" for e in events):
            yield _lineage(
                UNKNOWN,
                f"{what}: committed, as its checkpoint shows, and not written when its "
                "supervisor died",
                after.step,
            )
        else:
            yield _lineage(FAIL, what, after.step)
    elif not (restored or to == 0):
        yield _lineage(FAIL, f"{what}, and no checkpoint of step {to} was restored", after.step)
    elif left := _still_there(before, events):
        names = ", ".join(map(str, left))
        yield _lineage(
            FAIL,
            f"{what} from {f'checkpoint {to}' if to else 'the start'}, though worker {names}, "
            f"which had step {last}, had not ended",
            after.step,
        )
    else:
        lost = last - to
        origin = f"checkpoint {to}" if to else "the start"
        yield _lineage(NOTE, f"{lost} step{'s' * (lost > 1)} again from {origin}", after.step)


def _still_there(before: Commit, events: list[Event]) -> list[int]:
    """Of those who had committed the newest step: who had not ended since."""
    if any(e.name == "run_started" for e in events):
        return []
    ended = {e["worker"] for e in events if e.name == "worker_exited"}
    return [w for w in before.workers if w not in ended]


def _between(run: Records, number: int, since: float, until: float) -> list[Event]:
    """Events from `since` to `until`, from the session before on, for a commit of `number`."""
    sessions = run.sessions[: number + 1]
    return [e for s in sessions if s.last_t >= since for e in s.events if since <= e.t <= until]


def _lineage(severity: str, what: str, step: int) -> Finding:
    return Finding("lineage", severity, f"step {step}: {what}", step=step)


def cursor(run: Records) -> Iterator[Finding]:
    """Each step took one batch."""
    cursors = {0: 0}
    for session in run.sessions:
        size = session.config["batch_size"]
        ends = {e["samples"] for s in run.sessions for e in s.named("target_known")} - {None}
        for commit in session.commits:
            start = cursors.get(commit.step - 1, (commit.step - 1) * size)
            taken, cursors[commit.step] = commit.samples - start, commit.samples
            if taken == size or (0 < taken < size and commit.samples in ends):
                continue
            yield Finding(
                "cursor",
                FAIL,
                f"step {commit.step}: it took {taken} samples, from {start} to {commit.samples}; "
                f"batch_size={size}",
                step=commit.step,
            )


def members(run: Records) -> Iterator[Finding]:
    """Who committed was a live worker, and there were enough."""
    for session in run.sessions:
        cluster = session.config["cluster"]
        lives, views = _lives(session), _Views(session)
        for commit in session.commits:
            for worker in commit.workers:
                if not 0 <= worker < cluster["workers"]:
                    what = f"worker {worker} committed it, of cluster.workers={cluster['workers']}"
                    yield _members(what, commit, worker)
                elif not _lives_at(lives[worker], commit.t):
                    yield _members(f"worker {worker} committed it and was dead", commit, worker)
            if not views.has(commit):
                names = " ".join(map(str, commit.workers))
                yield _members(f"workers {names} committed it, and that was no view then", commit)
            if len(commit.workers) < cluster["min_workers"]:
                n = len(commit.workers)
                yield _members(
                    f"{n} committed it, fewer than min_workers={cluster['min_workers']}", commit
                )
            if len(set(commit.workers)) < len(commit.workers):
                yield _members(f"a worker is named twice in {list(commit.workers)}", commit)


def _lives(session: Session) -> dict[int, list[float]]:
    """When each worker's process started, ended, started again, ..."""
    turns: dict[int, list[float]] = collections.defaultdict(list)
    for event in session.named("worker_started", "worker_exited"):
        turns[event["worker"]].append(event.t)
    return turns


def _lives_at(turns: list[float], t: float) -> bool:
    # An odd number of turns have come: it has started. Its end is seen before it is told by all.
    return any(bisect.bisect_right(turns, at) % 2 == 1 for at in (t, t - TOLD_S))


class _Views:
    """The sets of workers that trained, and when each began."""

    def __init__(self, session: Session):
        views = sorted((e.t, tuple(e["workers"])) for e in session.named("view_changed"))
        self._times = [t for t, _ in views]
        self._workers = [workers for _, workers in views]

    def has(self, commit: Commit) -> bool:
        """Whether its workers were the view then."""
        first = bisect.bisect_right(self._times, commit.t - CROSSED_S) - 1
        last = bisect.bisect_right(self._times, commit.t + CROSSED_S)
        return commit.workers in self._workers[max(0, first) : last]


def _members(what: str, commit: Commit, worker: int | None = None) -> Finding:
    return Finding("members", FAIL, f"step {commit.step}: {what}", commit.step, worker)


def digests(run: Records) -> Iterator[Finding]:
    """All who committed a step in which a digest was due had the same bits."""
    history = {id(c) for c in run.history}
    for number, session in enumerate(run.sessions):
        late = _told_late(run, number)
        every = session.config["digest_every_steps"]
        agreed = _by_step(session, "digest_agreed")
        differed = _by_step(session, "replicas_differ")
        for i, commit in enumerate(session.commits):
            if not every or commit.step % every:
                continue
            following = session.commits[i + 1] if i + 1 < len(session.commits) else None
            until = following.t if following else float("inf")
            if events := _of(differed, commit, until):
                yield from _differed(session, commit, events[0], until, id(commit) in history)
            elif not commit.digest:
                yield _digests(FAIL, f"it has no digest; digest_every_steps={every}", commit)
            elif commit.step in late:
                what = "its head was lost before it heard of it, so its digests were not compared"
                yield _digests(UNKNOWN, what, commit)
            else:
                yield from _agreed(session, commit, following, agreed[commit.step])


def _told_late(run: Records, number: int) -> range:
    """The steps of a session that its head was not told of: the next one heard of them."""
    for session in run.sessions[number + 1 : number + 2]:
        for event in session.named("head_taken_over"):
            if event["steps"]:
                return range(event["steps"][0], event["steps"][1] + 1)
    return range(0)


def _by_step(session: Session, name: str) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = collections.defaultdict(list)
    for event in session.named(name):
        found[event["step"]].append(event)
    return found


def _of(events: dict[int, list[Event]], commit: Commit, until: float) -> list[Event]:
    """The events of this commit, not of another of the same step."""
    return [e for e in events[commit.step] if commit.t - TOLD_S <= e.t <= until + TOLD_S]


def _agreed(
    session: Session, commit: Commit, following: Commit | None, events: list[Event]
) -> Iterator[Finding]:
    same = [e for e in events if tuple(e["workers"]) == tuple(sorted(commit.workers))]
    if any(e["digest"] == commit.digest for e in same):
        return
    if same:
        theirs = same[-1]["digest"][:16]
        yield _digests(FAIL, f"its digest is {commit.digest[:16]}, agreed was {theirs}", commit)
    elif left := _left_after(session, commit, following):
        yield _digests(UNKNOWN, f"{left}, so not all of its digests were compared", commit)
    else:
        names = " ".join(map(str, commit.workers))
        yield _digests(FAIL, f"workers {names} did not all report its digest", commit)


def _left_after(session: Session, commit: Commit, following: Commit | None) -> str:
    """Who may have died before its report, in words; "" if nobody did."""
    gone = [w for w in commit.workers if following and w not in following.workers]
    until = following.t + TOLD_S if following else float("inf")
    for event in session.named("worker_exited"):
        if commit.t - TOLD_S <= event.t <= until and event["worker"] in commit.workers:
            gone.append(event["worker"])
    if gone:
        return f"worker {gone[0]} ended right after it"
    if following is None and session.finished is None:
        return "nothing more was written"
    return ""


def _differed(
    session: Session, commit: Commit, event: Event, until: float, counts: bool
) -> Iterator[Finding]:
    """Replicas that differ must be made equal before the next step."""
    values: dict[str, str] = event["digests"]
    exits = session.named("worker_exited")
    died = (e for e in exits if is_death(e) and event.t <= e.t <= until + TOLD_S)
    ended = {str(e["worker"]) for e in died}
    left = {digest for worker, digest in values.items() if worker not in ended}
    if len(left) == 1:
        names = " ".join(sorted(w for w in values if w in ended))
        yield _digests(NOTE, f"the state of worker {names} differed; it was replaced", commit)
    elif counts:
        sides = ", ".join(f"worker {w} {d[:16]}" for w, d in values.items())
        yield _digests(FAIL, f"replicas differ: {sides}", commit)
    else:
        yield _digests(NOTE, "replicas differed, and the step was given up", commit)


def _digests(severity: str, what: str, commit: Commit) -> Finding:
    return Finding("digests", severity, f"step {commit.step}: {what}", step=commit.step)
