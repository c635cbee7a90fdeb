"""A guard of the first steps: where memory runs short, activations that units keep are dropped, and the run goes on.

What is foreseen can be wrong: batches are larger than the example, somebody else takes memory, blocks lie badly. In the
first two steps (with the second the optimizer's state is there) units keep what autograd saves so that it can be
dropped. Before the rest of a micro-batch has no room, or when an allocation in a unit fails, all of it is dropped on
this rank alone: units are computed again, which changes no collective and no bit. Then ranks agree, and all compute
units again from the next step on.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_strategy.activation.droppable import Droppable
from zero_strategy.activation.offload import model_storages
from zero_strategy.activation.units import outermost
from zero_strategy.auto.candidates import CHOSEN
from zero_strategy.config import ZeroConfig
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.planning.machine import room_now
from zero_strategy.runtime.host_heap import is_mapped, trim
from zero_strategy.runtime.terminal import report, size

STEPS = 2
"""That are guarded."""

_logger = logging.getLogger(__name__)


class FirstSteps:
    """A guard; see `StepGuard`.

    Args:
        kept: What units keep.
        to_come: Bytes that a micro-batch still takes after each unit's forward, in order; empty: nobody knows.
        units: How many there are.
        room: Gives the bytes that this rank may still take; None: nobody knows.
        device: Where it computes.
        told: Called with what was measured, when the steps are over.

    Attributes:
        shortage: When memory ran short; "": it did not.
    """

    def __init__(
        self,
        kept: Droppable,
        to_come: Sequence[int],
        units: int,
        room: Callable[[], int | None],
        device: torch.device,
        told: Callable[[Mapping[str, Any]], None] = lambda found: None,
    ) -> None:
        self.kept, self._units, self._room, self._device, self._told = kept, units, room, device, told
        # By the order of the calls: of units that are called several times, or skipped, nothing is known.
        self._to_come = to_come if len(to_come) == units else ()
        self.shortage = ""
        self._steps = self._most = self._next = 0

    def run(self, unit: int, forward: Callable[[], Any], again: Callable[[], Any] | None) -> Any:
        """See `StepGuard`."""
        states = self._random_states()
        try:
            result = forward()
        except Exception as error:
            if self.shortage or again is None or not is_out_of_memory(error):
                raise
            said = str(error).partition("\n")[0]
        else:
            self._look(unit)
            return result
        # Not in the handler, whose traceback holds what the forward has made.
        self._drop(f"in the forward of unit {unit} ({said})")
        self._restore(states)
        return again()

    def step_over(self) -> bool:
        """See `StepGuard`."""
        self._steps += 1
        if self._steps == STEPS:
            self._told({"activations of units": self._most})
        return self._steps >= STEPS

    def _look(self, unit: int) -> None:
        """Drop before there is no room for what is still to come."""
        if self.shortage:
            return
        if unit != self._next:
            self._to_come = ()
        self._next = (unit + 1) % self._units
        if unit == self._units - 1:
            self._most = max(self._most, self.kept.nbytes)
        if self._to_come and (room := self._room()) is not None and room < self._to_come[unit]:
            self._drop(f"after unit {unit}: {size(self._to_come[unit])} are to come, there {size(room)}")

    def _drop(self, when: str) -> None:
        self.kept.drop()
        self.shortage = f"{when}, {size(self.kept.dropped or 0)} dropped"
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim()

    def _random_states(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_gpu = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_gpu

    def _restore(self, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "ALLOC_FAILED")
"""Of the CPU's allocator, the driver, cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation has failed, on a device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def guard_for(config: ZeroConfig, model: ShardedModel, rank: int) -> FirstSteps | None:
    """The guard of a run whose settings were chosen, and which computes nothing again; None: there is none.

    Args:
        config: Of the run; gets what was measured.
        model: The model.
        rank: This one; rank 0 tells.
    """
    chosen = config.chosen
    checkpointing = config.activation_checkpointing
    if chosen is None or checkpointing.mode != "none" or config.offload.activations != "none":
        return None
    if config.origin_of("activation_checkpointing.mode") != CHOSEN:
        return None  # a user's own, which stays
    if "full" not in chosen.get("modes", ()) or not is_alike_for_ranks(config, model):
        return None
    if any(unit.is_compiled for unit in model.units):
        return None  # its code would be made twice

    def told(found: Mapping[str, Any]) -> None:
        config._chosen = {**(config.chosen or {}), "measured": dict(found)}
        if rank == 0 and any(found.values()):
            report(_logger, "measured in %d steps (auto.enabled): units keep %s", STEPS, size(max(found.values())))

    def room() -> int | None:
        return room_now(model.device, in_heap=not is_mapped(config.mmap_threshold))

    units = len(outermost(model.units))
    return FirstSteps(Droppable(model_storages(model)), chosen.get("to come", ()), units, room, model.device, told)


def is_alike_for_ranks(config: ZeroConfig, model: ShardedModel) -> bool:
    """True if one rank may compute units again and others not: no collective comes of it.

    Ranks that divide tokens, experts or layers exchange inside of units, and so does a synchronised batch norm. Units
    inside of others, and parameters that several units have, are gathered in another order in a replay.
    """
    mesh, (root, *units) = config.mesh, model.units
    if mesh.sequence > 1 or mesh.expert > 1 or (mesh.tensor or 1) > 1 or config.pipeline.stages > 1:
        return False
    if config.units.may_skip or len(outermost(model.units)) < len(units):
        return False
    of_root = {id(parameter) for bucket in root.buckets for parameter in bucket.parameters}
    return not any(
        isinstance(module, nn.SyncBatchNorm) or any(id(p) in of_root for p in module.parameters(recurse=False))
        for unit in units
        for module in unit.module.modules()
    )
