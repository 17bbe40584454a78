"""The reproducible sum, bit for bit; the workers of a view are devices of this process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ftrain import reduction
from ftrain.data import shards_of
from ftrain.mesh import Buffers
from ftrain.reduction import add, finish, held_nodes
from ftrain.tree import Node, Sums
from tests.test_state import bits_of
from tests.test_step import ALONE, SHARDS, Linear, Steps

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint32]


def folded(rows: Sequence[jax.Array], held: Sequence[int], shards: int) -> list[jax.Array]:
    """The node sums of one worker, each addition a program of its own as in `StepPrograms`."""
    sums = Sums(shards, jax.jit(add))
    for shard in held:
        sums.take(Node(0, shard), rows[shard])
    return sums.values


def over_devices(groups: Sequence[Sequence[jax.Array]], ranks: int) -> list[list[np.ndarray]]:
    """What each of `ranks` gets for buffers of several dtypes, given each shard's."""
    shards = len(groups[0])
    held = held_nodes(ranks, shards)
    most = max(map(len, held))
    joined = []
    for rows in groups:
        own = [folded(rows, shards_of(rank, ranks, shards), shards) for rank in range(ranks)]
        filler = jnp.full_like(rows[0], 7)  # not zeros: nobody may add it
        filled = [[*nodes, *[filler] * (most - len(nodes))] for nodes in own]
        joined += [jnp.stack(column)[:, None] for column in zip(*filled, strict=True)]
    mesh = Mesh(np.array(jax.devices()[:ranks]).reshape(ranks, 1), ("worker", "device"))
    spec = P("worker", "device")
    body = functools.partial(finish, held=held, shards=shards)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    return [[np.asarray(out)[rank, 0] for rank in range(ranks)] for out in program(joined)]


def drawn(shards: int, size: int, dtype: Any) -> list[jax.Array]:
    values = np.random.default_rng(shards).normal(size=(shards, size)) * 1000
    return list(jnp.asarray(np.abs(values) if dtype == jnp.uint32 else values, dtype))


@pytest.mark.parametrize("shards", [4, 7, 12])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_bits_of_one_worker_alone(ranks, shards):
    """All dtypes at once, at sizes of which few divide by the number of workers."""
    groups = [drawn(shards, 101 + i, dtype) for i, dtype in enumerate(DTYPES)]
    for rows, results in zip(groups, over_devices(groups, ranks), strict=True):
        [alone] = folded(rows, range(shards), shards)
        assert [bits_of(r) for r in results] == [bits_of(alone)] * ranks


def test_the_order_matters_to_these_numbers():
    """Else the test above would pass with any order."""
    for dtype in DTYPES[:3]:
        rows = drawn(12, 101, dtype)
        [tree] = folded(rows, range(12), 12)
        assert bits_of(tree) != bits_of(functools.reduce(jax.jit(add), rows))


def test_more_workers_than_shards_and_fewer_elements_than_workers():
    """A worker without a shard gives nothing, a slice may hold nothing, and -0.0 stays."""
    groups = [[jnp.full(1, -0.0), jnp.full(1, -0.0)], [jnp.zeros(0, jnp.uint32)] * 2]
    values, empty = over_devices(groups, 4)
    assert [bits_of(v) for v in values] == [bits_of(jnp.full(1, -0.0))] * 4
    assert [e.shape for e in empty] == [(0,)] * 4


class Plane:
    """The data plane of a worker that is alone."""

    workers = (3,)


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps(Linear(), tree_shards=SHARDS)


def test_the_nodes_of_a_step_add_up_to_its_sums(steps):
    """Against the fast way, and `stop` is in them once."""
    batches = steps.batches
    [alone] = steps.programs.nodes(steps.first, batches, stop=True)
    assert reduction.tree_sum(Plane(), [alone], SHARDS).result() is alone
    [fast] = steps.sums(steps.first, ALONE, stop=[0])
    np.testing.assert_allclose(alone[0], fast, rtol=1e-5)
    assert float(alone[0][0, 0, -1]) == 1
    assert len(steps.programs.nodes(steps.first, batches[1:], stop=False)) == 2


def test_a_step_that_is_tried_again_on_other_workers_gives_the_same_bits(steps):
    """Whoever computes which shard, by the programs a worker runs."""

    def root(split: Sequence[Sequence[int]]) -> Buffers:
        sums = Sums(SHARDS, steps.programs._add_program)
        for held in split:
            own = steps.programs.nodes(steps.first, [steps.batches[s] for s in held], stop=False)
            for node, value in zip(reduction.nodes_of(held, SHARDS), own, strict=True):
                sums.take(node, value)
        return sums.values[0]

    wanted = [bits_of(b) for b in root(ALONE)]
    for split in ([[0], [1, 2]], [[0, 1], [2]], [[0], [1], [2]]):
        assert [bits_of(b) for b in root(split)] == wanted


def test_not_a_number_has_the_same_bits_in_every_state(steps):
    """A sum of two of them has the bits of either, as the compiler likes."""
    states = []
    for pattern in (0x7FC00000, 0xFFC00001):
        [sums] = steps.sums(steps.first)
        nan = np.array(pattern, np.uint32).view(np.float32)
        state, *_ = steps.update(steps.first, [sums.at[0, 0, 0].set(nan)], 12)
        states.append([bits_of(leaf) for leaf in state.leaves])
    assert states[0] == states[1]
    assert any(np.isnan(leaf).any() for leaf in state.leaves)
