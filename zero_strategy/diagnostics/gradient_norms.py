"""Norms of every parameter's gradient, from the pass that the norm of all takes anyway, and of its update.

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
from contextlib import contextmanager

import torch

from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.norm import GradientStats
from zero_strategy.pipeline_engine import PipelineEngine
from zero_strategy.sharding.parameters import ParameterBucket

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
        """Whether there is a norm to tell of."""
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
            return bucket.read_master(0, bucket.layout.slice_numel)
        if bucket.placement.shard_parameters:
            return bucket.read_shard(0, bucket.layout.slice_numel)
        return bucket.flat[bucket.slice]

    def _together(self, mine: Mapping[str, float], norm_type: float, prefix: str) -> dict[str, float]:
        total = dict(mine)
        for ranks in (self.engine.mesh.shard_control, self.engine.mesh.tensor):  # who has other parts of parameters
            total = _added((pair for part in ranks.gather_objects(total) for pair in part.items()), norm_type)
        names = [name for name, _ in self.engine.model.names() if name in total]
        root = 1.0 if math.isinf(norm_type) else 1.0 / norm_type
        found = {prefix + name: total[name] ** root for name in names}
        if isinstance(self.engine, PipelineEngine):  # other stages have other parameters
            found = {name: norm for part in self.engine.pipe.gather_objects(found) for name, norm in part.items()}
        return found


def _added(pairs: Iterator[tuple[str, float]], norm_type: float) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, value in pairs:
        if math.isinf(norm_type):
            total[name] = max(total.get(name, 0.0), value)
        else:
            total[name] = total.get(name, 0.0) + value
    return total
