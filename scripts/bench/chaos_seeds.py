"""Runs configs under `ftrain chaos` with one seed after another and prints each verdict.

    python scripts/bench/chaos_seeds.py
    python scripts/bench/chaos_seeds.py --digits 3 --chars 0 --for 30s

Every kind of fault that the machine allows is drawn. Each run's screen is kept beside its folder.
Exit 0 if every verdict is good.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

SETS = (
    "steps=1000000",
    "cluster.heartbeat_timeout_s=5",
    "cluster.hang_timeout_s=6",
    "checkpoint.every_steps=25",
    "restart.max_failures=1000",
    "restart.backoff_max_s=2",
    "digest_every_steps=10",
)


def chaos(config: str, seed: int, run_dir: Path, arguments: argparse.Namespace) -> dict:
    """One run; what the table has of it."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "ftrain.cli", "chaos", f"configs/{config}.yaml"]
    argv += ["--run-dir", str(run_dir), "--seed", str(seed), "--every", arguments.every]
    argv += [
        "--for",
        arguments.for_s,
        *(["--faults", arguments.faults] if arguments.faults else []),
    ]
    for item in SETS:
        argv += ["--set", item]
    started = time.monotonic()
    with open(f"{run_dir}.out", "w") as out:
        code = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT).returncode
    rows = [json.loads(x) for x in (run_dir / "events.jsonl").read_text().splitlines()]
    named = collections.Counter(r["event"] for r in rows)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {
        "config": config,
        "seed": seed,
        "verdict": "good" if code == 0 else "BAD",
        "faults": named["fault_injected"],
        "deaths": sum(r["event"] == "worker_exited" and "signal" in r for r in rows),
        "restores": named["checkpoint_restored"],
        "step": json.loads(lines[-1])["step"],
        "seconds": round(time.monotonic() - started),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digits", type=int, default=10, help="seeds of configs/digits.yaml")
    parser.add_argument("--chars", type=int, default=3, help="seeds of configs/chars.yaml")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--every", default="8s")
    parser.add_argument("--for", dest="for_s", default="60s")
    parser.add_argument("--faults", default="", help="kinds, instead of all")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/chaos-seeds"))
    arguments = parser.parse_args()
    rows = []
    for config, count in (("digits", arguments.digits), ("chars", arguments.chars)):
        for seed in range(arguments.first_seed, arguments.first_seed + count):
            rows.append(chaos(config, seed, arguments.run_dir / f"{config}-{seed}", arguments))
            if len(rows) == 1:
                print("".join(f"{name:>9}" for name in rows[0]))
            print("".join(f"{value:>9}" for value in rows[-1].values()), flush=True)
    (arguments.run_dir / "bench.json").write_text(json.dumps(rows, indent=1))
    return int(any(row["verdict"] != "good" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
