"""The form of a checkpoint on disk: written by Orbax, by one process alone, trusted by digest.

A checkpoint is `checkpoints/<step>`, there once it is whole and on the disk. Its leaves are stored
flat and in order, small ones joined, with `meta` (JSON as bytes) saying which they are, so that
trees, dtypes and bits come back exactly. Orbax is imported where it is used: 0.4 s that no recovery
shall pay.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ftrain.digests import digest_of
from ftrain.errors import CheckpointUnreadableError
from ftrain.retention import OLD, PART, checkpoint_folder, steps_in
from ftrain.state import StateSpec, cut_bytes, is_key, join_bytes, key_impl

__all__ = ["checkpoint_folder", "meta_of", "read_checkpoint", "steps_in", "write_checkpoint"]

FORMAT = 2
ALTERED = "its content has changed since it was written (digest)"
SMALL_BYTES = 1 << 16  # smaller leaves share one array: Orbax takes 2 to 3 ms for each array
# What Orbax, tensorstore and json raise for a file that is torn, truncated, emptied or foreign.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError)


def meta_of(
    spec: StateSpec, *, step: int, cursor: int, dataset_length: int, evaluated: int, digest: str
) -> dict[str, Any]:
    """What a checkpoint or a snapshot says about its leaves, as JSON takes it.

    Args:
      spec: the state's.
      step: committed.
      cursor: samples consumed.
      dataset_length: of the data set that the cursor counts in.
      evaluated: the last step that was evaluated.
      digest: of that state, in hexadecimal.
    """
    return {
        "format": FORMAT,
        "step": step,
        "cursor": cursor,
        "dataset_length": dataset_length,
        "evaluated": evaluated,
        "leaves": spec.lines(),
        "paths": [_plain_path(p) for p in _key_paths(spec)],
        "counts": spec.counts,
        "keys": [key_impl(leaf) if is_key(leaf) else None for leaf in spec.leaves],
        "shapes": [[list(shape), dtype.name] for shape, dtype in spec.host_shapes],
        "small_bytes": SMALL_BYTES,
        "digest": digest,
    }


def write_checkpoint(
    path: Path,
    meta: dict[str, Any],
    arrays: Sequence[np.ndarray],
    staging: Path | None = None,
) -> None:
    """Writes one checkpoint, or replaces it; durable when this returns.

    Args:
      path: `checkpoints/<step>`.
      meta: as `meta_of` gives it.
      arrays: the leaves, as `state.to_host` gives them.
      staging: the folder in which it is written, if not beside it (see `lease`).

    Raises:
      OSError: it could not be written; what was there before is there still.
    """
    import orbax.checkpoint as ocp

    tree = _stored(arrays)
    tree["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    part, old = ((staging or path.parent) / (path.name + suffix) for suffix in (PART, OLD))
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    checkpointer().save(part, args=ocp.args.PyTreeSave(tree))
    if not part.is_dir():  # Orbax says nothing when it takes this process for one that only reads
        raise OSError(f"Orbax wrote no {part}")
    _sync(part)
    with contextlib.suppress(FileNotFoundError):
        path.rename(old)
    part.rename(path)
    _sync_one(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """What is in a folder, and the folder, reach the disk: Orbax leaves that to the system."""
    for folder, _, files in os.walk(path):
        for name in (*files, ""):
            _sync_one(Path(folder, name))


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def checkpointer() -> Any:
    """An Orbax checkpointer that acts as if this process were the only one, and opens no device."""
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
    """The meta data and leaves of one checkpoint, checked by its digest.

    Raises:
      CheckpointUnreadableError: it is torn, altered or not ftrain's.
    """
    meta, arrays = read_unchecked(path)
    check_digest(path, meta, arrays)
    return meta, arrays


def check_digest(path: Path, meta: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Raises CheckpointUnreadableError if the leaves are not those that were saved."""
    if digest_of(meta["leaves"], meta["step"], meta["cursor"], arrays).hex() != meta["digest"]:
        raise CheckpointUnreadableError(str(path), ALTERED)


def read_unchecked(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The same, for who compares the digest himself, where the leaves are to be used.

    Raises:
      CheckpointUnreadableError: it is torn or not ftrain's.
    """
    import orbax.checkpoint as ocp

    try:
        orbax = checkpointer()
        metadata = orbax.metadata(path).item_metadata
        if metadata is None:
            raise ValueError("it has no metadata")
        names = list(metadata.tree)
        tree = orbax.restore(
            path,
            args=ocp.args.PyTreeRestore(
                restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            ),
        )
        meta = json.loads(bytes(tree["meta"]))
        check_format(meta)
        return meta, _from_stored(tree, meta)
    except UNREADABLE as error:
        raise CheckpointUnreadableError.by(path, error) from error


def check_format(meta: dict[str, Any]) -> None:
    """Raises ValueError if a later, or a much earlier, ftrain has written it."""
    if meta["format"] != FORMAT:
        raise ValueError(f"its format is {meta['format']}, this ftrain reads {FORMAT}")


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
