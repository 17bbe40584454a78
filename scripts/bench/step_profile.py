"""Where a step's time goes: the phases of its lowest worker, and the CPU time of every process.

    python scripts/bench/step_profile.py scripts/bench/sized.yaml --set cluster.workers=4

Phases are what a worker has told the supervisor itself (`time_spent`); CPU time is the kernel's, of
the whole process, between two commits far apart. Prints milliseconds a step.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.runs import Run, running

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
WARM_UP = 60


def processes(root: int) -> dict[int, str]:
    """The processes of a run, by pid: the module that each runs, workers by their number."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(") ")[1].split()[1]
            )
            lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended
    found, todo = {}, [root]
    while todo:
        pid = todo.pop()
        found[pid] = next((w for w in lines[pid].split() if w.startswith("ftrain.")), "supervisor")
        todo += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_ms(pid: int) -> float:
    """CPU time that a process has taken so far."""
    stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(stat[11]) + int(stat[12])) * TICK_MS


def spent(run: Run, since: float) -> tuple[collections.Counter[str], int]:
    """Milliseconds by phase of the steps after that time, and how many steps."""
    total, steps = collections.Counter(), 0
    for event in run.events("time_spent"):
        if event["t"] > since:
            total.update({phase: 1000 * s for phase, s in event["seconds"].items()})
            steps += event["steps"]
    return total, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-step-profile"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-step-profile.json"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    arguments.run_dir.parent.mkdir(parents=True, exist_ok=True)
    with running(arguments.config, arguments.run_dir, "steps=1000000", *arguments.set) as run:
        run.wait_for_step(WARM_UP)
        workers = {e["pid"]: f"worker {e['worker']}" for e in run.events("worker_ready")}
        names = {p: workers.get(p, name) for p, name in processes(run.process.pid).items()}
        before = {pid: cpu_ms(pid) for pid in names}
        first = run.metrics()[-1]
        run.wait_for_step(first["step"] + arguments.steps)
        last, after = run.metrics()[-1], {pid: cpu_ms(pid) for pid in names}
        os.kill(run.process.pid, signal.SIGTERM)
        run.finish(60)
        phases, told = spent(run, first["t"])
    steps = last["step"] - first["step"]
    rows = {
        "step_ms": 1000 * (last["t"] - first["t"]) / steps,
        "phases_ms": {phase: ms / told for phase, ms in phases.most_common() if ms},
        "cpu_ms": {names[pid]: (after[pid] - before[pid]) / steps for pid in names},
    }
    print(f"a step: {rows['step_ms']:.2f} ms, over {steps} steps")
    for title in ("phases_ms", "cpu_ms"):
        print(title)
        for name, value in rows[title].items():
            print(f"  {name:24} {value:7.3f}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
