"""The programs of a training step: the gradient of one shard, and the update (rule R10).

Neither holds a collective. They are compiled ahead of time once per process, on its own device, and
survive every change of the set. The gradient program is for one shard and is called once a shard,
adding into donated buffers, so no number of shards ever compiles anything. Where the sums are to be
reproducible each shard gets buffers of its own, which a third, small program adds in the order of
the tree (`tree`). (No loop on the device: XLA's CPU backend runs a convolution inside `scan` 4 to 6
times slower, jax 0.10.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.contribution import Contribution
from ftrain.errors import TrainerError
from ftrain.explain import explain
from ftrain.loss import ShardLoss
from ftrain.mesh import Buffers
from ftrain.nonfinite import Nonfinite
from ftrain.reduction import add
from ftrain.state import Committed, StateSpec
from ftrain.tree import Node, Sums
from ftrain.update import Update

if TYPE_CHECKING:
    from ftrain.data import Batch


class StepPrograms:
    """The compiled programs of a trainer, for one shape of shard and that of a shorter, last one.

    Args:
      batch_shapes: the leaves of a whole shard's batch, in the tree `batch_tree`.
      table_size: floats that the float32 buffer has room for at least, see `Table`.
      judged_shards: the batch's shards, if it shall be found out which of them gave values that are
        not finite; 0: nothing is judged, and nothing is paid for it.
      tree_shards: the shards of a step if they are summed in the order of the tree, by `nodes`.
    """

    def __init__(
        self,
        trainer: Any,
        spec: StateSpec,
        batch_shapes: Sequence[jax.ShapeDtypeStruct],
        batch_tree: Any,
        *,
        seed: int,
        reduce_dtype: str,
        table_size: int = 0,
        judged_shards: int = 0,
        tree_shards: int | None = None,
    ):
        self._spec, self._tree_shards, self.table_size = spec, tree_shards, table_size
        self._params, self._opt, self._model = spec.split(spec.leaves)
        self._batch = list(batch_shapes)
        self._loss = ShardLoss(trainer, spec, batch_tree, seed)
        self._plan = Contribution(
            self._loss,
            spec,
            self._batch,
            reduce_dtype=reduce_dtype,
            table_size=table_size,
            judged_shards=judged_shards,
        )
        self._update = Update(trainer, spec, self._plan, in_tree=bool(tree_shards))
        self._shorter_programs: dict[int, jax.stages.Compiled] = {}  # by their shard's samples

    @property
    def metric_names(self) -> list[str]:
        """Those of the loss and, once it has been traced, of the update."""
        return [*self._plan.metric_names, *self._update.extra_names]

    def check_shorter(self, samples: int) -> None:
        """Traces the loss of the run's last, shorter shard, so that its errors come at the start.

        Args:
          samples: of that shard; 0: there is none.

        Raises:
          TrainerError: it returns other metrics or changes other model state than a whole one.
        """
        if not samples:
            return
        outputs = self._loss.outputs([_with_samples(b, samples) for b in self._batch])
        if outputs != (self._plan.metric_names, self._plan.changed):
            raise TrainerError(
                f"loss: for the last shard of the run, of {samples} samples instead of "
                f"{self._batch[0].shape[0]}, it returns other metrics or changes other leaves of "
                f"the model state: {outputs}, not {(self._plan.metric_names, self._plan.changed)}"
            )

    def lower(self) -> None:
        """Traces all programs. Python's work, which no cache saves and nobody need wait for."""
        index, buffers = jax.ShapeDtypeStruct((), jnp.int32), self.buffer_shapes
        self._lowered = (
            self._lower_shard(self._batch),
            jax.jit(self._plan.empty).lower(jax.ShapeDtypeStruct((), jnp.float32)),
            jax.jit(self._update).lower(
                self._params, self._opt, self._model, buffers, index, index
            ),
            *([jax.jit(_add, donate_argnums=0).lower(buffers, buffers)] * bool(self._tree_shards)),
        )

    @property
    def lowered(self) -> dict[str, Any]:
        """The programs made of the user's code, by its method; between `lower` and `compile`."""
        return {"loss": self._lowered[0], "update": self._lowered[2]}

    def _lower_shard(self, batch: list[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        index, buffers = jax.ShapeDtypeStruct((), jnp.int32), self.buffer_shapes
        return jax.jit(self._plan.shard, donate_argnums=5).lower(
            self._params, self._model, batch, index, index, buffers
        )

    def compile(self, compile: Callable[[Any], Any]) -> None:
        """Compiles what `lower` traced, or loads it from the compilation cache."""
        programs = map(compile, self._lowered)
        self._shard_program, self._empty_program, self._update_program, *more = programs
        self._add_program = more[0] if more else None
        del self._lowered

    def lacks(self, batch: Batch) -> bool:
        """Whether the program for a shard of so many samples is still to be compiled."""
        return len(batch[0]) not in (self._batch[0].shape[0], *self._shorter_programs)

    def compile_for(self, batch: Batch, compile: Callable[[Any], Any]) -> None:
        """Traces and compiles the program for a shard of so many samples."""
        samples = len(batch[0])
        lowered = self._lower_shard([_with_samples(b, samples) for b in self._batch])
        self._shorter_programs[samples] = compile(lowered)

    @property
    def buffer_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The buffers that a step sums over the workers."""
        return self._plan.layout.shapes()

    def gradients(
        self, state: Committed, shards: Sequence[tuple[int, Batch | None]], *, stop: bool
    ) -> Buffers:
        """This worker's part of a step's sums; zeros if it has no shard, or none with samples."""
        buffers = self._empty_program(np.float32(stop))
        for shard, batch in shards:
            buffers = self._add_shard(state, shard, batch, buffers)
        return buffers

    def _add_shard(
        self, state: Committed, shard: int, batch: Batch | None, buffers: Buffers
    ) -> Buffers:
        if batch is None:
            return buffers
        params, _, model = self._spec.split(state.leaves)
        program = self._shorter_programs.get(len(batch[0]), self._shard_program)
        return program(params, model, batch, np.int32(state.step), np.int32(shard), buffers)

    def nodes(
        self, state: Committed, shards: Sequence[tuple[int, Batch | None]], *, stop: bool
    ) -> list[Buffers]:
        """As `gradients`, but the sums of the tree's nodes that `shards` make up, in order.

        Needs `tree_shards`, and a worker that has a shard: without one its `stop` is not heard. A
        shard without samples is a leaf of the tree like the others, of zeros.
        """
        sums: Sums[Buffers] = Sums(self._tree_shards, self._add_program)
        for shard, batch in shards:
            buffers = self._empty_program(np.float32(stop and shard == shards[0][0]))
            sums.take(Node(0, shard), self._add_shard(state, shard, batch, buffers))
        return sums.values or [self._empty_program(np.float32(0))]

    def update(
        self, state: Committed, sums: Buffers, samples: int
    ) -> tuple[Committed, dict[str, float], bool, Nonfinite | None]:
        """The next state, the step's metrics, whether anybody was asked to stop, and what is bad.

        Does not donate `state`: a step that fails or is skipped goes on from it.
        """
        params, opt, model = self._spec.split(state.leaves)
        leaves, vector = self._update_program(
            params, opt, model, sums, np.int32(state.step), np.int32(state.cursor & 0x7FFFFFFF)
        )
        new_state = Committed(state.step + 1, state.cursor + samples, leaves)
        jax.block_until_ready(leaves)
        *values, weight, stop, bad = np.asarray(vector).tolist()
        metrics = dict(zip(("loss", *self.metric_names), values, strict=True))
        if weight == 0:
            metrics["weight"] = 0.0
        found = explain(self._plan, self._spec, state.leaves, leaves, sums) if bad else None
        return new_state, metrics, stop > 0, found


def _with_samples(leaf: jax.ShapeDtypeStruct, samples: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((samples, *leaf.shape[1:]), leaf.dtype)


def _add(left: Buffers, right: Buffers) -> Buffers:
    """The sum of two neighbouring nodes. Traced."""
    return [add(a, b) for a, b in zip(left, right, strict=True)]
