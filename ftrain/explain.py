"""What was not finite in a step, from its sums and states. Slow, and seldom needed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.contribution import Contribution, is_mean
from ftrain.mesh import Buffers
from ftrain.nonfinite import Nonfinite, first_value, kinds_of
from ftrain.state import StateSpec


def explain(
    plan: Contribution,
    spec: StateSpec,
    old: Sequence[jax.Array],
    new: Sequence[jax.Array],
    sums: Buffers,
) -> Nonfinite:
    """What is not finite, from values that every member has alike. Slow, and seldom needed."""
    sums, take = [np.asarray(b) for b in sums], plan.layout.take
    scalars, flags = take(sums, plan.scalars), take(sums, plan.flags)
    params, _, model = spec.split(spec.paths)
    _, _, old_model = spec.split(old)
    values = [
        *first_value([("loss", scalars[:1], None)]),
        *first_value([("weight", scalars[-1:], None)]),
        *first_value(
            (f"gradient of {path}", take(sums, slot), None)
            for path, slot in zip(params, plan.grad_slots, strict=True)
        ),
        *first_value(
            (model[i], take(sums, slot), np.asarray(old_model[i]))
            for i, slot in plan.model_slots.items()
            if is_mean(old_model[i])
        ),
    ]
    shards = {s: kinds_of(flag) for s, flag in enumerate(flags.tolist()) if flag}
    source = "shards" if shards else "sum" if values else "update"
    leaves = zip(spec.paths, new, old, strict=True)
    return Nonfinite(
        shards,
        source,
        values
        or first_value(
            (path, np.asarray(leaf), np.asarray(before))
            for path, leaf, before in leaves
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
        or ["a gradient's mean"],
    )
