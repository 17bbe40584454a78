"""`tensorboard`: event files of the committed steps, for TensorBoard."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from tensorboardX import SummaryWriter

if TYPE_CHECKING:
    from ftrain.config import Config

NOT_SHOWN = {"t", "step", "digest", "rewound", "workers"}


class TensorBoard:
    """Writes a scalar for each number of a committed step; a sink, see `sink_process`."""

    def __init__(self, config: Config):
        is_folder = isinstance(config.tensorboard, str)
        self._folder = (
            config.tensorboard if is_folder else os.path.join(config.run_dir, "tensorboard")
        )
        self._writer: SummaryWriter | None = None

    def commit(self, line: dict[str, Any]) -> None:
        """A committed step. One that was committed before takes the place of what followed it."""
        step = line["step"]
        if self._writer is None or (line.get("rewound") and step <= self._last):
            self._open(step)
        self._last = step
        for name in line.keys() - NOT_SHOWN:
            if line[name] is not None:  # nan and infinite are null in the records
                group = name.replace("eval_", "eval/", 1) if name.startswith("eval_") else name
                self._writer.add_scalar(group, line[name], step, walltime=line["t"])
        self._writer.add_scalar("workers", len(line["workers"]), step, walltime=line["t"])

    def event(self, row: dict[str, Any]) -> None:
        """Faults are in `events.jsonl` and `ftrain report`; here their cost is seen."""

    def flush(self) -> None:
        """What has come is on disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> None:
        """A new file, which tells TensorBoard to forget `step` and all later ones of files before.

        So steps that were repeated, or written twice as a process died, are shown once.
        """
        self.close()
        self._writer = SummaryWriter(
            self._folder,
            purge_step=step,
            # The name has whole seconds only, and order is by name.
            filename_suffix=f".{time.time_ns()}",
        )
