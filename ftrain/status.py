"""`ftrain status RUN_DIR`: where a run is, live or once. Never jax.

The supervisor of a live run writes `status.json` (see `snapshot`); of others the records are read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from ftrain.board import Board
from ftrain.records import read_records
from ftrain.run_lock import running_supervisor
from ftrain.snapshot import FRESH_S, STATUS_FILE, Snapshot

EVERY_S = 1.0


def read_status(run_dir: str) -> Snapshot:
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
    snapshot = board.snapshot(last.last_t if pid is None else now, pid=pid)
    snapshot.t = now  # so that what is told as past is so from here
    if last.finished is None and pid is None:
        snapshot.state, snapshot.samples_per_s, snapshot.eta_s = "dead", 0.0, None
        snapshot.reason = "the supervisor died; the same command continues"
        for worker in snapshot.workers:
            worker.state, worker.pid = "down", None
    elif last.finished is None and now - last.last_t > FRESH_S:
        snapshot.state = "silent"
        since = now - (live.t if live else last.last_t)
        snapshot.reason = f"the supervisor (process {pid}) has not written for {since:.0f} s"
    return snapshot


def _written(run_dir: str) -> Snapshot | None:
    try:
        with open(os.path.join(run_dir, STATUS_FILE), encoding="utf-8") as file:
            return Snapshot.from_json(file.read())
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None  # never written, or by another version


def main(arguments: argparse.Namespace) -> int:
    """The command: 0 when it has shown the run."""
    snapshot = read_status(arguments.run_dir)
    if arguments.json:
        sys.stdout.write(snapshot.to_json() + "\n")
    elif arguments.once or not sys.stdout.isatty():
        from ftrain.panel import full_text

        sys.stdout.write(full_text(snapshot))
    else:
        _watch(arguments.run_dir, snapshot)
    return 0


def _watch(run_dir: str, snapshot: Snapshot) -> None:
    """Until the run has ended, or ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from ftrain.panel import panel

    with Live(panel(snapshot), console=Console(highlight=False), auto_refresh=False) as live:
        live.refresh()
        try:
            while snapshot.state not in ("finished", "dead"):
                time.sleep(EVERY_S)
                snapshot = read_status(run_dir)
                live.update(panel(snapshot), refresh=True)
        except KeyboardInterrupt:
            return
