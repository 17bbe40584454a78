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
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from ftrain.errors import TrainerError
from ftrain.layout import Layout, from_words, to_words
from ftrain.leaves import check_leaves
from ftrain.mesh import Buffers
from ftrain.nonfinite import (
    Nonfinite,
    any_became_nonfinite,
    any_nonfinite,
    first_value,
    flag_of,
    kinds_of,
)
from ftrain.reduction import add
from ftrain.state import (
    Committed,
    Init,
    Loss,
    StateSpec,
    TrainState,
    describe,
    from_host,
    spec_of,
    to_host,
)
from ftrain.tree import Node, Sums
from ftrain.user_metrics import check_metrics, metric_names

if TYPE_CHECKING:
    from ftrain.data import Batch


def state_spec(trainer: Any, seed: int) -> StateSpec:
    """The spec of the trainer's state, from shapes alone. Sets `trainer.tx`."""

    def init_params() -> Init:
        init = as_init(trainer.init_params(jax.random.key(seed)))
        check_leaves("init_params", "params", init.params)
        check_leaves("init_params", "model_state", init.model_state)
        return init

    def init_optimizer(params: Any) -> Any:
        opt_state = trainer.tx.init(params)
        check_leaves("optimizer", "opt_state", opt_state)
        return opt_state

    init = jax.eval_shape(init_params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(init.params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TrainerError(
                f"init_params: params{jax.tree_util.keystr(path)} is "
                f"{describe(leaf)}; parameters are floating, put other leaves into "
                "model_state: ftrain.Init(params, model_state)"
            )
    return spec_of(init.params, jax.eval_shape(init_optimizer, init.params), init.model_state)


def as_init(out: Any) -> Init:
    """What `init_params` returned, as an Init."""
    return out if isinstance(out, Init) else Init(out)


def initial_state(trainer: Any, spec: StateSpec, seed: int) -> Committed:
    """Step 0, computed from the seed. For the first donor alone: the others only need shapes."""

    def init() -> list[jax.Array]:
        params, model_state = as_init(trainer.init_params(jax.random.key(seed)))
        return jax.tree.leaves((params, trainer.tx.init(params), model_state))

    # Over the host and back: that makes weak types strong, as programs and rejoiners have them.
    return Committed(0, 0, from_host(spec, to_host(jax.jit(init)())))


def state_with(trainer: Any, spec: StateSpec, arrays: list[np.ndarray]) -> Committed:
    """Step 0 with other parameters and model state; the optimizer's state is computed from them.

    Args:
      trainer: with its `tx`.
      spec: the state's.
      arrays: all leaves, as `to_host` gives them; those of the optimizer are not used.
    """

    def init(leaves: list[jax.Array]) -> list[jax.Array]:
        return jax.tree.leaves(trainer.tx.init(jax.tree.unflatten(spec.treedefs[0], leaves)))

    params, _, model_state = spec.split(arrays)
    given, _, _ = spec.split(from_host(spec, arrays))
    return Committed(0, 0, from_host(spec, [*params, *to_host(jax.jit(init)(given)), *model_state]))


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
        self._trainer, self._spec, self._tree_shards = trainer, spec, tree_shards
        self._batch_tree, self._seed = batch_tree, seed
        self._params, self._opt, self._model = spec.split(spec.leaves)
        self._batch = list(batch_shapes)
        self._judged_shards = judged_shards
        self._shorter_programs: dict[int, jax.stages.Compiled] = {}  # by their shard's samples
        self.table_size = table_size
        self._plan(reduce_dtype, table_size)

    # What is summed, found out by tracing the user's loss once without computing anything.

    def _plan(self, reduce_dtype: str, table_size: int) -> None:
        self.metric_names, self._changed = self._outputs(self._batch)
        layout = self._layout = Layout()
        self._grad_slots = [
            layout.add(
                p.shape,
                p.dtype if reduce_dtype == "param" else jnp.promote_types(p.dtype, jnp.float32),
            )
            for p in self._params
        ]
        self._model_slots = {i: layout.add(*_travels_as(self._model[i])) for i in self._changed}
        self._scalars = layout.add((len(self.metric_names) + 2,), jnp.float32)
        self._stop = layout.add((), jnp.float32)
        self._flags = layout.add((self._judged_shards,), jnp.float32)
        layout.reserve(table_size, jnp.float32)

    def _outputs(self, batch: list[jax.ShapeDtypeStruct]) -> tuple[list[str], list[int]]:
        """The names of the loss's metrics, and which leaves of the model state it changes."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        jaxpr, out = jax.make_jaxpr(
            lambda model, params, batch, step, shard: self._loss(params, model, batch, step, shard),
            return_shape=True,
        )(self._model, self._params, batch, index, index)
        _, metrics, _, model = out
        # A leaf handed back untouched stays as it is and does not travel: averaging equal copies
        # changes the bits of most of them (facts: 64 % of elements at 12 copies).
        returned = _origins(jaxpr.jaxpr)[len(jaxpr.jaxpr.outvars) - len(model) :]
        taken = jaxpr.jaxpr.invars[: len(model)]
        changed = [i for i, (a, b) in enumerate(zip(returned, taken, strict=True)) if a is not b]
        return metric_names("loss", metrics), changed

    def check_shorter(self, samples: int) -> None:
        """Traces the loss of the run's last, shorter shard, so that its errors come at the start.

        Args:
          samples: of that shard; 0: there is none.

        Raises:
          TrainerError: it returns other metrics or changes other model state than a whole one.
        """
        if not samples:
            return
        outputs = self._outputs([_with_samples(b, samples) for b in self._batch])
        if outputs != (self.metric_names, self._changed):
            raise TrainerError(
                f"loss: for the last shard of the run, of {samples} samples instead of "
                f"{self._batch[0].shape[0]}, it returns other metrics or changes other leaves of "
                f"the model state: {outputs}, not {(self.metric_names, self._changed)}"
            )

    def _loss(
        self,
        params: Sequence[Any],
        model: Sequence[Any],
        batch: Sequence[Any],
        step: Any,
        shard: Any,
    ) -> tuple[Any, dict[str, Any], Any, list[Any]]:
        """The user's loss on flat leaves. Traced."""
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

    def _shard(
        self, params: list, model: list, batch: list, step: Any, shard: Any, buffers: Buffers
    ) -> Buffers:
        """Adds one shard's gradient, loss, metrics and model state to `buffers`. Traced."""

        def loss(params: list) -> tuple[Any, tuple]:
            value, metrics, weight, new = self._loss(params, model, batch, step, shard)
            return value, (value, metrics, weight, new)

        grads, (value, metrics, weight, new) = jax.grad(loss, has_aux=True)(params)

        def weighted(x: jax.Array, slot: Any) -> jax.Array:
            # A shard without weight may have 0/0 as its mean: it must not spoil the others' sum.
            x = x.astype(self._layout.dtypes[slot.group])
            return jnp.where(weight > 0, x * weight.astype(x.dtype), jnp.zeros_like(x))

        scalars = jnp.stack(
            [
                jnp.asarray(x, jnp.float32).reshape(())
                for x in (value, *(metrics[name] for name in self.metric_names))
            ]
        )
        placed = [(s, weighted(g, s)) for s, g in zip(self._grad_slots, grads, strict=True)]
        placed += [
            (
                slot,
                weighted(new[i], slot)
                if _is_mean(self._model[i])
                else jnp.where(shard == 0, to_words(new[i]), 0),
            )
            for i, slot in self._model_slots.items()
        ]
        placed += [
            (self._scalars, jnp.append(weighted(scalars, self._scalars), weight)),
            (self._stop, jnp.float32(0)),
        ]
        flag = self._flag(value, weight, grads, model, new) if self._judged_shards else 0
        placed.append((self._flags, jnp.where(jnp.arange(self._judged_shards) == shard, flag, 0)))
        return [b + p for b, p in zip(buffers, self._layout.pack(placed), strict=True)]

    def _flag(self, value: Any, weight: Any, grads: list, model: list, new: list) -> jax.Array:
        """What of a shard is not finite. Traced; complex leaves are judged with the new state."""
        floats = [i for i in self._model_slots if _is_mean(self._model[i])]
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

    def _empty(self, stop: Any) -> Buffers:
        """Zeros, but for the request to stop. Traced."""
        buffers = [jnp.zeros(b.shape, b.dtype) for b in self._layout.shapes()]
        return [
            b.at[0, 0, self._stop.start].set(stop) if i == self._stop.group else b
            for i, b in enumerate(buffers)
        ]

    def _update(
        self, params: list, opt: list, model: list, sums: Buffers, step: Any, cursor: Any
    ) -> tuple[list, jax.Array]:
        """The new leaves, and loss, metrics, weight, stop and whether it is bad. Traced."""
        take = self._layout.take
        if self._tree_shards:
            sums = [_one_nan(b) for b in sums]
        scalars = take(sums, self._scalars)
        weight = scalars[-1]
        divisor = jnp.where(weight > 0, weight, 1)
        mean = [
            take(sums, slot) / divisor.astype(self._layout.dtypes[slot.group])
            for slot in self._grad_slots
        ]
        grads = [g.astype(p.dtype) for g, p in zip(mean, self._params, strict=True)]
        old, model = [*params, *opt, *model], list(model)
        for i, slot in self._model_slots.items():
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
        self.extra_names = metric_names("update", extra, taken=self.metric_names)
        leaves = self._checked_leaves(new)
        bad = jnp.bool_(False)
        if self._judged_shards:
            flagged = take(sums, self._flags).any()
            bad = flagged | any_nonfinite([scalars[0], weight, *grads])
            bad |= any_became_nonfinite(old, leaves)
        values = [
            scalars[:-1] / divisor,
            *(jnp.asarray(extra[n], jnp.float32).reshape(1) for n in self.extra_names),
            jnp.stack([weight, take(sums, self._stop), bad.astype(jnp.float32)]),
        ]
        return leaves, jnp.concatenate(values)

    def _new_model_leaf(self, old: Any, summed: jax.Array, weight: Any, divisor: Any) -> jax.Array:
        if not _is_mean(old):
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

    # What runs.

    def lower(self) -> None:
        """Traces all programs. Python's work, which no cache saves and nobody need wait for."""
        index, buffers = jax.ShapeDtypeStruct((), jnp.int32), self._layout.shapes()
        self._lowered = (
            self._lower_shard(self._batch),
            jax.jit(self._empty).lower(jax.ShapeDtypeStruct((), jnp.float32)),
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
        index, buffers = jax.ShapeDtypeStruct((), jnp.int32), self._layout.shapes()
        return jax.jit(self._shard, donate_argnums=5).lower(
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
        return self._layout.shapes()

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
        metrics = dict(zip(("loss", *self.metric_names, *self.extra_names), values, strict=True))
        if weight == 0:
            metrics["weight"] = 0.0
        found = self._explain(state.leaves, leaves, sums) if bad else None
        return new_state, metrics, stop > 0, found

    def _explain(
        self, old: Sequence[jax.Array], new: Sequence[jax.Array], sums: Buffers
    ) -> Nonfinite:
        """What is not finite, from values that every member has alike. Slow, and seldom needed."""
        sums, take = [np.asarray(b) for b in sums], self._layout.take
        scalars, flags = take(sums, self._scalars), take(sums, self._flags)
        params, _, model = self._spec.split(self._spec.paths)
        _, _, old_model = self._spec.split(old)
        values = [
            *first_value([("loss", scalars[:1], None)]),
            *first_value([("weight", scalars[-1:], None)]),
            *first_value(
                (f"gradient of {path}", take(sums, slot), None)
                for path, slot in zip(params, self._grad_slots, strict=True)
            ),
            *first_value(
                (model[i], take(sums, slot), np.asarray(old_model[i]))
                for i, slot in self._model_slots.items()
                if _is_mean(self._model[i])
            ),
        ]
        shards = {s: kinds_of(flag) for s, flag in enumerate(flags.tolist()) if flag}
        source = "shards" if shards else "sum" if values else "update"
        leaves = zip(self._spec.paths, new, old, strict=True)
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


def _with_samples(leaf: jax.ShapeDtypeStruct, samples: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((samples, *leaf.shape[1:]), leaf.dtype)


def _add(left: Buffers, right: Buffers) -> Buffers:
    """The sum of two neighbouring nodes. Traced."""
    return [add(a, b) for a, b in zip(left, right, strict=True)]


def _one_nan(x: jax.Array) -> jax.Array:
    """NaN as one pattern of bits: a sum of two may have either's, as the compiler likes. Traced."""
    return jnp.where(jnp.isnan(x), jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x


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


def _is_mean(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _travels_as(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if _is_mean(leaf):
        return leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)
    return jax.eval_shape(to_words, leaf).shape, jnp.uint32
