"""What one shard contributes to a step: gradient, loss, metrics and model state, in flat buffers.

All of it weighted, so that a sum over shards, divided by the summed weight, is the mean over the
batch. `layout` says which buffers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.layout import Layout, Slot, to_words
from ftrain.loss import ShardLoss
from ftrain.mesh import Buffers
from ftrain.nonfinite import any_became_nonfinite, any_nonfinite, flag_of
from ftrain.state import StateSpec


class Contribution:
    """Where everything lies in a step's buffers, and the traced functions that fill them.

    Args:
      loss: the user's.
      spec: the state's.
      batch: the leaves of a whole shard's batch.
      reduce_dtype: "float32", or "param" for the gradient's own dtypes.
      table_size: floats that the float32 buffer has room for at least, see `Table`.
      judged_shards: the batch's shards, if it shall be found out which of them gave values that are
        not finite; 0: nothing is judged, and nothing is paid for it.

    Attributes:
      metric_names: of the loss's metrics, in the order in which they travel.
      changed: which leaves of the model state the loss changes; found by tracing it.
    """

    def __init__(
        self,
        loss: ShardLoss,
        spec: StateSpec,
        batch: Sequence[jax.ShapeDtypeStruct],
        *,
        reduce_dtype: str,
        table_size: int,
        judged_shards: int,
    ):
        self._loss = loss
        self._params, _, self._model = spec.split(spec.leaves)
        self.judged_shards = judged_shards
        self.metric_names, self.changed = loss.outputs(list(batch))
        layout = self.layout = Layout()
        self.grad_slots = [
            layout.add(
                p.shape,
                p.dtype if reduce_dtype == "param" else jnp.promote_types(p.dtype, jnp.float32),
            )
            for p in self._params
        ]
        self.model_slots: dict[int, Slot] = {
            i: layout.add(*_travels_as(self._model[i])) for i in self.changed
        }
        self.scalars = layout.add((len(self.metric_names) + 2,), jnp.float32)
        self.stop = layout.add((), jnp.float32)
        self.flags = layout.add((judged_shards,), jnp.float32)
        layout.reserve(table_size, jnp.float32)

    def empty(self, stop: Any) -> Buffers:
        """Zeros, but for the request to stop. Traced."""
        buffers = [jnp.zeros(b.shape, b.dtype) for b in self.layout.shapes()]
        return [
            b.at[0, 0, self.stop.start].set(stop) if i == self.stop.group else b
            for i, b in enumerate(buffers)
        ]

    def shard(
        self, params: list, model: list, batch: list, step: Any, shard: Any, buffers: Buffers
    ) -> Buffers:
        """Adds one shard's gradient, loss, metrics and model state to `buffers`. Traced."""

        def loss(params: list) -> tuple[Any, tuple]:
            value, metrics, weight, new = self._loss(params, model, batch, step, shard)
            return value, (value, metrics, weight, new)

        grads, (value, metrics, weight, new) = jax.grad(loss, has_aux=True)(params)
        weighted = [
            _weighted(g, weight, self._dtype(s))
            for s, g in zip(self.grad_slots, grads, strict=True)
        ]
        others = self._others(model, shard, value, metrics, weight, new, grads)
        packed = self._packed(weighted, others, jnp.float32(0))
        return [b + p for b, p in zip(buffers, packed, strict=True)]

    def several(
        self, params: list, model: list, batches: list, step: Any, shards: Any, stop: Any
    ) -> Buffers:
        """Several shards at once: up to rounding what `shard` adds for each to `empty`. Traced.

        Their gradient is one, of the weighted sum of their losses; no buffer is filled for each. So
        it is not seen whose gradient is not finite, and a shard without weight whose mean is 0/0
        spoils the sum: whoever finds such sums takes them again, shard by shard.

        `batches` is as `shard`'s batch, each leaf with an axis of shards in front; `shards` their
        numbers, int32[shards].
        """

        def one(params: list, batch: list, shard: Any) -> tuple[Any, list]:
            value, metrics, weight, new = self._loss(params, model, batch, step, shard)
            others = self._others(model, shard, value, metrics, weight, new, [])
            return _weighted(value, weight, jnp.float32), others

        def loss(params: list) -> tuple[Any, list]:
            values, others = jax.vmap(one, (None, 0, 0))(params, batches, shards)
            return values.sum(), [each.sum(0) for each in others]

        grads, others = jax.grad(loss, has_aux=True)(params)
        return self._packed(grads, others, stop)

    def _others(
        self,
        model: list,
        shard: Any,
        value: Any,
        metrics: dict,
        weight: Any,
        new: list,
        grads: list,
    ) -> list[jax.Array]:
        """What a shard contributes beside its gradient, in the order of `_packed`. Traced."""
        scalars = [value, *(metrics[name] for name in self.metric_names)]
        scalars = jnp.stack([jnp.asarray(x, jnp.float32).reshape(()) for x in scalars])
        flag = self._flag(value, weight, grads, model, new) if self.judged_shards else 0
        return [
            *(
                _weighted(new[i], weight, self._dtype(slot))
                if is_mean(self._model[i])
                else jnp.where(shard == 0, to_words(new[i]), 0)
                for i, slot in self.model_slots.items()
            ),
            jnp.append(_weighted(scalars, weight, jnp.float32), weight),
            jnp.where(jnp.arange(self.judged_shards) == shard, flag, 0.0),
        ]

    def _packed(self, grads: list, others: list, stop: Any) -> Buffers:
        slots = [*self.grad_slots, *self.model_slots.values(), self.scalars, self.flags, self.stop]
        return self.layout.pack(list(zip(slots, [*grads, *others, stop], strict=True)))

    def _dtype(self, slot: Slot) -> Any:
        return self.layout.dtypes[slot.group]

    def _flag(self, value: Any, weight: Any, grads: list, model: list, new: list) -> jax.Array:
        """What of a shard is not finite. Traced; complex leaves are judged with the new state."""
        floats = [i for i in self.model_slots if is_mean(self._model[i])]
        became = any_became_nonfinite([model[i] for i in floats], [new[i] for i in floats])
        counts = weight > 0  # without weight its means may be 0 / 0, and go nowhere
        return flag_of(
            [
                counts & any_nonfinite([value]),
                any_nonfinite([weight]),
                counts & any_nonfinite(grads),
                counts & became,
            ]
        )


def _weighted(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """A shard's mean times its weight, as it travels. Traced."""
    # A shard without weight may have 0/0 as its mean: it must not spoil the others' sum.
    x = jnp.asarray(x).astype(dtype)
    return jnp.where(weight > 0, x * weight.astype(dtype), jnp.zeros_like(x))


def is_mean(leaf: Any) -> bool:
    """Whether a changed leaf of the model state becomes the mean over shards."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _travels_as(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if is_mean(leaf):
        return leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)
    return jax.eval_shape(to_words, leaf).shape, jnp.uint32
