"""Float8 layers and weights of torchao, recognised by the names of their classes: nothing of torchao is imported.

A `Float8Linear` keeps its weight in 16 or 32 bits and casts it where it multiplies: it is divided as any parameter.
With `enable_fsdp_float8_all_gather=True` the parameter is another tensor, which holds the weight inside of it.
"""

from __future__ import annotations

from torch import Tensor, nn

from zero_strategy.quantized.wrapped import is_wrapped
from zero_strategy.runtime.torch_private import is_traceable_wrapper_subclass

_LIBRARY = "torchao."


def is_float8_layer(module: nn.Module) -> bool:
    """True for a linear layer that multiplies in float8, and casts its weight itself."""
    return any(_LIBRARY in f"{cls.__module__}." and cls.__name__ == "Float8Linear" for cls in type(module).__mro__)


def check_own_values(name: str, parameter: Tensor) -> None:
    """Raise for a parameter that has no values of its own, but tensors inside of it.

    What is divided and updated would be memory that no forward reads.

    Raises:
        ValueError: Naming the parameter and its class.
    """
    held: object = parameter
    if not is_traceable_wrapper_subclass(held) or is_wrapped(held):
        return
    kind = type(parameter).__name__
    if kind == "WeightWithDynamicFloat8CastTensor":
        raise ValueError(
            f"parameter {name!r} is a {kind}: enable_fsdp_float8_all_gather=True is for torch's FSDP2, which gathers "
            "float8 weights by torchao's own hooks. Here weights are gathered in the dtype that they have, and cast "
            "to the same float8 values by their layers: convert with enable_fsdp_float8_all_gather=False"
        )
    raise ValueError(
        f"parameter {name!r} is a {kind}, which keeps its values in tensors inside of it, and cannot be divided: "
        "convert the module without such parameters"
    )
