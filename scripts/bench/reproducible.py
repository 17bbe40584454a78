"""Whether `reduction: reproducible` keeps its word: recipes x workers x faults, one digest each.

    python scripts/bench/reproducible.py --steps 120 --kills 5

Every run of a recipe must commit the losses, metrics and digests of the first, which is one worker
undisturbed. Prints a row a run; exits 1 if any differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.runs import Run, running


def lines(run: Run) -> dict[int, dict[str, Any]]:
    """What was committed, by step, but for who, when and whether again: the later line counts."""
    return {
        row["step"]: {
            k: v for k, v in row.items() if k not in ("t", "workers", "step_time_s", "rewound")
        }
        for row in run.metrics()
    }


def disturb(run: Run, kills: int, steps: int, seed: int) -> None:
    """Kills workers that train, spread over the run; the last one's death is a rewind."""
    draw = random.Random(seed)
    for number in range(1, kills + 1):
        run.wait_for_step(number * steps // (kills + 1))
        victim = draw.choice(run.metrics()[-1]["workers"])
        seen = len(run.events())
        run.kill(victim)
        run.wait_for_event("worker_started", after=seen, worker=victim)
        run.wait_for_event("view_changed", after=seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", default=["configs/digits.yaml", "configs/chars.yaml"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-reproducible"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    differ = False
    for config in arguments.configs:
        reference = None
        for workers in arguments.workers:
            for kills in (0, arguments.kills):
                folder = arguments.run_dir / Path(config).stem / f"{workers}-workers-{kills}-kills"
                folder.parent.mkdir(parents=True, exist_ok=True)
                sets = [
                    "reduction=reproducible",
                    f"steps={arguments.steps}",
                    f"cluster.workers={workers}",
                    "digest_every_steps=10",
                    "checkpoint.every_steps=10",
                    *arguments.set,
                ]
                with running(config, folder, *sets) as run:
                    disturb(run, kills, arguments.steps, workers)
                    code, rows = run.finish(1800), lines(run)
                reference = reference or rows
                last = rows[max(rows)]
                same = code == 0 and rows == reference
                differ |= not same
                print(
                    f"{Path(config).stem:8} {workers} workers, {kills} kills: exit {code}, "
                    f"{len(rows)} steps, {len({tuple(m['workers']) for m in run.metrics()})} sets "
                    f"of workers, loss {last['loss']:.9f}, digest {last['digest'][:16]} "
                    f"{'same' if same else 'DIFFERS'}",
                    flush=True,
                )
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
