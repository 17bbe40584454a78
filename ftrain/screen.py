"""What the user sees: lines that stay, and on a terminal one status line that moves."""

from __future__ import annotations

import os
import sys
import time

PLAIN_EVERY_S = 5.0


class Screen:
    """On a terminal a live status line; elsewhere the same as a plain line now and then."""

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

    def status(self, text: str) -> None:
        """Where the run is; called often, shown as often as is of use."""
        if self._gone:
            return
        try:
            self._status_line(text)
        except OSError:
            self._lose()

    def _status_line(self, text: str) -> None:
        now = time.monotonic()
        if self._live is not None:
            if now - self._shown_at > 0.2 or not text:
                from rich.text import Text

                self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
                self._shown_at = now
        elif text and text != self._status and now - self._shown_at > PLAIN_EVERY_S:
            self.line(text)
            self._status, self._shown_at = text, now

    def close(self) -> None:
        """Takes the status line away."""
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:
                self._lose()
            self._live = None
