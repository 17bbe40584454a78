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
    """One kill: how the others went on, and how it came back, in parts that add up. Seconds.

    `*` marks the parts of what is above them; for those marked `**` the others wait too.
    """
    seen, before = len(run.events()), len(run.metrics())
    t = run.kill(worker)
    commit = run.wait_until(
        "the survivors' next commit",
        lambda: next((m for m in run.metrics()[before:] if worker not in m["workers"]), None),
    )
    back = run.wait_back(worker, seen)
    first = run.wait_until(
        "its first commit",
        lambda: next(
            (m for m in run.metrics()[before:] if m["t"] > back["t"] and worker in m["workers"]),
            None,
        ),
    )
    exited, aborted, started, ready = (
        run.wait_for_event(name, after=seen, **of)
        for name, of in (
            ("worker_exited", {"worker": worker}),
            ("step_aborted", {}),
            ("worker_started", {"worker": worker}),
            ("worker_ready", {"worker": worker}),
        )
    )
    views = run.events("view_changed")
    without = next(v for v in views if v["t"] > t and worker not in v["workers"])
    joined = next(v for v in reversed(views) if v["t"] < first["t"] and worker in v["workers"])
    return {
        "worker": worker,
        "kill to the others' commit": commit["t"] - t,
        "* detect": exited["t"] - t,
        "* cancel and fence": aborted["t"] - exited["t"],
        "* next block": without["t"] - without["seconds"] - aborted["t"],
        **_entering(without),
        "* step": commit["t"] - without["t"],
        "restart to its commit": first["t"] - started["t"],
        "* import": ready["t"] - started["t"] - ready["compile_s"],
        "* compile": ready["compile_s"],
        "* let go and join": joined["t"] - joined["seconds"] - ready["t"],
        **{f"*{name}": value for name, value in _entering(joined).items()},
        "** step": first["t"] - joined["t"],
        "its CPU until ready": ready["cpu_s"],
        "kill to its commit": first["t"] - t,
        "the others' longest step": first["step_time_s"],
    }


def _entering(view: dict[str, float]) -> dict[str, float]:
    return {
        "* settle": view["seconds"] - view["sync_s"],
        "* communicators": view["connect_s"],
        "* state": view["sync_s"] - view["connect_s"],
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
            whole = [f"{k} {v:.3f}" for k, v in rows[-1].items() if "*" not in k]
            print(number, *whole, sep=", ", flush=True)
            run.wait_for_step(run.metrics()[-1]["step"] + arguments.pause_steps)
        os.kill(run.process.pid, signal.SIGTERM)
        code = run.finish()
    for name in rows[0]:
        if name != "worker":
            values = sorted(row[name] for row in rows)
            print(
                f"{name:28} median {statistics.median(values):.3f}  "
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
