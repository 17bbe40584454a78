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
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.contractions import merge_contractions
from ftrain.contribution import Contribution
from ftrain.errors import TrainerError
from ftrain.explain import explain
from ftrain.loss import ShardLoss
from ftrain.mesh import Buffers
from ftrain.nonfinite import Nonfinite
from ftrain.reduction import add
from ftrain.state import Committed, StateSpec, from_host
from ftrain.tree import Node, Sums
from ftrain.update import Update

if TYPE_CHECKING:
    from ftrain.data import Batch


# Operations of a shard's gradient. On CPU, above so many, a call for each shard costs less than it
# saves: what an operation reads is in the caches still, where its predecessor left it (3 to 12
# shards of a perceptron, jax 0.10.2: scripts/bench/contractions.py).
LARGE_SHARD_FLOPS = 2e8


class Begun(NamedTuple):
    """An update on its way: the next state, uncommitted, and the scalars that tell of the step."""

    state: Committed
    vector: jax.Array


class StepPrograms:
    """The compiled programs of a trainer, for one shape of shard and that of a shorter, last one.

    Attributes:
      at_once: shards that one program computes; from `lower` on 1 where the loss does not allow it,
        or where it does not pay.
      why_one_by_one: what the loss has against it then.

    Args:
      batch_shapes: the leaves of a whole shard's batch, in the tree `batch_tree`.
      table_size: floats that the float32 buffer has room for at least, see `Table`.
      judged_shards: the batch's shards, if it shall be found out which of them gave values that are
        not finite; 0: nothing is judged, and nothing is paid for it.
      tree_shards: the shards of a step if they are summed in the order of the tree, by `nodes`.
      lean: whether an update takes the old state's memory, see `stepping`.
      at_once: shards that one program computes where a worker holds so many; 1: each by itself.
      if_it_pays: whether large shards are to be computed by themselves all the same.
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
        at_once: int = 1,
        if_it_pays: bool = False,
        lean: bool = False,
    ):
        self._spec, self._tree_shards, self.table_size = spec, tree_shards, table_size
        self._lean = lean
        self.at_once, self.why_one_by_one = at_once, ""
        self._if_it_pays = if_it_pays
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
        shard = self._lower_shard(self._batch)
        if self._if_it_pays and _is_large(shard):
            self.at_once = 1
        self._lowered = (
            shard,
            jax.jit(self._plan.empty).lower(jax.ShapeDtypeStruct((), jnp.float32)),
            jax.jit(self._update, donate_argnums=(0, 1, 2) if self._lean else ()).lower(
                self._params, self._opt, self._model, buffers, index, index
            ),
            self._lower_several(),
            self._lower_add(),
            jax.jit(self._update.judge).lower(buffers) if self._lean else None,
        )

    @property
    def lowered(self) -> dict[str, Any]:
        """The programs made of the user's code, by its method; between `lower` and `compile`."""
        return {"loss": self._lowered[0], "update": self._lowered[2]}

    def _lower_shard(self, batch: list[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        index, buffers = jax.ShapeDtypeStruct((), jnp.int32), self.buffer_shapes
        lowered = jax.jit(self._plan.shard, donate_argnums=5).lower(
            self._params, self._model, batch, index, index, buffers
        )
        return merge_contractions(lowered)

    def _lower_several(self) -> jax.stages.Lowered | None:
        if self.at_once == 1:
            return None
        index, of = jax.ShapeDtypeStruct((), jnp.int32), self.at_once
        stop = jax.ShapeDtypeStruct((), jnp.float32)
        batches = [jax.ShapeDtypeStruct((of, *b.shape), b.dtype) for b in self._batch]
        shards = jax.ShapeDtypeStruct((of,), jnp.int32)
        try:
            lowered = jax.jit(self._plan.several).lower(
                self._params, self._model, batches, index, shards, stop
            )
        except (NotImplementedError, TypeError, ValueError) as error:
            # What one shard's trace has not found is vmap's: no batching rule, a callback, ...
            self.at_once, self.why_one_by_one = 1, str(error)
            return None
        return merge_contractions(lowered)

    def _lower_add(self) -> jax.stages.Lowered | None:
        """Of what two calls have summed, where there may be two."""
        if self.at_once == 1 and not self._tree_shards:
            return None
        return jax.jit(_add, donate_argnums=0).lower(self.buffer_shapes, self.buffer_shapes)

    def compile(self, compile: Callable[[Any], Any]) -> None:
        """Compiles what `lower` traced, or loads it from the compilation cache."""
        (
            self._shard_program,
            self._empty_program,
            self._update_program,
            self._several_program,
            self._add_program,
            self._judge_program,
        ) = [lowered and compile(lowered) for lowered in self._lowered]
        del self._lowered

    def warm_up(self) -> None:
        """Runs every program once, on zeros.

        On a GPU a process's first run of each loads its kernels and opens libraries, for half a
        second and more, and the others would wait for that in the sum (jax 0.11.2).
        """
        whole = [np.zeros(b.shape, b.dtype) for b in self._batch]
        zeros = [np.zeros(shape, dtype) for shape, dtype in self._spec.host_shapes]
        state = Committed(0, 0, from_host(self._spec, zeros))
        held = [(shard, whole) for shard in range(self.at_once)]
        sums = self.gradients(state, held, stop=False)
        if self.at_once > 1 or self._tree_shards:
            alone = self.gradients(state, held[:1], stop=False, one_by_one=True)
            sums = self._add_program(sums, alone)
        if self._lean:
            jax.block_until_ready(self._judge_program(sums))
        jax.block_until_ready(self.update(state, sums, 0))

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
        self,
        state: Committed,
        shards: Sequence[tuple[int, Batch | None]],
        *,
        stop: bool,
        one_by_one: bool = False,
    ) -> Buffers:
        """This worker's part of a step's sums; zeros if it has no shard, or none with samples.

        Args:
          state: committed.
          shards: of this worker, with their samples.
          stop: whether it has been asked to stop.
          one_by_one: whether each is to be computed by itself, so that it can be judged by itself.
        """
        buffers, rest = None, list(shards)
        while not one_by_one and self.at_once > 1 and self._are_whole(rest[: self.at_once]):
            sums = self._several(state, rest[: self.at_once], stop and buffers is None)
            buffers = sums if buffers is None else self._add_program(buffers, sums)
            del rest[: self.at_once]
        if buffers is None:
            buffers = self._empty_program(np.float32(stop))
        for shard, batch in rest:
            buffers = self._add_shard(state, shard, batch, buffers)
        return buffers

    def _are_whole(self, shards: Sequence[tuple[int, Batch | None]]) -> bool:
        whole = self._batch[0].shape[0]
        sizes = [0 if batch is None else len(batch[0]) for _, batch in shards]
        return sizes == [whole] * self.at_once

    def _several(
        self, state: Committed, shards: Sequence[tuple[int, Batch]], stop: bool
    ) -> Buffers:
        params, _, model = self._spec.split(state.leaves)
        batches = [np.stack(leaves) for leaves in zip(*(b for _, b in shards), strict=True)]
        numbers = np.array([shard for shard, _ in shards], np.int32)
        return self._several_program(
            params, model, batches, np.int32(state.step), numbers, np.float32(stop)
        )

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

    def update(self, state: Committed, sums: Buffers, samples: int) -> Begun:
        """The next state, on its way.

        `state` is kept, since a step that fails or is skipped goes on from it; but where the
        programs are lean it is gone.
        """
        params, opt, model = self._spec.split(state.leaves)
        leaves, vector = self._update_program(
            params, opt, model, sums, np.int32(state.step), np.int32(state.cursor & 0x7FFFFFFF)
        )
        return Begun(Committed(state.step + 1, state.cursor + samples, leaves), vector)

    def result(
        self, state: Committed, begun: Begun, sums: Buffers
    ) -> tuple[dict[str, float], bool, Nonfinite | None]:
        """Waits for an update: its metrics, whether anybody was asked to stop, and what is bad."""
        leaves = jax.block_until_ready(begun.state.leaves)
        metrics, stop, bad = self._told(begun.vector, self.metric_names)
        found = explain(self._plan, self._spec, state.leaves, leaves, sums) if bad else None
        return metrics, stop, found

    def applied(self, begun: Begun) -> tuple[dict[str, float], bool]:
        """As `result`, where the old state is gone: its metrics, and whether it is bad."""
        jax.block_until_ready(begun.state.leaves)
        metrics, _, bad = self._told(begun.vector, self.metric_names)
        return metrics, bad

    def judged(
        self, state: Committed, sums: Buffers
    ) -> tuple[dict[str, float], bool, Nonfinite | None]:
        """As `result`, of the sums alone, before there is an update. Needs `lean`."""
        leaves, vector = state.leaves, self._judge_program(sums)
        metrics, stop, bad = self._told(vector, self._plan.metric_names)
        found = explain(self._plan, self._spec, leaves, leaves, sums) if bad else None
        return metrics, stop, found

    @staticmethod
    def _told(vector: jax.Array, names: Sequence[str]) -> tuple[dict[str, float], bool, bool]:
        *values, weight, stop, bad = np.asarray(vector).tolist()
        metrics = dict(zip(("loss", *names), values, strict=True))
        if weight == 0:
            metrics["weight"] = 0.0
        return metrics, stop > 0, bool(bad)


def _is_large(shard: jax.stages.Lowered) -> bool:
    """Whether several such are quicker one by one."""
    if jax.default_backend() != "cpu":
        return False
    return (shard.cost_analysis() or {}).get("flops", 0.0) > LARGE_SHARD_FLOPS


def _with_samples(leaf: jax.ShapeDtypeStruct, samples: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((samples, *leaf.shape[1:]), leaf.dtype)


def _add(left: Buffers, right: Buffers) -> Buffers:
    """The sum of two neighbouring nodes. Traced."""
    return [add(a, b) for a, b in zip(left, right, strict=True)]
