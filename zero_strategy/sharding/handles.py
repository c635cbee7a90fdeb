"""What `p.grad` shows where it is not the gradient: it stands for the gradient, and can be removed, zeroed and read.

Where this rank holds a part of a gradient only, code that computes with `p.grad` (a norm, a logger) gets the whole one,
fetched from all ranks: the number that plain torch would give. Writes would be lost, so they are refused by name, also
those into views of what was fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zero_strategy.runtime.torch_private import DisableTorchFunctionSubclass, foreach_zero_

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
_ASSIGNMENTS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__")


class GradientHandle(Tensor):
    """Stands for a gradient; of its shape, but without memory.

    Attributes:
        name: The parameter.
        stage: The ZeRO stage, for the message.
        fetch: Gives the whole gradient in memory of its own. A collective where the gradient is sharded.
    """

    name = ""
    stage = 0
    fetch: Callable[[], Tensor]

    @staticmethod
    def of(plain: Tensor, name: str, stage: int, fetch: Callable[[], Tensor]) -> GradientHandle:
        """A handle that shares the memory and the version counter of `plain`."""
        handle = plain.as_subclass(GradientHandle)
        handle.name, handle.stage, handle.fetch = name, stage, fetch
        return handle

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do to the handle what it stands for; fetch the gradient for what reads it.

        Raises:
            RuntimeError: For writes.
        """
        call, kwargs = getattr(func, "__name__", ""), kwargs or {}
        _refuse_writes(func, args, kwargs, _STANDS_FOR)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func = Tensor.detach  # of the same version counter, so that `p.grad.data.zero_()` is noticed
        if func in _STANDS_FOR or call in ("__get__", "__set__"):
            with DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if func is Tensor.detach:  # no way around
                return GradientHandle.of(result, args[0].name, args[0].stage, args[0].fetch)
            if type(result) is not Tensor:  # else a view by an attribute, such as `p.grad.T`: of the gradient itself
                return result
        return FetchedGradient.call(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientHandle({self.name!r}, shape={tuple(self.shape)}, stage {self.stage})"

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
        _refuse_writes(func, args, kwargs, _FLAGS)
        return cls.call(func, args, kwargs)

    @staticmethod
    def call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `func` with gradients in the place of handles, and seal what shares memory with one of its inputs."""
        fetched: dict[int, FetchedGradient] = {}
        args, kwargs = _fetch(args, fetched), _fetch(kwargs, fetched)
        inputs = list(_instances(FetchedGradient, (args, kwargs)))
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            owners = {value.untyped_storage().data_ptr(): value for value in inputs if value.numel()}
        if func in (Tensor.numpy, Tensor.__array__):
            result.flags.writeable = False
        return _seal(result, owners)


def unwritable(name: str, stage: int, call: str) -> str:
    """The message for a write to a gradient that is not whole here."""
    return (
        f"{call}() on the gradient of parameter {name!r}: at stage {stage} no rank holds it whole, so p.grad can be "
        "read, zeroed and removed, but not written to. Clip with self.clip_gradients(...) or "
        "Trainer(gradient_clip_val=...) under Lightning, else engine.clip_grad_norm_ and engine.clip_grad_value_ "
        "(Lightning: trainer.strategy.engine); write a whole gradient with p.grad = values, or safe_set_full_grad of "
        "zero_strategy.optim.full_state, on all ranks."
    )


def _refuse_writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], allowed: set[Any]) -> None:
    """A call may have handles and views of what was fetched among its arguments, whichever of them it came to first."""
    for written in _instances((GradientHandle, FetchedGradient), _written(func, args, kwargs, allowed)):
        raise RuntimeError(unwritable(written.name, written.stage, getattr(func, "__name__", "")))


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], allowed: set[Any]) -> Any:
    """What a call writes to, by torch's convention of names; nothing for those that are allowed."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and func not in allowed
    first = args[:1] if in_place or name in _ASSIGNMENTS or func == Tensor.data.__set__ else ()  # type: ignore[attr-defined]
    return first, kwargs.get("out")


def _fetch(value: Any, fetched: dict[int, FetchedGradient]) -> Any:
    """`value` with the gradient in the place of each handle; each is fetched once, in order, on all ranks alike."""
    if isinstance(value, GradientHandle):
        if id(value) not in fetched:
            fetched[id(value)] = FetchedGradient.of(value.fetch(), value.name, value.stage)
        return fetched[id(value)]
    if isinstance(value, (list, tuple)):
        items = [_fetch(item, fetched) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _fetch(item, fetched) for key, item in value.items()}
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
