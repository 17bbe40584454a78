"""The saver: one process a host that writes snapshots to disk. `python -m ftrain.saver`.

The workers never wait for it nor for Orbax, and a save outlives the worker that asked for it. It is
told what to do in lines of JSON on its control pipe and answers on the pipe of records:

    control {"step", "path", "digest"}     write this snapshot to disk
            {"bad": step}                  a checkpoint that the restore passed over
    records saved{step,digest,seconds}     durable; the snapshot's file is gone
            save_failed{step,digest,error}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ftrain.checkpoint import ALTERED, write_checkpoint
from ftrain.digests import digest_of
from ftrain.errors import told_of
from ftrain.memory_tier import SAVE
from ftrain.retention import (
    MetricValues,
    Place,
    best_of,
    checkpoint_folder,
    clean_up,
    remove,
    steps_in,
    superfluous,
)
from ftrain.snapshots import read_snapshot


class DiskWriter:
    """Writes snapshots of one run into its `checkpoints`, and removes old ones.

    Args:
      run_dir: the run's folder.
      place: where that was when the run began.
      staging: where they are written, if not in `checkpoints` itself (see `lease`).
      keep, keep_every, keep_best: as in the config's section `checkpoint`.
    """

    def __init__(
        self,
        run_dir: str,
        place: Place,
        staging: str | None = None,
        *,
        keep: int,
        keep_every: int | None = None,
        keep_best: str | None = None,
    ):
        self._run_dir, self._place = run_dir, place
        self._keep, self._keep_every = keep, keep_every
        self._mode, _, metric = (keep_best or "").partition(" ")
        self._values = MetricValues(run_dir, metric) if metric else None
        self.folder = checkpoint_folder(run_dir)
        self.bad: set[int] = set()
        self._staging = Path(staging or self.folder)
        clean_up(self.folder, self._staging)

    def save(self, path: Path, digest: str) -> None:
        """Makes a snapshot a checkpoint; durable when this returns.

        Raises:
          OSError, ValueError, FtrainError: it could not be written. What was there is there still.
        """
        self._place.check(self._run_dir)
        meta, arrays = read_snapshot(path)
        found = digest_of(meta["leaves"], meta["step"], meta["cursor"], arrays).hex()
        if not found == meta["digest"] == digest:
            raise ValueError(f"{path}: {ALTERED}")
        try:
            write_checkpoint(self.folder / str(meta["step"]), meta, arrays, self._staging)
        except BaseException:
            clean_up(self.folder, self._staging)  # or it takes the room that the next one needs
            raise
        self.bad.discard(meta["step"])
        self._remove_old(meta["step"])

    def _remove_old(self, newest: int) -> None:
        steps = steps_in(self.folder)
        best = None
        if self._values is not None:
            good = [s for s in steps if s <= newest and s not in self.bad]
            best = best_of(self._values.update(), good, self._mode)
        for step in superfluous(
            steps,
            newest,
            keep=self._keep,
            keep_every=self._keep_every,
            best=best,
            bad=self.bad,
        ):
            remove(self.folder / str(step), self._staging)


def serve(writer: DiskWriter, lines: Any, report: Callable[..., None]) -> None:
    """Does what the lines say, one after the other, until they end."""
    for line in lines:
        order = json.loads(line)
        if "bad" in order:
            writer.bad.add(order["bad"])
            continue
        started, path, step = time.monotonic(), Path(order["path"]), order["step"]
        about = {"step": step, "digest": order["digest"]}
        try:
            writer.save(path, order["digest"])
        except BaseException as error:  # noqa: BLE001  whatever Orbax raises: told, judged elsewhere
            report("save_failed", **about, error=told_of(error, writer.folder / str(step)))
        else:
            report("saved", **about, seconds=time.monotonic() - started)
            path.unlink(missing_ok=True)
        for file in path.parent.glob(f"*{SAVE}"):
            if int(file.name.removesuffix(SAVE)) < step:
                file.unlink(missing_ok=True)  # nobody waits for it any more


def main() -> None:
    """Takes its job and then its orders from the control pipe, whose descriptor is in argv."""
    lines = os.fdopen(int(sys.argv[1]), encoding="utf-8")
    job = json.loads(lines.readline())
    work(job, lines, job.pop("records_fd"))


def work(job: dict[str, Any], lines: Any, records_fd: int) -> NoReturn:
    """Makes this process the saver, whether it was launched or forked.

    Args:
      job: `parent`, the supervisor's pid, and the arguments of `DiskWriter`.
      lines: orders.
      records_fd: for the answers.
    """
    import jax

    from ftrain.worker import end_with_parent
    from ftrain.worker_pipes import Reporter

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides when we end
    end_with_parent(job.pop("parent"))
    jax.config.update("jax_platforms", "cpu")  # Orbax opens a device, and it shall be no GPU
    import orbax.checkpoint  # noqa: F401  now, while nobody waits for it

    place = Place(*job.pop("place"))
    serve(DiskWriter(place=place, **job), lines, Reporter(records_fd))
    os._exit(0)


if __name__ == "__main__":
    main()
