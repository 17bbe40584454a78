"""A run over several hosts on one machine: network namespaces with a switch between them.

Each host is a namespace with an interface of its own and one supervisor in it; the run directory is
shared. Without the right to make namespaces, or where it does not matter, all are on loopback.

    with hosts_run("tests/hosts.yaml", tmp_path / "run", hosts=2) as hosts:
        hosts.kill(1)
        ...
        hosts.start(1)
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.runs import DEADLINE_S, Run, is_alive

PORT = 17017
LOSS_S = 4.0  # heartbeat_timeout_s of tests/hosts.yaml


class Namespaces:
    """One network namespace a host, and one with the switch that they are plugged into."""

    def __init__(self, hosts: int):
        self._undo = contextlib.ExitStack()
        self._hosts = hosts

    def __enter__(self) -> Namespaces:
        try:
            self._switch = self._namespace()
            self._in(self._switch, "ip link add br0 type bridge")
            self._in(self._switch, "ip link set br0 up")
            self._pids = [self._namespace() for _ in range(self._hosts)]
            for rank, pid in enumerate(self._pids):
                self._in(self._switch, f"ip link add p{rank} type veth peer name eth0 netns {pid}")
                self.plug(rank)
                self._in(self._switch, f"ip link set p{rank} up")
                self._in(pid, f"ip addr add 10.77.0.{rank + 1}/24 dev eth0")
                self._in(pid, f"ip addr add fd77::{rank + 1}/64 dev eth0 nodad")
                self._in(pid, "ip link set eth0 up")
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(self._hosts):
            self.kill_all(rank)
        self._undo.close()

    def _namespace(self) -> int:
        # It holds the namespace until its input ends, with this process at the latest.
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-ec", "ip link set lo up; echo up; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._undo.callback(_end, holder)
        if holder.stdout.readline() != b"up\n":
            raise OSError("unshare --net failed")
        return holder.pid

    def _in(self, pid: int, command: str) -> None:
        subprocess.run([*_enter(pid), *command.split()], check=True, capture_output=True, text=True)

    def prefix(self, rank: int) -> list[str]:
        """What starts a program on a host."""
        return _enter(self._pids[rank])

    def unplug(self, rank: int) -> None:
        """Takes a host's cable out of the switch: what it sends goes nowhere."""
        self._in(self._switch, f"ip link set p{rank} nomaster")

    def plug(self, rank: int) -> None:
        """Puts it in."""
        self._in(self._switch, f"ip link set p{rank} master br0")

    def processes(self, rank: int) -> list[int]:
        """All processes of a host."""
        holder = self._pids[rank]
        here = os.stat(f"/proc/{holder}/ns/net").st_ino
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.stat(f"/proc/{name}/ns/net").st_ino == here:
                    found.append(int(name))
        return [pid for pid in found if pid != holder and is_alive(pid)]

    def kill_all(self, rank: int) -> None:
        """Kills every process of a host, until there is none."""
        while pids := self.processes(rank):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


@functools.cache
def why_not() -> str:
    """Why this machine cannot be several hosts, or ""."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    if os.geteuid():
        return "only root may make network namespaces"
    try:
        with Namespaces(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces or bridges are not allowed: {error}"


class HostsRun:
    """A run over several hosts that has been started on all of them.

    Attributes:
      head: its `Run` on host 0, whose records are the run's.
      net: the namespaces, None on loopback.
      sets: values of the config for whoever is started next.
    """

    def __init__(
        self,
        config: str | Path,
        run_dir: Path,
        sets: Sequence[str],
        hosts: int,
        net: Namespaces | None,
        coordinator: str,
        env: dict[str, str],
        ranks: Sequence[int],
    ):
        self._config, self._run_dir, self.sets, self._env = config, run_dir, sets, env
        self.count, self.net, self.coordinator = hosts, net, coordinator
        self.runs: dict[int, Run] = {}
        for rank in ranks:
            self.start(rank)

    @property
    def head(self) -> Run:
        """The head's."""
        return self.runs[0]

    def start(self, rank: int, *flags: str) -> Run:
        """Starts the supervisor of a host, or another one in its place."""
        where = ["--nodes", str(self.count), "--node-rank", str(rank)]
        run = Run(
            self._config,
            self._run_dir,
            *self.sets,
            env=self._env,
            prefix=self.net.prefix(rank) if self.net else (),
            flags=[*where, "--coordinator", self.coordinator, *flags],
            name=f".{rank}",
        )
        self.runs[rank] = run
        return run

    def kill(self, rank: int) -> float:
        """Kills all that runs on a host, at once; returns when (unix seconds)."""
        t = time.time()
        self.net.kill_all(rank)
        self.runs[rank].process.wait()
        return t

    def wait_all(self, deadline_s: float = DEADLINE_S) -> None:
        """Waits until all workers train together."""

        def all_train() -> bool:
            started, rows = self.head.events("run_started"), self.head.metrics()
            workers = started[-1]["config"]["cluster"]["workers"] if started else -1
            return bool(rows) and len(rows[-1]["workers"]) == workers

        self.head.wait_until("all workers", all_train, deadline_s)

    def wait_without(self, workers: set[int], t: float) -> float:
        """Waits for the others' next commit; returns how long after `t` it came, in seconds."""
        row = self.head.wait_until(
            f"a commit without {workers}",
            lambda: next(
                (m for m in self.head.metrics() if m["t"] > t and not workers & {*m["workers"]}),
                None,
            ),
        )
        return row["t"] - t

    def stop(self, rank: int = 0) -> int:
        """As `Run.stop`, asked of one host: all of them stop, at that step."""
        self.runs[rank].process.send_signal(signal.SIGTERM)
        assert self.finish() == [75] * self.count
        return self.runs[rank].metrics()[-1]["step"]

    def finish(self, deadline_s: float = 90.0) -> list[int]:
        """The exit codes of all hosts, by rank."""
        return [self.runs[rank].finish(deadline_s) for rank in range(self.count)]


@contextlib.contextmanager
def hosts_run(
    config: str | Path,
    run_dir: Path,
    *sets: str,
    hosts: int = 2,
    loopback: bool = False,
    coordinator: str = f"10.77.0.1:{PORT}",
    env: dict[str, str] | None = None,
    ranks: Sequence[int] | None = None,
) -> Iterator[HostsRun]:
    """A run that is ended with everything it started; skips the test where it cannot be had.

    Args:
      config: its file.
      run_dir: shared by all hosts.
      sets: values that replace the config's.
      hosts: how many.
      loopback: all of them without namespaces of their own.
      coordinator: the head's address and port, in namespaces.
      env: what is added to their environment.
      ranks: the hosts that are started at once; all of them, if it is not given.
    """
    if not loopback and why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as stack:
        net = None if loopback else stack.enter_context(Namespaces(hosts))
        if loopback:
            coordinator = f"127.0.0.1:{free_port()}"
        ranks = range(hosts) if ranks is None else ranks
        run = HostsRun(config, run_dir, sets, hosts, net, coordinator, env or {}, ranks)
        try:
            yield run
        finally:
            for own in run.runs.values():
                if own.process.poll() is None:
                    own.process.kill()
                    own.process.wait()
            end = time.monotonic() + 20
            while run.head.processes() and time.monotonic() < end:
                time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
