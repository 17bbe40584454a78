"""What `reduction: reproducible` costs beside `fast`: step times of the two, taken in turns.

    python scripts/bench/reduction_cost.py configs/digits.yaml --pairs 5

With as many shards as workers, and with three times as many; the batch is the config's. Each pair
is a run of each kind, one after the other, in the order that alternates; prints the median step
time of each and the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.runs import running

WARM_UP = 20  # steps that compile what a view needs, or wait for it


def step_time_s(config: str, folder: Path, sets: list[str]) -> float:
    """The median step of one run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with running(config, folder, *sets) as run:
        if run.finish(1800) != 0:
            raise SystemExit(run.output)
        return statistics.median(m["step_time_s"] for m in run.metrics()[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-reduction-cost"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    for times in (1, 3):
        shards = times * arguments.workers
        rows: list[dict[str, float]] = []
        for pair in range(arguments.pairs):
            row = {}
            for reduction in ("fast", "reproducible")[:: 1 if pair % 2 else -1]:
                sets = [
                    f"reduction={reduction}",
                    f"steps={arguments.steps}",
                    f"batch_shards={shards}",
                    f"cluster.workers={arguments.workers}",
                    "digest_every_steps=0",
                    "checkpoint.every_steps=0",
                    f"compile_cache={arguments.run_dir / 'compile_cache'}",
                    *arguments.set,
                ]
                row[reduction] = step_time_s(arguments.config, arguments.run_dir / "run", sets)
            rows.append(row)
        ratios = [row["reproducible"] / row["fast"] for row in rows]
        for reduction in ("fast", "reproducible"):
            seen = [1e3 * row[reduction] for row in rows]
            print(
                f"{arguments.workers} workers, {shards} shards, {reduction:12} median "
                f"{statistics.median(seen):.2f} ms a step, {min(seen):.2f} to {max(seen):.2f}"
            )
        print(
            f"reproducible / fast: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to "
            f"{max(ratios):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
