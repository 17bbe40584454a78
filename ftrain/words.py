"""What the workers say: their output for the screen, their records for whom they concern."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ftrain.errors import EXIT_GAVE_UP
from ftrain.slots import Slot
from ftrain.verdict import Ending

if TYPE_CHECKING:
    from ftrain.coordination import Coordination
    from ftrain.events import EventLog
    from ftrain.hosts import Hosts
    from ftrain.keeper import Keeper
    from ftrain.recorder import Recorder
    from ftrain.screen import Screen

# What a process says of itself, of no interest once it counts as dead.
OF_ITSELF = frozenset(
    {"ready", "left", "refused", "local_error", "gave_up", "snapshot", "snapshot_failed"}
)


class Words:
    """Hears the workers of a run, on whatever host they are.

    Attributes:
      first_ready_at: time.monotonic() when the first of those that begin together was ready.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        coordination: Coordination,
        hosts: Hosts,
        keeper: Keeper,
        recorder: Recorder,
        log: EventLog,
        screen: Screen,
        end: Ending,
    ):
        self._slots, self._coordination, self._hosts = slots, coordination, hosts
        self._keeper, self._recorder = keeper, recorder
        self._log, self._screen, self._end = log, screen, end
        self.first_ready_at: float | None = None

    def on_line(self, slot: Slot, pipe: str, line: str) -> None:
        """Takes a line that came through one of its pipes."""
        match pipe:
            case "stdout":
                self._on_output(slot, line)
            case "stderr":
                self._on_stderr(slot, line)
            case "records":
                self._on_record(slot, json.loads(line))

    def _on_output(self, slot: Slot, line: str) -> None:
        alive = [s.worker for s in self._slots if s.child is not None]
        # Of those who train: one that has just come back may be lower and has said nothing yet.
        if slot.worker == min([w for w in self._recorder.workers if w in alive] or alive):
            self._screen.line(f"[{slot.worker}] {line}")

    @staticmethod
    def _on_stderr(slot: Slot, line: str) -> None:
        slot.hear(line)
        if slot.gave_up and slot.child is not None:
            slot.child.kill()  # it is ending, and the others wait for it

    def on_late(self, slot: Slot, generation: int, line: str) -> None:
        """From a host that was cut off: what its worker had reported before it counted as dead."""
        record = json.loads(line)
        if record["record"] not in OF_ITSELF:
            self._recorder.take(slot.worker, record, generation)

    def _on_record(self, slot: Slot, record: dict[str, Any]) -> None:
        record["t"] -= self._hosts.of(slot.worker).clock_offset_s
        match record["record"]:
            case "ready":
                self._on_ready(slot, record)
            case "left":
                slot.left = record["reason"]
            case "refused":
                slot.refused = record
            case "local_error":
                slot.local_error = record
            case "gave_up":
                self._end(EXIT_GAVE_UP, record["reason"])
            case "snapshot" | "snapshot_failed":
                self._keeper.take(record)
            case kind:
                slot.commits += kind == "commit"
                if kind in ("checkpoint_restored", "checkpoint_skipped"):
                    self._keeper.note_restore(record)
                self._recorder.take(slot.worker, record, self._coordination.generation)

    def _on_ready(self, slot: Slot, record: dict[str, Any]) -> None:
        slot.ready, now = True, time.monotonic()
        self._log(
            "worker_ready",
            worker=slot.worker,
            pid=slot.child.pid,
            seconds=now - slot.started_at,
            cpu_s=record["cpu_s"],
            compile_s=record["compile_s"],
        )
        self.first_ready_at = self.first_ready_at or now
