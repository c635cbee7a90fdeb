"""Parameters without values: released ones (stage 3), and sharded ones of a model that is still being built.

The one table of the process: weak on both sides, written when an engine takes a module over.

Writes are noticed by version counters, and by hashes of the values.

Torch counts writes to a parameter (`p.zero_()`), not those through `p.data` or a numpy view, which change values alone.

The values of a released parameter are not there; a read gives NaN.

A parameter's class is `ReleasedParameter` while it is released, as torch swaps that of `UninitializedParameter`.
Metadata is answered as ever. Where values leave the process (collectives, pickles, numpy, Python numbers, the host) or
are copied into another tensor, an error names the parameter; any other use computes with NaN, as plain torch would, and
is warned of once per run.
`p.data`, `p.detach()` and copies of a released parameter remember whose values they lack.

Metadata can be had at any time. Whatever else torch is asked to do with such a parameter arrives in
`__torch_function__`, which unshards it first: the object is a plain `nn.Parameter` then, the same one, so that ties,
hooks and references stay what they are. `construction` decides when it is sharded again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from ctypes import c_char
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, cast
from weakref import ReferenceType, ref

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import init
from torch.utils.weak import WeakIdKeyDictionary

from zero_strategy.runtime.torch_private import (
    METADATA_GETTERS,
    METADATA_SETTERS,
    SAME_DTYPE_CHECK,
    DisableTorchFunctionSubclass,
    has_compatible_shallow_copy_type,
    qualified_name,
    tree_leaves,
)

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad",
            "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_mps",
            "is_xpu", "is_xla", "is_nested", "names", "retains_grad", "output_nr", "itemsize", "nbytes",
        ) if hasattr(Tensor, name)),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
        *METADATA_GETTERS, *METADATA_SETTERS,
        cast(Any, Tensor.grad).__delete__,
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference, Tensor.get_device,
        Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.__len__,
        torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference, torch.get_device,
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
        Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor,
        torch.is_same_size, torch.result_type, has_compatible_shallow_copy_type,
    }
)  # fmt: skip
"""Functions whose answer does not depend on a parameter's values, nor on where they are."""

STRIDES = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset})

_OVERWRITING = frozenset(
    {
        init.uniform_, init.normal_, init.trunc_normal_, init.constant_, init.ones_, init.zeros_, init.eye_,
        init.dirac_, init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_,
        init.orthogonal_, init.sparse_, Tensor.zero_, Tensor.fill_, Tensor.copy_, Tensor.normal_, Tensor.uniform_,
        Tensor.random_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_, torch.zero_,
        torch.fill_, _SET_DATA,
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
        if func in STRIDES and isinstance(args[0], cls):
            return func(args[0].slice.without_values(), *args[1:], **kwargs)
        if func == _SET_DATA and args[0] is args[1]:  # `module._apply` of a function that has left it alone
            return None
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        first = args[0] if args else kwargs.get("tensor")
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
                before.construction.undo(cast(nn.Parameter, first), before)
            raise
        if func is Tensor.detach and _is_parameter_of_parameter():
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
        return copy.copy(self)

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


def _is_parameter_of_parameter() -> bool:
    """True if `nn.Parameter(parameter)` asks, which wants a result of the argument's class."""
    frame, wanted = inspect.currentframe(), nn.Parameter.__new__.__code__
    for _ in range(6):  # this function, ours, and those of modes between
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is wanted:
            return True
    return False


class Named(Protocol):
    """A bucket of parameters with names."""

    names: list[str]


class ParameterOwner(Protocol):
    """A sharded model as the table knows it; see `ShardedModel`.

    Attributes:
        told_of_reads: The user has been warned of a read of a released parameter.
    """

    told_of_reads: bool

    def place(self, parameter: nn.Parameter) -> tuple[Named, int] | None:
        """The bucket of a parameter, and its index in it."""


_models: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_unsharded(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if a living engine shards one of `parameters`.

    Raises:
        ValueError: Saying so.
    """
    if any(owner_of(parameter) is not None for parameter in parameters):
        raise ValueError("some of these parameters are sharded by another engine already; one engine per module")


def register(parameters: Iterable[nn.Parameter], model: ParameterOwner) -> None:
    """Remember that `model` shards `parameters`."""
    for parameter in parameters:
        _models[parameter] = ref(model)


def owner_of(parameter: nn.Parameter) -> ParameterOwner | None:
    """The sharded model that holds `parameter`, or None."""
    found: ReferenceType[ParameterOwner] | None = _models.get(parameter)
    return None if found is None else found()


class WatchedBucket(Protocol):
    """A bucket of parameters as its watch sees it; see `ParameterBucket`."""

    names: list[str]
    parameters: list[nn.Parameter]
    watches: list[EditWatch]

    @property
    def gathered(self) -> bool: ...

    @property
    def follows_edits(self) -> bool: ...

    def present_versions(self) -> list[tuple[int, int]]: ...

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
        self._versions = self.bucket.present_versions()
        self._hashes = self._present_hashes()

    def invalidate_unsharded(self) -> None:
        """Values are about to be replaced: with them goes what was written so far."""
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
        now, hashes = self.bucket.present_versions(), self._present_hashes()
        counted = {index for index, (before, after) in enumerate(zip(self._versions, now)) if before != after}
        changed = {index for index, (before, after) in enumerate(zip(self._hashes, hashes)) if before != after}
        if not self.bucket.follows_edits:
            return counted | changed
        for index in changed - counted:
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
        Tensor.squeeze, Tensor.unsqueeze, Tensor.view_as, Tensor.cuda, Tensor.pin_memory, Tensor.detach,
        Tensor.data.__get__, Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
        torch.clone, torch.detach, torch.reshape, torch.flatten, torch.t, torch.transpose, torch.permute,
    }
)  # fmt: skip
"""Functions whose result has a parameter's values, in another form."""
_COPYING = frozenset({"copy_", "_foreach_copy_", "__setitem__", "index_copy_", "set_"})
"""Names of functions that give another tensor a parameter's values: target networks, a server's `load_weights`."""
_COLLECTIVES = "torch.distributed."
_SENDERS = ("vllm.", "sglang.", "ray.", "cupy.", "nixl.")
"""Packages that send what lies at an address, which is as good as a collective."""
ANOTHER_STRATEGY = (
    "To train the module by another strategy, build it anew and load engine.full_state_dict() into it: a module keeps "
    "its sharding for life."
)


class _Released:
    """Base of released parameters and copies of them."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function on what is there: NaN.

        Raises:
            RuntimeError: If values would leave the process; names the parameter.
        """
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func in METADATA or func in _PLACES:
                asked = func is Tensor.is_complex and _in_collective(sys._getframe(1))
                asked = asked or (func is Tensor.data_ptr and _is_sender(sys._getframe(1)))
                if asked or (func == _GET_DTYPE and _is_compared(sys._getframe(1))):
                    raise RuntimeError(_message(args[0], "sending it"))
                return func(*args, **kwargs)
            if func is torch.equal or func is Tensor.equal:
                if args[0] is args[1]:
                    return True
            elif func == _SET_DATA:
                raise RuntimeError(_message(_first(args, kwargs), "`p.data = ...`"))
            elif (source := _written_elsewhere(func, args, kwargs)) is not None:
                if func.__name__ in _COPYING:
                    raise RuntimeError(_message(source, f"{func.__name__}() of it into another tensor"))
                _warn(source, func)
            elif (call := _leaves(func, args, kwargs)) is not None:
                raise RuntimeError(_message(_first(args, kwargs), call))
            elif func in _COPIES:
                if func is Tensor.detach and _in_collective(sys._getframe(1)):  # DistributedDataParallel, FSDP
                    raise RuntimeError(f"{_message(args[0], 'wrapping its module')} {ANOTHER_STRATEGY}")
                return _copy(func(*args, **kwargs), args[0])
            elif func not in _SILENT and not _writes(func):
                _warn(_first(args, kwargs), func)
            return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        mine: Any = self
        return f"{name_of(mine)!r} of shape {tuple(mine.shape)}, {mine.dtype}, released (stage 3)"


class ReleasedParameter(_Released, nn.Parameter):  # type: ignore[misc]
    """Never constructed: an `nn.Parameter` is one while it is released."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
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
_SILENT: frozenset[Callable[..., Any]] = frozenset({Tensor.register_hook, Tensor.expand_as, Tensor.retain_grad})
"""Graphs are looked through before their backward: see `outside`."""


def _quick(name: str) -> property:
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
    if _is_compared(sys._getframe(1)):
        raise RuntimeError(_message(self, "sending it"))
    with DisableTorchFunctionSubclass():
        return cast(torch.dtype, _GET_DTYPE(self))


_QUICK = ("grad", "requires_grad", "shape", "device", "is_leaf", "_version")
for _name in _QUICK:
    setattr(ReleasedParameter, _name, _quick(_name))
ReleasedParameter.dtype = property(_dtype)  # type: ignore[assignment]


@functools.cache
def _dtensor_classes() -> tuple[type, type]:
    """`DTensor`, and its subclass for released parameters; once there is one, for importing it takes seconds."""
    from torch.distributed.tensor import DTensor

    class ReleasedDTensor(_Released, DTensor):  # type: ignore[misc]
        """A tensor-parallel parameter while it is released, or a copy of it."""

        def full_tensor(self, **_: Any) -> Any:
            raise RuntimeError(_message(self, "full_tensor()"))

        def redistribute(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError(_message(self, "redistribute()"))

        def to_local(self, *arguments: Any, **keywords: Any) -> Any:
            return _copy(super().to_local(*arguments, **keywords), self)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise RuntimeError(_message(self, "deepcopy"))

    for name in _QUICK:
        setattr(ReleasedDTensor, name, _quick(name))
    return DTensor, ReleasedDTensor


def release_classes(parameters: Iterable[nn.Parameter]) -> None:
    """The parameters' values are gone."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReleasedParameter
        elif type(parameter).__name__ == "DTensor":
            plain, released = _dtensor_classes()
            if type(parameter) is plain:
                parameter.__class__ = released


def unshard_classes(parameters: Iterable[nn.Parameter]) -> None:
    """The parameters' values are there, or about to be."""
    for parameter in parameters:
        if type(parameter) is ReleasedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        elif type(parameter).__name__ == "ReleasedDTensor":
            parameter.__class__ = _dtensor_classes()[0]


def trained(parameters: Sequence[nn.Parameter], among: Container[int] | None = None) -> set[int]:
    """Indices of the parameters that require a gradient, whether or not their values are there.

    Args:
        parameters: Of one bucket.
        among: Ids of those that count; None: all.
    """
    with DisableTorchFunctionSubclass():
        found = {index for index, parameter in enumerate(parameters) if _REQUIRES_GRAD(parameter)}
    return found if among is None else {index for index in found if id(parameters[index]) in among}


def parameter_of(tensor: Tensor) -> nn.Parameter:
    """The parameter itself, of it or of a copy."""
    found: nn.Parameter = vars(tensor).get("parameter", tensor)
    return found


def name_of(tensor: Tensor) -> str:
    """The parameter's name in the module; "" where no engine is left that knows it."""
    parameter = parameter_of(tensor)
    model = owner_of(parameter)
    place = None if model is None else model.place(parameter)
    return "" if place is None else place[0].names[place[1]]


def _first(args: Any, kwargs: Any) -> Tensor:
    return cast(Tensor, next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Released)))


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
    for _ in range(3):  # modes are between
        if frame is None:
            return False
        if f"{frame.f_globals.get('__name__', '')}.".startswith(_SENDERS):
            return True
        frame = frame.f_back
    return False


def _in_collective(frame: FrameType | None) -> bool:
    """True if torch.distributed asks: its functions look whether a tensor is complex before they send it."""
    for _ in range(3):  # modes are between
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith(_COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def _is_compared(frame: FrameType | None) -> bool:
    """True if torch.distributed compares the dtypes of the tensors in a collective's lists: before it sends them."""
    for _ in range(3):  # modes are between
        if frame is None:
            return False
        if frame.f_code is SAME_DTYPE_CHECK:
            return True
        frame = frame.f_back
    return False


def _writes(func: Callable[..., Any]) -> bool:
    """True if it changes its tensor: what is written to a released parameter is told at its next gather."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__", "__delete__")


def _written_elsewhere(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """A source without values of a call that writes to other tensors; None for other calls."""
    if not args or not _writes(func) or any(isinstance(leaf, _Released) for leaf in tree_leaves(args[0])):
        return None
    found = (leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, _Released))
    return cast(Tensor, next(found, None))


def _warn(tensor: Tensor, func: Callable[..., Any]) -> None:
    model = owner_of(parameter_of(tensor))
    if model is None or model.told_of_reads:
        return
    model.told_of_reads = True
    call = getattr(func, "__name__", str(func))
    warnings.warn(f"{_message(tensor, call)} This is said once.", UserWarning, stacklevel=3)


def _message(tensor: Tensor, call: str) -> str:
    return (
        f"parameter {name_of(tensor)!r} is released (stage 3): its values are spread over the ranks, and {call} would "
        "give NaN. Read it inside `with zero_strategy.sharding.GatheredParameters(parameters):` on all ranks, take "
        "engine.full_state_dict(), or use stage 2, where parameters are whole."
    )
