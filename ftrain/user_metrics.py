"""The metrics that user code returns: their names and shapes, checked before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ftrain.errors import TrainerError

RESERVED = frozenset("t step loss samples workers step_time_s digest weight nonfinite".split())
RESERVED_PREFIX = "eval_"


def check_metrics(where: str, metrics: Any) -> None:
    """Refuses what is not {name: float scalar}, and the names that are ftrain's own."""
    if not isinstance(metrics, Mapping):
        raise TrainerError(
            f"{where}: metrics are {type(metrics).__name__}; return a dict of "
            "{name: float scalar}"
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or (
            where != "evaluate" and (name in RESERVED or name.startswith(RESERVED_PREFIX))
        ):
            raise TrainerError(
                f"{where}: the metric name {name!r} is ftrain's own or no text; "
                f"taken are {sorted(RESERVED)} and the prefix {RESERVED_PREFIX}"
            )
        value = jnp.asarray(value)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise TrainerError(
                f"{where}: metric {name!r} is {value.dtype}{list(value.shape)}; it "
                "must be a float scalar"
            )


def metric_names(where: str, metrics: Mapping[str, Any], taken: Sequence[str] = ()) -> list[str]:
    """The names in the order in which their values travel."""
    both = sorted(set(metrics) & set(taken))
    if both:
        raise TrainerError(f"{where}: metric {both[0]!r} is already returned by loss; rename one")
    return sorted(metrics)
