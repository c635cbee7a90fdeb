"""Float8 layers and weights of torchao, recognised by the names of their classes: nothing of torchao is imported.

A `Float8Linear` keeps its weight in 16 or 32 bits and casts it where it multiplies: it is divided as any parameter.
With `enable_fsdp_float8_all_gather=True` the parameter is another tensor, which holds the weight inside of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from zero_strategy.quantized.wrapped import is_wrapped
from zero_strategy.runtime.torch_private import is_traceable_wrapper_subclass, parameters_of

_LIBRARY = "torchao."


def is_float8_layer(module: nn.Module) -> bool:
    """True for a linear layer that multiplies in float8, and casts its weight itself."""
    return any(map(_is_float8, type(module).__mro__))


def float8_class(layer: nn.Module) -> Any:
    """torchao's class among those of such a layer."""
    return next(filter(_is_float8, type(layer).__mro__))


def _is_float8(cls: type) -> bool:
    return _LIBRARY in f"{cls.__module__}." and cls.__name__ == "Float8Linear"


def weights_cast_whole(module: nn.Module) -> dict[int, nn.Module]:
    """Float8 layers that cast their whole weight by one scale, by `id` of that weight, which nobody else has.

    Of recipes of torchao that is "tensorwise": others scale each row, and for a backward each column.
    """
    everyone = list(module.modules())
    owners = Counter(id(parameter) for each in everyone for parameter in parameters_of(each).values())
    found: dict[int, nn.Module] = {}
    for each in everyone:
        weight = parameters_of(each).get("weight") if is_float8_layer(each) else None
        held: object = weight
        alone = weight is not None and owners[id(weight)] == 1 and not is_traceable_wrapper_subclass(held)
        if alone and _casts_whole(each):
            found[id(weight)] = each
    return found


def _casts_whole(layer: Any) -> bool:
    casts = (layer.config.cast_config_weight, layer.config.cast_config_weight_for_grad_input)
    return casts[0] == casts[1] and all(
        cast.scaling_type.name == "DYNAMIC" and cast.scaling_granularity.name == "TENSORWISE" for cast in casts
    )


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
            "float8 weights by torchao's own hooks. Here communication.parameters='float8' does it, with the same "
            "float8 values: set that, and convert with enable_fsdp_float8_all_gather=False"
        )
    raise ValueError(
        f"parameter {name!r} is a {kind}, which keeps its values in tensors inside of it, and cannot be divided: "
        "convert the module without such parameters"
    )
