"""Norms of every parameter's gradient and update.

norms = ParameterNorms(engine)
engine.clip_grad_norm_(1.0)
logger.log_metrics(norms.gradients())            # all ranks: {"zero/gradient_norm/blocks.0.up.weight": ...}

with norms.updates() as found:                   # on request: a copy of what this rank owns, and a pass over it
    optimizer.step()
logger.log_metrics(found)                        # {"zero/update_norm/...": ...}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.optim.grad_norm import GradientStats
from zero_strategy.pipeline.engine import PipelineEngine

GRADIENT, UPDATE = "zero/gradient_norm/", "zero/update_norm/"
"""What names for loggers begin with."""


class ParameterNorms:
    """Keeps what the last norm of gradients found, on each rank for its own parts.

    Args:
        engine: The engine; the norm is taken by `clip_grad_norm_` or `grad_norm`.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine
        self._last: GradientStats | None = None
        engine.gradient_watchers.append(self._look)

    def close(self) -> None:
        """Look no more."""
        self.engine.gradient_watchers.remove(self._look)

    def _look(self, stats: GradientStats) -> None:
        self._last = stats  # read when asked for, so that a GPU is not waited for in every step

    @property
    def taken(self) -> bool:
        """True if there is a norm to tell of."""
        return self._last is not None

    def forget(self) -> None:
        """Tell of norms to come only."""
        self._last = None

    def gradients(self) -> dict[str, float]:
        """The norm of each parameter's mean gradient before clipping, on every rank. A collective of one message.

        Returns:
            By name, those without gradient left out; empty before the first norm.
        """
        if self._last is None:
            return {}
        sums = _added(zip(self._last.names, self._last.sums.tolist(), strict=True), self._last.norm_type)
        return self._together(sums, self._last.norm_type, GRADIENT)

    @contextmanager
    def updates(self) -> Iterator[dict[str, float]]:
        """Measure by how much a step inside the block moves each parameter (2-norm). A collective at its end.

        Yields:
            A mapping by name that is filled at the end of the block, on every rank; what did not move has 0.
        """
        self.engine.model.follow_edits()
        before = [self._owned(bucket).clone() for bucket in self.engine.model.buckets]
        found: dict[str, float] = {}
        yield found
        sums: dict[str, float] = {}
        for bucket, old in zip(self.engine.model.buckets, before, strict=True):
            gap = self._owned(bucket).double() - old.double()
            for piece in bucket.slice_pieces:
                part = gap[piece.offset : piece.offset + piece.numel]
                if bucket.parts[piece.index].counts:
                    sums[bucket.names[piece.index]] = float(part.square().sum())
        found.update(self._together(sums, 2.0, UPDATE))

    def _owned(self, bucket: ParameterBucket) -> torch.Tensor:
        """This rank's slice of a bucket, at every stage; of the master weights where they are divided alike."""
        if bucket.placement.shard_optimizer and bucket.has_master:
            return bucket.master.read(0, bucket.layout.slice_numel)
        if bucket.placement.shard_parameters:
            return bucket.shard.read(0, bucket.layout.slice_numel)
        return bucket.flat[bucket.slice]

    def _together(self, mine: Mapping[str, float], norm_type: float, prefix: str) -> dict[str, float]:
        total = dict(mine)
        for ranks in (self.engine.mesh.shard_control, self.engine.mesh.tensor):  # who has other parts of parameters
            total = _added((pair for part in ranks.all_gather_objects(total) for pair in part.items()), norm_type)
        names = [name for name, _ in self.engine.model.names() if name in total]
        root = 1.0 if math.isinf(norm_type) else 1.0 / norm_type
        found = {prefix + name: total[name] ** root for name in names}
        if isinstance(self.engine, PipelineEngine):  # other stages have other parameters
            found = {name: norm for part in self.engine.pipe.all_gather_objects(found) for name, norm in part.items()}
        return found


def _added(pairs: Iterator[tuple[str, float]], norm_type: float) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, value in pairs:
        if math.isinf(norm_type):
            total[name] = max(total.get(name, 0.0), value)
        else:
            total[name] = total.get(name, 0.0) + value
    return total


@dataclass(frozen=True)
class NormSettings:
    """Measurements, and their interval.

    Attributes:
        every_n_steps: Optimizer steps from one that is measured to the next; the first one is.
        gradients: The norms of gradients, before clipping.
        updates: By how much parameters move: a copy of what each rank owns, and a pass over it.

    Raises:
        ValueError: If there is nothing to measure, or the number of steps is less than 1.
    """

    every_n_steps: int = 50
    gradients: bool = True
    updates: bool = False

    def __post_init__(self) -> None:
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is {self.every_n_steps}; accepted: 1 or more")
        if not (self.gradients or self.updates):
            raise ValueError("neither gradients nor updates are to be measured: set one of them")


class NormLog:
    """Measures around the steps whose turn it is; the others cost next to nothing. All ranks call it alike.

    Args:
        engine: Of the model.
        settings: What is measured.
    """

    def __init__(self, engine: ZeroEngine, settings: NormSettings) -> None:
        self.engine, self.settings = engine, settings
        self._norms = ParameterNorms(engine)
        self._found: dict[str, float] = {}
        self._moved: dict[str, float] = {}
        self._moving = ExitStack()
        self._is_moving = False

    @property
    def due(self) -> bool:
        """True if the next step is to be measured."""
        return self.engine.steps.taken % self.settings.every_n_steps == 0

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Measure gradients and where parameters are. A collective.

        The norms are those of the pass that clipping has taken, before it; else a pass is taken here. Nothing is
        measured of a step that fp16 skips.

        Args:
            optimizer: That is about to step; None: all.
        """
        if not self.due or any(sharded.skip_next for sharded in self.engine.optimizers):
            self._norms.forget()
            return
        if self.settings.gradients:
            if not self._norms.taken:
                self.engine.grad_norm(optimizer=optimizer)
            self._found |= self._norms.gradients()
        self._norms.forget()
        if self.settings.updates and not self._is_moving:
            self._moved = self._moving.enter_context(self._norms.updates())
            self._is_moving = True

    def after_step(self) -> dict[str, float]:
        """Measurements by name, on every rank; empty where no step was. A collective if updates are measured."""
        self._moving.close()
        self._is_moving = False
        self._norms.forget()  # clipping may come after `before_step`
        found, self._found, self._moved = {**self._found, **self._moved}, {}, {}
        return found

    def drop(self) -> None:
        """Forget what was begun: a step ended with an exception. No collective."""
        self._moving.pop_all()
        self._is_moving, self._found, self._moved = False, {}, {}
        self._norms.forget()

    def close(self) -> None:
        """Measure no more. No collective."""
        self.drop()
        self._norms.close()
