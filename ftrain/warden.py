"""The warden: ends a worker that is stuck, and says where it was. On the supervisor's clock.

`watchdog` says which worker the others wait for; here it is asked for its Python stacks, given a
moment to write them, and killed. What follows is a death like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ftrain.beat import UNHURRIED
from ftrain.reachability import pairs_without_answer
from ftrain.slots import COORDINATOR
from ftrain.stacks import STACK_SIGNAL, culprit, read_stacks
from ftrain.watchdog import Hang, find_cut_off, find_hang, patience_s

if TYPE_CHECKING:
    from ftrain.config import Cluster
    from ftrain.events import EventLog
    from ftrain.processes import Child
    from ftrain.slots import Slot
    from ftrain.story import Story
    from ftrain.worker_logs import Logs

DEATH_TOLD_S = 2.0  # until those who waited for a dead one have left what they waited in
STACKS_S = 0.6  # to write them: milliseconds, on a machine that has some to spare


class Warden:
    """Watches the slots' beats. One worker at a time is ended (rule R9)."""

    def __init__(
        self, slots: Sequence[Slot], rules: Cluster, log: EventLog, logs: Logs, story: Story
    ):
        self._slots, self._rules = slots, rules
        self._log, self._logs, self._story = log, logs, story
        self._asked: tuple[Slot, str, float] | None = None  # for its stacks, in which phase, when
        self._dump = ""  # what it has written so far
        self._ended_at = 0.0

    def tick(self, now: float, coordinator: Child | None) -> None:
        """Ends a worker that is stuck: at its start, or while the others wait for it.

        Args:
          now: time.monotonic().
          coordinator: its process, if it lives; a worker may have lost its way to it.
        """
        if self._asked is not None:
            self._end_asked(now)
            return
        for slot in self._slots:
            if slot.child is not None and not slot.going and not slot.hung:
                self._ask_if_late(slot, now)
                if self._asked is not None:
                    return
        if not any((s.child and s.gave_up) or _just_died(s, now) for s in self._slots):
            self._ask_who_hangs(now, coordinator)  # else the others may wait for that one

    def _ask_if_late(self, slot: Slot, now: float) -> None:
        """One that does not take part yet: nobody waits for it, and it may never come."""
        reading = slot.reading()
        if reading.phase == "start":
            seconds, limit_s = now - slot.started_at, self._rules.start_timeout_s
            rule = f"start_timeout_s={limit_s:g}"
        elif reading.phase in UNHURRIED:
            limit_s = patience_s(reading, self._rules.hang_timeout_s)
            seconds, rule = now - reading.since, f"{limit_s:g} s are allowed there"
        else:
            return
        if seconds > limit_s:
            cause = f"no progress in {reading.phase} for {seconds:.1f} s ({rule})"
            self._ask(Hang(slot.worker, reading.phase, seconds), cause, now)

    def _ask_who_hangs(self, now: float, coordinator: Child | None) -> None:
        processes = {s.worker: s.child for s in self._slots if s.child is not None}
        if coordinator is not None:
            processes[COORDINATOR] = coordinator

        def broken_pairs() -> set[tuple[int, int]]:
            return pairs_without_answer({w: p.sockets() for w, p in processes.items()})

        readings = {
            s.worker: s.reading() for s in self._slots if s.child and s.going and not s.hung
        }
        # After one is ended the others get their time anew: they may have waited only for it.
        anew = {w: r._replace(since=max(r.since, self._ended_at)) for w, r in readings.items() if r}
        limit_s = self._rules.hang_timeout_s
        hang = find_cut_off(anew, now, limit_s, broken_pairs) or find_hang(
            anew,
            now,
            limit_s,
            stopped=[w for w in readings if self._slots[w].child.is_stopped()],
        )
        if hang is not None:
            self._ask(hang, self._cause_of(hang, broken_pairs()), now)

    def _cause_of(self, hang: Hang, broken: Collection[tuple[int, int]]) -> str:
        how_long = f"in {hang.phase} for {hang.seconds:.1f} s"
        if hang.unreachable:
            return f"not reaching worker {' '.join(map(str, hang.unreachable))} {how_long}"
        if (COORDINATOR, hang.worker) in broken:
            return f"not reaching the coordinator {how_long}"
        return f"no progress {how_long} (hang_timeout_s={self._rules.hang_timeout_s:g})"

    def _ask(self, hang: Hang, cause: str, now: float) -> None:
        where = {"unreachable": hang.unreachable} if hang.unreachable else {}
        self._log(
            "hang_detected", worker=hang.worker, phase=hang.phase, seconds=hang.seconds, **where
        )
        slot = self._slots[hang.worker]
        slot.hung = cause
        slot.new_stacks()  # what was there before is of no interest
        if not slot.child.is_stopped():
            slot.child.signal(STACK_SIGNAL)
        self._asked, self._dump = (slot, hang.phase, now), ""

    def _end_asked(self, now: float) -> None:
        """Ends the worker that was asked, once it has answered or its time is up."""
        slot, phase, asked_at = self._asked
        if slot.child is None or not slot.hung:  # it has ended meanwhile
            self._asked = None
            return
        new, stopped = slot.new_stacks(), slot.child.is_stopped()
        self._dump += new
        written = bool(self._dump) and not new  # thread by thread: nothing says which is the last
        if written or stopped or now > asked_at + STACKS_S:
            self._asked, self._ended_at = None, now
            for line in self._dump.splitlines():
                self._logs.worker(slot.worker, line)
            # The phase that it hung in: a call that the signal interrupted may have gone on.
            stack = culprit(read_stacks(self._dump), phase)
            self._story.worker_hangs(slot, stack, stopped=stopped)
            slot.child.kill()


def _just_died(slot: Slot, now: float) -> bool:
    return slot.going and now < slot.died_at + DEATH_TOLD_S
