r"""The tree in which a step's shards are summed: a pure function of their number. No jax.

Node (level, index) covers the shards from `index * 2**level` up to the next node of its level, as
far as there are any. Its sum is its left child's plus its right child's, or the left child's alone
where there is no right one. So who adds, and when, changes no bit of the root. Six shards:

    level 3            0-5
                   /         \
    level 2      0-3         4-5
                /   \         |
    level 1   0-1   2-3      4-5
             /  \  /  \    /  \
    level 0  0  1  2  3    4  5

A worker holds neighbouring shards and adds what it can: of two workers one ends with 0-1 and 2, the
other with 3 and 4-5. `Sums` works like the carry of binary addition, so k shards leave at most
2 * log2(k) nodes (one for k = 1), and no more are kept on the way, but for the shard that has just
been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree; of level 0: the shard `index`."""

    level: int
    index: int


class Sums(Generic[T]):
    """Sums of nodes, taken in the order of their shards and added where both children are there.

    Args:
      shards: their number, which is the tree's.
      add: gives the sum of a left and a right child; neither is used again.

    Attributes:
      nodes: what is held, in order.
      values: the sum of each.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]):
        self._shards, self._add = shards, add
        self.nodes: list[Node] = []
        self.values: list[T] = []

    def take(self, node: Node, value: T) -> None:
        """Takes the sum of the next node, and adds as far up as that completes nodes."""
        while not self._is_root(node):
            level, index = node
            if index % 2:
                if self.nodes[-1:] != [Node(level, index - 1)]:
                    break  # another worker holds the left sibling
                self.nodes.pop()
                value = self._add(self.values.pop(), value)
            elif (index + 1) << level < self._shards:
                break  # the right sibling is still to come, here or with another worker
            node = Node(level + 1, index // 2)
        self.nodes.append(node)
        self.values.append(value)

    def _is_root(self, node: Node) -> bool:
        return node.index == 0 and 1 << node.level >= self._shards


def nodes_of(held: Sequence[int], shards: int) -> list[Node]:
    """The nodes that a worker ends with which holds those neighbouring shards, in order."""
    sums: Sums[None] = Sums(shards, lambda left, right: None)
    for shard in held:
        sums.take(Node(0, shard), None)
    return sums.nodes
