"""`ftrain debug`: one worker in the foreground, without a supervisor.

Standard input is the terminal's, so `breakpoint()` works, and profilers see one plain process.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ftrain.beat import Beat
from ftrain.board import Board
from ftrain.config import Config
from ftrain.errors import EXIT_OK, EXIT_REFUSED, ConfigError, FtrainError, told_of
from ftrain.events import EventLog
from ftrain.memory_tier import fallback_folder
from ftrain.recorder import Recorder
from ftrain.records import Event, commit_of, event_of
from ftrain.retention import Place
from ftrain.run_lock import RunLock
from ftrain.saver import DiskWriter
from ftrain.screen import Screen
from ftrain.story import Story
from ftrain.verdict import by_agreement
from ftrain.worker import work
from ftrain.worker_pipes import Assignment, Told


class Foreground:
    """What the supervisor would be told and would say, for a worker that has none."""

    def __init__(self, config: Config):
        self._screen = Screen(live=False)
        self._story = Story(self._screen, config)
        log = EventLog(config.run_dir)
        self._board = Board(config.run_dir)
        self._board.event(Event(time.time(), "run_started", {"config": config.model_dump()}))
        log.listen(lambda row: self._board.event(event_of(row)))
        self._recorder = Recorder(config.run_dir, log, self._on_fact)
        self._snapshots = fallback_folder(config.run_dir)
        rules = config.checkpoint
        self._writer = DiskWriter(
            config.run_dir,
            Place.of(config.run_dir),
            keep=rules.keep,
            keep_every=rules.keep_every,
            keep_best=rules.keep_best,
        )
        self._durable: Told | None = None
        self._save_failed: Told | None = None

    def report(self, record: str, **fields: object) -> None:
        """Takes a record as the supervisor does."""
        if record == "left":
            self._recorder.close()
            shutil.rmtree(self._snapshots, ignore_errors=True)
            self._screen.line(f"ended at step {fields['step']}: {fields['reason']}")
            code = by_agreement(str(fields["reason"]), self._recorder.step, "").exit_code
            if code != EXIT_OK:
                os._exit(code)  # not sys.exit: nothing may speak to the service any more (R9)
        elif record in ("refused", "local_error"):
            self._screen.line(
                str(fields["traceback"] or fields.get("message") or fields.get("error"))
            )
        elif record == "snapshot":
            self._save(fields["step"], fields["path"], fields["digest"])
        elif record == "snapshot_failed" and fields["for_disk"]:
            self._failed(fields["step"], fields["digest"], fields["error"])
        elif record != "ready":
            self._take(record, **fields)
            self._screen.status(self._board.now(time.time()))

    def _on_fact(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "commit":
            self._board.commit(commit_of(fields))
        self._story.fact(kind, fields)

    def _take(self, record: str, **fields: object) -> None:
        self._recorder.take(0, {"record": record, "t": time.time(), **fields})

    def _save(self, step: int, path: str, digest: str) -> None:
        """What the saver process would do, in the worker's thread of snapshots."""
        started = time.monotonic()
        try:
            self._writer.save(Path(path), digest)
        except (OSError, ValueError, RuntimeError, FtrainError) as error:
            self._failed(step, digest, told_of(error, self._writer.folder / str(step)))
        else:
            seconds = time.monotonic() - started
            self._take("checkpoint_saved", step=step, tier="disk", seconds=seconds)
            self._durable = Told(step, digest, time.monotonic())
            Path(path).unlink(missing_ok=True)

    def _failed(self, step: int, digest: str, error: str) -> None:
        self._take("save_failed", step=step, error=error)
        self._save_failed = Told(step, digest, time.monotonic(), error)

    def durable(self) -> Told | None:
        """The newest save that has reached the disk."""
        return self._durable

    def save_failed(self) -> Told | None:
        """The newest save that has not."""
        return self._save_failed

    def wait_for_go(self) -> tuple[str, list[int]]:
        """Nobody to wait for."""
        return "debug", [0]

    def stop_requested(self) -> bool:
        """Ctrl-C ends the process as in any program."""
        return False


def main() -> int:
    """`python -m ftrain.debug CONFIG_JSON BASE PLATFORM`."""
    from ftrain.coordinator import Coordinator

    given = Config.from_json(sys.argv[1])
    config = given.model_copy(
        update={
            "cluster": given.cluster.model_copy(update={"workers": 1, "min_workers": 1}),
            "checkpoint": given.checkpoint.model_copy(update={"memory_every_s": 0.0}),
        }
    )
    os.makedirs(config.run_dir, exist_ok=True)
    try:
        lock = RunLock(config.run_dir)
        if os.path.exists(os.path.join(config.run_dir, "config.yaml")):
            raise ConfigError(
                f"{config.run_dir} belongs to a run; give debug another folder with --run-dir"
            )
    except FtrainError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    foreground = Foreground(config)
    coordinator = Coordinator(1, sys.argv[3], config.cluster.heartbeat_timeout_s)
    job = Assignment(
        config=config.to_json(),
        worker=0,
        address=coordinator.address,
        host="127.0.0.1",
        platform=sys.argv[3],
        base=sys.argv[2],
        memory=[str(fallback_folder(config.run_dir))],
        handover=str(fallback_folder(config.run_dir)),
        neighbours=[0],
        past=None,
        records_fd=-1,
        beat_fd=-1,
        parent=os.getppid(),
    )
    work(job, foreground.report, Beat(Beat.create("ftrain-beat")), foreground)
    del lock


if __name__ == "__main__":
    sys.exit(main())
