"""Megatron's model utilities: wrapped models, parallel marks, divisions, initialization, inference.

`ensure_divisibility`, `divide`, `maybe_cat`.

`create_updated_function_signature`.

For methods of one object that get options: `inspect.signature`, editors and frameworks that look at parameters
(Lightning and transformers do) see them.

DDP, mixed-precision wrappers and engines of other libraries keep what they wrap as `module`, one in the other.

    tensor_model_parallel, _mcore_tp, model_parallel     it is divided among the ranks of a model-parallel group
    partition_dim, _tp_partition_dim                     along this dimension
    _tensor_parallel_mode = "column" or "row"            both: it is divided, along dimension 0 or 1
    _tp_duplicated                                       every rank of such a group has all of it
    allreduce = False                                    it belongs to an expert, of which other ranks have others

The marks are Megatron's and DeepSpeed's; a parameter without any is on every rank.

`init_method_normal`, `scaled_init_method_normal`.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.compat.megatron.lifecycle import get_mamba_version


class NotDivisibleError(ValueError, AssertionError):
    """There is a remainder. It is an AssertionError as well, which Megatron raises and scripts of its catch."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Check that `denominator` divides `numerator`.

    Raises:
        NotDivisibleError: If it does not, or is 0; a ValueError and an AssertionError.
    """
    if denominator == 0 or numerator % denominator:
        raise NotDivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """`numerator // denominator`, of which nothing is left over.

    Raises:
        NotDivisibleError: See `ensure_divisibility`.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def maybe_cat(a: Tensor | None, b: Tensor | None, dim: int = 0, *, required: bool = False) -> Tensor | None:
    """`a` and `b` joined along `dim`; the one that there is, if there is one; None for none.

    Args:
        a: Comes first.
        b: Comes second.
        dim: Along which.
        required: None for none is an error.

    Raises:
        ValueError: If both are None, and a result is required.
    """
    parts = [part for part in (a, b) if part is not None]
    if not parts:
        if required:
            raise ValueError("maybe_cat(None, None, required=True): at least one of the tensors must be there")
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def create_updated_function_signature(
    original_function: Callable[..., Any], **extended_kwargs: Any
) -> Callable[..., Any]:
    """A function like the original with further keyword-only parameters.

    An original with `**kwargs` gets them, the defaults too. One without cannot take them, and is called as before; what
    they mean is then the business of a function around this one, which takes them out first.

    Args:
        original_function: A function or bound method, which stays what it is.
        extended_kwargs: Names of the new parameters, and their defaults.

    Returns:
        A function with the original's name, documentation and annotations; `__wrapped__` is the original.

    Raises:
        ValueError: If the original has a parameter of the same name.
    """
    signature = inspect.signature(original_function)
    taken = [name for name in extended_kwargs if name in signature.parameters]
    if taken:
        raise ValueError(f"{_name(original_function)}{signature} has parameters {taken} already")
    old = list(signature.parameters.values())
    catches_all = bool(old) and old[-1].kind is inspect.Parameter.VAR_KEYWORD
    new = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in extended_kwargs.items()
    ]
    position = len(old) - catches_all  # nothing may follow **kwargs
    updated = signature.replace(parameters=[*old[:position], *new, *old[position:]])

    @functools.wraps(original_function)
    def function(*args: Any, **kwargs: Any) -> Any:
        updated.bind(*args, **kwargs)  # the usual TypeError, with the new names known
        options = {name: kwargs.pop(name, default) for name, default in extended_kwargs.items()}
        return original_function(*args, **kwargs, **options) if catches_all else original_function(*args, **kwargs)

    function.__signature__ = updated  # type: ignore[attr-defined]
    return function


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
    """True if `module` is `parent_module`'s or that of one below it.

    Args:
        module: The object that is looked for.
        parent_module: Where.
        strict: A module is no submodule of itself.
    """
    if module is parent_module:
        return not strict
    return any(found is module for found in parent_module.modules())


def unwrap_model(model: Any, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """The innermost model; of each one in a list, as a list.

    Args:
        model: A model, or a list of them.
        module_instances: Classes of the wrappers to take off; default: everything that has a `module`.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    while isinstance(model, module_instances) if module_instances else hasattr(model, "module"):
        model = model.module
    return model


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """An attribute of the outermost of nested models that has it.

    Args:
        model: A model, perhaps wrapped.
        attr: The attribute's name.
        allow_none: None counts as a value; otherwise the search goes on below it.
        return_model_obj: Return the model that has it instead.

    Raises:
        TypeError: If `model` is a list.
        AttributeError: If none of them has it.
    """
    if isinstance(model, list):
        raise TypeError(f"get_attr_wrapped_model takes one model, not a list of {len(model)}; ask each of them")
    found = model
    while (not hasattr(found, attr)) if allow_none else (getattr(found, attr, None) is None):
        if not hasattr(found, "module"):
            raise AttributeError(f"neither the {type(model).__name__} nor what it wraps has an attribute {attr!r}")
        found = found.module
    return found if return_model_obj else getattr(found, attr)


def get_model_type(model: Any) -> Any:
    """The `model_type` of a model, perhaps wrapped.

    Raises:
        AttributeError: If there is none.
    """
    return get_attr_wrapped_model(model, "model_type")


def get_model_xattn(model: Any) -> bool:
    """True if a model, perhaps wrapped, says `xattn_needed`; False if it says nothing of it."""
    try:
        return bool(get_attr_wrapped_model(model, "xattn_needed"))
    except AttributeError:
        return False


def get_model_config(model: Any) -> Any:
    """The `config` of a model, perhaps wrapped; it may be None.

    Raises:
        AttributeError: If there is none.
    """
    return get_attr_wrapped_model(model, "config")


_DIVIDED = ("tensor_model_parallel", "_mcore_tp")
_MODE = "_tensor_parallel_mode"
_DIM_OF_MODE = {"column": 0, "row": 1}


def is_mcore_tensor_model_parallel(param: Tensor) -> bool:
    """True if Megatron has divided this parameter among tensor-parallel ranks."""
    return any(bool(getattr(param, mark, False)) for mark in _DIVIDED) or getattr(param, _MODE, None) in _DIM_OF_MODE


def is_mcore_tensor_parallel_duplicated(param: Tensor) -> bool:
    """True if this parameter of a tensor-parallel layer is whole on each of its ranks."""
    return bool(getattr(param, "_tp_duplicated", False))


def get_mcore_tensor_parallel_partition_dim(param: Tensor) -> int | None:
    """The dimension along which the parameter is divided; None if it is not.

    Raises:
        ValueError: If it is marked as divided, and nothing says along which dimension.
    """
    if not is_mcore_tensor_model_parallel(param):
        return None
    for mark in ("_tp_partition_dim", "partition_dim"):
        if hasattr(param, mark):
            return int(getattr(param, mark))
    mode = getattr(param, _MODE, None)
    if mode in _DIM_OF_MODE:
        return _DIM_OF_MODE[mode]
    raise ValueError(
        f"a parameter of shape {list(param.shape)} is marked as tensor-parallel, but has no partition_dim; layers that "
        "divide their weights set it beside tensor_model_parallel"
    )


def is_model_parallel_parameter(p: Tensor) -> bool:
    """True if this parameter is divided among model-parallel ranks, by DeepSpeed's mark or Megatron's."""
    return bool(getattr(p, "model_parallel", False)) or is_mcore_tensor_model_parallel(p)


def is_expert_parameter(p: Tensor) -> bool:
    """True if it is an expert's, which ranks of an expert-parallel group do not share."""
    return getattr(p, "allreduce", True) is False


_RANKS = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
"""By which names units have told it: newer Megatron, DeepSpeed's pipelines, older Megatron."""


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This process in its tensor-parallel group, whatever the unit calls that; 0 without a unit.

    Raises:
        TypeError: If the unit has none of the methods.
    """
    if mpu is None:
        return 0
    for method in _RANKS:
        if hasattr(mpu, method):
            return int(getattr(mpu, method)())
    raise TypeError(f"mpu must have one of {', '.join(f'{name}()' for name in _RANKS)}; {type(mpu).__name__} has none")


_MAMBA = "M"


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """The context of a call that may still have it under its old name, of which that is warned.

    Args:
        inference_context: What the argument is called now; wins.
        inference_params: What it was called.
    """
    if inference_context is None and inference_params is not None:
        warnings.warn("inference_params is called inference_context now; pass that", DeprecationWarning, stacklevel=3)
        return inference_params
    return inference_context


@dataclass(frozen=True)
class MambaInferenceStateConfig:
    """State that a hybrid model keeps per request while it generates.

    Attributes:
        layer_type_list: A letter per layer; "M" is a Mamba layer.
        mamba_conv_states_shape: Of one layer's convolution state.
        mamba_ssm_states_shape: Of one layer's state-space state.
    """

    layer_type_list: list[str]
    mamba_conv_states_shape: tuple[int, ...]
    mamba_ssm_states_shape: tuple[int, ...]


def get_mamba_inference_state_config_from_model(model: Any) -> MambaInferenceStateConfig | None:
    """The state of a hybrid model's Mamba layers; None for other models, and where mamba_ssm is not installed.

    Args:
        model: Perhaps wrapped. A hybrid one has a `decoder` with `layer_type_list` and
            `mamba_state_shapes_per_request()`, which gives both shapes.
    """
    if get_mamba_version() is None:
        return None
    try:
        decoder = get_attr_wrapped_model(model, "decoder", allow_none=False)
    except AttributeError:
        return None
    layers = list(getattr(decoder, "layer_type_list", None) or [])
    if _MAMBA not in layers:
        return None
    convolution, state_space = decoder.mamba_state_shapes_per_request()
    return MambaInferenceStateConfig(layers, tuple(convolution), tuple(state_space))


InitMethod = Callable[[Tensor], Tensor]


def init_method_normal(sigma: float) -> InitMethod:
    """A function that fills a tensor from N(0, sigma).

    Args:
        sigma: The standard deviation.

    Raises:
        ValueError: If it is negative.
    """
    if not sigma >= 0:
        raise ValueError(f"sigma must not be negative, not {sigma}")
    return partial(nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> InitMethod:
    """A function that fills a tensor from N(0, sigma / sqrt(multiplier x num_layers)).

    For the projections whose outputs are added to the residual stream, `multiplier` times per layer: their sum then has
    the variance of one.

    Args:
        sigma: The standard deviation of other weights.
        num_layers: Layers of the model.
        multiplier: Additions per layer.

    Raises:
        ValueError: If `sigma` is negative, or one of the others not positive.
    """
    if not num_layers > 0 or not multiplier > 0:
        raise ValueError(f"num_layers {num_layers} and multiplier {multiplier} must be positive")
    return init_method_normal(sigma / math.sqrt(multiplier * num_layers))
