"""A thread for the collectives of one view, which is left behind if one of them hangs (rule R7).

When a connection breaks, gloo tells the operations that wait their turn on it, but not the one
whose bytes were half there or half gone: it is in none of the lists that `Pair::signalException`
goes through (gloo/transport/tcp/pair.cc at 70dc360, jaxlib 0.10.2 to 0.12.0.1). Mostly the next one
waits on the same memory and is told; the last of a ring's round has no next one, and stays until
gloo's own timeout. Seen in one of eight cuts while large sums were under way, in one of 500 deaths
of small models. It holds no lock and no device on CPU, so whoever waits for it may go on. This may
go when gloo tells `rx_` and `tx_` too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ftrain.errors import AttemptFailedError

T = TypeVar("T")


class LeftBehindError(AttemptFailedError):
    """A cancelled collective did not end; the thread that it runs in was left behind."""


class Lane:
    """Runs calls one after the other, in a thread that begins with the first.

    Attributes:
      busy: whether a call is under way, waited for or not.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._begun = False
        self.busy = False

    def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises. Not to be called again once it has raised.

        Raises:
          LeftBehindError: `leave` was called meanwhile.
        """
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._work, name="ftrain-lane", daemon=True).start()
        self._calls.put(call)
        result, error = self._answers.get()
        if error is not None:
            try:
                raise error
            finally:
                error = None  # with its traceback, which knows this frame, it would live on
        return result

    def leave(self) -> None:
        """Lets go of whoever waits in `run`, from another thread."""
        self._answers.put((None, LeftBehindError("a cancelled collective did not end")))

    def end(self) -> None:
        """The thread ends, when its call does."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self.busy = True
            try:
                answer = call(), None
            except BaseException as error:  # noqa: BLE001  raised by `run`
                answer = None, error
            self.busy = False
            self._answers.put(answer)
            # Waiting for the next call, the thread would keep the view's arrays.
            call = answer = None
