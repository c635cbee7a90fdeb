"""Where this process is in a model-parallel group, as a unit (`mpu`) of the script's tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero_strategy.distributed.collectives import Communicator
from zero_strategy.distributed.counters import CommunicationCounters
from zero_strategy.distributed.world import world_rank

if TYPE_CHECKING:
    import torch.distributed as dist

_PREFIXES = ("get_model_parallel_", "get_tensor_model_parallel_")
"""The second is what Megatron has called it since it has had pipelines as well."""


@dataclass(frozen=True)
class ModelParallel:
    """A model-parallel group, from this rank's point of view.

    Attributes:
        rank: This process in its group.
        size: Ranks of the group.
        data_rank: This process among those that have the same place in their groups.
        group: The process group; None for a group of one.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mpu: Any) -> ModelParallel:
        """What a unit says.

        Args:
            mpu: An object with `get_model_parallel_rank`, `_world_size` and `_group`, or their `tensor_model_parallel`
                namesakes, and `get_data_parallel_rank`; None: every process is a group of one.

        Raises:
            TypeError: If it lacks one of them; names it.
        """
        if mpu is None:
            return cls(data_rank=world_rank())
        size = int(_ask(mpu, "world_size"))
        place = mpu.get_data_parallel_rank() if hasattr(mpu, "get_data_parallel_rank") else world_rank() // size
        group = _ask(mpu, "group") if size > 1 else None
        return cls(int(_ask(mpu, "rank")), size, int(place), group)

    def communicator(self, counters: CommunicationCounters) -> Communicator:
        """Collectives of the group."""
        return Communicator(self.group, counters)


def _ask(mpu: Any, what: str) -> Any:
    for prefix in _PREFIXES:
        if hasattr(mpu, prefix + what):
            return getattr(mpu, prefix + what)()
    raise TypeError(f"mpu must have {' or '.join(f'{p}{what}()' for p in _PREFIXES)}; {type(mpu).__name__} has neither")
