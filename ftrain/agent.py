"""The agent: `ftrain run` on a host that is not the head. Starts and ends workers as it is told.

One thread, one loop, like the supervisor's. When it has not heard from the head for
`heartbeat_timeout_s`, or the connection ends, the head counts this host as lost. So every worker
here is killed and reaped at once (rule R9), and only then does the agent call again, with nothing
running. If the head is lost, the lowest rank becomes the head in its place (`succession`) and this
one calls that. Does nobody answer for `start_timeout_s`, the attempt is over: exit 75.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ftrain.addresses import local_address_towards
from ftrain.beat import COLLECTIVES, Beat
from ftrain.caller import Caller
from ftrain.config import Config
from ftrain.ears import Ears
from ftrain.endpoint import Endpoint
from ftrain.errors import EXIT_REFUSED, EXIT_TRY_AGAIN
from ftrain.headship import Headship
from ftrain.hosts import ids_of
from ftrain.journal import Journal
from ftrain.lease import OVER
from ftrain.local_host import Heard, LocalHost, Past
from ftrain.meeting_point import use_interface
from ftrain.memory_tier import Part, fallback_folder, memory_folder, remove_all
from ftrain.placement import Placement
from ftrain.processes import Child, Exit, adopt_orphans, launch
from ftrain.run_lock import RunLock
from ftrain.screen import Screen
from ftrain.slots import tells
from ftrain.succession import Succession
from ftrain.verdict import Verdict
from ftrain.wire import VERSION, Message, Wire, WireError
from ftrain.worker_logs import Logs

TICK_S = 0.1
BEAT_EVERY_S = 0.5
BACKLOG_BYTES = 4 << 20  # that the head may be behind before workers are made to wait
IN_COLLECTIVE_S = 2.0  # before the connections of a worker are of interest to the head
LINE_CHARACTERS = 100_000
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
        self._wire: Wire | None = None
        self._told_able = False
        self._head_is_deaf = False  # it takes nothing in; lost at the next tick
        self._beat_at = float("-inf")
        self._children: dict[int, tuple[Child, Beat]] = {}  # by the head's number
        self._workers: dict[int, int] = {}  # the worker that each number was
        self._last: set[int] = set()  # the numbers that lived when the head was lost
        self._due: dict[int, Message] = {}  # to be started when the template is there
        self._journal = Journal()
        self._generation = 0  # of the head that was obeyed last
        self._signals: list[str] = []
        self._verdict: Verdict | None = None
        self._headship: Headship | None = None

    def run(self) -> Verdict | Headship:
        """Runs to the end; returns the head's verdict, or that this host is the head from now."""
        adopt_orphans()
        self._open()
        with self._ears.signals(self._on_signal):
            while self._verdict is None and self._headship is None:
                if self._wire is None:
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
        headship.commits = self._journal.commits(self._last)
        self._headship = headship
        was = before.claim
        self._screen.line(
            f"host {self._place.node_rank}: this host is the head now; host {was.rank} "
            f"({was.name}) has not been heard of for {silent_s:.1f} s"
        )

    def _greet(self, wire: Wire) -> None:
        self._wire, self._head_is_deaf, self._told_able = wire, False, False
        self._ears.watch(wire, self._hear)
        wire.send(
            "hello",
            version=VERSION,
            rank=self._place.node_rank,
            nodes=self._place.nodes,
            config=self._config.to_json(),
            platform=self._platform,
            name=self._name,
            agent=self._id,
            generation=self._succession.generation,
        )

    def _hear(self) -> None:
        wire = self._wire
        try:
            for message in wire.take():
                self._take(message)
                if self._wire is not wire:
                    return
        except WireError as error:
            self._lose_head(str(error))

    def _take(self, message: Message) -> None:
        match message:
            case {"kind": "welcome", "taken": taken}:
                self._on_welcome(taken, message)
            case {"kind": "refused", "reason": reason, "again": again}:
                self._on_refused(reason, again)
            case {"kind": "ping", "t": t, "taken": taken}:
                self._journal.forget(taken)
                self._succession.take_hosts(message.get("hosts", ()))
                self._tell("pong", t=t, clock=time.time())
            case {"kind": "start", "child": number}:
                self._due[number] = message
            case {"kind": "kill", "child": number} if number in self._due:
                del self._due[number]
                self._tell("ended", child=number, exit=[None, "SIGKILL"])
            case {"kind": "kill" | "control" | "signal", "child": number}:
                if number in self._children:
                    _pass_on(self._children[number][0], message)
            case {"kind": "verdict", "code": code, "reason": reason}:
                if message.get("durable"):
                    memory, part = self._config.checkpoint.memory_folder, self._part()
                    remove_all(self._config.run_dir, memory, part)
                self._end(code, reason)

    def _on_welcome(self, taken: int, about: Message) -> None:
        now, generation = time.monotonic(), about.get("generation", 0)
        if not self._succession.obey(generation, about.get("holder", ""), now):
            self._lose_head(f"it is the head of generation {generation}, and there is a newer one")
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
            self._journal.forget(taken)
        else:
            self._journal.clear()
        for entry in self._journal:
            self._tell("record", seq=entry.seq, child=entry.child, line=entry.line)
        for i, name in enumerate(self._signals):
            self._tell("stop", signal=name, again=i > 0)

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
        self._hang_up()

    def _hang_up(self) -> None:
        self._ears.forget(self._wire)
        self._wire.close()
        self._wire = None

    def _tell(self, kind: str, **fields: Any) -> None:
        """Says something to the head. If it is far behind, this host waits, and so its workers."""
        if self._wire is None or self._head_is_deaf:
            return
        self._wire.send(kind, **fields)
        if self._wire.backlog > BACKLOG_BYTES:
            self._wire.flush_within(self._config.cluster.heartbeat_timeout_s, BACKLOG_BYTES // 2)
            self._head_is_deaf = self._wire.backlog > BACKLOG_BYTES

    def _lose_head(self, reason: str) -> None:
        """The head counts this host as lost: nothing of it may live when it calls again (R9)."""
        self._hang_up()
        self._caller.lost(reason)
        self._logs.supervisor(f"lost the head: {reason}")
        had, self._last = len(self._children), set(self._children)
        self._due.clear()
        self._local.end_all()
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
        if self._wire is None:
            self._end(EXIT_TRY_AGAIN, f"{name}, and the head is not there: {self._caller.why}")
        self._tell("stop", signal=name, again=len(self._signals) > 1)

    # Workers.

    def _start_due(self) -> None:
        while self._due and self._local.can_start():
            number = next(iter(self._due))
            order = self._due.pop(number)
            self._workers[number] = order["worker"]
            heard = Heard(
                started=lambda pid, number=number: self._tell("started", child=number, pid=pid),
                line=functools.partial(self._on_line, number),
                ended=functools.partial(self._on_ended, number),
            )
            past = Past(*order["past"]) if order.get("past") else None
            self._children[number] = self._local.start(
                order["worker"], order["incarnation"], order["address"], heard, past
            )

    def _tell_able(self) -> None:
        """Until the template is there the head starts nobody: its clock for a start would run."""
        able = not self._local.template.pending
        if able != self._told_able:
            self._told_able = able
            self._tell("able", able=able)

    def _on_line(self, number: int, pipe: str, line: str) -> None:
        if pipe == "records":
            entry = self._journal.add(number, self._workers[number], line)
            self._tell("record", seq=entry.seq, child=number, line=line)
        elif pipe == "stdout" or tells(line):
            # For the screen; this host's log has it whole.
            self._tell("line", child=number, pipe=pipe, line=line[:LINE_CHARACTERS])

    def _on_ended(self, number: int, ended: Exit, _: str) -> None:
        _, beat = self._children.pop(number)
        self._tell("beats", beats=[[number, _beat_fields(beat, time.monotonic())]])
        self._tell_stacks(number, beat)
        beat.close()
        self._tell("ended", child=number, exit=[ended.exit_code, ended.signal])

    # The clock.

    def _tick(self, now: float) -> None:
        self._local.tick({self._undertaker.pid})
        if self._wire is None:
            return
        patience_s = self._config.cluster.heartbeat_timeout_s
        if now > self._wire.heard_at + patience_s:
            self._hear()  # this process may have been stopped itself, with all of it waiting
        if self._wire is not None and now > self._wire.heard_at + patience_s:
            self._lose_head(f"no word for {now - self._wire.heard_at:.1f} s")
        elif self._head_is_deaf and self._wire is not None:
            self._lose_head("it takes nothing in")
        elif self._wire is not None and self._succession.look(now):
            self._lose_head(f"host {self._succession.seen.claim.rank} is the head now")
            self._caller.call_at(self._succession.address())
        if self._wire is None:
            return
        self._wire.flush()
        self._tell_able()
        self._start_due()
        for number, (_, beat) in self._children.items():
            self._tell_stacks(number, beat)
        if now >= self._beat_at + BEAT_EVERY_S:
            self._beat_at = now
            self._tell("beats", beats=[[n, self._beat_of(n, now)] for n in self._children])

    def _beat_of(self, number: int, now: float) -> dict[str, Any]:
        """A worker's reading, and what else the head's watchdog may want to know of it."""
        child, beat = self._children[number]
        fields = _beat_fields(beat, now)
        _, _, phase, age_s = fields["reading"]
        if phase in COLLECTIVES and age_s > IN_COLLECTIVE_S:
            fields["sockets"] = [list(s) for s in child.sockets()]
        return {**fields, "stopped": child.is_stopped()}

    def _tell_stacks(self, number: int, beat: Beat) -> None:
        stacks = beat.new_stacks()
        if stacks:
            self._tell("stacks", child=number, text=stacks)

    # The end.

    def _shut_down(self) -> None:
        """Nothing is left running when this returns."""
        self._due.clear()
        self._local.end_all()
        if self._wire is not None:
            self._ears.forget(self._wire)
            self._wire.flush_within(1.0)
            self._wire.close()
        self._local.close()
        self._undertaker.close_control()
        self._undertaker.wait(UNDERTAKER_S)
        self._undertaker.reap(kill=True)
        self._local.kill_strays(set())
        self._logs.close()


def _pass_on(child: Child, message: Message) -> None:
    match message:
        case {"kind": "kill"}:
            child.kill()
        case {"kind": "control", "line": line}:
            child.send(line)
        case {"kind": "signal", "number": number}:
            child.signal(number)


def _beat_fields(beat: Beat, now: float) -> dict[str, Any]:
    round_, step, phase, since = beat.read()
    return {"reading": [round_, step, phase, now - since]}
