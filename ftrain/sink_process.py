"""The process of one sink: follows the run's records and hands them on. `-m ftrain.sink_process`.

A sink is any class with

    __init__(self, config)    the resolved `ftrain.Config` of the run
    commit(self, line)        one line of metrics.jsonl, a committed step
    event(self, row)          one line of events.jsonl
    close(self)               the run has ended, for now
    flush(self)               optional: after the lines that came together

Each line comes once, also over restarts of the run: how far a sink has got is kept in `sinks/` of
the run's folder. Only a sink that dies may see its last lines again. A line with `rewound` takes
the place of an earlier one of the same step.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ftrain.config import Config
from ftrain.events import EVENTS_FILE, METRICS_FILE
from ftrain.following import LineReader
from ftrain.sinks import PROMETHEUS, TENSORBOARD
from ftrain.user_code import load_module
from ftrain.worker import end_with_parent

POLL_S = 0.2


class Position:
    """How far a sink has got in both files.

    Args:
      path: where that is kept between runs; None: it begins anew with each process.
    """

    def __init__(self, run_dir: str, path: str | None):
        self._path = path
        told = _read_json(path) if path else {}
        self.readers: dict[str, LineReader] = {}
        for name in (METRICS_FILE, EVENTS_FILE):
            file, offset = os.path.join(run_dir, name), told.get(name, 0)
            is_there = os.path.exists(file) and os.path.getsize(file) >= offset
            self.readers[name] = LineReader(file, offset if is_there else 0)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What has come, as (method, row), in the order in which it happened.

        Commits are read first: every event that was written before one of them comes with it.
        """
        commits = (("commit", row) for row in self.readers[METRICS_FILE].new())
        events = (("event", row) for row in self.readers[EVENTS_FILE].new())
        return heapq.merge(commits, events, key=lambda item: item[1]["t"])

    def keep(self) -> None:
        """All rows so far have been handed on."""
        if self._path:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(self._path + ".part", "w") as file:
                json.dump({name: r.offset for name, r in self.readers.items()}, file)
            os.replace(self._path + ".part", self._path)


class Guard:
    """Calls a sink; an error is reported once and shown in the log each time."""

    def __init__(self, sink: Any, report: Callable[[str], None]):
        self._sink, self._report, self._failed = sink, report, False

    def __call__(self, method: str, *arguments: Any) -> None:
        """Calls a method, if the sink has it."""
        call = getattr(self._sink, method, None)
        if call is None:
            return
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001  the user's, or a network's: the next may go well
            traceback.print_exc()
            if not self._failed:
                self._report(f"{type(error).__name__} in {method}: {error}")
            self._failed = True


def follow(sink: Any, position: Position, ended: Callable[[float], bool], report: Any) -> None:
    """Hands rows on until `ended(timeout_s)` says that no more will be written."""
    call, over = Guard(sink, report), False
    while not over:
        over = ended(POLL_S)
        any_came = False
        for method, row in position.rows():
            call(method, row)
            any_came = True
        if any_came:
            call("flush")
            position.keep()
    call("close")


def make_sink(job: dict[str, Any], config: Config) -> Any:
    """The sink that the supervisor wants."""
    if job["sink"] == PROMETHEUS:
        from ftrain.prometheus import Prometheus

        return Prometheus(config, socket.socket(fileno=job["listen_fd"]))
    if job["sink"] == TENSORBOARD:
        from ftrain.tensorboard import TensorBoard

        return TensorBoard(config)
    name = job["sink"].rsplit(":", 1)[1]
    return getattr(load_module(job["sink"], job["base"]), name)(config)


def main() -> None:
    """Takes the job from the control pipe (descriptor given in argv); its end ends this."""
    for number in (signal.SIGTERM, signal.SIGINT):  # to all of a SLURM step: the run still saves
        signal.signal(number, lambda *_: None)
    control = int(sys.argv[1])
    job = json.loads(_first_line(control))
    end_with_parent(job["parent"])
    config = Config.from_json(job["config"])
    records = os.fdopen(job["records_fd"], "w", buffering=1)

    def report(what: str) -> None:
        records.write(" ".join(what.split()) + "\n")

    try:
        sink = make_sink(job, config)
    except Exception as error:  # noqa: BLE001  told with its traceback; tried again later
        traceback.print_exc()
        report(f"{type(error).__name__}: {error}")
        sys.exit(1)
    # What is shown of Prometheus is a state, made anew of all records.
    path = None if job["sink"] == PROMETHEUS else _position_file(config.run_dir, job["sink"])

    def ended(timeout_s: float) -> bool:
        return bool(select.select([control], [], [], timeout_s)[0])

    follow(sink, Position(config.run_dir, path), ended, report)


def _position_file(run_dir: str, sink: str) -> str:
    readable = re.sub(r"\W+", "-", sink)
    name = f"{readable}-{hashlib.sha256(sink.encode()).hexdigest()[:8]}.json"
    return os.path.join(run_dir, "sinks", name)


def _first_line(fd: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        data += os.read(fd, 1 << 16)
    return data


def _read_json(path: str) -> dict[str, int]:
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


if __name__ == "__main__":
    main()
