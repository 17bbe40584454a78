"""`ftrain status RUN_DIR`: where a run is, live or once. Never jax.

The supervisor of a live run writes `status.json` (see `run_now`); of others the records are read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from ftrain.board import Board
from ftrain.records import read_records
from ftrain.run_lock import running_supervisor
from ftrain.run_now import FRESH_S, STATUS_FILE, RunNow

EVERY_S = 1.0


def read_status(run_dir: str) -> RunNow:
    """Where a run is now.

    Raises:
      NoRunError: there is no run in that folder.
    """
    now = time.time()
    live = _written(run_dir)
    if live is not None and now - live.t < FRESH_S:
        return live
    board = Board(run_dir)
    records = read_records(run_dir)
    board.read(records)
    last, pid = records.sessions[-1], running_supervisor(run_dir)
    run = board.now(last.last_t if pid is None else now, pid=pid)
    run.t = now  # so that what is told as past is so from here
    if last.finished is None and pid is None:
        run.state, run.samples_per_s, run.eta_s = "dead", 0.0, None
        run.reason = "the supervisor died; the same command continues"
        for worker in run.workers:
            worker.state, worker.pid = "down", None
    elif last.finished is None and now - last.last_t > FRESH_S:
        run.state = "silent"
        since = now - (live.t if live else last.last_t)
        run.reason = f"the supervisor (process {pid}) has not written for {since:.0f} s"
    return run


def _written(run_dir: str) -> RunNow | None:
    try:
        with open(os.path.join(run_dir, STATUS_FILE), encoding="utf-8") as file:
            return RunNow.from_json(file.read())
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None  # never written, or by another version


def main(arguments: argparse.Namespace) -> int:
    """The command: 0 when it has shown the run."""
    run = read_status(arguments.run_dir)
    if arguments.json:
        sys.stdout.write(run.to_json() + "\n")
    elif arguments.once or not sys.stdout.isatty():
        from ftrain.panel import full_text

        sys.stdout.write(full_text(run))
    else:
        _watch(arguments.run_dir, run)
    return 0


def _watch(run_dir: str, run: RunNow) -> None:
    """Until the run has ended, or ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from ftrain.panel import panel

    with Live(panel(run), console=Console(highlight=False), auto_refresh=False) as live:
        live.refresh()
        try:
            while run.state not in ("finished", "dead"):
                time.sleep(EVERY_S)
                run = read_status(run_dir)
                live.update(panel(run), refresh=True)
        except KeyboardInterrupt:
            return
