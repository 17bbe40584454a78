"""The agent: `ftrain run` on a host that is not the head. Starts and ends workers as it is told.

One thread, one loop, like the supervisor's; it decides one thing only. When it has not heard from
the head for `heartbeat_timeout_s`, or the connection ends, the head counts this host as lost. So
every worker here is killed and reaped at once (rule R9), and only then does the agent call again,
with nothing running. Does the head not answer for `start_timeout_s`, the attempt is over: exit 75.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ftrain.addresses import dial_addresses, local_address_towards
from ftrain.beat import COLLECTIVES, Beat
from ftrain.config import Config
from ftrain.ears import Ears
from ftrain.endpoint import Endpoint
from ftrain.errors import EXIT_REFUSED, EXIT_TRY_AGAIN, AddressError
from ftrain.hosts import ids_of
from ftrain.local_host import Heard, LocalHost
from ftrain.meeting_point import use_interface
from ftrain.memory_tier import fallback_folder
from ftrain.placement import Placement
from ftrain.processes import Child, Exit, adopt_orphans, launch
from ftrain.run_lock import RunLock
from ftrain.screen import Screen
from ftrain.slots import tells
from ftrain.verdict import Verdict
from ftrain.wire import VERSION, Message, Wire, WireError, call_head
from ftrain.worker_logs import Logs

TICK_S = 0.1
BEAT_EVERY_S = 0.5
CALL_EVERY_S = 1.0
CALL_TIMEOUT_S = 3.0
REFUSED_FOR_S = 10.0  # a token that is not the head's for so long will not become it
BACKLOG_BYTES = 4 << 20  # that the head may be behind before workers are made to wait
JOURNAL = 20_000  # records that the head may not have; some 10 MB
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
    ):
        self._config, self._base, self._platform = config, base, platform
        self._place, self._token, self._lock, self._screen = placement, token, lock, screen
        self._head = Endpoint(placement.coordinator_host, placement.coordinator_port)
        self._name, self._id = socket.gethostname(), secrets.token_hex(8)
        self._ears = Ears()
        self._logs = Logs(config.run_dir, supervisor=f"host-{placement.node_rank}")
        self._local: LocalHost | None = None
        self._undertaker: Child | None = None
        self._wire: Wire | None = None
        self._told_able = False
        self._head_is_deaf = False  # it takes nothing in; lost at the next tick
        self._beat_at = self._call_at = float("-inf")
        self._alone_since = time.monotonic()
        self._refused_since: float | None = None
        self._why_alone = "it was not called yet"
        self._children: dict[int, tuple[Child, Beat]] = {}  # by the head's number
        self._due: dict[int, Message] = {}  # to be started when the template is there
        self._journal: collections.deque[tuple[int, int, str]] = collections.deque(maxlen=JOURNAL)
        self._seq = 0
        self._signals: list[str] = []
        self._verdict: Verdict | None = None

    def run(self) -> int:
        """Runs to the end and returns the exit code: the head's."""
        adopt_orphans()
        self._open()
        with self._ears.signals(self._on_signal):
            while self._verdict is None:
                if self._wire is None:
                    self._call()
                self._ears.wait(TICK_S)
                self._tick(time.monotonic())
            self._shut_down()
        code, reason = self._verdict
        self._screen.line(f"host {self._place.node_rank}: exit {code}: {reason}")
        return code

    def _open(self) -> None:
        """This host's own address is the one on the way to the head."""
        patience_s = self._place.patience_s(self._config.cluster.start_timeout_s)
        self._addresses = dial_addresses(self._head, patience_s=patience_s)
        own, _ = local_address_towards(self._addresses[0].host)
        use_interface(own, os.environ)
        workers = ids_of(self._place.node_rank, self._place.nodes, self._config.cluster.workers)
        argv = [sys.executable, "-m", "ftrain.undertaker", "{control}"]
        env = dict(os.environ)
        self._undertaker = Child(lambda ends: launch(argv, env, ends, [self._lock.fileno()]))
        self._local = LocalHost(
            self._config,
            base=self._base,
            platform=self._platform,
            address=own,
            first_worker=min(workers, default=0),
            # The head's saver writes them to disk: they must be where it can read them.
            memory=[str(fallback_folder(self._config.run_dir))],
            ears=self._ears,
            logs=self._logs,
            tell_groups=self._undertaker.send,
        )
        self._local.open()
        self._screen.line(
            f"host {self._place.node_rank} of {self._place.nodes}: workers "
            f"{' '.join(map(str, workers))}; the head is {self._head}"
        )

    def _end(self, code: int, reason: str) -> None:
        if self._verdict is None:
            self._verdict = Verdict(code, reason)

    # The head.

    def _call(self) -> None:
        """Calls the head, about once a second, until it answers or time is up."""
        now = time.monotonic()
        if now - self._alone_since > self._config.cluster.start_timeout_s:
            self._end(
                EXIT_TRY_AGAIN,
                f"the head, {self._head}, was not reached for start_timeout_s="
                f"{self._config.cluster.start_timeout_s:g}: {self._why_alone}",
            )
        if now < self._call_at or self._verdict is not None:
            return
        self._call_at = now + CALL_EVERY_S
        token = self._token()
        if token is None:
            self._why_alone = (
                f"no token in {self._config.run_dir}, where the head writes it; share the folder, "
                "or give FTRAIN_TOKEN or --token-file on every host"
            )
            return
        for address in self._addresses:
            try:
                self._greet(call_head(tuple(address), token, CALL_TIMEOUT_S))
                return
            except OSError as error:
                self._refused_since = None
                self._why_alone = f"{address}: {error.strerror or error}"
            except WireError as error:
                self._why_alone = f"{address}: {error}"
                self._give_up_if_refused(now)
        with contextlib.suppress(AddressError):  # another pod of its name has another address
            self._addresses = dial_addresses(self._head, patience_s=0)

    def _give_up_if_refused(self, now: float) -> None:
        self._refused_since = self._refused_since or now
        if now - self._refused_since > REFUSED_FOR_S:
            self._end(
                EXIT_REFUSED,
                f"{self._why_alone}; give the same FTRAIN_TOKEN or --token-file on every host",
            )

    def _greet(self, wire: Wire) -> None:
        self._wire, self._refused_since, self._head_is_deaf = wire, None, False
        self._told_able = False
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
                self._on_welcome(taken)
            case {"kind": "refused", "reason": reason, "again": again}:
                self._on_refused(reason, again)
            case {"kind": "ping", "t": t, "taken": taken}:
                self._forget_records(taken)
                self._tell("pong", t=t, clock=time.time())
            case {"kind": "start", "child": number}:
                self._due[number] = message
            case {"kind": "kill", "child": number} if number in self._due:
                del self._due[number]
                self._tell("ended", child=number, exit=[None, "SIGKILL"])
            case {"kind": "kill" | "control" | "signal", "child": number}:
                if number in self._children:
                    self._pass_on(self._children[number][0], message)
            case {"kind": "verdict", "code": code, "reason": reason}:
                self._end(code, reason)

    @staticmethod
    def _pass_on(child: Child, message: Message) -> None:
        match message:
            case {"kind": "kill"}:
                child.kill()
            case {"kind": "control", "line": line}:
                child.send(line)
            case {"kind": "signal", "number": number}:
                child.signal(number)

    def _on_welcome(self, taken: int) -> None:
        self._screen.line(f"host {self._place.node_rank}: the head is there")
        self._forget_records(taken)
        for seq, number, line in list(self._journal):
            self._tell("record", seq=seq, child=number, line=line)
        for i, name in enumerate(self._signals):
            self._tell("stop", signal=name, again=i > 0)

    def _on_refused(self, reason: str, again: bool) -> None:
        """The head does not want this host; if it may change its mind, it is asked again."""
        self._why_alone = reason
        if not again:
            self._end(EXIT_REFUSED, reason)
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
        self._ears.forget(self._wire)
        self._wire.close()
        self._wire = None
        self._alone_since, self._why_alone = time.monotonic(), reason
        self._logs.supervisor(f"lost the head: {reason}")
        had = len(self._children)
        self._due.clear()
        self._local.end_all()
        self._local.kill_strays({self._undertaker.pid})
        if self._verdict is None:
            self._screen.line(
                f"host {self._place.node_rank}: lost the head ({reason}); ended {had} workers, "
                "calling again"
            )

    # Signals: the head stops the run in order, on all hosts.

    def _on_signal(self, name: str) -> None:
        self._signals.append(name)
        if self._wire is None:
            self._end(EXIT_TRY_AGAIN, f"{name}, and the head is not there: {self._why_alone}")
        self._tell("stop", signal=name, again=len(self._signals) > 1)

    # Workers.

    def _start_due(self) -> None:
        while self._due and self._local.can_start():
            number = next(iter(self._due))
            order = self._due.pop(number)
            heard = Heard(
                started=lambda pid, number=number: self._tell("started", child=number, pid=pid),
                line=functools.partial(self._on_line, number),
                ended=functools.partial(self._on_ended, number),
            )
            self._children[number] = self._local.start(
                order["worker"], order["incarnation"], order["address"], heard
            )

    def _tell_able(self) -> None:
        """Until the template is there the head starts nobody: its clock for a start would run."""
        able = not self._local.template.pending
        if able != self._told_able:
            self._told_able = able
            self._tell("able", able=able)

    def _on_line(self, number: int, pipe: str, line: str) -> None:
        if pipe == "records":
            self._seq += 1
            self._journal.append((self._seq, number, line))
            self._tell("record", seq=self._seq, child=number, line=line)
        elif pipe == "stdout" or tells(line):
            # For the screen; this host's log has it whole.
            self._tell("line", child=number, pipe=pipe, line=line[:LINE_CHARACTERS])

    def _forget_records(self, taken: int) -> None:
        while self._journal and self._journal[0][0] <= taken:
            self._journal.popleft()

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


def _beat_fields(beat: Beat, now: float) -> dict[str, Any]:
    round_, step, phase, since = beat.read()
    return {"reading": [round_, step, phase, now - since]}
