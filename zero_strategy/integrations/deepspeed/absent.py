"""Parts of DeepSpeed that this version does not have: their module paths are there, and say so by name.

A module of that path has `__getattr__ = absent(__name__)`, so that `from ...deepspeed.pipe import PipelineModule` is an
ImportError that names the class and the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NoReturn

_HERE = __name__.rpartition(".")[0]

_PIPELINE = (
    "pipeline parallelism is not part of this version; train the module as it is, with its parameters sharded by "
    "stage 3, which needs no division into layers"
)
_ACTIVATIONS = (
    "DeepSpeed's activation checkpointing is not part of this version; use torch.utils.checkpoint.checkpoint(function, "
    "*args, use_reentrant=False), or gradient_checkpointing_enable() in transformers"
)
_REASONS = MappingProxyType(
    {
        "PipelineModule": _PIPELINE,
        "checkpointing": _ACTIVATIONS,
        "pipe": _PIPELINE,
        "runtime.activation_checkpointing": _ACTIVATIONS,
        "runtime.pipe": _PIPELINE,
        "runtime.swap_tensor": "state outside of device memory (offloading) is not part of this version; leave it out",
        "runtime.utils": (
            "DeepSpeed's own helpers are not part of this version; a script finds norms in "
            "engine.get_global_grad_norm(), and clips by 'gradient_clipping' in its config"
        ),
    }
)
"""By the place below `deepspeed`; a module's reason holds for what is below it."""

CLASSES = ("PipelineModule",)
"""What is missing at the top of the package itself."""


def absent(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module whose content is not here.

    Args:
        module: Its full name.
    """
    place = module.removeprefix(_HERE + ".")

    def missing(name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(f"deepspeed.{place}.{name} is not here: {_reason(place)}")

    return missing


def missing_class(name: str) -> NoReturn:
    """Raise for one of `CLASSES`.

    Raises:
        ImportError: Always.
    """
    raise ImportError(f"deepspeed.{name} is not here: {_REASONS[name]}")


def _reason(place: str) -> str:
    while place not in _REASONS:
        assert "." in place, "every absent module has a reason"
        place = place.rpartition(".")[0]
    return _REASONS[place]
