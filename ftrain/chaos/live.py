"""The run that chaos has started: its processes, its records, and the way to tell it of faults."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrain.chaos.hook import VARIABLE
from ftrain.chaos.plan import COORDINATOR, Victim
from ftrain.events import EVENTS_FILE, METRICS_FILE
from ftrain.following import LineReader

if TYPE_CHECKING:
    from ftrain.chaos.disk import Disk
    from ftrain.chaos.network import Network

ACKNOWLEDGED_S = 5.0  # for the supervisor to write down what it is told


class LiveRun:
    """One run under chaos, over the deaths of its supervisor.

    Args:
      argv: the command that starts and continues it.
      run_dir: its folder.
      workers: how many it has.
      network: in which it lives, where that may be broken.
      disk: of its checkpoints, where that may be filled.

    Attributes:
      process: the supervisor.
      started: how often it has been started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        run_dir: str,
        workers: int,
        network: Network | None = None,
        disk: Disk | None = None,
    ):
        self.run_dir, self.workers = Path(run_dir), workers
        self.network, self.disk = network, disk
        self._argv = [*(network.prefix if network else []), *(disk.prefix if disk else []), *argv]
        self._events = _at_end(self.run_dir / EVENTS_FILE)
        self._metrics = _at_end(self.run_dir / METRICS_FILE)
        self.rows: list[dict[str, Any]] = []  # events of this chaos
        self.commits: list[dict[str, Any]] = []  # the newest few lines of metrics
        self.first_commit_at: float | None = None  # time.monotonic()
        self.started, self._since, self._pipe = 0, 0, -1

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints can be reached."""
        return self.disk.folder if self.disk else self.run_dir / "checkpoints"

    @property
    def step(self) -> int:
        """The newest committed step, 0 before the first."""
        return self.commits[-1]["step"] if self.commits else 0

    def start(self) -> None:
        """Starts or continues it. It ends if this process does."""
        self.read()
        self._close_pipe()
        hears, self._pipe = os.pipe()
        told: dict[str, Any] = {"pipe": hears, "orders": True}
        if self.network:
            told["cgroups"] = str(self.network.folder)
        self._since, self.started = len(self.rows), self.started + 1
        self.process = subprocess.Popen(
            self._argv,
            env={**os.environ, VARIABLE: json.dumps(told)},
            stdin=subprocess.DEVNULL,
            pass_fds=[hears],
            process_group=0,  # signals of the terminal come to it once, from here
        )
        os.close(hears)

    def read(self) -> None:
        """Takes in what has been recorded since."""
        new = list(self._metrics.new())
        if new and self.first_commit_at is None:
            self.first_commit_at = time.monotonic()
        self.commits = [*self.commits, *new][-1000:]
        self.rows += self._events.new()

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The events since its last start, of those names or of all."""
        self.read()
        rows = self.rows[self._since :]
        return [e for e in rows if e["event"] in names] if names else rows

    def pid(self, victim: Victim) -> int | None:
        """The process of a worker or of the coordinator, None while there is none."""
        is_worker = victim != COORDINATOR
        kind = "worker" if is_worker else "coordinator"
        pid = None
        for event in self.events(f"{kind}_started", f"{kind}_exited"):
            if not is_worker or event["worker"] == victim:
                pid = event["pid"] if event["event"].endswith("_started") else None
        return pid

    def pids(self) -> list[int]:
        """The processes of all its workers."""
        return [pid for w in range(self.workers) if (pid := self.pid(w)) is not None]

    def tell(self, text: str, **fields: Any) -> None:
        """Has a fault recorded, and waits until it is, unless the supervisor is away."""
        seen = len(self.events("fault_injected"))
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, (json.dumps({"text": text, **fields}) + "\n").encode())
        end = time.monotonic() + ACKNOWLEDGED_S
        while self.is_alive() and time.monotonic() < end:
            if len(self.events("fault_injected")) > seen:
                return
            time.sleep(0.005)

    def is_alive(self) -> bool:
        """Whether its supervisor is there."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Signals the supervisor."""
        if self.is_alive():
            self.process.send_signal(number)

    def close(self) -> None:
        """Ends it, if it has not ended; the rest of it follows its supervisor."""
        if self.started and self.is_alive():
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _at_end(path: Path) -> LineReader:
    """What is there already belongs to an earlier run."""
    reader = LineReader(path)
    collections.deque(reader.new(), maxlen=0)
    return reader


def send_signal(pid: int, number: int) -> bool:
    """Signals a process that the records name; False if it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
