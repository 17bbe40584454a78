"""The log files of a run: every line of every process, whole, all incarnations appended.

With one exception: a message of the C++ libraries that comes again and again. While a worker is
away XLA warns at every program that `Incarnation for task N not found` (jax 0.11.2, GPU), which
would fill a disk overnight.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
from typing import TextIO

# glog's `W1130 06:44:11.123456  4242 file.cc:123] message`, or absl's with seconds for the time.
NATIVE = re.compile(r"[IWEF]\d{4} [\d:.]+\s+\d+ (\S+:\d+\] .*)")
MESSAGES = 1000  # that are told apart, a log; beyond that the count begins anew


class Logs:
    """`run_dir/logs/`: one file a worker, one for the coordinator, one for the supervisor.

    Args:
      run_dir: the run's folder, on this host or shared by all.
      supervisor: the name of this supervisor's own file.
    """

    def __init__(self, run_dir: str, supervisor: str = "supervisor"):
        self._supervisor = supervisor
        self._folder = os.path.join(run_dir, "logs")
        os.makedirs(self._folder, exist_ok=True)
        self._files: dict[str, TextIO] = {}
        self._seen: dict[str, collections.Counter[str]] = {}

    def worker(self, worker: int, line: str) -> None:
        """A line that a worker printed, to stdout or stderr."""
        self._write(f"worker-{worker}", line)

    def coordinator(self, line: str) -> None:
        """A line of the coordinator's."""
        self._write("coordinator", line)

    def saver(self, line: str) -> None:
        """A line of the saver's."""
        self._write("saver", line)

    def supervisor(self, line: str) -> None:
        """A fact that the supervisor learnt."""
        self._write(self._supervisor, line)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()

    def _write(self, name: str, line: str) -> None:
        if name not in self._files:
            # Line-buffered: what is written is there, whatever becomes of the supervisor.
            self._files[name] = open(
                os.path.join(self._folder, f"{name}.log"), "a", encoding="utf-8", buffering=1
            )
        times = self._times(name, line)
        with contextlib.suppress(OSError):  # a full disk costs lines of logs, and nothing else
            if times == 1:
                self._files[name].write(line + "\n")
            elif str(times).strip("0") == "1":
                self._files[name].write(
                    f"{line} [{times} times by now; the next is told at ten-fold]\n"
                )

    def _times(self, name: str, line: str) -> int:
        """How often a C++ library has said this, this time included; 1 for all other lines."""
        native = NATIVE.match(line)
        if native is None:
            return 1
        seen = self._seen.setdefault(name, collections.Counter())
        if len(seen) >= MESSAGES:
            seen.clear()
        seen[native[1]] += 1
        return seen[native[1]]
