"""The state of one backward: what has come of its gradients, and which buckets have left with theirs."""

from __future__ import annotations

from collections import deque

from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.reduction_plan import ParameterHook

MAX_IN_FLIGHT = 2
"""Reductions under way at once where their buffers live only as long: enough to overlap, few enough to bound them."""


class Backward:
    """Progress of one backward. The reducer makes it when autograd begins one; the next takes its place.

    Buckets are known by their numbers. A bucket begins with its first gradient, or when it leaves without one; it
    leaves when its reduction starts, once in a backward.

    Args:
        buckets: Their number.

    Attributes:
        divide_by: Its gradients are to be divided by this.
        running: Autograd runs it, or an exception tore it apart.
        begun: Buckets that have begun.
        seen: By bucket, the indices of parameters whose `p.grad` was set in this backward.
        awaited: Hooks of parameters whose `p.grad` was emptied for a gradient that autograd is about to add, or, in
            `torch.autograd.grad`, keeps to itself.
        left: Buckets that left before the ranks agreed, in order.
        next: Place in the plan's order of the first bucket that has not left.
    """

    def __init__(self, buckets: int) -> None:
        self.divide_by, self.running = 1, False
        self.begun: set[int] = set()
        self.seen: list[set[int]] = [set() for _ in range(buckets)]
        self.awaited: set[ParameterHook] = set()
        self.left: dict[int, None] = {}  # ordered: ranks compare the order
        self.next = 0
        self._in_flight: deque[GradientBucket] = deque()

    def begin(self, number: int, bucket: GradientBucket) -> None:
        """Let a bucket take gradients: it notices `zero_grad`, and keeps earlier sums apart. Once is enough."""
        if number not in self.begun:
            self.begun.add(number)
            bucket.begin()

    def leave(self, number: int, bucket: GradientBucket) -> None:
        """Start the reduction of a bucket, which has begun; few are under way at once where each takes memory."""
        # Before the launch, which empties `live`: sums of earlier backwards count as touched, too, when ranks agree.
        self.seen[number] |= bucket.unreduced
        self.left[number] = None
        # The buffer of the oldest goes back with its end; one that stays takes no memory that waiting would free.
        if not bucket.keeps_whole and len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().finish()
        bucket.launch()
        if not bucket.keeps_whole:
            self._in_flight.append(bucket)

    def leave_again(self, number: int, bucket: GradientBucket) -> None:
        """Start a second reduction for gradients that came after the bucket had left, or that another rank has."""
        if bucket in self._in_flight:
            self._in_flight.remove(bucket)
        # The first reduction has to be over before late gradients may go into the buffer.
        bucket.finish()
        bucket.admit_late()
        self.begin(number, bucket)
        self.leave(number, bucket)

    def agreed(self) -> None:
        """The ranks have agreed on what was reduced: nothing is under way any more."""
        self.next = 0
        self.left.clear()
        # Not finished here: the caller does it for all buckets, those that did not leave included.
        self._in_flight.clear()
