"""Losses, gradients and updates that are nan or infinite: how they are found and how they are told.

Judged on what is summed over the workers, so that every member sees the same and does the same. An
element counts once it has become non-finite: an optimizer may begin with an infinite best loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SKIPS_IN_A_ROW = 100  # then the run stops: a model that is broken for ever learns nothing
SHARDS_TOLD = 8
KINDS = ("loss", "weight", "gradient", "model state")  # bit i of a shard's flag stands for kind i


class Nonfinite(NamedTuple):
    """What was not finite in a step; the same on every member."""

    shards: dict[int, list[str]]  # shard -> which of KINDS it gave; empty if no shard did
    source: str  # "shards", or where it arose though every shard was finite: "sum" or "update"
    values: list[str]  # such as "loss nan", the first of each kind

    @property
    def mark(self) -> list[int] | list[str]:
        """What the metrics line says: the shards, or ["sum"] or ["update"]."""
        return list(self.shards) or [self.source]


# On the device.


def any_nonfinite(arrays: Iterable[Any]) -> jax.Array:
    """Whether any element is nan or infinite. Traced."""
    return _any(~jnp.isfinite(x) for x in arrays)


def any_became_nonfinite(old: Sequence[Any], new: Sequence[Any]) -> jax.Array:
    """Whether any finite element of `old` is nan or infinite in `new`. Traced; skips integers."""
    return _any(
        jnp.isfinite(a) & ~jnp.isfinite(b)
        for a, b in zip(old, new, strict=True)
        if jnp.issubdtype(b.dtype, jnp.inexact)
    )


def _any(conditions: Iterable[jax.Array]) -> jax.Array:
    found = jnp.bool_(False)
    for condition in conditions:
        found |= condition.any()
    return found


def flag_of(kinds: Sequence[jax.Array]) -> jax.Array:
    """A shard's flag, a float32 that a sum with zeros keeps exactly. Traced.

    Args:
      kinds: bool[] for each of KINDS.
    """
    return sum(jnp.where(bad, 2.0**bit, 0.0) for bit, bad in enumerate(kinds)).astype(jnp.float32)


# On the host, once something was found.


def kinds_of(flag: float) -> list[str]:
    """Which kinds `flag_of` was told."""
    bits = int(flag) if math.isfinite(flag) else 0  # a cancelled collective may give anything
    return [kind for bit, kind in enumerate(KINDS) if bits >> bit & 1]


def first_value(named: Iterable[tuple[str, np.ndarray, np.ndarray | None]]) -> list[str]:
    """The first (name, array, its finite predecessor or None) that is not finite, as one text."""
    for name, array, old in named:
        bad = ~np.isfinite(array) & (True if old is None else np.isfinite(old))
        if np.any(bad):
            value = array[bad][0]
            return [f"{name} {value if np.iscomplexobj(value) else float(value)}"]
    return []


def one_line(found: Nonfinite, owners: Mapping[int, int]) -> str:
    """What and where: `loss nan; shard 3 of worker 1`. `owners` gives each shard's worker."""
    where = {
        "shards": ", ".join(f"shard {s} of worker {owners[s]}" for s in _told(found))
        + _rest(found),
        "sum": "the sum over the shards",
        "update": "the update",
    }[found.source]
    return f"{', '.join(found.values)}; {where}"


def why_stopped(
    found: Nonfinite,
    step: int,
    owners: Mapping[int, int],
    samples: Callable[[int], str],
    reduce_dtype: str,
    skipped: int,
) -> str:
    """The last lines of a run that stops at `step`: what, where from, and what to do.

    Args:
      found: in that step.
      step: the one that is not committed.
      owners: each shard's worker.
      samples: what a shard's samples are called.
      reduce_dtype: the config's.
      skipped: steps in a row that were skipped before this one.
    """
    lines = [f"step {step} is not finite: {', '.join(found.values)}"]
    if skipped:
        lines[0] = f"{skipped} steps in a row were skipped, and {lines[0]}"
    lines += [
        f"  shard {s} of worker {owners[s]}: {' and '.join(found.shards[s])}, from {samples(s)}"
        for s in _told(found)
    ]
    if _rest(found):
        lines.append(f"  {_rest(found).strip()}")
    lines.append(f"it was not committed; the last good state is that of step {step - 1}")
    lines.append(_next_action(found, reduce_dtype, len(owners)))
    return "\n".join(lines)


def _next_action(found: Nonfinite, reduce_dtype: str, shards: int) -> str:
    skip = "on_nonfinite: skip goes on without such steps"
    if found.source == "update":
        return (
            "the gradients were finite, the update made that of them: "
            f"look at optimizer() and update(), or clip the gradients; {skip}"
        )
    if found.source == "sum":
        wider = "set reduce_dtype: float32, or " if reduce_dtype == "param" else ""
        return f"each shard was finite, their sum is not: {wider}scale the loss down; {skip}"
    if len(found.shards) == shards > 1:
        return (
            "every shard gave it, so look at loss() and the learning rate before the samples; "
            + skip
        )
    return f"look at the samples of that shard; {skip}"


def _told(found: Nonfinite) -> list[int]:
    return list(found.shards)[:SHARDS_TOLD]


def _rest(found: Nonfinite) -> str:
    more = len(found.shards) - SHARDS_TOLD
    return f" and {more} more shard{'s' * (more > 1)}" if more > 0 else ""
