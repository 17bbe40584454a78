"""Checkpoints, the fallback for when nobody is left: written by Orbax, alone, trusted by digest.

One worker writes, from host copies, in a thread, and never needs another (no barrier of Orbax's
crosses processes). A checkpoint is `checkpoints/<step>`, there once Orbax has renamed it; its
leaves are stored flat and in order, small ones joined, with `meta` (JSON as bytes) saying which
they are, so that trees, dtypes and bits come back exactly. Orbax is imported where it is used: 0.4
s that no recovery shall pay.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ftrain.digests import digest_of
from ftrain.errors import CheckpointUnreadableError, StateMismatchError
from ftrain.state import (
    Committed,
    StateSpec,
    cut_bytes,
    from_host,
    is_key,
    join_bytes,
    key_impl,
    to_host,
)

FORMAT = 2
SMALL_BYTES = 1 << 16  # smaller leaves share one array: Orbax takes 2 to 3 ms for each array
# What Orbax, tensorstore and json raise for a file that is torn, truncated, emptied or foreign.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class Saver:
    """Writes checkpoints of one worker, one at a time, in a thread of its own."""

    def __init__(
        self,
        run_dir: str,
        *,
        keep: int,
        dataset_length: int,
        report: Callable[..., None],
    ):
        self._folder, self._keep = checkpoint_folder(run_dir), keep
        self._dataset_length, self._report = dataset_length, report
        self._thread: threading.Thread | None = None
        self._started = self._done = -1
        self.error = ""

    def save(self, spec: StateSpec, state: Committed) -> None:
        """Begins to write `state`, unless that is done or under way. The copy is the only pause.

        While an older one is being written this one is passed over: training never waits.
        """
        if state.step in (self._started, self._done) or (self._thread and self._thread.is_alive()):
            return
        self._started = state.step
        arrays = [np.array(a) for a in to_host(state.leaves)]
        self._thread = threading.Thread(
            target=self._write, args=(spec, state, arrays), name="ftrain-saver", daemon=True
        )
        self._thread.start()

    def settled(self, step: int) -> bool:
        """Whether the checkpoint of `step` is durable, or could not be written (see `error`)."""
        return self._done == step

    def already_durable(self, step: int) -> None:
        """The state of `step` came from its checkpoint: there is nothing to write."""
        self._started = self._done = step

    def _write(self, spec: StateSpec, state: Committed, arrays: list[np.ndarray]) -> None:
        started = time.monotonic()
        try:
            write_checkpoint(
                self._folder / str(state.step),
                spec,
                state,
                arrays,
                dataset_length=self._dataset_length,
            )
            self._remove_old(state.step)
        except BaseException as error:  # noqa: BLE001  told and judged by the loop, whatever it is
            self.error = f"{type(error).__name__}: {error}"
            self._report("save_failed", step=state.step, error=self.error)
        else:
            self.error = ""
            self._report(
                "checkpoint_saved", step=state.step, tier="disk", seconds=time.monotonic() - started
            )
        self._done = state.step

    def _remove_old(self, newest: int) -> None:
        older = [step for step in steps_in(self._folder) if step <= newest]
        for step in older[self._keep :]:
            shutil.rmtree(self._folder / str(step), ignore_errors=True)


def checkpoint_folder(run_dir: str) -> Path:
    """Where a run keeps its checkpoints; absolute, as Orbax wants it."""
    return Path(run_dir).absolute() / "checkpoints"


def steps_in(folder: Path) -> list[int]:
    """The steps that Orbax committed, newest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted((int(e.name) for e in os.scandir(folder) if e.name.isdigit()), reverse=True)
    return []


def write_checkpoint(
    path: Path,
    spec: StateSpec,
    state: Committed,
    arrays: list[np.ndarray],
    *,
    dataset_length: int,
) -> None:
    """Writes one checkpoint, or replaces it; durable when this returns."""
    import orbax.checkpoint as ocp

    meta = {
        "format": FORMAT,
        "step": state.step,
        "cursor": state.cursor,
        "dataset_length": dataset_length,
        "leaves": spec.lines(),
        "paths": [_plain_path(p) for p in _key_paths(spec)],
        "counts": spec.counts,
        "keys": [key_impl(leaf) if is_key(leaf) else None for leaf in spec.leaves],
        "shapes": [[list(shape), dtype.name] for shape, dtype in spec.host_shapes],
        "small_bytes": SMALL_BYTES,
        "digest": digest_of(spec.lines(), state.step, state.cursor, arrays).hex(),
    }
    tree = _stored(arrays)
    tree["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    checkpointer = _checkpointer()
    checkpointer.save(path, args=ocp.args.PyTreeSave(tree), force=True)
    if not path.is_dir():  # Orbax says nothing when it takes this process for one that only reads
        raise OSError(f"Orbax wrote no {path}")


def _stored(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """What Orbax is given: large leaves each by its number, as they are; all small ones as bytes.

    Of a dtype that its files do not know (float8_e4m3: tensorstore 0.1.86) as bytes too.
    """
    tree = {f"{i:05d}": a for i, a in enumerate(arrays) if a.nbytes >= SMALL_BYTES}
    for name, array in tree.items():
        if array.dtype.isbuiltin != 1 and array.dtype.name != "bfloat16":
            tree[name] = join_bytes([array])
    together = join_bytes(a for a in arrays if a.nbytes < SMALL_BYTES)
    return {**tree, "small": together} if together.size else tree  # Orbax refuses empty arrays


def _from_stored(tree: dict[str, np.ndarray], meta: dict[str, Any]) -> list[np.ndarray]:
    shapes = [(shape, jax.numpy.dtype(name)) for shape, name in meta["shapes"]]
    large = {
        i: join_bytes([tree[f"{i:05d}"]]).view(dtype).reshape(shape)
        for i, (shape, dtype) in enumerate(shapes)
        if math.prod(shape) * dtype.itemsize >= meta["small_bytes"]
    }
    together = tree.get("small", np.zeros(0, np.uint8))
    small = iter(cut_bytes(together, (s for i, s in enumerate(shapes) if i not in large)))
    return [large[i] if i in large else next(small) for i in range(len(shapes))]


def _checkpointer() -> Any:
    """An Orbax checkpointer that acts as if this process were the only one."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.multihost import multihost
    from orbax.checkpoint.options import MultiprocessingOptions

    # Orbax writes numpy arrays from process 0 alone, whatever its options say, and says nothing:
    # all others leave checkpoints without content (NumpyHandler._background_serialize, 0.12.8).
    multihost.process_index = lambda: 0
    alone = MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="ftrain"
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=alone,
        enable_pinned_host_transfer=False,  # or it opens a device, to ask whether it is a GPU
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The meta data and leaves of one checkpoint.

    Raises:
      CheckpointUnreadableError: it is torn, altered or not ftrain's.
    """
    import orbax.checkpoint as ocp

    try:
        checkpointer = _checkpointer()
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:
            raise ValueError("it has no metadata")
        names = list(metadata.tree)
        tree = checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            ),
        )
        meta = json.loads(bytes(tree["meta"]))
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']}, this ftrain reads {FORMAT}")
        arrays = _from_stored(tree, meta)
        found = digest_of(meta["leaves"], meta["step"], meta["cursor"], arrays).hex()
        if found != meta["digest"]:
            raise ValueError("its content has changed since it was written (digest)")
    except UNREADABLE as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointUnreadableError(str(path), why) from error
    return meta, arrays


def restore_newest(
    run_dir: str, spec: StateSpec, *, dataset_length: int, report: Callable[..., None]
) -> Committed | None:
    """The newest good checkpoint as committed state; None if the run has none at all.

    Raises:
      CheckpointUnreadableError: there are checkpoints and none can be read: never a silent step 0.
      StateMismatchError: the state tree is not the checkpoint's; names the leaf.
    """
    folder = checkpoint_folder(run_dir)
    steps = steps_in(folder)
    for step in steps:
        try:
            meta, arrays = read_checkpoint(folder / str(step))
            _check_same_leaves(spec, meta)
            state = Committed(meta["step"], meta["cursor"], from_host(spec, arrays))
        except CheckpointUnreadableError as error:
            report("checkpoint_skipped", step=step, why=error.why)
            continue
        if meta["dataset_length"] != dataset_length:
            raise StateMismatchError(
                "len(dataset())",
                str(dataset_length),
                str(meta["dataset_length"]),
                donor=f"checkpoint {step}",
            )
        report("checkpoint_restored", step=step, tier="disk")
        return state
    if steps:
        raise CheckpointUnreadableError(
            str(folder),
            f"none of the steps {steps} can be read; to start afresh on purpose move "
            "this folder away",
        )
    return None


def _check_same_leaves(spec: StateSpec, meta: dict[str, Any]) -> None:
    if spec.lines() != meta["leaves"]:
        raise StateMismatchError.between(
            spec.lines(), meta["leaves"], worker="this trainer", donor=f"checkpoint {meta['step']}"
        )


def _key_paths(spec: StateSpec) -> list[tuple[Any, ...]]:
    trees = [jax.tree.unflatten(t, list(range(t.num_leaves))) for t in spec.treedefs]
    return [path for tree in trees for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _plain_path(path: tuple[Any, ...]) -> list[str | int]:
    """A leaf's path as JSON: text for a key or attribute, a number for a place in a sequence."""
    return [
        entry.idx
        if isinstance(entry, jax.tree_util.SequenceKey)
        else str(getattr(entry, "key", getattr(entry, "name", entry)))
        for entry in path
    ]
