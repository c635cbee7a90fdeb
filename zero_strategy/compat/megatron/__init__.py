"""Names of Megatron core's and Megatron-FSDP's utilities, without Megatron: for scripts that are being moved over.

    from zero_strategy.compat.megatron import get_batch_on_this_cp_rank, GlobalMemoryBuffer, set_parallel_groups

| here | there |
| --- | --- |
| `core_utils` | `megatron.core.utils` |
| `fsdp_utils` | `megatron.core.distributed.fsdp.src.megatron_fsdp.utils` |
| `set_parallel_groups(groups or mesh)`, `get_parallel_groups()` | what `megatron.core.parallel_state` knows |

All names of both are here, too (`is_te_min_version` is that of `core_utils`), each imported when it is asked for. Row
by row: `docs/reference/names_of_deepspeed_and_megatron.md`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_ROOMS = ("core_utils", "fsdp_utils")
_OF_THE_STATE = ("get_parallel_groups", "set_parallel_groups")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name in _OF_THE_STATE:
        return getattr(import_module(f"{__name__}.core_utils").STATE, name)
    if name.startswith("__") and name != "__straggler__":  # Python's own questions
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for room in _ROOMS:
        module = import_module(f"{__name__}.{room}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    modules = [import_module(f"{__name__}.{room}") for room in _ROOMS]
    return sorted({*globals(), *_ROOMS, *_OF_THE_STATE, *(name for module in modules for name in dir(module))})
