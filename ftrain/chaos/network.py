"""Faults of the network, injected into real runs: cuts, resets, loss, and their healing.

The run lives in a network namespace of its own, and each worker process in a cgroup that it enters
before it opens its first connection (`hook`): a socket belongs for ever to the cgroup that its
process was in when it was opened. Rules of nftables match a packet by the cgroups of the sockets at
both ends, so connections that are made later are cut like those that are there. A packet is marked
as it is sent and dropped as it is received: its sender sees what a broken wire would show it, which
is nothing.

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
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

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
RESET_WAIT_S = 30.0  # for the next packet to the coordinator; a heartbeat is one


class Networked(Protocol):
    """A live run in a network of its own."""

    network: Network

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Its events so far, of those names."""


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
        with Network(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces, cgroups or nft rules are not allowed: {error}"


def _cgroup_mounts() -> list[str]:
    rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [row[1] for row in rows if row[2] == "cgroup2"]


class Network:
    """A network namespace with the rules that are in force in it. A context manager.

    Attributes:
      folder: of the workers' cgroups, for `hook`.
      prefix: a command that begins with it runs in the namespace.
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._bits = itertools.count()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Network:
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
        for worker in range(self._workers):
            (self.folder / f"worker-{worker}").mkdir()
        holder = hold_namespace("--net", "ip link set lo up")
        self._undo.callback(end_holder, holder)
        self.prefix = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        self.nft(RULES.format(detour="\n    ".join(self._detours())))

    def _detours(self) -> Iterator[str]:
        """Rules for where connections are led to instead; none here."""
        yield from ()

    def cgroup(self, name: str) -> tuple[int, str]:
        """A cgroup as nft wants it: its level, and its path from /sys/fs/cgroup."""
        folder = self.folder / name
        own = folder.relative_to(_cgroup_mounts()[0])
        return len(own.parts), str(folder.relative_to("/sys/fs/cgroup"))

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
        level, path = self.cgroup(name)
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
        level, path = self.cgroup(side)
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


def hold_namespace(kind: str, setup: str) -> subprocess.Popen[bytes]:
    """A process in a new namespace, of that option of unshare, once `setup` has run in it.

    It ends when its input does, with this process at the latest, and the namespace with the last
    process in it.

    Raises:
      OSError: not allowed here; what the tools said is on stderr.
    """
    holder = subprocess.Popen(
        ["unshare", kind, "sh", "-ec", f"{setup}; echo up; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    if holder.stdout.readline() != b"up\n":
        end_holder(holder)
        raise OSError(f"unshare {kind} with `{setup}` failed")
    return holder


def end_holder(process: subprocess.Popen[Any]) -> None:
    """Ends a process that waits on its input."""
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


# The faults. Each takes a run that is training, and works at once.


def _place(run: Networked, worker: int, lasting: bool) -> str:
    """The cgroup of a worker: of its process, or of all that are ever started for it."""
    if lasting:
        return f"worker-{worker}"
    started = [e for e in run.events("worker_started") if e["worker"] == worker]
    return f"worker-{worker}/{started[-1]['pid']}"


def coordinator_port(run: Networked) -> str:
    """Where the coordinator listens now."""
    return run.events("coordinator_started")[-1]["address"].rsplit(":", 1)[1]


def cut_all(run: Networked, worker: int, *, lasting: bool = False) -> float:
    """Cuts a worker off from everybody; returns when (unix seconds), as all of these."""
    run.network.cut(_place(run, worker, lasting))
    return time.time()


def cut_coordinator(run: Networked, worker: int, *, lasting: bool = False) -> float:
    """Cuts a worker off from the coordinator; its peers can be reached."""
    run.network.cut(_place(run, worker, lasting), coordinator_port(run))
    return time.time()


def cut_peer(run: Networked, a: int, b: int, *, lasting: bool = False) -> float:
    """Cuts two workers off from one another; all else can be reached."""
    run.network.cut(_place(run, a, lasting), _place(run, b, lasting))
    return time.time()


def split(
    run: Networked, left: Sequence[int], right: Sequence[int], *, lasting: bool = False
) -> float:
    """Cuts the workers on the left off from those on the right; all reach the coordinator."""
    for a, b in itertools.product(left, right):
        cut_peer(run, a, b, lasting=lasting)
    return time.time()


def reset_coordinator(run: Networked, worker: int) -> float:
    """Resets a worker's connection to the coordinator, once, at the worker's end."""
    network, port = run.network, coordinator_port(run)
    bit = network.mark(_place(run, worker, False))
    network.at_receiver(f"meta mark & {bit} == {bit} tcp dport {port}", "reject with tcp reset")
    t, end = time.time(), time.monotonic() + RESET_WAIT_S
    while not network.matched()[-1] and time.monotonic() < end:
        time.sleep(0.01)
    network.heal()
    return t


def lose_packets(run: Networked, percent: int) -> float:
    """Loses so many of all packets, at random."""
    run.network.at_receiver(f"numgen random mod 100 < {percent}")
    return time.time()


def heal(run: Networked) -> float:
    """All is well again."""
    run.network.heal()
    return time.time()
