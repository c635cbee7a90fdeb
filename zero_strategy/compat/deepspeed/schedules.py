"""Learning-rate schedules under DeepSpeed's names, with its parameters and values (those of DeepSpeed 0.19.8).

    scheduler = WarmupLR(optimizer, warmup_max_lr=1e-3, warmup_num_steps=100)
    optimizer.step(); scheduler.step()

A schedule counts in `last_batch_iteration` (n below): -1 when it is made, then one more with each `step()`. Values are
functions of n alone, so that n is all of `state_dict()`. One value is for all param groups; a list has one per group.

Sources: Smith, "A disciplined approach to neural network hyper-parameters", 2018 (range test, one cycle).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.config.deepspeed.settings import OTHER_WARMUPS, WARMUP_TYPES

Values = float | Sequence[float]
"""One value for all param groups, or one for each."""


class BatchSchedule:
    """Base that the schedules share: `step()` sets the learning rates that `get_lr()` gives.

    Args:
        optimizer: The optimizer whose groups get learning rates.
        last_batch_iteration: Where to begin; -1 also sets the first learning rates.

    Raises:
        TypeError: If it is no torch optimizer.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a schedule takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] = [group["lr"] for group in optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """The learning rate of every param group at the present iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """The learning rates that were set last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next iteration, or to the given one, and set the learning rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr()):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(float(lr))
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """{"last_batch_iteration": n}"""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there. The groups' learning rates come with the optimizer's state."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._last_lr = self.get_lr()

    def _per_group(self, values: Values, name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if not isinstance(values, (list, tuple)):
            return [values] * count  # type: ignore[list-item]
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} values, the optimizer {count} param groups")
        return list(values)


class LRRangeTest(BatchSchedule):
    """The learning rate grows without end: min_lr * (1 + step_rate * (n + 1) / step_size).

    Args:
        optimizer: The optimizer.
        lr_range_test_min_lr: Where it starts.
        lr_range_test_step_size: Iterations per interval.
        lr_range_test_step_rate: What an interval adds, in units of the start.
        lr_range_test_staircase: Whole intervals only.
        last_batch_iteration: Where to begin.

    Raises:
        ValueError: If the step size is no positive integer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Values = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """One per group."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [lr * growth for lr in self.min_lr]


class OneCycle(BatchSchedule):
    """Up from the least learning rate to the greatest and back, momentum the other way round; then decay.

    Args:
        optimizer: The optimizer.
        cycle_min_lr: Learning rate at both ends of the cycle.
        cycle_max_lr: Learning rate at its peak.
        decay_lr_rate: After the cycle: min_lr / (1 + rate * iterations / decay_step_size).
        cycle_first_step_size: Iterations of the way up.
        cycle_second_step_size: Iterations of the way down; None: as many.
        cycle_first_stair_count: Stairs on the way up; 0: none, a slope.
        cycle_second_stair_count: Stairs on the way down; None: as many.
        decay_step_size: Iterations per decay interval; 0: no decay.
        cycle_momentum: Cycle the first of `betas` too; the second one then is 0.99. Needs an optimizer with betas.
        cycle_min_mom: Momentum at the peak, and of the first step, before any `step()`.
        cycle_max_mom: Momentum at both ends.
        decay_mom_rate: After the cycle: max_mom * (1 + rate * iterations / decay_step_size).
        last_batch_iteration: Where to begin.

    Raises:
        ValueError: If a half of the cycle has no length that makes sense.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Values,
        cycle_max_lr: Values,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Values = 0.8,
        cycle_max_mom: Values = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.up = cycle_first_step_size
        self.down = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if self.up <= 0 or self.down < 0:
            raise ValueError(
                f"cycle_first_step_size must be positive and cycle_second_step_size not negative, not {self.up} and "
                f"{self.down}"
            )
        self.up_stairs = cycle_first_stair_count
        self.down_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn(f"cycle_momentum: {type(optimizer).__name__} has no betas to cycle; left alone", stacklevel=2)
        if last_batch_iteration == -1:
            self._apply()

    @property
    def total_size(self) -> int:
        """Iterations of the cycle."""
        return self.up + self.down

    def get_lr(self) -> list[float]:
        """One per group."""
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        return [low / (1 + self.decay_lr_rate * self._decay_intervals()) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas, one pair per group; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [(high - (high - low) * height, 0.99) for low, high in zip(self.min_moms, self.max_moms)]
        return [(high * (1 + self.decay_mom_rate * self._decay_intervals()), 0.99) for high in self.max_moms]

    def _apply(self) -> None:
        super()._apply()
        betas = self.get_mom() or []
        if betas and self.last_batch_iteration < 0:  # so does DeepSpeed, although the cycle begins with the greatest
            betas = [(low, 0.99) for low in self.min_moms]
        for group, pair in zip(self.optimizer.param_groups, betas):
            group["betas"] = pair

    def _height(self) -> float:
        """0 at the ends of the cycle, 1 at its peak."""
        at = (self.last_batch_iteration + 1) % self.total_size
        distance, length, stairs = (
            (at, self.up, self.up_stairs) if at <= self.up else (self.total_size - at, self.down, self.down_stairs)
        )
        return math.floor(distance * stairs / length) / stairs if stairs > 0 else distance / length

    def _decay_intervals(self) -> float:
        if self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


class WarmupLR(BatchSchedule):
    """Rises from the least learning rate to the greatest in `warmup_num_steps` iterations, and stays there.

    The way up is log(n + 1) / log(warmup_num_steps), or n / warmup_num_steps. The first step, before any `step()`, is
    taken with the least learning rate.

    Args:
        optimizer: The optimizer.
        warmup_min_lr: Where it starts.
        warmup_max_lr: Where it ends; None: the groups' own learning rates.
        warmup_num_steps: Iterations of the way up (at least 2 are taken).
        warmup_type: "log" or "linear".
        last_batch_iteration: Where to begin.

    Raises:
        ValueError: If `warmup_num_steps` is no positive integer, or the type is neither.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.max_lrs = own if warmup_max_lr is None else self._per_group(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = _warmup_type(warmup_type)
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """One per group."""
        height = self._height(self.last_batch_iteration) if self.last_batch_iteration >= 0 else 0.0
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]

    def _height(self, n: int) -> float:
        """0 for the least, 1 for the greatest learning rate."""
        return _warmup(n, self.warmup_num_steps, self.warmup_type) if n < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """Rises as `WarmupLR`, then falls in a line, never below the least: (total - n) / (total - warmup_num_steps).

    Args:
        optimizer: The optimizer.
        total_num_steps: Iterations of the whole run.
        warmup_min_lr: Where it starts and ends.
        warmup_max_lr: The peak.
        warmup_num_steps: Iterations of the way up.
        warmup_type: "log" or "linear".
        last_batch_iteration: Where to begin.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _check_total(total_num_steps, self.warmup_num_steps)

    def _height(self, n: int) -> float:
        if n < self.warmup_num_steps:
            return super()._height(n)
        return max(0.0, (self.total_num_steps - n) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(BatchSchedule):
    """Factors of the groups' own learning rates: up from `warmup_min_ratio` to 1, down a cosine to `cos_min_ratio`.

    The first step, before any `step()`, is taken with learning rate 0.

    Args:
        optimizer: The optimizer, whose learning rates are the peak.
        total_num_steps: Iterations of the whole run; afterwards the least factor stays.
        warmup_min_ratio: First factor.
        warmup_num_steps: Iterations of the way up.
        cos_min_ratio: Last factor.
        warmup_type: "log" or "linear".
        last_batch_iteration: Where to begin.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _check_total(total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._apply()

    def get_lr_ratio(self) -> float:
        """The factor."""
        n = self.last_batch_iteration
        if n < 0:
            return 0.0
        if n < self.warmup_num_steps:
            height = _warmup(n, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * height
        part = (n - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        height = (1 + math.cos(math.pi * min(1.0, part))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[float]:
        """One per group."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


SCHEDULES = MappingProxyType(
    {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)
"""The schedules by name."""


def _warmup(n: int, steps: int, kind: str) -> float:
    return math.log(n + 1) / math.log(steps) if kind == "log" else n / steps


def _warmup_type(kind: str) -> str:
    if kind not in WARMUP_TYPES:
        raise ValueError(f"warmup_type must be {' or '.join(map(repr, WARMUP_TYPES))}, not {kind!r}. {OTHER_WARMUPS}")
    return kind


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return value


def _check_total(total: int, warmup: int) -> None:
    if total < warmup:
        warnings.warn(f"total_num_steps {total} is less than warmup_num_steps {warmup}", stacklevel=3)


# ---- the names of the parameters in a config ----

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"
