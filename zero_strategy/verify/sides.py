"""Distributed sides of a verification that need nothing but the factory, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from zero_strategy.verify.distributed_run import MakeRun
from zero_strategy.verify.ready_runs import AveragedRun, DDPRun, FSDP2Run

READY = ("ddp", "fsdp2", "deepspeed", "plain")
"""Distributed sides that need nothing but the factory."""


def make_ready(
    name: str, *, stage: int | None = None, deepspeed_config: Mapping[str, Any] | None = None
) -> tuple[str, MakeRun]:
    """The title and the maker of a ready distributed run.

    Args:
        name: One of `READY`.
        stage: See `verify_against`.
        deepspeed_config: See there.

    Raises:
        ValueError: If an option is of no use for it, or what it needs is not installed.
    """
    if deepspeed_config is not None and name != "deepspeed":
        raise ValueError(f"a config is read for deepspeed alone, not for {name}; leave it out")
    if name == "deepspeed":
        if find_spec("deepspeed") is None:
            raise ValueError("--against deepspeed needs DeepSpeed itself: pip install deepspeed")
        from zero_strategy.verify.deepspeed_run import DeepSpeedRun  # which needs deepspeed

        chosen = 2 if stage is None else stage
        return f"deepspeed stage {chosen}", partial(DeepSpeedRun, stage=chosen, config=deepspeed_config)
    if name == "fsdp2":
        if stage not in (None, 2, 3):
            raise ValueError(f"stage is {stage}; accepted for fsdp2: 3, or 2: weights are kept after forward")
        return name, partial(FSDP2Run, reshard_after_forward=stage != 2)
    if stage is not None:
        raise ValueError(f"stage is {stage}, but {name} divides nothing: leave it out")
    return name, DDPRun if name == "ddp" else AveragedRun
