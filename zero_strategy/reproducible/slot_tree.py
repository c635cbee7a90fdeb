"""The fixed tree in which values of slots are summed, whoever has computed them.

A step has S slots (micro-batches). Their sum is that of a binary tree over 0 to S - 1, in which the left child has the
largest power of two of slots that leaves the right one any:

    S = 12          [0, 12)
               [0, 8)        [8, 12)
            [0, 4) [4, 8)   [8, 10) [10, 12)      ...

A node is a range of slots. A rank that has all slots of a node adds them up by itself, and only the node's value
travels; so the bits of the whole sum depend on S alone. What a rank's slots amount to is a list of nodes (`cover`):
one, where ranks take powers of two of them.

Pure arithmetic; `NodeSums` holds tensors, and knows no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Node = tuple[int, int]
"""First slot of a subtree, and one past its last."""


def children(node: Node) -> tuple[Node, Node]:
    """Left and right half of a node of two slots or more."""
    start, stop = node
    assert stop - start > 1, "a leaf has no children"
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def cover(slots: int, start: int, stop: int) -> list[Node]:
    """The fewest nodes of the tree over `slots` that make up slots [start, stop), in their order."""
    found: list[Node] = []

    def visit(node: Node) -> None:
        if node[1] <= start or node[0] >= stop:
            return
        if start <= node[0] and node[1] <= stop:
            found.append(node)
            return
        for child in children(node):
            visit(child)

    visit((0, slots))
    return found


def ancestors(slots: int, node: Node) -> list[tuple[Node, Node, Node]]:
    """Parent, left and right child of every step from a node up to the root, the lowest first.

    Raises:
        ValueError: If it is no node of the tree over `slots`.
    """
    path: list[tuple[Node, Node, Node]] = []
    at = (0, slots)
    while at != node:
        if at[1] - at[0] < 2 or not (at[0] <= node[0] and node[1] <= at[1]):
            raise ValueError(f"[{node[0]}, {node[1]}) is no node of the tree over {slots} slots")
        left, right = children(at)
        path.append((at, left, right))
        at = left if node[1] <= left[1] else right
    return path[::-1]


@dataclass(frozen=True)
class SumOrder:
    """Sum of one node of each rank of a group, as far as the nodes make up others.

    Args:
        slots: Of a step.
        nodes: By rank; None: that rank's values count for nothing.
    """

    slots: int
    nodes: tuple[Node | None, ...]

    @cached_property
    def results(self) -> list[Node]:
        """The nodes that come out, in order: the fewest."""
        there = sorted(node for node in self.nodes if node is not None)
        assert len(set(there)) == len(there), "no two ranks have the same slots"
        found: list[Node] = []
        for node in there:
            # Siblings are neighbours here, and so are those that their sums make up.
            for parent, left, right in ancestors(self.slots, node):
                if right != node or not found or found[-1] != left:
                    break
                found.pop()
                node = parent
            found.append(node)
        return found

    def add_up(self, parts: Sequence[Tensor], into: Sequence[Tensor], factor: float = 1.0) -> None:
        """Write each result's sum, times a factor.

        Zeros come out without a sign: what adds nothing may be there as zeros, or not at all.

        Args:
            parts: By rank, of one shape; they are only read.
            into: By result, other memory than the parts.
            factor: Of all of them.
        """
        places = {node: part for node, part in zip(self.nodes, parts, strict=True) if node is not None}
        for node, out in zip(self.results, into, strict=True):
            total = self._sum(node, places, out)
            # Product and zero in one pass; the sum of a product and zero is rounded as the product.
            torch.add(out.new_zeros(()), total, alpha=factor, out=out)

    def _sum(self, node: Node, places: dict[Node, Tensor], out: Tensor) -> Tensor:
        """A node's sum: a part, or `out`, which may be written to."""
        if node in places:
            return places[node]
        left, right = children(node)
        # The left half may take `out`, as no other sum is there yet.
        first = self._sum(left, places, out)
        needs_room = first is out and right not in places
        second = self._sum(right, places, torch.empty_like(out) if needs_room else out)
        return torch.add(first, second, out=out)


class NodeSums:
    """Values of the nodes that are known of one step, added up as soon as both children of a node are there.

    Args:
        slots: Of a step.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._values: dict[Node, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._values.values())

    def put(self, node: Node, values: Tensor) -> bool:
        """Take a node's values, which are this object's from now on and may be written to.

        A node that is there already gets them added: what has come in two parts, element for element in one of them.

        Returns:
            Whether they were added to others, so that their memory is the caller's again.
        """
        known = self._values.get(node)
        if known is not None:
            known.add_(values)
            return True
        path, added = ancestors(self.slots, node), False
        assert not any(parent in self._values for parent, _, _ in path), "a node that is a part of a sum is complete"
        for parent, left, right in path:
            other = self._values.pop(right if node == left else left, None)
            if other is None:
                break
            # A sum of two does not depend on their order.
            values, node, added = other.add_(values), parent, True
        self._values[node] = values
        return added

    def take(self, node: Node) -> Tensor | None:
        """Take a node's sum out, where slots of which nothing is known count as zeros; None: nothing is known."""
        found = self._values.pop(node, None)
        if found is not None or node[1] - node[0] == 1:
            return found
        first, second = (self.take(child) for child in children(node))
        if first is None or second is None:
            return second if first is None else first
        return first.add_(second)

    def fill(self, start: int, stop: int, value: float) -> None:
        """Set elements [start, stop) of all values to one number."""
        for held in self._values.values():
            held[start:stop].fill_(value)

    def relocate(self, moved: Iterable[Tensor]) -> None:
        """Let the values lie in other tensors, in the order of iteration."""
        self._values = dict(zip(self._values, moved, strict=True))

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
