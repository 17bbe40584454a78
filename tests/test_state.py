"""The committed state in flat form: paths, bits on the host and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from ftrain.state import (
    Committed,
    StateSpec,
    TrainState,
    describe,
    from_host,
    host_bytes,
    host_shape,
    spec_of,
    to_host,
)
from tests.odd_trees import KEY_IMPLS

QUICK = settings(max_examples=100, deadline=None, database=None)
FLOATS = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)
WHOLE = (jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32, jnp.bool_)
# -0.0, the infinities, the smallest subnormal, a quiet and a signalling NaN with a payload.
ODD_FLOATS = (0x80000000, 0x7F800000, 0xFF800000, 0x00000001, 0x7FC12345, 0xFF812345)


def leaves_of_every_kind() -> dict[str, jax.Array]:
    """One leaf of each dtype and odd shape, with bits that conversions lose."""
    bits = np.random.default_rng(0).integers(0, 256, 48, np.uint8)
    tree = {np.dtype(d).name: jnp.asarray(bits.view(np.dtype(d))) for d in FLOATS}
    tree |= {
        np.dtype(d).name: jnp.asarray(
            (bits % 2).astype(bool) if d is jnp.bool_ else bits.view(np.dtype(d))
        )
        for d in WHOLE
    }
    tree["complex64"] = jnp.asarray(bits[:16].view(np.complex64))
    tree["odd"] = jnp.asarray(np.array(ODD_FLOATS, np.uint32).view(np.float32))
    tree["scalar"] = jnp.asarray(np.float32(-0.0))
    tree["nothing"] = jnp.zeros((0,), jnp.float32)
    tree["no rows"] = jnp.zeros((3, 0, 2), jnp.bfloat16)
    for impl in KEY_IMPLS:
        tree[f"key {impl}"] = jax.random.key(7, impl=impl)
        tree[f"keys {impl}"] = jax.random.split(jax.random.key(8, impl=impl), 6).reshape(2, 3)
    return tree


def bits_of(leaf: Any) -> bytes:
    """A leaf's bits, whatever it holds."""
    return (
        jax.random.key_data(leaf).tobytes()
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else np.asarray(leaf).tobytes()
    )


def state_of(
    params: Any, opt_state: Any = (), model_state: Any = None, *, step: int = 3, cursor: int = 12
) -> tuple[StateSpec, Committed]:
    """A committed state of these trees, with its spec."""
    trees = params, opt_state, model_state
    return spec_of(*trees), Committed(step, cursor, jax.tree.leaves(trees))


EVERY_KIND = leaves_of_every_kind()


# The spec.


def test_a_leaf_s_path_says_which_tree_and_where():
    """As a message names it."""
    spec, _ = state_of({"a": [jnp.zeros(2)]}, (jnp.zeros((), jnp.int32),), {"m": jnp.zeros((2, 3))})
    assert spec.lines() == [
        "params['a'][0]: float32[2]",
        "opt_state[0]: int32[]",
        "model_state['m']: float32[2,3]",
    ]


def test_split_and_trees_undo_flattening():
    """Each of the three trees gets its own leaves back, an empty one among them."""
    params, model = {"w": jnp.ones(2), "b": jnp.zeros(1)}, [jnp.arange(3)]
    spec, state = state_of(params, (), model)
    got = spec.trees(state.leaves)
    assert spec.counts == (2, 0, 1)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, (params, (), model)))


def test_specs_of_shapes_and_of_arrays_are_equal():
    """A worker that only traced its trainer may meet one that holds the state."""
    tree = EVERY_KIND
    assert spec_of(jax.eval_shape(lambda: tree), None, None) == spec_of(tree, None, None)


def test_a_weak_type_makes_no_other_spec():
    """`jnp.asarray(1.0)` in an initialiser is a float32 like any other."""
    weak = jax.eval_shape(lambda: {"w": jnp.asarray(1.0)})
    assert weak["w"].weak_type and spec_of(weak, None, None) == spec_of(
        {"w": jnp.float32(1)}, None, None
    )


@pytest.mark.parametrize(
    "other",
    [
        {"w": jnp.zeros(4)},
        {"w": jnp.zeros(3, jnp.bfloat16)},
        {"v": jnp.zeros(3)},
        {"w": jnp.zeros((3, 1))},
        {"w": jnp.zeros(3), "x": jnp.zeros(())},
    ],
)
def test_the_fingerprint_tells_trees_apart(other):
    """Shape, dtype, name, rank or number of leaves: each makes another one."""
    assert state_of(other)[0].fingerprint() != state_of({"w": jnp.zeros(3)})[0].fingerprint()


def test_the_fingerprint_tells_key_implementations_apart():
    """Keys of different implementations hold words of the same dtype and mean other things."""
    prints = {state_of({"k": jax.random.key(0, impl=i)})[0].fingerprint() for i in KEY_IMPLS}
    assert len(prints) == 3


def test_the_fingerprint_tells_the_three_trees_apart():
    """The same leaf as a parameter or as model state."""
    leaf = {"w": jnp.zeros(3)}
    assert (
        state_of(leaf, None, None)[0].fingerprint() != state_of(None, None, leaf)[0].fingerprint()
    )


def test_describe_writes_a_leaf_as_jax_does():
    """`float32[3,4]`."""
    assert describe(jnp.zeros((3, 4))) == "float32[3,4]"


def test_train_state_is_a_tree_that_can_be_replaced_in_part():
    """`state.replace(params=...)` leaves the rest, and the dataclass is frozen."""
    state = TrainState(jnp.int32(1), jnp.int32(2), {"w": jnp.ones(2)}, (), None)
    new = state.replace(params={"w": jnp.zeros(2)})
    assert len(jax.tree.leaves(new)) == 3 and new.step is state.step
    with pytest.raises(dataclasses.FrozenInstanceError):
        new.step = 3


# To the host and back.


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_leaf_comes_back_from_the_host_bit_for_bit(name):
    """Dtype, shape, key implementation and every bit."""
    spec, state = state_of({"x": EVERY_KIND[name]})
    [back] = from_host(spec, to_host(state.leaves))
    assert (back.dtype, back.shape) == (EVERY_KIND[name].dtype, EVERY_KIND[name].shape)
    assert bits_of(back) == bits_of(EVERY_KIND[name])


def test_host_shapes_are_those_that_to_host_gives():
    """Who receives a state knows its size beforehand."""
    spec, state = state_of(EVERY_KIND)
    arrays = to_host(state.leaves)
    assert [host_shape(leaf) for leaf in spec.leaves] == [(a.shape, a.dtype) for a in arrays]
    assert host_bytes(spec) == sum(a.nbytes for a in arrays)
