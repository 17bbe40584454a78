"""Several shards in one program: the sums of one by one, and when a worker may compute them so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ftrain
from ftrain.config import Config
from ftrain.errors import TrainerError
from ftrain.preparing import check_at_once, shards_at_once
from tests.test_nonfinite import NAN, Half, Told
from tests.test_step import MASKS, SHARDS, Linear, Steps


class Counted(Linear):
    """With model state: a mean, a count, a key and a leaf that no loss changes."""

    def init_params(self, key: jax.Array) -> Any:
        state = {"mean": jnp.zeros(3), "count": jnp.int32(0), "key": key, "same": jnp.ones(2)}
        return ftrain.Init(super().init_params(key), state)

    def loss(self, params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
        out = super().loss(params, batch, key)
        noise = jax.random.normal(key, (3,))
        state = {
            **model_state,
            "mean": batch["x"].mean(0) + noise,
            "count": model_state["count"] + batch["mask"].sum().astype(jnp.int32),
            "key": jax.random.split(key)[0],
        }
        return out._replace(model_state=state)


class Unbatched(Linear):
    """Asks the host, which answers for one shard only."""

    def loss(self, params: Any, batch: Any, key: jax.Array) -> Any:
        out = super().loss(params, batch, key)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        told = jax.pure_callback(lambda x: np.float32(0), shape, batch["mask"].sum())
        return out._replace(metrics={"told": jax.lax.stop_gradient(told)})


@pytest.fixture(scope="module")
def counted() -> Steps:
    return Steps(Counted(), at_once=2, judged_shards=SHARDS)


def sums_of(steps: Steps, split: list[list[int]], **how: bool) -> list[np.ndarray]:
    parts = [
        steps.programs.gradients(steps.first, [steps.batches[s] for s in held], stop=False, **how)
        for held in split
    ]
    return [np.asarray(sum(group[1:], group[0])) for group in zip(*parts, strict=True)]


@pytest.mark.parametrize("mask", ["even", "uneven", "fractions"])
@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0], [1, 2]], [[2, 1], [0]], [[1, 0, 2], []]])
def test_the_sums_are_those_of_one_by_one(counted, mask, split):
    """Gradient, loss, metrics, weight, model state and flags; two at once and the rest alone."""
    steps = counted.on(Counted().dataset(MASKS[mask]))
    at_once, alone = (sums_of(steps, split, one_by_one=one) for one in (False, True))
    for a, b in zip(at_once, alone, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    # Bits that are no numbers travel exactly: the lowest shard's count and key.
    assert at_once[1].dtype == np.uint32
    np.testing.assert_array_equal(at_once[1], alone[1])


def test_what_spoils_the_one_gradient_is_judged_bad(counted):
    """A shard without weight whose mean is 0/0: found, though alone it would be good."""
    steps = counted.on(Counted().dataset(MASKS["an empty shard"]))

    def found(one_by_one: bool) -> Any:
        sums = [jnp.asarray(b) for b in sums_of(steps, [[0, 1], [2]], one_by_one=one_by_one)]
        return steps.update(steps.first, sums, 12)[3]

    assert found(one_by_one=False) is not None
    assert found(one_by_one=True) is None


@pytest.mark.parametrize("leaf, kind", [("loss", "loss"), ("mean", "model state")])
def test_what_shows_in_a_shards_own_values_is_traced_to_it(leaf, kind):
    """Only of a gradient it is not known whose it is."""
    steps = Steps(Told(), at_once=SHARDS, judged_shards=SHARDS)
    steps = steps.on(Told().dataset(**{leaf: [1, NAN, 1]}))
    bad = steps.update(steps.first, steps.sums(steps.first), 12)[3]
    assert bad.shards == {1: [kind]}


def test_a_loss_that_cannot_be_batched_is_computed_one_by_one():
    """Unless the config asks for more: then it is refused, with vmap's own words."""
    steps = Steps(Unbatched(), at_once=SHARDS)
    assert steps.programs.at_once == 1
    check_at_once(config(), steps.programs)
    with pytest.raises(TrainerError, match="loss: several shards at once need jax.vmap.*shards_at"):
        check_at_once(config(shards_at_once=3), steps.programs)


def test_large_shards_are_computed_one_by_one_where_that_is_quicker(monkeypatch):
    """As long as the config does not say how many it shall be."""
    monkeypatch.setattr("ftrain.step.LARGE_SHARD_FLOPS", 1.0)
    assert Steps(Linear(), at_once=SHARDS, if_it_pays=True).programs.at_once == 1
    assert Steps(Linear(), at_once=SHARDS).programs.at_once == SHARDS
    monkeypatch.setattr("ftrain.step.LARGE_SHARD_FLOPS", 2e8)
    assert Steps(Linear(), at_once=SHARDS, if_it_pays=True).programs.at_once == SHARDS


def config(**keys: Any) -> Config:
    cluster = {"workers": keys.pop("workers", 1)}
    given = {"batch_size": 12, "batch_shards": SHARDS, "cluster": cluster, **keys}
    return Config(trainer="a.py:T", run_dir="r", steps=1, **given)


@pytest.mark.parametrize(
    "keys, count",
    [
        ({}, 3),
        ({"workers": 2}, 1),
        ({"shards_at_once": 2}, 2),
        ({"reduction": "reproducible"}, 1),
        ({"on_nonfinite": "ignore"}, 1),
    ],
)
def test_how_many_are_computed_at_once(keys, count):
    """As many as each worker has, but where each must be judged or added by itself."""
    assert shards_at_once(config(**keys), Steps(Linear()).spec) == count


def test_gradients_of_16_bits_are_not_summed_in_16_bits():
    """64 of them would be 1 % off."""
    spec = Steps(Half()).spec
    assert shards_at_once(config(), spec) == 1
    assert shards_at_once(config(reduce_dtype="param"), spec) == 3
    with pytest.raises(TrainerError, match="shards_at_once=3: would sum gradients of 16-bit"):
        shards_at_once(config(shards_at_once=3), spec)


@pytest.mark.parametrize("key, value", [("reduction", "reproducible"), ("on_nonfinite", "ignore")])
def test_what_needs_each_by_itself_is_refused_beside_it(key, value):
    """Both keys are named."""
    with pytest.raises(ValueError, match=f"{key}={value} .*leave shards_at_once out"):
        config(shards_at_once=2, **{key: value})


@pytest.mark.parametrize(
    "how", [{}, {"at_once": 2}, {"tree_shards": SHARDS}, {"lean": True}], ids=str
)
def test_every_program_can_be_run_before_there_is_a_state(how):
    """On zeros, whatever kinds of leaves the state has; the first real step is none the worse."""
    steps = Steps(Counted(), judged_shards=SHARDS, **how)
    steps.programs.warm_up()
    _, metrics, _ = steps.step()
    assert metrics == Steps(Counted()).step()[1]
