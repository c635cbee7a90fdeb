"""`GatheredParameters`: whole parameters on demand."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero_strategy.sharding.construction import Construction, constructions_of
from zero_strategy.sharding.registry import sharded_model_of


class GatheredParameters:
    """Hold sharded parameters whole inside a `with` block; every rank must enter it.

    Args:
        params: One parameter, or any iterable of them. Parameters that no engine shards are left alone.
        modifier_rank: The rank whose changes are kept, broadcast and sharded again at the end. With None, changes to
            parameters that stage 3 released are dropped; with `release_after_backward` off they count as at stage 2,
            where all ranks make the same.
        enabled: Do nothing if False.

    Raises:
        RendezvousError: If a rank does not enter in time (stage 3).

    What is computed in a forward (a module's, Lightning's `training_step`, `engine.forward_scope()`) with gradients
    enabled may need the values again in backward: the parameters then stay whole until the next backward, or the next
    optimizer step, is over.

    The name and arguments are DeepSpeed's `zero.GatheredParameters`.
    """

    def __init__(
        self, params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None, enabled: bool = True
    ) -> None:
        self._parameters = [params] if isinstance(params, nn.Parameter) else list(params)
        self._modifier_rank, self._enabled = modifier_rank, enabled
        self._stack = ExitStack()
        self._buckets: list[Any] = []
        self._pinned: list[tuple[Construction, list[nn.Parameter]]] = []

    def __enter__(self) -> None:
        if not self._enabled:
            return
        for construction in constructions_of(self._parameters):
            self._pinned.append((construction, construction.pin(self._parameters)))
        models = {id(model): model for model in map(sharded_model_of, self._parameters) if model is not None}
        for model in models.values():
            if self._modifier_rank is not None and not 0 <= self._modifier_rank < model.mesh.world_size:
                raise ValueError(
                    f"modifier_rank {self._modifier_rank} is not a rank of this mesh of {model.mesh.world_size}"
                )
            if model.placement.shard_parameters:
                model.mesh.rendezvous.meet("entering sharding.GatheredParameters")
            in_forward = model.gatherer is not None and model.gatherer.units[0].depth > 0
            used = in_forward and torch.is_grad_enabled() and self._modifier_rank is None
            self._buckets += self._stack.enter_context(model.gathered(self._parameters, until_backward=used))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            for construction, parameters in self._pinned if kind is None else ():
                construction.unpin(parameters, self._modifier_rank or 0)
            if kind is None and self._modifier_rank is not None:
                for bucket in self._buckets:
                    bucket.adopt(self._modifier_rank)
            self._stack.close()
