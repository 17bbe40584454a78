"""What faults cost: a digits run with a kill every 10 s beside the same run without.

    python scripts/bench/goodput.py --seconds 120 --every-s 10 --seed 7 --pairs 1

The kills are SIGKILL to a worker drawn uniformly, worker 0 included. Both runs of a pair train for
the same time after their first commit; every second pair has them the other way round. Prints
samples per second of both, and where the wall time of the run with kills went, and judges its
records.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from ftrain.goodput import PARTS, Breakdown, breakdown
from ftrain.records import read_records
from ftrain.verify import verify
from tests.runs import Run, running

START_S = 600.0
SETS = ("epochs=1000000", "restart.max_failures=1000")


def train(run_dir: Path, arguments: argparse.Namespace, draw: random.Random | None) -> float:
    """One run; samples per second from its first commit on. With kills if there is a draw."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with running(arguments.config, run_dir, *SETS, *arguments.set) as run:
        run.wait_until("step 1", run.metrics, START_S)
        first = run.metrics()[0]
        end = first["t"] + arguments.seconds
        while draw is not None and time.time() + arguments.every_s < end:
            time.sleep(arguments.every_s)
            kill_one(run, draw)
        run.wait_until("the end", lambda: time.time() > end, arguments.seconds + 60)
        last = [m for m in run.metrics() if m["t"] <= end][-1]
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.output
    return (last["samples"] - first["samples"]) / (end - first["t"])


def kill_one(run: Run, draw: random.Random) -> None:
    """Any worker, drawn uniformly; one that is on its way back is drawn like any other."""
    workers = run.events("run_started")[-1]["config"]["cluster"]["workers"]
    worker = draw.randrange(workers)
    last = [e for e in run.events("worker_started", "worker_exited") if e["worker"] == worker][-1]
    if last["event"] == "worker_started":
        run.kill(worker)


def table(found: Breakdown) -> str:
    begun_s = found.wall_s - found.parts["start"] - found.parts["compile"]
    lines = [
        f"goodput {found.goodput:.1%} of {found.wall_s:.1f} s, "
        f"{found.parts['train'] / begun_s:.1%} without start and compile"
    ]
    for part, seconds in found.parts.items():
        if seconds > 0:
            lines.append(
                f"  {part:11} {seconds:8.2f} s  {seconds / found.wall_s:6.1%}  {PARTS[part]}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/digits.yaml")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every-s", type=float, default=10)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-goodput"))
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    pairs, bad = [], 0
    for pair in range(arguments.pairs):
        rates = {}
        for kills in (False, True) if pair % 2 == 0 else (True, False):
            run_dir = arguments.run_dir / f"{pair}-{'kills' if kills else 'calm'}"
            rates[kills] = train(run_dir, arguments, draw if kills else None)
        run_dir = arguments.run_dir / f"{pair}-kills"
        verdict = verify(run_dir)
        bad += not verdict.ok
        pairs.append(rates[True] / rates[False])
        print(
            f"{rates[False]:,.0f} samples/s without, {rates[True]:,.0f} with "
            f"{verdict.deaths} kills: {pairs[-1]:.1%}; {str(verdict).splitlines()[0]}"
        )
        print(table(breakdown(read_records(run_dir))), flush=True)
    print(f"median of {len(pairs)}: {statistics.median(pairs):.1%} of the samples of the calm run")
    (arguments.run_dir / "bench.json").write_text(json.dumps({"pairs": pairs}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
