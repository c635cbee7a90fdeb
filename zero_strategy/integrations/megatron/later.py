"""Names that are imported when they are asked for: what watches a run, which scripts without it should not load."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

_DIAGNOSTICS = "zero_strategy.diagnostics."

LATER = MappingProxyType(
    {
        "StragglerDetector": (_DIAGNOSTICS + "straggler_singleton", "StragglerDetector"),
        "_StragglerData": (_DIAGNOSTICS + "straggler_data", "StragglerData"),
        "_ValueWithRank": (_DIAGNOSTICS + "straggler_data", "ValueWithRank"),
        "__straggler__": (_DIAGNOSTICS + "straggler_singleton", "__straggler__"),
        "check_param_hashes_across_dp_replicas": (
            _DIAGNOSTICS + "replica_check",
            "check_param_hashes_across_dp_replicas",
        ),
    }
)
"""Name to the module that has it, and what it is called there."""


def later(name: str) -> Any:
    """The object of this name."""
    module, attribute = LATER[name]
    return getattr(import_module(module), attribute)
