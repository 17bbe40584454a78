"""Kills and brings back one worker many times, and watches what a survivor holds on to.

    python scripts/bench/cycles.py configs/digits.yaml --cycles 50

Descriptors, threads and resident memory of worker 1 while worker 3 dies and returns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.runs import running


def held_by(pid: int) -> dict[str, int]:
    """What a process holds."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss_mb": int(status["VmRSS"].split()[0]) // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--victim", type=int, default=3)
    parser.add_argument("--survivor", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-cycles"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    arguments.run_dir.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with running(arguments.config, arguments.run_dir, "steps=1000000", *arguments.set) as run:
        run.wait_for_step(20)
        pid = run.pid(arguments.survivor)
        for cycle in range(arguments.cycles):
            seen, before = len(run.events()), len(run.metrics())
            run.kill(arguments.victim)
            run.wait_back(arguments.victim, seen)
            run.wait_until(
                "a commit of all",
                lambda b=before: (
                    any(arguments.victim not in m["workers"] for m in run.metrics()[b:])
                    and arguments.victim in run.metrics()[-1]["workers"]
                ),
            )
            run.wait_for_step(run.metrics()[-1]["step"] + 15)  # the victim's budget is renewed
            rows.append(held_by(pid))
            if cycle in (0, 1, 2) or (cycle + 1) % 5 == 0:
                print(f"cycle {cycle + 1:3}", rows[-1], flush=True)
        assert run.pid(arguments.survivor) == pid
        os.kill(run.process.pid, signal.SIGTERM)
        print("exit code", run.finish())
    (arguments.run_dir / "cycles.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
