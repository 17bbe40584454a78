"""What workers report, as the run's records: each commit once, each fact once, replicas compared.

Every member of a view reports every commit, so that a line survives the death of the worker that
computed it. The recorder writes the first and holds the others against it.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ftrain.events import METRICS_FILE, EventLog, LineFile, read_lines

if TYPE_CHECKING:
    from ftrain.lease import Lease

SPENT_EVERY_S = 10.0
Record = dict[str, Any]
OPEN_DIGESTS = 100  # steps whose comparison waits for a worker's report


class Recorder:
    """Turns records of workers into lines of `metrics.jsonl` and `events.jsonl`.

    Args:
      run_dir: the run's folder.
      log: its event log.
      tell: called as tell(kind, fields) with each fact that is new, for the screen.
      lease: the head's, of a run over several hosts.
    """

    def __init__(
        self,
        run_dir: str,
        log: EventLog,
        tell: Callable[[str, Record], None],
        lease: Lease | None = None,
    ):
        staging = lease and lease.staging
        self._metrics = LineFile(os.path.join(run_dir, METRICS_FILE), staging)
        self._holder, self._history = lease.claim.holder if lease else "", (-1, -1)
        self._log, self._tell = log, tell
        self.step = max((row["step"] for row in read_lines(self._metrics.path)), default=0)
        self.highest = self.step  # over all lineages
        self.workers: list[int] = []  # who committed the newest step
        self.committed = False  # whether this supervisor has seen a commit
        self.aborts = 0  # failed attempts, all
        self.aborts_in_place = 0  # failed attempts at one step with nobody dead
        self._lineage = (0, 0)
        self._held: Record | None = None  # a line that waits for its evaluation
        self._seen: set[tuple[Any, ...]] = set()
        # (generation, lineage, step) -> worker -> digest
        self._digests: dict[tuple[int, ...], dict[int, str]] = {}
        # Of the lowest worker's steps, since `time_spent` was written last.
        self._spent: collections.Counter[str] = collections.Counter()
        self._spent_steps, self._spent_t = 0, float("inf")

    def take(self, worker: int, record: Record, generation: int = 0) -> None:
        """Takes in a record. `generation` counts coordinators: each begins lineages anew."""
        kind = record.pop("record")
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(worker, record, generation)
        else:
            self._tell(kind, {"worker": worker, **record})

    def close(self) -> None:
        """Writes what was held back."""
        self._write_held({})
        self._write_spent()

    def _on_commit(self, worker: int, record: Record, generation: int) -> None:
        lineage = (generation, record.pop("lineage"))
        if lineage < self._lineage:
            return  # from a history that was given up, read late from a dead worker's pipe
        step = record["step"]
        digest = record["metrics"].pop("digest", None)
        skipped, spent = record.pop("skipped", None), record.pop("spent", {})
        if worker == min(record["workers"]):
            self._add_spent(spent, record["t"])
        if digest:
            self._compare(worker, (*lineage, step), digest, record["workers"])
        if lineage == self._lineage and step <= self.step:
            return
        rewound = step <= self.highest
        self._lineage, self.step, self.highest = lineage, step, max(step, self.highest)
        self.committed, self.aborts_in_place, self.workers = True, 0, record["workers"]
        metrics = record.pop("metrics")
        eval_due = record.pop("eval_due")
        line = {
            "t": record["t"],
            "step": step,
            "loss": metrics.pop("loss"),
            **{k: record[k] for k in ("samples", "workers", "step_time_s")},
            **metrics,
        }
        if digest:
            line["digest"] = digest
        if rewound:
            line["rewound"] = True  # this line takes the place of an earlier one
        self._write_held({})
        self._held = line
        if not eval_due:
            self._write_held({})
        self._tell("commit", line)
        if skipped:
            self._event("step_skipped", {**record, **skipped}, "step", "shards", "workers", "what")

    def _add_spent(self, spent: dict[str, float], t: float) -> None:
        self._spent.update(spent)
        self._spent_steps += 1
        self._spent_t = min(t, self._spent_t)
        if t > self._spent_t + SPENT_EVERY_S:
            self._write_spent()

    def _write_spent(self) -> None:
        if self._spent_steps:
            seconds = {phase: round(s, 6) for phase, s in self._spent.items()}
            fields = {"step": self.step, "steps": self._spent_steps, "seconds": seconds}
            self._log("time_spent", **fields)
            self._tell("time_spent", fields)
        self._spent.clear()
        self._spent_steps, self._spent_t = 0, float("inf")

    def _write_held(self, evaluated: dict[str, float]) -> None:
        if self._held is not None:
            self._metrics.append({**self._held, **{f"eval_{k}": v for k, v in evaluated.items()}})
            self._held = None

    def _compare(
        self, worker: int, at: tuple[int, ...], digest: str, workers: Sequence[int]
    ) -> None:
        """Holds the digests of one step, of one history, against one another: for the record.

        The workers do so too and act on it (`replicas`).
        """
        seen, step = self._digests.setdefault(at, {}), at[-1]
        seen[worker] = digest
        if len(set(seen.values())) > 1:
            if self._first("replicas_differ", at):
                self._log("replicas_differ", step=step, digests=dict(sorted(seen.items())))
        elif set(seen) >= set(workers):
            self._log("digest_agreed", step=step, workers=sorted(seen), digest=digest)
            del self._digests[at]
        # One that a dead worker leaves open may be completed yet: by a host that was cut off.
        while len(self._digests) > OPEN_DIGESTS:
            del self._digests[next(iter(self._digests))]

    def _on_evaluated(self, worker: int, record: Record, generation: int) -> None:
        if self._first("evaluated", generation, self._lineage, record["step"]):
            if self._held is not None and self._held["step"] == record["step"]:
                self._write_held(record["metrics"])
            self._event("evaluated", record, "step", "metrics", "seconds")

    def _on_view_changed(self, worker: int, record: Record, generation: int) -> None:
        if self._first("view", record["view"]):
            if self._holder:
                self._begin_history(generation, record)
            parts = "connect_s", "sync_s"
            self._event("view_changed", record, "workers", "step", "seconds", *parts)

    def _begin_history(self, generation: int, record: Record) -> None:
        """The name is that which its snapshots carry (see `history`)."""
        history = generation, record["lineage"]
        if history > self._history:
            self._history = history
            name = ".".join(map(str, (self._holder, *history)))
            self._event("history_began", {**record, "history": name}, "history", "step")

    def _on_attempt_failed(self, worker: int, record: Record, generation: int) -> None:
        self._event("attempt_failed", {"worker": worker, **record}, "worker", "reason")

    def _on_step_aborted(self, worker: int, record: Record, generation: int) -> None:
        if self._first("aborted", record["view"]):
            self.aborts += 1
            self.aborts_in_place = 0 if record["failed"] else self.aborts_in_place + 1
            self._event("step_aborted", record, "step", "failed", "seconds")

    def _on_state_synced(self, worker: int, record: Record, generation: int) -> None:
        self._event(
            "state_synced",
            {"worker": worker, **record},
            "worker",
            "donor",
            "step",
            "bytes",
            "seconds",
            "digest",
        )

    def _on_target_known(self, worker: int, record: Record, generation: int) -> None:
        if self._first("target_known"):
            self._event("target_known", record, "steps", "samples", "dataset_length")

    def _on_checkpoint_saved(self, worker: int, record: Record, generation: int) -> None:
        self._event("checkpoint_saved", record, "step", "seconds", "tier")

    def _on_checkpoint_restored(self, worker: int, record: Record, generation: int) -> None:
        self._event("checkpoint_restored", record, "step", "tier")

    def _on_checkpoint_skipped(self, worker: int, record: Record, generation: int) -> None:
        self._event("checkpoint_skipped", record, "step", "why", "tier")

    def _on_memory_full(self, worker: int, record: Record, generation: int) -> None:
        if self._first("memory_full"):
            self._event("memory_full", record, "folder", "error", "instead")

    def _on_snapshot_failed(self, worker: int, record: Record, generation: int) -> None:
        if self._first("snapshot_failed", record["error"]):
            self._event("snapshot_failed", record, "step", "error")

    def _on_save_failed(self, worker: int, record: Record, generation: int) -> None:
        self._event("save_failed", record, "step", "error")

    def _on_parameters_loaded(self, worker: int, record: Record, generation: int) -> None:
        self._event("parameters_loaded", record, "source", "leaves", "fresh", "unused")

    def _first(self, *what: Any) -> bool:
        new = what not in self._seen
        self._seen.add(what)
        return new

    def _event(self, name: str, record: Record, *fields: str) -> None:
        chosen = {k: record[k] for k in fields}
        self._log(name, t=record["t"], **chosen)  # when it happened, not when it was heard of
        self._tell(name, {**chosen, "t": record["t"]})


def write_late(run_dir: str, staging: str, commits: Sequence[tuple[int, Record]]) -> list[int]:
    """Adds commits that the head was told of, or was to be, when it was lost.

    Args:
      run_dir: the run's folder.
      staging: of the lease.
      commits: (worker, record), of one history, as workers reported them.

    Returns:
      The first and last step that were missing, or nothing.
    """
    file = LineFile(os.path.join(run_dir, METRICS_FILE), staging)
    newest = max((row["step"] for row in read_lines(file.path)), default=0)
    last = newest
    for _, record in sorted(commits, key=lambda told: told[1]["step"]):
        if record["step"] == last + 1:  # what does not follow is of another history
            last += 1
            metrics = dict(record["metrics"])
            chosen = {k: record[k] for k in ("samples", "workers", "step_time_s")}
            loss = metrics.pop("loss")
            file.append({"t": record["t"], "step": last, "loss": loss, **chosen, **metrics})
    file.close()
    return [newest + 1, last] if last > newest else []
