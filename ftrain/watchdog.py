"""Which worker the others wait for, from the beats of all. Pure: readings in, a verdict out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ftrain.beat import COLLECTIVES, UNHURRIED, UNTIMED, WAITING, Reading

CUT_OFF_S = 10.0  # in a collective with a peer that does not answer; TCP tried some six times
UNHURRIED_TIMES = 10  # hang_timeout_s, before what may take long is taken for stuck


class Hang(NamedTuple):
    """A worker that makes no progress, in what, and for how long."""

    worker: int
    phase: str
    seconds: float
    unreachable: tuple[int, ...] = ()  # the workers that it cannot reach, if it is ended for that


def find_hang(
    readings: Mapping[int, Reading],
    now: float,
    hang_timeout_s: float,
    stopped: Collection[int] = (),
) -> Hang | None:
    """The one worker to end, or None. One at a time (rule R9).

    A worker is stuck when it has been in one phase for `hang_timeout_s`, ten times that if it
    compiles, reads or writes a checkpoint or waits for the backend, and the culprit when
    others wait for it. First those whose process is stopped: in a collective they look like the
    rest, who wait for them. Then those that are behind: whoever hung while it waited in a barrier
    that has since opened has committed fewer blocks than the rest. Then those at work of their own.
    If all wait in a collective, the device is stuck: those without state first, then the
    highest, and never one that waits in the barrier, which is in order whoever is missing.

    Args:
      readings: of the workers that take part, by id.
      now: time.monotonic().
      hang_timeout_s: the config's.
      stopped: the workers whose processes the kernel has stopped.
    """
    if not readings:
        return None
    stuck = {
        w: now - r.since
        for w, r in readings.items()
        if r.phase not in UNTIMED and now - r.since > patience_s(r, hang_timeout_s)
    }
    front = max(r.round for r in readings.values())
    halted = [w for w in stuck if w in stopped]
    behind = [w for w in stuck if 0 <= readings[w].round < front]
    working = [w for w in stuck if readings[w].phase not in WAITING]
    colliding = sorted(
        (w for w in stuck if readings[w].phase in WAITING & COLLECTIVES),
        key=lambda w: (readings[w].step >= 0, -w),
    )
    if len(stuck) < len(readings) and not (halted or behind or working):
        return None  # they wait for one whose time has not come
    for group in (halted, behind, working, colliding):
        if group:
            worker = group[0] if group is colliding else max(group, key=lambda w: stuck[w])
            return Hang(worker, readings[worker].phase, stuck[worker])
    return None


def patience_s(reading: Reading, hang_timeout_s: float) -> float:
    """How long a worker may be in its phase."""
    return hang_timeout_s * (UNHURRIED_TIMES if reading.phase in UNHURRIED else 1)


def find_cut_off(
    readings: Mapping[int, Reading],
    now: float,
    hang_timeout_s: float,
    broken_pairs: Callable[[], Collection[tuple[int, int]]],
) -> Hang | None:
    """The worker to end because it and a peer, both in a collective, cannot reach one another.

    Known sooner than that a collective hangs, and without it one worker after the other would be
    ended until it is one of the two. Of all who miss somebody it is the one that misses most; then
    those without state, then the highest: which of two is at fault cannot be seen from here.

    Args:
      readings: of the workers that take part, by id.
      now: time.monotonic().
      hang_timeout_s: the config's; a smaller one than `CUT_OFF_S` is kept to.
      broken_pairs: looks for pairs of workers that cannot reach one another.
    """
    patience_s = min(CUT_OFF_S, hang_timeout_s)
    waiting = {
        w for w, r in readings.items() if r.phase in COLLECTIVES and now - r.since > patience_s
    }
    if len(waiting) < 2:
        return None
    pairs = [pair for pair in broken_pairs() if waiting.issuperset(pair)]
    missed = Counter(worker for pair in pairs for worker in pair)
    if not missed:
        return None
    worker = min(missed, key=lambda w: (-missed[w], readings[w].step >= 0, -w))
    unreachable = sorted({w for pair in pairs if worker in pair for w in pair} - {worker})
    reading = readings[worker]
    return Hang(worker, reading.phase, now - reading.since, tuple(unreachable))
