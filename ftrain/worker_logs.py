"""The log files of a run: every line of every process, whole, all incarnations appended."""

from __future__ import annotations

import os
from typing import TextIO


class Logs:
    """`run_dir/logs/`: one file a worker, one for the coordinator, one for the supervisor."""

    def __init__(self, run_dir: str):
        self._folder = os.path.join(run_dir, "logs")
        os.makedirs(self._folder, exist_ok=True)
        self._files: dict[str, TextIO] = {}

    def worker(self, worker: int, line: str) -> None:
        """A line that a worker printed, to stdout or stderr."""
        self._write(f"worker-{worker}", line)

    def coordinator(self, line: str) -> None:
        """A line of the coordinator's."""
        self._write("coordinator", line)

    def supervisor(self, line: str) -> None:
        """A fact that the supervisor learnt."""
        self._write("supervisor", line)

    def _write(self, name: str, line: str) -> None:
        if name not in self._files:
            # Line-buffered: what is written is there, whatever becomes of the supervisor.
            self._files[name] = open(
                os.path.join(self._folder, f"{name}.log"), "a", encoding="utf-8", buffering=1
            )
        self._files[name].write(line + "\n")
