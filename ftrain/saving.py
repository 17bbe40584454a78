"""A worker's part in saving: when a snapshot is due, taking it, and whether the last is durable.

Committed arrays are never changed and, but with `commit: lean`, no program takes their memory. So
the snapshot is written from them in a thread while training goes on: on a CPU nothing waits at all.
On a GPU, and if lean, the step waits for a copy on the host: holding old arrays would cost memory.
Whoever is lowest in the view does this, and for its own memory the lowest of each host; the saver
process (`saver`) writes to disk.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ftrain.checkpoint import meta_of
from ftrain.errors import told_of
from ftrain.memory_tier import open_folder
from ftrain.snapshots import hand_over, keep_newest, write_snapshot
from ftrain.state import Committed, StateSpec, to_host

if TYPE_CHECKING:
    from ftrain.config import Checkpoint
    from ftrain.digests import Digests
    from ftrain.worker_pipes import Control

KEPT = 2  # snapshots
DUTY = 0.1  # of the time that may go into snapshots nobody asked to have on disk
# Of the time that training may wait for their copies. A GPU's state of 1.2 GB took more than a
# second each: a quarter of the time, at one every five seconds.
PAUSE_DUTY = 0.01
RETRY_S = 1.0  # between attempts to save the last state


class _Wanted(NamedTuple):
    state: Committed
    arrays: list[np.ndarray]
    digest: Callable[[], bytes]
    evaluated: int
    lineage: int
    for_disk: bool


class Saving:
    """The snapshots of one worker.

    Args:
      spec: the state's.
      digests: of such states.
      rules: the config's.
      folder: where snapshots lie.
      fallback: where they lie if there is no room.
      run_dir: whose they are.
      dataset_length: goes into each.
      patience_s: how long the last save may fail before that is final.
      copies: whether the next step takes the state's memory, so that it is to be copied before.
      report: called from the thread that writes.
      news: from the supervisor.
      handover: where those lie that the saver is to write to disk, if not in `folder`.
      neighbours: the workers of this host.
      history: the first part of what its snapshots are called by, see `history`; "": by nothing.
    """

    def __init__(
        self,
        spec: StateSpec,
        digests: Digests,
        rules: Checkpoint,
        *,
        folder: Path,
        fallback: Path,
        run_dir: str,
        dataset_length: int,
        patience_s: float,
        copies: bool = False,
        report: Callable[..., None],
        news: Control,
        handover: Path | None = None,
        neighbours: Sequence[int] = (),
        history: str = "",
    ):
        self._handover, self._neighbours = handover or folder, set(neighbours)
        self._history, self._lineage = history, 0
        self._spec, self._digests, self._rules = spec, digests, rules
        self._folder, self._fallback, self._run_dir = folder, fallback, run_dir
        self._dataset_length, self._patience_s = dataset_length, patience_s
        self._report, self._news = report, news
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next: _Wanted | None = None  # the newest that waits for the thread
        # By folder, steps, the last of them last.
        self._written: dict[Path, list[int]] = collections.defaultdict(list)
        self._disk_step = self._memory_step = -1  # asked for
        self._disk_at = time.monotonic()
        self._memory_at: float | None = None  # until this worker is the lowest for the first time
        self._copies = copies
        self._training_waits = copies or jax.default_backend() != "cpu"  # for the copy to the host
        self._seconds = 0.0  # that the last snapshot took
        self._pause_s = 0.0  # of it, before training could go on
        self._last: tuple[Committed, str] | None = None  # a state that is to be the last; digest
        self._durable = ""  # the digest of a state that is on disk
        self._failing_since: float | None = None
        self._opened: set[Path] = set()

    def restored(self, step: int, tier: str, digest: str) -> None:
        """The state came from there: there is nothing to save before the next commit."""
        self._memory_step = step
        if tier == "disk":
            self._disk_step, self._durable = step, digest

    def is_of(self, me: int, workers: Sequence[int]) -> bool:
        """Whether worker `me` of a view takes snapshots: the lowest of each host does, for memory.

        So the loss of a host, the head's too, leaves the newest in the memory of others.
        """
        return me == min(workers) or me == min(self._neighbours & set(workers), default=-1)

    def after_commit(
        self, state: Committed, evaluated: int, *, for_disk: bool = True, lineage: int = 0
    ) -> None:
        """Takes a snapshot if one is due. Called with committed state, where `is_of` says so.

        Args:
          state: committed.
          evaluated: the last step that was evaluated.
          for_disk: whether this is the lowest worker, whose snapshots are written to disk too.
          lineage: of the state.
        """
        now = time.monotonic()
        self._lineage = lineage
        if for_disk and self._disk_due(state.step, now):
            self._disk_step, self._disk_at = state.step, now
            self._want(state, evaluated, for_disk=True)
        elif self._memory_due(state.step, now) and not self._is_busy():
            self._want(state, evaluated, for_disk=False)

    def _disk_due(self, step: int, now: float) -> bool:
        if step in (0, self._disk_step):
            return False
        by_steps = self._rules.every_steps and step % self._rules.every_steps == 0
        if self._rules.every_s is None:
            return bool(by_steps)
        # All workers hear of each save: whoever is lowest goes on counting from the last.
        told = self._news.durable()
        since = max(self._disk_at, told.at if told else 0.0)
        return bool(by_steps) or now - since >= self._rules.every_s

    def _memory_due(self, step: int, now: float) -> bool:
        if not self._rules.memory_every_s or step in (0, self._memory_step):
            return False
        if self._memory_at is None:
            # Another was the lowest until now and took its last one not long ago. A copy in the
            # first step after its death would be waited for on top of that death.
            self._memory_at = now if self._training_waits else float("-inf")
        return now - self._memory_at >= max(
            self._rules.memory_every_s, self._seconds / DUTY, self._pause_s / PAUSE_DUTY
        )

    def finish(self, state: Committed, evaluated: int) -> str | None:
        """Has the last state saved, trying again for a while if that fails. Never waits.

        Returns:
          "" once it is durable; why it could not be saved; None if that is open yet.
        """
        digest = self._digest_of(state)
        durable, now = self._news.durable(), time.monotonic()
        if digest == self._durable or (durable is not None and durable.digest == digest):
            return ""
        failed = self._news.save_failed()
        if self._disk_step != state.step:
            pass  # not asked for yet
        elif failed is None or failed.digest != digest or failed.at < self._disk_at:
            return None
        else:
            self._failing_since = self._failing_since or failed.at
            if now - self._failing_since > self._patience_s:
                return failed.message
            if now - failed.at < RETRY_S:
                return None
        self._disk_step, self._disk_at = state.step, now
        self._want(state, evaluated, for_disk=True)
        return None

    def wants_stop(self) -> bool:
        """Whether the run is to end since a save failed."""
        if self._rules.on_save_error != "stop":
            return False
        failed, durable = self._news.save_failed(), self._news.durable()
        return failed is not None and (durable is None or durable.at < failed.at)

    def _digest_of(self, state: Committed) -> str:
        if self._last is None or self._last[0] is not state:
            self._last = state, self._digests(state).hex()
        return self._last[1]

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _want(self, state: Committed, evaluated: int, *, for_disk: bool) -> None:
        began = time.monotonic()
        arrays = to_host(state.leaves)  # on a CPU the very same memory
        if self._copies:
            arrays = [array.copy() for array in arrays]
        self._pause_s = time.monotonic() - began
        if self._training_waits:
            digest = self._digests.begin(state)  # in the order of the device's work
        else:
            digest = lambda: self._digests(state)  # noqa: E731
        self._memory_step, self._memory_at = state.step, time.monotonic()
        with self._lock:
            self._next = _Wanted(state, arrays, digest, evaluated, self._lineage, for_disk)
            if not self._is_busy():
                self._thread = threading.Thread(target=self._work, name="snapshot", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                wanted, self._next = self._next, None
                if wanted is None:
                    self._thread = None
                    return
            self._take(wanted)

    def _take(self, wanted: _Wanted) -> None:
        started, step = time.monotonic(), wanted.state.step
        digest = wanted.digest().hex()
        meta = meta_of(
            self._spec,
            step=step,
            cursor=wanted.state.cursor,
            dataset_length=self._dataset_length,
            evaluated=wanted.evaluated,
            digest=digest,
        )
        if self._history:
            meta["history"] = f"{self._history}.{wanted.lineage}"
        try:
            path = self._write(meta, wanted.arrays, wanted.for_disk)
            if wanted.for_disk:
                save = hand_over(path)
                if not self._rules.memory_every_s:
                    path.unlink(missing_ok=True)
                self._report("snapshot", step=step, path=str(save), digest=digest)
            written = self._written[path.parent]
            written[:] = [*(s for s in written if s != step), step][-KEPT:]
            keep_newest(path.parent, written)
        except BaseException as error:  # noqa: BLE001  told, and judged by the supervisor
            self._report(
                "snapshot_failed",
                step=step,
                digest=digest,
                for_disk=wanted.for_disk,
                error=told_of(error, self._folder),
            )
        self._seconds = time.monotonic() - started

    def _write(self, meta: dict[str, Any], arrays: list[np.ndarray], for_disk: bool) -> Path:
        """In memory, or if that has no room in the run's folder."""
        folder = self._handover if for_disk else self._folder
        try:
            self._open(folder)
            return write_snapshot(folder, meta, arrays)
        except OSError as error:
            if folder == self._fallback:
                raise
            self._report(
                "memory_full",
                folder=str(self._folder),
                error=told_of(error, self._folder),
                instead=str(self._fallback),
            )
            self._folder = self._handover = self._fallback
        self._open(self._fallback)
        return write_snapshot(self._fallback, meta, arrays)

    def _open(self, folder: Path) -> None:
        if folder not in self._opened:
            open_folder(folder, self._run_dir)
            self._opened.add(folder)
