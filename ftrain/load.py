"""What users read from a run's checkpoints: `ftrain.load_params` and `ftrain.load_state`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ftrain.checkpoint import checkpoint_folder, read_checkpoint, steps_in
from ftrain.errors import CheckpointNotFoundError, CheckpointUnreadableError, StateMismatchError
from ftrain.state import TrainState, spec_of


def load_params(run_dir: str, step: int | None = None, like: Any = None) -> Any:
    """The parameters of a run's checkpoint, on the host.

    Needs neither the trainer nor a device, writes nothing, and may be called while the run trains.

    Args:
      run_dir: the run's folder.
      step: which checkpoint; None for the newest that can be read.
      like: a tree, of arrays or `jax.eval_shape`'s, whose structure the result takes; None gives
        nested dicts, and lists where the tree had sequences.

    Returns:
      The tree. Its leaves are numpy arrays of the dtype and shape that was trained (bfloat16 and
      float8 by ml_dtypes); typed PRNG keys are JAX's, and only they open a device.

    Raises:
      CheckpointNotFoundError: there is none (of that step).
      CheckpointUnreadableError: none can be read.
      StateMismatchError: `like` has another leaf; names it and both sides.
    """
    meta, arrays = read_for_user(run_dir, step)
    return _trees(meta, arrays, (like, None, None) if like is not None else None)[0]


def load_state(run_dir: str, step: int | None = None, like: TrainState | None = None) -> TrainState:
    """All of a run's checkpoint. A model with batch statistics is useless without `model_state`.

    Args, raises: as `load_params`; `like` is a TrainState.

    Returns:
      A TrainState: `step` as int32 and `cursor`, the samples consumed, as int64 scalars of numpy;
      `params`, `opt_state` and `model_state` as `load_params` gives a tree. Without `like` optax's
      tuples come back as lists and dicts, and a tree without leaves as None.
    """
    meta, arrays = read_for_user(run_dir, step)
    trees = _trees(
        meta, arrays, None if like is None else (like.params, like.opt_state, like.model_state)
    )
    return TrainState(np.int32(meta["step"]), np.int64(meta["cursor"]), *trees)


def read_for_user(run_dir: str, step: int | None) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The meta data and leaves of a checkpoint: of `step`, or of the newest that can be read.

    Raises:
      CheckpointNotFoundError: there is none (of that step).
      CheckpointUnreadableError: none can be read.
    """
    folder = checkpoint_folder(run_dir)
    failed: dict[int, CheckpointUnreadableError] = {}
    while True:
        # Listed again each time: a run that trains saves new ones and removes old ones meanwhile.
        steps = steps_in(folder)
        wanted = [s for s in steps if s not in failed and step in (None, s)]
        if not wanted:
            break
        try:
            return read_checkpoint(folder / str(wanted[0]))
        except CheckpointUnreadableError as error:
            failed[wanted[0]] = error
    there = [s for s in failed if s in steps]
    if not there:
        raise CheckpointNotFoundError(run_dir, step, steps)
    raise failed[there[-1]]


def _trees(meta: dict[str, Any], arrays: list[np.ndarray], like: Any) -> list[Any]:
    leaves = [
        a if impl is None else jax.random.wrap_key_data(a, impl=impl)
        for a, impl in zip(arrays, meta["keys"], strict=True)
    ]
    trees, start = [], 0
    for i, count in enumerate(meta["counts"]):
        part, here = leaves[start : start + count], slice(start, start + count)
        given = None if like is None else like[i]
        if given is None:
            trees.append(_nested(meta["paths"][here], part))
        else:
            wanted = spec_of(*(given if j == i else None for j in range(3))).lines()
            if wanted != meta["leaves"][here]:
                raise StateMismatchError.between(
                    wanted,
                    meta["leaves"][here],
                    worker="`like`",
                    donor=f"checkpoint {meta['step']}",
                )
            trees.append(jax.tree.unflatten(jax.tree.structure(given), part))
        start += count
    return trees


def _nested(paths: list[list[Any]], leaves: list[Any]) -> Any:
    """Nested dicts, and lists where the tree had sequences; None for a tree without leaves."""
    if not leaves:
        return None
    if not paths[0]:
        return leaves[0]
    keys = list(dict.fromkeys(path[0] for path in map(tuple, paths)))
    children = {
        key: _nested(
            [p[1:] for p in paths if p[0] == key],
            [x for p, x in zip(paths, leaves, strict=True) if p[0] == key],
        )
        for key in keys
    }
    if not all(isinstance(key, int) for key in keys):
        return children
    return [children.get(i) for i in range(max(keys) + 1)]  # None where a place has no leaf
