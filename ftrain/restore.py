"""What a run goes on from: the newest good state on disk or in memory, or nothing at all.

What cannot be used is named with its reason and passed over, and the next older one is tried. A run
that has saved something never begins anew by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.checkpoint import (
    ALTERED,
    check_format,
    checkpoint_folder,
    read_unchecked,
    steps_in,
)
from ftrain.digests import digest_of
from ftrain.errors import CheckpointUnreadableError, StateMismatchError
from ftrain.history import Begun, belongs
from ftrain.memory_tier import snapshots_in
from ftrain.snapshots import read_meta, read_snapshot
from ftrain.state import Committed, StateSpec, from_host

TIERS = ("memory", "disk")  # of one step the first is read, which is quicker


class Restored(NamedTuple):
    """A state that is as it was when it was saved."""

    state: Committed
    evaluated: int  # the last step that was evaluated
    tier: str
    digest: str


def restore_newest(
    run_dir: str,
    spec: StateSpec,
    *,
    dataset_length: int,
    report: Callable[..., None],
    memory: Sequence[Path] = (),
    begun: Begun | None = None,
    digest: Callable[[Committed], bytes] | None = None,
) -> Restored | None:
    """The newest good state that was saved; None if none was.

    Args:
      run_dir: the run's folder.
      spec: of the trainer as it is now.
      dataset_length: of the data set as it is now.
      report: called as report("checkpoint_skipped", step, tier, why) for each that cannot be used,
        then report("checkpoint_restored", step, tier, digest).
      memory: folders of snapshots.
      begun: the histories of the run's records, where snapshots have to belong to one of these.
      digest: of a state, where it is to be used; None: computed on the host.

    Raises:
      CheckpointUnreadableError: there are some and none can be read: never a silent step 0.
      StateMismatchError: those that can be read are of another state tree or data set; names the
        leaf and both sides of the newest.
    """
    mismatch: StateMismatchError | None = None
    found = _candidates(run_dir, memory)
    for step, tier, path in found:
        try:
            if tier == "memory" and begun is not None:
                check_belongs(path, step, begun)
            restored = _restore(step, tier, path, spec, dataset_length, digest)
        except CheckpointUnreadableError as error:
            report("checkpoint_skipped", step=step, tier=tier, why=error.why)
        except StateMismatchError as error:
            mismatch = mismatch or error
            report("checkpoint_skipped", step=step, tier=tier, why=error.difference)
        else:
            report("checkpoint_restored", step=step, tier=tier, digest=restored.digest)
            return restored
    if mismatch is not None:
        raise mismatch
    if found:
        raise CheckpointUnreadableError(
            str(checkpoint_folder(run_dir)),
            f"none of the steps {list(dict.fromkeys(step for step, _, _ in found))} can be read; "
            "to start afresh on purpose move the run's folder away, or give another with --run-dir",
        )
    return None


def _candidates(run_dir: str, memory: Sequence[Path]) -> list[tuple[int, str, Path]]:
    folder = checkpoint_folder(run_dir)
    try:
        found = [(step, "disk", folder / str(step)) for step in steps_in(folder)]
        for place in memory:
            found += [(step, "memory", path) for step, path in snapshots_in(place)]
    except OSError as error:  # a folder that may not be read, or is none
        raise CheckpointUnreadableError.by(folder, error) from error
    return sorted(found, key=lambda item: (-item[0], TIERS.index(item[1])))


def newest_step(run_dir: str, memory: Sequence[Path], begun: Begun) -> int:
    """The newest step that this host could restore, as far as names and headers tell; -1: none."""
    with contextlib.suppress(CheckpointUnreadableError):
        for step, tier, path in _candidates(run_dir, memory):
            with contextlib.suppress(CheckpointUnreadableError):
                if tier == "memory":
                    check_belongs(path, step, begun)
                return step
    return -1


def check_belongs(path: Path, step: int, begun: Begun) -> None:
    """Raises CheckpointUnreadableError for a snapshot of a history that was given up."""
    if not belongs(read_meta(path).get("history", ""), step, begun):
        raise CheckpointUnreadableError(str(path), "it is of a history that was given up")


def _restore(
    step: int,
    tier: str,
    path: Path,
    spec: StateSpec,
    dataset_length: int,
    digest: Callable[[Committed], bytes] | None,
) -> Restored:
    meta, arrays = read_unchecked(path) if tier == "disk" else read_snapshot(path)
    try:
        check_format(meta)
        if meta["step"] != step:
            raise ValueError(f"it is the state of step {meta['step']}")
        _check_same_run(spec, dataset_length, meta)
        if [(a.shape, a.dtype) for a in arrays] != spec.host_shapes:
            raise ValueError(ALTERED)
        state = Committed(step, meta["cursor"], from_host(spec, arrays))
        got = digest(state) if digest else digest_of(spec.lines(), step, state.cursor, arrays)
        if got.hex() != meta["digest"]:
            raise ValueError(ALTERED)
        return Restored(state, meta.get("evaluated", step), tier, meta["digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointUnreadableError.by(path, error) from error


def _check_same_run(spec: StateSpec, dataset_length: int, meta: dict[str, Any]) -> None:
    donor = f"checkpoint {meta['step']}"
    if spec.lines() != meta["leaves"]:
        raise StateMismatchError.between(
            spec.lines(), meta["leaves"], worker="this trainer", donor=donor
        )
    if meta["dataset_length"] != dataset_length:
        raise StateMismatchError(
            "len(dataset())",
            str(dataset_length),
            str(meta["dataset_length"]),
            worker="this trainer",
            donor=donor,
        )
