"""Kills uniformly drawn workers of a run and measures how long it takes to go on and to be back.

    python scripts/bench/recovery.py configs/digits.yaml --kills 20 --seed 7

Prints one row a kill and the distribution, and writes both as JSON beside the run. Each kill waits
for all workers to be back and for some steps to pass, so that kills do not overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.runs import Run, running


def measure(run: Run, worker: int) -> dict[str, float]:
    """One kill: seconds to the survivors' next commit, and from the restart to its first commit."""
    seen, before = len(run.events()), len(run.metrics())
    t = run.kill(worker)
    commit = run.wait_until(
        "the survivors' next commit",
        lambda: next((m for m in run.metrics()[before:] if worker not in m["workers"]), None),
    )
    back = run.wait_back(worker, seen)
    started = run.wait_for_event("worker_started", after=seen, worker=worker)
    ready = run.wait_for_event("worker_ready", after=seen, worker=worker)
    first = run.wait_until(
        "its first commit",
        lambda: next(
            (m for m in run.metrics()[before:] if m["t"] > back["t"] and worker in m["workers"]),
            None,
        ),
    )
    return {
        "worker": worker,
        "kill_to_commit_s": commit["t"] - t,
        "restart_to_commit_s": first["t"] - started["t"],
        "start_cpu_s": ready["cpu_s"],
        "kill_to_back_s": first["t"] - t,
        "sync_s": back["seconds"],
        "survivors_waited_s": first["step_time_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--pause-steps", type=int, default=30)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-recovery"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    arguments.run_dir.parent.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(arguments.seed), []
    with running(arguments.config, arguments.run_dir, "steps=1000000", *arguments.set) as run:
        run.wait_for_step(arguments.pause_steps)
        workers = run.events("run_started")[0]["config"]["cluster"]["workers"]
        for number in range(arguments.kills):
            rows.append(measure(run, draw.randrange(workers)))
            print(
                number,
                " ".join(
                    f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}"
                    for k, v in rows[-1].items()
                ),
                flush=True,
            )
            run.wait_for_step(run.metrics()[-1]["step"] + arguments.pause_steps)
        os.kill(run.process.pid, signal.SIGTERM)
        code = run.finish()
    for name in rows[0]:
        if name != "worker":
            values = sorted(row[name] for row in rows)
            print(
                f"{name:22} median {statistics.median(values):.3f}  "
                f"min {values[0]:.3f}  max {values[-1]:.3f}"
            )
    print(
        f"exit code {code} (75: stopped on request), "
        f"{len(run.events('checkpoint_restored'))} restores, "
        f"{len(run.events('digest_agreed'))} digests agreed, steps "
        f"{run.metrics()[-1]['step']}, each once: "
        f"{[m['step'] for m in run.metrics()] == list(range(1, run.metrics()[-1]['step'] + 1))}"
    )
    (arguments.run_dir / "recovery.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
