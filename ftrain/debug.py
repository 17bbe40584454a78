"""`ftrain debug`: one worker in the foreground, without a supervisor.

Standard input is the terminal's, so `breakpoint()` works, and profilers see one plain process.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ftrain.beat import Beat
from ftrain.board import Board
from ftrain.config import Config
from ftrain.errors import EXIT_OK, EXIT_REFUSED, ConfigError, FtrainError
from ftrain.events import EventLog
from ftrain.recorder import Recorder
from ftrain.records import Event, commit_of, event_of
from ftrain.run_lock import RunLock
from ftrain.screen import Screen
from ftrain.story import Story
from ftrain.verdict import by_agreement
from ftrain.worker import Assignment, work


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

    def report(self, record: str, **fields: object) -> None:
        """Takes a record as the supervisor does."""
        if record == "left":
            self._recorder.close()
            self._screen.line(f"ended at step {fields['step']}: {fields['reason']}")
            code = by_agreement(str(fields["reason"]), self._recorder.step, "").exit_code
            if code != EXIT_OK:
                os._exit(code)  # not sys.exit: nothing may speak to the service any more (R9)
        elif record in ("refused", "local_error"):
            self._screen.line(
                str(fields["traceback"] or fields.get("message") or fields.get("error"))
            )
        elif record != "ready":
            self._recorder.take(0, {"record": record, "t": time.time(), **fields})
            self._screen.status(self._board.snapshot(time.time()))

    def _on_fact(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "commit":
            self._board.commit(commit_of(fields))
        self._story.fact(kind, fields)

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
        update={"cluster": given.cluster.model_copy(update={"workers": 1, "min_workers": 1})}
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
        records_fd=-1,
        beat_fd=-1,
        parent=os.getppid(),
    )
    work(job, foreground.report, Beat(Beat.create("ftrain-beat")), foreground)
    del lock


if __name__ == "__main__":
    sys.exit(main())
