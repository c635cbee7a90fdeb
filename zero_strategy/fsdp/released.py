"""Parameters without values: released ones (stage 3), and sharded ones of a model that is still being built.

The values of a released parameter are not there. Its class is `ReleasedParameter` (or one made of the parameter's own
class), as torch swaps that of `UninitializedParameter`, so that every call of torch with it arrives in
`__torch_function__`:

- metadata is answered as ever;
- in a forward or a backward of its engine the parameter's unit is gathered first, and kept until the backward that
  may need it: code of all ranks is the same there; a layer is given its weight as it would cast it
  (`fsdp/gathered_codes.py`), where that has been gathered;
- elsewhere a read or a write is an error that names the parameter and the way out, since ranks that read alone would
  wait for the others, and there is nothing to write to.

`p.data`, `p.detach()` and views of a released parameter can be had everywhere; they remember whose values they lack,
and computing with them is the same error. `fsdp/tracked.py` has the other half: writes to parameters that are there.

Metadata can be had at any time. Whatever else torch is asked to do with a `ShardedParameter` arrives in
`__torch_function__`, which unshards it first: the object is a plain `nn.Parameter` then, the same one, so that ties,
hooks and references stay what they are. `construction` decides when it is sharded again.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from ctypes import c_char
from dataclasses import dataclass
from itertools import compress
from types import CodeType, FrameType
from typing import Any, Protocol, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional, init

from zero_strategy.fsdp.ownership import ParameterOwner, owner_of, place_of
from zero_strategy.fsdp.tracked import (
    GET_DATA,
    SET_DATA,
    TrackedParameter,
    is_asked_by_parameter,
    plain_class,
    tracked_class,
)
from zero_strategy.runtime.metadata_calls import METADATA, STRIDES
from zero_strategy.runtime.torch_private import (
    SAME_DTYPE_CHECK,
    DisableTorchFunctionSubclass,
    callers,
    qualified_name,
    tree_leaves,
    uncompiled,
)

_OVERWRITING = frozenset(
    {
        init.uniform_, init.normal_, init.trunc_normal_, init.constant_, init.ones_, init.zeros_, init.eye_,
        init.dirac_, init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_,
        init.orthogonal_, init.sparse_, Tensor.zero_, Tensor.fill_, Tensor.copy_, Tensor.normal_, Tensor.uniform_,
        Tensor.random_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_, torch.zero_,
        torch.fill_, SET_DATA,
    }
)  # fmt: skip
"""Functions that give all elements of their first tensor new values, without a look at the old ones."""

_LOCATING = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage})
"""Functions that tell where values are: these have to stay there from then on."""


class Unsharder(Protocol):
    """Object that unshards parameters while their model is built; see `Construction`."""

    def undo(self, parameter: nn.Parameter, before: Slice) -> None: ...

    def copied(self, parameter: ShardedParameter) -> Tensor: ...

    def use(self, parameters: list[nn.Parameter], overwritten: nn.Parameter | None = None, *, stays: bool) -> None: ...


@dataclass
class Slice:
    """This rank's part of a sharded parameter.

    Attributes:
        construction: It unshards the parameter.
        number: Of the parameter, equal on all ranks.
        values: Elements [rank x n, rank x n + n) of the flat parameter, zeros behind its end; n: ceil(numel / ranks).
        text: The parameter in words.
        owner: The module that it was registered in, as far as is known.
    """

    construction: Unsharder
    number: int
    values: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    text: str
    owner: nn.Module | None

    def without_values(self) -> Tensor:
        """A tensor of the parameter's layout, on the meta device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.values.dtype, device="meta")


class ShardedParameter(nn.Parameter):
    """Never constructed: an `nn.Parameter` becomes one, and becomes an `nn.Parameter` again when it is used.

    Attributes:
        slice: This rank's slice, and the construction that unshards it.
    """

    slice: Slice

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what concerns metadata alone; else unshard all such parameters among the arguments first."""
        kwargs = kwargs or {}
        if func in METADATA or (func is Tensor.type and len(args) == 1 and not kwargs):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Those of the placeholder, one expanded element, are zero.
        if func in STRIDES and isinstance(args[0], cls):
            return func(args[0].slice.without_values(), *args[1:], **kwargs)
        if func == SET_DATA and args[0] is args[1]:  # `module._apply` of a function that has left it alone
            return None
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        first = args[0] if args else kwargs.get("tensor")
        # Among other arguments, too, its old values count (`p.copy_(p)`).
        lost = (
            func in _OVERWRITING
            and isinstance(first, cls)
            and sum(leaf is first for leaf in used) == 1 + ("tensor" in kwargs and bool(args))
        )
        before = cast(ShardedParameter, first).slice if lost else None
        unshard(used, first if lost else None, stays=func in _LOCATING)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            if before is not None:
                # Its memory was never filled: the slice still has the values.
                before.construction.undo(cast(nn.Parameter, first), before)
            raise
        # `nn.Parameter(p)` refuses what is not of the class that `p` has by now.
        if func is Tensor.detach and is_asked_by_parameter(sys._getframe(1)):
            return result.as_subclass(nn.Parameter)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A sharded copy, which takes no communication."""
        if id(self) not in memo:
            memo[id(self)] = self.slice.construction.copied(self)
        found: nn.Parameter = memo[id(self)]
        return found

    def __copy__(self) -> nn.Parameter:
        unshard([self])
        return copy.copy(self)  # of a plain parameter now

    def __reduce_ex__(self, protocol: Any) -> Any:
        unshard([self])
        return self.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.slice.text}, of which each rank holds a slice until it is used"


def unshard(parameters: list[nn.Parameter], overwritten: nn.Parameter | None = None, *, stays: bool = False) -> None:
    """Make the sharded ones of some parameters whole. A collective, unless the only one is overwritten.

    Args:
        parameters: Those of one call of torch.
        overwritten: One of them whose values do not matter.
        stays: They stay whole until an engine takes them.
    """
    sharded = [p for p in parameters if isinstance(p, ShardedParameter)]
    assert sharded, "a sharded parameter is nested in something that is not searched"
    for construction in {id(p.slice.construction): p.slice.construction for p in sharded}.values():
        construction.use(parameters, overwritten, stays=stays)


class CountedWrites(Protocol):
    """Counts of writes to the parameters of a bucket; see `UserWrites`."""

    def counts(self) -> list[int]: ...

    @property
    def are_there(self) -> bool: ...


class WatchedBucket(Protocol):
    """A bucket of parameters as its watch sees it; see `ParameterBucket`."""

    names: list[str]
    parameters: list[nn.Parameter]
    watches: list[EditWatch]

    @property
    def gathered(self) -> bool: ...

    @property
    def follows_edits(self) -> bool: ...

    @property
    def writes(self) -> CountedWrites: ...

    def segment_view(self, index: int) -> Tensor: ...


_PART = 1 << 20
"""Elements of a device's memory that are hashed at once; each needs 16 bytes meanwhile."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EditWatch:
    """Notices writes to a bucket while it is whole. Where they count, those that torch has not counted are counted.

    Values that the engine itself replaces (an optimizer's step, a load) come between `invalidate_unsharded`
    and `renew`.

    Args:
        bucket: It; gathered.
        hashed: Look at values, too: one pass over them now, and one at the end. Else at version counters alone.
    """

    def __init__(self, bucket: WatchedBucket, *, hashed: bool) -> None:
        self.bucket, self._hashed = bucket, hashed
        self._lost: set[int] = set()
        self.renew()

    def renew(self) -> None:
        """Present values are right."""
        self._replaced = False
        self._versions = self.bucket.writes.counts()
        self._hashes = self._present_hashes()

    def invalidate_unsharded(self) -> None:
        """Values are about to be replaced: with them goes what was written so far."""
        # Once: what the engine writes from here on is none of the user's writes.
        if not self._replaced:
            self._lost.update(self._look())
            self._replaced = True

    def lost(self) -> list[str]:
        """The parameters with writes that are lost now, in order."""
        return [self.bucket.names[index] for index in sorted(self._lost | self._look())]

    def _look(self) -> set[int]:
        """Indices of parameters that were written to since `renew`; none where writes count."""
        if not self.bucket.gathered:  # an engine's `reset` has released it
            return set()
        now, hashes = self.bucket.writes.counts(), self._present_hashes()
        counted = {index for index, (before, after) in enumerate(zip(self._versions, now)) if before != after}
        changed = {index for index, (before, after) in enumerate(zip(self._hashes, hashes)) if before != after}
        if not self.bucket.follows_edits:
            return counted | changed
        for index in changed - counted:
            # A write like any other from now on: `follow_edits` goes by these counts.
            torch.autograd.graph.increment_version(self.bucket.parameters[index])
        return set()

    def _present_hashes(self) -> list[int]:
        views = [self.bucket.segment_view(index) for index in range(len(self.bucket.names)) if self._hashed]
        return hashes_of(views)


def hashes_of(tensors: Sequence[Tensor]) -> list[int]:
    """A hash of each contiguous tensor's bytes; of those on a device in one transfer to the host."""
    found: dict[int, int] = {}
    away: dict[int, Tensor] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            flat = tensor.detach().reshape(-1)
            if flat.device.type == "cpu":
                # A numpy view would keep the memory from being given back.
                content = (c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
                found[index] = xxhash.xxh3_64_intdigest(content)
            else:
                away[index] = weighted_sum(flat)
        if away:
            found.update(zip(away, torch.stack(list(away.values())).tolist(), strict=True))
    return [found[index] for index in range(len(tensors))]


def weighted_sum(flat: Tensor) -> Tensor:
    """The bits of all elements as integers, times numbers that depend on the place, summed up modulo 2 ** 64; 0-d."""
    words = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(min(_PART, words.numel()), dtype=torch.int64, device=flat.device)
    for number, part in enumerate(words.split(_PART)):
        # The multiplier of xorshift64*. Odd factors: one changed element always changes the sum. They differ by place,
        # so that swapped elements show.
        factors = (places[: part.numel()] + number * _PART) * 0x2545F4914F6CDD1D
        total += (part.to(torch.int64) * (factors ^ (factors >> 29)).bitwise_or_(1)).sum()
    return total


_PLACES = frozenset({Tensor.data_ptr, Tensor.untyped_storage, *STRIDES})
"""Asked for of any tensor, such as to find ties."""
_OF_VALUES = {
    Tensor.numpy: "numpy()", Tensor.__array__: "numpy", Tensor.cpu: "cpu()", Tensor.tolist: "tolist()",
    Tensor.item: "item()", Tensor.__float__: "float()", Tensor.__int__: "int()", Tensor.__bool__: "bool()",
    Tensor.__index__: "an index", Tensor.__complex__: "complex()", Tensor.__reduce_ex__: "pickling",
    Tensor.__format__: "format()", Tensor.__dlpack__: "dlpack", Tensor.share_memory_: "share_memory_()",
}  # fmt: skip
"""Calls by which values leave the process, in words."""
_COPIES = frozenset(
    {
        Tensor.clone, Tensor.contiguous, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.to,
        Tensor.type, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.t, Tensor.transpose, Tensor.permute,
        Tensor.squeeze, Tensor.unsqueeze, Tensor.view_as, Tensor.expand_as, Tensor.cuda, Tensor.pin_memory,
        Tensor.detach, GET_DATA, Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
        torch.clone, torch.detach, torch.reshape, torch.flatten, torch.t, torch.transpose, torch.permute,
    }
)  # fmt: skip
"""Functions whose result has a parameter's values, in another form."""
LOOKS_AT_GRAPH = frozenset(
    {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward, Tensor.backward}
)
"""Functions that take a parameter as a leaf of a graph, whatever its values are."""
_IN_PLACE_OPERATORS = frozenset(
    {
        "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
        "__ilshift__", "__irshift__", "__iand__", "__ior__", "__ixor__", "__idiv__", "__setitem__", "__set__",
        "__delete__",
    }
)  # fmt: skip
"""Names of functions that change their first argument, and do not end in one underscore."""
PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        functional.linear, functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d,
        functional.conv_transpose2d, functional.conv_transpose3d, torch.addmm,
    }
)  # fmt: skip
"""Functions that layers call with their parameters, all of which autocast casts to 16 bits."""
_COLLECTIVES = "torch.distributed."
_SENDERS = ("vllm.", "sglang.", "ray.", "cupy.", "nixl.")
"""Packages that send what lies at an address, which is as good as a collective."""
ANOTHER_STRATEGY = (
    "To train the module by another strategy, end the engine first, on all ranks: engine.close(gather=True) makes it a "
    "plain module again (zero_strategy.engine_of(module) is the engine)."
)


class _Released:
    """Base of released parameters and copies of them."""

    # Traced, it would see parameters whose classes change while it runs.
    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; else gather them, in a forward or a backward, or raise.

        Raises:
            RuntimeError: If values are read or written outside of both; names the parameter and the way out.
        """
        kwargs, asker = kwargs or {}, _asker(sys._getframe(1))
        if func in METADATA or func in LOOKS_AT_GRAPH or (func is Tensor.type and len(args) == 1 and not kwargs):
            # A collective reads memory by its address: that it asks for metadata before is all there is to see of it.
            if not _sends(func, asker):
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        elif func in STRIDES and isinstance(args[0], nn.Parameter):
            with DisableTorchFunctionSubclass():  # of the values, which the poison does not have
                values = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return func(values, *args[1:], **kwargs)
        elif (func is torch.equal or func is Tensor.equal) and all(isinstance(each, nn.Parameter) for each in args[:2]):
            if args[0] is args[1] or all(isinstance(each, _Released) for each in args[:2]):
                return args[0] is args[1]  # asked to look a parameter up in groups (Lightning's BaseFinetuning)
        elif func is Tensor.t and isinstance(args[0], nn.Parameter):
            place = place_of(args[0])
            if place is not None and (weight := place[0].weight_for_layer(place[1], func, asker)) is not None:
                return weight
        elif func in PRODUCTS:
            given_to = [*args, *kwargs.values()]
            # Autocast leaves products alone that write to a given tensor.
            if "out" not in kwargs and (given := _as_layers_cast(func, given_to, asker)) is not None:
                return func(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        if _unshard_on_demand(args, kwargs):  # these are tracked parameters now
            return call_again(func, args, kwargs)
        # What `torch.compile` has made calls this by the class that it has seen.
        if not any(isinstance(leaf, _Released) for leaf in tree_leaves((args, kwargs))):
            return call_again(func, args, kwargs)
        with DisableTorchFunctionSubclass():
            if func in _PLACES and not (func is Tensor.data_ptr and _is_sender(asker)):
                return func(*args, **kwargs)
            if func in _COPIES and _leaves(func, args, kwargs) is None:
                if func is Tensor.detach and _in_collective(asker):  # DistributedDataParallel, FSDP
                    raise RuntimeError(f"{_message(args[0], 'wrapping its module')} {ANOTHER_STRATEGY}")
                return _copy(func(*args, **kwargs), args[0])
            raise RuntimeError(_complaint(func, args, kwargs))

    def __repr__(self, **_: Any) -> str:
        mine: Any = self
        return f"{name_of(mine)!r} of shape {tuple(mine.shape)}, {mine.dtype}, released (stage 3)"


_UNCOMPILED: CodeType = vars(_Released)["__torch_function__"].__func__.__code__


def _asker(frame: FrameType) -> FrameType:
    """The frame that calls torch, by way of what keeps the compiler out."""
    return frame.f_back if frame.f_code is _UNCOMPILED and frame.f_back is not None else frame


class ReleasedParameter(_Released, nn.Parameter):  # type: ignore[misc]
    """Never constructed: an `nn.Parameter` is one while it is released."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if _unshard_on_demand((self,), {}):
            return copy.deepcopy(self, memo)
        raise RuntimeError(_message(self, "deepcopy"))


class ReleasedValues(_Released, Tensor):  # type: ignore[misc]
    """A copy or a view of what a released parameter has for values.

    Attributes:
        parameter: The parameter.
    """

    parameter: nn.Parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(_message(self, "deepcopy"))


_GET_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def quick(name: str) -> property:
    """An attribute that is asked for of every parameter in every step: not by way of `__torch_function__`."""
    plain = getattr(Tensor, name)

    def get(self: Tensor) -> Any:
        with DisableTorchFunctionSubclass():
            return plain.__get__(self)

    def put(self: Tensor, value: Any) -> None:
        with DisableTorchFunctionSubclass():
            plain.__set__(self, value)

    def remove(self: Tensor) -> None:
        with DisableTorchFunctionSubclass():
            plain.__delete__(self)

    return property(get, put, remove)


def _dtype(self: Tensor) -> torch.dtype:
    if _is_compared(sys._getframe(1)) and not _unshard_on_demand((self,), {}):
        raise RuntimeError(_message(self, "sending it"))
    with DisableTorchFunctionSubclass():
        return cast(torch.dtype, _GET_DTYPE(self))


QUICK = ("grad", "requires_grad", "shape", "device", "is_leaf", "_version")
"""Such attributes."""
for _name in QUICK:
    setattr(ReleasedParameter, _name, quick(_name))
# Not as quick: torch.distributed compares dtypes before it sends lists of tensors.
ReleasedParameter.dtype = property(_dtype)  # type: ignore[assignment]


@functools.cache
def _dtensor_classes() -> tuple[type, type]:
    """`DTensor`, and its subclass for released parameters; once there is one, for importing it takes seconds."""
    from torch.distributed.tensor import DTensor

    class ReleasedDTensor(_Released, DTensor):  # type: ignore[misc]
        """A tensor-parallel parameter while it is released, or a copy of it."""

        # Methods in Python, of which `__torch_function__` hears nothing before values are used.
        def full_tensor(self, **keywords: Any) -> Any:
            if _unshard_on_demand((self,), {}):
                return self.full_tensor(**keywords)
            raise RuntimeError(_message(self, "full_tensor()"))

        def redistribute(self, *arguments: Any, **keywords: Any) -> Any:
            if _unshard_on_demand((self,), {}):
                return self.redistribute(*arguments, **keywords)
            raise RuntimeError(_message(self, "redistribute()"))

        def to_local(self, *arguments: Any, **keywords: Any) -> Any:
            if _unshard_on_demand((self,), {}):
                return self.to_local(*arguments, **keywords)
            return _copy(super().to_local(*arguments, **keywords), self)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise RuntimeError(_message(self, "deepcopy"))

    for name in QUICK:
        setattr(ReleasedDTensor, name, quick(name))
    return DTensor, ReleasedDTensor


@functools.cache
def _released_class(plain: type) -> type:
    """The class of a parameter of this class while it is released."""
    if plain is nn.Parameter:
        return ReleasedParameter
    # Under the plain class's name, as a tracked one is.
    made = type(plain.__name__, (_Released, plain), {"__deepcopy__": ReleasedParameter.__deepcopy__})
    for name in QUICK:
        setattr(made, name, quick(name))
    return made


def release_classes(parameters: Iterable[nn.Parameter]) -> None:
    """The parameters' values are gone."""
    for parameter in parameters:
        kind: Any = type(parameter)
        if kind is TrackedParameter:  # nearly all: this runs for every parameter in every forward and backward
            parameter.__class__ = ReleasedParameter
            continue
        if issubclass(kind, _Released):
            continue
        # By name: the class takes seconds to import, and plain runs have no use for it.
        if kind.__name__ == "DTensor":
            plain, released = _dtensor_classes()
            if kind is plain:
                parameter.__class__ = released
        elif issubclass(kind, nn.Parameter):  # torch's own `isinstance` takes in classes that are none
            parameter.__class__ = _released_class(plain_class(kind))


def unshard_classes(parameters: Iterable[nn.Parameter]) -> None:
    """The parameters' values are there, or about to be."""
    for parameter in parameters:
        kind: Any = type(parameter)
        if kind is ReleasedParameter:
            parameter.__class__ = TrackedParameter
        elif not issubclass(kind, _Released):
            continue
        elif kind.__name__ == "ReleasedDTensor":
            parameter.__class__ = _dtensor_classes()[0]
        else:
            parameter.__class__ = tracked_class(kind.__mro__[2])  # after itself and `_Released`


def is_released(parameter: Tensor) -> bool:
    """True if the values of a parameter, or of a copy of it, are not there."""
    return isinstance(parameter, _Released)


def trained(parameters: Sequence[nn.Parameter], among: Container[int] | None = None) -> set[int]:
    """Indices of the parameters that require a gradient, whether or not their values are there.

    Args:
        parameters: Of one bucket.
        among: Ids of those that count; None: all.
    """
    with DisableTorchFunctionSubclass():
        found = set(compress(range(len(parameters)), map(_REQUIRES_GRAD, parameters)))
    return found if among is None else {index for index in found if id(parameters[index]) in among}


def parameter_of(tensor: Tensor) -> nn.Parameter:
    """The parameter itself, of it or of a copy."""
    found: nn.Parameter = vars(tensor).get("parameter", tensor)
    return found


def name_of(tensor: Tensor) -> str:
    """The parameter's name in the module; "" where no engine is left that knows it."""
    place = place_of(parameter_of(tensor))
    return "" if place is None else place[0].names[place[1]]


def _first(args: Any, kwargs: Any) -> Tensor:
    return cast(Tensor, next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Released)))


def _as_layers_cast(func: Callable[..., Any], values: list[Any], asker: FrameType | None) -> list[Any] | None:
    """Arguments of a product, with released weights as their layers cast them.

    None where none is here so, or tensors of other classes take part, whose own code may do what it likes.
    """
    if not all(type(value) in _PLAIN or is_released(value) for value in values if isinstance(value, Tensor)):
        return None
    found, any_given = list(values), False
    for place, value in enumerate(values):
        if not isinstance(value, nn.Parameter) or not is_released(value):
            continue
        where = place_of(value)
        if where is not None and (weight := where[0].weight_for_layer(where[1], func, asker)) is not None:
            found[place], any_given = weight, True
    return found if any_given else None


_PLAIN = (Tensor, nn.Parameter, TrackedParameter)


def _copy(values: Any, source: Any) -> Any:
    """Let a copy of what `source` has know whose values it lacks."""
    if not isinstance(source, _Released):
        return values
    parameter = parameter_of(cast(Tensor, source))
    if type(values) in (Tensor, nn.Parameter):
        copy = values.as_subclass(ReleasedValues)
        copy.parameter = parameter
        return copy
    if type(values).__name__ == "DTensor" and type(values) is _dtensor_classes()[0]:
        values.__class__ = _dtensor_classes()[1]
        vars(values)["parameter"] = parameter
    return values


def _leaves(func: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """The call in words, if values leave the process by it."""
    if (call := _OF_VALUES.get(func)) is not None:
        return call
    if func is Tensor.to and any(_is_cpu(leaf) for leaf in [*args[1:], *kwargs.values()]):
        return "to('cpu')"
    op = qualified_name(func)  # of functional collectives
    sends = "c10d" in op or str(getattr(func, "__module__", "")).startswith(_COLLECTIVES)
    return f"{getattr(func, '__name__', op)}()" if sends else None


def _is_cpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cpu") or value == "cpu"


def _is_sender(frame: FrameType | None) -> bool:
    """True if a package that sends memory by its address asks for one."""
    return any(f"{each.f_globals.get('__name__', '')}.".startswith(_SENDERS) for each in callers(frame))


def _in_collective(frame: FrameType | None) -> bool:
    """True if torch.distributed asks: its functions look whether a tensor is complex before they send it."""
    return any(str(each.f_globals.get("__name__", "")).startswith(_COLLECTIVES) for each in callers(frame))


def _is_compared(frame: FrameType | None) -> bool:
    """True if torch.distributed compares the dtypes of the tensors in a collective's lists: before it sends them."""
    return any(each.f_code is SAME_DTYPE_CHECK for each in callers(frame))


def _sends(func: Callable[..., Any], asker: FrameType) -> bool:
    """True if torch.distributed asks for metadata of what it is about to send."""
    return (func is Tensor.is_complex and _in_collective(asker)) or (func == _GET_DTYPE and _is_compared(asker))


def call_again(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function on parameters whose class has changed meanwhile, and with it what `data` means."""
    if func == GET_DATA:
        return args[0].data
    if func == SET_DATA:
        args[0].data = args[1]
        return None
    return func(*args, **kwargs)


def _unshard_on_demand(args: Any, kwargs: Any) -> bool:
    """Gather all released parameters among the arguments, if a forward or a backward reads them.

    False elsewhere, and where one is a copy of what was released when the copy was made: that never gets values.
    """
    found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Released)]
    owners: dict[int, tuple[ParameterOwner, list[nn.Parameter]]] = {}
    for leaf in found:
        model = owner_of(parameter_of(cast(Tensor, leaf)))
        if model is None or isinstance(leaf, ReleasedValues) or "parameter" in vars(leaf):
            return False  # gathering would not give a copy its values
        owners.setdefault(id(model), (model, []))[1].append(cast(nn.Parameter, leaf))
    return bool(owners) and all([model.unshard_on_demand(parameters) for model, parameters in owners.values()])


def _writes(func: Callable[..., Any]) -> bool:
    """True if it changes its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


def _written(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """The released parameter that a call would change; None if it changes none."""
    targets = [kwargs.get("out"), *(args[:1] if _writes(func) else ())]
    return cast(Tensor, next((leaf for leaf in tree_leaves(targets) if isinstance(leaf, _Released)), None))


def _complaint(func: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """The error for a call that needs the values of a released parameter."""
    name = getattr(func, "__name__", str(func))
    if func == SET_DATA:
        return _loss_message(_first(args, kwargs), "`p.data = ...`")
    if (target := _written(func, args, kwargs)) is not None:
        return _loss_message(target, f"{name}()")
    first = _first(args, kwargs)
    if (call := _leaves(func, args, kwargs)) is None:
        call = f"{name}() of it into another tensor" if _writes(func) else f"{name}()"
    return _message(first, "sending it" if func in METADATA or func in _PLACES else call)


def _loss_message(tensor: Tensor, call: str) -> str:
    return (
        f"parameter {name_of(tensor)!r} is released (stage 3): its values are spread over the ranks, and what {call} "
        "writes would be lost. Write inside `with zero_strategy.sharding.GatheredParameters(parameters, "
        "modifier_rank=0):` on all ranks, inside a forward, or use stage 2, where parameters are whole."
    )


def _message(tensor: Tensor, call: str) -> str:
    return (
        f"parameter {name_of(tensor)!r} is released (stage 3): its values are spread over the ranks, and {call} would "
        "give NaN. Read it inside `with zero_strategy.sharding.GatheredParameters(parameters):` on all ranks, take "
        "engine.full_state_dict(), or use stage 2, where parameters are whole. After training "
        "engine.close(gather=True) makes a plain module of it (zero_strategy.engine_of(module) is the engine)."
    )
