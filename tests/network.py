"""Real runs in a network of their own, to be broken (`ftrain.chaos.network`) or slowed down.

with network_run("tests/networked.yaml", tmp_path / "run") as run:
    cut_peer(run, 1, 2)
    ...
    heal(run)
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrain.chaos import network
from ftrain.chaos.hook import VARIABLE
from tests.runs import REPOSITORY, Run, running

WORKERS = 4


class SlowNetwork(network.Network):
    """All connections take the way over a proxy (`slow_proxy`), which can be told to be slow."""

    def _detours(self) -> Iterator[str]:
        """What workers connect to, they reach over the proxy; the coordinator reaches itself."""
        port = self._start_proxy()
        for worker in range(WORKERS):
            level, path = self.cgroup(f"worker-{worker}")
            yield f'tcp dport != 0 socket cgroupv2 level {level} "{path}" redirect to :{port}'

    def _start_proxy(self) -> int:
        with socket.socket() as probe:  # a port of another namespace: free in the new one as well
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._proxy = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "tests.slow_proxy", str(port)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._undo.callback(network.end_holder, self._proxy)
        if self._proxy.stdout.readline() != "ready\n":
            raise OSError("the proxy did not start")
        return port

    def heal(self) -> None:
        super().heal()
        self.slow_down(delay_s=0.0)

    def slow_down(self, **how: Any) -> None:
        """Tells the proxy what to do, see `tests.slow_proxy.Manner`, and waits until it does."""
        self._proxy.stdin.write(json.dumps(how) + "\n")
        self._proxy.stdin.flush()
        assert self._proxy.stdout.readline() == "done\n"


@contextlib.contextmanager
def network_run(config: str | Path, run_dir: Path, *sets: str, slow: bool = False) -> Iterator[Run]:
    """A run in a network of its own, `run.network`; skips the test where that cannot be had."""
    if network.why_not():
        pytest.skip(network.why_not())
    with (SlowNetwork if slow else network.Network)(WORKERS) as own:
        env = {VARIABLE: json.dumps({"cgroups": str(own.folder)})}
        with running(config, run_dir, *sets, prefix=own.prefix, env=env) as run:
            run.network = own
            yield run


def delay_coordinator(run: Run, delay_s: float, **stalls: float) -> float:
    """Delays all that goes to and from the coordinator, each way; needs `slow=True`."""
    port = int(network.coordinator_port(run))
    run.network.slow_down(only=port, delay_s=delay_s, **stalls)
    return time.time()


def delay_data(run: Run, delay_s: float, **stalls: float) -> float:
    """Delays all that goes between workers, each way; needs `slow=True`."""
    port = int(network.coordinator_port(run))
    run.network.slow_down(beside=port, delay_s=delay_s, **stalls)
    return time.time()


def seconds_since(t: float) -> float:
    """How long a fault has lasted."""
    return time.time() - t
