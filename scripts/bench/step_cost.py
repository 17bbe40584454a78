"""What a setting costs: step times of runs without and with it, taken in turns.

    python scripts/bench/step_cost.py configs/digits.yaml --without reduction=fast \\
        --with reduction=reproducible --set batch_shards=4
    python scripts/bench/step_cost.py configs/digits.yaml --without digest_every_steps=0 \\
        --with digest_every_steps=1

Each pair is a run of each kind, one after the other, in the order that alternates; prints the
median step time of each and the median of the pairs' ratios.
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
    parser.add_argument("--without", required=True, help="key=value of the runs without it")
    parser.add_argument("--with", required=True, dest="with_it", help="key=value of those with it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-step-cost"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    kinds = (arguments.without, arguments.with_it)
    rows: list[dict[str, float]] = []
    for pair in range(arguments.pairs):
        row = {}
        for kind in kinds[:: 1 if pair % 2 else -1]:
            sets = [
                kind,
                f"steps={arguments.steps}",
                "checkpoint.every_steps=0",
                f"compile_cache={arguments.run_dir / 'compile_cache'}",
                *arguments.set,
            ]
            row[kind] = step_time_s(arguments.config, arguments.run_dir / "run", sets)
        rows.append(row)
    for kind in kinds:
        seen = [1e3 * row[kind] for row in rows]
        print(
            f"{kind}: median {statistics.median(seen):.2f} ms, {min(seen):.2f} to {max(seen):.2f}"
        )
    ratios = [row[arguments.with_it] / row[arguments.without] for row in rows]
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
