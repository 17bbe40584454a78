"""The reproducible sum over the workers of a view: the same bits whoever holds which shards.

Each worker has added its shards as far as the fixed tree allows (`tree`). What is left, a few nodes
each, is cut into as many slices as there are workers; every worker is sent its slice of all nodes,
finishes the tree on it, and the finished slices are gathered. Six shards on two workers:

    worker 0   0-1 [a|b]  2   [a|b]          a of 0-1, 2, 3, 4-5  ->  a of 0-5
    worker 1   3   [a|b]  4-5 [a|b]   ---->  b of 0-1, 2, 3, 4-5  ->  b of 0-5   ---->  [a|b] to all
                                 all_to_all                             all_gather

With n bytes of sums, w workers and at most m nodes on one of them (m = 1 with a shard a worker, 2
with three, at most 2 * log2(k) with k), a worker sends (m + 1) * n * (w - 1) / w bytes, where the
fast sum, a ring, sends 2 * n * (w - 1) / w; it holds its m nodes and about twice as much while they
travel. A worker with fewer nodes sends filling, which nobody adds: x + 0 may differ from x in bits.
One worker alone has the root already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ftrain.data import shards_of
from ftrain.mesh import Buffers, DataPlane, Summing
from ftrain.tree import Node, Sums, nodes_of

Held = tuple[tuple[Node, ...], ...]  # the nodes of each rank


def tree_sum(
    plane: DataPlane,
    nodes: Sequence[Buffers],
    shards: int,
    ready: Callable[[], None] = lambda: None,
) -> Summing:
    """The sum of all shards of a step, in the order of the tree; on this worker's device.

    Args:
      plane: of the view.
      nodes: this worker's node sums, as `tree.nodes_of` its shards; anything, once, if it has none.
      shards: of the step, over all workers.
      ready: called once the nodes are computed, as for `DataPlane.begin_sum`.

    A collective, as `DataPlane.begin_sum`, and it raises what that does.
    """
    if len(plane.workers) == 1:
        return Summing(nodes[0])
    held = held_nodes(len(plane.workers), shards)
    most = max(map(len, held))
    filled = [*nodes, *[nodes[-1]] * (most - len(nodes))]
    groups = list(zip(*filled, strict=True))
    return plane.begin(
        ("tree", shards),
        functools.partial(finish, held=held, shards=shards),
        [buffer for group in groups for buffer in group],
        ready,
    )


@functools.cache
def held_nodes(ranks: int, shards: int) -> Held:
    """The nodes that each rank of a view ends with."""
    return tuple(tuple(nodes_of(shards_of(rank, ranks, shards), shards)) for rank in range(ranks))


def finish(buffers: Buffers, *, held: Held, shards: int) -> Buffers:
    """Inside `shard_map`: one rank's nodes, as many of each dtype in a row, to the root. Traced."""
    most = max(map(len, held))
    return [
        _finish_group(jnp.stack([b.reshape(-1) for b in buffers[i : i + most]]), held, shards)
        for i in range(0, len(buffers), most)
    ]


def _finish_group(nodes: jax.Array, held: Held, shards: int) -> jax.Array:
    """[nodes, size] of one rank to the root's [1, 1, size], the same on all. Traced."""
    ranks, size = len(held), nodes.shape[1]
    part = max(1, -(-size // ranks))
    nodes = jnp.pad(nodes, ((0, 0), (0, ranks * part - size)))
    slices = nodes.reshape(-1, ranks, part)
    slices = jax.lax.all_to_all(slices, "worker", split_axis=1, concat_axis=0)
    sums: Sums[jax.Array] = Sums(shards, add)
    for rank, own in enumerate(held):
        for i, node in enumerate(own):
            sums.take(node, slices[rank, i])
    [root] = sums.values
    return jax.lax.all_gather(root, "worker", tiled=True)[:size].reshape(1, 1, -1)


def add(left: jax.Array, right: jax.Array) -> jax.Array:
    """The sum, rounded to its dtype wherever it is computed. Traced."""
    total = left + right
    if not jnp.issubdtype(total.dtype, jnp.floating) or total.dtype.itemsize >= 4:
        return total
    # XLA may leave out the rounding between two sums of one program: its excess precision.
    kind = jnp.finfo(total.dtype)
    return jax.lax.reduce_precision(total, kind.nexp, kind.nmant)
