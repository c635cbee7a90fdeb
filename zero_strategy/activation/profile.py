"""What units keep and compute, measured in a training step in which each of them runs once more, beside the run.

Bytes are those of memory that saved-tensor hooks see; costs are counted and not timed, so that all ranks measure alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zero_strategy.activation.budget import Profile, UnitCall
from zero_strategy.activation.storages import Storages, add_storage, storage_keys
from zero_strategy.runtime.torch_private import TorchDispatchMode, packet_of, schema_of
from zero_strategy.sharding.gatherer import tensors_in

_PER_ELEMENT = 64
"""Operations of a matrix product that take about as long as writing one element of a result."""


@dataclass
class _Seen:
    """One forward of a unit: memory by the reason for which it is kept, and its outputs' in order."""

    unit: int
    cost: int
    kept: Storages = field(default_factory=dict)
    inputs: Storages = field(default_factory=dict)
    outputs: list[StorageWeakRef] = field(default_factory=list)


class StepProfile:
    """Collects the forwards of units until a choice is made.

    Args:
        parameters: Memory that does not count.
    """

    def __init__(self, parameters: frozenset[int]) -> None:
        self._parameters = parameters
        self._passes: list[list[_Seen]] = [[]]

    def measure(
        self, unit: int, module: nn.Module, run: Callable[[], Any], inputs: Sequence[Tensor]
    ) -> Callable[[Any], None]:
        """Run a unit's forward for its numbers; random states stay.

        Args:
            unit: Its number.
            module: Its module, whose buffers do not count either.
            run: The forward; its result is dropped.
            inputs: The tensors that it is given.

        Returns:
            To be called with the result of the real forward.
        """
        known = self._parameters | storage_keys(module.buffers())
        kept: Storages = {}

        def pack(tensor: Tensor) -> Tensor:
            add_storage(kept, tensor, known)
            return tensor.detach()  # else a result that is kept would hold itself, and what leads to it

        devices = sorted({tensor.device.index for tensor in inputs if tensor.device.type == "cuda"})
        eager = torch.compiler.set_stance("force_eager")  # nothing is compiled inside of a dispatch mode
        with torch.random.fork_rng(devices=devices), _casts_apart(), eager, _Operations() as operations:
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
                result = run()
        seen = _Seen(unit, operations.cost, kept)
        for tensor in inputs:
            add_storage(seen.inputs, tensor, known)
        seen.outputs = _storages_of(result)
        self._passes[-1].append(seen)
        return lambda real: _rename(seen, _storages_of(real))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """A unit is computed again, so backward has begun: what is measured from here on is another pass."""
        if self._passes[-1]:
            self._passes.append([])
        yield

    def result(self) -> Profile | None:
        """The pass that keeps most; None if no unit was run."""
        profiles = [_profile(seen) for seen in self._passes if seen]
        return max(profiles, key=lambda profile: profile.kept, default=None)


def _storages_of(result: Any) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(result) if tensor.layout == torch.strided]


def _rename(seen: _Seen, real: Sequence[StorageWeakRef]) -> None:
    """A result that is kept, too, is the input of another unit: known by the memory that it really has."""
    for measured, there in zip(seen.outputs, real, strict=True):
        if measured in seen.kept:
            seen.kept[there] = seen.kept.pop(measured)


def _profile(calls: Sequence[_Seen]) -> Profile:
    """Bytes of each call; what several keep counts once and always."""
    uses = Counter(storage for seen in calls for storage in {*seen.kept, *seen.inputs})
    common: Storages = {}
    found = []
    for seen in calls:
        for storages in (seen.kept, seen.inputs):
            common.update({storage: nbytes for storage, nbytes in storages.items() if uses[storage] > 1})
        kept = {storage: nbytes for storage, nbytes in seen.kept.items() if uses[storage] == 1}
        inputs = {storage: nbytes for storage, nbytes in seen.inputs.items() if uses[storage] == 1}
        transient = sum(nbytes for storage, nbytes in kept.items() if storage not in inputs)
        found.append(UnitCall(seen.unit, sum(kept.values()), sum(inputs.values()), transient, seen.cost))
    return Profile(tuple(found), sum(common.values()))


@contextmanager
def _casts_apart() -> Iterator[None]:
    """Weights that autocast casts here are not found by the real forward."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class _Operations(TorchDispatchMode):
    """Counts the operations of products and attention by torch's formulas, and the elements that other ops write."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.cost = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula: Any = flop_registry.get(packet_of(func))
        if formula is not None:
            self.cost += int(formula(*args, **kwargs, out_val=result))
        elif str(schema_of(func)).startswith("aten::_scaled_dot_product"):
            self.cost += int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
        elif not getattr(func, "is_view", False):
            self.cost += _PER_ELEMENT * sum(tensor.numel() for tensor in tensors_in(result))
        return result
