"""Gradient views: what `p.grad` shows where no rank holds the gradient, and how it is read.

Where this rank holds a part of a gradient only, code that computes with `p.grad` (a norm, a logger) gets the whole one,
fetched from all ranks: the number that plain torch would give. A multiplication by one number in place (`p.grad.mul_`,
what torch's `clip_grad_norm_` ends with) multiplies the part of each rank. Other writes would be lost, so they are
refused by name, also those into views of what was fetched.

`p.grad` shows what plain data parallelism would have there.

After a reduction that is the mean over ranks, put together from the parts that they own (a collective, so all ranks
read; a rank that reads alone is told within `barrier_seconds`). What `no_sync` keeps back is this rank's own sum, to
which no other rank is needed.

It is the gradient itself where that is whole on this rank, else a `GradientProxy`, which stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from zero_strategy.fsdp.dtensor import held_by, like, local_values, whole_of
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.runtime.torch_private import (
    BASE_OF_VIEW,
    IS_VIEW,
    DisableTorchFunctionSubclass,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    foreach_zero_,
    in_backward,
    version_of,
    versions_of,
)

_STANDS_FOR = {
    Tensor.zero_,
    Tensor.detach_,
    Tensor.detach,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    foreach_zero_,
}
"""What `zero_grad` in all its forms does, and questions about the shape."""
_FLAGS = {Tensor.detach_, Tensor.requires_grad_}
_SCALINGS: dict[Any, Callable[[Tensor, Any], object]] = {
    Tensor.mul_: Tensor.mul_,
    Tensor.multiply_: Tensor.mul_,
    Tensor.__imul__: Tensor.mul_,
    Tensor.div_: Tensor.div_,
    Tensor.divide_: Tensor.div_,
    Tensor.true_divide_: Tensor.div_,
    Tensor.__itruediv__: Tensor.div_,
    foreach_mul_: Tensor.mul_,
    foreach_div_: Tensor.div_,
}
"""Multiplications in place, of one tensor or several, with what each does to one."""
_OF_VIEWS: dict[Any, bool | None] = {IS_VIEW: False, BASE_OF_VIEW: None}
"""What autograd's own gradients answer. A class is given by a view, whose base would be sealed by another view of it,
without an end for who follows bases, as torch.export does."""
_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, foreach_norm}
"""Functions that get gradients of all experts where ranks hold some each, as torch's `clip_grad_norm_` needs them."""
_ASSIGNMENTS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__")


class GradientProxy(Tensor):
    """Stands for a gradient; of its shape, but without memory.

    Attributes:
        name: The parameter.
        stage: The ZeRO stage, for the message.
        fetch: Gives the full gradient in memory of its own, or with True that of all experts. A collective where the
            gradient is sharded.
        change: Changes this rank's part of it in place, by what takes a few elements.
    """

    name = ""
    stage = 0
    fetch: Callable[..., Tensor]
    change: Callable[[Callable[[Tensor], object]], None]

    @staticmethod
    def of(
        plain: Tensor,
        name: str,
        stage: int,
        fetch: Callable[..., Tensor],
        change: Callable[[Callable[[Tensor], object]], None],
    ) -> GradientProxy:
        """A handle that shares the memory and the version counter of `plain`."""
        handle = plain.as_subclass(GradientProxy)
        handle.name, handle.stage, handle.fetch, handle.change = name, stage, fetch, change
        return handle

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do to the handle what it stands for; fetch the gradient for what reads it.

        Raises:
            RuntimeError: For writes other than multiplications by one number.
        """
        call, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func in _OF_VIEWS:
            return _OF_VIEWS[func]
        if _is_scaling(func, args, kwargs):
            for one in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                _scale(one, _SCALINGS[func], args[1])
            return None if isinstance(args[0], (list, tuple)) else args[0]  # None as from `torch._foreach_mul_`
        _refuse_writes(func, args, kwargs, _STANDS_FOR)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func = Tensor.detach  # of the same version counter, so that `p.grad.data.zero_()` is noticed
        if func in _STANDS_FOR or call in ("__get__", "__set__"):
            with DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if func is Tensor.detach:  # no way around
                return GradientProxy.of(result, args[0].name, args[0].stage, args[0].fetch, args[0].change)
            if type(result) is not Tensor:  # else a view by an attribute, such as `p.grad.T`: of the gradient itself
                return result
        return FetchedGradient.call(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientProxy({self.name!r}, shape={tuple(self.shape)}, stage {self.stage})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.fetch()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetch().__reduce_ex__(protocol)


class FetchedGradient(Tensor):
    """A gradient that was fetched from all ranks, or a view of it: what is computed from it is plain, itself read-only.

    Attributes:
        name: The parameter.
        stage: The ZeRO stage, for the message.
    """

    name = ""
    stage = 0

    @staticmethod
    def of(plain: Tensor, name: str, stage: int) -> FetchedGradient:
        """`plain`, sealed."""
        sealed = plain.as_subclass(FetchedGradient)
        sealed.name, sealed.stage = name, stage
        return sealed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let reads through; their results are plain tensors, or sealed where they share its memory.

        Raises:
            RuntimeError: For writes.
        """
        kwargs = kwargs or {}
        if func in _OF_VIEWS:
            return _OF_VIEWS[func]
        _refuse_writes(func, args, kwargs, _FLAGS)
        return cls.call(func, args, kwargs)

    @staticmethod
    def call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `func` with gradients in the place of handles, and seal what shares memory with one of its inputs."""
        fetched: dict[int, FetchedGradient] = {}
        of_all = func in _NORMS
        args, kwargs = _fetch(args, fetched, of_all), _fetch(kwargs, fetched, of_all)
        inputs = list(_instances(FetchedGradient, (args, kwargs)))
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            # Empty ones may have the address 0, which is that of other empty tensors, too.
            owners = {value.untyped_storage().data_ptr(): value for value in inputs if value.numel()}
        if func in (Tensor.numpy, Tensor.__array__):
            # Writes to an array do not pass through torch, and nothing could refuse them.
            result.flags.writeable = False
        return _seal(result, owners)


def _is_scaling(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a multiplication, in place, of gradients by one number, which every element of each is multiplied by."""
    if func not in _SCALINGS or kwargs or len(args) != 2:
        return False
    return isinstance(args[1], (int, float)) or (type(args[1]) is Tensor and args[1].dim() == 0)


def _scale(gradient: Tensor, how: Callable[[Tensor, Any], object], factor: float | Tensor) -> None:
    """Multiply a gradient that is here, or each rank's part of one that is not."""
    if not isinstance(gradient, GradientProxy):
        how(gradient, factor)
        return

    def multiply(values: Tensor) -> None:
        how(values, factor.to(values.device) if isinstance(factor, Tensor) else factor)

    gradient.change(multiply)


def unwritable(name: str, stage: int, call: str) -> str:
    """The message for a write to a gradient that is not whole here."""
    return (
        f"{call}() on the gradient of parameter {name!r}: at stage {stage} no rank holds it whole, so p.grad can be "
        "read, multiplied by a number, zeroed and removed, but not written to. Clip with self.clip_gradients(...) or "
        "Trainer(gradient_clip_val=...) under Lightning, else engine.clip_grad_norm_ and engine.clip_grad_value_ "
        "(Lightning: trainer.strategy.engine); write a full gradient with p.grad = values, or safe_set_full_grad of "
        "zero_strategy.optim.full_state, on all ranks."
    )


def _refuse_writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], allowed: set[Any]) -> None:
    """A call may have handles and views of what was fetched among its arguments, whichever of them it came to first."""
    for written in _instances((GradientProxy, FetchedGradient), _written(func, args, kwargs, allowed)):
        raise RuntimeError(unwritable(written.name, written.stage, getattr(func, "__name__", "")))


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], allowed: set[Any]) -> Any:
    """Arguments that a call writes to, by torch's convention of names; nothing for those that are allowed."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and func not in allowed
    first = args[:1] if in_place or name in _ASSIGNMENTS or func == Tensor.data.__set__ else ()  # type: ignore[attr-defined]
    return first, kwargs.get("out")


def _fetch(value: Any, fetched: dict[int, FetchedGradient], of_all: bool) -> Any:
    """`value` with the gradient in the place of each handle; each is fetched once, in order, on all ranks alike."""
    if isinstance(value, GradientProxy):
        if id(value) not in fetched:
            fetched[id(value)] = FetchedGradient.of(value.fetch(of_all), value.name, value.stage)
        return fetched[id(value)]
    if isinstance(value, (list, tuple)):
        items = [_fetch(item, fetched, of_all) for item in value]
        # Named tuples take their items one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _fetch(item, fetched, of_all) for key, item in value.items()}
    return value


def _seal(result: Any, owners: dict[int, FetchedGradient]) -> Any:
    if isinstance(result, (list, tuple)) and any(isinstance(item, Tensor) for item in result):
        items = [_seal(item, owners) for item in result]
        return items if type(result) is list else tuple(items) if type(result) is tuple else result
    if type(result) not in (Tensor, FetchedGradient) or result.layout != torch.strided:
        return result
    with DisableTorchFunctionSubclass():
        owner = owners.get(result.untyped_storage().data_ptr())
    return result if owner is None else FetchedGradient.of(result, owner.name, owner.stage)


def _instances(kind: type[Any] | tuple[type[Any], ...], value: Any) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _instances(kind, item)
    elif isinstance(value, dict):
        yield from _instances(kind, list(value.values()))


@torch.no_grad()
def assemble_segment(bucket: ParameterBucket, index: int, value: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One parameter's values, whole on every rank, from the flat part that each rank owns. A collective.

    Args:
        bucket: The parameter's bucket.
        index: The parameter's place there.
        value: This rank's part, None for zeros.
        dtype: Of the result.

    Returns:
        Shape (numel,); zeros where no rank has a value.
    """
    segment, layout = bucket.layout.segments[index], bucket.layout
    communicator = bucket.ranks.gather
    if not bucket.placement.shard_optimizer or communicator.size == 1:
        whole = torch.zeros(segment.numel, dtype=dtype, device=bucket.device)
        return whole if value is None else whole.copy_(value)
    # No rank owns more of it; a gather needs parts of one length.
    chunk = min(layout.slice_numel, segment.numel)
    parts = torch.zeros(communicator.size * chunk, dtype=dtype, device=bucket.device)
    if value is not None:
        parts[communicator.rank * chunk :][: value.numel()] = value
    communicator.all_gather(parts).wait()
    found = []
    for rank in range(communicator.size):
        low, high = layout.slice_bounds(rank)
        numel = max(0, min(high, segment.stop) - max(low, segment.offset))
        found.append(parts[rank * chunk :][:numel])
    return torch.cat(found)


class ReadableGradients(Protocol):
    """The gradients of a bucket as a reader of one sees them; see `GradientBucket`."""

    bucket: ParameterBucket
    dtype: torch.dtype
    live: set[int]

    def finish(self) -> None: ...

    def sync_handles(self) -> object: ...

    def local_sum(self, index: int) -> Tensor | None: ...

    def reduced_part(self, index: int) -> Tensor | None: ...

    def change(self, index: int, how: Callable[[Tensor], object]) -> None: ...


def reader_of(gradients: ReadableGradients, index: int) -> Callable[..., Tensor]:
    """Reader of one gradient for as long as its bucket lives; it does not keep the bucket alive."""
    known, name = ref(gradients), gradients.bucket.names[index]

    def read(of_all: bool = False) -> Tensor:
        bucket = known()
        if bucket is None:
            raise RuntimeError(f"the gradient of parameter {name!r} went away with its engine")
        found = read_gradient(bucket, index)
        return bucket.bucket.whole_of(index, found) if of_all and bucket.bucket.ranks.neighbours > 1 else found

    return read


def changer_of(gradients: ReadableGradients, index: int) -> Callable[[Callable[[Tensor], object]], None]:
    """Changes one gradient for as long as its bucket lives; it does not keep the bucket alive."""
    known, name = ref(gradients), gradients.bucket.names[index]

    def change(how: Callable[[Tensor], object]) -> None:
        bucket = known()
        if bucket is None:
            raise RuntimeError(f"the gradient of parameter {name!r} went away with its engine")
        change_gradient(bucket, index, how)

    return change


@torch.no_grad()
def change_gradient(gradients: ReadableGradients, index: int, how: Callable[[Tensor], object]) -> None:
    """Change this rank's part of the gradient that `p.grad` stands for, element by element; all ranks do the same.

    Raises:
        RuntimeError: If it was removed since, a backward is running, or `no_sync` keeps a part of it back on each rank.
    """
    name, stage = gradients.bucket.names[index], gradients.bucket.placement.stage
    if in_backward():
        raise RuntimeError(f"the gradient of parameter {name!r} is not complete while a backward is running")
    # A reduction may be under way, and the gradient may have been removed or replaced since.
    gradients.finish()
    gradients.sync_handles()
    if gradients.local_sum(index) is not None:
        raise RuntimeError(f"{unwritable(name, stage, 'mul_')} Here no_sync has kept a part of it on each rank.")
    if index not in gradients.live:
        raise RuntimeError(f"the gradient of parameter {name!r} was removed (zero_grad) before it was changed")
    gradients.change(index, how)


@torch.no_grad()
def read_gradient(gradients: ReadableGradients, index: int) -> Tensor:
    """The gradient that `p.grad` stands for, in the parameter's dtype and shape, in memory of its own.

    A collective where the parameter holds a reduced gradient and gradients are sharded, or is a tensor-parallel one.

    Raises:
        RuntimeError: If it was removed since, or a backward is running.
        BarrierError: If another rank does not read it.
    """
    bucket, name = gradients.bucket, gradients.bucket.names[index]
    if in_backward():
        raise RuntimeError(
            f"the gradient of parameter {name!r} is not complete while a backward is running: read p.grad after it"
        )
    # The handle may be older than what the user has done to `p.grad`.
    gradients.finish()
    gradients.sync_handles()
    local = gradients.local_sum(index)
    reduced = index in gradients.live
    if not reduced and local is None:
        raise RuntimeError(f"the gradient of parameter {name!r} was removed (zero_grad) before it was read")
    segment = bucket.layout.segments[index]
    total = torch.zeros(segment.numel, dtype=gradients.dtype, device=bucket.device)
    if reduced:
        if bucket.placement.shard_optimizer:
            # Before the gather, so that a rank that reads alone is told within seconds.
            bucket.ranks.barrier.wait_for_all(f"reading p.grad of {name!r}")
        total = assemble_segment(bucket, index, gradients.reduced_part(index), gradients.dtype)
    if local is not None:
        # Not averaged: plain data parallelism shows this rank's own sum on top of the mean.
        total.add_(local.reshape(-1))
    return whole_of(bucket.parameters[index], total.to(bucket.dtype).view(segment.shape))


class GradientViews:
    """Handles of one bucket's parameters, by index.

    Args:
        gradients: Where a handle reads the gradient; held weakly.
        bucket: The parameters.
    """

    def __init__(self, gradients: ReadableGradients, bucket: ParameterBucket) -> None:
        self._bucket, self._gradients = bucket, ref(gradients)
        self._handles: dict[int, Tensor] = {}
        self._shaped: tuple[Tensor, list[Tensor]] | None = None  # a buffer of gradients and all views of it
        self._origins: dict[int, Tensor] = {}  # the buffers that those are views of which are gradients
        self._stand_ins: dict[int, GradientProxy] = {}
        self._poisons: dict[int, Tensor] = {}  # the memory of those handles that are no gradients
        self._versions: dict[int, int] = {}

    def itself(self, index: int, whole: Tensor) -> Tensor:
        """A view of the bucket's full gradients as what `p.grad` is."""
        if self._origins.get(index) is whole:
            return self._handles[index]
        self._versions.pop(index, None)
        segment = self._bucket.layout.segments[index]
        handle = self._handles.get(index)
        place = whole.data_ptr() + segment.offset * whole.element_size()
        if handle is None or isinstance(handle, GradientProxy) or held_by(handle).data_ptr() != place:
            # Not a view for autograd, which would keep the whole buffer alive when the values lie elsewhere.
            values = self._views_of(whole)[index].detach()
            self._handles[index] = like(self._bucket.parameters[index], values)
        self._origins[index] = whole
        return self._handles[index]

    def _views_of(self, whole: Tensor) -> list[Tensor]:
        if self._shaped is None or self._shaped[0] is not whole:
            self._shaped = whole, self._bucket.layout.views(whole)[0]
        return self._shaped[1]

    def stand_in(self, index: int) -> Tensor:
        """A handle that stands for the gradient."""
        if index not in self._versions:
            self._origins.pop(index, None)
            # Found rather than made, which takes several calls of torch per parameter.
            known = self._stand_ins.get(index)
            if known is not None:
                self._handles[index] = known
                self._versions[index] = version_of(self._poisons[index])
                return known
            shape = self._bucket.parameters[index].shape
            # A tensor of its own per parameter, so that its version counter tells who was written to.
            poison = torch.full((1,), float("nan"), dtype=self._bucket.dtype, device=self._bucket.device)
            plain = poison[0].expand(shape) if math.prod(shape) else poison[:0].view(shape)
            self._poisons[index] = plain
            name, stage, gradients = self._bucket.names[index], self._bucket.placement.stage, self._gradients()
            assert gradients is not None  # it asks for this
            self._handles[index] = self._stand_ins[index] = GradientProxy.of(
                plain, name, stage, reader_of(gradients, index), changer_of(gradients, index)
            )
            self._versions[index] = version_of(plain)
        return self._handles[index]

    def is_known(self, index: int, shown: Tensor) -> bool:
        """True if `p.grad` is what it was set to."""
        return shown is self._handles.get(index)

    def are_untouched(self, shown: Sequence[Tensor | None], filled: set[int], holding: set[int]) -> bool:
        """True if every `p.grad` is what it was set to, and is there where a gradient is held; in a few calls of torch.

        Args:
            shown: That of each parameter.
            filled: Indices of those that are not None.
            holding: Indices of those that hold a gradient.
        """
        if not holding <= filled:
            return False
        others = map(is_not, map(shown.__getitem__, filled), map(self._handles.get, filled))
        return not any(others) and not self.any_written()

    def any_written(self) -> bool:
        """True if something that stands for a gradient was written to."""
        now = versions_of(map(self._poisons.__getitem__, self._versions))
        return now != list(self._versions.values())

    def written(self, index: int) -> bool:
        """True if what stands for the gradient was written to."""
        return index in self._versions and version_of(self._poisons[index]) != self._versions[index]

    def zeroed(self, index: int) -> bool:
        """True if that has left zeros, the one change that a handle stands for."""
        poison = self._poisons[index]
        # One element is all the memory that there is: the shape is expanded from it.
        return not poison.numel() or not bool(poison.as_strided((1,), (1,)) != 0)

    def forget(self, index: int) -> None:
        """Make a new handle when it is shown again."""
        del self._handles[index]
        self._origins.pop(index, None)
        # Its memory is NaN no more.
        self._stand_ins.pop(index, None)
        self._versions.pop(index, None)

    def changes(self) -> list[bool | Tensor | None]:
        """Changes of each `p.grad` by the user: none (True), zeroed (False), removed (None), or assigned (the tensor).

        For `follow` on a rank where nobody does it.
        """
        return [self._change(index) for index in range(len(self._bucket.parameters))]

    def _change(self, index: int) -> bool | Tensor | None:
        gradient = self._bucket.parameters[index].grad
        if gradient is None:
            return None
        if not self.is_known(index, gradient):
            if isinstance(gradient, GradientProxy):
                return True
            return local_values(self._bucket.parts[index], self._bucket.parameters[index], gradient.detach()).cpu()
        if index in self._versions:
            return not self.written(index)
        return bool(held_by(gradient).any())  # the gradient itself: zeros are zeros, whoever wrote them

    @torch.no_grad()
    def follow(self, changes: Sequence[bool | Tensor | None]) -> None:
        """Do to each `p.grad` what another rank's `changes()` says."""
        for parameter, how in zip(self._bucket.parameters, changes, strict=True):
            if isinstance(how, Tensor):
                parameter.grad = like(parameter, how.to(device=parameter.device, dtype=parameter.dtype))
            elif how is None:
                parameter.grad = None
            elif not how and parameter.grad is not None:
                parameter.grad.zero_()

    def refuse(self, index: int) -> None:
        """Raise for a write that would be lost.

        Raises:
            RuntimeError: Naming the parameter and the way out.
        """
        raise RuntimeError(unwritable(self._bucket.names[index], self._bucket.placement.stage, "fill_"))

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let gradients that are shown themselves lie where `move` puts them; `p.grad` stays the same object."""
        self._origins.clear()
        self._shaped = None
        for handle in self._handles.values():
            if not isinstance(handle, GradientProxy):
                values = held_by(handle)
                values.data = move(values)

    def held(self) -> Iterator[Tensor]:
        """The memory of what stands for gradients."""
        for index, poison in self._poisons.items():
            if index in self._versions:  # else the handle is the gradient itself
                yield poison
