"""A run's records as a test writes them: a good run with faults in it, to be altered and judged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from ftrain.config import Config

Row = dict[str, Any]
T0 = 1_700_000_000.0
BATCH = 12


def config(**changes: Any) -> Row:
    """Of a run of two workers."""
    return Config.model_validate(
        {
            "trainer": "a.py:A",
            "run_dir": "r",
            "steps": 20,
            "batch_size": BATCH,
            "digest_every_steps": 5,
            "cluster": {"workers": 2, "hang_timeout_s": 20.0},
            **changes,
        }
    ).model_dump()


class Written:
    """Records in the making. Time stands still until `wait`; a step takes a second."""

    def __init__(self, **changes: Any):
        self.events: list[Row] = []
        self.metrics: list[Row] = []
        self.saved: set[int] = set()
        self.t, self.step, self.highest = T0, 0, 0
        self.workers = [0, 1]
        self._config, self._incarnations = config(**changes), [-1, -1]

    def wait(self, seconds: float) -> None:
        self.t += seconds

    def event(self, event: str, **fields: Any) -> Row:
        self.events.append({"t": self.t, "event": event, **fields})
        return self.events[-1]

    def pid(self, worker: int) -> int:
        return 100 + 10 * worker + self._incarnations[worker]

    def start(self) -> None:
        """A supervisor and everything else, up to the first view."""
        self.event("run_started", config=self._config, changed={})
        self.event("target_known", steps=20, samples=None, dataset_length=1000)
        self.start_all()

    def start_all(self) -> None:
        self.event("coordinator_started", pid=99, address="a")
        for worker in (0, 1):
            self.start_worker(worker)
        self.wait(3)
        for worker in (0, 1):
            self.event(
                "worker_ready",
                worker=worker,
                pid=self.pid(worker),
                seconds=3.0,
                cpu_s=1.0,
                compile_s=1.0,
            )

    def start_worker(self, worker: int) -> None:
        self._incarnations[worker] += 1
        self.event(
            "worker_started",
            worker=worker,
            pid=self.pid(worker),
            incarnation=self._incarnations[worker],
        )

    def view(self, *workers: int, seconds: float = 0.5) -> None:
        self.wait(seconds)
        self.workers = list(workers)
        self.event(
            "view_changed",
            workers=self.workers,
            step=self.step,
            seconds=seconds,
            sync_s=seconds / 2,
            connect_s=seconds / 4,
        )

    def steps(self, last: int) -> None:
        """Committed steps up to `last`."""
        while self.step < last:
            self.wait(1.0)
            self.step += 1
            row = {
                "t": self.t,
                "step": self.step,
                "loss": 1.0 / self.step,
                "samples": self.step * BATCH,
                "workers": self.workers,
                "step_time_s": 0.9,
            }
            if self.step % 5 == 0:
                row["digest"] = f"{self.step:064x}"
                self.event(
                    "digest_agreed", step=self.step, workers=self.workers, digest=row["digest"]
                )
            if self.step <= self.highest:
                row["rewound"] = True
            self.highest = max(self.step, self.highest)
            self.metrics.append(row)

    def exit(self, worker: int, reason: str = "SIGKILL", *, fenced: bool = True) -> None:
        self.event(
            "worker_exited", worker=worker, pid=self.pid(worker), signal="SIGKILL", reason=reason
        )
        if fenced:
            self.event("worker_fenced", worker=worker)

    def die_and_return(self, worker: int, stuck_s: float = 0.0) -> None:
        """In the middle of a step; the other goes on, and it comes back two steps later."""
        self.wait(0.5)
        if stuck_s:
            self.wait(stuck_s)
            self.event("hang_detected", worker=worker, phase="update", seconds=stuck_s)
        self.exit(worker, "no progress" if stuck_s else "SIGKILL")
        self.wait(0.1)
        self.event("step_aborted", step=self.step + 1, failed=[worker], seconds=0.6 + stuck_s)
        self.view(1 - worker)
        self.start_worker(worker)
        self.steps(self.step + 2)
        self.event(
            "worker_ready",
            worker=worker,
            pid=self.pid(worker),
            seconds=2.0,
            cpu_s=1.0,
            compile_s=0.0,
        )
        self.event(
            "state_synced",
            worker=worker,
            donor=1 - worker,
            step=self.step,
            bytes=8,
            seconds=0.2,
            digest="aa",
        )
        self.view(0, 1)

    def save(self) -> None:
        self.saved.add(self.step)
        self.event("checkpoint_saved", step=self.step, seconds=0.1, tier="disk")

    def lose_all(self, restored: int) -> None:
        """The coordinator dies; everything comes back from a checkpoint."""
        self.wait(0.5)
        self.event("coordinator_exited", pid=99, signal="SIGKILL")
        for worker in (0, 1):
            self.exit(worker, "the coordinator's death", fenced=False)
        self.start_all()
        self.restore(restored)

    def restore(self, step: int) -> None:
        if step:
            self.event("checkpoint_restored", step=step, tier="disk")
        self.step = step
        self.view(0, 1)

    def finish(self, code: int = 0, reason: str = "") -> None:
        self.wait(1.0)
        for worker in (0, 1):
            self.exit(worker, "the end of the run")
        self.event(
            "run_finished",
            step=self.step,
            exit_code=code,
            reason=reason or f"step {self.step} is reached and saved",
        )

    def copy(self) -> Written:
        return copy.deepcopy(self)

    def named(self, name: str) -> list[Row]:
        return [e for e in self.events if e["event"] == name]

    def write(self, run_dir: Path) -> Path:
        """The run directory, with its checkpoints as empty folders."""
        run_dir.mkdir(parents=True, exist_ok=True)
        for name, rows in (("events.jsonl", self.events), ("metrics.jsonl", self.metrics)):
            (run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in self.saved:
            (run_dir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        return run_dir


def good_run() -> Written:
    """Two supervisors' lives, a death, a hang, a rewind, and the end."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(6)
    run.die_and_return(1)
    run.steps(10)
    run.save()
    run.steps(11)
    run.die_and_return(0, stuck_s=20.5)
    run.lose_all(restored=10)
    run.steps(12)
    run.wait(100.0)  # the supervisor died with all of it
    run.start()
    run.restore(10)
    run.steps(20)
    run.save()
    run.finish()
    return run
