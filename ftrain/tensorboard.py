"""`tensorboard`: event files of the committed steps, for TensorBoard."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

# Not its SummaryWriter, whose thread may still have what was flushed (tensorboardX 2.6).
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

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
        os.makedirs(self._folder, exist_ok=True)
        self._writer: EventsWriter | None = None
        self._last = 0

    def commit(self, line: dict[str, Any]) -> None:
        """A committed step. One that was committed before takes the place of what followed it."""
        if self._writer is None or line["step"] <= self._last:
            self._open(line["step"])
        self._last = line["step"]
        values = {"workers": len(line["workers"])}
        for name in line.keys() - NOT_SHOWN:
            if line[name] is not None:  # nan and infinite are null in the records
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else name
                values[tag] = line[name]
        shown = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.write_event(
            Event(wall_time=line["t"], step=line["step"], summary=Summary(value=shown))
        )

    def event(self, row: dict[str, Any]) -> None:
        """Faults are in `events.jsonl`; here their cost is seen."""

    def flush(self) -> None:
        """What has come is in the file, whatever becomes of this process."""
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
        # The name has whole seconds only, and their order is by name.
        self._writer = EventsWriter(os.path.join(self._folder, "events"), f".{time.time_ns()}")
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=step, session_log=start))
