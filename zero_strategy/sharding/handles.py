"""What `p.grad` shows where it is not the gradient: something that can be removed or zeroed, but not read.

Where this rank holds a part of a gradient only, code that would compute with `p.grad` as if it were whole (a norm, a
logger, `torch.nn.utils.clip_grad_norm_`) gets an error that names the way, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_ALLOWED = {
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
    torch._foreach_zero_,
}
"""What `zero_grad` in all its forms does, and questions about the shape."""


class GradientHandle(Tensor):
    """Stands for a gradient; of its shape, but without memory.

    Attributes:
        name: The parameter.
        stage: The ZeRO stage, for the message.
    """

    name = ""
    stage = 0

    @staticmethod
    def of(plain: Tensor, name: str, stage: int) -> GradientHandle:
        """A handle that shares the memory and the version counter of `plain`."""
        handle = plain.as_subclass(GradientHandle)
        handle.name, handle.stage = name, stage
        return handle

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let through what a handle stands for.

        Raises:
            RuntimeError: For everything else.
        """
        handle = next(iter(_handles_in((args, kwargs))))
        if func in _ALLOWED or getattr(func, "__name__", "") in ("__get__", "__set__"):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            # `p.grad.data` and `p.grad.detach()` are no way around
            return GradientHandle.of(result, handle.name, handle.stage) if type(result) is Tensor else result
        raise RuntimeError(unreadable(handle.name, handle.stage, getattr(func, "__name__", "")))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientHandle({self.name!r}, shape={tuple(self.shape)}, stage {self.stage})"

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientHandle:
        raise RuntimeError(unreadable(self.name, self.stage, "deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(unreadable(self.name, self.stage, "pickle"))


def unreadable(name: str, stage: int, call: str) -> str:
    """The message for a use of a gradient that is not whole here."""
    what = f"{call}() on the" if call else "the"
    which = f" of parameter {name!r}" if name else ""
    return (
        f"{what} gradient{which}: at stage {stage} p.grad is no whole gradient on any rank. Clip with "
        "self.clip_gradients(...) or Trainer(gradient_clip_val=...) under Lightning, else engine.clip_grad_norm_ and "
        "engine.clip_grad_value_; the norm is engine.grad_norm().value (Lightning: trainer.strategy.engine); read and "
        "write whole gradients with safe_get_full_grad and safe_set_full_grad of zero_strategy.optim.full_state, on "
        "all ranks."
    )


def _handles_in(value: Any) -> Iterable[GradientHandle]:
    if isinstance(value, GradientHandle):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _handles_in(item)
    elif isinstance(value, dict):
        yield from _handles_in(list(value.values()))
