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
from ftrain.mesh import Buffers, DataPlane
from ftrain.reduction import add, tree_sum
from ftrain.state import Committed, StateSpec
from ftrain.tree import Node, Sums
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
        reduction: str = "fast",
        compile: Callable[[Any], Any],
    ):
        self._trainer, self._spec, self._source = trainer, spec, source
        self._batch_size, self._batch_shards = batch_size, batch_shards
        self._in_order = reduction == "reproducible"
        self._shard_size, self._compile = batch_size // batch_shards, compile
        self._programs: dict[int, jax.stages.Compiled] = {}
        self._add_program: jax.stages.Compiled | None = None
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

    def part(
        self, plane: DataPlane, state: Committed, part: int, *, stop: bool = False
    ) -> tuple[list[float], bool]:
        """The sums of part `part` over all members: metrics times weight, then the weight.

        A collective, inside `live_devices`.

        Args:
          plane: of the view.
          state: committed.
          part: which.
          stop: whether this member has been asked to stop; it travels with the sums.

        Returns:
          The sums, and whether any member has been asked to stop.
        """
        shards = shards_of(plane.rank, len(plane.workers), self._batch_shards)
        sums = [np.append(self._shard_sums(state, part, shard), np.float32(0)) for shard in shards]
        sums = sums or [np.zeros(self._sums + 1, np.float32)]
        sums[0][-1] = stop
        if self._in_order:
            tree: Sums[Buffers] = Sums(self._batch_shards, self._add)
            for shard, vector in zip(shards, sums, strict=False):  # without shards: zeros
                tree.take(Node(0, shard), self._buffers(vector))
            nodes = tree.values or [self._buffers(sums[0])]
            [summed] = tree_sum(plane, nodes, self._batch_shards).result()
        else:
            [summed] = plane.sum(self._buffers(sum(sums, np.zeros(self._sums + 1, np.float32))))
        *whole, stops = np.asarray(summed).reshape(-1).tolist()
        return whole, stops > 0

    def _shard_sums(self, state: Committed, part: int, shard: int) -> np.ndarray:
        """What `_evaluate` gives for one shard of a part; zeros beyond the end of the data set."""
        start = part * self._batch_size + shard * self._shard_size
        indices = np.arange(start, min(start + self._shard_size, self._source.length))
        if not indices.size:
            return np.zeros(self._sums, np.float32)
        return np.asarray(self._shard(state, self._source.batch(indices)))

    @staticmethod
    def _buffers(vector: np.ndarray) -> Buffers:
        return [jax.device_put(vector.reshape(1, 1, -1), jax.local_devices()[0])]

    def _add(self, left: Buffers, right: Buffers) -> Buffers:
        # Not numpy's: it keeps numbers too small to be normal, which XLA takes for zero.
        if self._add_program is None:
            self._add_program = self._compile(jax.jit(add).lower(*left, *right))
        return [self._add_program(*left, *right)]

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
