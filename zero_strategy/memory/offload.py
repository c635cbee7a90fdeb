"""What a plan puts outside of the device, in the config's own terms."""

from __future__ import annotations

from dataclasses import dataclass

from zero_strategy.config import OffloadConfig
from zero_strategy.memory.cuts import Cuts, head_numel
from zero_strategy.memory.opening import chunk_numel

TIER_ORDER = ("none", "cpu", "nvme")
"""From the fastest to the largest; "none" is the device."""
BLOCK = 4096
"""Bytes that host memory and records on a drive are rounded up to."""


@dataclass(frozen=True)
class Offload:
    """Tiers of the parts of model state, by the names of the config's settings.

    Attributes:
        optimizer: Of optimizer state and master weights: "none" (the device), "cpu", "nvme".
        ratio: The part of optimizer state and master weights that its tier holds; the rest stays on the device.
        parameters: Of the owned slices of parameters, under stage 3.
        gradients: Of reduced gradients; None: the optimizer's, where gradients are reduced per micro-batch.
        staging_bytes: Host memory through which state in files passes.
        resident_bytes: Host memory in which parameters and gradients stay that would be in files.
    """

    optimizer: str = "none"
    parameters: str = "none"
    ratio: float = 1.0
    gradients: str | None = None
    staging_bytes: int = OffloadConfig().staging_bytes
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters", "gradients"):
            if getattr(self, name) not in (*TIER_ORDER, *([None] if name == "gradients" else [])):
                raise ValueError(f"offload.{name} is {getattr(self, name)!r}; accepted: none, cpu, nvme")
        if self.gradients not in (None, "none") and self.optimizer == "none":
            raise ValueError(
                f"offload.gradients is {self.gradients!r} and offload.optimizer is 'none': offload the optimizer too"
            )
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"offload.optimizer_ratio is {self.ratio:g}; accepted: 0 to 1")
        if self.parameters != "none" and self.optimizer == "none":
            raise ValueError(
                f"offload.parameters is {self.parameters!r} and offload.optimizer is 'none': what is not on the device "
                "is updated on the host; offload the optimizer too"
            )

    @classmethod
    def of(cls, config: OffloadConfig) -> Offload:
        """What a config says."""
        explicit = None if config.is_derived("gradients") else config.gradients
        return cls(
            config.optimizer,
            config.parameters,
            config.optimizer_ratio,
            explicit,
            config.staging_bytes,
            config.resident_bytes,
        )

    def check_stage(self, stage: int) -> None:
        """Raise if parameters are offloaded below stage 3, where every rank computes with whole ones.

        Raises:
            ValueError: Saying so.
        """
        if self.parameters != "none" and stage != 3:
            raise ValueError(f"offload.parameters is {self.parameters!r} at stage {stage}; it needs stage 3")

    @property
    def in_files(self) -> bool:
        """Whether anything is kept in files."""
        return "nvme" in (self.optimizer, self.parameters, self.gradients)

    def gradient_tier(self, reduction: str) -> str:
        """Of reduced gradients, under a `gradient_reduction`."""
        return "none" if reduction == "per_step" else self.gradients or self.optimizer

    @property
    def chunk_numel(self) -> int:
        """Elements of the chunks that a step takes."""
        return chunk_numel(self.staging_bytes)

    def cuts(self, numel: int) -> Cuts:
        """How the vectors of a bucket are cut of which a rank owns `numel` elements."""
        return Cuts(numel, self.chunk_numel, head_numel(numel, self.ratio if self.optimizer != "none" else 1.0))

    def describe(self) -> str:
        """Such as "optimizer cpu, parameters nvme"; "none"."""
        parts = [f"{name} {tier}" for name in ("optimizer", "parameters") if (tier := getattr(self, name)) != "none"]
        if self.ratio != 1.0 and self.optimizer != "none":
            parts.insert(1, f"ratio {self.ratio:g}")
        if self.gradients is not None:
            parts.append(f"gradients {self.gradients}")
        if self.resident_bytes and self.in_files:
            parts.append(f"resident bytes {self.resident_bytes}")
        return ", ".join(parts) or "none"
