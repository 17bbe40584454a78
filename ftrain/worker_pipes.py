"""What a worker and its supervisor say to one another, the worker's side."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What the supervisor tells a worker, as one line of JSON on its control pipe."""

    config: str  # the resolved config as JSON, validated
    worker: int
    address: str  # of the coordinator
    host: str  # this host's own address, for the connections between workers
    platform: str
    base: str  # the folder the trainer is relative to
    memory: list[str]  # folders of snapshots: where they are to lie, and where else if need be
    handover: str  # where those lie that the saver is to write to disk
    neighbours: list[int]  # the workers of this host
    past: tuple[str, list[tuple[str, int]]] | None  # history, and those that have begun
    records_fd: int
    beat_fd: int
    parent: int  # the supervisor's pid


class Reporter:
    """Writes records for the supervisor, one JSON object a line, each in one write."""

    def __init__(self, fd: int):
        self._fd, self._lock = fd, threading.Lock()

    def __call__(self, record: str, **fields: Any) -> None:
        """Reports a fact. Safe from any thread; blocks while the supervisor is behind."""
        line = json.dumps({"record": record, "t": time.time(), **fields}) + "\n"
        data = line.encode()
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


class Told(NamedTuple):
    """What the supervisor has said of a save: durable, or failed with a message."""

    step: int
    digest: str
    at: float  # time.monotonic()
    message: str = ""


class Control:
    """What the supervisor says on the control pipe. Signals never interrupt a block."""

    def __init__(self, pipe: Any):
        self._go, self._stop = threading.Event(), threading.Event()
        self._durable: Told | None = None
        self._save_failed: Told | None = None
        threading.Thread(target=self._listen, args=(pipe,), daemon=True).start()

    def _listen(self, pipe: Any) -> None:
        for line in pipe:
            match line.split():
                case ["go", name, *workers]:
                    self._together = name, [int(w) for w in workers]
                    self._go.set()
                case ["stop"]:
                    self._stop.set()
                case ["durable", step, digest, ago_s]:
                    self._durable = Told(int(step), digest, time.monotonic() - float(ago_s))
                case ["save_failed", step, digest, *message]:
                    self._save_failed = Told(int(step), digest, time.monotonic(), " ".join(message))

    def wait_for_go(self) -> tuple[str, list[int]]:
        """At the start of a run the workers begin together; later each when it is ready.

        Returns:
          A name for this beginning, and who begins.
        """
        self._go.wait()
        return self._together

    def stop_requested(self) -> bool:
        """Whether the supervisor wants the run to stop; read between steps."""
        return self._stop.is_set()

    def durable(self) -> Told | None:
        """The newest save that has reached the disk."""
        return self._durable

    def save_failed(self) -> Told | None:
        """The newest save that has not."""
        return self._save_failed
