"""TRL's trainers with vLLM: the server gets whole weights, unit by unit, from a model of which ranks hold shards.

TRL asks its `DistributedBackend` how parameters become whole, which knows DeepSpeed and FSDP by their plugins, and its
`VLLMGeneration` for the weights to send. Trainers made by `make_zero_trainer` get a subclass of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from zero_strategy.fsdp.gathered_parameters import GatheredParameters


class ZeroBackend(DistributedBackend):
    """Parameters of a model that this package shards, as TRL's code makes them whole."""

    @contextmanager
    def gather_params(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Hold parameters whole inside of a block; all ranks enter it."""
        with GatheredParameters(list(params)):
            yield


class ZeroVLLMGeneration(VLLMGeneration):
    """vLLM's side of a trainer whose model is sharded: one unit is whole at a time, adapters are merged into copies."""

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        engine = self.accelerator.engines.get(id(self.model))
        if engine is None:  # not prepared: plain parameters
            yield from super()._iter_named_params()
            return
        for name, tensor in engine.weights():
            yield self._fix_param_name_to_vllm(name), tensor


def adopt(trainer: Any) -> None:
    """Let a TRL trainer, once it is made, gather and sync through this package."""
    generation = getattr(trainer, "vllm_generation", None)
    for holder in (trainer, generation):
        if holder is not None and isinstance(getattr(holder, "_dist", None), DistributedBackend):
            holder._dist = ZeroBackend(trainer.accelerator)
    if type(generation) is VLLMGeneration:  # TRL's trainers make it themselves; a user's own class stays
        generation.__class__ = ZeroVLLMGeneration
