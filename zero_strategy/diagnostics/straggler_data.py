"""What a straggler report holds: the least and the greatest of each figure over the ranks, and whose they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FIGURES = {
    "elapsed": "ms",
    "btime": "ms",
    "temp": "C",
    "power": "W",
    "util": "%",
    "clock": "MHz",
}
"""Name and unit: time per iteration, time for its batch, and of the GPU temperature, power, utilisation, clock."""


@dataclass(frozen=True)
class ValueWithRank:
    """A figure and the rank that it is of.

    Attributes:
        value: None where no rank has such a probe.
        rank: None likewise.
        unit: Of the value.
    """

    value: float | None
    rank: int | None
    unit: str = ""

    @property
    def _value(self) -> float | None:
        """Megatron's name of `value`."""
        return self.value

    @property
    def _rank(self) -> int | None:
        """Megatron's name of `rank`."""
        return self.rank

    @property
    def _unit(self) -> str:
        """Megatron's name of `unit`."""
        return self.unit

    def __lt__(self, other: ValueWithRank) -> bool:
        """Whether the value is smaller; one that is not known is neither smaller nor greater."""
        return self.value is not None and other.value is not None and self.value < other.value

    def __gt__(self, other: ValueWithRank) -> bool:
        """Whether the value is greater."""
        return other < self

    def __call__(self) -> tuple[float | None, int | None, str]:
        """The three."""
        return self.value, self.rank, self.unit

    def __str__(self) -> str:
        return "not known" if self.value is None else f"{self.value:.2f}{self.unit}/{self.rank}"


@dataclass(frozen=True)
class StragglerData:
    """The least and the greatest of each figure; see `FIGURES` for names and units.

    Attributes:
        aflops: Every rank's estimated TFLOP/s, the slowest first; None where no FLOPs were told.
    """

    min_elapsed: ValueWithRank
    max_elapsed: ValueWithRank
    min_btime: ValueWithRank
    max_btime: ValueWithRank
    min_temp: ValueWithRank
    max_temp: ValueWithRank
    min_power: ValueWithRank
    max_power: ValueWithRank
    min_util: ValueWithRank
    max_util: ValueWithRank
    min_clock: ValueWithRank
    max_clock: ValueWithRank
    aflops: list[ValueWithRank] | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> StragglerData:
        """From each rank's figures in their order, then its TFLOP/s; NaN where there is none."""
        found: dict[str, Any] = {}
        for column, (name, unit) in enumerate(FIGURES.items()):
            known = [(row[column], rank) for rank, row in enumerate(rows) if not math.isnan(row[column])]
            if not known:
                found[f"min_{name}"] = found[f"max_{name}"] = ValueWithRank(None, None, unit)
                continue
            least, greatest = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
            found[f"min_{name}"] = ValueWithRank(least[0], least[1], unit)
            found[f"max_{name}"] = ValueWithRank(greatest[0], greatest[1], unit)
        flops = sorted((row[len(FIGURES)], rank) for rank, row in enumerate(rows) if not math.isnan(row[len(FIGURES)]))
        return cls(**found, aflops=[ValueWithRank(value, rank, "TF/s") for value, rank in flops] or None)

    def lines(self, count: int) -> list[str]:
        """For people.

        Args:
            count: How many of the slowest and of the fastest ranks are listed.
        """
        said = []
        for name in FIGURES:
            least, greatest = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least.value is not None:
                said.append(f"{name}: least {least}, greatest {greatest} (value/rank)")
        if self.aflops:
            said.append(f"slowest: {', '.join(map(str, self.aflops[:count]))}")
            said.append(f"fastest: {', '.join(map(str, self.aflops[: -count - 1 : -1]))}")
        return said


@dataclass(frozen=True)
class GpuFigures:
    """Of this process's GPU now; None for what its driver does not tell, and without a GPU."""

    temp: int | None = None
    power: int | None = None
    util: int | None = None
    clock: int | None = None

    @classmethod
    def now(cls) -> GpuFigures:
        """Ask the driver."""
        if not torch.cuda.is_available():
            return cls()
        milliwatts = _asked(torch.cuda.power_draw)
        return cls(
            temp=_asked(torch.cuda.temperature),
            power=None if milliwatts is None else round(milliwatts / 1000),
            util=_asked(torch.cuda.utilization),
            clock=_asked(torch.cuda.clock_rate),
        )


def _asked(probe: Callable[[], int]) -> int | None:
    try:
        return int(probe())
    except Exception:  # no library to ask with, a driver that does not tell, a device that is shared
        return None
