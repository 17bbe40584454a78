"""Where a run's records go beside its files: each sink in a process of its own, started here.

A sink follows the two record files (`sink_process`), so it sees what was committed and nothing
else, each line once, and nothing that it does can stall or end the run: one that fails is told once
and started again, later each time, and goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftrain.errors import ConfigError
from ftrain.processes import Child, launch

if TYPE_CHECKING:
    from ftrain.config import Config
    from ftrain.ears import Ears
    from ftrain.worker_logs import Logs

PROMETHEUS, TENSORBOARD = "prometheus", "tensorboard"  # names beside those of the user's classes
CLOSE_S = 10.0  # to take the last lines, at the end of the run
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0  # before one that ended is started again


@dataclasses.dataclass
class _Sink:
    name: str
    child: Child | None = None
    start_at: float | None = 0.0  # time.monotonic()
    ends: int = 0
    told: bool = False


class Sinks:
    """All sinks of a run.

    Args:
      config: of the run.
      base: the folder that paths of the user's files are relative to.

    Raises:
      ConfigError: the port is taken, or a sink's file is not there.
    """

    def __init__(self, config: Config, base: str):
        self._config, self._base = config, base
        for spec in config.sinks:
            _find(spec, base)
        self._listener = _listen(config) if config.metrics_port is not None else None
        names = [PROMETHEUS] * (config.metrics_port is not None)
        names += [TENSORBOARD] * bool(config.tensorboard)
        self._sinks = [_Sink(name) for name in [*names, *config.sinks]]

    def start(self, ears: Ears, logs: Logs, say: Callable[[str], None]) -> None:
        """Starts them; what they print goes to the supervisor's log."""
        self._ears, self._logs, self._say = ears, logs, say
        self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Starts again what has ended and waited long enough."""
        for sink in self._sinks:
            if sink.start_at is not None and now >= sink.start_at:
                self._start(sink)

    def pids(self) -> set[int]:
        """Their processes."""
        return {sink.child.pid for sink in self._sinks if sink.child is not None}

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Lets them take the last lines, for so long in all, and ends them."""
        running = [sink for sink in self._sinks if sink.child is not None]
        for sink in running:
            sink.child.close_control()
        end = time.monotonic() + timeout_s
        for sink in running:
            sink.child.wait(max(0.0, end - time.monotonic()))
            self._ears.forget(sink.child.pidfd)
            ended = sink.child.reap(kill=True)
            self._ears.hear_out(sink.child)
            if ended.signal is not None:
                self._say(f"{sink.name} did not take the last lines within {timeout_s:.0f} s")
        if self._listener is not None:  # this process may become the head again
            self._listener.close()

    def _start(self, sink: _Sink) -> None:
        argv = [sys.executable, "-m", "ftrain.sink_process", "{control}"]
        fds = [self._listener.fileno()] if sink.name == PROMETHEUS else []
        env = {k: v for k, v in os.environ.items() if k != "FTRAIN_CHAOS"}
        child = Child(lambda ends: launch(argv, {**env, "PYTHONUNBUFFERED": "1"}, ends, fds))
        job: dict[str, Any] = {
            "sink": sink.name,
            "config": self._config.to_json(),
            "base": self._base,
            "records_fd": child.records_fd,
            "listen_fd": fds[0] if fds else None,
            "parent": os.getpid(),
        }
        child.send(json.dumps(job))
        sink.child, sink.start_at = child, None
        for pipe in ("stdout", "stderr"):
            self._ears.hear(
                child, pipe, lambda line: self._logs.supervisor(f"[{sink.name}] {line}")
            )
        self._ears.hear(child, "records", lambda line: self._on_failure(sink, line))
        self._ears.watch(child.pidfd, lambda: self._on_exit(sink))

    def _on_failure(self, sink: _Sink, what: str) -> None:
        if not sink.told:
            sink.told = True
            self._say(f"{sink.name} failed: {what}; the run goes on, see logs/supervisor.log")

    def _on_exit(self, sink: _Sink) -> None:
        child = sink.child
        self._ears.hear_out(child)
        self._ears.forget(child.pidfd)
        ended = child.reap()
        wait_s = min(FIRST_WAIT_S * 2**sink.ends, LONGEST_WAIT_S)
        sink.child, sink.ends = None, sink.ends + 1
        sink.start_at = time.monotonic() + wait_s
        self._on_failure(sink, f"it ended with {ended.signal or f'exit code {ended.exit_code}'}")


def _find(spec: str, base: str) -> None:
    """A mistyped path is told before anything starts; a mistyped class by the sink's process."""
    name = spec.rsplit(":", 1)[0]
    if name.endswith(".py") and not os.path.isfile(os.path.join(base, name)):
        raise ConfigError(f"sinks: {spec}: no file {name} in {base}; correct the path")


def _listen(config: Config) -> socket.socket:
    """The port of the metrics, taken before the run starts and kept while the sink is restarted."""
    host, port = config.metrics_host, config.metrics_port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"metrics_port={port}: {host}:{port} cannot be opened ({error.strerror}); "
            "choose a free port, or an address of this machine as metrics_host"
        ) from None
