"""One config twice: undisturbed, and with worker 0, then 2, then 1 and 3 at once killed by SIGKILL.

    python scripts/bench/three_kills.py configs/digits.yaml --at 40 150 260

Compares the two runs: exit codes, steps, restores, who came back, digests, the last losses.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.runs import Run, running

KILLS = ([0], [2], [1, 3])


def summary(name: str, run: Run, code: int, seconds: float) -> dict[int, dict]:
    rows = run.metrics()
    due = [r["step"] for r in rows if "digest" in r]
    agreed = {e["step"] for e in run.events("digest_agreed")}
    back = [e["worker"] for e in run.events("state_synced") if e["step"] > 0]
    once = [r["step"] for r in rows] == list(range(1, rows[-1]["step"] + 1))
    evals = {k: v for k, v in rows[-1].items() if k.startswith("eval_")}
    print(
        f"{name}: exit {code}, {seconds:.1f} s, {len(rows)} steps each once: {once}, restores "
        f"{len(run.events('checkpoint_restored'))}, came back {sorted(back)}, digests agreed "
        f"{len(agreed & set(due))} of {len(due)}, last loss {rows[-1]['loss']:.6f}, {evals}"
    )
    return {r["step"]: r for r in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--at", type=int, nargs=3, default=[40, 150, 260])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-three-kills"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    results = []
    for name in ("undisturbed", "killed"):
        folder = arguments.run_dir / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with running(arguments.config, folder, "digest_every_steps=10", *arguments.set) as run:
            for step, workers in zip(arguments.at, KILLS, strict=True):
                if name == "killed":
                    run.wait_for_step(step)
                    run.kill(*workers)
            code = run.finish(600)
            results.append(summary(name, run, code, time.monotonic() - started))
            if name == "killed":
                print(run.output)
    calm, killed = results
    apart = max(abs(calm[s]["loss"] - killed[s]["loss"]) for s in calm)
    print(f"largest difference of a step's loss between the two: {apart:.2e}")


if __name__ == "__main__":
    main()
