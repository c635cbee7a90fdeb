"""Parameters of which each rank holds a slice while the model is still being built.

Metadata can be had at any time. Whatever else torch is asked to do with such a parameter arrives in
`__torch_function__`, which unshards it first: the object is a plain `nn.Parameter` then, the same one, so that ties,
hooks and references stay what they are. `construction` decides when it is sharded again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import init

from zero_strategy.runtime.torch_private import (
    METADATA_GETTERS,
    METADATA_SETTERS,
    DisableTorchFunctionSubclass,
    has_compatible_shallow_copy_type,
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
