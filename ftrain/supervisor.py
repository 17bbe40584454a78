"""The supervisor: starts the coordinator and the workers, watches, fences, restarts. Never jax.

One thread, one loop over pipes, process ends, signals and a clock. What becomes of each worker:
`lives`; of the coordinator: `coordination`; of the other hosts: `hosts`.
"""

from __future__ import annotations

import contextlib
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
from ftrain.lives import Lives
from ftrain.local_host import LOOPBACK, LocalHost
from ftrain.memory_tier import adopt, memory_folders, remove_all, settle_folder, sweep
from ftrain.processes import Ends, adopt_orphans, become_batch_work
from ftrain.recorder import Recorder
from ftrain.records import commit_of, event_of, read_records
from ftrain.remote_host import RemoteHost
from ftrain.screen import Screen
from ftrain.sinks import CLOSE_S, Sinks
from ftrain.slots import COORDINATOR, Slot
from ftrain.story import Story
from ftrain.verdict import Ending, by_agreement, not_saved_in_time
from ftrain.warden import Warden
from ftrain.words import Words
from ftrain.worker_logs import Logs

TICK_S = 0.1
STATUS_EVERY_S = 1.0
REMOTE_ENDS_S = 5.0  # for workers on other hosts to be ended, at the end
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
        self._continues = continues  # or it is a new run
        setting = config.checkpoint.memory_folder
        self._memory = [str(f) for f in memory_folders(config.run_dir, setting, headship.part)]
        self._ears, self._end = Ears(), Ending()
        self._story, self._logs = Story(screen, config), Logs(config.run_dir)
        self._slots = [Slot(i) for i in range(config.cluster.workers)]
        self._budget = restart.RestartBudget(config.restart)
        self._board = Board(config.run_dir)
        records = read_records(config.run_dir)
        self._board.read(records)
        self._begun = begun_in(records)
        log.listen(self._on_event)
        self._recorder = Recorder(config.run_dir, log, self._on_fact, self._lease)
        self._coordination = self._make_coordination()
        self._local = self._make_local(own_config or config, base)
        self._hosts = self._make_hosts()
        self._keeper = self._make_keeper()
        self._warden = Warden(self._slots, config.cluster, log, self._logs, self._story)
        self._words = self._make_words()
        self._lives = self._make_lives()
        self._shown_at = self._ticked_at = float("-inf")
        self._waiting_since = time.monotonic()  # for hosts, with nobody training
        self._signalled = False  # this supervisor itself
        self._stop_signal = ""
        self._stop_deadline = float("inf")
        self._is_down = False

    def _make_coordination(self) -> Coordination:
        return Coordination(
            self._config,
            self._platform,
            self._slots,
            self._headship,
            self._headship.lock.fileno(),
            ears=self._ears,
            log=self._log,
            logs=self._logs,
            story=self._story,
            on_exit=self._on_coordinator_exit,
        )

    def _make_local(self, own_config: Config, base: str) -> LocalHost:
        meeting, workers = self._meeting, self._config.cluster.workers
        return LocalHost(
            own_config,
            base=base,
            platform=self._platform,
            address=meeting.address if meeting else LOOPBACK,
            workers=ids_of(self._headship.rank, meeting.nodes if meeting else 1, workers),
            memory=self._memory,
            ears=self._ears,
            logs=self._logs,
            tell_groups=self._coordination.tell_groups,
        )

    def _make_hosts(self) -> Hosts:
        return Hosts(
            self._local,
            self._config,
            self._headship,
            ears=self._ears,
            on_here=self._on_host_here,
            on_lost=self._on_host_lost,
            stop=self._on_stop,
            log=self._logs.supervisor,
        )

    def _make_keeper(self) -> Keeper:
        return Keeper(
            self._config,
            os.environ,
            self._headship.lock.fileno(),
            self._fork_saver,
            ears=self._ears,
            log=self._log,
            logs=self._logs,
            record=lambda record: self._recorder.take(
                COORDINATOR, record, self._coordination.generation
            ),
            tell=lambda line: self._lives.tell(line),
            staging=self._lease and self._lease.checkpoint_staging,
        )

    def _make_words(self) -> Words:
        return Words(
            self._slots,
            coordination=self._coordination,
            hosts=self._hosts,
            keeper=self._keeper,
            recorder=self._recorder,
            log=self._log,
            screen=self._screen,
            end=self._end,
        )

    def _make_lives(self) -> Lives:
        return Lives(
            self._config,
            self._slots,
            self._headship,
            budget=self._budget,
            begun=self._begun,
            coordination=self._coordination,
            hosts=self._hosts,
            keeper=self._keeper,
            recorder=self._recorder,
            words=self._words,
            log=self._log,
            logs=self._logs,
            story=self._story,
            end=self._end,
        )

    def run(self) -> int:
        """Runs to the end and returns the exit code.

        Raises:
          DeposedError: another host is the head now. Nothing of this one is running any more.
        """
        adopt_orphans()
        become_batch_work()
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
        while self._end.verdict is None:
            self._ears.wait(TICK_S)
            now = time.monotonic()
            self._go_on()
            if now > self._ticked_at + TICK_S / 2:  # not at every word of a worker's
                self._ticked_at = now
                self._tick(now)
            self._judge(now)
        code, reason = self._end.verdict
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
        self._hosts.dismiss_all(self._end.verdict, durable=durable)
        self._sinks.close(self._time_for_sinks_s())
        self._logs.close()
        return code

    def _time_for_sinks_s(self) -> float:
        """What a stop has left of `grace_s`, or as long as it takes within reason."""
        left_s = self._stop_deadline + STOP_RESERVE_S / 2 - time.monotonic()
        return max(STOP_RESERVE_S / 4, min(CLOSE_S, left_s))

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
        self._keeper.hurries = True
        self._lives.stop()

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

    # What has come to pass.

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

    # After every event, and with the clock.

    def _go_on(self) -> None:
        """Starts what an event has made possible."""
        if self._coordination.child is None and not any(s.child for s in self._slots):
            if self._stop_signal:
                self._end(EXIT_TRY_AGAIN, f"{self._stop_signal}")
            else:
                self._coordination.generation += 1
                self._words.first_ready_at = None
                self._start_coordinator()
        self._lives.start_due()
        self._lives.let_go()
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
        self._lives.judge_refusals(now)
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
