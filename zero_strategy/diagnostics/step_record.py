"""What is known of one step of one rank: a line of JSON, and figures for a logger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zero_strategy.diagnostics.traffic import Flow

PREFIX = "zero/"


@dataclass(frozen=True)
class MemorySample:
    """Bytes at the end of a step.

    Attributes:
        tiers: By tier and category of the ledger.
        resident: Of the process, in host memory.
        resident_peak: At most so far.
        allocated: By the allocator of the device; None on the CPU.
        allocated_peak: At most so far.
    """

    tiers: Mapping[str, Mapping[str, int]]
    resident: int
    resident_peak: int
    allocated: int | None = None
    allocated_peak: int | None = None


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        step: Optimizer steps taken with it.
        rank: Among all ranks that train the model.
        time: When it ended, in seconds since 1970.
        seconds: It took.
        parts: Seconds by part; they add up to `seconds`.
        flows: What moved, by kind.
        loss: Of this rank's micro-batches, their mean; None if nobody told it.
        tokens: Of this rank; None if inputs do not tell.
        samples: Likewise.
        operations: Floating-point operations of its forwards and backwards.
        peak: Operations that its device could have done in the time; None if that is not known.
        copies: Ranks that train on other data at the same time, this one included.
        memory: At its end, where it was looked at.
    """

    step: int
    rank: int
    time: float
    seconds: float
    parts: Mapping[str, float]
    flows: Mapping[str, Flow] = field(default_factory=dict)
    loss: float | None = None
    tokens: int | None = None
    samples: int | None = None
    operations: int | None = None
    peak: float | None = None
    copies: int = 1
    memory: MemorySample | None = None

    @property
    def mfu(self) -> float | None:
        """Operations as a fraction of what the device could have done."""
        return None if self.operations is None or not self.peak else self.operations / self.peak

    def rate(self, count: float | None) -> float | None:
        """Of something per second of the step."""
        return None if count is None or self.seconds <= 0 else count / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain types; `from_json` reads them."""
        found = asdict(self)
        found["flows"] = {kind: flow._asdict() for kind, flow in self.flows.items()}
        return {key: value for key, value in found.items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepRecord:
        """The record of a line.

        Raises:
            KeyError, TypeError: If it is none.
        """
        kept = dict(values)
        kept["flows"] = {kind: Flow(**flow) for kind, flow in values.get("flows", {}).items()}
        if (memory := values.get("memory")) is not None:
            kept["memory"] = MemorySample(**memory)
        return cls(**kept)

    def metrics(self) -> dict[str, float]:
        """For a logger, by stable names; tokens, samples and operations are those of all ranks, if alike."""
        found: dict[str, float | None] = {"step_time/total": self.seconds}
        found |= {f"step_time/{part}": seconds for part, seconds in self.parts.items()}
        found["tokens_per_second"] = self.rate(None if self.tokens is None else self.tokens * self.copies)
        found["samples_per_second"] = self.rate(None if self.samples is None else self.samples * self.copies)
        operations = self.rate(self.operations)
        found["tflops_per_device"] = None if operations is None else operations / 1e12
        found["mfu"] = self.mfu
        for kind, flow in self.flows.items():
            found[f"bytes/{kind}"] = flow.nbytes
            rate = flow.bytes_per_second
            found[f"gigabytes_per_second/{kind}"] = None if rate is None else rate / 1e9
        if self.memory is not None:
            for tier, categories in self.memory.tiers.items():
                for category, nbytes in categories.items():
                    found[f"memory/{tier}/{category.replace(' ', '_')}"] = nbytes
            found["memory/resident"] = self.memory.resident
            found["memory/allocated"] = self.memory.allocated
            found["memory/allocated_peak"] = self.memory.allocated_peak
        return {PREFIX + name: float(value) for name, value in found.items() if value is not None}
