"""Names that are imported when they are asked for: what watches a run, which scripts without it should not load."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

_STRAGGLER = "zero_strategy.diagnostics.straggler"

LATER = MappingProxyType(
    {
        "StragglerDetector": _STRAGGLER,
        "_StragglerData": _STRAGGLER,
        "_ValueWithRank": _STRAGGLER,
        "__straggler__": _STRAGGLER,
        "check_param_hashes_across_dp_replicas": "zero_strategy.diagnostics.replica_check",
    }
)
"""Name to module."""


def later(name: str) -> Any:
    """The object of this name."""
    return getattr(import_module(LATER[name]), name)
