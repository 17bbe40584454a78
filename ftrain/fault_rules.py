"""The rules of `verify` about faults and the run's end.

deaths       every process that ended says why, one at a time fills a worker's place, and it was
             fenced, or had a new coordinator, before its replacement started
hangs        a stuck worker was found within what its phase may take, and then ended
recoveries   after a death the run went on: no silence longer than the watchdog allows while
             somebody has the state, and the time of a start if nobody has. A replacement took part
             within the time of a start.
checkpoints  the newest that was saved to disk is there, and what was restored had been committed
             (unknown after a supervisor that died without a word); that who saved it died before it
             could say so leaves it unknown
exit         `run_finished` names the newest step. Exit 0 means that the target is reached and its
             checkpoint is saved; "state saved" means that of its step. Without the event the exit
             code is unknown.

The bounds are made of the run's own config: hang_timeout_s, heartbeat_timeout_s, start_timeout_s,
restart.backoff_max_s.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

from ftrain.beat import UNHURRIED
from ftrain.findings import FAIL, NOTE, UNKNOWN, Finding
from ftrain.records import Commit, Event, Records, Session
from ftrain.recoveries import Recovery
from ftrain.recoveries import recoveries as recoveries_of
from ftrain.run_lock import running_supervisor
from ftrain.watchdog import UNHURRIED_TIMES

SETTLE_S = 10.0  # the deadline of a meeting that nobody can end (membership.SETTLE_TIMEOUT_S)
SLACK_S = 5.0  # of a machine that has other things to do
FENCE_S = 10.0  # to be told that a fence is up
SAVES = ("checkpoint_saved", "checkpoint_restored")  # what was read from disk is there
WAITS = ("view_changed", "worker_exited", "step_aborted", "hang_detected", "evaluated")


def deaths(run: Records) -> Iterator[Finding]:
    """Explained, fenced, one process a worker."""
    for number, session in enumerate(run.sessions):
        alive: dict[int, Event] = {}
        unfenced: dict[int, Event] = {}
        for event in session.events:
            worker = event.get("worker")
            if event.name == "worker_started":
                if worker in alive:
                    yield _death(
                        f"worker {worker} started while its process {alive[worker]['pid']} lived",
                        worker,
                    )
                if worker in unfenced:
                    yield _death(
                        f"worker {worker} started before {unfenced[worker]['pid']} was fenced",
                        worker,
                    )
                alive[worker] = event
            elif event.name == "worker_exited":
                started = alive.pop(worker, None)
                if started is None or started["pid"] != event["pid"]:
                    yield _death(
                        f"worker {worker}: process {event['pid']} ended and had not started", worker
                    )
                if not event.get("reason"):
                    yield _death(
                        f"worker {worker}: process {event['pid']} ended without a reason", worker
                    )
                unfenced[worker] = event
            elif event.name == "worker_fenced":
                unfenced.pop(worker, None)
            elif event.name in ("coordinator_started", "coordinator_exited"):
                unfenced.clear()  # the next one knows of nobody
        yield from _at_the_end(run, number, session, alive, unfenced)


def _at_the_end(
    run: Records, number: int, session: Session, alive: dict[int, Event], unfenced: dict[int, Event]
) -> Iterator[Finding]:
    for worker, event in unfenced.items():
        if session.last_t > event.t + FENCE_S:
            yield _death(f"worker {worker}: process {event['pid']} was never fenced", worker)
    if session.finished is not None:
        for worker, event in alive.items():
            yield _death(f"worker {worker}: process {event['pid']} outlived the run", worker)
    elif number + 1 < len(run.sessions) or running_supervisor(run.run_dir) is None:
        yield Finding(
            "deaths",
            NOTE,
            f"the supervisor of session {number + 1} ended without a word, its workers with it",
        )


def _death(what: str, worker: int) -> Finding:
    return Finding("deaths", FAIL, what, worker=worker)


def hangs(run: Records) -> Iterator[Finding]:
    """Found in time, and ended."""
    for session in run.sessions:
        limit_s = session.config["cluster"]["hang_timeout_s"]
        start_s = session.config["cluster"]["start_timeout_s"]
        for i, event in enumerate(session.events):
            if event.name != "hang_detected":
                continue
            worker, phase = event["worker"], event["phase"]
            allowed_s = start_s if phase == "start" else limit_s
            allowed_s *= UNHURRIED_TIMES if phase in UNHURRIED else 1
            if event["seconds"] > allowed_s * 1.25 + SLACK_S:
                yield _hang(
                    f"worker {worker} was stuck in {phase} for {event['seconds']:.1f} s before "
                    f"that was found; {allowed_s:g} s are allowed there",
                    worker,
                )
            ends = (e for e in session.events[i:] if e.name == "worker_exited")
            end = next((e.t for e in ends if e["worker"] == worker), session.last_t)
            if end > event.t + SLACK_S:
                yield _hang(
                    f"worker {worker} was found stuck in {phase}, and ended only "
                    f"{end - event.t:.1f} s later",
                    worker,
                )


def _hang(what: str, worker: int) -> Finding:
    return Finding("hangs", FAIL, what, worker=worker)


def recoveries(run: Records) -> Iterator[Finding]:
    """The run went on after each death, and the worker came back, within the config's bounds."""
    for session in run.sessions:
        cluster, restart = session.config["cluster"], session.config["restart"]
        silence_s = (
            max(cluster["hang_timeout_s"], SETTLE_S) + cluster["heartbeat_timeout_s"] + SLACK_S
        )
        unhurried_s = cluster["hang_timeout_s"] * UNHURRIED_TIMES
        start_s = cluster["start_timeout_s"] + unhurried_s + SLACK_S
        for recovery in recoveries_of(session):
            yield from _went_on(session, recovery, silence_s, start_s)
            yield from _came_back(session, recovery, start_s, restart["backoff_max_s"])


def _went_on(
    session: Session, recovery: Recovery, silence_s: float, start_s: float
) -> Iterator[Finding]:
    until = recovery.went_on.t if recovery.went_on is not None else session.last_t
    bound_s = silence_s if recovery.survivors else start_s
    if until - recovery.t <= bound_s:
        return  # whatever happened meanwhile
    signs = [e for e in session.named(*WAITS) if recovery.t < e.t < until]
    if any(e.name == "view_changed" and _is_small(session, e) for e in signs):
        return  # waiting for min_workers, which below_min_timeout_s bounds
    times = [recovery.t, *(e.t for e in signs), until]
    longest_s = max(b - a for a, b in itertools.pairwise(times))
    if longest_s > bound_s:
        who = "the coordinator" if recovery.worker is None else f"worker {recovery.worker}"
        yield _slow(
            f"after the death of {who} ({recovery.cause}) nothing happened for {longest_s:.1f} s; "
            f"bound: {bound_s:.1f} s",
            recovery,
        )


def _is_small(session: Session, event: Event) -> bool:
    return len(event["workers"]) < session.config["cluster"]["min_workers"]


def _came_back(
    session: Session, recovery: Recovery, start_s: float, backoff_max_s: float
) -> Iterator[Finding]:
    """Of one whose next life was long enough, in a session that went on for so long."""
    if recovery.worker is None or recovery.back is not None:
        return
    mine = [e for e in session.events if e.get("worker") == recovery.worker and e.t > recovery.t]
    started = next((e.t for e in mine if e.name == "worker_started"), None)
    ended = next((e.t for e in mine if e.name == "worker_exited"), session.last_t)
    trained = any(c.t > recovery.t + backoff_max_s + start_s for c in session.commits[-1:])
    away = _is_away(session, recovery.worker)
    if started is None and trained and not away and not _stopping(session):
        yield _slow(
            f"worker {recovery.worker} was not started again in "
            f"{session.last_t - recovery.t:.1f} s; restart.backoff_max_s={backoff_max_s:g}",
            recovery,
        )
    if started is not None and ended - started > start_s and trained:
        yield _slow(
            f"worker {recovery.worker} started again and did not take part for "
            f"{ended - started:.1f} s; bound: {start_s:.1f} s",
            recovery,
        )


def _is_away(session: Session, worker: int) -> bool:
    """Whether its host is lost and nobody has taken that one's rank."""
    hosts = [e for e in session.named("host_lost", "host_joined") if worker in e["workers"]]
    return bool(hosts) and hosts[-1].name == "host_lost"


def _stopping(session: Session) -> bool:
    return any(True for _ in session.named("stop_requested"))


def _slow(what: str, recovery: Recovery) -> Finding:
    return Finding("recoveries", FAIL, what, worker=recovery.worker)


def checkpoints(run: Records) -> Iterator[Finding]:
    """What was saved is there; what was restored had been committed, and saved."""
    saved: set[int] = {0}
    committed: set[int] = {0}
    newest: int | None = None
    silent = False
    for session in run.sessions:
        for fact in session.in_order():
            if isinstance(fact, Commit):
                committed.add(fact.step)
            elif fact.name == "checkpoint_saved" and fact["tier"] == "disk":
                newest = fact["step"]
                saved.add(newest)
            elif fact.name == "checkpoint_restored":
                yield from _restored(fact, committed, saved, silent)
        silent = silent or session.finished is None
    if newest is not None and not _is_there(run, newest):
        what = f"checkpoint {newest} was saved, and is not in checkpoints/"
        yield Finding("checkpoints", FAIL, what, step=newest)


def _restored(
    event: Event, committed: set[int], saved: set[int], silent: bool
) -> Iterator[Finding]:
    """Snapshots in memory are too many to be recorded: of those the commit alone is asked for."""
    step, tier = event["step"], event["tier"]
    if step not in committed:
        what = f"step {step} was restored from {tier}, and no line says that it was committed"
        yield Finding("checkpoints", UNKNOWN if silent else FAIL, what, step=step)
    elif tier == "disk" and step not in saved:
        what = f"step {step} was restored from disk; who saved it died before it could say so"
        yield Finding("checkpoints", UNKNOWN, what, step=step)


def _is_there(run: Records, step: int) -> bool:
    return os.path.isdir(os.path.join(run.run_dir, "checkpoints", str(step)))


def exit_code(run: Records) -> Iterator[Finding]:
    """Each session's end is as its records say."""
    target: Event | None = None
    saved: set[int] = set()
    step = samples = 0
    for number, session in enumerate(run.sessions):
        for event in session.events:
            if event.name == "target_known":
                target = event
            elif event.name in SAVES and event["tier"] == "disk":
                saved.add(event["step"])
        if session.commits:
            step, samples = session.commits[-1].step, session.commits[-1].samples
        if session.finished is not None:
            for what in _wrong_end(session.finished, target, saved, step, samples):
                yield Finding("exit", FAIL, f"session {number + 1}: {what}", step=step)
        elif number + 1 < len(run.sessions):
            how = _how_it_went_on(run.sessions[number + 1])
            yield Finding("exit", NOTE, f"session {number + 1} has no exit code: {how}")
        elif (pid := running_supervisor(run.run_dir)) is not None:
            yield Finding("exit", NOTE, f"the run is still going (process {pid})")
        else:
            yield Finding(
                "exit",
                UNKNOWN,
                "there is no exit code: the supervisor died; the same command continues",
            )


def _how_it_went_on(session: Session) -> str:
    for taken in session.named("head_taken_over"):
        return f"its head, host {taken['was']}, was lost, and host {taken['host']} took over"
    return "its supervisor died"


def _wrong_end(
    end: Event, target: Event | None, saved: set[int], step: int, samples: int
) -> Iterator[str]:
    code, reason = end["exit_code"], end["reason"]
    if end["step"] != step:
        yield f"it ended with step {end['step']}, and the last line is step {step}"
    if code == 0 and not _is_reached(target, step, samples):
        yield f"exit code 0 at step {step} ({samples} samples), short of its target"
    if (code == 0 or "state saved" in reason) and step not in saved and step:
        yield f"exit code {code} ({reason}), and no record says that step {step} was saved"


def _is_reached(target: Event | None, step: int, samples: int) -> bool:
    wanted: dict[str, Any] = target.fields if target is not None else {}
    if wanted.get("samples") is not None:
        return samples >= wanted["samples"]
    return step >= wanted.get("steps", 0)
