"""What a plan puts outside of the device. The one place where the planner knows of offload settings."""

from __future__ import annotations

from dataclasses import dataclass

TIER_ORDER = ("none", "cpu", "nvme")
"""From the fastest to the largest; "none" is the device."""
BLOCK = 4096
"""Bytes that records on a drive are rounded up to."""


@dataclass(frozen=True)
class Offload:
    """Tiers of the parts of model state, by the names of the config's settings.

    Attributes:
        optimizer: Of optimizer state and master weights: "none" (the device), "cpu", "nvme".
        parameters: Of the owned slices of parameters, under stage 3.
        gradients: Of reduced gradients: "none" or "cpu"; None: "cpu" where the optimizer is off the device.
        optimizer_ratio: Fraction of each bucket's owned elements whose optimizer is off the device.
        staging_buffers: Buffers between the tiers.
        staging_bytes: Bytes of each one, at most; none is larger than the largest thing to be moved.
    """

    optimizer: str = "none"
    parameters: str = "none"
    gradients: str | None = None
    optimizer_ratio: float = 1.0
    staging_buffers: int = 4
    staging_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters"):
            if getattr(self, name) not in TIER_ORDER:
                raise ValueError(f"offload.{name} is {getattr(self, name)!r}; accepted: none, cpu, nvme")
        if self.gradients not in (None, "none", "cpu"):
            raise ValueError(f"offload.gradients is {self.gradients!r}; accepted: none, cpu, None")
        if not 0.0 <= self.optimizer_ratio <= 1.0:
            raise ValueError(f"offload.optimizer_ratio is {self.optimizer_ratio}; accepted: 0 to 1")
        if self.gradients == "cpu" and self.optimizer == "none":
            raise ValueError(
                "offload.gradients is 'cpu' and offload.optimizer 'none': the step would fetch them back; "
                "offload the optimizer too"
            )

    def check_stage(self, stage: int) -> None:
        """Raise if parameters are offloaded below stage 3, where every rank computes with whole ones.

        Raises:
            ValueError: Saying so.
        """
        if self.parameters != "none" and stage != 3:
            raise ValueError(f"offload.parameters is {self.parameters!r} at stage {stage}; it needs stage 3")

    @property
    def gradients_off(self) -> bool:
        """Whether reduced gradients lie in host memory."""
        return self.optimizer != "none" and self.gradients in (None, "cpu")

    def describe(self) -> str:
        """Such as "optimizer cpu, parameters nvme"; "none"."""
        parts = [f"{name} {tier}" for name in ("optimizer", "parameters") if (tier := getattr(self, name)) != "none"]
        if parts and self.optimizer != "none" and self.optimizer_ratio != 1.0:
            parts[0] += f" x {self.optimizer_ratio:g}"
        return ", ".join(parts) or "none"
