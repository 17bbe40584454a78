"""An agent's connection to its head: what is said and heard on it, and when it is over. No jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftrain.wire import Message, Wire

if TYPE_CHECKING:
    from ftrain.ears import Ears

BACKLOG_BYTES = 4 << 20  # that the head may be behind before workers are made to wait


class HeadLine:
    """One connection at a time, to whoever is head.

    Args:
      ears: of this process.
      patience_s: how long the head may say nothing.
      take: takes what it says.
      on_end: called as on_end(why) when the connection is over; it is closed then.
    """

    def __init__(
        self,
        ears: Ears,
        patience_s: float,
        take: Callable[[Message], None],
        on_end: Callable[[str], None],
    ):
        self._ears, self._patience_s, self._take, self._on_end = ears, patience_s, take, on_end
        self._wire: Wire | None = None
        self._is_deaf = False  # it takes nothing in; over at the next tick

    @property
    def is_open(self) -> bool:
        """Whether there is a head to speak to."""
        return self._wire is not None

    def open(self, wire: Wire, **hello: Any) -> None:
        """Speaks on a new connection, first a hello."""
        self._wire, self._is_deaf = wire, False
        self._ears.watch(wire, self._hear)
        wire.send("hello", **hello)

    def tell(self, kind: str, **fields: Any) -> None:
        """Says something to the head. If it is far behind, this host waits, and so its workers."""
        if self._wire is None or self._is_deaf:
            return
        self._wire.send(kind, **fields)
        if self._wire.backlog > BACKLOG_BYTES:
            self._wire.flush_within(self._patience_s, BACKLOG_BYTES // 2)
            self._is_deaf = self._wire.backlog > BACKLOG_BYTES

    def end(self, why: str) -> None:
        """Hangs up, and says why."""
        self.close()
        self._on_end(why)

    def close(self, flush_s: float = 0.0) -> None:
        """Hangs up, if there is a connection."""
        if self._wire is not None:
            self._ears.forget(self._wire)
            self._wire.flush_within(flush_s)
            self._wire.close()
            self._wire = None

    def tick(self, now: float) -> None:
        """Sends what is left to send; ends a connection on which nothing is said or taken."""
        wire = self._wire
        if wire is None:
            return
        if now > wire.heard_at + self._patience_s:
            self._hear()  # this process may have been stopped itself, with all of it waiting
        if self._wire is wire and now > wire.heard_at + self._patience_s:
            self.end(f"no word for {now - wire.heard_at:.1f} s")
        elif self._wire is wire and self._is_deaf:
            self.end("it takes nothing in")
        elif self._wire is wire:
            wire.flush()

    def _hear(self) -> None:
        wire = self._wire
        if why := wire.pass_on(self._take, lambda: self._wire is wire):
            self.end(why)
