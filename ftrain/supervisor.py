"""The supervisor: starts the coordinator and the workers, watches, fences, restarts. Never jax.

One thread, one loop over pipes, process ends, signals and a clock. A worker's process is replaced
in one order only: killed, reaped, fenced, acknowledged, started (rule R9); `_on_worker_exit`,
`Coordination.fence` and `_start_due` are those steps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftrain import restart
from ftrain.board import Board
from ftrain.config import Config
from ftrain.coordination import Coordination
from ftrain.ears import Ears
from ftrain.errors import EXIT_GAVE_UP, EXIT_TRY_AGAIN, RestartLimitError
from ftrain.events import EventLog
from ftrain.headship import Headship
from ftrain.history import begun_in
from ftrain.hosts import Hosts, ids_of
from ftrain.keeper import Keeper
from ftrain.lease import DeposedError
from ftrain.local_host import LOOPBACK, Heard, LocalHost, Past
from ftrain.memory_tier import adopt, memory_folders, remove_all, settle_folder, sweep
from ftrain.processes import Ends, Exit, adopt_orphans
from ftrain.recorder import Recorder
from ftrain.records import commit_of, event_of, read_records
from ftrain.remote_host import RemoteHost
from ftrain.screen import Screen
from ftrain.sinks import CLOSE_S, Sinks
from ftrain.slots import COORDINATOR, Slot
from ftrain.story import Story
from ftrain.verdict import Verdict, by_agreement, not_saved_in_time, refused
from ftrain.warden import Warden
from ftrain.worker_logs import Logs

TICK_S = 0.1
STATUS_EVERY_S = 1.0
REFUSED_WAIT_S = 3.0  # for the other workers to say that they fail in the same way
SURVIVORS_FIRST_S = 0.5  # how long a replacement waits for the others' next commit
REMOTE_ENDS_S = 5.0  # for workers on other hosts to be ended, at the end
# What a process says of itself, of no interest once it counts as dead.
OF_ITSELF = frozenset(
    {"ready", "left", "refused", "local_error", "gave_up", "snapshot", "snapshot_failed"}
)
STOP_RESERVE_S = 2.0  # of grace_s, for ending processes after the save


class Supervisor:
    """One run of a config, from its first process to its exit code."""

    def __init__(
        self,
        config: Config,
        *,
        base: str,
        platform: str,
        headship: Headship,
        log: EventLog,
        screen: Screen,
        sinks: Sinks,
        continues: bool = True,
        own_config: Config | None = None,
    ):
        self._config, self._platform = config, platform
        self._log, self._screen, self._sinks = log, screen, sinks
        self._headship, self._lease, self._meeting = headship, headship.lease, headship.meeting
        lock_fd = headship.lock.fileno()
        self._continues = continues  # or it is a new run
        self._story = Story(screen, config)
        self._board = Board(config.run_dir)
        records = read_records(config.run_dir)
        self._board.read(records)
        self._begun = begun_in(records)
        log.listen(self._on_event)
        self._shown_at = float("-inf")
        self._ticked_at = float("-inf")
        self._recorder = Recorder(config.run_dir, log, self._on_fact, self._lease)
        self._logs = Logs(config.run_dir)
        self._slots = [Slot(i) for i in range(config.cluster.workers)]
        self._budget = restart.RestartBudget(config.restart)
        self._local_errors = restart.LocalErrors(
            config.cluster.workers, config.restart.renew_after_steps
        )
        self._ears = Ears()
        self._coordination = Coordination(
            config,
            platform,
            self._slots,
            headship,
            lock_fd,
            ears=self._ears,
            log=log,
            logs=self._logs,
            story=self._story,
            on_exit=self._on_coordinator_exit,
        )
        setting = config.checkpoint.memory_folder
        self._memory = [str(f) for f in memory_folders(config.run_dir, setting, headship.part)]
        meeting = self._meeting
        self._local = LocalHost(
            own_config or config,
            base=base,
            platform=platform,
            address=meeting.address if meeting else LOOPBACK,
            workers=ids_of(headship.rank, meeting.nodes if meeting else 1, config.cluster.workers),
            memory=self._memory,
            ears=self._ears,
            logs=self._logs,
            tell_groups=self._coordination.tell_groups,
        )
        self._hosts = Hosts(
            self._local,
            config,
            headship,
            ears=self._ears,
            on_here=self._on_host_here,
            on_lost=self._on_host_lost,
            stop=self._on_stop,
            log=self._logs.supervisor,
        )
        self._waiting_since = time.monotonic()  # for hosts, with nobody training
        self._first_ready_at: float | None = None
        self._refused_at: float | None = None
        self._warden = Warden(self._slots, config.cluster, log, self._logs, self._story)
        self._keeper = Keeper(
            config,
            os.environ,
            lock_fd,
            self._fork_saver,
            ears=self._ears,
            log=log,
            logs=self._logs,
            record=lambda record: self._recorder.take(
                COORDINATOR, record, self._coordination.generation
            ),
            tell=self._tell_workers,
            staging=self._lease and self._lease.checkpoint_staging,
        )
        self._signalled = False  # this supervisor itself
        self._stop_signal = ""
        self._stop_deadline = float("inf")
        self._verdict: Verdict | None = None  # once decided
        self._is_down = False

    def run(self) -> int:
        """Runs to the end and returns the exit code.

        Raises:
          DeposedError: another host is the head now. Nothing of this one is running any more.
        """
        adopt_orphans()
        self._begin_memory()
        with self._ears.signals(self._on_signal):
            try:
                return self._run()
            except DeposedError:
                self._abandon()
                raise

    def _run(self) -> int:
        if "FTRAIN_CHAOS" in os.environ:
            from ftrain.chaos.hook import FaultFeed

            FaultFeed(self._ears, self._log, self._screen.line)
        self._local.open()
        self._start_coordinator()
        self._sinks.start(self._ears, self._logs, self._screen.line)
        while self._verdict is None:
            self._ears.wait(TICK_S)
            now = time.monotonic()
            self._go_on()
            if now > self._ticked_at + TICK_S / 2:  # not at every word of a worker's
                self._ticked_at = now
                self._tick(now)
            self._judge(now)
        code, reason = self._verdict
        if self._lease is not None:  # before anything is silent: nobody is to take over now
            with contextlib.suppress(OSError):
                self._lease.renew(exit_code=code, reason=reason)
        self._shut_down()
        if durable := self._keeper.is_durable(self._recorder.step):
            self._remove_snapshots()
        self._recorder.close()
        self._log("run_finished", step=self._recorder.step, exit_code=code, reason=reason)
        self._show(live=False)
        self._story.finished(code, reason)
        self._hosts.dismiss_all(self._verdict, durable=durable)
        self._sinks.close(self._time_for_sinks_s())
        self._logs.close()
        return code

    def _time_for_sinks_s(self) -> float:
        """What a stop has left of `grace_s`, or as long as it takes within reason."""
        left_s = self._stop_deadline + STOP_RESERVE_S / 2 - time.monotonic()
        return max(STOP_RESERVE_S / 4, min(CLOSE_S, left_s))

    def _end(self, code: int, reason: str) -> None:
        if self._verdict is None:
            self._verdict = Verdict(code, reason)

    def _begin_memory(self) -> None:
        """What earlier processes left in the memory tier: of this run to be used, of others not."""
        sweep()
        if not self._continues:
            self._remove_snapshots()
        if self._headship.part is not None:
            adopt(self._config.run_dir, self._headship.part)
        for folder in self._memory:
            settle_folder(Path(folder))

    def _remove_snapshots(self) -> None:
        setting = self._config.checkpoint.memory_folder
        remove_all(self._config.run_dir, setting, self._headship.part)

    def _fork_saver(
        self, job: dict[str, Any], env: Mapping[str, str], lock_fd: int, ends: Ends
    ) -> int | None:
        template = self._local.template
        return template.fork(job, env, lock_fd, ends) if template.usable else None

    def _tell_workers(self, line: str) -> None:
        for slot in self._slots:
            if slot.child is not None and slot.going:
                slot.child.send(line)

    def _abandon(self) -> None:
        """Another host is the head: all that this one has started ends, and nothing is told."""
        self._end(EXIT_TRY_AGAIN, "another host is the head now")
        self._hosts.abandon()
        self._shut_down()
        self._sinks.close(0.0)
        self._screen.close()
        self._logs.close()

    # Signals.

    def _on_signal(self, name: str) -> None:
        again, self._signalled = self._signalled, True
        self._on_stop(name, again=again)

    def _on_stop(self, name: str, *, again: bool) -> None:
        """A signal came to this supervisor, or to that of another host; `again`: not its first."""
        if self._stop_signal and not again:
            return  # a scheduler signals every host
        self._log("stop_requested", signal=name)
        if self._stop_signal:
            self._end(EXIT_TRY_AGAIN, f"{name} again: stopped at once")
            return
        self._stop_signal = name
        self._stop_deadline = time.monotonic() + max(1.0, self._config.grace_s - STOP_RESERVE_S)
        self._screen.line(f"{name}: stopping after this step; a second one stops at once")
        if self._lease is not None:
            self._lease.stopping()
        self._pass_on_stop()

    def _pass_on_stop(self) -> None:
        """Those that take part stop together and save; the others have nothing to save."""
        self._keeper.hurries = True
        for slot in self._slots:
            slot.restart_at = None
            if slot.child is not None and slot.going:
                slot.child.send("stop")
            elif slot.child is not None:
                slot.child.kill()

    # The other hosts.

    def _on_host_here(self, host: RemoteHost) -> None:
        """An agent has come, with nothing running: whoever was there before is fenced, once more.

        The first fence came when the host was lost, and its workers may have lived on for a while.
        """
        address = host.wire.peer_host
        workers = self._hosts.workers_of(host)
        self._log("host_joined", host=host.rank, name=host.name, address=address, workers=workers)
        self._story.host_joined(host, workers, self._hosts.missing())
        for worker in workers:
            if self._slots[worker].incarnation >= 0:
                self._coordination.fence(self._slots[worker])

    def _on_host_lost(self, host: RemoteHost, reason: str) -> None:
        workers = self._hosts.workers_of(host)
        self._log("host_lost", host=host.rank, name=host.name, reason=reason, workers=workers)
        self._story.host_lost(reason, workers)

    # The coordinator.

    def _start_coordinator(self) -> None:
        self._waiting_since = time.monotonic()
        self._coordination.start(self._local.env, self._recorder.step)

    def _on_coordinator_exit(self, began_at_step: int) -> None:
        try:
            commits = self._recorder.step - began_at_step
            self._budget.delay_after_failure(COORDINATOR, commits, "the coordinator")
        except RestartLimitError as error:
            self._end(EXIT_GAVE_UP, str(error))

    # Workers, in the order of their lives.

    def _start_due(self) -> None:
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
                    self._start_worker(slot)

    def _survivors_first(self, slot: Slot, now: float) -> bool:
        """Whether the others still recover from this one's death: a start would take their CPU."""
        return (
            now < slot.died_at + SURVIVORS_FIRST_S
            and self._recorder.step == slot.died_step
            and any(s.going and s.child for s in self._slots)
        )

    def _start_worker(self, slot: Slot) -> None:
        slot.incarnation += 1
        heard = Heard(
            started=functools.partial(self._on_started, slot),
            line=functools.partial(self._on_line, slot),
            ended=functools.partial(self._on_worker_exit, slot),
            late=functools.partial(self._on_late_record, slot, self._coordination.generation),
        )
        host = self._hosts.of(slot.worker)
        address, past = self._coordination.address, self._past()
        slot.begin(*host.start(slot.worker, slot.incarnation, address, heard, past))

    def _past(self) -> Past | None:
        if self._lease is None:
            return None
        return Past(f"{self._lease.claim.holder}.{self._coordination.generation}", self._begun)

    def _on_started(self, slot: Slot, pid: int) -> None:
        where = {"host": self._hosts.rank_of(slot.worker)} if self._meeting else {}
        self._log(
            "worker_started", worker=slot.worker, pid=pid, incarnation=slot.incarnation, **where
        )
        self._story.worker_started(slot)

    def _on_line(self, slot: Slot, pipe: str, line: str) -> None:
        match pipe:
            case "stdout":
                self._on_output(slot, line)
            case "stderr":
                self._on_stderr(slot, line)
            case "records":
                self._on_record(slot, json.loads(line))

    def _on_output(self, slot: Slot, line: str) -> None:
        alive = [s.worker for s in self._slots if s.child is not None]
        # Of those who train: one that has just come back may be lower and has said nothing yet.
        if slot.worker == min([w for w in self._recorder.workers if w in alive] or alive):
            self._screen.line(f"[{slot.worker}] {line}")

    def _on_stderr(self, slot: Slot, line: str) -> None:
        slot.hear(line)
        if slot.gave_up and slot.child is not None:
            slot.child.kill()  # it is ending, and the others wait for it

    def _on_late_record(self, slot: Slot, generation: int, line: str) -> None:
        """From a host that was cut off: what its worker had reported before it counted as dead."""
        record = json.loads(line)
        if record["record"] not in OF_ITSELF:
            self._recorder.take(slot.worker, record, generation)

    def _on_record(self, slot: Slot, record: dict[str, Any]) -> None:
        record["t"] -= self._hosts.of(slot.worker).clock_offset_s
        match record["record"]:
            case "ready":
                slot.ready = True
                self._log(
                    "worker_ready",
                    worker=slot.worker,
                    pid=slot.child.pid,
                    seconds=time.monotonic() - slot.started_at,
                    cpu_s=record["cpu_s"],
                    compile_s=record["compile_s"],
                )
                self._first_ready_at = self._first_ready_at or time.monotonic()
            case "left":
                slot.left = record["reason"]
            case "refused":
                slot.refused = record
            case "local_error":
                slot.local_error = record
            case "gave_up":
                self._end(EXIT_GAVE_UP, record["reason"])
            case "snapshot" | "snapshot_failed":
                self._keeper.take(record)
            case kind:
                slot.commits += kind == "commit"
                if kind in ("checkpoint_restored", "checkpoint_skipped"):
                    self._keeper.note_restore(record)
                self._recorder.take(slot.worker, record, self._coordination.generation)

    def _on_event(self, row: dict[str, Any]) -> None:
        event = event_of(row)
        if event.name == "history_began":
            self._begun.append((event["history"], event["step"]))
        self._board.event(event)

    def _on_fact(self, kind: str, fields: dict[str, Any]) -> None:
        self._logs.supervisor(f"{kind} {json.dumps(fields)}")
        if kind == "commit":
            self._board.commit(commit_of(fields))
        self._story.fact(kind, fields)

    def _let_go(self) -> None:
        """Lets ready workers take part: at the start all together, later each at once."""
        ready = [s for s in self._slots if s.ready]
        waited = (
            self._first_ready_at is not None
            and time.monotonic() - self._first_ready_at > self._config.cluster.start_timeout_s
        )
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

    def _on_worker_exit(self, slot: Slot, ended: Exit, lost: str) -> None:
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
        if slot.left is None and self._verdict is None:
            self._story.worker_died(slot, child.pid, cause, reading)
            self._after_failure(slot, cause)

    def _after_failure(self, slot: Slot, cause: str) -> None:
        """Restarts it at once, or later, or gives up."""
        if self._stop_signal or any(s.left is not None for s in self._slots):
            return
        if self._coordination.child is None:
            return  # all start again together, with the next one
        if slot.is_refused_by_all and not self._recorder.committed:
            self._refused_at = self._refused_at or time.monotonic()
            return
        if slot.local_error is not None:
            error = slot.local_error
            loop = self._local_errors.crash_loop(
                slot.worker,
                error["step"],
                self._recorder.aborts,
                error["error"],
                error["traceback"],
            )
            if loop is not None:
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

    def _others_train(self, slot: Slot) -> bool:
        """Whether the run has gone on since this worker's last failure, and can without it."""
        going = sum(s.going and s.child is not None for s in self._slots)
        return going >= self._config.cluster.min_workers and self._recorder.step > slot.died_step

    # After every event, and with the clock.

    def _go_on(self) -> None:
        """Starts what an event has made possible."""
        if self._coordination.child is None and not any(s.child for s in self._slots):
            if self._stop_signal:
                self._end(EXIT_TRY_AGAIN, f"{self._stop_signal}")
            else:
                self._coordination.generation += 1
                self._first_ready_at = None
                self._start_coordinator()
        self._start_due()
        self._let_go()
        if any(s.going for s in self._slots):
            self._keeper.prepare()  # its imports are done when the first save is due

    def _tick(self, now: float) -> None:
        """Looks at what only time can tell."""
        if self._lease is not None:
            self._lease.tick(now)
        self._coordination.end_if_deaf(now)
        self._local.tick(self._other_pids())
        self._hosts.tick(now)
        self._keeper.tick(now)
        self._warden.tick(now, self._coordination.child)
        self._sinks.tick(now)
        if now > self._shown_at + STATUS_EVERY_S:
            self._shown_at = now
            self._show()

    def _show(self, *, live: bool = True) -> None:
        """Where the run is, on the screen and for `ftrain status`."""
        readings = {s.worker: s.reading() for s in self._slots if s.child is not None}
        run = self._board.now(time.time(), readings, time.monotonic(), os.getpid())
        run.write(self._lease and self._lease.write)
        if live:
            self._screen.status(run)

    def _judge(self, now: float) -> None:
        """Whether the run is over, and how."""
        alive = [s for s in self._slots if s.child is not None]
        reasons = [s.left for s in self._slots if s.left is not None]
        if self._recorder.aborts_in_place >= restart.ATTEMPTS_IN_PLACE:
            self._end(
                EXIT_GAVE_UP,
                f"step {self._recorder.step + 1} failed "
                f"{restart.ATTEMPTS_IN_PLACE} times with no worker dead; see logs/",
            )
        if self._refused_at is not None:
            records = [s.refused for s in self._slots if s.refused is not None]
            if len(records) == len(self._slots) or now - self._refused_at > REFUSED_WAIT_S:
                self._end(*refused(records, len(self._slots)))
        if reasons and not alive:
            why = self._stop_signal or self._keeper.stops_run
            self._end(*by_agreement(reasons[0], self._recorder.step, why))
        if self._stop_signal and not alive and not reasons:
            self._end(EXIT_TRY_AGAIN, f"{self._stop_signal}, nobody was there to save")
        if any(s.going and s.child for s in self._slots):
            self._waiting_since = now
        self._judge_hosts(now)
        if now > self._stop_deadline:
            self._end(
                *not_saved_in_time(self._stop_signal, self._config.grace_s, self._keeper.error)
            )

    def _judge_hosts(self, now: float) -> None:
        """Nobody can train before every host has come once (the topology exchange of JAX)."""
        missing, limit_s = self._hosts.missing(), self._config.cluster.start_timeout_s
        if missing and not self._coordination.knows_all and now - self._waiting_since > limit_s:
            hosts = f"host{'s' * (len(missing) > 1)} {' '.join(map(str, missing))}"
            self._end(
                EXIT_TRY_AGAIN,
                f"{hosts} of {self._meeting.nodes} did not come within start_timeout_s="
                f"{limit_s:g}, and nobody can train without; start `ftrain run` there with "
                f"--coordinator {self._meeting.endpoint}",
            )

    # The end.

    def _other_pids(self) -> set[int]:
        children = [self._coordination.child, self._keeper.child]
        return {child.pid for child in children if child is not None} | self._sinks.pids()

    def _shut_down(self) -> None:
        """Nothing is left running when this returns."""
        if self._is_down:
            return
        self._is_down = True
        for slot in self._slots:
            if slot.child is not None:
                slot.child.kill()
                slot.hung = slot.hung or "the end of the run"
        self._local.end_all()
        self._hosts.end_all(REMOTE_ENDS_S)
        self._coordination.close()
        self._keeper.close()
        self._local.close()
        self._local.kill_strays(self._sinks.pids())
