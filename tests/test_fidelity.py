"""State that moves between workers or through a checkpoint is the same: tree, dtype, shape, bits.

Each case goes through a sync (by threads, as in `test_sync_words`), through a checkpoint that Orbax
writes, and on into a compiled program, which takes what came back as it took what went in.
"""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import ftrain
from ftrain.checkpoint import _from_stored, _stored
from ftrain.errors import StateMismatchError, TrainerError
from ftrain.initial import initial_state, state_spec
from ftrain.leaves import CARRIED
from ftrain.state import (
    Committed,
    StateSpec,
    cut_bytes,
    from_host,
    join_bytes,
    spec_of,
    to_host,
)
from tests.odd_trees import (
    Pair,
    Registered,
    dtype_of,
    every_dtype,
    keys,
    nodes,
    odd_floats,
    of_bits,
)
from tests.test_checkpoint import restore, write
from tests.test_state import bits_of, state_of
from tests.test_step import SHARDS, SIZE, Steps
from tests.test_sync_words import synced

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WIDE = {"int64", "uint64", "float64", "complex128"}  # need JAX_ENABLE_X64
DTYPES = sorted(CARRIED - WIDE)


def nnx_state() -> Any:
    """Parameters, statistics and streams of keys of a flax.nnx model."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    return nnx.state(Model(nnx.Rngs(0)))


TREES = {
    "dtypes": lambda: every_dtype(DTYPES),
    "odd floats": odd_floats,
    "keys": keys,
    "nodes": nodes,
    "nnx": nnx_state,
    "array": lambda: jnp.arange(3.0),
    "none": lambda: None,
}


def come_back(folder: Path, spec: StateSpec, state: Committed) -> list[Committed]:
    """The state as a worker gets it by a sync, and as a run gets it by a checkpoint."""
    results, _ = synced({0: state, 1: None}, spec, donor=0, holders=[0])
    assert not isinstance(results[1], BaseException), results[1]
    write(folder, spec, state)
    return [results[1].state, restore(folder, spec)]


def assert_same(spec: StateSpec, got: Committed, wanted: Committed, tree: Any) -> None:
    """Tree, dtypes, shapes and bits."""
    assert jax.tree.structure(spec.trees(got.leaves)) == jax.tree.structure(tree)
    described = [(x.dtype, x.shape, bits_of(x)) for x in got.leaves]
    assert described == [(x.dtype, x.shape, bits_of(x)) for x in wanted.leaves]
    assert (got.step, got.cursor) == (wanted.step, wanted.cursor)
    assert not any(getattr(x, "weak_type", False) for x in got.leaves)


@pytest.mark.parametrize("case", TREES)
def test_every_tree_comes_back_the_same(tmp_path, case):
    """By a sync and by a checkpoint."""
    tree = TREES[case]()
    spec, state = state_of({"w": jnp.ones(2)}, (), tree)
    for got in come_back(tmp_path, spec, state):
        assert_same(spec, got, state, ({"w": jnp.ones(2)}, (), tree))


def test_wide_dtypes_come_back_the_same_where_jax_has_them(tmp_path):
    """64-bit integers and floats and complex128, which need JAX_ENABLE_X64."""
    jax.config.update("jax_enable_x64", True)
    try:
        tree = every_dtype(sorted(CARRIED))
        assert {str(tree[name].dtype) for name in WIDE} == WIDE
        spec, state = state_of(tree)
        for got in come_back(tmp_path, spec, state):
            assert_same(spec, got, state, (tree, (), None))
    finally:
        jax.config.update("jax_enable_x64", False)


def test_large_leaves_of_every_dtype_come_back_from_a_checkpoint(tmp_path):
    """Each in a file of its own, whether or not Orbax's files know its dtype."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 17, np.uint8).tobytes()
    tree = {name: jnp.asarray(of_bits(name, data)) for name in DTYPES}
    spec, state = state_of(tree)
    write(tmp_path, spec, state)
    assert_same(spec, restore(tmp_path, spec), state, (tree, (), None))


def test_keys_that_come_back_draw_the_same_numbers(tmp_path):
    """And split as they would have, in their own implementation."""
    spec, state = state_of({}, (), keys())
    for got in come_back(tmp_path, spec, state):
        for before, after in zip(state.leaves, got.leaves, strict=True):
            if after.ndim == 0:
                draws = [jax.random.normal(jax.random.split(k)[1], (3,)) for k in (before, after)]
                assert bits_of(draws[0]) == bits_of(draws[1])


class Holding(ftrain.Trainer):
    """A trainer whose model state is every kind of leaf in every kind of node."""

    def init_params(self, key: jax.Array) -> ftrain.Init:
        state = {"dtypes": every_dtype(DTYPES), "keys": keys(), "nodes": nodes()}
        return ftrain.Init({"w": jnp.ones(2)}, {**state, "nnx": nnx_state(), "weak": 1.0, "n": 3})

    def loss(self, params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
        return ftrain.Loss((params["w"] * batch["x"].mean()).sum(), {}, None, model_state)


def test_the_programs_take_what_came_back_and_give_the_same(tmp_path):
    """The same compiled ones: nothing is traced for a rejoiner. Weak types are strong from 0 on."""
    steps = Steps(Holding(), {"x": np.arange(SHARDS * SIZE, dtype=np.float32)})
    first = steps.first
    assert not any(getattr(x, "weak_type", False) for x in first.leaves)
    after, _, _ = steps.step(first)
    for got in come_back(tmp_path, steps.spec, first):
        assert_same(steps.spec, got, first, steps.trees(first))
        again, _, _ = steps.step(got)
        assert_same(steps.spec, again, after, steps.trees(first))
    for got in come_back(tmp_path, steps.spec, after):
        assert_same(steps.spec, got, after, steps.trees(first))


# optax.


PART_OF_MUON = "scale_by_muon"  # of no use without the rest


def public_optimizers() -> dict[str, Any]:
    """All of optax's public functions that make a transformation of a learning rate or nothing."""
    made: dict[str, Any] = {}
    more = {"noisy_sgd": {"key": jax.random.key(1)}}
    for module in (optax, optax.contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(function).parameters
            required = {
                n
                for n, p in parameters.items()
                if p.default is p.empty and p.kind < p.VAR_POSITIONAL
            }
            if name.startswith("_") or name == PART_OF_MUON or not required <= {"learning_rate"}:
                continue
            rate = {"learning_rate": 1e-3} if "learning_rate" in parameters else {}
            try:
                with warnings.catch_warnings():  # some are deprecated, and still used
                    warnings.simplefilter("ignore")
                    tx = function(**rate, **more.get(name, {}))
            except (TypeError, ValueError):  # it wants more, though its signature says otherwise
                continue
            if hasattr(tx, "init") and hasattr(tx, "update"):
                made[name] = tx
    return made


def composed_optimizers() -> dict[str, Any]:
    """The ways in which optax puts optimizers together."""
    only_w = {"w": True, "b": False}
    return {
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9)),
        "masked": optax.masked(optax.adam(1e-3), only_w),
        "multi_transform": optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}
        ),
        "partition": optax.partition(
            {"a": optax.lion(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
        ),
        "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
            learning_rate=optax.cosine_decay_schedule(1e-3, 10)
        ),
        "MultiSteps": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=3),
        "lookahead inside": optax.chain(optax.adam(1e-3), optax.trace(0.9, nesterov=True)),
        "schedule_free": optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2),
        "mechanize": optax.contrib.mechanize(optax.adam(1e-3)),
        "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
        "freeze": optax.chain(
            optax.scale_by_schedule(lambda n: 1e-3 / (n + 1)), optax.keep_params_nonnegative()
        ),
        "A18": optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.masked(optax.adamw(1e-3), only_w),
            optax.scale_by_schedule(optax.linear_schedule(1, 0, 9)),
        ),
    }


OPTIMIZERS = {**public_optimizers(), **composed_optimizers()}
PARAMS = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "b": np.ones(3, np.float32)}


def test_the_optimizers_are_those_of_optax():
    """The list is made by looking: it must have found them."""
    assert {"adamw", "lbfgs", "adafactor", "muon", "prodigy", "sm3"} <= set(OPTIMIZERS)
    assert len(OPTIMIZERS) > 60


class Optimized(ftrain.Trainer):
    """Two parameters and any optimizer."""

    def init_params(self, key: jax.Array) -> Any:
        return jax.tree.map(jnp.asarray, PARAMS)


WITH_OBJECTIVE = ("sophia", "hutchinson_estimator_diag_hessian")


def second_state(name: str) -> tuple[StateSpec, Committed, Any]:
    """The state after one update, and the compiled update."""
    trainer = Optimized()
    trainer.tx = optax.with_extra_args_support(OPTIMIZERS[name])
    spec = state_spec(trainer, 0)
    first = initial_state(trainer, spec, 0)

    def value(params: Any) -> Any:
        return sum((p**2).sum() for p in jax.tree.leaves(params))

    def update(leaves: list[Any]) -> list[Any]:
        params, opt_state, _ = spec.trees(leaves)
        grads = jax.tree.map(jnp.cos, params)
        more = {"value": value(params), "grad": grads, "value_fn": value}
        if name in WITH_OBJECTIVE:
            more["obj_fn"] = value
        updates, opt_state = trainer.tx.update(grads, opt_state, params, **more)
        return jax.tree.leaves((optax.apply_updates(params, updates), opt_state, None))

    program = jax.jit(update).lower(first.leaves).compile()
    return spec, Committed(1, 12, program(first.leaves)), program


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_comes_back_the_same(tmp_path, name):
    """In the middle of what it counts; and the compiled update takes it and gives the same."""
    spec, state, program = second_state(name)
    for got in come_back(tmp_path, spec, state):
        described = [(x.dtype, x.shape, bits_of(x)) for x in got.leaves]
        assert described == [(x.dtype, x.shape, bits_of(x)) for x in state.leaves]
        assert jax.tree.structure(spec.trees(got.leaves)) == jax.tree.structure(
            spec.trees(state.leaves)
        )
        after = [bits_of(x) for x in program(got.leaves)]
        assert after == [bits_of(x) for x in program(state.leaves)]


# Anything at all.

SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 0), (2, 3)])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    name, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    size = math.prod(shape) * dtype_of(name).itemsize
    return of_bits(name, draw(st.binary(min_size=size, max_size=size)), shape)


def trees() -> st.SearchStrategy[Any]:
    return st.recursive(
        arrays() | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.integers(-9, 9), inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            | st.tuples(inner, inner).map(lambda xy: Pair(*xy))
            | st.tuples(inner, inner).map(lambda ab: Registered(*ab))
        ),
        max_leaves=8,
    )


@settings(max_examples=150, deadline=None, database=None)
@given(trees())
def test_any_tree_of_any_bits_comes_back_the_same(tree):
    """As the words of a sync, and as what a checkpoint's files hold."""
    tree = jax.tree.map(jnp.asarray, tree)
    spec, state = state_of({}, (), tree)
    host = to_host(state.leaves)
    meta = {"shapes": [[list(s), d.name] for s, d in spec.host_shapes], "small_bytes": 1 << 16}
    for found in (cut_bytes(join_bytes(host), spec.host_shapes), _from_stored(_stored(host), meta)):
        assert_same(spec, Committed(3, 12, from_host(spec, found)), state, ({}, (), tree))


# What is refused.


def test_a_template_with_another_dtype_is_refused_by_name(tmp_path):
    """A19: 16777217 as a float32 would be 16777216, and nobody would know."""
    spec, state = state_of({}, (), {"n": jnp.int32(16777217), "m": jnp.uint32(4294967295)})
    write(tmp_path, spec, state)
    edited = spec_of({}, (), {"n": jnp.float32(0), "m": jnp.uint32(0)})
    says = r"model_state\['n'\]: this trainer has float32\[\], checkpoint 3 has int32\[\]"
    with pytest.raises(StateMismatchError, match=says):
        restore(tmp_path, edited)


class Unregistered:
    """No pytree."""

    def __repr__(self) -> str:
        return "Unregistered()"


REFUSED = {
    "text": ("cnn", "is a str, 'cnn'; leaves are arrays and numbers"),
    "object": (Unregistered(), "is a Unregistered, Unregistered(); leaves are arrays and numbers"),
    "function": (len, "is a builtin_function_or_method, <built-in function len>"),
    "array of objects": (np.array([None]), "of dtype object, which cannot be sent and saved"),
    "array of text": (np.array(["a"]), "of dtype str"),
    "dates": (np.zeros(2, "datetime64[s]"), "of dtype datetime64[s]"),
    "int64": (np.arange(3), "is int64, which JAX would cut to 32 bits; make it 32 bits"),
    "uint64": (np.uint64(1), "is uint64, which JAX would cut to 32 bits"),
    "a large number": (2**31, "is 2147483648, beyond int32"),
    "float4": (np.zeros(2, ml_dtypes.float4_e2m1fn), "of dtype float4_e2m1fn"),
    "int4": (np.zeros(2, ml_dtypes.int4), "of dtype int4, which cannot be sent and saved; use a"),
    "int1": (np.zeros(2, ml_dtypes.int1), "of dtype int1"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize(
    "where", ["init_params: params", "init_params: model_state", "optimizer: opt_state"]
)
def test_a_leaf_that_cannot_be_carried_is_refused_by_its_path(what, where):
    """In one line, before anything starts; from `init_params` or from the optimizer."""
    leaf, says = REFUSED[what]
    method, part = where.split(": ")

    class Odd(Optimized):
        def init_params(self, key: jax.Array) -> Any:
            trees = {"params": {"w": jnp.ones(2)}, "model_state": {}}
            if part in trees:
                trees[part] = {**trees[part], "odd": [leaf]}
            return ftrain.Init(**trees)

    trainer = Odd()
    trainer.tx = optax.sgd(0.1)
    if part == "opt_state":
        trainer.tx = trainer.tx._replace(init=lambda params: {"odd": [leaf]})
    with pytest.raises(TrainerError) as caught:
        state_spec(trainer, 0)
    assert str(caught.value).startswith(f"{method}: {part}['odd'][0] is ")
    assert says in str(caught.value) and "\n" not in str(caught.value)
