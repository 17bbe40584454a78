"""The agent: `ftrain run` on a host that is not the head. Starts and ends workers as it is told.

One thread, one loop, like the supervisor's. When it has not heard from the head for
`heartbeat_timeout_s`, or the connection ends, the head counts this host as lost. So every worker
here is killed and reaped at once (rule R9), and only then does the agent call again, with nothing
running. If the head is lost, the lowest rank becomes the head in its place (`succession`) and this
one calls that. Does nobody answer for `start_timeout_s`, the attempt is over: exit 75.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable

from ftrain.addresses import local_address_towards
from ftrain.caller import Caller
from ftrain.config import Config
from ftrain.crew import Crew
from ftrain.ears import Ears
from ftrain.endpoint import Endpoint
from ftrain.errors import EXIT_REFUSED, EXIT_TRY_AGAIN
from ftrain.head_line import HeadLine
from ftrain.headship import Headship
from ftrain.hosts import ids_of
from ftrain.lease import OVER
from ftrain.local_host import LocalHost
from ftrain.meeting_point import use_interface
from ftrain.memory_tier import Part, fallback_folder, memory_folder, remove_all
from ftrain.placement import Placement
from ftrain.processes import Child, adopt_orphans, become_batch_work, launch
from ftrain.run_lock import RunLock
from ftrain.screen import Screen
from ftrain.succession import Succession
from ftrain.verdict import Verdict
from ftrain.wire import VERSION, Message, Wire
from ftrain.worker_logs import Logs

TICK_S = 0.1
UNDERTAKER_S = 2.0  # for it to end by itself


class Agent:
    """One host's part in a run whose head is elsewhere.

    Args:
      config: the run's, with this host's own run_dir and compile_cache.
      base: the folder the trainer is relative to.
      platform: `cpu` or `gpu`.
      placement: this host's.
      token: gives the run's token, or None while there is none.
      lock: this host's, which the undertaker inherits.
      screen: this host's.
      succession: who is head.
      follow: tries to become the head, follow(generation, own address).
    """

    def __init__(
        self,
        config: Config,
        *,
        base: str,
        platform: str,
        placement: Placement,
        token: Callable[[], bytes | None],
        lock: RunLock,
        screen: Screen,
        succession: Succession,
        follow: Callable[[int, str], Headship | None],
    ):
        self._config, self._base, self._platform = config, base, platform
        self._place, self._token, self._lock, self._screen = placement, token, lock, screen
        self._succession, self._follow = succession, follow
        self._name, self._id = socket.gethostname(), secrets.token_hex(8)
        self._ears = Ears()
        self._logs = Logs(config.run_dir, supervisor=f"host-{placement.node_rank}")
        self._caller: Caller | None = None
        self._local: LocalHost | None = None
        self._undertaker: Child | None = None
        self._told_able = False
        self._line = HeadLine(
            self._ears, config.cluster.heartbeat_timeout_s, self._take, self._on_head_lost
        )
        self._crew: Crew | None = None
        self._generation = 0  # of the head that was obeyed last
        self._signals: list[str] = []
        self._verdict: Verdict | None = None
        self._headship: Headship | None = None

    def run(self) -> Verdict | Headship:
        """Runs to the end; returns the head's verdict, or that this host is the head from now."""
        adopt_orphans()
        become_batch_work()
        self._open()
        with self._ears.signals(self._on_signal):
            while self._verdict is None and self._headship is None:
                if not self._line.is_open:
                    self._call(time.monotonic())
                self._ears.wait(TICK_S)
                self._tick(time.monotonic())
            self._shut_down()
        if self._headship is not None:
            return self._headship
        code, reason = self._verdict
        self._screen.line(f"host {self._place.node_rank}: exit {code}: {reason}")
        return self._verdict

    def _open(self) -> None:
        """This host's own address is the one on the way to the head."""
        place, config = self._place, self._config
        give_up_s = config.cluster.start_timeout_s
        self._succession.look(time.monotonic())
        self._caller = Caller(
            Endpoint(place.coordinator_host, place.coordinator_port),
            patience_s=place.patience_s(give_up_s),
            give_up_s=give_up_s,
            token=self._token,
            run_dir=config.run_dir,
            instead=self._succession.address(),
        )
        self._own, _ = local_address_towards(self._caller.addresses[0].host)
        use_interface(self._own, os.environ)
        workers = ids_of(place.node_rank, place.nodes, config.cluster.workers)
        argv = [sys.executable, "-m", "ftrain.undertaker", "{control}"]
        env = dict(os.environ)
        self._undertaker = Child(lambda ends: launch(argv, env, ends, [self._lock.fileno()]))
        self._local = LocalHost(
            config,
            base=self._base,
            platform=self._platform,
            address=self._own,
            workers=workers,
            memory=[str(fallback_folder(config.run_dir))],
            ears=self._ears,
            logs=self._logs,
            tell_groups=self._undertaker.send,
        )
        self._local.open()
        self._crew = Crew(self._local, self._line.tell)
        self._screen.line(
            f"host {place.node_rank} of {place.nodes}: workers "
            f"{' '.join(map(str, workers))}; the head is {self._caller.head}"
        )

    def _end(self, code: int, reason: str) -> None:
        if self._verdict is None:
            self._verdict = Verdict(code, reason)

    # The head.

    def _call(self, now: float) -> None:
        """Calls the head until it answers, time is up, or this host is to follow it."""
        if self._succession.look(now):
            self._caller.call_at(self._succession.address())
        if (end := self._succession.verdict()) is not None:
            if end.state == OVER:
                self._end(end.exit_code, end.reason)
            else:
                self._end(EXIT_TRY_AGAIN, "the head was lost as it was about to stop")
        elif (verdict := self._caller.given_up(now)) is not None:
            self._end(*verdict)
        elif (generation := self._succession.due(now)) is not None:
            self._take_over(generation, now)
        if self._verdict is None and self._headship is None:
            wire = self._caller.call(now)
            if wire is not None:
                self._greet(wire)

    def _take_over(self, generation: int, now: float) -> None:
        before, silent_s = self._succession.seen, self._succession.silent_s(now)
        headship = self._follow(generation, self._own)
        if headship is None:
            self._succession.lost_race(generation, now)
            return
        headship.after, headship.silent_s = before, silent_s
        headship.commits = self._crew.last_commits()
        self._headship = headship
        was = before.claim
        self._screen.line(
            f"host {self._place.node_rank}: this host is the head now; host {was.rank} "
            f"({was.name}) has not been heard of for {silent_s:.1f} s"
        )

    def _greet(self, wire: Wire) -> None:
        self._told_able = False
        self._line.open(
            wire,
            version=VERSION,
            rank=self._place.node_rank,
            nodes=self._place.nodes,
            config=self._config.to_json(),
            platform=self._platform,
            name=self._name,
            agent=self._id,
            generation=self._succession.generation,
        )

    def _take(self, message: Message) -> None:
        match message:
            case {"kind": "welcome", "taken": taken}:
                self._on_welcome(taken, message)
            case {"kind": "refused", "reason": reason, "again": again}:
                self._on_refused(reason, again)
            case {"kind": "ping", "t": t, "taken": taken}:
                self._crew.journal.forget(taken)
                self._succession.take_hosts(message.get("hosts", ()))
                self._line.tell("pong", t=t, clock=time.time())
            case {"kind": "start" | "kill" | "control" | "signal"}:
                self._crew.take(message)
            case {"kind": "verdict", "code": code, "reason": reason}:
                if message.get("durable"):
                    memory, part = self._config.checkpoint.memory_folder, self._part()
                    remove_all(self._config.run_dir, memory, part)
                self._end(code, reason)

    def _on_welcome(self, taken: int, about: Message) -> None:
        now, generation = time.monotonic(), about.get("generation", 0)
        if not self._succession.obey(generation, about.get("holder", ""), now):
            self._line.end(f"it is the head of generation {generation}, and there is a newer one")
            return
        again, self._generation = generation == self._generation, generation
        rank = about.get("rank", 0)
        where = f" now: host {rank}, at {self._caller.head}" if rank else ""
        self._screen.line(f"host {self._place.node_rank}: the head is there{where}")
        if not self._succession.shared:
            self._screen.line(
                f"host {self._place.node_rank}: {self._config.run_dir} is not shared with the "
                "head: if that is lost, no other host takes over"
            )
        self._keep_snapshots()
        if again:
            self._crew.journal.forget(taken)
            self._crew.tell_journal()
        else:
            self._crew.journal.clear()
        for i, name in enumerate(self._signals):
            self._line.tell("stop", signal=name, again=i > 0)

    def _part(self) -> Part | None:
        shared = self._succession.shared
        return Part(self._place.node_rank, self._generation) if shared else None

    def _keep_snapshots(self) -> None:
        """In this host's memory, for when the head is lost. Its saver reads the shared folder."""
        run_dir, part = self._config.run_dir, self._part()
        handover = str(fallback_folder(run_dir, part))
        memory = [handover]
        if part is not None:
            setting = self._config.checkpoint.memory_folder
            memory.insert(0, str(memory_folder(run_dir, setting, part)))
        self._local.keep_snapshots(memory, handover)

    def _on_refused(self, reason: str, again: bool) -> None:
        """The head does not want this host; if it may change its mind, it is asked again."""
        self._caller.why = reason
        if not again:
            self._end(EXIT_REFUSED, reason)
        self._line.close()

    def _on_head_lost(self, reason: str) -> None:
        """The head counts this host as lost: nothing of it may live when it calls again (R9)."""
        self._caller.lost(reason)
        self._logs.supervisor(f"lost the head: {reason}")
        had = len(self._crew)
        self._crew.end_all()
        self._local.kill_strays({self._undertaker.pid})
        if self._verdict is None:
            self._screen.line(
                f"host {self._place.node_rank}: lost the head ({reason}); ended {had} workers, "
                "calling again"
            )
        if self._signals:
            self._end(EXIT_TRY_AGAIN, f"{self._signals[0]}, and the head is lost: {reason}")

    # Signals: the head stops the run in order, on all hosts.

    def _on_signal(self, name: str) -> None:
        self._signals.append(name)
        if not self._line.is_open:
            self._end(EXIT_TRY_AGAIN, f"{name}, and the head is not there: {self._caller.why}")
        self._line.tell("stop", signal=name, again=len(self._signals) > 1)

    def _tell_able(self) -> None:
        """Until the template is there the head starts nobody: its clock for a start would run."""
        able = not self._local.template.pending
        if able != self._told_able:
            self._told_able = able
            self._line.tell("able", able=able)

    # The clock.

    def _tick(self, now: float) -> None:
        self._local.tick({self._undertaker.pid})
        self._line.tick(now)
        if self._line.is_open and self._succession.look(now):
            self._line.end(f"host {self._succession.seen.claim.rank} is the head now")
            self._caller.call_at(self._succession.address())
        if not self._line.is_open:
            return
        self._tell_able()
        self._crew.start_due()
        self._crew.tick(now)

    # The end.

    def _shut_down(self) -> None:
        """Nothing is left running when this returns."""
        self._crew.end_all()
        self._line.close(flush_s=1.0)
        self._local.close()
        self._undertaker.close_control()
        self._undertaker.wait(UNDERTAKER_S)
        self._undertaker.reap(kill=True)
        self._local.kill_strays(set())
        self._logs.close()
