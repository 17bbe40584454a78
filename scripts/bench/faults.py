"""Injects every kind of fault into one live run, several times each, and measures the way out.

    python scripts/bench/faults.py --repeat 5
    python scripts/bench/faults.py --soak-s 1800 --seed 7

Prints, for each fault, the seconds from the fault to the next step that was committed without those
it hit: median and worst. With --soak-s it draws faults at random instead until the time is up. In
the end the run is stopped by SIGTERM and its records are checked: every step once (after a fault
that takes all state, again from the checkpoint, and said so), replicas equal, nothing left running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from ftrain.chaos import network
from ftrain.chaos.orders import order, taken_at, withdraw
from tests.checks import check_history, check_nothing_left, check_replicas_agree
from tests.network import network_run
from tests.runs import Run, running

WORKERS = 4
HANG_TIMEOUT_S = 5
CONFIG = (
    "steps=10000000",
    f"cluster.workers={WORKERS}",
    f"cluster.hang_timeout_s={HANG_TIMEOUT_S}",
    "cluster.heartbeat_timeout_s=5",
    "checkpoint.every_steps=100",
    "restart.max_failures=1000",
    "restart.backoff_max_s=1",
)


class Hit(NamedTuple):
    """When a fault came, and the workers that cannot commit before they are replaced."""

    t: float
    workers: list[int]
    aborts: bool = False  # one of several workers will be replaced: known by the next abort


def killed(*counts: int, number: int = signal.SIGKILL) -> Callable[[Run, random.Random], Hit]:
    def inject(run: Run, draw: random.Random) -> Hit:
        workers = draw.sample(range(WORKERS), draw.choice(counts))
        return Hit(run.kill(*workers, number=number), workers)

    return inject


def ordered(
    fault: str, *places: str, dies: bool = True, **options: float
) -> Callable[[Run, random.Random], Hit]:
    def inject(run: Run, draw: random.Random) -> Hit:
        place = draw.choice(places)
        worker = 0 if place == "hook" else draw.randrange(WORKERS)  # the lowest alone has hooks
        return Hit(taken(run, order(run.run_dir, fault, place, worker, **options)), [worker] * dies)

    return inject


def taken(run: Run, path: Path) -> float:
    """Waits until an order is taken; returns when."""
    t = run.wait_until(f"{path.name} is taken", lambda: taken_at(path))
    withdraw(path)
    return t


def rejoiner_dies(run: Run, draw: random.Random) -> Hit:
    """At any point of its way back; the order is there before it is."""
    worker = draw.randrange(WORKERS)
    place = draw.choice(["start", "compile", "ready", "barrier", "settle", "sync"])
    last = [e for e in run.events("worker_started") if e["worker"] == worker][-1]
    path = order(run.run_dir, "kill", place, worker, incarnation=last["incarnation"] + 1)
    run.kill(worker)
    return Hit(taken(run, path), [worker])


def donor_dies(run: Run, draw: random.Random) -> Hit:
    """While it gives its state to a rejoiner."""
    worker = draw.randrange(1, WORKERS)
    run.kill(worker)
    run.wait_until("the others train", lambda: worker not in run.metrics()[-1]["workers"])
    return Hit(taken(run, order(run.run_dir, "kill", "sync", 0)), [0])


def coordinator(run: Run, draw: random.Random) -> Hit:
    t = time.time()
    os.kill(run.events("coordinator_started")[-1]["pid"], signal.SIGKILL)
    return Hit(t, [])


def cut_all(run: Run, draw: random.Random) -> Hit:
    worker = draw.randrange(WORKERS)
    return Hit(network.cut_all(run, worker), [worker])


def cut_coordinator(run: Run, draw: random.Random) -> Hit:
    worker = draw.randrange(WORKERS)
    return Hit(network.cut_coordinator(run, worker), [worker])


def cut_pair(run: Run, draw: random.Random) -> Hit:
    """Of neighbours in the ring of the sum; what is cut between others carries nothing."""
    worker = draw.randrange(WORKERS)
    return Hit(network.cut_peer(run, worker, (worker + 1) % WORKERS), [], aborts=True)


def split(run: Run, draw: random.Random) -> Hit:
    """Into two halves, on the data plane."""
    workers = draw.sample(range(WORKERS), WORKERS)
    return Hit(network.split(run, workers[:2], workers[2:]), [], aborts=True)


def short_cut(run: Run, draw: random.Random) -> Hit:
    t = network.cut_coordinator(run, draw.randrange(WORKERS))
    time.sleep(1.0)
    network.heal(run)
    return Hit(t, [])


def packet_loss(run: Run, draw: random.Random) -> Hit:
    t = network.lose_packets(run, 5)
    time.sleep(2.0)
    network.heal(run)
    return Hit(t, [])


def reset(run: Run, draw: random.Random) -> Hit:
    worker = draw.randrange(WORKERS)
    return Hit(network.reset_coordinator(run, worker), [worker])


NETWORK_FAULTS: dict[str, Callable[[Run, random.Random], Hit]] = {
    "cut off from everybody": cut_all,
    "cut off from the coordinator": cut_coordinator,
    "two cut off from one another": cut_pair,
    "split into two halves": split,
    "its coordinator connection reset": reset,
    "cut off for 1 s, then healed": short_cut,
    "5 % of packets lost for 2 s": packet_loss,
}
FAULTS: dict[str, Callable[[Run, random.Random], Hit]] = {
    "a worker dies": killed(1),
    "two or three at once": killed(2, 3),
    "all at once": killed(WORKERS),
    "SIGTERM to a worker": killed(1, number=signal.SIGTERM),
    "nobody died, the attempt failed": ordered(
        "attempt", "gradient", "reduce", "update", dies=False
    ),
    "an exception": ordered("bug", "gradient", "update", "hook", "dataset"),
    "out of memory": ordered("memory", "gradient", "update"),
    "out of device memory": ordered("device_memory", "gradient", "update"),
    "sys.exit": ordered("exit", "gradient", "update", "dataset"),
    "a segmentation fault": ordered("segfault", "gradient", "update"),
    "abort()": ordered("abort", "gradient", "update"),
    "stopped (SIGSTOP)": ordered("stop", "gradient", "reduce", "update"),
    "spins in C": ordered("spin", "gradient", "update"),
    "blocked in its data": ordered("sleep", "dataset", seconds=3600),
    "blocked in its hook": ordered("sleep", "hook", seconds=3600),
    "stuck in a device call": ordered("device", "gradient"),
    "late by 2 s": ordered("sleep", "dataset", "update", dies=False, seconds=2),
    "a rejoiner dies on its way": rejoiner_dies,
    "the donor dies in a sync": donor_dies,
    "the coordinator dies": coordinator,
}
TAKES_ALL_STATE = {"all at once", "the coordinator dies"}


def measure(run: Run, fault: str, draw: random.Random) -> float:
    """Injects one fault; seconds to the next commit without those it hit. Waits for all of them."""
    seen = len(run.events())
    hit = {**FAULTS, **NETWORK_FAULTS}[fault](run, draw)
    everybody = list(range(WORKERS))
    dead = set(hit.workers) if len(hit.workers) < WORKERS else set()
    since = hit.t
    if hit.aborts:
        since = run.wait_for_event("step_aborted", after=seen)["t"]

    def first() -> dict | None:
        rows = run.metrics()[-2000:]
        return next((m for m in rows if m["t"] > since and not dead & set(m["workers"])), None)

    commit = run.wait_until(f"a commit after: {fault}", first)
    run.wait_until("all train", lambda: run.metrics()[-1]["workers"] == everybody)
    if fault in NETWORK_FAULTS:
        network.heal(run)
    run.wait_for_steps(draw.randrange(10, 40))
    return commit["t"] - hit.t


@contextlib.contextmanager
def live_run(run_dir: Path) -> Iterator[Run]:
    """With a network of its own, where the machine allows that."""
    sets = ["trainer=tests/trainers.py:Ordered", *CONFIG]
    if network.why_not():
        print(f"without faults of the network: {network.why_not()}")
        with running("tests/paced.yaml", run_dir, *sets) as run:
            yield run
    else:
        with network_run("tests/paced.yaml", run_dir, *sets) as run:
            yield run


def table(seconds: dict[str, list[float]]) -> Iterable[str]:
    for fault, values in seconds.items():
        yield (
            f"{fault:34} {len(values):4} times   median {statistics.median(values):6.2f} s   "
            f"worst {max(values):6.2f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--soak-s", type=float, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-faults"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    arguments.run_dir.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(arguments.seed)
    possible = FAULTS if network.why_not() else FAULTS | NETWORK_FAULTS
    names = arguments.only or list(possible)
    seconds: dict[str, list[float]] = {}

    def inject(fault: str) -> None:
        seconds.setdefault(fault, []).append(measure(run, fault, draw))
        print(f"{time.strftime('%H:%M:%S')} {fault}: {seconds[fault][-1]:.2f} s", flush=True)

    with live_run(arguments.run_dir) as run:
        run.wait_for_step(20)
        end = time.monotonic() + arguments.soak_s
        if arguments.soak_s:
            while time.monotonic() < end:
                inject(draw.choice(names))
        for fault in [] if arguments.soak_s else names:
            for _ in range(arguments.repeat):
                inject(fault)
        run.process.send_signal(signal.SIGTERM)
        code = run.finish()
        hits = sum(map(len, seconds.values()))
        lost = sum(len(v) for fault, v in seconds.items() if fault in TAKES_ALL_STATE)
        check_history(run)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert code == 75
        assert len(run.events("checkpoint_restored")) == lost
    rows = list(table(seconds))
    print("\n".join(rows))
    step = run.metrics()[-1]["step"]
    print(f"{hits} faults, {step} steps, {lost} continued from a checkpoint; records verified")
    result = {"seconds": seconds, "steps": step, "seed": arguments.seed}
    (arguments.run_dir / "bench.json").write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
