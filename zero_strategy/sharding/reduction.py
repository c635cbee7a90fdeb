"""One bucket's reduction over ranks: from its launch until its result is taken."""

from __future__ import annotations

from torch import Tensor

from zero_strategy.distributed import PendingWork
from zero_strategy.sharding.parameters import ParameterBucket


class Reduction:
    """What is under way.

    Args:
        bucket: Whose gradients.
        work: The sum over the ranks that hold different slices.
        sent: The whole buffer; None if gradients are sent from where they lie.
        total: This rank's part of the sum: of `sent`, or memory of its own.
        divides: Whether the result is a mean; else who adds it up divides it.

    Attributes:
        sent, total: As above.
    """

    def __init__(
        self, bucket: ParameterBucket, work: PendingWork, sent: Tensor | None, total: Tensor, *, divides: bool
    ) -> None:
        self._bucket, self._work, self._divides = bucket, work, divides
        self.sent, self.total = sent, total
        self._summed = False
        self._spread: PendingWork | None = None

    def finish_sum(self) -> None:
        """Complete the sum over all ranks; where everybody keeps whole gradients, start spreading it."""
        if self._summed:
            return
        self._summed = True
        self._work.wait()
        mesh = self._bucket.mesh
        if mesh.replicate.size > 1:
            mesh.replicate.all_reduce(self.total, self._bucket.names)
            if self._divides:
                self.total.mul_(1.0 / mesh.world_size)
        if not self._bucket.placement.shard_optimizer:
            assert self.sent is not None
            self._spread = mesh.reduce.all_gather(self.sent, of=self._bucket.names)

    def wait(self) -> None:
        """Until it is over."""
        self.finish_sum()
        if self._spread is not None:
            self._spread.wait()
