"""The mathematics of a run's last batch: fewer shards, one of them shorter, and nothing padded.

No processes: workers are calls of `gradients` and `nodes`, and their sum is taken here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ftrain
from ftrain.data import Source, shards_of
from ftrain.errors import TrainerError
from ftrain.reduction import add
from ftrain.tree import Sums, nodes_of
from tests.test_state import bits_of
from tests.test_step import SHARDS, SIZE, Steps, W, X, Y

LEFT = 6  # of twelve samples: a whole shard of four, one of two, and one without any
SPLITS = [[[0, 1, 2]], [[0, 1], [2]], [[0], [1], [2]], [[0], [1], [2], []]]


class Line(ftrain.Trainer):
    """The mean of squares, BatchNorm's kind of statistics, and the rate 1."""

    def dataset(self) -> dict[str, np.ndarray]:
        return {"x": X, "y": Y}

    def init_params(self, key: jax.Array) -> Any:
        params = {"w": jnp.asarray(W, jnp.float32), "b": jnp.asarray(0.25)}
        return ftrain.Init(params, {"mean": jnp.zeros(3), "count": jnp.int32(0)})

    def loss(self, params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
        miss = batch["x"] @ params["w"] + params["b"] - batch["y"]
        state = {"mean": batch["x"].mean(0), "count": model_state["count"] + len(batch["x"])}
        return ftrain.Loss((miss**2).mean(), {"miss": abs(miss).mean()}, model_state=state)

    def optimizer(self) -> Any:
        import optax

        return optax.sgd(1.0)


def last(steps: Steps, left: int = LEFT) -> Steps:
    """The same programs, on a batch of which `left` samples are left."""
    source = Source(Line().dataset(), "dataset()")
    for shard in range(SHARDS):
        indices = np.arange(shard * SIZE, min(left, (shard + 1) * SIZE))
        batch = source.batch(indices) if indices.size else None
        steps.batches[shard] = (shard, batch)
        if batch is not None and steps.programs.lacks(batch):
            steps.programs.compile_for(batch, lambda lowered: lowered.compile())
    return steps


@pytest.fixture(scope="module")
def fast() -> Steps:
    return last(Steps(Line()))


@pytest.fixture(scope="module")
def in_order() -> Steps:
    return last(Steps(Line(), tree_shards=SHARDS, judged_shards=SHARDS))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_means_are_over_the_samples_that_exist(fast, split):
    """Gradient, loss, metrics and model state, in float64, of six samples."""
    sums = fast.sums(fast.first, split)
    state, metrics, *_ = fast.update(fast.first, sums, LEFT)
    x, y = X[:LEFT].astype(np.float64), Y[:LEFT].astype(np.float64)
    miss = x @ W + 0.25 - y
    params, _, model = fast.trees(state)
    np.testing.assert_allclose(W - params["w"], 2 * miss @ x / LEFT, rtol=1e-5)
    np.testing.assert_allclose(model["mean"], x.mean(0), rtol=1e-5)
    assert metrics == pytest.approx({"loss": (miss**2).mean(), "miss": abs(miss).mean()}, rel=1e-5)
    assert int(model["count"]) == SIZE  # the lowest shard's
    assert (state.step, state.cursor) == (1, LEFT)


def test_a_batch_smaller_than_a_shard_is_one_shorter_shard():
    """A single sample is left."""
    steps = last(Steps(Line()), left=1)
    _, metrics, *_ = steps.update(steps.first, steps.sums(steps.first, [[0], [1, 2]]), 1)
    assert metrics["loss"] == pytest.approx((X[0] @ W + 0.25 - Y[0]) ** 2, rel=1e-5)


def tree(steps: Steps, ranks: int, stop: int | None = None) -> list[jax.Array]:
    """The root of the tree from the nodes of so many workers."""
    total = Sums(SHARDS, lambda a, b: [add(x, y) for x, y in zip(a, b, strict=True)])
    for rank in range(ranks):
        held = shards_of(rank, ranks, SHARDS)
        batches = [steps.batches[s] for s in held]
        values = steps.programs.nodes(steps.first, batches, stop=rank == stop)
        for node, value in zip(nodes_of(held, SHARDS), values, strict=False):
            total.take(node, value)
    [root] = total.values
    return root


@pytest.mark.parametrize("ranks", [2, 3])
def test_reproducible_sums_have_the_same_bits_for_any_workers(in_order, ranks):
    """Also where a worker has no sample at all."""
    assert [bits_of(b) for b in tree(in_order, ranks)] == [bits_of(b) for b in tree(in_order, 1)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_request_to_stop_is_heard_from_a_worker_without_samples(in_order, ranks):
    """The highest worker holds shard 2, which has none."""
    *_, stop, found = in_order.update(in_order.first, tree(in_order, ranks, stop=ranks - 1), LEFT)
    assert stop and found is None
    assert not in_order.update(in_order.first, tree(in_order, ranks), LEFT)[2]


def test_a_shorter_shard_that_is_not_finite_is_named(in_order):
    """By its number, as a whole one is."""
    shard, batch = in_order.batches[1]
    in_order.batches[1] = shard, [np.full_like(leaf, np.inf) for leaf in batch]
    try:
        found = in_order.update(in_order.first, tree(in_order, 2), LEFT)[3]
    finally:
        in_order.batches[1] = shard, batch
    assert found.mark == [1]


def test_a_loss_that_cannot_take_the_shorter_shard_is_refused_at_the_start():
    """Not after days, at the last step."""

    class Even(Line):
        def loss(self, params, batch, key, model_state):
            return (batch["x"].reshape(-1, 2, 3) @ params["w"]).mean()

    programs = Steps(Even()).programs
    programs.check_shorter(0)
    programs.check_shorter(2)
    with pytest.raises(TypeError, match="reshape"):
        programs.check_shorter(3)


def test_a_loss_with_other_metrics_for_the_shorter_shard_is_refused():
    """What travels has one layout."""

    class Moody(Line):
        def loss(self, params, batch, key, model_state):
            out = super().loss(params, batch, key, model_state)
            return out._replace(metrics={"odd" if len(batch["x"]) % 2 else "even": out.value})

    with pytest.raises(TrainerError, match="of 3 samples instead of 4") as caught:
        Steps(Moody()).programs.check_shorter(3)
    assert "odd" in str(caught.value) and "even" in str(caught.value)
