"""The ledger: every long-lived buffer of a rank, with category, owner, tier, bytes asked and bytes taken.

What an engine holds (`ZeroEngine.ledger()`) and what a plan foresees (`MemoryPlan.ledger`) are both ledgers, so that
they can be compared entry by entry.

    asked   bytes of the elements themselves
    taken   bytes of memory: with alignment and padding of the buckets, and what the allocator rounds up to
    held    lives from step to step; a *peak* lives inside a step only, and is given at its largest
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from zero_strategy.runtime.terminal import size, table

Category = Literal[
    "parameters",
    "gradients",
    "master weights",
    "optimizer state",
    "buffers",
    "gather buffers",
    "gradient buckets",
    "staging",
    "snapshot",
    "copies",
    "communication",
    "handles",
    "averages",
    "activations",
]
"""`gather buffers`: units that are whole under stage 3. `gradient buckets`: local gradients on their way into slices.
`staging`: between tiers. `snapshot`: of a checkpoint being saved. `copies`: of the last two
steps, in memory files that outlive the process (`survive`). `handles`: what stands for released parameters and
gradients. `averages`: running averages of the weights (EMA, SWA)."""

Tier = Literal["device", "host", "nvme"]
"""`device`: where the module computes (its own memory, or the host's when it trains on the CPU)."""

CATEGORIES: tuple[Category, ...] = get_args(Category)
TIERS: tuple[Tier, ...] = get_args(Tier)

_CUDA_BLOCK = 512
"""torch's CUDA allocator hands out multiples of this."""


def allocated(nbytes: int, device_type: str) -> int:
    """Bytes that one tensor of `nbytes` takes from the allocator of a device ("cpu", "cuda")."""
    return -(-nbytes // _CUDA_BLOCK) * _CUDA_BLOCK if device_type == "cuda" else nbytes


class Owner(NamedTuple):
    """Owner of the buffer."""

    unit: str
    """Module name of the unit ("" for the root), or another user of memory, such as "reduce"."""
    names: tuple[str, ...] = ()
    """Names of the bucket's parameters."""


COMMUNICATORS = Owner("communicators")
"""Memory of a GPU that NCCL takes for an engine's groups, beside torch's allocator."""


DEQUANTISED = Owner("a dequantised weight")
"""Values that a layer with a quantised weight computes with, for as long as it does."""


class Bytes(NamedTuple):
    """A sum over entries."""

    asked: int
    taken: int

    def __add__(self, other: object) -> Bytes:
        if not isinstance(other, Bytes):
            return NotImplemented
        return Bytes(self.asked + other.asked, self.taken + other.taken)


@dataclass(frozen=True)
class Entry:
    """One buffer, or several of one owner, category and tier.

    Attributes:
        category: What it holds.
        tier: Where it lies.
        owner: Whose it is.
        asked: Bytes of the elements.
        taken: Bytes of memory.
        peak: Lives inside a step only.
    """

    category: Category
    tier: Tier
    owner: Owner
    asked: int
    taken: int
    peak: bool = False

    def __post_init__(self) -> None:
        assert self.category in CATEGORIES and self.tier in TIERS
        assert 0 <= self.asked <= self.taken or self.taken == 0, (self.category, self.asked, self.taken)


Key = Literal["category", "tier", "unit", "peak"]


class Ledger:
    """Entries of one rank, added up by any key.

    Args:
        entries: Entries; those of zero bytes are left out.
        device_type: Of the device tier: "cpu" where it is the host's memory.
    """

    def __init__(self, entries: Iterable[Entry] = (), device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._entries: list[Entry] = []
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Enter a buffer."""
        if entry.asked or entry.taken:
            self._entries.append(entry)

    def add_tensor(self, category: Category, tier: Tier, owner: Owner, tensor: Tensor, asked: int) -> None:
        """Enter a tensor by the size of its storage."""
        nbytes = allocated(tensor.untyped_storage().nbytes(), tensor.device.type)
        self.add(Entry(category, tier, owner, min(asked, nbytes), nbytes))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def held(self) -> Ledger:
        """Entries that live from step to step."""
        return Ledger((entry for entry in self if not entry.peak), self.device_type)

    def peaks(self) -> Ledger:
        """Entries that live inside a step only, each at its largest."""
        return Ledger((entry for entry in self if entry.peak), self.device_type)

    def only(self, *, category: Category | None = None, tier: Tier | None = None) -> Ledger:
        """The entries of a category, of a tier."""
        chosen = [e for e in self if category in (None, e.category) and tier in (None, e.tier)]
        return Ledger(chosen, self.device_type)

    @property
    def total(self) -> Bytes:
        """All entries together."""
        return sum((Bytes(entry.asked, entry.taken) for entry in self), Bytes(0, 0))

    def sums(self, *keys: Key) -> dict[tuple[Any, ...], Bytes]:
        """Bytes by the given keys, in the order of first appearance; categories and tiers in their own order."""
        found: dict[tuple[Any, ...], Bytes] = {}
        for entry in sorted(self, key=lambda entry: (TIERS.index(entry.tier), CATEGORIES.index(entry.category))):
            key = tuple(entry.owner.unit if name == "unit" else getattr(entry, name) for name in keys)
            found[key] = found.get(key, Bytes(0, 0)) + Bytes(entry.asked, entry.taken)
        return found

    def tier_bytes(self, tier: Tier) -> int:
        """Bytes taken in a tier, peaks included."""
        return self.only(tier=tier).total.taken

    def merged(self) -> list[Entry]:
        """One entry per owner, category, tier and lifetime, in a fixed order: what two ledgers are compared by."""
        found: dict[tuple[Any, ...], Bytes] = {}
        for entry in self:
            key = (TIERS.index(entry.tier), CATEGORIES.index(entry.category), entry.owner, entry.peak)
            found[key] = found.get(key, Bytes(0, 0)) + Bytes(entry.asked, entry.taken)
        return [
            Entry(CATEGORIES[category], TIERS[tier], owner, *found[tier, category, owner, peak], peak)
            for tier, category, owner, peak in sorted(found)
        ]

    def to_json(self, *, entries: bool = True) -> dict[str, Any]:
        """Sums, and the entries themselves, of plain types."""
        made: dict[str, Any] = {
            "device_type": self.device_type,
            "tiers": {tier: self.only(tier=tier).total._asdict() for tier in TIERS},
            "sums": [
                {"tier": tier, "category": category, "peak": peak, **total._asdict()}
                for (tier, category, peak), total in self.sums("tier", "category", "peak").items()
            ],
        }
        if entries:
            made["entries"] = [asdict(entry) | {"owner": entry.owner._asdict()} for entry in self.merged()]
        return made

    def table(self, *keys: Key) -> str:
        """Columns of text: the keys (default: tier, category, whether it is a peak), bytes asked and taken."""
        keys = keys or ("tier", "category", "peak")
        rows = [
            (*(_cell(name, value) for name, value in zip(keys, key)), size(total.asked), size(total.taken))
            for key, total in self.sums(*keys).items()
        ]
        rows.append(("total", *[""] * (len(keys) - 1), size(self.total.asked), size(self.total.taken)))
        header = (*("lives" if name == "peak" else name for name in keys), "asked", "taken")
        return table(rows, header, right=(len(keys), len(keys) + 1))


def _cell(name: Key, value: Any) -> str:
    if name == "peak":
        return "inside a step" if value else "always"
    return value or "(root)"
