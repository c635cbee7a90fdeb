"""What a checkpoint of an engine holds: names, order, tables of state, and this rank's pieces of it.

Every rank has its own slices of weights, master weights and optimizer state, which go straight into the final files
under the module's own names.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint import FileKind, LatePiece, Piece
from zero_strategy.memory.images import VectorReader, live_values
from zero_strategy.memory.vectors import OffloadedPart
from zero_strategy.optim.sharded import ShardedOptimizer
from zero_strategy.runtime.torch_private import buffers_of, children_of, non_persistent_buffers, parameters_of
from zero_strategy.saving.tensor_pieces import pieces_in_whole
from zero_strategy.sharding import layout
from zero_strategy.sharding.dtensors import held_by
from zero_strategy.sharding.parameters import ParameterBucket

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState

EXTRA_STATE_FILE = "extra_state.pt"
"""What modules return from `get_extra_state`."""


@dataclass
class OptimizerTable:
    """What all ranks together know about one optimizer's state.

    Attributes:
        kinds: State kind -> parameter name -> dtype.
        scalars: Parameter name -> key -> number.
        scalar_dtypes: Key -> dtype name, for numbers that the optimizer keeps as 0-d tensors.
    """

    kinds: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    scalar_dtypes: dict[str, str] = field(default_factory=dict)

    def merge(self, other: OptimizerTable) -> None:
        """Take in another rank's entries."""
        for kind, dtypes in other.kinds.items():
            self.kinds.setdefault(kind, {}).update(dtypes)
        for name, values in other.scalars.items():
            self.scalars.setdefault(name, {}).update(values)
        self.scalar_dtypes.update(other.scalar_dtypes)


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


def extra_state_file(engine: TrainState) -> dict[str, bytes]:
    """What modules return from `get_extra_state`, as a file of its own; any picklable value.

    A collective of the team if the engine's module is a part of a model.
    """
    found = {
        name: child.get_extra_state()
        for name, child in engine.module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }
    if engine.is_part:
        found = {name: state for part in engine.mesh.team.control.gather_objects(found) for name, state in part.items()}
    if not found:
        return {}
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return {EXTRA_STATE_FILE: buffer.getvalue()}


States = Mapping[str, tuple[torch.Size, Mapping[str, Any]]]
"""Parameter name -> shape of this rank's piece, and its live state."""


def states_of(engine: TrainState, sharded: ShardedOptimizer) -> States:
    """This rank's state of an optimizer, looked up once for all that a save asks of it."""
    names, found = {id(p): name for name, p in engine.model.names()}, {}
    for parameter in sharded.parameters():
        piece = sharded.piece(parameter)
        if piece is not None:
            found[names[id(parameter)]] = (piece.shape, sharded.state.get(piece, {}))
    return found


def own_table(engine: TrainState, sharded: ShardedOptimizer, states: States) -> OptimizerTable:
    """What this rank knows of an optimizer's state.

    Raises:
        TypeError: Naming a state that no file of tensors can hold.
    """
    table, dtypes = OptimizerTable(), dict[torch.dtype, str]()
    parameters = {id(parameter) for parameter in sharded.parameters()}
    for bucket in engine.model.buckets:
        if bucket.has_master:
            held = zip(bucket.names, bucket.parameters, strict=True)
            table.kinds.setdefault("master", {}).update((n, torch.float32) for n, p in held if id(p) in parameters)
    for name, (shape, state) in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                table.scalars.setdefault(name, {})[key] = value.item()
                if value.dtype not in dtypes:
                    dtypes[value.dtype] = str(value.dtype).removeprefix("torch.")
                table.scalar_dtypes[key] = dtypes[value.dtype]
            elif isinstance(value, (Tensor, OffloadedPart)) and value.shape == shape:
                table.kinds.setdefault(key, {})[name] = value.dtype
            elif value is None or isinstance(value, (bool, int, float, str)):
                table.scalars.setdefault(name, {})[key] = value
            else:
                raise TypeError(
                    f"state {key!r} of {type(sharded.optimizer).__name__} for parameter {name!r} is a "
                    f"{type(value).__name__} that cannot be stored: only one value per element, or plain numbers"
                )
    return table


def stored_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What a weight is saved as: `wanted` converts floating-point ones."""
    return own if wanted is None or not own.is_floating_point else wanted


def pieces_of(
    engine: TrainState,
    order: Sequence[tuple[str, Tensor]],
    saved: Sequence[States],
    tables: Sequence[OptimizerTable],
    dtype: torch.dtype | None,
    values_of: VectorReader = live_values,
) -> Iterator[tuple[FileKind, Piece | LatePiece]]:
    """All that this rank writes: views of live memory, weights converted to `dtype`, and what is to be read first.

    A collective of the tensor-parallel ranks if there are several.

    Args:
        engine: The engine.
        order: Weights and buffers.
        saved: By optimizer: this rank's states.
        tables: By optimizer: what all ranks know of them.
        dtype: Of weights; None: their own.
        values_of: Gives what reads values of state in tiers; all of these, and nothing else, are read late.
    """
    if engine.mesh.replicate.rank:  # the first replica writes for all
        return
    wanted = {name for name, _ in order}
    for bucket in engine.model.buckets:
        for piece in _slice_pieces(bucket):
            if bucket.names[piece.index] in wanted:
                for found in _weights_pieces(engine, bucket, piece, dtype, values_of):
                    yield "model", found
    if engine.mesh.rank == 0 and engine.mesh.tensor.rank == 0:
        for name, tensor in order:
            if not isinstance(tensor, nn.Parameter):
                flat = held_by(tensor).detach().contiguous().reshape(-1)
                yield "model", Piece(name, 0, flat.to(stored_dtype(flat.dtype, dtype)))
    for number, (states, table) in enumerate(zip(saved, tables, strict=True)):
        for kind, dtypes in table.kinds.items():
            for state in _state_pieces(engine, states, kind, dtypes, values_of):
                yield (str(number), kind), state


def _slice_pieces(bucket: ParameterBucket) -> Iterator[layout.Piece]:
    """The parts of parameters in this rank's slice; of those whose rows are divided an empty one where none is there.

    Other ranks may have some of theirs, and exchange rows.
    """
    found = {piece.index: piece for piece in bucket.slice_pieces}
    for index, part in enumerate(bucket.parts):
        if index in found:
            yield found[index]
        elif not part.is_one_range:
            yield layout.Piece(index, 0, 0, 0)


def _weights_pieces(
    engine: TrainState,
    bucket: ParameterBucket,
    piece: layout.Piece,
    dtype: torch.dtype | None,
    values_of: VectorReader,
) -> Iterator[Piece | LatePiece]:
    """A weight's slice as it is saved: from its master copy where that is finer and wanted."""
    stored = stored_dtype(bucket.dtype, dtype)
    finer = dtype is not None and bucket.has_master and dtype.itemsize > bucket.dtype.itemsize
    lead = bucket.slice.start - bucket.owned.start if finer else 0
    at, vector = lead + piece.offset - piece.start, bucket.master_vector if finer else bucket.shard_vector
    if vector is not None:
        values = values_of(vector, at + piece.start, at + piece.stop)
    else:
        values = bucket.read_master if finer else bucket.read_shard

    def read(start: int, stop: int) -> Tensor:
        return values(at + start, at + stop).to(stored)

    part, bounds, name = bucket.parts[piece.index], (piece.start, piece.stop), bucket.names[piece.index]
    return pieces_in_whole(part, engine.mesh.tensor, name, bounds, stored, read, late=vector is not None)


def _state_pieces(
    engine: TrainState, states: States, kind: str, dtypes: Mapping[str, torch.dtype], values_of: VectorReader
) -> Iterator[Piece | LatePiece]:
    for bucket in engine.model.buckets:
        lead, whole = bucket.slice.start - bucket.owned.start, not bucket.placement.shard_optimizer
        for piece in _slice_pieces(bucket):
            name, part = bucket.names[piece.index], bucket.parts[piece.index]
            if name not in dtypes:
                continue
            values: Callable[[int, int], Tensor]
            if kind == "master":
                at, held = lead + piece.offset - piece.start, bucket.master_vector
                late, values = held is not None, bucket.read_master
            else:
                value = states[name][1][kind] if name in states else torch.empty(0, dtype=dtypes[name])
                held, at = (value.vector, value.start) if isinstance(value, OffloadedPart) else (None, 0)
                at -= 0 if whole else piece.start
                late, values = engine.model.optimizer_store is not None, partial(_some, value)
            if held is not None:
                values = values_of(held, at + piece.start, at + piece.stop)
            read, bounds = partial(_shifted, values, at), (piece.start, piece.stop)
            for found in pieces_in_whole(part, engine.mesh.tensor, name, bounds, dtypes[name], read, late=late):
                yield found if held is not None else found.loaded()


def _shifted(values: Callable[[int, int], Tensor], at: int, start: int, stop: int) -> Tensor:
    return values(at + start, at + stop)


def _some(value: Tensor, start: int, stop: int) -> Tensor:
    return value.reshape(-1)[start:stop].contiguous()


def groups_of(engine: TrainState, sharded: ShardedOptimizer) -> list[dict[str, Any]]:
    """Hyper-parameters of each param group, its parameters by name."""
    names = {id(p): name for name, p in engine.model.names()}
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        | {"params": [names[id(p)] for p in group["params"]]}
        for group in sharded.optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value
