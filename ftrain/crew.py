"""The workers of an agent's host, by the numbers under which their head knows them. No jax.

It does what the head orders and tells what becomes of them: each record once, kept in a journal
until the head has it; the end of each; and twice a second what they are at.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ftrain.beat import COLLECTIVES, Beat
from ftrain.journal import Journal
from ftrain.local_host import Heard, LocalHost, Past
from ftrain.processes import Child, Exit
from ftrain.slots import tells
from ftrain.wire import Message

BEAT_EVERY_S = 0.5
IN_COLLECTIVE_S = 2.0  # before the connections of a worker are of interest to the head
LINE_CHARACTERS = 100_000


class Crew:
    """All workers that the head has had started here.

    Args:
      local: starts them.
      tell: says something to the head, if it is there.

    Attributes:
      journal: what they have reported.
    """

    def __init__(self, local: LocalHost, tell: Callable[..., None]):
        self._local, self._tell = local, tell
        self._children: dict[int, tuple[Child, Beat]] = {}
        self._workers: dict[int, int] = {}  # the worker that each number is or was
        self._due: dict[int, Message] = {}  # to be started when the template is there
        self._last: set[int] = set()  # the numbers that lived when all were ended
        self._beat_at = float("-inf")
        self.journal = Journal()

    def __len__(self) -> int:
        return len(self._children)

    def take(self, order: Message) -> None:
        """Does what the head says about one of them."""
        number = order["child"]
        if order["kind"] == "start":
            self._due[number] = order
        elif order["kind"] == "kill" and number in self._due:
            del self._due[number]
            self._tell("ended", child=number, exit=[None, "SIGKILL"])
        elif number in self._children:
            _pass_on(self._children[number][0], order)

    def start_due(self) -> None:
        """Starts those that were ordered, once they can be."""
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

    def end_all(self) -> None:
        """Kills and reaps every one, and what it left behind."""
        self._last = set(self._children)
        self._due.clear()
        self._local.end_all()

    def last_commits(self) -> list[tuple[int, dict[str, Any]]]:
        """(worker, record) of the commits that the head may not have, of those that it lost."""
        return self.journal.commits(self._last)

    def tell_journal(self) -> None:
        """Says again what the head may not have."""
        for entry in self.journal:
            self._tell("record", seq=entry.seq, child=entry.child, line=entry.line)

    def tick(self, now: float) -> None:
        """Tells what they are at."""
        for number, (_, beat) in self._children.items():
            self._tell_stacks(number, beat)
        if now >= self._beat_at + BEAT_EVERY_S:
            self._beat_at = now
            self._tell("beats", beats=[[n, self._beat_of(n, now)] for n in self._children])

    def _on_line(self, number: int, pipe: str, line: str) -> None:
        if pipe == "records":
            entry = self.journal.add(number, self._workers[number], line)
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


def _pass_on(child: Child, order: Message) -> None:
    match order:
        case {"kind": "kill"}:
            child.kill()
        case {"kind": "control", "line": line}:
            child.send(line)
        case {"kind": "signal", "number": number}:
            child.signal(number)


def _beat_fields(beat: Beat, now: float) -> dict[str, Any]:
    round_, step, phase, since = beat.read()
    return {"reading": [round_, step, phase, now - since]}
