"""The local update: from the sums over all shards to the next state, by the user's `update`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ftrain.contribution import Contribution, is_mean
from ftrain.errors import TrainerError
from ftrain.layout import from_words
from ftrain.mesh import Buffers
from ftrain.nonfinite import any_became_nonfinite, any_nonfinite
from ftrain.state import StateSpec, TrainState, spec_of
from ftrain.user_metrics import check_metrics, metric_names


class Update:
    """The traced function of an update.

    Args:
      trainer: the user's.
      spec: the state's.
      plan: what the sums hold.
      in_tree: whether they were taken in the order of the tree, for reproducible bits.

    Attributes:
      extra_names: of the metrics that `update` returned; known once it has been traced.
    """

    def __init__(self, trainer: Any, spec: StateSpec, plan: Contribution, *, in_tree: bool):
        self._trainer, self._spec, self._plan, self._in_tree = trainer, spec, plan, in_tree
        self._params, _, _ = spec.split(spec.leaves)
        self.extra_names: list[str] = []

    def __call__(
        self, params: list, opt: list, model: list, sums: Buffers, step: Any, cursor: Any
    ) -> tuple[list, jax.Array]:
        """The new leaves, and loss, metrics, weight, stop and whether it is bad. Traced."""
        take = self._plan.layout.take
        sums, grads, weight, divisor = self._means(sums)
        old, model = [*params, *opt, *model], list(model)
        for i, slot in self._plan.model_slots.items():
            model[i] = self._new_model_leaf(model[i], take(sums, slot), weight, divisor)
        state = self._spec.train_state(step, cursor, [*params, *opt, *model])
        out = self._trainer.update(state, jax.tree.unflatten(self._spec.treedefs[0], grads))
        new, extra = out if isinstance(out, tuple) else (out, {})
        if not isinstance(new, TrainState):
            raise TrainerError(
                f"update: returned {type(new).__name__}; return the TrainState, as "
                "state.replace(params=..., opt_state=...), or (state, metrics)"
            )
        check_metrics("update", extra)
        self.extra_names = metric_names("update", extra, taken=self._plan.metric_names)
        leaves = self._checked_leaves(new)
        bad = self._are_bad(sums, grads)
        if self._plan.judged_shards:
            bad |= any_became_nonfinite(old, leaves)
        more = [jnp.asarray(extra[n], jnp.float32).reshape(1) for n in self.extra_names]
        return leaves, self._vector(sums, weight, divisor, more, bad)

    def judge(self, sums: Buffers) -> jax.Array:
        """What `__call__` tells, as far as the sums tell it: nothing of `update`. Traced."""
        sums, grads, weight, divisor = self._means(sums)
        return self._vector(sums, weight, divisor, [], self._are_bad(sums, grads))

    def _means(self, sums: Buffers) -> tuple[Buffers, list[jax.Array], jax.Array, jax.Array]:
        """The sums, the mean gradients, the weight, and what to divide sums by. Traced."""
        take = self._plan.layout.take
        if self._in_tree:
            sums = [_one_nan(b) for b in sums]
        weight = take(sums, self._plan.scalars)[-1]
        divisor = jnp.where(weight > 0, weight, 1)
        mean = [
            take(sums, slot) / divisor.astype(self._plan.layout.dtypes[slot.group])
            for slot in self._plan.grad_slots
        ]
        grads = [g.astype(p.dtype) for g, p in zip(mean, self._params, strict=True)]
        return sums, grads, weight, divisor

    def _are_bad(self, sums: Buffers, grads: list[jax.Array]) -> jax.Array:
        if not self._plan.judged_shards:
            return jnp.bool_(False)
        take = self._plan.layout.take
        scalars = take(sums, self._plan.scalars)
        return take(sums, self._plan.flags).any() | any_nonfinite([scalars[0], scalars[-1], *grads])

    def _vector(
        self, sums: Buffers, weight: Any, divisor: Any, more: list[jax.Array], bad: jax.Array
    ) -> jax.Array:
        take = self._plan.layout.take
        told = jnp.stack([weight, take(sums, self._plan.stop), bad.astype(jnp.float32)])
        return jnp.concatenate([take(sums, self._plan.scalars)[:-1] / divisor, *more, told])

    def _new_model_leaf(self, old: Any, summed: jax.Array, weight: Any, divisor: Any) -> jax.Array:
        if not is_mean(old):
            return from_words(summed, jax.ShapeDtypeStruct(old.shape, old.dtype))
        mean = summed / divisor.astype(summed.dtype)
        return jnp.where(weight > 0, mean.astype(old.dtype), old)

    def _checked_leaves(self, new: Any) -> list[Any]:
        got = spec_of(new.params, new.opt_state, new.model_state)
        if got.treedefs != self._spec.treedefs or got.leaves != self._spec.leaves:
            was, now = self._spec.lines(), got.lines()
            differ = [f"{a} became {b}" for a, b in zip(was, now, strict=False) if a != b]
            raise TrainerError(
                "update: must return a state of the same tree, shapes and dtypes: "
                + (differ[0] if differ else f"{self._spec.treedefs} became {got.treedefs}")
            )
        return jax.tree.leaves((new.params, new.opt_state, new.model_state))


def _one_nan(x: jax.Array) -> jax.Array:
    """NaN as one pattern of bits: a sum of two may have either's, as the compiler likes. Traced."""
    return jnp.where(jnp.isnan(x), jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x
