"""Evaluation: the held-out samples in parts the size of a step, shared out like training shards.

Only sums travel. A part is a block of its own: a death repeats that part, never a training step,
and the sums so far are part of what a view agrees on. Sees the committed state; needs no
randomness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data import Source, shards_of
from ftrain.mesh import DataPlane
from ftrain.state import Committed, StateSpec
from ftrain.user_metrics import check_metrics, metric_names


class Evaluation:
    """The user's `evaluate` over its data set. Compiled when the first evaluation needs it."""

    def __init__(
        self,
        trainer: Any,
        spec: StateSpec,
        source: Source,
        *,
        batch_size: int,
        batch_shards: int,
        compile: Callable[[Any], Any],
    ):
        self._trainer, self._spec, self._source = trainer, spec, source
        self._batch_size, self._batch_shards = batch_size, batch_shards
        self._shard_size, self._compile = batch_size // batch_shards, compile
        self._programs: dict[int, jax.stages.Compiled] = {}
        self.parts = -(-source.length // batch_size)
        shapes = jax.eval_shape(
            self._evaluate,
            list(spec.leaves),
            source.shapes(min(self._shard_size, source.length)),
            *[jax.ShapeDtypeStruct((), jnp.int32)] * 2,
        )
        self._sums = shapes.shape[0]

    def _evaluate(self, leaves: list, batch: list, step: Any, cursor: Any) -> jax.Array:
        """Metrics times weight, then the weight, of one shard. Traced."""
        state = self._spec.train_state(step, cursor, leaves)
        out = self._trainer.evaluate(state, jax.tree.unflatten(self._source.treedef, batch))
        metrics, weight = out if isinstance(out, tuple) else (out, batch[0].shape[0])
        check_metrics("evaluate", metrics)
        self.names = metric_names("evaluate", metrics)
        weight = jnp.asarray(weight, jnp.float32)
        values = [
            jnp.where(weight > 0, jnp.asarray(metrics[n], jnp.float32) * weight, 0)
            for n in self.names
        ]
        return jnp.stack([*values, weight])

    def part(self, plane: DataPlane, state: Committed, part: int) -> list[float]:
        """The sums of part `part` over all members: metrics times weight, then the weight.

        A collective, inside `live_devices`.
        """
        total = np.zeros(self._sums, np.float32)
        for shard in shards_of(plane.rank, len(plane.workers), self._batch_shards):
            start = part * self._batch_size + shard * self._shard_size
            indices = np.arange(start, min(start + self._shard_size, self._source.length))
            if indices.size:
                total += np.asarray(self._shard(state, self._source.batch(indices)))
        buffer = jax.device_put(total.reshape(1, 1, -1), jax.local_devices()[0])
        [summed] = plane.sum([buffer])
        return np.asarray(summed).reshape(-1).tolist()

    def _shard(self, state: Committed, batch: list[np.ndarray]) -> jax.Array:
        args = (state.leaves, batch, np.int32(state.step), np.int32(state.cursor & 0x7FFFFFFF))
        samples = len(batch[0])  # the last shard of the data set may be shorter
        if samples not in self._programs:
            self._programs[samples] = self._compile(jax.jit(self._evaluate).lower(*args))
        return self._programs[samples](*args)

    def means(self, sums: list[float]) -> dict[str, float]:
        """The metrics, from the sums of all parts."""
        *values, weight = sums
        return {
            name: value / weight if weight else 0.0
            for name, value in zip(self.names, values, strict=True)
        }
