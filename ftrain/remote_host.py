"""Another host, as the head's supervisor sees it: an agent that starts and ends workers there.

A `RemoteChild` takes the place of a `Child` and a `RemoteBeat` that of a `Beat`, so that slots and
the watchdog need not know the difference. What the agent says comes late, or, when the host is
lost, never: then its workers count as dead at once, and none is started for their ids until an
agent of that rank is back, which comes with nothing running.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from ftrain.beat import Reading
from ftrain.local_host import Heard, Past
from ftrain.processes import Exit
from ftrain.tcp_sockets import TcpSocket
from ftrain.wire import Message, Wire

PING_EVERY_S = 1.0


class RemoteBeat:
    """The newest reading of a worker elsewhere, on this host's clock."""

    def __init__(self) -> None:
        self._reading = Reading(-1, -1, "start", time.monotonic())
        self._stacks = ""

    def take(self, round_: int, step: int, phase: str, age_s: float) -> None:
        """Takes what the agent read, `age_s` after the phase began."""
        self._reading = Reading(round_, step, phase, time.monotonic() - age_s)

    def take_stacks(self, text: str) -> None:
        """Takes Python stacks that the worker wrote."""
        self._stacks += text

    def read(self) -> Reading:
        """What the worker was doing when its agent last said so."""
        return self._reading

    def new_stacks(self) -> str:
        """What has come since the last call."""
        stacks, self._stacks = self._stacks, ""
        return stacks

    def close(self) -> None:
        """Nothing to let go of."""


class RemoteChild:
    """A worker process elsewhere. `pid` is its number there, 0 until the agent has said it."""

    def __init__(self, number: int, heard: Heard, tell: Callable[..., None]):
        self.number, self.heard, self.beat = number, heard, RemoteBeat()
        self.pid = 0
        self._tell = tell
        self._stopped = False
        self._sockets: list[TcpSocket] = []

    def send(self, line: str) -> None:
        """A line for its control pipe."""
        self._tell("control", child=self.number, line=line)

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self._tell("signal", child=self.number, number=number)

    def kill(self) -> None:
        """SIGKILL to it and to all in its process group."""
        self._tell("kill", child=self.number)

    def is_stopped(self) -> bool:
        """Whether its kernel had stopped it when the agent last looked."""
        return self._stopped

    def sockets(self) -> list[TcpSocket]:
        """Its connections, if it has been in a collective for seconds."""
        return self._sockets

    def take_beat(
        self, reading: list[Any], stopped: bool = False, sockets: list[list[Any]] | None = None
    ) -> None:
        """Takes what the agent says of it, twice a second."""
        self.beat.take(*reading)
        self._stopped = stopped
        self._sockets = [TcpSocket(*fields) for fields in sockets or []]


class RemoteHost:
    """One rank beside the head's, with an agent or without.

    Args:
      rank: its place among the hosts, from 1.
      stop: called as stop(signal, again=...) when a signal came to the agent.
      log: takes lines for the head's own log.

    Attributes:
      name: the host's own, as its agent gave it.
      clock_offset_s: how far its clock is ahead of this host's, by the quickest answer.
    """

    def __init__(self, rank: int, *, stop: Callable[..., None], log: Callable[[str], None]):
        self.rank = rank
        self._stop, self._log = stop, log
        self.wire: Wire | None = None
        self.name = self.agent = ""
        self._able = False  # its template is no longer on its way
        self._numbers = itertools.count(1)
        self._children: dict[int, RemoteChild] = {}
        self._late: dict[int, Callable[[str], None]] = {}
        self._taken: dict[str, int] = {}  # agent -> the newest record that has come from it
        self._pinged_at = float("-inf")
        self._best_rtt_s, self.clock_offset_s = float("inf"), 0.0

    def can_start(self) -> bool:
        """Whether an agent is there whose template is, or never will be."""
        return self.wire is not None and self._able

    @property
    def has_workers(self) -> bool:
        """Whether a process is there, as far as is known."""
        return bool(self._children)

    def start(
        self, worker: int, incarnation: int, address: str, heard: Heard, past: Past | None = None
    ) -> tuple[RemoteChild, RemoteBeat]:
        """Has the agent start a worker; its template may make it wait."""
        child = RemoteChild(next(self._numbers), heard, self.tell)
        self._children[child.number] = child
        self.tell(
            "start",
            child=child.number,
            worker=worker,
            incarnation=incarnation,
            address=address,
            past=past and dataclasses.astuple(past),
        )
        return child, child.beat

    def tell(self, kind: str, **fields: Any) -> None:
        """Says something to the agent, if there is one."""
        if self.wire is not None:
            self.wire.send(kind, **fields)

    def attach(self, wire: Wire, hello: Message, **about: Any) -> None:
        """An agent is there, with nothing running. It is told `about` its head."""
        self.wire, self.name, self.agent = wire, hello["name"], hello["agent"]
        self._able = False
        self._best_rtt_s = float("inf")
        self.tell("welcome", taken=self._taken.get(self.agent, 0), **about)

    def lose(self, reason: str) -> None:
        """The agent counts as gone, and with it every worker there; it ends them by itself."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None
        lost, self._children = self._children, {}
        for child in lost.values():
            self._end(child, Exit(None, "SIGKILL"), reason)

    def forget(self) -> None:
        """Nothing that is or was there is this head's business any more."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None
        self._children.clear()

    def _end(self, child: RemoteChild, ended: Exit, lost: str) -> None:
        self._late[child.number] = child.heard.late
        if not child.pid:  # it may have been started, and the word of it been lost
            child.heard.started(0)
        child.heard.ended(ended, lost)

    def tick(self, now: float, hosts: Sequence[int] = ()) -> None:
        """Says that the head lives, with which `hosts`, and up to where it has the records."""
        if self.wire is None:
            return
        self.wire.flush()
        if now >= self._pinged_at + PING_EVERY_S:
            self._pinged_at = now
            self.tell("ping", t=now, taken=self._taken.get(self.agent, 0), hosts=list(hosts))

    def take(self, message: Message) -> None:
        """Takes a message of the agent's."""
        match message:
            case {"kind": "beats", "beats": beats}:
                for number, beat in beats:
                    if number in self._children:
                        self._children[number].take_beat(**beat)
            case {"kind": "record", "seq": seq, "child": number, "line": line}:
                self._take_record(seq, number, line)
            case {"kind": "line", "child": number, "pipe": pipe, "line": line}:
                if number in self._children:
                    self._children[number].heard.line(pipe, line)
            case {"kind": "started", "child": number, "pid": pid}:
                if number in self._children:
                    self._children[number].pid = pid
                    self._children[number].heard.started(pid)
            case {"kind": "stacks", "child": number, "text": text}:
                if number in self._children:
                    self._children[number].beat.take_stacks(text)
            case {"kind": "ended", "child": number, "exit": [code, signal]}:
                if number in self._children:
                    self._end(self._children.pop(number), Exit(code, signal), "")
            case {"kind": "able", "able": able}:
                self._able = able
            case {"kind": "pong", "t": t, "clock": clock}:
                self._compare_clocks(t, clock)
            case {"kind": "stop", "signal": signal, "again": again}:
                self._stop(signal, again=again)
            case {"kind": "log", "line": line}:
                self._log(f"host {self.rank}: {line}")

    def _take_record(self, seq: int, number: int, line: str) -> None:
        """Takes a record, once: an agent that was cut off says again what may not have arrived."""
        if seq <= self._taken.get(self.agent, 0):
            return
        self._taken[self.agent] = seq
        if number in self._children:
            self._children[number].heard.line("records", line)
        elif number in self._late:
            self._late[number](line)

    def _compare_clocks(self, sent_at: float, clock: float) -> None:
        rtt_s = time.monotonic() - sent_at
        if rtt_s < self._best_rtt_s:
            self._best_rtt_s = rtt_s
            offset_s = clock - (time.time() - rtt_s / 2)
            # Within what the way there and back leaves open, the clocks agree.
            self.clock_offset_s = offset_s if abs(offset_s) > rtt_s else 0.0
