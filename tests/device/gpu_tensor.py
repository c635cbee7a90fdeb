"""Tensors that say they are on a GPU, and are not: their values lie beside them on the CPU.

Every operation is carried out on the values. What torch refuses is refused (tensors of two devices in one operation),
and what makes the host wait for a device is counted: a copy to the CPU, a value that Python asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_COPIES = ("aten::_to_copy", "aten::copy_")
_ASKED = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")


class GpuTensor(Tensor):
    """A tensor on `cuda:0`.

    Attributes:
        waits: Operations of all of them for which the host would have waited, in order; for a test to clear.
    """

    waits: ClassVar[list[str]] = []
    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=values.dtype, strides=values.stride(), device=torch.device("cuda", 0)
        )
        made.values = values
        return made

    def __repr__(self, **options: Any) -> str:
        return f"GpuTensor({self.values})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        target = kwargs.get("device")
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strangers = [leaf for leaf in leaves if not isinstance(leaf, GpuTensor) and leaf.dim()]
        if name not in _COPIES and (strangers or (name.endswith(("stack", "cat")) and not _all_here(leaves))):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {name}")
        leaves_it = target is not None and torch.device(target).type == "cpu"
        if leaves_it or name in _ASKED or (name == "aten::copy_" and not isinstance(args[0], GpuTensor)):
            cls.waits.append(name)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        unwrapped = tree_map(_values, (args, kwargs))
        result = func(*unwrapped[0], **unwrapped[1])
        if leaves_it or name in _ASKED:
            return result
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        return tree_map(_wrapped, result)


def _all_here(leaves: list[Tensor]) -> bool:
    return all(isinstance(leaf, GpuTensor) for leaf in leaves)


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, GpuTensor) else leaf


def _wrapped(leaf: Any) -> Any:
    return GpuTensor(leaf) if isinstance(leaf, Tensor) else leaf


def waits_in(call: Callable[[], object]) -> list[str]:
    """Operations of a call for which the host would have waited."""
    GpuTensor.waits.clear()
    call()
    return list(GpuTensor.waits)
