"""What the coordinator costs with many workers: barriers, settles and fences, without devices.

    python scripts/bench/scaling.py --workers 8 32 128 512

Starts the coordinator as a run does, with so many clients in a few processes, each in a thread of
its own that does what a worker does between steps: arrive in the liveness barrier, now and then
meet in a named barrier. One client is then fenced while the others wait for it. Prints medians and
the largest, in milliseconds, and the coordinator's CPU time a barrier; writes JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from ftrain.processes import Child, launch

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
START_S = 60


class Service:
    """A coordinator process."""

    def __init__(self, workers: int):
        argv = [sys.executable, "-m", "ftrain.coordinator", "{control}", str(workers), "cpu", "60"]
        argv += ["", "127.0.0.1", "0"]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self._child = Child(lambda ends: launch(argv, env, ends))
        # A service whose log nobody reads stops at 64 kB of it, which is 480 clients' connecting.
        threading.Thread(target=self._read_log, daemon=True).start()
        began = time.monotonic()
        self.address = self._line("ready", START_S)
        self.start_s = time.monotonic() - began

    def _read_log(self) -> None:
        while True:
            self._child.pipes["stderr"].lines()
            time.sleep(0.01)

    def _line(self, word: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self._child.pipes["stdout"].lines()[0]:
                if line.startswith(word):
                    return line.split()[1]
            time.sleep(0.001)
        raise TimeoutError(f"the coordinator did not say {word} within {timeout_s} s")

    def fence(self, worker: int) -> float:
        """Fences one; returns the seconds until the service has acknowledged."""
        began = time.perf_counter()
        self._child.send(f"fence {worker}")
        self._line("fenced", 60)
        return time.perf_counter() - began

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident_mb(self) -> float:
        rows = Path(f"/proc/{self._child.pid}/status").read_text().splitlines()
        return next(int(r.split()[1]) / 1024 for r in rows if r.startswith("VmRSS"))

    def end(self) -> None:
        self._child.reap(kill=True)


def clients(address: str, ids: list[int], workers: int, rounds: int, results: Any) -> None:
    """A process of clients, a thread each. All but the last worker meet once more after a fence."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a client tells six lines of its connecting
    from jaxlib import _jax

    every = list(range(workers, 2 * workers))  # member tasks, as `runtime` numbers them
    last = workers - 1

    def work(worker: int) -> None:
        client = _jax.get_distributed_runtime_client(
            address,
            workers + worker,
            init_timeout=START_S,
            heartbeat_timeout=60,
            shutdown_on_destruction=False,
            use_compression=False,
        )
        client.connect()
        seconds: dict[str, list[float]] = {"barrier": [], "settle": [], "fenced": []}
        client.wait_at_barrier("begin", START_S * 1000, every)
        for _ in range(rounds):
            began = time.perf_counter()
            client.get_live_nodes(every)
            seconds["barrier"].append(time.perf_counter() - began)
        for number in range(max(3, rounds // 10)):
            began = time.perf_counter()
            client.wait_at_barrier(f"settle/{number}", 120_000, every)
            seconds["settle"].append(time.perf_counter() - began)
        if worker == last:
            results.put((worker, seconds))
        else:
            began = time.perf_counter()
            client.get_live_nodes(every)  # waits for the last, until it is fenced
            seconds["fenced"].append(time.perf_counter() - began)
            results.put((worker, seconds))
        threading.Event().wait()  # a client must not be destroyed: it would speak to the service

    for worker in ids:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    threading.Event().wait()


def measure(workers: int, rounds: int, processes: int) -> dict[str, Any]:
    service = Service(workers)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    shares = [list(range(first, workers, processes)) for first in range(min(processes, workers))]
    children = [
        context.Process(
            target=clients, args=(service.address, ids, workers, rounds, results), daemon=True
        )
        for ids in shares
    ]
    for child in children:
        child.start()
    try:
        worker, seconds = results.get(timeout=START_S)  # the one that does not come again
        assert worker == workers - 1
        cpu_s = service.cpu_s()
        time.sleep(0.5)  # until all others wait for it
        fence_s = service.fence(worker)
        rows = [results.get(timeout=60)[1] for _ in range(workers - 1)]
    finally:
        for child in children:
            child.kill()
    row = {
        "workers": workers,
        "coordinator_start_s": service.start_s,
        "fence_ms": 1000 * fence_s,
        "coordinator_resident_mb": service.resident_mb(),
        "coordinator_cpu_s": cpu_s,
    }
    for name in ("barrier", "settle"):
        # Each member sees its own wait; the last to arrive the shortest. A round is its longest.
        longest = [max(waits) for waits in zip(*(r[name] for r in [*rows, seconds]), strict=True)]
        row[f"{name}_ms"] = 1000 * statistics.median(longest)
        row[f"{name}_max_ms"] = 1000 * max(longest)
    service.end()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-scaling.json"))
    arguments = parser.parse_args()
    rows = []
    for workers in arguments.workers:
        rows.append(measure(workers, arguments.rounds, arguments.processes))
        if len(rows) == 1:
            print(" ".join(f"{name:>24}" for name in rows[0]))
        print(" ".join(f"{value:24.2f}" for value in rows[-1].values()), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
