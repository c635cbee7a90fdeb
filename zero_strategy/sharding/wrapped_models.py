"""Models inside of wrappers that have them as `.module`: getting at them, and at their attributes.

DDP, mixed-precision wrappers and engines of other libraries keep what they wrap as `module`, one in the other.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
    """Whether `module` is `parent_module`'s or that of one below it.

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
    """Whether a model, perhaps wrapped, says `xattn_needed`; False if it says nothing of it."""
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
