"""What is measured of a side while it trains; the same code for each."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import processes
from injector import Injector, kill
from sides import REPOSITORY, WORKERS, Commit, Ftrain, Side, Size, Torch, wait_all, wait_until

WARM_UP = 20  # steps that compile or wait for who does
AFTER_S = 1.0  # how long after a worker is back the others' steps are looked at


def plain_jax_ms(size: Size, steps: int) -> float:
    """The median step of ftrain's baseline: a plain jitted loop, waited for."""
    argv = [sys.executable, str(REPOSITORY / "scripts/bench/plain_loop.py"), size.config]
    done = subprocess.run(
        [*argv, f"--steps={steps}"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])["waited_ms"]


def median_ms(side: Side, steps: int) -> float:
    """The median from one commit to the next, of the last so many."""
    times = [c.t for c in side.commits(0)][-steps - 1 :]
    return 1e3 * statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def one_kill(side: Side, worker: int) -> dict[str, float]:
    """Kills a worker with all four at work, and follows until it takes part again."""
    old = side.pid(worker)
    t = kill(side, worker)
    assert t is not None
    others = [w for w in range(WORKERS) if w != worker]

    def without_it() -> Commit | None:
        # A step that the dead one had given its part to is none of the survivors' own.
        found = [c for w in others for c in side.commits(w)[-50:]]
        return min((c for c in found if c.t > t and c.participants < WORKERS), default=None)

    def restarted() -> int | None:
        return pid if (pid := side.pid(worker)) != old else None

    pid = wait_until("its restart", restarted)
    started = processes.started_at(pid)
    commit = wait_until("the survivors' next commit", without_it)
    first = wait_until(
        "its first commit",
        lambda: next((c for c in side.commits(worker) if c.t > max(t, started)), None),
    )
    cpu_s = processes.cpu_s(pid)
    wait_until("steps after its return", lambda: time.time() > first.t + AFTER_S)
    longest = 0.0
    for w in others:
        times = [c.t for c in side.commits(w) if commit.t <= c.t <= first.t + AFTER_S]
        longest = max([longest, *(b - a for a, b in zip(times, times[1:], strict=False))])
    return {
        "worker": worker,
        "kill_to_commit_s": commit.t - t,
        "kill_to_back_s": first.t - t,
        "restart_to_commit_s": first.t - started,
        "longest_step_at_join_s": longest,
        "restart_cpu_s": cpu_s,
    }


def kills(side: Side, injector: Injector, count: int, pause_steps: int = 30) -> list[dict]:
    """So many kills, each with all four back at work."""
    rows = []
    wait_all(side, 2 * pause_steps)
    for _ in range(count):
        rows.append(one_kill(side, injector.draw()))
        print("   ", " ".join(f"{k}={v:.3g}" for k, v in rows[-1].items()), flush=True)
        wait_all(side, pause_steps)
    return rows


def throughput(
    side: Side, injector: Injector, cycles: int, calm_s: float, killed_s: float, every_s: float
) -> dict[str, Any]:
    """Committed samples per second, some time undisturbed and some time with kills, in turns."""
    calm, killed, deaths = [], [], 0
    wait_all(side, 60)
    for _ in range(cycles):
        start = time.time()
        time.sleep(calm_s)
        calm.append(side.samples(start, start + calm_s) / calm_s)
        start = time.time()
        deaths += injector.kill_every(side, every_s, start, start + killed_s)
        killed.append(side.samples(start, start + killed_s) / killed_s)
        wait_all(side, 20)
    pids = filter(None, map(side.pid, range(WORKERS)))
    return {
        "calm": calm,
        "killed": killed,
        "deaths": deaths,
        "total_mb": processes.proportional_mb(processes.with_children(side.roots())),
        "peak_mb": statistics.median(map(processes.peak_mb, pids)),
        **(ledger(side) if isinstance(side, Torch) else {}),
    }


def ledger(side: Torch) -> dict[str, Any]:
    """How often each sample of the data set has been used in a step that counts.

    A worker reads its quarter in the same order each epoch, so that a sample is known by its worker
    and the number of its batch.
    """
    uses: Counter[tuple[int, int]] = Counter()
    size: dict[tuple[int, int], int] = {}
    dropped, smallest = 0, WORKERS
    for worker in range(WORKERS):
        for line in side.lines(worker):
            batch = (worker, line["batch"])
            size[batch] = line["samples"]
            uses[batch] += line["counts"]
            dropped += 0 if line["counts"] else line["samples"]
            smallest = min(smallest, line["participants"] if line["counts"] else WORKERS)
    by_uses: Counter[int] = Counter()
    for batch, count in uses.items():
        by_uses[count] += size[batch]
    return {
        "uses_least": min(by_uses),
        "uses_most": max(by_uses),
        "samples_by_uses": dict(sorted(by_uses.items())),
        "read_and_dropped": dropped,
        "smallest_batch_in_workers": smallest,
    }


def verdict(side: Ftrain, run_dir: Path) -> dict[str, Any]:
    """ftrain's own judge of a run's records: one history, each sample once an epoch."""
    from ftrain.verify import verify

    found = verify(run_dir)
    rows = side.run.metrics()
    batches = {b["samples"] - a["samples"] for a, b in zip(rows, rows[1:], strict=False)}
    return {"verified": found.ok, "steps": rows[-1]["step"], "batches": sorted(batches)}
