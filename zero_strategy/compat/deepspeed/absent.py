"""Parts of DeepSpeed that this version does not have: their module paths are there, and say so by name.

A module of that path has `__getattr__ = absent(__name__)`, so that `from ...deepspeed.runtime.utils import
CheckOverflow` is an ImportError that names the class and the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NoReturn

_HERE = __name__.rpartition(".")[0]

_REASONS = MappingProxyType(
    {
        "runtime.swap_tensor": (
            "its swappers are not part of this version; the engine moves parameters, gradients and optimizer states by "
            "itself where 'offload_param' or 'offload_optimizer' in the config says so"
        ),
        "runtime.utils": (
            "this helper of DeepSpeed's is not part of this version; the documented ones are here (norms, clipping, "
            "memory), and what an engine needs besides it does itself"
        ),
    }
)
"""By the place below `deepspeed`; a module's reason holds for what is below it."""

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


def _reason(place: str) -> str:
    while place not in _REASONS:
        assert "." in place, "every absent module has a reason"
        place = place.rpartition(".")[0]
    return _REASONS[place]
