"""The tensor that a float8 layer multiplies with, and autograd holds, while a weight is gathered in float8.

It is torchao's own to the layer, and the parameter's values to everybody else; see `fsdp/float8_gather.py`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from zero_strategy.fsdp.gathered_codes import WeightPart
from zero_strategy.runtime.torch_private import tree_leaves, tree_map


@functools.cache
def codes_class() -> Any:
    """The class of weights that layers are given; torchao is imported with it."""
    library: Any = importlib.import_module("torchao.float8.float8_training_tensor")
    product_of_layers = importlib.import_module("torchao.float8.float8_linear").matmul_with_hp_or_float8_args
    products = {product_of_layers.forward.__code__, product_of_layers.backward.__code__}

    class Float8Codes(library.Float8TrainingTensor):
        """torchao's tensor, whose codes are released after a forward, and are there again when a backward uses them.

        The layer multiplies with it, and autograd holds it meanwhile. To others, such as hooks that pack what autograd
        saves, it is the parameter's values.

        Attributes:
            part: The weight.
        """

        part: WeightPart

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            """Compute with codes that are there, or with values.

            Raises:
                RuntimeError: If the module is gone that they belong to, or the parameter has been written to.
            """
            kwargs = kwargs or {}
            mine = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            product = func is torch.ops.aten.mm.default
            if not (product and all(isinstance(each, library.Float8TrainingTensor) for each in args)):
                # Of the layer's product: autocast casts its factors, which torchao's tensors answer for themselves.
                if func not in _ALIASES and _asker(sys._getframe(1)) not in products:
                    args, kwargs = tree_map(lambda leaf: leaf.values() if type(leaf) is cls else leaf, (args, kwargs))
                    return func(*args, **kwargs)
            for each in mine:
                each.part.check()
                each.part.source.need()
            found = super().__torch_dispatch__(func, types, args, kwargs)
            if func in _ALIASES:
                found.__class__, found.part = cls, mine[0].part
            return found

        def values(self) -> Tensor:
            """The parameter's values, gathered where they are not here. A collective then."""
            return self.part.source.values_like(self.part.index, self._data)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.values().clone().__reduce_ex__(protocol)

    return Float8Codes


_ALIASES = frozenset(
    getattr(torch.ops.aten, name).default for name in ("t", "detach", "alias", "view", "_unsafe_view", "as_strided")
)
"""Operations of autograd's and the layer's own whose results share the memory of codes."""


def _asker(frame: FrameType | None) -> CodeType | None:
    """The code that an operation is called by, modes left out."""
    while frame is not None and frame.f_code.co_name == "__torch_dispatch__":
        frame = frame.f_back
    return None if frame is None else frame.f_code


class Transposed(torch.autograd.Function):
    """A transposed weight in float8 as a function of the parameter that it was cast from; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, weight: Callable[[], Tensor]) -> Tensor:
        """The weight, (in_features, out_features)."""
        return weight()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient is the parameter's, (out_features, in_features).

        Raises:
            RuntimeError: Where the graph of gradients is asked for: it would end here.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a float8 layer whose weight was gathered in float8: second derivatives "
                "need its values. Set communication.parameters to 'values'"
            )
        return gradients[0].t(), None
