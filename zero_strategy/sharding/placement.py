"""What each ZeRO stage keeps whole and what it divides: a row of a table, read by one implementation.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig

Reduction = Literal["per_step", "per_micro_batch"]


@dataclass(frozen=True)
class Placement:
    """Which parts of the model state are divided among the ranks of the shard axis.

    Attributes:
        stage: The ZeRO stage this row is named after.
        shard_parameters: Parameters are released and gathered around their use.
        shard_gradients: Only the owned slice of a gradient is kept, also of those of earlier micro-batches.
        shard_optimizer: Each rank updates its own slice only.
        in_place: Released parameters keep their memory, and the own slice is its place in there.
    """

    stage: int
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    in_place: bool = False

    @property
    def reduction(self) -> Reduction:
        """When gradients are reduced unless the config says otherwise.

        Ranks that keep whole gradients can wait for the last micro-batch; ranks that keep a slice cannot.
        """
        return "per_micro_batch" if self.shard_gradients else "per_step"


PLACEMENTS: dict[int, Placement] = {
    0: Placement(0, shard_parameters=False, shard_gradients=False, shard_optimizer=False),
    1: Placement(1, shard_parameters=False, shard_gradients=False, shard_optimizer=True),
    2: Placement(2, shard_parameters=False, shard_gradients=True, shard_optimizer=True),
    3: Placement(3, shard_parameters=True, shard_gradients=True, shard_optimizer=True),
}


def placement_for(config: ZeroConfig, tier: str | None = None) -> Placement:
    """The row of the stage; where whole parameters stay until an optimizer steps on them, memory for them does, too.

    Args:
        config: Resolved or not.
        tier: Of own slices; None: what the config says. They have their place in whole parameters with "none" alone.
    """
    row = PLACEMENTS[config.stage]
    stays = row.shard_parameters and not config.release_after_backward
    return replace(row, in_place=stays and (tier or config.offload.parameters) == "none")
