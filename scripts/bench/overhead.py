"""What ftrain costs while nothing dies: its steps and those of a plain loop, taken in turns.

    python scripts/bench/overhead.py
    python scripts/bench/overhead.py --workers 4 --steps-ms 5 50 --pairs 5 --set batch_shards=4

For each number of workers and each length of step the batch is chosen so that the plain loop's
step, run ahead, takes about that long; then plain loop and ftrain train the same model on the same
batch, one after the other, in the order that alternates. `waited`: the plain loop waits for each
step's result, as one does that looks at its loss; `ahead`: it lets one step run ahead. ftrain's
step is the time from one commit to the next, over the steps that are in it. Prints medians over the
pairs, and their range, and writes all to a file, mean and longest step too. Ends with an error if a
step was aborted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from ftrain.config import load_config
from tests.runs import REPOSITORY, environment, running

CONFIG = "scripts/bench/sized.yaml"
WARM_UP = 30  # steps that compile what a view needs, or wait for it
TIMED_S = 4.0  # of steps that count, in each run
UNIT = 48  # samples: divisible among the shards and workers that are asked for


def sets_of(arguments: argparse.Namespace, workers: int, batch: int) -> list[str]:
    return [
        f"cluster.workers={workers}",
        f"cluster.platform={arguments.platform}",
        f"batch_size={batch}",
        f"trainer_args={{width: {arguments.width}}}",
        *arguments.set,
    ]


def plain(arguments: argparse.Namespace, sets: list[str], steps: int) -> dict[str, float]:
    """The medians of the plain loop's steps, in milliseconds."""
    argv = [sys.executable, "scripts/bench/plain_loop.py", CONFIG, f"--steps={steps}"]
    argv += [f"--platform={arguments.platform}", *(f"--set={item}" for item in sets)]
    done = subprocess.run(
        argv, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def ours(arguments: argparse.Namespace, sets: list[str], steps: int) -> dict[str, float]:
    """The median from one commit of ftrain to the next."""
    folder = arguments.run_dir / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    cache = f"compile_cache={arguments.run_dir / 'compile_cache'}"
    with running(CONFIG, folder, f"steps={steps + WARM_UP}", cache, *sets) as run:
        if run.finish(600) != 0:
            raise SystemExit(run.output)
        times = [row["t"] for row in run.metrics()[WARM_UP:]]
        if aborted := run.events("step_aborted"):
            raise SystemExit(f"nothing has died, and steps were aborted: {aborted}")
    # The steps of a commit are told together: what they took is theirs alike.
    together = load_config(CONFIG, sets).steps_per_commit
    times = times[::together]
    steps_ms = [1e3 * (b - a) / together for a, b in zip(times, times[1:], strict=False)]
    return {
        "ftrain_ms": statistics.median(steps_ms),
        "mean_ms": statistics.mean(steps_ms),
        "longest_ms": max(steps_ms),
    }


def batch_for(arguments: argparse.Namespace, workers: int, step_ms: float) -> int:
    """The batch with which the plain loop's step takes about so long."""
    batch, took = UNIT, 0.0
    for _ in range(3):
        took = plain(arguments, sets_of(arguments, workers, batch), 60)["ahead_ms"]
        if 0.9 < took / step_ms < 1.1:
            break
        batch = max(UNIT, round(batch * min(100, step_ms / took) / UNIT) * UNIT)
    return batch


def measure(arguments: argparse.Namespace, workers: int, step_ms: float) -> dict[str, Any]:
    batch = arguments.batch or batch_for(arguments, workers, step_ms)
    sets, steps = sets_of(arguments, workers, batch), max(40, int(1000 * TIMED_S / step_ms))
    pairs = []
    for number in range(arguments.pairs):
        kinds = (plain, ours)[:: -1 if number % 2 else 1]
        pair: dict[str, float] = {}
        for kind in kinds:
            pair |= kind(arguments, sets, steps)
        pairs.append(pair)
    return {"workers": workers, "asked_ms": step_ms, "batch": batch, "pairs": pairs}


def row_of(result: dict[str, Any]) -> str:
    """One line of the table."""
    pairs = result["pairs"]

    def median(name: str) -> float:
        return statistics.median(pair[name] for pair in pairs)

    def over(name: str) -> str:
        ratios = sorted(100 * (pair["ftrain_ms"] / pair[name] - 1) for pair in pairs)
        return f"{statistics.median(ratios):+6.1f} % ({ratios[0]:+.1f} to {ratios[-1]:+.1f})"

    cells = [f"{result['workers']:7} {result['asked_ms']:6g} {result['batch']:7}"]
    cells += [f"{median(name):9.2f}" for name in ("waited_ms", "ahead_ms", "ftrain_ms")]
    return "  ".join([*cells, f"{over('waited_ms'):30}", over("ahead_ms")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps-ms", type=float, nargs="+", default=[2, 5, 20, 50, 200])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--platform", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--width", type=int, default=256, help="of the model's layers")
    parser.add_argument("--batch", type=int, default=0, help="instead of one that is searched for")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-overhead"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-overhead.json"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    print("workers   step   batch  waited ms   ahead ms  ftrain ms  over waited (range)", end="")
    print(f"{'':13}over ahead (range)", flush=True)
    results = []
    for workers in arguments.workers:
        for step_ms in arguments.steps_ms:
            results.append(measure(arguments, workers, step_ms))
            print(row_of(results[-1]), flush=True)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
