"""The lives of the workers: started, let go, ended, and replaced or given up. Never jax.

A worker's process is replaced in one order only: killed, reaped, fenced, acknowledged, started
(rule R9); `_on_exit`, `Coordination.fence` and `start_due` are those steps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftrain.errors import EXIT_GAVE_UP, RestartLimitError
from ftrain.local_host import Heard, Past
from ftrain.restart import LocalErrors, RestartBudget
from ftrain.slots import Slot
from ftrain.verdict import Ending, refused

if TYPE_CHECKING:
    from ftrain.config import Config
    from ftrain.coordination import Coordination
    from ftrain.events import EventLog
    from ftrain.headship import Headship
    from ftrain.hosts import Hosts
    from ftrain.keeper import Keeper
    from ftrain.processes import Exit
    from ftrain.recorder import Recorder
    from ftrain.story import Story
    from ftrain.words import Words
    from ftrain.worker_logs import Logs

REFUSED_WAIT_S = 3.0  # for the other workers to say that they fail in the same way
SURVIVORS_FIRST_S = 0.5  # how long a replacement waits for the others' next commit


class Lives:
    """Starts the workers in their slots, and decides what becomes of each that ends.

    Args:
      slots: of all workers, on whatever host.
      budget: how often each may fail.
      begun: the histories that this run has had so far, for workers that restore; grows.
      words: hears what the workers say.
      end: ends the run.
    """

    def __init__(
        self,
        config: Config,
        slots: Sequence[Slot],
        headship: Headship,
        *,
        budget: RestartBudget,
        begun: list[tuple[str, int]],
        coordination: Coordination,
        hosts: Hosts,
        keeper: Keeper,
        recorder: Recorder,
        words: Words,
        log: EventLog,
        logs: Logs,
        story: Story,
        end: Ending,
    ):
        self._config, self._slots, self._headship = config, slots, headship
        self._budget, self._begun = budget, begun
        self._coordination, self._hosts, self._keeper = coordination, hosts, keeper
        self._recorder, self._words = recorder, words
        self._log, self._logs, self._story, self._end = log, logs, story, end
        self._local_errors = LocalErrors(config.cluster.workers, config.restart.renew_after_steps)
        self._refused_at: float | None = None
        self._stopping = False

    def stop(self) -> None:
        """Those that take part stop together and save; the others have nothing to save."""
        self._stopping = True
        for slot in self._slots:
            slot.restart_at = None
            if slot.child is not None and slot.going:
                slot.child.send("stop")
            elif slot.child is not None:
                slot.child.kill()

    def tell(self, line: str) -> None:
        """Sends a line to all that take part."""
        for slot in self._slots:
            if slot.child is not None and slot.going:
                slot.child.send(line)

    # In the order of their lives.

    def start_due(self) -> None:
        """Starts every slot whose time has come, fenced as it is."""
        now = time.monotonic()
        due = [
            s
            for s in self._slots
            if s.restart_at is not None
            and now >= s.restart_at
            and s.child is None
            and not s.fencing
            and not self._survivors_first(s, now)
        ]
        if self._coordination.address:
            for slot in due:
                if self._hosts.of(slot.worker).can_start():
                    self._start(slot)

    def _survivors_first(self, slot: Slot, now: float) -> bool:
        """Whether the others still recover from this one's death: a start would take their CPU."""
        return (
            now < slot.died_at + SURVIVORS_FIRST_S
            and self._recorder.step == slot.died_step
            and any(s.going and s.child for s in self._slots)
        )

    def _start(self, slot: Slot) -> None:
        slot.incarnation += 1
        heard = Heard(
            started=functools.partial(self._on_started, slot),
            line=functools.partial(self._words.on_line, slot),
            ended=functools.partial(self._on_exit, slot),
            late=functools.partial(self._words.on_late, slot, self._coordination.generation),
        )
        host = self._hosts.of(slot.worker)
        address, past = self._coordination.address, self._past()
        slot.begin(*host.start(slot.worker, slot.incarnation, address, heard, past))

    def _past(self) -> Past | None:
        lease = self._headship.lease
        if lease is None:
            return None
        return Past(f"{lease.claim.holder}.{self._coordination.generation}", self._begun)

    def _on_started(self, slot: Slot, pid: int) -> None:
        where = {"host": self._hosts.rank_of(slot.worker)} if self._headship.meeting else {}
        self._log(
            "worker_started", worker=slot.worker, pid=pid, incarnation=slot.incarnation, **where
        )
        self._story.worker_started(slot)

    def let_go(self) -> None:
        """Lets ready workers take part: at the start all together, later each at once."""
        ready = [s for s in self._slots if s.ready]
        since, limit_s = self._words.first_ready_at, self._config.cluster.start_timeout_s
        waited = since is not None and time.monotonic() - since > limit_s
        all_here = len(ready) == len(self._slots)
        if all_here and not any(s.going for s in ready):
            self._coordination.all_are_here()
        if self._coordination.knows_all:  # those of hosts that are away may come later
            all_here = bool(ready) and all(
                s.ready for s in self._slots if self._hosts.is_here(s.worker)
            )
        if not (all_here or waited or any(s.going for s in self._slots)):
            return
        going = [s for s in ready if not s.going and s.child is not None]
        for slot in going:
            slot.going = True
            slot.child.send(
                f"go {self._coordination.generation}-{going[0].incarnation}-{going[0].worker} "
                + " ".join(str(s.worker) for s in going)
            )
            for words in self._keeper.words_for_a_new_worker():
                slot.child.send(words)

    # Their ends.

    def _on_exit(self, slot: Slot, ended: Exit, lost: str) -> None:
        """Its process has ended: have it fenced, and decide about its replacement."""
        child, reading = slot.child, slot.reading()
        slot.child, slot.lost = None, lost
        for line in (dump := slot.new_stacks()).splitlines():
            self._logs.worker(slot.worker, line)
        slot.take_crash(ended, reading, dump)
        cause = "the end of the run" if slot.left is not None else slot.cause(ended)
        self._log(
            "worker_exited", worker=slot.worker, pid=child.pid, **ended.fields(), reason=cause
        )
        self._coordination.fence(slot)
        if slot.left is None and self._end.verdict is None:
            self._story.worker_died(slot, child.pid, cause, reading)
            self._after_failure(slot, cause)

    def _after_failure(self, slot: Slot, cause: str) -> None:
        """Restarts it at once, or later, or gives up."""
        if self._stopping or any(s.left is not None for s in self._slots):
            return
        if self._coordination.child is None:
            return  # all start again together, with the next one
        if slot.is_refused_by_all and not self._recorder.committed:
            self._refused_at = self._refused_at or time.monotonic()
            return
        if slot.local_error is not None and (loop := self._crash_loop(slot)):
            self._end(EXIT_GAVE_UP, f"worker {slot.worker}: {loop}")
            return
        try:
            delay_s = self._budget.delay_after_failure(
                slot.worker, slot.commits, cause, others_train=self._others_train(slot)
            )
        except RestartLimitError as error:
            first_cause = slot.local_error["traceback"] if slot.local_error else ""
            self._end(EXIT_GAVE_UP, f"{error}\n{first_cause}".rstrip())
            return
        slot.died_at, slot.died_step = time.monotonic(), self._recorder.step
        slot.restart_at = slot.died_at + delay_s
        quarantine = self._budget.in_quarantine(slot.worker)
        if quarantine:
            self._log("worker_quarantined", worker=slot.worker, seconds=delay_s)
        self._story.restart_in(slot, delay_s, quarantine=quarantine)

    def _crash_loop(self, slot: Slot) -> str | None:
        error, attempt = slot.local_error, self._recorder.aborts
        return self._local_errors.crash_loop(
            slot.worker, error["step"], attempt, error["error"], error["traceback"]
        )

    def _others_train(self, slot: Slot) -> bool:
        """Whether the run has gone on since this worker's last failure, and can without it."""
        going = sum(s.going and s.child is not None for s in self._slots)
        return going >= self._config.cluster.min_workers and self._recorder.step > slot.died_step

    def judge_refusals(self, now: float) -> None:
        """Ends a run whose trainer or data no worker can use, once all have said so."""
        if self._refused_at is not None:
            records = [s.refused for s in self._slots if s.refused is not None]
            if len(records) == len(self._slots) or now - self._refused_at > REFUSED_WAIT_S:
                self._end(*refused(records, len(self._slots)))
