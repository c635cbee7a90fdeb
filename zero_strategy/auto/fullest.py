"""The fullest moment of a step: activations, what an engine makes and frees in it, and gaps between blocks.

Activations are at their most when a backward begins. The largest gradients of a model with tied embeddings come when
it ends, and with them the buffers of their reduction, so that the two do not add up. Where a head has weights of its
own, their gradient comes first, and they do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_strategy.auto.candidates import Candidate
from zero_strategy.auto.micro_batches import MicroBatchBytes
from zero_strategy.fsdp.backward import MAX_IN_FLIGHT
from zero_strategy.planning.buckets import facts_of
from zero_strategy.planning.ledger import Ledger
from zero_strategy.runtime.host_heap import is_mapped

_LATE = 0.25
"""Part of the activations that is left when a gradient comes that is said to be late."""
_OWN_BYTES = 16 << 20
"""Memory of a rank that no plan has: of an engine's objects, libraries' scratch memory, kernels that are made."""
MOST_OWN_BYTES = 32 << 20
"""The same, at most."""
_UNDER_WAY = MAX_IN_FLIGHT + 1
"""Units whose gradients are collected or on their way at once."""
_OF_MADE, _BETWEEN = 0.11, 1.15
"""Bytes by which glibc's heap grows beyond what is in it: of each byte of large blocks that a micro-batch makes, and of
each byte that an engine makes and frees where others come between, in steps of several micro-batches. A fit to 141
models, 3.8 % off (median, of models that it had not seen)."""
_OF_MADE_MAPPED, _NOT_AT_ONCE = 0.05, 0.24
"""Where blocks are mapped, the small ones' part, and the part of an engine's peaks that do not meet. A fit to 68
models, 3.1 % off."""
_AT_MOST, _AT_STAGE_3 = 3.0, 0.5
"""A bound, for each byte that comes and goes, and at stage 3 for each of the parameters. 200 models under limits kept
to it; one took 3.2 bytes for each of its activations, beside other reserves."""


class Gaps(NamedTuple):
    """Bytes of gaps between blocks.

    Attributes:
        expected: In the middle; less than none where other figures are bounds.
        most: At most, beside what is always kept free (`MOST_OWN_BYTES`).
    """

    expected: int
    most: int


def beside(candidate: Candidate, micro_batch: MicroBatchBytes, ledger: Ledger | None = None) -> int:
    """Bytes at the fullest moment beyond a ledger with all its peaks, gaps left out: a bound.

    Args:
        candidate: The way to train.
        micro_batch: Its activations.
        ledger: Default: the candidate's.
    """
    peaks = (candidate.ledger if ledger is None else ledger).peaks().only(tier="device")
    if not micro_batch.with_gradients:  # counted, and not seen
        return micro_batch.peak
    first = micro_batch.with_gradients - _handed(peaks)
    return max(0, first - _of_root(candidate), micro_batch.last) if _is_late(micro_batch) else max(0, first)


def expected(candidate: Candidate, micro_batch: MicroBatchBytes) -> int:
    """Bytes at the fullest moment beyond a ledger with all its peaks, as they are likely; less than none: below it.

    When the first units' gradients are on their way, the activations of these are gone. For the arguments see `beside`.
    """
    peaks = candidate.ledger.peaks().only(tier="device")
    whole, buckets = peaks.total.taken, peaks.only(category="gradient buckets")
    late, root = _is_late(micro_batch), _of_root(candidate)
    passing = max(0, buckets.total.taken - _handed(buckets) - root)
    early = whole - buckets.total.taken + (0 if late else root)  # gathered units, and the root's buffers
    done = min(1.0, _UNDER_WAY / max(1, len(candidate.plan.model.units) - 1))
    first = early + (micro_batch.with_gradients or micro_batch.peak)
    middle = early + passing + int(micro_batch.peak * (1 - done))
    last = whole + (micro_batch.last if late else 0)
    own = _OWN_BYTES if candidate.plan.device_type == "cpu" else 0
    return max(first, middle, last) - whole + gaps(candidate, micro_batch).expected + own


def to_come(candidate: Candidate, micro_batch: MicroBatchBytes) -> list[int]:
    """Bytes that are still to come after each unit's forward, those that the engine makes and frees among them."""
    # Gathered units are there when a forward ends.
    buckets = candidate.ledger.peaks().only(tier="device", category="gradient buckets").total.taken
    more = max(0, buckets + beside(candidate, micro_batch) - micro_batch.with_gradients)
    return [nbytes + more for nbytes in micro_batch.after_units]


def _handed(peaks: Ledger) -> int:
    """Bytes of gradients that autograd hands over, which a run without memory sees, too."""
    return sum(entry.taken for entry in peaks if entry.owner.unit == "autograd")


def _is_late(micro_batch: MicroBatchBytes) -> bool:
    """True if the root unit's large gradients come when activations are gone, as far as that is known."""
    return micro_batch.with_gradients > 0 and micro_batch.last <= _LATE * micro_batch.peak


def _of_root(candidate: Candidate) -> int:
    """Bytes of the buffers in which the root unit's gradients wait for their reduction."""
    plan = candidate.plan
    root = facts_of(plan.model, plan.resolved, plan.compute_dtype)[0]
    passing = [each for each in root if each.trainable and not each.keeps_full(candidate.config, plan.accumulation)]
    return sum(each.gradient_bytes for each in passing)


def gaps(candidate: Candidate, micro_batch: MicroBatchBytes, ledger: Ledger | None = None) -> Gaps:
    """Gaps in glibc's heap; none on a device, and few where blocks are mapped. For the arguments see `beside`."""
    if candidate.plan.device_type != "cpu":
        return Gaps(0, 0)
    peaks = (candidate.ledger if ledger is None else ledger).peaks().only(tier="device").total.taken
    if is_mapped(candidate.config.mmap_threshold):
        found = int(_OF_MADE_MAPPED * micro_batch.made - _NOT_AT_ONCE * peaks)
        return Gaps(found, max(0, found))
    moving = peaks + beside(candidate, micro_batch, ledger)
    expected = int(_OF_MADE * micro_batch.made + (_BETWEEN * peaks if candidate.accumulation > 1 else 0))
    most = _AT_MOST * moving
    if candidate.config.stage == 3:
        most += _AT_STAGE_3 * candidate.plan.model.parameters * (candidate.plan.compute_dtype or torch.float32).itemsize
    return Gaps(expected, max(expected, int(most)))
