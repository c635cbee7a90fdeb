"""Counts the kernels that a GPU would be told to launch, while torch computes on the CPU.

An operation on one tensor is a launch. One on a list is as many as torch's `multi_tensor_apply` makes of it: pieces of
65,536 elements, at most 320 of them and 110, 64, 48, 36 or 30 tensors (by the number of lists) in each. `numel_factor`
takes every tensor for one of so many times the elements, so that a small model has the launches of a large one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PIECE, _PIECES, _TENSORS = 65_536, 320, (110, 64, 48, 36, 30)
_NO_KERNEL = (
    "view", "_unsafe_view", "as_strided", "detach", "alias", "slice", "select", "split", "split_with_sizes", "unbind",
    "expand", "t", "transpose", "permute", "unsqueeze", "squeeze", "reshape", "empty", "empty_like", "new_empty",
    "empty_strided", "set_", "lift_fresh", "is_same_size", "unfold", "narrow", "resize_", "_local_scalar_dense",
)  # fmt: skip
_CAT = 128
"""Tensors that one kernel joins."""


class Launches(TorchDispatchMode):
    """Counts launches inside of a `with`.

    Args:
        numel_factor: How many times the elements each tensor stands for.
        device: Tensors in the device's memory; what is computed of them is there, too, and nothing else is counted.
            None: all is.

    Attributes:
        calls: Launches by operation.
    """

    def __init__(self, numel_factor: int = 1, device: list[Tensor] | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._factor = numel_factor
        self._there = None if device is None else {_key(tensor) for tensor in device}
        self._alive: list[Any] = []  # so that no address is another's meanwhile

    @property
    def total(self) -> int:
        """All of them."""
        return self.calls.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out, and count; one of this package as what its reference makes of it."""
        if func.namespace == "zero_strategy":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").rpartition(".")[0]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if self._there is not None:
            if not any(_key(tensor) in self._there for tensor in read):
                return result
            self._there |= {_key(tensor) for tensor in made}
            self._alive.append(made)
        if name not in _NO_KERNEL and (read or made):
            self.calls[name] += self._of(name, args, kwargs or {}, result)
        return result

    def _of(self, name: str, args: Any, kwargs: Any, result: Any) -> int:
        if name in ("cat", "stack"):
            return -(-len(args[0]) // _CAT)
        if not name.startswith(("_foreach_", "_fused_")):
            return 1
        lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple) and len(each)]
        lists = [each for each in lists if isinstance(each[0], Tensor)]
        if name.startswith("_fused_"):
            lists = lists[:4]  # steps are beside the table
        elif not name.endswith("_") and name != "_foreach_norm":
            lists.append(result)
        more = 2 if name == "_foreach_norm" else 0  # zeros for the pieces' sums, and the sums of these
        return self._applied([tensor.numel() * self._factor for tensor in lists[0]], len(lists)) + more

    @staticmethod
    def _applied(numels: list[int], depth: int) -> int:
        launches = tensors = pieces = 0
        for numel in filter(None, numels):
            tensors += 1
            last = -(-numel // _PIECE) - 1
            for piece in range(last + 1):
                pieces += 1
                full = tensors == _TENSORS[depth - 1] and piece == last
                if full or pieces == _PIECES:
                    launches, pieces, tensors = launches + 1, 0, 0 if piece == last else 1
        return launches + bool(pieces)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
