"""The hosts' port at the head: who calls proves that it has the run's token, or is hung up on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ftrain.wire import Guest, Message, Wire, WireError, see_off

if TYPE_CHECKING:
    from ftrain.ears import Ears
    from ftrain.meeting_point import MeetingPoint
    from ftrain.verdict import Verdict

GUESTS = 64  # who may be at the door at once


class Door:
    """Lets in who has the token and says hello within seconds.

    Args:
      meeting: where to listen.
      ears: of this process.
      on_hello: called as on_hello(wire, messages) with who has been let in, heard no longer here.
      log: takes a line for each that is not.
    """

    def __init__(
        self,
        meeting: MeetingPoint,
        ears: Ears,
        on_hello: Callable[[Wire, list[Message]], None],
        log: Callable[[str], None],
    ):
        self._listener, self._token, self._ears = meeting.listener, meeting.token, ears
        self._on_hello, self._log = on_hello, log
        self._guests: set[Guest] = set()
        self._callers: dict[Wire, float] = {}  # proved, and yet to say hello; and until when
        self._listener.setblocking(False)
        ears.watch(self._listener, self._answer)

    def tick(self, now: float) -> None:
        """Hangs up on who has proved nothing in time."""
        for guest in [g for g in self._guests if now > g.give_up_at]:
            self._hang_up(guest, "it has proved nothing")
        for wire in [w for w, until in self._callers.items() if now > until]:
            self._dismiss(wire)

    def close(self) -> None:
        """Listens no more."""
        for guest in list(self._guests):
            self._hang_up(guest, "the run is over")
        for wire in list(self._callers):
            self._dismiss(wire)
        self._ears.forget(self._listener)
        self._listener.close()

    def _answer(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left for it
            return
        if len(self._guests) >= GUESTS:
            self._hang_up(min(self._guests, key=lambda g: g.give_up_at), "others wait")
        guest = Guest(sock, self._token)
        self._guests.add(guest)
        self._ears.watch(guest, lambda: self._hear_guest(guest))

    def _hear_guest(self, guest: Guest) -> None:
        try:
            guest.hear()
        except WireError as error:
            self._hang_up(guest, str(error))
            return
        if guest.wire is not None:
            wire = guest.wire
            self._guests.discard(guest)
            self._ears.forget(guest)
            self._callers[wire] = guest.give_up_at
            self._ears.watch(wire, lambda: self._hear_caller(wire))

    def _hang_up(self, guest: Guest, why: str) -> None:
        self._guests.discard(guest)
        self._ears.forget(guest)
        guest.close()
        self._log(f"hung up on a guest at the hosts' port: {why}")

    def _hear_caller(self, wire: Wire) -> None:
        try:
            messages = wire.take()
        except WireError:
            self._dismiss(wire)
            return
        if messages:
            del self._callers[wire]
            self._ears.forget(wire)
            self._on_hello(wire, messages)

    def _dismiss(self, wire: Wire) -> None:
        del self._callers[wire]
        self._ears.forget(wire)
        wire.close()


def tell_hosts(meeting: MeetingPoint, ears: Ears, verdict: Verdict, wait_s: float) -> None:
    """Tells the other hosts how a run has ended that ended before it began.

    Args:
      meeting: where they call; it is closed.
      ears: of this process.
      verdict: what to tell.
      wait_s: how long they may take to call.
    """
    told = set()

    def tell(wire: Wire, messages: list[Message]) -> None:
        wire.send("verdict", code=verdict.exit_code, reason=verdict.reason)
        see_off({wire})
        told.add(messages[0].get("rank"))

    door = Door(meeting, ears, tell, lambda line: None)
    deadline = time.monotonic() + wait_s
    while len(told) < meeting.nodes - 1 and (now := time.monotonic()) < deadline:
        ears.wait(0.1)
        door.tick(now)
    door.close()
