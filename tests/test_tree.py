"""The tree of sums: every split of the shards over workers makes the same additions."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.tree import Node, Sums, nodes_of

QUICK = settings(max_examples=300, deadline=None, database=None)
SHARDS = st.integers(1, 200)


def serial(first: int, shards: int, size: int) -> str:
    """The sum from `first` on, of a node of `size` shards, written as its additions."""
    if size == 1:
        return str(first)
    half = size // 2
    left = serial(first, shards, half)
    return f"({left}+{serial(first + half, shards, half)})" if first + half < shards else left


def root(shards: int) -> str:
    return serial(0, shards, 1 << (shards - 1).bit_length())


def added(left: str, right: str) -> str:
    return f"({left}+{right})"


def folded(held: list[int], shards: int) -> Sums[str]:
    sums = Sums(shards, added)
    for shard in held:
        sums.take(Node(0, shard), str(shard))
    return sums


def covered(node: Node, shards: int) -> list[int]:
    return [s for s in range(shards) if s >> node.level == node.index]


def test_six_shards_are_added_as_the_docstring_shows():
    assert root(6) == "(((0+1)+(2+3))+(4+5))"
    assert [nodes_of(held, 6) for held in ([0, 1, 2], [3, 4, 5])] == [
        [Node(1, 0), Node(0, 2)],
        [Node(0, 3), Node(2, 1)],  # 4-5 has no sibling until level 2
    ]


@QUICK
@given(SHARDS)
def test_one_worker_ends_with_the_root(shards):
    sums = folded(list(range(shards)), shards)
    assert sums.values == [root(shards)]
    assert covered(sums.nodes[0], shards) == list(range(shards))


@QUICK
@given(SHARDS, st.lists(st.integers(0, 200), max_size=12))
def test_any_cut_into_neighbours_makes_the_same_additions(shards, cuts):
    """Each worker adds what it can, then all nodes meet: each shard once, in the same tree."""
    ends = [0, *sorted(min(c, shards) for c in cuts), shards]
    parts = [list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]
    total = Sums(shards, added)
    for part in parts:
        own = folded(part, shards)
        assert own.nodes == nodes_of(part, shards)
        assert [s for node in own.nodes for s in covered(node, shards)] == part
        for node, value in zip(own.nodes, own.values, strict=True):
            total.take(node, value)
    assert total.values == [root(shards)]


@QUICK
@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_a_worker_ends_with_a_logarithm_of_nodes_and_never_holds_more(shards, first, count):
    """The bound of the docstring, on the way too."""
    held = list(range(min(first, shards), min(first + count, shards)))
    sums = Sums(shards, added)
    for i, shard in enumerate(held, 1):
        sums.take(Node(0, shard), str(shard))
        assert len(sums.nodes) <= max(1, 2 * math.log2(i))
