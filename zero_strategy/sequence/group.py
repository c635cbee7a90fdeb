"""Ranks that divide the tokens of the same sequences, and which tokens each has.

Ranks are laid out as `ring` x `ulysses`. The ring divides a sequence into 2 x ring chunks, of which its member r has
chunks r and 2 ring - 1 - r: under a causal mask all members then have the same number of scores to compute. The ranks
of a member divide its tokens among each other in order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters, Communicator


class SequenceGroup:
    """A group of n ranks that trains one sequence.

    Args:
        group: Its process group, or a communicator of it; None: this rank alone.
        ulysses: Ranks that exchange tokens for heads; the others pass keys and values round a ring. None: all of them.

    Attributes:
        size: Its ranks.
        rank: This one's number.
        ulysses: Ranks that divide the heads.
        ring: Members of the ring.
        counters: What this rank sent.
        used: Something was divided, or attended to.

    Raises:
        ValueError: If `ulysses` does not divide the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | Communicator | None, ulysses: int | None = None) -> None:
        self.ranks = group if isinstance(group, Communicator) else Communicator(group, CommunicationCounters())
        self.counters = self.ranks.counters
        self.size, self.rank = self.ranks.size, self.ranks.rank
        self.ulysses = self.size if ulysses is None else ulysses
        if self.ulysses < 1 or self.size % self.ulysses:
            raise ValueError(f"ulysses={ulysses}: must divide the {self.size} ranks of the group")
        self.ring = self.size // self.ulysses
        self.used = False

    def __getstate__(self) -> dict[str, Any]:
        """State for a worker of a loader, which knows whose tokens are where, and exchanges nothing."""
        return {name: value for name, value in vars(self).items() if name not in ("ranks", "counters")}

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceGroup:
        """Give a copy of a model the same ranks."""
        return self

    @property
    def member(self) -> int:
        """Number of this rank's member of the ring."""
        return self.rank // self.ulysses

    @property
    def peers(self) -> range:
        """Ranks of the same member, in the order of their tokens."""
        return range(self.member * self.ulysses, (self.member + 1) * self.ulysses)

    def check_used(self, origin: str) -> None:
        """Raise if there are several ranks, and each has computed whole sequences.

        Args:
            origin: Of the setting.

        Raises:
            ValueError: Naming the setting and the way out.
        """
        if self.size > 1 and not self.used:
            raise ValueError(
                f"mesh.sequence is {self.size} [{origin}], but no sequence was divided: the model is none of "
                "transformers, and neither calls zero_strategy.sequence.attention nor engine.sequence.split. Let it, "
                "or leave mesh.sequence at 1"
            )

    def neighbour(self, step: int) -> int:
        """The rank `step` members on in the ring, with the same heads."""
        return (self.rank + step * self.ulysses) % self.size

    @property
    def parts(self) -> int:
        """Length of sequences has to be a multiple of it."""
        return self.ulysses * (2 * self.ring if self.ring > 1 else 1)

    def positions(self, length: int, rank: int | None = None) -> Tensor:
        """Places of a rank's tokens (default: this one's) in the whole sequence, (length / size,) int64.

        Raises:
            ValueError: If the length cannot be divided.
        """
        if length % self.parts:
            raise ValueError(
                f"sequences of {length} tokens cannot be divided among {self.size} ranks (ulysses {self.ulysses}, ring "
                f"{self.ring}): pad them to a multiple of {self.parts}"
            )
        member, peer = divmod(self.rank if rank is None else rank, self.ulysses)
        places = torch.arange(length)
        if self.ring > 1:
            chunks = places.view(2 * self.ring, -1)
            places = torch.cat([chunks[member], chunks[2 * self.ring - 1 - member]])
        return places.view(self.ulysses, -1)[peer]

    def spans(self, member: int, tokens: int) -> list[tuple[int, int]]:
        """Places of the tokens of a member of the ring in the whole sequence; `tokens` is how many it has."""
        if self.ring == 1:
            return [(0, tokens)]
        chunk = tokens // 2
        return [(at * chunk, (at + 1) * chunk) for at in (member, 2 * self.ring - 1 - member)]

    def split(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that all ranks have whole.

        Raises:
            ValueError: If its length along `dim` cannot be divided.
        """
        self.used = True
        return whole.index_select(dim, self.positions(whole.shape[dim]).to(whole.device))

    @torch.no_grad()
    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """The whole of a tensor of which each rank has its tokens, on all ranks, without gradient. A collective."""
        dim %= part.dim()
        flat = part.new_empty(self.size * part.numel())
        flat.view(self.size, -1)[self.rank] = part.detach().movedim(dim, 0).reshape(-1)
        self.ranks.all_gather(flat, of="tokens").wait()
        length, others = part.shape[dim], [n for d, n in enumerate(part.shape) if d != dim]
        found = flat.view(self.size * length, *others)
        order = torch.cat([self.positions(self.size * length, rank) for rank in range(self.size)])
        whole = torch.empty_like(found)
        whole[order.to(part.device)] = found
        return whole.movedim(0, dim).contiguous()
