"""Totals of a norm over all ranks: powers of all elements added up, and how many elements are not finite.

On the host ranks tell each other their totals in messages. Where an engine is on a GPU nothing comes to the host before
all ranks' totals are there: they go by the device's own collective on the computing stream, axis after axis of the
mesh, and one copy brings them, with this rank's own sums part by part. Nothing is added up on the way: the host does
it, the ranks of an axis in their order and one axis after the other. So the bits are those of messages.

Exact totals (`optim.exact_sum`) are digits in the place of one number, in as many messages: float64 adds them exactly.

An axis whose ranks no collective of the device connects goes by messages, as do those after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from zero_strategy.comm.collectives import Communicator
from zero_strategy.optim.exact_sum import added, nearly, rounded
from zero_strategy.optim.power_sums import (
    Shard,
    exact_counts,
    exact_power_sums,
    exact_power_sums_there,
    power_sums,
    power_sums_there,
)

SUBJECT = "the gradient norm"
"""Of the collectives, for the watchdog's reports."""
Look = Callable[[Tensor, Tensor], None]
"""Takes the sums of this rank's parts, and how many values of each are not finite."""


def norm_totals(
    shards: Sequence[Shard],
    norm_type: float,
    groups: Sequence[Communicator],
    factors: Sequence[float],
    look: Look | None = None,
    *,
    exact: bool = False,
) -> tuple[float, bool]:
    """Sum of |x| ** norm_type (inf: the largest |x|) over all ranks, and whether every x is finite. A collective.

    Args:
        shards: This rank's parts.
        norm_type: p.
        groups: Axes of the mesh over which parts are spread.
        factors: What each part is to be multiplied by first.
        look: See `Look`.
        exact: Round the total once, so that it does not depend on how parts are divided.
    """
    exact = exact and not math.isinf(norm_type)  # a maximum is
    spread = [group for group in groups if group.size > 1]
    by_device = list(takewhile(lambda group: group.numbers_on is not None, spread))
    if by_device:
        found, sums, counts = _OnDevice(shards, norm_type, by_device, factors, exact=exact).totals()
    else:
        found, sums, counts = _on_host(shards, norm_type, factors, exact=exact)
    if look is not None:
        look(sums, counts)
    # One axis of the mesh after the other: what one has added up is a rank's part on the next.
    for group in spread[len(by_device) :]:
        found = _added(torch.stack(group.all_gather_small(found, SUBJECT)), math.isinf(norm_type))
    return rounded(found[:-1]) if exact else float(found[0]), float(found[-1]) == 0


def _on_host(
    shards: Sequence[Shard], norm_type: float, factors: Sequence[float], *, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's total and count, and those of its parts."""
    if exact:
        digits, counts = exact_power_sums(shards, norm_type, factors)
        total, sums = added(digits).double(), nearly(digits)
    else:
        sums, counts = power_sums(shards, norm_type)
        weights, bad = _weights(factors, norm_type)
        sums, counts = sums * weights, counts + bad
        total = _total(sums, norm_type).reshape(1)
    return torch.cat([total, counts.sum().double().reshape(1)]), sums, counts


def _weights(factors: Sequence[float], norm_type: float) -> tuple[Tensor, Tensor]:
    """Factors of sums of powers, which save a pass over the gradients, and which of them are not finite.

    A factor that is not finite makes all values of its part so.
    """
    scales = torch.tensor(factors, dtype=torch.float64).abs()
    return scales if math.isinf(norm_type) else scales**norm_type, ~torch.isfinite(scales)


def _total(sums: Tensor, norm_type: float) -> Tensor:
    # A rank may have no part, and torch refuses the maximum of nothing.
    return sums.max() if math.isinf(norm_type) and len(sums) else sums.sum()


def _added(values: Tensor, is_max: bool) -> Tensor:
    """Total (or digits of it) and count of an axis, from those of its ranks in their order."""
    summed = values.sum(dim=0)
    return torch.stack([values[:, 0].amax(), summed[1]]) if is_max else summed


class _OnDevice:
    """One norm whose parts are, but for those in tiers, on the GPU."""

    def __init__(
        self,
        shards: Sequence[Shard],
        norm_type: float,
        groups: Sequence[Communicator],
        factors: Sequence[float],
        *,
        exact: bool,
    ) -> None:
        self._norm_type, self._groups, self._exact = norm_type, groups, exact
        device = groups[0].numbers_on
        assert device is not None
        self._device = device
        there = {i: shard for i, shard in enumerate(shards) if isinstance(shard, Tensor) and shard.device == device}
        self._there, self._tensors = list(there), list(there.values())
        self._rest = [index for index in range(len(shards)) if index not in there]
        self._factors = factors
        # First what the host waits for, and then what is queued: those parts have been read, or are on their way.
        own_factors = [factors[index] for index in self._rest]
        self._rest_found = _on_host([shards[index] for index in self._rest], norm_type, own_factors, exact=exact)

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Total and count of all ranks of these axes; sums and counts of this rank's parts."""
        factors = [self._factors[index] for index in self._there]
        weights, bad = _weights(factors, self._norm_type)
        if self._exact:
            sums, counts = exact_power_sums_there(self._tensors, self._norm_type, factors, self._device)
            exact = False
            both = self._up(torch.stack([weights, bad.double()])) if bool(bad.any()) else None
        else:
            sums, counts, exact = power_sums_there(self._tensors, self._norm_type, self._device)
            uneven = bool(bad.any()) or bool((weights != 1.0).any())
            both = self._up(torch.stack([weights, bad.double()])) if uneven else None
            sums = sums if both is None else sums * both[0]
        found, guessed, own_sums, own_counts = self._exchange(sums, counts, both, guesses=not exact)
        if guessed:
            # Some rank's sums are not finite, and it has not counted whether its elements are: all come here together.
            unsure = [] if exact else own_counts.nonzero().flatten().tolist()
            counts = counts if exact else exact_counts(self._tensors, unsure, counts)
            found, _, own_sums, own_counts = self._exchange(sums, counts, both, guesses=False)
        return found, self._in_place(own_sums, self._rest_found[1]), self._in_place(own_counts, self._rest_found[2])

    def _exchange(
        self, sums: Tensor, counts: Tensor, both: Tensor | None, *, guesses: bool
    ) -> tuple[Tensor, bool, Tensor, Tensor]:
        """Total and count of all ranks, whether a count is a guess; this rank's sums and counts, now on the host."""
        is_max = math.isinf(self._norm_type)
        flags = counts.sum().double()
        each = counts.double() if both is None else counts.double() + both[1]
        total = added(sums).double() if self._exact else _total(sums, self._norm_type).reshape(1)
        count, guess = each.sum().reshape(1), (flags if guesses else torch.zeros_like(flags)).reshape(1)
        if self._rest:
            rest = self._up(self._rest_found[0])
            total = torch.maximum(total, rest[:-1]) if is_max else total + rest[:-1]
            count = count + rest[-1:]
        own = torch.cat([total, count, guess])
        rows = own
        for group in self._groups:
            rows = group.all_gather_numbers(rows, SUBJECT)
        # The only wait of the host, for what is queued on the device, and so for the ranks of all these axes.
        seen = nearly(sums) if self._exact else sums
        here = self._groups[-1].to_host(torch.cat([seen, each, rows.reshape(-1)]))
        parts = len(self._tensors)
        everyone = here[2 * parts :].view(rows.shape)
        found = _folded(everyone[..., :-1], is_max)
        return found, bool(everyone[..., -1].any()), here[:parts], here[parts : 2 * parts].to(torch.int64)

    def _up(self, values: Tensor) -> Tensor:
        """A few numbers of the host, on the device, without waiting for it."""
        return torch.empty(values.shape, dtype=values.dtype, device=self._device).copy_(values, non_blocking=True)

    def _in_place(self, there: Tensor, rest: Tensor) -> Tensor:
        """Values of the parts, in the order of all parts."""
        if not self._rest:
            return there
        found = torch.zeros(len(self._there) + len(self._rest), dtype=there.dtype)
        found[self._there], found[self._rest] = there, rest.to(there.dtype)
        return found


def _folded(everyone: Tensor, is_max: bool) -> Tensor:
    """Total and count from those of all ranks: (..., second axis, first axis, numbers)."""
    if everyone.dim() > 2:
        everyone = torch.stack([_folded(one, is_max) for one in everyone])
    return _added(everyone.contiguous(), is_max)
