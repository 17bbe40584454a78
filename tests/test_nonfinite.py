"""What of a step is not finite: found in reduced values, traced to its shard, told with advice.

No processes: workers are calls of `gradients`, and their sum is taken here, as in `test_step`.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ftrain
from ftrain.nonfinite import Nonfinite, why_stopped
from tests.test_state import bits_of
from tests.test_step import SHARDS, SIZE, SPLITS, Linear, Steps

NAN, INF = float("nan"), float("inf")


@jax.custom_vjp
def with_gradient(w: jax.Array, gradient: jax.Array) -> jax.Array:
    """0, of which the gradient to `w` is `gradient`."""
    return jnp.float32(0)


with_gradient.defvjp(
    lambda w, gradient: (jnp.float32(0), gradient.astype(w.dtype)),
    lambda gradient, _: (gradient, jnp.float32(0)),
)


class Told(ftrain.Trainer):
    """Each sample says what its shard shall give: loss, gradient, model state and weight."""

    dtype = jnp.float32

    def dataset(self, **leaves: list[float]) -> dict[str, np.ndarray]:
        calm = {"loss": 1, "gradient": 0.5, "metric": 1, "mean": 1, "weight": 0.25}
        return {
            name: np.array(leaves.get(name, [value] * SHARDS), np.float32).repeat(SIZE)
            for name, value in calm.items()
        }

    def init_params(self, key: jax.Array) -> Any:
        state = {"mean": 0.0, "least": jnp.inf, "count": jnp.int32(0), "key": key}
        return ftrain.Init({"w": jnp.ones((), self.dtype)}, state)

    def loss(self, params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
        state = {
            **model_state,
            "mean": batch["mean"][0],
            "least": model_state["least"] * 2,  # changed, and as infinite as it was
            "count": model_state["count"] + 1,
            "key": jax.random.split(model_state["key"])[0],
        }
        value = batch["loss"][0] + with_gradient(params["w"], batch["gradient"][0])
        metrics = {"metric": batch["metric"][0]}
        return ftrain.Loss(value, metrics, batch["weight"].sum(), state)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(0.5)


class Half(Told):
    """Its parameters are of 16 bits."""

    dtype = jnp.float16


@pytest.fixture(scope="module")
def told() -> Steps:
    return Steps(Told(), judged_shards=SHARDS)


def found(steps: Steps, split: Any = SPLITS[0], **leaves: list[float]) -> Nonfinite | None:
    steps = steps.on(Told().dataset(**leaves)) if leaves else steps
    return steps.update(steps.first, steps.sums(steps.first, split), SHARDS * SIZE)[3]


def test_a_finite_step_is_not_judged_bad(told):
    """Nor one in whose model state an element was infinite already."""
    assert found(told) is None


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("leaf", "kind", "name"),
    [
        ("loss", "loss", "loss"),
        ("gradient", "gradient", "gradient of params['w']"),
        ("mean", "model state", "model_state['mean']"),
    ],
)
def test_each_source_is_traced_to_its_shard(told, leaf, kind, name, value, split):
    """Whoever computes which shard; with its value, and nothing else is named."""
    bad = found(told, split, **{leaf: [1, value, 1]})
    assert bad == Nonfinite({1: [kind]}, "shards", [f"{name} {value}"])
    assert bad.mark == [1]


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_weight_is_traced_to_its_shard(told, value):
    """It spoils every mean of the step."""
    bad = found(told, weight=[1, 1, value])
    assert bad.shards == {2: ["weight"]} and f"weight {value}" in bad.values


def test_several_shards_and_kinds_are_all_named(told):
    """All of them, and each with its own."""
    bad = found(told, SPLITS[2], loss=[NAN, 1, 1], gradient=[INF, 1, -INF], mean=[1, NAN, 1])
    assert bad.shards == {0: ["loss", "gradient"], 1: ["model state"], 2: ["gradient"]}
    assert bad.values == ["loss nan", "gradient of params['w'] nan", "model_state['mean'] nan"]


def test_a_shard_without_weight_may_hold_anything(told):
    """0/0 is its mean, and it goes nowhere."""
    assert (
        found(told, weight=[1, 0, 1], loss=[1, NAN, 1], gradient=[1, NAN, 1], mean=[1, INF, 1])
        is None
    )


def test_a_metric_alone_is_not_judged(told):
    """It is the user's to be nan where there is nothing to count."""
    assert found(told, metric=[NAN, 1, INF]) is None


@pytest.mark.parametrize("leaf", ["loss", "gradient", "mean"])
def test_a_sum_that_overflows_is_judged_though_every_shard_is_finite(told, leaf):
    """3 x 2e38 is more than a float32 holds."""
    bad = found(told, SPLITS[2], **{leaf: [2e38] * SHARDS})
    assert (bad.shards, bad.source, bad.mark) == ({}, "sum", ["sum"])
    assert bad.values[0].endswith(" inf")


def test_an_overflow_of_the_reduce_dtype_is_judged():
    """Three gradients of 40000 fit a float16, their sum does not; in float32 it does."""
    gradients = {"gradient": [40000.0] * SHARDS}
    narrow = Steps(Half(), judged_shards=SHARDS, reduce_dtype="param")
    assert found(narrow, SPLITS[2], **gradients).mark == ["sum"]
    wide = Steps(Half(), judged_shards=SHARDS, reduce_dtype="float32")
    assert found(wide, SPLITS[2], **gradients) is None
    assert found(narrow, gradient=[1, NAN, 1]).mark == [1]


class BadUpdate(Told):
    """Divides by the parameter, which is 0 after a gradient of 2."""

    def update(self, state: Any, grads: Any) -> Any:
        w = state.params["w"] - 0.5 * grads["w"]
        return state.replace(params={"w": 1 / w})


def test_an_update_that_goes_wrong_is_judged():
    """The gradients were finite, the new parameters are not."""
    bad = found(Steps(BadUpdate(), judged_shards=SHARDS), gradient=[2.0] * SHARDS)
    assert bad == Nonfinite({}, "update", ["params['w'] inf"])
    assert bad.mark == ["update"]


class Adam(Told):
    """Its second moment overflows long before its gradient does."""

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adam(0.1)


def test_an_optimizer_state_that_overflows_is_judged():
    """Parameters that are finite but would never move again are no good state either."""
    bad = found(Steps(Adam(), judged_shards=SHARDS), gradient=[1e25] * SHARDS)
    assert bad == Nonfinite({}, "update", ["opt_state[0].nu['w'] inf"])


class RemembersBest(Told):
    """Its optimizer begins with an infinite best, as optax's reduce_on_plateau does."""

    def optimizer(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(
            lambda params: {"best": jnp.float32(jnp.inf)},
            lambda grads, state, params: (grads, state),
        )


def test_what_was_infinite_before_is_not_judged():
    """Only what becomes so."""
    assert found(Steps(RemembersBest(), judged_shards=SHARDS)) is None


def test_judging_changes_no_bit_of_a_good_step(told):
    """The same leaves and metrics with and without."""
    plain = Steps(Told())
    judged, bare = told.step(split=SPLITS[1]), plain.step(split=SPLITS[1])
    assert [bits_of(x) for x in judged[0].leaves] == [bits_of(x) for x in bare[0].leaves]
    assert judged[1] == bare[1]


def test_ignored_steps_are_not_judged_and_cost_nothing():
    """No flag travels, and no program asks whether anything is finite."""
    plain, judged = Steps(Linear()), Steps(Linear(), judged_shards=SHARDS)
    assert found(plain.on({**Linear().dataset(), "y": np.full(12, NAN, np.float32)})) is None
    sizes = [[s.size for s in steps.programs.buffer_shapes] for steps in (plain, judged)]
    assert sizes[1][0] - sizes[0][0] == SHARDS
    for steps, asks in ((plain, False), (judged, True)):
        steps.programs.lower()
        texts = [lowered.as_text() for lowered in steps.programs.lowered.values()]
        assert any("is_finite" in text for text in texts) is asks


# What is told.

OWNERS = {s: s // 2 for s in range(6)}


def last_lines(bad: Nonfinite, *, reduce_dtype: str = "float32", skipped: int = 0) -> list[str]:
    return why_stopped(
        bad, 12, OWNERS, lambda s: f"the samples of {s}", reduce_dtype, skipped
    ).splitlines()


def test_the_last_lines_name_shard_worker_samples_and_what_to_do():
    assert last_lines(Nonfinite({3: ["loss", "gradient"]}, "shards", ["loss nan"])) == [
        "step 12 is not finite: loss nan",
        "  shard 3 of worker 1: loss and gradient, from the samples of 3",
        "it was not committed; the last good state is that of step 11",
        "look at the samples of that shard; on_nonfinite: skip goes on without such steps",
    ]


@pytest.mark.parametrize(
    ("bad", "reduce_dtype", "says"),
    [
        (Nonfinite({}, "sum", ["loss inf"]), "param", "set reduce_dtype: float32, or scale"),
        (Nonfinite({}, "sum", ["loss inf"]), "float32", "their sum is not: scale the loss down"),
        (Nonfinite({}, "update", ["params['w'] nan"]), "float32", "look at optimizer()"),
        (Nonfinite({s: ["loss"] for s in range(6)}, "shards", ["loss nan"]), "float32", "loss()"),
    ],
)
def test_the_next_action_fits_the_source(bad, reduce_dtype, says):
    assert says in last_lines(bad, reduce_dtype=reduce_dtype)[-1]


def test_a_row_of_skipped_steps_is_told_when_it_ends_the_run():
    first = last_lines(Nonfinite({0: ["loss"]}, "shards", ["loss nan"]), skipped=100)[0]
    assert first == "100 steps in a row were skipped, and step 12 is not finite: loss nan"


def test_garbage_of_a_cancelled_collective_is_no_error():
    """A body may see anything before its barrier refuses it (R1): it must not end the worker."""
    steps = Steps(Linear(), judged_shards=SHARDS)
    garbage = [jnp.full(s.shape, NAN, s.dtype) for s in steps.programs.buffer_shapes]
    bad = steps.update(steps.first, garbage, SHARDS * SIZE)[3]
    assert json.dumps(last_lines(bad))
