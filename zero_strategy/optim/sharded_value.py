"""A tensor of optimizer state of which this rank holds a part, as `optimizer.state[p][key]` gives it.

    shape of the parameter     . . . . . . . . . .
    elements of this rank            [ . . . ]          in memory, or in a tier

It has the parameter's shape, and takes part in whatever torch does element by element, in place (`zero_`, `mul_(mask)`)
or not: numbers act on all elements, and of a tensor of the parameter's shape the same elements are taken. Nothing is
sent. Whatever would need the elements of other ranks (a sum, a slice, a Python number, a collective) is an error that
names the state and the ways to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.dtensor import TensorPart, local_values
from zero_strategy.offload.chunks import OffloadedPart
from zero_strategy.runtime.torch_private import (
    DisableTorchFunctionSubclass,
    op_name,
    packet_of,
    schema_of,
    tree_leaves,
    tree_map,
    wrapper_tensor,
)

_ATEN = torch.ops.aten
_ELEMENTWISE = frozenset(
    {
        _ATEN.zero_, _ATEN.fill, _ATEN.fill_, _ATEN.copy, _ATEN.copy_, _ATEN.masked_fill, _ATEN.masked_fill_,
        _ATEN.abs, _ATEN.abs_, _ATEN.clone,
    }
)  # fmt: skip
"""Operations on each element by itself that torch does not mark as such."""
_SAME = frozenset({_ATEN.detach, _ATEN.alias})
"""Operations that give another tensor with the same memory."""
_NEW = frozenset(
    {
        _ATEN.zeros_like, _ATEN.ones_like, _ATEN.empty_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like,
        _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_empty, _ATEN.new_full,
    }
)  # fmt: skip
"""Operations that ask for shape, dtype and device only, and give a plain tensor."""
_LEAVING = frozenset(
    {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__array__}
)
"""Functions that ask for memory with all values in it."""


@dataclass(frozen=True)
class ValuePlace:
    """The elements of a parameter that this rank holds state of.

    Attributes:
        parameter: The module's.
        name: Its name in the model.
        part: Of the parameter, this rank's among the tensor-parallel ones.
        start: First element of its piece, in the flattened part.
        stop: One past the last.
    """

    parameter: nn.Parameter
    name: str
    part: TensorPart
    start: int
    stop: int

    def of(self, values: Tensor) -> Tensor:
        """This place's elements of a tensor of the parameter's shape, flat."""
        return local_values(self.part, self.parameter, values.detach()).reshape(-1)[self.start : self.stop]

    def same(self, other: ValuePlace) -> bool:
        """True if the other one is of the same elements."""
        return self.parameter is other.parameter and (self.start, self.stop) == (other.start, other.stop)


class ShardedValue(Tensor):
    """See the module.

    Args:
        place: The elements that this rank holds.
        local: Their values: of as many elements, in memory or in a tier.
        label: The value in words, such as "optimizer.state['head.weight']['exp_avg']".
        written: Called with the name of an operation and its numbers after it has changed the values in place; raises
            if they are not the optimizer's any more. None: they never were.
    """

    place: ValuePlace
    local: Tensor | OffloadedPart
    label: str
    written: Callable[[str], None] | None

    @staticmethod
    def __new__(
        cls,
        place: ValuePlace,
        local: Tensor | OffloadedPart,
        label: str,
        written: Callable[[str], None] | None = None,
    ) -> ShardedValue:
        device = local.device if isinstance(local, Tensor) and local.numel() else place.parameter.device
        made: Any = wrapper_tensor(cls, place.parameter.shape, local.dtype, device)
        made.place, made.local, made.label, made.written = place, local, label, written
        return made  # type: ignore[no-any-return]

    def local_values(self) -> Tensor:
        """The values that this rank holds, flat: the memory itself, or a copy of what is in a tier."""
        return (self.local if isinstance(self.local, Tensor) else self.local.read()).view(-1)

    def _refuse(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{what} needs all elements of {self.label}, and this rank holds {self.place.stop - self.place.start} of "
            f"{self.numel()}. What acts on each element by itself (zero_(), mul_(mask), a new full value assigned) is "
            "done here; read the whole with safe_get_full_optimizer_state(parameter, key) or "
            "engine.full_optimizer_state(optimizer), which all ranks call"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _LEAVING:
            raise next(_sharded(args))._refuse(getattr(func, "__name__", str(func)))
        # Else torch would make results this class, without a place and values.
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first, packet = next(_sharded((args, kwargs))), packet_of(func)
        if packet in _NEW:
            # The shape without its memory.
            like = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
            return func(like, *args[1:], **kwargs)
        if packet in _SAME:
            return ShardedValue(first.place, first.local, first.label, first.written)
        writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in _arguments(func)]
        is_elementwise = packet in _ELEMENTWISE or torch.Tag.pointwise in func.tags or op_name(func) == "_to_copy"
        # Random numbers for some elements are not those that the whole would get.
        if torch.Tag.nondeterministic_seeded in func.tags or not is_elementwise or any(writes[1:]):
            raise first._refuse(op_name(func))
        target = args[0] if writes[0] else None
        # A plain target would need the elements of other ranks.
        if target is not None and not isinstance(target, ShardedValue):
            raise first._refuse(op_name(func))
        own = first.local_values()
        mine = [own if each is first else _local(each, first, own.device) for each in args]
        found = func(*mine, **tree_map(lambda each: _local(each, first, own.device), kwargs))
        if target is None:
            return ShardedValue(first.place, found, f"a value computed from {first.label}")
        if target.written is not None:
            numbers = [str(each) for each in args[1:] if not isinstance(each, Tensor)]
            target.written(f"{op_name(func)}({', '.join(numbers)})")
        # After `written`, which raises if the values are not the optimizer's any more.
        if isinstance(target.local, OffloadedPart):
            target.local.write(mine[0])
        return target

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = f"elements {self.place.start} to {self.place.stop} of {self.numel()}"
        return f"<{self.label}: {held} are on this rank, {tuple(self.shape)}, {self.dtype}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        raise self._refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refuse("pickling")


def _sharded(values: Any) -> Any:
    return (each for each in tree_leaves(values) if isinstance(each, ShardedValue))


def _arguments(func: Any) -> Sequence[Any]:
    return schema_of(func).arguments  # type: ignore[no-any-return]


def _local(value: Any, first: ShardedValue, device: torch.device) -> Any:
    """An argument of an elementwise operation as this rank's elements of it, where those of `first` are."""
    if isinstance(value, ShardedValue):
        if not value.place.same(first.place):
            raise NotImplementedError(f"{value.label} and {first.label} are divided differently among the ranks")
        return value.local_values().to(device)  # of a tier: in host memory
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape != first.shape:
        value = value.broadcast_to(first.shape)  # torch's error, where it does not fit
    return first.place.of(value).to(device)
