"""Facts that ranks tell each other before a save or a load: tensors of the whole model, states, frozen weights.

*Catalog*: a checkpoint is of the whole model: its files, their order and their header depend on the names, dtypes and
shapes of all tensors. Where ranks hold different parts, they tell each other; tensors then come in the order that the
whole model gives them, so that a checkpoint is the same whatever the model was divided into.

*Agreement before a save*: who holds which state, and whether anything hinders a rank. Between two saves hardly anything
changes but the step counts, which are the same everywhere. Then three numbers per rank say all; the tables themselves
travel when a rank's have changed.

*References*: frozen weights that a checkpoint names by their digest instead of holding them. The digest is linear in
the elements, so that ranks can add up those of their slices, whatever the slices are:

    digest = sum over elements i of (bits(i) + 1) * w(i mod 65536) * m(i div 65536)    modulo 2^64

Here `w` and `m` are odd numbers from the splitmix64 sequence (Steele, Lea, Flood, OOPSLA 2014). The digest tells other
weights from the right ones; it is no protection against an attacker.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from zero_strategy.checkpoint.contents import (
    OptimizerTable,
    States,
    own_table,
)
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.save_job import SavePlace
from zero_strategy.comm.store import FailedElsewhereError, together
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.runtime.torch_private import buffers_of, children_of, non_persistent_buffers, parameters_of

if TYPE_CHECKING:
    from zero_strategy.checkpoint.reader import StateReader
    from zero_strategy.train_state import TrainState


def state_dict_entries(module: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and objects of parameters and persistent buffers in the order of the module's state dict.

    Args:
        module: The root.
        tied: Give tied tensors under each of their names; else once, under the first.
    """
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            if tensor is None or key in non_persistent_buffers(module) or id(tensor) in seen:
                continue
            if not tied:
                seen.add(id(tensor))
            yield prefix + key, tensor
        for key, child in children_of(module).items():
            if child is not None:
                yield from visit(child, f"{prefix}{key}.")

    yield from visit(module, "")


Position = tuple[int, ...]
"""Where a tensor comes in the whole model's order."""


@dataclass(frozen=True)
class Catalog:
    """All tensors of a model.

    Attributes:
        weights: Parameters and persistent buffers, in the order of the whole model's state dict.
        aliases: Further names of tied tensors: {alias: first name}.
        frozen: Names of parameters that need no gradient.
    """

    weights: Sequence[TensorSpec]
    aliases: Mapping[str, str]
    frozen: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """First names, in order."""
        return [spec.name for spec in self.weights]

    def beside(self, more: Iterable[TensorSpec]) -> Catalog:
        """A table with further tensors, behind the others."""
        added = list(more)
        return Catalog([*self.weights, *added], self.aliases, self.frozen) if added else self

    def without(self, names: Collection[str]) -> Catalog:
        """A table with some tensors left out."""
        if not names:
            return self
        weights = [spec for spec in self.weights if spec.name not in names]
        aliases = {alias: name for alias, name in self.aliases.items() if name not in names}
        return Catalog(weights, aliases, self.frozen.difference(names))


def catalog_of(engine: TrainState) -> Catalog:
    """All tensors of the model that an engine trains, or trains a part of. A collective of the team if it is a part.

    Raises:
        TypeError: If a tensor's dtype cannot be stored.
        ValueError: If parts hold different tensors under one name.
    """
    if not engine.is_part:
        # An engine with the whole model sorts as well: its files are then those of a model that is divided.
        return _merged([_own(engine)], sort=engine.order is not None)
    control = engine.mesh.world_group.control
    # A dtype that cannot be stored is an error of all ranks; one that raised alone would leave them in the gather.
    return _merged(control.all_gather_objects(together(control, lambda: _own(engine))), sort=True)


def whole_shape(engine: TrainState, tensor: Tensor) -> tuple[int, ...]:
    """Shape of a parameter or buffer over all ranks that divide it."""
    return engine.model.part_of(tensor).shape if isinstance(tensor, nn.Parameter) else tuple(tensor.shape)


_Part = tuple[list[tuple[Position, TensorSpec]], dict[str, str], set[str]]


def _own(engine: TrainState) -> _Part:
    order = engine.order or (lambda name: ())
    entries = [
        (order(name), TensorSpec(name, tensor.dtype, whole_shape(engine, tensor)))
        for name, tensor in state_dict_entries(engine.module)
    ]
    frozen = {name for name, parameter in engine.model.names() if not parameter.requires_grad}
    return entries, dict(engine.aliases), frozen


def _merged(parts: Sequence[_Part], *, sort: bool) -> Catalog:
    found: dict[str, tuple[Position, TensorSpec]] = {}
    aliases, frozen = dict[str, str](), set[str]()
    for entries, others, still in parts:
        aliases |= others
        frozen |= still
        for position, spec in entries:
            known = found.setdefault(spec.name, (position, spec))[1]
            if known != spec:
                raise ValueError(f"parts of the model hold different tensors {spec.name!r}: {known} and {spec}")
    order = sorted(found.values(), key=lambda item: item[0]) if sort else list(found.values())
    return Catalog([spec for _, spec in order], aliases, frozenset(frozen))


def union_of_groups(engine: TrainState, groups: list[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """The param groups of an optimizer over all parts of a model. A collective of the team if there are several.

    Args:
        engine: Of this part.
        groups: This part's, with "params" as names.
        order: All names of the model.

    Raises:
        ValueError: If the parts' optimizers have other numbers of groups, or other hyper-parameters.
    """
    if not engine.is_part:
        return groups
    everyone = engine.mesh.world_group.control.all_gather_objects(groups)
    settings = [
        [{key: value for key, value in group.items() if key != "params"} for group in part] for part in everyone
    ]
    # The manifest has one list of groups for the whole model.
    for rank, theirs in enumerate(settings):
        if theirs != settings[0]:
            raise ValueError(
                f"the optimizers of pipeline stages must have the same param groups but for the parameters: rank 0 has "
                f"{settings[0]}, rank {rank} has {theirs}"
            )
    places = {name: place for place, name in enumerate(order)}
    members = [{name for part in everyone for name in part[number]["params"]} for number in range(len(groups))]
    return [{**group, "params": sorted(names, key=lambda name: places[name])} for group, names in zip(groups, members)]


# Bits of one number, so that the short exchange stays three numbers a rank.
_AS_BEFORE, _BUSY, _KNOWS_PLACE = 1, 2, 4


@dataclass(frozen=True)
class Agreed:
    """Findings that the ranks agreed on.

    Attributes:
        tables: Of each optimizer, all ranks' entries together.
        token: Names this save; equal on all ranks.
        references: Parameter name -> digest, of frozen weights that are not stored.
        known: Whether all ranks know the folder that the checkpoint goes into.
    """

    tables: list[OptimizerTable]
    token: str
    references: dict[str, str]
    known: bool


class Agreement:
    """The exchange before each save of one engine. A collective.

    Args:
        engine: The engine, or a weak proxy.
    """

    def __init__(self, engine: TrainState) -> None:
        self._engine = engine
        self._own: list[OptimizerTable] = []
        self._all: list[OptimizerTable] | None = None

    def reach(
        self,
        saved: list[ShardedOptimizer],
        states: list[States],
        place: SavePlace,
        *,
        frozen: Collection[str],
        busy: bool,
    ) -> Agreed:
        """Whatever is wrong on one rank is raised on all.

        Args:
            saved: The optimizers.
            states: This rank's state of each.
            place: Where the checkpoint goes.
            frozen: Parameters that are named by their digest.
            busy: Whether this rank still writes the checkpoint before.

        Raises:
            TypeError: Naming a state that cannot be stored.
            FailedElsewhereError: What is wrong on another rank.
            RuntimeError: A rank is busy, and the configuration does not let a save wait.
        """
        error, own, digests = None, list[OptimizerTable](), dict[str, int]()
        try:
            own = [own_table(self._engine, *each) for each in zip(saved, states, strict=True)]
            digests = own_digests(self._engine, frozen) if frozen else {}
        # Raised after the exchange: a rank that left before it would leave the others waiting there.
        except Exception as caught:
            error = caught
        # Digests of frozen weights add up over the ranks, and travel with the tables every time.
        as_before = error is None and not frozen and self._is_as_before(own)
        flags = _AS_BEFORE * as_before | _BUSY * busy | _KNOWS_PLACE * place.known
        # Random bits for the token, of which rank 0's count: 48 make 12 digits and fit into an int64.
        row = torch.tensor([flags, uuid.uuid4().int >> 80, _digest_of(own) if as_before else 0])
        rows = [row.tolist() for row in self._engine.mesh.world_group.control.all_gather_small(row)]
        if all(flags & _AS_BEFORE for flags, _, _ in rows) and len({digest for _, _, digest in rows}) == 1:
            tables, referenced = self._with_scalars_of(own), dict[str, str]()
        else:
            tables, referenced = self._gather(own, digests, error, frozen)
        writing = [rank for rank, (flags, _, _) in enumerate(rows) if flags & _BUSY]
        # By the flags of all ranks: so all refuse the save, or none does.
        if writing and self._engine.config.config.checkpoint.while_saving == "refuse":
            raise RuntimeError(
                f"{place.path}: the last checkpoint is still being written (by ranks {writing}), and "
                "checkpoint.while_saving is 'refuse'; save less often, or set it to 'wait'"
            )
        known = all(flags & _KNOWS_PLACE for flags, _, _ in rows)
        return Agreed(tables, f"{rows[0][1]:012x}", referenced, known)

    def _gather(
        self, own: list[OptimizerTable], digests: dict[str, int], error: Exception | None, frozen: Collection[str]
    ) -> tuple[list[OptimizerTable], dict[str, str]]:
        # If this exchange fails, no rank may take the short form next time: some would know tables that others do not.
        self._all = None
        mine = (own, digests, None if error is None else f"{error}")
        everyone: list[tuple[list[OptimizerTable], dict[str, int], str | None]]
        everyone = self._engine.mesh.world_group.control.all_gather_objects(mine)
        if error is not None:
            raise error
        if failed := {rank: text for rank, (_, _, text) in enumerate(everyone) if text is not None}:
            raise FailedElsewhereError(f"failed on other rank(s): {failed}")
        tables = [OptimizerTable() for _ in own]
        for others, _, _ in everyone:
            for table, part in zip(tables, others, strict=True):
                table.merge(part)
        self._own, self._all = own, tables
        return tables, total_digests([parts for _, parts, _ in everyone], frozen)

    def _is_as_before(self, own: list[OptimizerTable]) -> bool:
        """True if only values have changed, those of all parameters to the same."""
        return (
            self._all is not None
            and len(own) == len(self._own)
            and all(_same_form(*pair) for pair in zip(own, self._own, strict=True))
            and all(_is_uniform(table) for table in own)
            # In the short form a rank takes its own values for everybody's, so it must have some.
            and all(bool(table.scalars) == bool(total.scalars) for table, total in zip(own, self._all, strict=True))
        )

    def _with_scalars_of(self, own: list[OptimizerTable]) -> list[OptimizerTable]:
        """All ranks' tables with this rank's values, which are everybody's."""
        assert self._all is not None
        return [
            replace(total, scalars={name: dict(next(iter(table.scalars.values()))) for name in total.scalars})
            for table, total in zip(own, self._all, strict=True)
        ]


def _same_form(a: OptimizerTable, b: OptimizerTable) -> bool:
    same = a.kinds == b.kinds and a.shapes == b.shapes and a.scalar_dtypes == b.scalar_dtypes
    return same and a.scalars.keys() == b.scalars.keys()


def _is_uniform(table: OptimizerTable) -> bool:
    values = list(table.scalars.values())
    return all(_typed(value) == _typed(values[0]) for value in values)


def _typed(values: dict[str, Any]) -> list[tuple[str, str]]:
    """`True`, `1` and `1.0` are equal and not the same, and a NaN is not equal to itself."""
    return sorted((key, repr(value)) for key, value in values.items())


def _digest_of(tables: list[OptimizerTable]) -> int:
    """A hash, of 63 bits, of each table's values, which are the same for all its parameters."""
    values = [_typed(next(iter(table.scalars.values()))) if table.scalars else [] for table in tables]
    # The row of the exchange has signed integers.
    return int(xxhash.xxh3_64_intdigest(repr(values).encode()) >> 1)


REFERENCES = "references"
"""In the engine's entry of the manifest's user metadata: name -> {"dtype", "shape", "digest"}."""
# Part of the digest's definition: any other number would make a stranger of every weight that is referred to.
_BLOCK = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1


def digest(data: Tensor, start: int) -> int:
    """The digest's part of elements [start, start + n) of a tensor.

    Args:
        data: 1-D, any dtype of at most 8 bytes, any device.
        start: Index of its first element in the row-major flattened tensor.
    """
    bits = data.detach().contiguous().view(_INTEGERS[data.element_size()])
    weights = _weights(data.device)
    total_digests, at = 0, 0
    while at < bits.numel():
        block, inner = divmod(start + at, _BLOCK)
        count = min(_BLOCK - inner, bits.numel() - at)
        # One more than the bits: zeros count, too.
        part = ((bits[at : at + count].to(torch.int64) + 1) * weights[inner : inner + count]).sum()
        # int64 sums wrap as the formula's modulus does. Odd factors have an inverse, so no changed element vanishes.
        total_digests += (int(part) & _MASK) * (_splitmix(block) | 1)
        at += count
    return total_digests & _MASK


def own_digests(engine: TrainState, names: Collection[str]) -> dict[str, int]:
    """This rank's parts of the digests of parameters; those of the first replica count."""
    if engine.mesh.replicate.rank:
        return {}
    found: dict[str, int] = {}
    for bucket in engine.model.buckets:
        for piece in bucket.slice_pieces:
            name, part = bucket.names[piece.index], bucket.parts[piece.index]
            if name in names and part.counts:
                values = bucket.shard.read(piece.offset, piece.offset + piece.numel)
                spans = part.spans(piece.start, piece.stop)
                parts = (digest(values[s.local - piece.start :][: s.stop - s.start], s.start) for s in spans)
                found[name] = sum(parts) & _MASK
    return found


def total_digests(parts: list[dict[str, int]], names: Collection[str]) -> dict[str, str]:
    """The digests, 16 hexadecimal digits each."""
    return {name: f"{sum(part.get(name, 0) for part in parts) & _MASK:016x}" for name in sorted(names)}


def describe_references(whole: Catalog, digests: Mapping[str, str]) -> dict[str, Any]:
    """The manifest's entry."""
    return {
        spec.name: {
            "dtype": str(spec.dtype).removeprefix("torch."),
            "shape": list(spec.shape),
            "digest": digests[spec.name],
        }
        for spec in whole.weights
        if spec.name in digests
    }


def references_of(reader: StateReader) -> dict[str, Any]:
    """References of a checkpoint."""
    if not reader.has_manifest:
        return {}
    return dict(reader.manifest.user.get("zero_strategy", {}).get(REFERENCES, {}))


def check_references(engine: TrainState, reader: StateReader) -> set[str]:
    """Compare what a checkpoint refers to with what the model holds; a collective if there is anything.

    Returns:
        The names.

    Raises:
        ValueError: On all ranks; listing what the model lacks and what has other values.
    """
    wanted = references_of(reader)
    if not wanted:
        return set()
    here = {spec.name: str(spec.dtype).removeprefix("torch.") for spec in catalog_of(engine).weights}
    missing = sorted(wanted.keys() - here.keys())
    other_dtype = sorted(name for name, entry in wanted.items() if here.get(name, entry["dtype"]) != entry["dtype"])
    names = wanted.keys() - set(missing) - set(other_dtype)
    # Also for no names: all ranks gather, and what is wrong is raised behind it by all alike.
    everyone = engine.mesh.world_group.control.all_gather_objects(own_digests(engine, names))
    found = total_digests(everyone, names)
    different = sorted(name for name in names if found[name] != wanted[name]["digest"])
    problems = {"missing in the model": missing, "of another dtype": other_dtype, "with other values": different}
    if any(problems.values()):
        lines = [f"\n  {what} ({len(n)}): " + ", ".join(n) for what, n in problems.items() if n]
        raise ValueError(
            f"{reader.directory} does not hold the frozen weights but refers to them (checkpoint.frozen: reference), "
            "and those of the model are not the same. Load the base weights that it was trained with into the model "
            "first." + "".join(lines)
        )
    return set(wanted)


def _splitmix(index: int) -> int:
    z = (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _weights(device: torch.device) -> Tensor:
    """w(0), w(1), ...: int64 that holds the 64 bits."""
    z = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, by: int) -> Tensor:
    # A logical shift: torch's keeps the sign.
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
