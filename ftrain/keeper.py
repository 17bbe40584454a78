"""The supervisor's side of saving: starts the saver, hands it snapshots, tells the workers.

One save is under way and the newest two wait; training waits for none of them. If the saver dies,
another begins with the newest that is wanted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftrain.processes import Child, Ends, launch
from ftrain.retention import Place

if TYPE_CHECKING:
    from ftrain.config import Config
    from ftrain.ears import Ears
    from ftrain.events import EventLog
    from ftrain.worker_logs import Logs

WAITING = 2  # snapshots, each with the state's bytes in memory
ATTEMPTS = 3  # savers that one save may cost
SLOWEST_BYTES_S = 5e6  # beyond this and the patience below it is stuck
PATIENCE_S = 120.0


class _Save(NamedTuple):
    step: int
    path: str
    digest: str


class Keeper:
    """The saver process of this host, and what is known of saves.

    Args:
      config: the run's.
      env: of the supervisor; the saver computes on the CPU alone.
      lock_fd: the run's lock, which the saver holds too: no other run begins beside it.
      fork: makes a saver from the template, whose imports are done; None if it cannot.
      ears: hear it.
      log: the run's events.
      logs: what it prints.
      record: takes a fact for events and screen, as the recorder does.
      tell: says a line to every worker.
      staging: where checkpoints are written before they get their names (see `lease`).
    """

    def __init__(
        self,
        config: Config,
        env: Mapping[str, str],
        lock_fd: int,
        fork: Callable[[dict[str, Any], Mapping[str, str], int, Ends], int | None],
        *,
        ears: Ears,
        log: EventLog,
        logs: Logs,
        record: Callable[[dict[str, Any]], None],
        tell: Callable[[str], None],
        staging: str | None = None,
    ):
        self._staging = staging
        self._config, self._lock_fd, self._fork = config, lock_fd, fork
        self._own_env = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": ""}
        self._env = {**env, **self._own_env}
        self._ears, self._log, self._logs = ears, log, logs
        self._record, self._tell = record, tell
        self.child: Child | None = None
        self._place = Place.of(config.run_dir)
        self._now: _Save | None = None  # under way
        self._waiting: list[_Save] = []
        self._attempts = 0  # at the one under way
        self._stuck = ""  # why its saver was ended
        self._since = 0.0  # time.monotonic() when it began
        self._durable: tuple[int, str, float] | None = None  # step, digest, time.monotonic()
        self._bad: set[int] = set()
        self.hurries = False  # the run is about to stop: only the newest counts
        self.error = ""  # of the newest save, if it failed
        self.stops_run = ""  # the failure that the config lets end the run

    # What workers say.

    def take(self, record: dict[str, Any]) -> None:
        """A worker has taken a snapshot that is to be written to disk, or could not take one."""
        if record["record"] == "snapshot":
            self._want(_Save(record["step"], record["path"], record["digest"]))
        elif record["for_disk"]:
            self._failed(record["step"], record["digest"], record["error"])
        else:
            self._record(record)

    def note_restore(self, record: dict[str, Any]) -> None:
        """Hears what the workers found as they restored."""
        if record["tier"] != "disk":
            return
        if record["record"] == "checkpoint_restored":
            self._durable = record["step"], record["digest"], time.monotonic()
            return
        if self.is_durable(record["step"]):
            self._durable = None
        if record["step"] not in self._bad:
            self._bad.add(record["step"])
            self._send({"bad": record["step"]})

    def words_for_a_new_worker(self) -> list[str]:
        """What it has missed."""
        if self._durable is None:
            return []
        step, digest, at = self._durable
        return [f"durable {step} {digest} {time.monotonic() - at:.3f}"]

    def is_durable(self, step: int) -> bool:
        """Whether the newest checkpoint is of that step."""
        return self._durable is not None and self._durable[0] == step

    def _want(self, save: _Save) -> None:
        if self._durable is not None and self._durable[1] == save.digest:
            self._tell_durable()  # asked for again by one who has not heard
        elif self._now is None:
            self._begin(save)
        elif save.digest not in {s.digest for s in (self._now, *self._waiting)}:
            self._waiting.append(save)
            self._pass_over(1 if self.hurries else WAITING)

    # The saver.

    def prepare(self) -> None:
        """Starts the saver, so that it has done its imports when the first save is due."""
        if self.child is None:
            self._start()

    def _start(self) -> None:
        rules = self._config.checkpoint
        job = {
            "run_dir": self._config.run_dir,
            "place": self._place,
            "staging": self._staging,
            "parent": os.getpid(),
            "keep": rules.keep,
            "keep_every": rules.keep_every,
            "keep_best": rules.keep_best,
        }
        launched = False

        def begin(ends: Ends) -> int:
            nonlocal launched
            forked = self._fork({"saver": job}, self._own_env, self._lock_fd, ends)
            launched = not forked
            argv = [sys.executable, "-m", "ftrain.saver", "{control}"]
            return forked or launch(argv, self._env, ends, [self._lock_fd])

        child = self.child = Child(begin)
        if launched:  # a forked one has been given its job
            self._send({**job, "records_fd": child.records_fd})
        for step in self._bad:
            self._send({"bad": step})
        self._ears.hear(child, "stdout", self._logs.saver)
        self._ears.hear(child, "stderr", self._logs.saver)
        self._ears.hear(child, "records", self._on_record)
        self._ears.watch(child.pidfd, self._on_exit)
        self._log("saver_started", pid=child.pid)

    def _send(self, order: dict[str, Any]) -> None:
        if self.child is not None:
            self.child.send(json.dumps(order))

    def _begin(self, save: _Save) -> None:
        if self._now is not save:
            self._attempts, self._stuck = 0, ""
        self._now, self._since = save, time.monotonic()
        self._attempts += 1
        self.prepare()
        self._send(save._asdict())

    def _on_record(self, line: str) -> None:
        record = json.loads(line)
        if record["record"] == "saved":
            self.error, self._now = "", None
            self._durable = record["step"], record["digest"], time.monotonic()
            self._bad.discard(record["step"])
            self._record({**record, "record": "checkpoint_saved", "tier": "disk"})
            self._tell_durable()
        else:
            self._now = None
            self._failed(record["step"], record["digest"], record["error"])
        self._begin_next()

    def _pass_over(self, most: int) -> None:
        """Leaves the newest of those that wait."""
        for old in self._waiting[:-most]:
            Path(old.path).unlink(missing_ok=True)
        self._waiting = self._waiting[-most:]

    def _begin_next(self) -> None:
        if self._waiting:
            self._begin(self._waiting.pop(0))

    def _on_exit(self) -> None:
        """It died: what it was doing is begun again, or what is newer."""
        child, self.child = self.child, None
        self._ears.hear_out(child)
        self._ears.forget(child.pidfd)
        ended = child.reap()
        self._log("saver_exited", pid=child.pid, **ended.fields())
        if self._now is None:
            return
        if not self._waiting and self._attempts < ATTEMPTS:
            self._begin(self._now)
            return
        lost, self._now = self._now, None
        self._pass_over(1)
        if not self._waiting:
            how = ended.signal or f"exit code {ended.exit_code}"
            why = self._stuck or f"the saver died of {how} {ATTEMPTS} times; see logs/saver.log"
            self._failed(lost.step, lost.digest, why)
        self._begin_next()

    def tick(self, now: float) -> None:
        """Ends a saver that is stuck, as on a share that has gone."""
        if self._now is None or self.child is None:
            return
        try:
            size = os.path.getsize(self._now.path)
        except OSError:  # it is on disk by now, and the saver's word on its way
            size = 0
        if now - self._since > PATIENCE_S + size / SLOWEST_BYTES_S:
            self._stuck = f"it was not written after {now - self._since:.0f} s"
            self._since, self._attempts = now, ATTEMPTS
            self.child.kill()

    def close(self) -> None:
        """Ends the saver, whatever it is doing."""
        if self.child is not None:
            child, self.child = self.child, None
            self._ears.forget(child.pidfd)
            child.reap(kill=True)
            self._ears.hear_out(child)

    # What all are told.

    def _failed(self, step: int, digest: str, error: str) -> None:
        self.error = error
        if self._config.checkpoint.on_save_error == "stop" and not self.stops_run:
            self.stops_run = f"a save failed (on_save_error: stop): {error}"
        self._record({"record": "save_failed", "t": time.time(), "step": step, "error": error})
        self._tell(f"save_failed {step} {digest} {error}")

    def _tell_durable(self) -> None:
        step, digest, at = self._durable
        self._tell(f"durable {step} {digest} {time.monotonic() - at:.3f}")
