"""The run's two record files: `events.jsonl` and `metrics.jsonl`. Written by the supervisor alone.

One JSON object a line, append-only, whole lines only: each is written in one call, and what a
killed supervisor left of a last line is taken off before the next one writes. JSON has no nan and
no infinities: such a value is null.

Every event has `t` (unix seconds, of the fact itself), `event`, and where it applies `worker`,
`pid`, `step`:

    run_started{config,changed}            coordinator_started{pid,address}
    coordinator_exited{pid,exit_code|signal}
    worker_started{worker,pid,incarnation} incarnation: counted from 0 by the supervisor
    worker_ready{worker,pid,seconds,cpu_s,compile_s}  imported, compiled: it could take part
    worker_exited{worker,pid,exit_code|signal,reason}
    worker_fenced{worker}
    view_changed{workers,step,seconds,sync_s,connect_s}  a new set is training; what that took,
                                           sync_s of it after all had met, connect_s of that until
                                           there were new communicators
    state_synced{worker,donor,step,bytes,seconds,digest}
    attempt_failed{worker,reason}          why it could not finish the step, which is tried again;
                                           after a death, how this worker noticed
    step_aborted{step,failed,seconds}      of the attempt, up to the abort
    evaluated{step,metrics,seconds}
    time_spent{step,steps,seconds}         by phase of the lowest worker (see `beat`), in its last
                                           `steps` steps, up to `step`
    target_known{steps,samples,dataset_length}        where the run ends; samples: with epochs
    step_skipped{step,shards,workers,what} shards that were not finite, and whose they were
    saver_started{pid}                     saver_exited{pid,exit_code|signal}
    checkpoint_saved{step,seconds,tier}    checkpoint_skipped{step,why,tier}
    checkpoint_restored{step,tier}         save_failed{step,error}
    parameters_loaded{source,leaves,fresh,unused}   a new run began with those of init_from
    memory_full{folder,error,instead}      where snapshots lie instead
    snapshot_failed{step,error}            of one that was for memory alone
    replicas_differ{step,digests}          by worker; the one that is not like most is replaced
    digest_agreed{step,workers,digest}     every worker that reported the step has these bits
    hang_detected{worker,phase,seconds}    unreachable: the workers it cannot reach, if it is that
    host_joined{host,name,address,workers} of a run over several: its agent is there, nothing runs
    host_lost{host,name,reason,workers}    its workers count as dead; worker_started has `host` too
    head_taken_over{host,name,was,generation,seconds,steps}   right after run_started, which has
                                           `generation` too: `was`, the head, had been silent for so
                                           long; steps: first and last that its agents told of late
    history_began{history,step}            nobody had the state: one restored it, or began anew
    worker_quarantined{worker,seconds}     tried again after that long, while the others train
    fault_injected{kind,worker,step}       by `ftrain chaos`; place, from, seconds where there are
    stop_requested{signal}
    run_finished{step,exit_code,reason}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"


class LineFile:
    """An append-only file of JSON lines.

    Args:
      path: its name.
      staging: of a lease: what is there is copied, and the copy takes its place. Whoever has the
        file open still, a head that was thought dead, writes into one that has no name.
    """

    def __init__(self, path: str, staging: str | None = None):
        self.path = path
        own = path if staging is None else os.path.join(staging, os.path.basename(path))
        if staging is not None and os.path.exists(path):
            shutil.copyfile(path, own)
        _drop_torn_line(own)
        self._fd = os.open(own, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if staging is not None:
            os.rename(own, path)
        self._waiting = b""  # what could not be written, of a full disk say; it goes first

    def append(self, row: dict[str, Any]) -> None:
        """Writes one line, whole; or keeps it until writing works again."""
        self._waiting += (to_json(row) + "\n").encode()
        with contextlib.suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]

    def close(self) -> None:
        """Writes no more."""
        os.close(self._fd)


class EventLog(LineFile):
    """`events.jsonl` of a run."""

    def __init__(self, run_dir: str, staging: str | None = None):
        super().__init__(os.path.join(run_dir, EVENTS_FILE), staging)
        self._listener: Callable[[dict[str, Any]], None] | None = None

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Has `listener` called with each event, once it is written."""
        self._listener = listener

    def __call__(self, event: str, **fields: Any) -> None:
        """Writes one event."""
        row = {"t": time.time(), "event": event, **fields}
        self.append(row)
        if self._listener is not None:
            self._listener(row)


def to_json(row: dict[str, Any]) -> str:
    """A row as strict JSON on one line."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_with_nulls(row), ensure_ascii=False, allow_nan=False)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _with_nulls(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a record file, oldest first; a last line still being written is left out."""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)


def _drop_torn_line(path: str) -> None:
    """Cuts a file back to its last newline."""
    if not os.path.exists(path):
        return
    with open(path, "rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
