"""The user's loss of one shard, on flat leaves, with every rule about what it may return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from ftrain.errors import TrainerError
from ftrain.state import Loss, StateSpec, describe
from ftrain.user_metrics import check_metrics, metric_names


class ShardLoss:
    """`Trainer.loss` as the programs call it.

    Args:
      trainer: the user's.
      spec: the state's.
      batch_tree: the tree of a batch.
      seed: of the run; a shard's key is a function of it, the step and the shard.
    """

    def __init__(self, trainer: Any, spec: StateSpec, batch_tree: Any, seed: int):
        self._trainer, self._spec = trainer, spec
        self._batch_tree, self._seed = batch_tree, seed
        self._params, _, self._model = spec.split(spec.leaves)

    def __call__(
        self,
        params: Sequence[Any],
        model: Sequence[Any],
        batch: Sequence[Any],
        step: Any,
        shard: Any,
    ) -> tuple[Any, dict[str, Any], Any, list[Any]]:
        """The loss of one shard, its metrics, weight and model state. Traced."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), step), shard)
        params_def, _, model_def = self._spec.treedefs
        state = jax.tree.unflatten(model_def, model)
        args = [
            jax.tree.unflatten(params_def, params),
            jax.tree.unflatten(self._batch_tree, batch),
            key,
        ]
        if self._model or state is not None:
            args.append(state)
        out = _as_loss(self._trainer.loss(*args))
        if out.value is None:
            raise TrainerError("loss: returned None; return the shard's mean loss, a float scalar")
        value = jnp.asarray(out.value)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise TrainerError(
                f"loss: returned {describe(value)}; it must be a float scalar, the "
                "mean over the shard"
            )
        samples = batch[0].shape[0]
        weight = samples if out.weight is None else jax.lax.stop_gradient(out.weight)
        check_metrics("loss", out.metrics)
        new = list(model) if out.model_state is None else self._model_leaves(out.model_state)
        return value, dict(out.metrics), jnp.asarray(weight, jnp.float32), new

    def _model_leaves(self, tree: Any) -> list[Any]:
        got, wanted = jax.tree.structure(tree), self._spec.treedefs[2]
        if got != wanted:
            raise TrainerError(f"loss: model_state has the tree {got}; init_params gave {wanted}")
        leaves = jax.tree.leaves(tree)
        paths = self._spec.split(self._spec.paths)[2]
        for path, leaf, old in zip(paths, map(_array, leaves), self._model, strict=True):
            if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
                raise TrainerError(
                    f"loss: {path} is {describe(leaf)}, init_params gave "
                    f"{describe(old)}; return the same shapes and dtypes"
                )
        return [_array(leaf) for leaf in leaves]

    def outputs(self, batch: list[jax.ShapeDtypeStruct]) -> tuple[list[str], list[int]]:
        """The names of the loss's metrics, and which leaves of the model state it changes."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        jaxpr, out = jax.make_jaxpr(
            lambda model, params, batch, step, shard: self(params, model, batch, step, shard),
            return_shape=True,
        )(self._model, self._params, batch, index, index)
        _, metrics, _, model = out
        # A leaf handed back untouched stays as it is and does not travel: averaging equal copies
        # changes the bits of most of them (facts: 64 % of elements at 12 copies).
        returned = _origins(jaxpr.jaxpr)[len(jaxpr.jaxpr.outvars) - len(model) :]
        taken = jaxpr.jaxpr.invars[: len(model)]
        changed = [i for i, (a, b) in enumerate(zip(returned, taken, strict=True)) if a is not b]
        return metric_names("loss", metrics), changed


def _as_loss(out: Any) -> Loss:
    if isinstance(out, Loss):
        return out
    return Loss(*out) if isinstance(out, tuple) else Loss(out)


def _array(leaf: Any) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _origins(jaxpr: Any) -> list[Any]:
    """For each output of a jaxpr the variable it is, seen through calls of jitted functions."""
    same: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and inner is not None:
            given = dict(zip(inner.jaxpr.invars, equation.invars, strict=True))
            for out, origin in zip(equation.outvars, _origins(inner.jaxpr), strict=True):
                if isinstance(origin, jax.extend.core.Var) and origin in given:
                    outer = given[origin]
                    same[out] = (
                        same.get(outer, outer)
                        if not isinstance(outer, jax.extend.core.Literal)
                        else outer
                    )
    return [v if isinstance(v, jax.extend.core.Literal) else same.get(v, v) for v in jaxpr.outvars]
