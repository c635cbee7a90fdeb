"""What the section `pipeline` of a DeepSpeed JSON changes about a PipelineModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_strategy.activation.checkpoint import non_reentrant_checkpoint
from zero_strategy.pipeline.module import PipelineModule


def apply_section(module: PipelineModule, section: Mapping[str, Any]) -> None:
    """Let a module recompute as a JSON says; as in DeepSpeed, that wins over the module's own arguments.

    Args:
        module: The module.
        section: Of the keys only `activation_checkpoint_interval`, above 0, and `use_reentrant: false` change anything.

    Raises:
        ValueError: If the interval is negative.
    """
    if interval := section.get("activation_checkpoint_interval", 0):
        module.set_checkpoint_interval(interval)
    if section.get("use_reentrant") is False:
        module.activation_checkpoint_func = non_reentrant_checkpoint
