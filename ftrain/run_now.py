"""Where a run is, at one moment: what the screen, `ftrain status` and `status.json` show. Pure.

`run_dir/status.json` is a RunNow that the supervisor writes anew about once a second, whole, by
renaming it into place. It is for looking at a live run: the phases in it are of the workers' beats,
which no record has. Whoever reads it looks at `t` first: the file of a supervisor that died or was
stopped stays as it was. After the end the records say the same and more.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from ftrain.events import to_json

STATUS_FILE = "status.json"
FRESH_S = 5.0  # older than that, its supervisor is not writing


@dataclasses.dataclass
class WorkerNow:
    """One worker.

    Attributes:
      worker: its id.
      state: starting, ready, syncing, training, waiting, saving, stuck, down, quarantined or ended.
      incarnation: starts so far, from 0; -1 before the first.
      pid: of its process, None while it has none.
      phase: of its beat, "" if that is not known.
      phase_s: how long it has been in that.
      deaths: so far, in this session and those before.
      fault: what it died of last, "" if it never did.
      fault_t: when, unix seconds.
    """

    worker: int
    state: str = "starting"
    incarnation: int = -1
    pid: int | None = None
    phase: str = ""
    phase_s: float = 0.0
    deaths: int = 0
    fault: str = ""
    fault_t: float | None = None


@dataclasses.dataclass
class RunNow:
    """A run at one moment.

    Attributes:
      t: that moment, unix seconds.
      run_dir: of the run.
      pid: of its supervisor, None if that is not known.
      state: starting, training, waiting (below min_workers), stopping, finished, or, seen from
        outside, silent (its supervisor lives and does not write) or dead.
      step, target: committed steps, and at the end; target is None until a worker has the data.
      samples: the cursor.
      loss: of the newest step; None if there is none or it is not finite.
      samples_per_s: over the last ten seconds.
      eta_s: to the target at that speed, None if that is not known.
      goodput, wall_s, parts: see `goodput`.
      checkpoint, checkpoint_t: the newest that was saved, and when; None without.
      evaluated: the newest evaluation, {"step": ..., metrics}; {} without.
      deaths: of workers, in all.
      exit_code, reason: of the run once it has ended.
      workers: all, by id.
    """

    t: float
    run_dir: str
    pid: int | None
    state: str
    step: int
    target: int | None
    samples: int
    loss: float | None
    samples_per_s: float
    eta_s: float | None
    goodput: float
    wall_s: float
    parts: dict[str, float]
    checkpoint: int | None
    checkpoint_t: float | None
    evaluated: dict[str, Any]
    deaths: int
    exit_code: int | None
    reason: str
    workers: list[WorkerNow]

    def to_json(self) -> str:
        """On one line; what is not finite is null."""
        return to_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunNow:
        """The RunNow that `to_json` was called on."""
        values = json.loads(text)
        return cls(**{**values, "workers": [WorkerNow(**w) for w in values["workers"]]})

    def write(self, write: Callable[[str, bytes], None] | None = None) -> None:
        """Writes `status.json`. A reader sees this one or the one before, whole.

        Args:
          write: does it, of a head with a lease.
        """
        path = os.path.join(self.run_dir, STATUS_FILE)
        if write is not None:
            write(path, self.to_json().encode())
            return
        with open(path + ".part", "w", encoding="utf-8") as file:
            file.write(self.to_json())
        os.replace(path + ".part", path)
