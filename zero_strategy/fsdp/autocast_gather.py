"""Weights that reach forward and backward in autocast's dtype, at stage 3, where autocast would cast them anyway.

Under `torch.autocast` a linear or convolutional layer multiplies by a copy of its float32 weight in 16 bits, which
autograd keeps until the backward: of all weights on each rank, whatever is sharded. Here each rank casts its slice, and
16 bits are gathered: half the bytes, the bits that autocast would have made of the gathered values, and what autograd
keeps are views of the gathered unit, which is released between forward and backward.

    slice (float32) --cast--> 16 bits --all-gather--> 16 bits of the unit --> layers' `linear(x, weight, bias)`

`torch.nn.functional.linear` and its like arrive in `fsdp/released.py` while the weight is released; under autocast,
without its cache, these are called with the 16 bits. See `fsdp/gathered_codes.py` for who else finds what.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.gathered_codes import CodedBucket, GatheredCodes, WeightPart
from zero_strategy.fsdp.released import PRODUCTS
from zero_strategy.runtime.torch_private import (
    in_backward,
    in_transform,
    is_traceable_wrapper_subclass,
    no_torch_function,
    parameters_of,
    schema_of,
    storage_key,
    tree_map,
    wrapper_like,
)

_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_NAMED_LAYERS = frozenset({"transformers.pytorch_utils.Conv1D"})


class GatheredAutocast(GatheredCodes):
    """The whole weights of one bucket in autocast's dtype, while a forward or a backward uses them.

    Args:
        bucket: Weights of such layers alone, of float32.
    """

    def __init__(self, bucket: CodedBucket) -> None:
        # Collectives know it, and any other of 16 bits is as long.
        super().__init__(bucket, torch.bfloat16)
        self._dtype = torch.get_autocast_dtype(bucket.device.type)

    def wanted(self) -> bool:
        """True inside of autocast to 16 bits without its cache.

        With the cache a weight that is used twice has one copy, whose gradients are summed up in 16 bits.
        """
        dtype = casts_to(self.bucket.device.type)
        if dtype is None:
            return False
        self._take(dtype)
        return True

    def _take(self, dtype: torch.dtype) -> None:
        if dtype != self._dtype:
            self.release()
            self._dtype = dtype

    def _prepare(self) -> None:
        """Make nothing ready: a cast needs the value alone."""

    def _prepare_whole(self, index: int, values: Tensor) -> None:
        """Make nothing ready: see `_prepare`."""

    def _cast(self, index: int, values: Tensor, codes: Tensor) -> None:
        codes.view(self._dtype).copy_(values)

    def answer(self, index: int, func: Callable[..., Any], asker: FrameType | None) -> Tensor | None:
        """The parameter in autocast's dtype, as a product is about to have it cast."""
        if func not in PRODUCTS or not self.gathered or in_transform():
            return None
        if casts_to(self.bucket.device.type) != self._dtype:
            return None
        self.asked.add(index)
        found: Tensor = Cast.apply(self.bucket.parameters[index], functools.partial(self._weight, index))
        return found

    def _weight(self, index: int) -> Tensor:
        segment = self.bucket.layout.segments[index]
        codes = self._codes[segment.offset : segment.stop].view(self._dtype).view(segment.shape)
        # `.data` has a version of its own: a backward shall not take the gather before it for a write.
        return CastWeight(codes.data, CopiedPart(self, index, self._dtype))

    def need_for(self, part: CopiedPart) -> None:
        """Have the weights here in the dtype of a forward, whose graph computes with the copies that it made.

        A collective where neither these nor values are here, and where the values have been written to since: the
        copies in plain torch keep what they had.
        """
        self._take(part.dtype)
        self.finish_unshard()
        if self.gathered:
            return
        if not self.bucket.gathered:
            self.on_demand()
        elif not self.bucket.writes.are_there:
            self._cast_values()
        elif self.bucket.editors:  # of this rank perhaps alone
            raise part.gone()
        else:
            self.on_demand()


def casts_to(device_type: str) -> torch.dtype | None:
    """The dtype of 16 bits that autocast casts weights to, each time anew; None where it does not."""
    if not torch.is_autocast_enabled(device_type) or torch.is_autocast_cache_enabled():
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


class CopiedPart(WeightPart):
    """One weight of a bucket, of which plain torch would keep the copy that autocast has made.

    Args:
        source: The bucket's weights in autocast's dtype.
        index: Of the parameter in it.
        dtype: Of the copy.
    """

    def __init__(self, source: GatheredAutocast, index: int, dtype: torch.dtype) -> None:
        super().__init__(source, index)
        self.dtype = dtype
        self._generation = source.bucket.generation

    @property
    def source(self) -> GatheredAutocast:
        """See `WeightPart`."""
        found = super().source
        assert isinstance(found, GatheredAutocast)
        return found

    def check(self) -> None:
        """Raise where that copy could not be made again: the values that it was made of are gone."""
        if in_backward() and (self._is_changed() or self.source.bucket.generation != self._generation):
            raise self.gone()

    def gone(self) -> RuntimeError:
        """The error for it."""
        return RuntimeError(
            f"parameter {self.source.names[self.index]!r}, which a forward under autocast has used, or one beside it, "
            "has been modified by an inplace operation before its backward, which needs the former values: with "
            "communication.parameters='autocast' they are kept nowhere. Write after the backward, or take 'values'"
        )


class Cast(torch.autograd.Function):
    """A weight in another dtype as a function of the parameter that it was cast from.

    Its gradient is that of torch's own cast.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, weight: Callable[[], Tensor]) -> Tensor:
        """The weight, of the parameter's shape."""
        ctx.set_materialize_grads(False)  # none stays none
        ctx.dtype = parameter.dtype
        return weight()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient in the parameter's dtype."""
        return None if gradients[0] is None else gradients[0].to(ctx.dtype), None


@functools.cache
def _gives_views(func: Any) -> bool:
    """True if results of an operation share memory with what it is given."""
    return any(each.alias_info is not None for each in schema_of(func).returns)


@functools.cache
def _written(func: Any) -> tuple[int, ...]:
    """Places of the arguments that an operation changes."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple(place for place, each in arguments if each.alias_info is not None and each.alias_info.is_write)


class CastWeight(Tensor):
    """A weight in 16 bits, whose memory is released after a forward, and there again when a backward uses it.

    The layer multiplies by it, and autograd holds it meanwhile.

    Args:
        codes: Its memory, of its shape and dtype.
        part: The weight.
    """

    codes: Tensor
    part: CopiedPart

    @staticmethod
    def __new__(cls, codes: Tensor, part: CopiedPart) -> CastWeight:
        """See the class."""
        made = wrapper_like(cls, codes)
        made.codes, made.part = codes, part
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute with the weight, which is gathered where it has been released.

        Raises:
            RuntimeError: If the module is gone that it belongs to, or the parameter has been written to.
        """
        kwargs = kwargs or {}
        for place in _written(func):
            if place < len(args) and type(args[place]) is CastWeight:
                name = args[place].part.source.names[args[place].part.index]
                raise RuntimeError(
                    f"{func} writes to the copy of parameter {name!r} that autocast would have made, which is one for "
                    "all of its uses here: write to a clone, or set communication.parameters to 'values'"
                )
        held: list[CastWeight] = []

        def codes_of(leaf: Any) -> Any:
            if type(leaf) is not CastWeight:
                return leaf
            leaf.part.check()
            leaf.part.source.need_for(leaf.part)
            held.append(leaf)
            return leaf.codes

        if kwargs or any(type(each) in (list, tuple) for each in args):
            args, kwargs = tree_map(codes_of, (args, kwargs))
        else:  # nearly all, in which a walk would take as long as the rest
            args = [codes_of(each) for each in args]
        found = func(*args, **kwargs)
        if not _gives_views(func):
            return found
        # Views need the memory, too, whenever they are computed with.
        place = storage_key(held[0].codes.untyped_storage())

        def shown(leaf: Any) -> Any:
            shares = isinstance(leaf, Tensor) and storage_key(leaf.untyped_storage()) == place
            return CastWeight(leaf, held[0].part) if shares else leaf

        return tree_map(shown, found)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def numpy(self, **keywords: Any) -> Any:
        """Values of its own for numpy, which would keep memory from being released."""
        return self.clone().numpy(**keywords)

    def __array__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.clone().__array__(*arguments, **keywords)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.clone().__dlpack__(**keywords)

    def tolist(self) -> Any:
        """Values of its own: torch refuses subclasses."""
        return self.clone().tolist()


def weights_cast_by_autocast(module: nn.Module) -> set[int]:
    """Parameters that one layer alone has, and gives to one of `PRODUCTS`, by `id`."""
    everyone = list(module.modules())
    owners = Counter(id(parameter) for each in everyone for parameter in parameters_of(each).values())
    # Its output layer's weight is read by the attention's own code.
    inner = {id(each.out_proj) for each in everyone if isinstance(each, nn.MultiheadAttention)}
    return {
        id(parameter)
        for each in everyone
        if _multiplies(each) and id(each) not in inner
        for name, parameter in parameters_of(each).items()
        if name in ("weight", "bias") and _is_own(parameter, owners)
    }


def _is_own(parameter: nn.Parameter | None, owners: Counter[int]) -> bool:
    held: object = parameter
    if parameter is None or is_traceable_wrapper_subclass(held):
        return False
    return owners[id(parameter)] == 1 and parameter.dtype == torch.float32


def _multiplies(layer: nn.Module) -> bool:
    kind = type(layer)
    if any(isinstance(layer, each) and kind.forward is each.forward for each in _LAYERS):
        return True
    return f"{kind.__module__}.{kind.__qualname__}" in _NAMED_LAYERS
