"""Faults of the network, injected into real runs: cuts, resets, loss, delay, and their healing.

The run lives in a network namespace of its own, and each worker process in a cgroup that its
trainer enters before it opens its first connection (`tests.networked`). Rules of nftables match a
packet by the cgroups of the sockets at both ends, so connections that are made later are cut like
those that are there. A packet is marked as it is sent and dropped as it is received: its sender
sees what a broken wire would show it, which is nothing.

    with network_run("tests/networked.yaml", tmp_path / "run") as run:
        cut_peer(run, 1, 2)
        ...
        heal(run)

A cut holds for the processes that the workers are now, as a broken machine that is replaced by
another one; with `lasting=True` also for those that take their places.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.networked import FOLDER_VARIABLE
from tests.runs import REPOSITORY, Run, running

WORKERS = 4
RULES = """
table inet faults {{
  chain sent {{
    type filter hook output priority 0;
  }}
  chain received {{
    type filter hook input priority 0;
  }}
}}
table ip detour {{
  chain sent {{
    type nat hook output priority -100;
    {detour}
  }}
}}
"""


@functools.cache
def why_not() -> str:
    """Why this machine cannot break a network, or ""."""
    for tool in ("unshare", "nsenter", "ip", "nft"):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    if os.geteuid():
        return "only root may make network namespaces"
    if not _cgroup_mounts():
        return "no version 2 of cgroups is mounted here"
    try:
        with Network():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces, cgroups or nft rules are not allowed: {error}"


def _cgroup_mounts() -> list[str]:
    rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [row[1] for row in rows if row[2] == "cgroup2"]


class Network:
    """A network namespace with the rules that are in force in it.

    Args:
      slow: all connections take the way over a proxy, see `slow_proxy`; `slow_down` then works.
    """

    def __init__(self, *, slow: bool = False):
        self._slow = slow
        self._bits = itertools.count()

    def __enter__(self) -> Network:
        self._undo = contextlib.ExitStack()
        try:
            self._enter()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _enter(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ftrain-network-", dir=_cgroup_mounts()[0]))
        self._undo.callback(_remove_cgroups, self.folder)
        for worker in range(WORKERS):
            (self.folder / f"worker-{worker}").mkdir()
        # It holds the namespace until its input ends, with this process at the latest.
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-ec", "ip link set lo up; echo up; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._undo.callback(_end, holder)
        if holder.stdout.readline() != b"up\n":
            raise OSError("unshare --net failed")
        self.prefix = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        port = self._start_proxy() if self._slow else None
        self.nft(RULES.format(detour="\n    ".join(self._detours(port) if port else [])))

    def _detours(self, port: int) -> Iterator[str]:
        """What workers connect to, they reach over the proxy; the coordinator reaches itself."""
        for worker in range(WORKERS):
            level, path = self._cgroup(f"worker-{worker}")
            yield f'tcp dport != 0 socket cgroupv2 level {level} "{path}" redirect to :{port}'

    def _cgroup(self, name: str) -> tuple[int, str]:
        """A cgroup as nft wants it: its level, and its path from /sys/fs/cgroup."""
        folder = self.folder / name
        own = folder.relative_to(_cgroup_mounts()[0])
        return len(own.parts), str(folder.relative_to("/sys/fs/cgroup"))

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
        self._undo.callback(_end, self._proxy)
        if self._proxy.stdout.readline() != "ready\n":
            raise OSError("the proxy did not start")
        return port

    def nft(self, rules: str) -> str:
        """Feeds rules to nft inside the namespace; returns what it says."""
        return subprocess.run(
            [*self.prefix, "nft", "-f", "-"],
            input=rules,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def mark(self, name: str) -> int:
        """Marks what the sockets of a cgroup send, from now on; returns the mark's bit."""
        bit = 1 << next(self._bits)
        level, path = self._cgroup(name)
        self.nft(
            f"add rule inet faults sent socket cgroupv2 level {level} "
            f'"{path}" meta mark set meta mark | {bit}'
        )
        return bit

    def at_receiver(self, match: str, verdict: str = "drop") -> None:
        """What becomes of packets that match, where they arrive."""
        self.nft(f"add rule inet faults received {match} counter {verdict}")

    def cut(self, one: str, other: str = "") -> None:
        """Cuts a cgroup off from another, from a match of ports, or from everybody."""
        for sender, receiver in ((one, other), (other, one)):
            self.at_receiver(f"{self._sent_by(sender)} {self._received_by(receiver)}")

    def _sent_by(self, side: str) -> str:
        if not side or side.isdigit():
            return f"tcp sport {side}" if side else ""
        bit = self.mark(side)
        return f"meta mark & {bit} == {bit}"

    def _received_by(self, side: str) -> str:
        if not side or side.isdigit():
            return f"tcp dport {side}" if side else ""
        level, path = self._cgroup(side)
        return f'socket cgroupv2 level {level} "{path}"'

    def matched(self) -> list[int]:
        """How many packets each rule at the receivers has matched so far."""
        listing = json.loads(
            subprocess.run(
                [*self.prefix, "nft", "-j", "list", "chain", "inet", "faults", "received"],
                capture_output=True,
                check=True,
            ).stdout
        )
        rules = [row["rule"]["expr"] for row in listing["nftables"] if "rule" in row]
        return [e["counter"]["packets"] for rule in rules for e in rule if "counter" in e]

    def heal(self) -> None:
        """Takes every rule back."""
        self.nft("flush chain inet faults received\nflush chain inet faults sent")
        self._bits = itertools.count()
        if self._slow:
            self.slow_down(delay_s=0.0)

    def slow_down(self, **how: Any) -> None:
        """Tells the proxy what to do, see `tests.slow_proxy.Manner`, and waits until it does."""
        self._proxy.stdin.write(json.dumps(how) + "\n")
        self._proxy.stdin.flush()
        assert self._proxy.stdout.readline() == "done\n"


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


def _remove_cgroups(folder: Path) -> None:
    """Removes them from below, as soon as the last process in each is reaped."""
    end = time.monotonic() + 10
    for path in [*sorted(folder.rglob("*/"), reverse=True), folder]:
        while path.exists():
            try:
                path.rmdir()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)


@contextlib.contextmanager
def network_run(config: str | Path, run_dir: Path, *sets: str, slow: bool = False) -> Iterator[Run]:
    """A run in a network of its own, `run.network`; skips the test where that cannot be had."""
    if why_not():
        pytest.skip(why_not())
    with Network(slow=slow) as network:
        env = {FOLDER_VARIABLE: str(network.folder)}
        with running(config, run_dir, *sets, prefix=network.prefix, env=env) as run:
            run.network = network
            yield run


# The faults. Each takes a run of `network_run` that is training, and works at once.


def _place(run: Run, worker: int, lasting: bool) -> str:
    """The cgroup of a worker: of its process, or of all that are ever started for it."""
    if lasting:
        return f"worker-{worker}"
    started = [e for e in run.events("worker_started") if e["worker"] == worker]
    return f"worker-{worker}/{started[-1]['incarnation']}"


def _coordinator(run: Run) -> str:
    return run.events("coordinator_started")[-1]["address"].rsplit(":", 1)[1]


def cut_all(run: Run, worker: int, *, lasting: bool = False) -> float:
    """Cuts a worker off from everybody; returns when (unix seconds), as all of these."""
    run.network.cut(_place(run, worker, lasting))
    return time.time()


def cut_coordinator(run: Run, worker: int, *, lasting: bool = False) -> float:
    """Cuts a worker off from the coordinator; its peers can be reached."""
    run.network.cut(_place(run, worker, lasting), _coordinator(run))
    return time.time()


def cut_peer(run: Run, a: int, b: int, *, lasting: bool = False) -> float:
    """Cuts two workers off from one another; all else can be reached."""
    run.network.cut(_place(run, a, lasting), _place(run, b, lasting))
    return time.time()


def split(run: Run, left: Sequence[int], right: Sequence[int], *, lasting: bool = False) -> float:
    """Cuts the workers on the left off from those on the right; all reach the coordinator."""
    for a, b in itertools.product(left, right):
        cut_peer(run, a, b, lasting=lasting)
    return time.time()


def reset_coordinator(run: Run, worker: int) -> float:
    """Resets a worker's connection to the coordinator, once, at the worker's end."""
    network, port = run.network, _coordinator(run)
    bit = network.mark(_place(run, worker, False))
    network.at_receiver(f"meta mark & {bit} == {bit} tcp dport {port}", "reject with tcp reset")
    t = time.time()
    run.wait_until("the reset", lambda: network.matched()[-1])
    network.heal()
    return t


def lose_packets(run: Run, percent: int) -> float:
    """Loses so many of all packets, at random."""
    run.network.at_receiver(f"numgen random mod 100 < {percent}")
    return time.time()


def delay_coordinator(run: Run, delay_s: float, **stalls: float) -> float:
    """Delays all that goes to and from the coordinator, each way; needs `slow=True`."""
    run.network.slow_down(only=int(_coordinator(run)), delay_s=delay_s, **stalls)
    return time.time()


def delay_data(run: Run, delay_s: float, **stalls: float) -> float:
    """Delays all that goes between workers, each way; needs `slow=True`."""
    run.network.slow_down(beside=int(_coordinator(run)), delay_s=delay_s, **stalls)
    return time.time()


def seconds_since(t: float) -> float:
    """How long a fault has lasted."""
    return time.time() - t


def heal(run: Run) -> float:
    """All is well again."""
    run.network.heal()
    return time.time()
