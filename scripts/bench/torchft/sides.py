"""The two sides as the benchmark sees them: how each is started, watched and ended.

Both train the same samples with four workers, one process each. A side tells which process a
worker is and which steps it has committed; all else is measured from outside, in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.runs import Run, running  # noqa: E402

WORKERS = 4
BATCH = 240  # of all workers together, as in configs/digits.yaml


class Size(NamedTuple):
    """A network: the recipe's, or the same one wider."""

    config: str
    width: int


SIZES = {
    "small": Size("configs/digits.yaml", 16),
    "large": Size("scripts/bench/torchft/wide.yaml", 64),
}


class Setting(NamedTuple):
    """How fast torchft may conclude that somebody is dead."""

    lighthouse: tuple[str, ...]
    heartbeat_s: float  # between two of a worker
    gloo_s: float  # until a collective that nobody answers is given up
    monitor_s: float  # how often torchrun looks whether its worker lives


SETTINGS = {
    # README.md and train_ddp.py of torchft; what they leave out is left at its default: heartbeats
    # every 100 ms, a replica is dead after 5 s without.
    "as documented": Setting(
        ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000"), 0.1, 5.0, 0.1
    ),
    "tuned": Setting(
        (
            "--min_replicas=1",
            "--quorum_tick_ms=10",
            "--join_timeout_ms=10000",
            "--heartbeat_timeout_ms=150",
        ),
        heartbeat_s=0.02,
        gloo_s=0.15,
        monitor_s=0.01,
    ),
}


class Commit(NamedTuple):
    """A step that a worker took part in and that counts."""

    t: float  # unix seconds
    participants: int
    samples: int  # of this worker's part


class Ftrain:
    """A run of `ftrain run`, watched through its records."""

    def __init__(self, run: Run):
        self.run = run

    def pid(self, worker: int) -> int | None:
        return self.run.pid(worker)

    def commits(self, worker: int) -> list[Commit]:
        return [
            Commit(m["t"], len(m["workers"]), BATCH // len(m["workers"]))
            for m in self.run.metrics()
            if worker in m["workers"]
        ]

    def samples(self, start: float, end: float) -> int:
        inside = [m["samples"] for m in self.run.metrics() if start <= m["t"] <= end]
        return inside[-1] - inside[0] + BATCH if inside else 0

    def roots(self) -> list[int]:
        return [self.run.process.pid, *self.run.processes()]


class Torch:
    """Workers in PyTorch, each with its log."""

    def __init__(
        self,
        folder: Path,
        processes: list[subprocess.Popen],
        beside: Sequence[subprocess.Popen] = (),
    ):
        self.processes, self.beside = processes, list(beside)
        self.agents = bool(beside)  # each process is a torchrun, which has the worker
        self.files = [folder / f"worker-{w}.jsonl" for w in range(WORKERS)]
        self.read: list[tuple[list[dict], int]] = [([], 0) for _ in range(WORKERS)]

    def pid(self, worker: int) -> int | None:
        pid = self.processes[worker].pid
        if not self.agents:
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    def lines(self, worker: int) -> list[dict[str, Any]]:
        """The attempts of a worker so far. Each line is read once."""
        rows, start = self.read[worker]
        if self.files[worker].exists():
            with open(self.files[worker], "rb") as file:
                file.seek(start)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            rows += map(json.loads, whole.splitlines())
            self.read[worker] = rows, start + len(whole)
        return rows

    def commits(self, worker: int) -> list[Commit]:
        return [
            Commit(line["t"], line["participants"], line["samples"])
            for line in self.lines(worker)
            if line["counts"]
        ]

    def samples(self, start: float, end: float) -> int:
        commits = [c for w in range(WORKERS) for c in self.commits(w)]
        return sum(c.samples for c in commits if start <= c.t <= end)

    def roots(self) -> list[int]:
        return [process.pid for process in self.processes + self.beside]

    def wait_end(self) -> None:
        for process in self.processes:
            if process.wait(600) != 0:
                raise SystemExit(f"a worker ended with {process.returncode}, see {self.files[0]}")


Side = Ftrain | Torch


@contextlib.contextmanager
def ftrain(folder: Path, size: Size, sets: Sequence[str] = ()) -> Iterator[Ftrain]:
    sets = [*sets, "steps=1000000000", "restart.max_failures=1000", "checkpoint.keep=1"]
    sets += [f"compile_cache={folder.parent / 'compile_cache'}"]
    with running(size.config, folder, *sets) as run:
        yield Ftrain(run)
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.finish()


@contextlib.contextmanager
def torchft(
    folder: Path, size: Size, venv: Path, data: Path, setting: Setting, steps: int = 10**9
) -> Iterator[Torch]:
    """A lighthouse, and four replica groups of one worker, each under a torchrun of its own."""
    folder.mkdir(parents=True)
    port = free_port()
    with contextlib.ExitStack() as stack:

        def start(name: str, argv: list[str], **env: str) -> subprocess.Popen:
            return stack.enter_context(process(folder / f"{name}.out", argv, env))

        lighthouse = start(
            "lighthouse",
            [str(venv / "bin/torchft_lighthouse"), f"--bind=[::]:{port}", *setting.lighthouse],
            RUST_BACKTRACE="1",
        )
        agents = [
            start(
                f"worker-{w}",
                [
                    str(venv / "bin/torchrun"),
                    f"--master_port={free_port()}",
                    "--nnodes=1",
                    "--nproc_per_node=1",
                    "--max_restarts=1000",
                    f"--monitor_interval={setting.monitor_s}",
                    "--",
                    *worker_argv("torchft", folder, w, size, data, steps),
                    f"--heartbeat-s={setting.heartbeat_s}",
                    f"--gloo-s={setting.gloo_s}",
                ],
                REPLICA_GROUP_ID=str(w),
                TORCHFT_LIGHTHOUSE=f"http://localhost:{port}",
            )
            for w in range(WORKERS)
        ]
        yield Torch(folder, agents, [lighthouse])


@contextlib.contextmanager
def torch_plain(
    folder: Path, size: Size, venv: Path, data: Path, mode: str, steps: int
) -> Iterator[Torch]:
    """Four workers without torchft, all-reducing by gloo."""
    folder.mkdir(parents=True)
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                process(
                    folder / f"worker-{w}.out",
                    [
                        str(venv / "bin/python"),
                        *worker_argv(mode, folder, w, size, data, steps),
                    ],
                    {"REPLICA_GROUP_ID": str(w), "MASTER_ADDR": "localhost", "MASTER_PORT": port},
                )
            )
            for w in range(WORKERS)
        ]
        yield Torch(folder, workers)


def worker_argv(
    mode: str, folder: Path, worker: int, size: Size, data: Path, steps: int
) -> list[str]:
    return [
        str(HERE / "train_torch.py"),
        f"--mode={mode}",
        f"--data={data}",
        f"--log={folder}/worker-{worker}.jsonl",
        f"--width={size.width}",
        f"--batch={BATCH // WORKERS}",
        f"--steps={steps}",
    ]


@contextlib.contextmanager
def process(output: Path, argv: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process that is ended, with what it has started, when the block is left."""
    # One thread a process, for four workers on two cores; torch's default is one a core.
    own = {"NUM_REPLICA_GROUPS": str(WORKERS), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(output, "ab") as out:
        started = subprocess.Popen(
            argv, env={**os.environ, **own, **env}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield started
    finally:
        started.terminate()  # torchrun ends its worker
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(what: str, condition: Callable[[], Any], deadline_s: float = 120) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"not within {deadline_s} s: {what}")
        time.sleep(0.01)
    return found


def wait_all(side: Side, commits: int) -> None:
    """Waits until each worker has committed so many steps more, together with all others."""
    since = time.time()

    def done() -> bool:
        return all(
            sum(c.t > since and c.participants == WORKERS for c in side.commits(w)) >= commits
            for w in range(WORKERS)
        )

    wait_until(f"{commits} commits of all", done)
