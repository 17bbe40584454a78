"""What the user sees: lines that stay, and where the run is: on a terminal a panel below them."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from ftrain.panel import one_line, panel

if TYPE_CHECKING:
    from ftrain.run_now import RunNow

PLAIN_EVERY_S = 5.0


class Screen:
    """On a terminal a panel that is always the newest; elsewhere a plain line now and then."""

    def __init__(self, *, live: bool = True):
        self._live = None
        self._gone = False  # the terminal or pipe
        self._status = ""
        self._shown_at = 0.0
        if live and sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._console = Console(highlight=False, soft_wrap=True)
            self._live = Live("", console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._gone:
            return
        try:
            if self._live is not None:
                self._live.console.print(text, markup=False)
            else:
                sys.stdout.write(text + "\n")
                sys.stdout.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Nobody looks any more: the terminal was closed, or who read the pipe has ended."""
        self._gone, self._live = True, None
        # What is left in the buffer would be tried again, and fail, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def status(self, run: RunNow) -> None:
        """Where the run is; called about once a second."""
        if self._gone:
            return
        try:
            self._draw(run)
        except OSError:
            self._lose()

    def _draw(self, run: RunNow) -> None:
        if self._live is not None:
            self._live.update(panel(run), refresh=True)
            return
        now = time.monotonic()
        if run.target is None or not run.step or now - self._shown_at < PLAIN_EVERY_S:
            return  # nothing to tell yet, or told just now
        text = one_line(run)
        if text != self._status:
            self.line(text)
            self._status, self._shown_at = text, now

    def close(self) -> None:
        """Takes the panel away."""
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:
                self._lose()
            self._live = None
