"""What the supervisor's one thread waits for: pipes of children, their ends, signals."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ftrain.processes import Child

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ears:
    """Calls back when there is something to hear. One thread; nothing runs beside it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def wait(self, timeout_s: float) -> None:
        """Waits for something to happen, but no longer than that, and makes its calls."""
        for key, _ in self._selector.select(timeout_s):
            # An earlier one of this batch may have closed it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def watch(self, source: Any, call: Callable[[], None]) -> None:
        """Calls when `source`, a descriptor or what has one, is readable."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def forget(self, source: Any) -> None:
        """Calls no more for `source`."""
        self._selector.unregister(source)

    def hear(self, child: Child, name: str, take: Callable[[str], None]) -> None:
        """Takes every whole line of one of a child's pipes."""
        pipe = child.pipes[name]

        def read() -> None:
            lines, ended = pipe.lines()
            for line in lines:
                take(line)
            if ended:
                self.forget(pipe.fd)

        pipe.take = take
        self.watch(pipe.fd, read)

    def hear_out(self, child: Child) -> None:
        """Takes what a dead child left in its pipes and closes them.

        A last line without its end is kept, but as a record: that is no fact.
        """
        for name, pipe in child.pipes.items():
            lines, _ = pipe.lines()
            with contextlib.suppress(KeyError):  # it has ended before, or nobody heard it
                self.forget(pipe.fd)
            rest = pipe.close()
            if rest and name != "records":
                lines.append(rest)
            for line in lines:
                pipe.take(line)

    @contextlib.contextmanager
    def signals(self, call: Callable[[str], None]) -> Iterator[None]:
        """Within, a signal becomes a call with its name; no handler runs anything of ours."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        wakeup = signal.set_wakeup_fd(theirs.fileno())  # first, or one might be lost
        caught = set(CAUGHT)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            caught.discard(signal.SIGHUP)  # as nohup has it
        before = {number: signal.signal(number, lambda *_: None) for number in caught}

        def read() -> None:
            for number in ours.recv(64):
                if number in CAUGHT:
                    call(signal.Signals(number).name)

        self.watch(ours, read)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            self.forget(ours)
            ours.close()
            theirs.close()
