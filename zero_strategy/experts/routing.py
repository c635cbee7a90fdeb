"""Tokens on their way to the experts that other ranks hold, and back.

    tokens of a rank      chosen experts (k of each)     rows sent, by expert     rows received, by rank and expert
    (tokens, width)  ->   (tokens, k)                ->  (tokens k, width)    ->  (received, width)

A row is a token for one of its experts. Rows go by an all-to-all of uneven parts, the results by another one the other
way, and gradients by the same two in the opposite order. Ranks tell each other first how many rows they have for each
expert, so that every rank knows where each message ends; backward needs no counts.

Elements that a rank sends, of rows for experts elsewhere: rows x width for each of the two directions, forward and
backward; and once (ranks - 1) x (experts + 4) counts and flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters, Communicator

_TO_EXPERTS, _FROM_EXPERTS = "tokens for experts", "results of experts"


@dataclass(frozen=True, eq=False)
class Route:
    """Ways of this rank's tokens to their experts, and of the others' to the experts here.

    Attributes:
        tokens: Number of this rank's.
        choices: Experts of each, k.
        order: Of each row sent: its place among the (tokens, k) choices, (rows,) int64.
        sent: Rows for each rank.
        received: Rows from each rank.
        most: Rows of the largest message between any two ranks.
        experts: Of each row received: its expert, counted from the first one here, (received,) int64.
        counts: Rows of all ranks for each expert, (experts,) int64, on the host.
    """

    tokens: int
    choices: int
    order: Tensor
    sent: list[int]
    received: list[int]
    most: int
    experts: Tensor
    counts: Tensor


class ExpertGroup:
    """A group of n ranks that divide the experts of each layer: equal numbers of neighbours.

    Args:
        group: Its process group, or a communicator of it; None: this rank alone.

    Attributes:
        size: Its ranks.
        rank: This one's number.
        counters: What this rank sent.
    """

    def __init__(self, group: dist.ProcessGroup | Communicator | None) -> None:
        self.ranks = group if isinstance(group, Communicator) else Communicator(group, CommunicationCounters())
        self.counters = self.ranks.counters
        self.size, self.rank = self.ranks.size, self.ranks.rank
        self._layers: dict[int, str] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroup:
        """Give a copy of a model the same ranks."""
        return self

    def know(self, layer: str) -> int:
        """Take note of a layer's name, for messages; returns the number that ranks compare."""
        number = crc32(layer.encode())
        self._layers[number] = layer
        return number

    def held(self, experts: int) -> range:
        """Numbers of the experts that this rank holds, of so many in all.

        Raises:
            ValueError: If the ranks do not divide them.
        """
        if experts % self.size:
            raise ValueError(f"{experts} experts cannot be divided among {self.size} ranks in equal numbers")
        each = experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def dispatch(self, tokens: Tensor, chosen: Tensor, experts: int, layer: str = "") -> tuple[Tensor, Route]:
        """Send tokens to their experts. A collective, with gradient.

        Args:
            tokens: (tokens, width); ranks may have different numbers, none included.
            chosen: Numbers of the experts of each token, (tokens, k) integers; `experts` stands for none: the choice
                is dropped.
            experts: Number of experts of the layer, over all ranks.
            layer: Its name, for messages; ranks that come with different layers are told.

        Returns:
            The rows for the experts here, (received, width), by rank, expert and token; and how they have come.

        Raises:
            RuntimeError: On all ranks, if they come with different layers.
            ValueError: On all ranks, if a number is out of range on one of them.
        """
        held, (count, choices) = self.held(experts), chosen.shape
        flat = chosen.reshape(-1).to(torch.int64)
        valid = (flat >= 0) & (flat <= experts)
        counted = torch.where(valid, flat, experts + 1)
        counts = flat.new_zeros(experts + 4).scatter_add_(0, counted, torch.ones_like(counted))
        number, learns = self.know(layer), torch.is_grad_enabled() and tokens.requires_grad
        counts[-2:] = counts.new_tensor([number, learns])
        table = self._tell(counts)
        self._check(table, experts, layer)
        # Stable, so that rows of an expert are in the order of the tokens; what is dropped comes last.
        order = torch.argsort(flat, stable=True)[: int(table[self.rank, :experts].sum())]
        rows = table[:, :experts].view(self.size, self.size, len(held)).sum(dim=2)
        here = table[:, held.start : held.stop]
        numbers = torch.arange(len(held)).repeat(self.size).repeat_interleave(here.reshape(-1))
        route = Route(
            count,
            choices,
            order,
            sent=rows[self.rank].tolist(),
            received=rows[:, self.rank].tolist(),
            most=int((rows - torch.diag(rows.diag())).max()),
            experts=numbers.to(tokens.device),
            counts=table[:, :experts].sum(dim=0),
        )
        rows_sent = tokens[order // choices]
        if table[:, -1].any() and not learns and torch.is_grad_enabled():
            # Other ranks send gradients back, and this one has to take part.
            rows_sent = rows_sent.detach().requires_grad_()
        arrived: Tensor = _Exchange.apply(rows_sent, None, self, route, True)
        return arrived, route

    def _check(self, table: Tensor, experts: int, layer: str) -> None:
        """Raise on all ranks alike if what they have told each other does not go together."""
        others = table[:, -2].tolist()
        if len(set(others)) > 1:
            named = [
                f"rank {rank} in {self._layers.get(number, 'another one')!r}" for rank, number in enumerate(others)
            ]
            raise RuntimeError(
                f"ranks of an expert group run different layers of experts: {', '.join(named)}. Experts of a layer get "
                "tokens of all ranks, so all run the same layers in the same order (no LayerDrop, no branches by data)"
            )
        wrong = [rank for rank, number in enumerate(table[:, experts + 1].tolist()) if number]
        if wrong:
            raise ValueError(
                f"the router of {layer or 'a layer'} chose experts that are not there on ranks {wrong} of the group: "
                f"numbers must be 0 to {experts - 1}, or {experts} for a choice that is dropped"
            )

    def combine(self, results: Tensor, arrived: Tensor, weights: Tensor, route: Route) -> Tensor:
        """Bring results back and add them up, weighted, token by token. A collective, with gradient.

        Args:
            results: Of the rows received, (received, width).
            arrived: The rows, as `dispatch` gave them: gradients go back through them, whatever the experts did.
            weights: Of each token's choices, (tokens, k).
            route: Of `dispatch`.

        Returns:
            (tokens, width), in the dtype that results and weights have together.
        """
        returned: Tensor = _Exchange.apply(results, arrived, self, route, False)
        width = results.shape[1]
        rows = returned.new_zeros(route.tokens * route.choices, width).index_copy(0, route.order, returned)
        return (rows.view(route.tokens, route.choices, width) * weights.unsqueeze(-1)).sum(dim=1)

    def _tell(self, counts: Tensor) -> Tensor:
        """Counts of all ranks, (ranks, n), on the host."""
        if counts.is_cpu or self.ranks.numbers_on is None:
            return torch.stack(self.ranks.all_gather_small(counts.cpu(), _TO_EXPERTS))
        everyone = self.ranks.all_gather_numbers(counts.double(), _TO_EXPERTS)
        return self.ranks.to_host(everyone).to(torch.int64)

    def exchange(self, rows: Tensor, sent: list[int], received: list[int], most: int, of: str) -> Tensor:
        """Rows from all ranks, in their order, while these rows go to them."""
        rows, width = rows.contiguous(), rows.shape[1]
        arriving = rows.new_empty(sum(received), width)
        outgoing, incoming = rows.split(sent), arriving.split(received)
        flat_out, flat_in = ([part.reshape(-1) for part in parts] for parts in (outgoing, incoming))
        pending = self.ranks.all_to_all(flat_out, flat_in, most * width, of)
        incoming[self.rank].copy_(outgoing[self.rank])
        pending.wait()
        return arriving


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts, or back; the gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, arrived: Tensor | None, group: ExpertGroup, route: Route, to_experts: bool
    ) -> Tensor:
        ctx.group, ctx.route, ctx.to_experts = group, route, to_experts
        return _exchange(rows, group, route, to_experts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Gradients of rows that nobody used are zeros here, so that every rank takes part.
        # By a function with a backward of its own, for gradients of gradients.
        gradient = _Exchange.apply(grads[0], None, ctx.group, ctx.route, not ctx.to_experts)
        return gradient, None, None, None, None


def _exchange(rows: Tensor, group: ExpertGroup, route: Route, to_experts: bool) -> Tensor:
    if to_experts:
        return group.exchange(rows, route.sent, route.received, route.most, _TO_EXPERTS)
    return group.exchange(rows, route.received, route.sent, route.most, _FROM_EXPERTS)
