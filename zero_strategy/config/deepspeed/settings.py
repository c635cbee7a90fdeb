"""A DeepSpeed config after it was read: our settings, and those of its frameworks and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..batch import BatchSettings
from ..rules import from_origin
from ..section import Setting
from .classify import KeyReport
from .keys import REJECTED
from .named import Named


@dataclass(frozen=True)
class DeepSpeedSettings:
    """What a DeepSpeed config says. Made by `read_deepspeed` and `inspect_deepspeed`."""

    origin: str
    """Where it was read from, such as ``user: ds_config.json``."""
    zero: Mapping[str, Setting]
    """Our settings by their full key, with the JSON's key as origin; what is not here has our default."""
    batch: BatchSettings
    """Batch sizes."""
    gradient_clipping: Setting
    """Largest gradient norm; 0.0 does not clip, None is ``"auto"``."""
    precision: Setting
    """``fp32``, ``fp16`` or ``bf16``; None is ``"auto"``."""
    optimizer: Named | None
    """The optimizer, if the config has one."""
    scheduler: Named | None
    """The learning rate schedule, if the config has one."""
    drop_last: bool
    """Whether the data loader leaves out an incomplete last batch."""
    activations: Mapping[str, Any]
    """The section `activation_checkpointing`, by its keys; what is null is left out."""
    pipeline: Mapping[str, Any]
    """The section `pipeline`, likewise."""
    observers: Mapping[str, Mapping[str, Any]]
    """The sections tensorboard, wandb, csv_monitor, comms_logger and flops_profiler that are on, with defaults."""
    found: tuple[KeyReport, ...]
    """What became of every key, in the order of the file."""
    owned: Mapping[str, Setting]
    """What the file sets (not ``"auto"``) and a framework may own, by DeepSpeed's key; ``precision`` for fp16, bf16."""

    def reports_origin(self, section: str) -> str:
        """The place of a section, in brackets, for messages."""
        return from_origin(f"{self.origin}: {section}")

    def rejected(self) -> list[KeyReport]:
        """The keys that ask for what is not here."""
        return [report for report in self.found if report.classification == REJECTED]
