"""Time of a step of a candidate, under the roof of a machine.

    step = micro-batches x (forward and backward, and what is computed again)
         + gathers and reductions, as many as the stage and its settings ask for
         + optimizer's step
         + tiers

Where ranks compute on the cores that also send (CPUs), times add up. Where a device has engines of its own for it,
gathers and reductions of all but the first and the last unit hide behind the computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_strategy.auto.candidates import Candidate
from zero_strategy.auto.roof import Roof
from zero_strategy.planning.buckets import BucketFacts, facts_of

_HIDDEN = 0.8
"""Part of a computation behind which a device hides what it sends."""


@dataclass(frozen=True)
class Seconds:
    """Parts of a step's time.

    Attributes:
        compute: Forwards, backwards, and what is computed again.
        exchange: Gathers and reductions that nothing hides.
        step: The optimizer's.
        tiers: What is read and written beyond that.
    """

    compute: float
    exchange: float
    step: float
    tiers: float

    @property
    def total(self) -> float:
        """All of a step."""
        return self.compute + self.exchange + self.step + self.tiers


def gathers_of(candidate: Candidate) -> int:
    """Number of times that a step brings all parameters to a rank."""
    config = candidate.config
    if config.stage == 0 or candidate.plan.resolved.shard == 1:
        return 0
    if config.stage < 3 or not config.reshard_after_backward:
        return 1
    return candidate.accumulation * (2 if config.reshard_after_forward else 1)


def seconds_of(candidate: Candidate, micro_batch: float, roof: Roof) -> Seconds:
    """The time of a step.

    Args:
        candidate: The way to train.
        micro_batch: Seconds of forward and backward of one.
        roof: Of the slowest rank.
    """
    plan, config = candidate.plan, candidate.config
    buckets = [bucket for unit in facts_of(plan.model, plan.resolved, plan.compute_dtype) for bucket in unit]
    ranks = plan.resolved.shard * config.mesh.replicate
    compute = candidate.accumulation * micro_batch
    exchange = 0.0
    if ranks > 1:
        away = 1 - 1 / ranks
        parameters = away * sum(bucket.elements * bucket.gathered_itemsize for bucket in buckets)
        gradients = away * sum(bucket.elements * bucket.reduce_dtype.itemsize for bucket in buckets if bucket.trainable)
        times = candidate.accumulation if config.gradient_reduction == "per_micro_batch" else 1
        gathered = gradients if config.stage == 0 else gathers_of(candidate) * parameters
        exchange = (gathered + times * gradients) / roof.link
        if plan.device_type != "cpu":
            exchange = max(exchange - _HIDDEN * compute, exchange * (1 - _HIDDEN) / len(buckets))
    stepped = sum(_stepped_bytes(candidate, bucket) for bucket in buckets if bucket.trainable)
    on_host = plan.device_type != "cpu" and plan.offload.optimizer != "none"
    step = stepped / (roof.host if on_host else roof.memory)
    if on_host:
        owned = sum(bucket.elements for bucket in buckets if bucket.trainable) / plan.resolved.shard
        step += owned * 2 * buckets[0].dtype.itemsize / roof.bus  # gradients down, weights up
    added = (candidate.accumulation - 1) * 3 * sum(bucket.gradient_bytes for bucket in buckets) / roof.memory
    return Seconds(compute + added, exchange, step, max(0.0, _tier_seconds(candidate, roof) - step))


def _stepped_bytes(candidate: Candidate, bucket: BucketFacts) -> float:
    """Bytes that a rank reads and writes in an optimizer's step on a bucket."""
    plan = candidate.plan
    owned = bucket.elements / (1 if candidate.config.stage == 0 else plan.resolved.shard)
    moments = plan.optimizer.moments * (1 if bucket.state_bits[0] == 8 else 4)
    weights = bucket.dtype.itemsize + (4 if bucket.master else 0)
    return owned * (2 * moments + 2 * weights + bucket.gradient_dtype.itemsize)


def _tier_seconds(candidate: Candidate, roof: Roof) -> float:
    """Time in which drives take and give what a step asks them for, for all ranks of a host."""
    ledger, per_host = candidate.ledger, candidate.plan.ranks_per_host
    by = {key[0]: total.asked for key, total in ledger.only(tier="nvme").sums("category").items()}
    states = sum(by.get(name, 0) for name in ("optimizer state", "master weights", "averages"))
    gradients, parameters = by.get("gradients", 0), by.get("parameters", 0)
    read = states + gradients * candidate.accumulation + parameters * (1 + 2 * candidate.accumulation)
    written = states + gradients * candidate.accumulation + parameters
    if not (read or written):
        return 0.0
    if not (roof.read and roof.write):
        return math.inf  # nothing can be written there
    return per_host * (read / roof.read + written / roof.write)
