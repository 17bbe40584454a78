"""Two runs of one config side by side: how they ended, and what one went through.

python scripts/bench/side_by_side.py RUN_DIR RUN_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def rows(run_dir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, str]:
    """What is compared, as it is shown."""
    events, metrics = rows(run_dir, "events.jsonl"), rows(run_dir, "metrics.jsonl")
    last = metrics[-1]
    deaths = [e for e in events if e["event"] == "worker_exited"]
    deaths = [e for e in deaths if e["reason"] != "the end of the run"]
    coordinators = [e for e in events if e["event"] == "coordinator_exited"]
    # Of the last tenth: one step's loss is of one batch.
    tail = metrics[-max(1, len(metrics) // 10) :]
    shown = {
        "steps": f"{last['step']}",
        "samples": f"{last['samples']:,}",
        "loss of the last tenth": f"{sum(m['loss'] for m in tail) / len(tail):.5f}",
    }
    shown |= {k.removeprefix("eval_"): f"{last[k]:.4f}" for k in last if k.startswith("eval_")}
    return shown | {
        "worker deaths": str(len(deaths)),
        "coordinator deaths": str(len(coordinators)),
        "seconds": f"{events[-1]['t'] - events[0]['t']:.1f}",
    }


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:]]
    sides = [summary(folder) for folder in folders]
    print(f"{'':24}" + "".join(f"{folder.name:>14}" for folder in folders))
    for name in sides[0]:
        print(f"{name:24}" + "".join(f"{side.get(name, ''):>14}" for side in sides))


if __name__ == "__main__":
    main()
