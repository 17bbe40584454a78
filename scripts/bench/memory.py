"""What each way to commit takes of a worker's memory, as a multiple of the state.

    python scripts/bench/memory.py

One worker on CPU, whose state is much larger than all else; the peak of its resident memory
without that of the same worker with a small state. A snapshot in memory would come on top.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.runs import running

CONFIG = "scripts/bench/sized.yaml"


def peak_bytes(folder: Path, width: int, commit: str) -> int:
    """The peak of the worker's resident memory after some steps."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    sets = [f"trainer_args={{width: {width}, layers: 3}}", f"commit={commit}", "steps=100000"]
    with running(CONFIG, folder, *sets, "batch_size=48", "digest_every_steps=0") as run:
        run.wait_for_step(15)
        status = Path(f"/proc/{run.events('worker_ready')[0]['pid']}/status").read_text()
        os.kill(run.process.pid, signal.SIGTERM)
        run.finish(120)
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2500)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-memory"))
    arguments = parser.parse_args()
    width = arguments.width
    state = 3 * 4 * (64 * width + 2 * width * width + 10 * width)  # parameters, and two moments
    for commit in ("ahead", "lean"):
        small, large = (peak_bytes(arguments.run_dir / "run", w, commit) for w in (16, width))
        peak = large - small
        print(f"{commit}: {peak / 1e6:.0f} MB, {peak / state:.2f} times the state", flush=True)


if __name__ == "__main__":
    main()
