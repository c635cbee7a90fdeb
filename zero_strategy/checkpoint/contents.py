"""The contents of an engine's checkpoint: tables of state, and this rank's pieces of it.

Every rank has its own slices of weights, master weights and optimizer state, which go straight into the final files
under the module's own names.

A checkpoint holds full tensors. A part that is one range of its tensor is a piece like any other. One that is divided
inside of its rows (a row-parallel layer's) is many short ranges: ranks with the same rows exchange them, so that each
writes an equal share of whole rows, one long range. What lies in a tier is written row by row instead, for there is no
memory for a second copy of it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.manifest import AVERAGE, AVERAGE_BUFFERS_NAME, FileKind
from zero_strategy.checkpoint.module_state import ENTRIES_FILE, EXTRA_STATE_FILE, extra_states, module_entries, stored
from zero_strategy.checkpoint.reader import Wanted
from zero_strategy.checkpoint.writer import AnyPiece, Entry, LatePiece, Piece
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.store import together
from zero_strategy.fsdp import layout
from zero_strategy.fsdp.dtensor import TensorPart, held_by, is_dtensor
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.shard_storage import ShardStorage
from zero_strategy.offload.chunk_store import VectorReader, live_values
from zero_strategy.offload.chunks import OffloadedPart
from zero_strategy.ops.dynamic_codes import blocks_of
from zero_strategy.optim.coded_state import SCALES, blocks_within
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.quantized.entries import kept_in_dtype
from zero_strategy.quantized.scales import keeps_dtype
from zero_strategy.runtime.nested_state import flattened

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState


_READ_BYTES = 16 << 20
"""Of rows that are read at once, other ranks' elements included."""


def pieces_in_whole(
    part: TensorPart,
    tensor: Communicator,
    name: str,
    bounds: tuple[int, int],
    dtype: torch.dtype,
    read: Callable[[int, int], Tensor],
    *,
    late: bool,
) -> Iterator[AnyPiece]:
    """Part of a tensor that this rank writes. A collective of the tensor-parallel ranks where these divide its rows.

    Args:
        part: What this rank has of it.
        tensor: The tensor-parallel ranks.
        name: Of the tensor.
        bounds: First and one-past-last element that is this rank's, in the flattened part.
        dtype: In which it is written.
        read: Gives elements [start, stop) of the part, flat and of that dtype; called for some within `bounds`.
        late: They are in a tier: read when their turn comes. The same on all ranks.
    """
    if not part.counts:
        return
    start, stop = bounds
    if part.is_one_range or late:
        for span in part.spans(start, stop):
            load = partial(read, span.local, span.local + span.stop - span.start)
            if late:
                yield LatePiece(name, span.start, span.stop - span.start, dtype, load)
            elif part.is_one_range or start < stop:
                yield Piece(name, span.start, load())
        return
    values = read(start, stop).cpu() if start < stop else torch.empty(0, dtype=dtype)
    for first, found in _share_rows(part, tensor, start, values):
        yield Piece(name, first, found)


def _share_rows(part: TensorPart, tensor: Communicator, start: int, values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole rows for as many as all ranks have from end to end, an equal share for each; what is left, as it lies."""
    stop = start + values.numel()
    # A rank may have no columns of the tensor: any rows are whole for it.
    rows_here = part.whole_rows(start, stop) if part.row else (0, part.rows)
    own = torch.tensor([*rows_here, part.row, part.offset])
    table = torch.stack(tensor.all_gather_small(own)).tolist()
    first, last = max(row[0] for row in table), min(row[1] for row in table)
    if first >= last:
        first = last = -(-stop // max(part.row, 1))  # none in common
    for low, high in ((start, min(first * part.row, stop)), (max(last * part.row, start), stop)):
        for span in part.spans(low, high) if low < high else ():
            yield span.start, values[span.local - start :][: span.stop - span.start]
    if first >= last:
        return
    share = -(-(last - first) // tensor.size)
    begins = [min(first + rank * share, last) for rank in range(tensor.size + 1)]
    outgoing = [values[begin * part.row - start : end * part.row - start] for begin, end in pairwise(begins)]
    begin, end = begins[tensor.rank], begins[tensor.rank + 1]
    incoming = [values.new_empty((end - begin) * width) for _, _, width, _ in table]
    # The exchange leaves the own part alone.
    incoming[tensor.rank] = outgoing[tensor.rank]
    # The largest message of any two ranks: an exchange needs a size that all of them know.
    tensor.all_to_all(outgoing, incoming, share * max(row[2] for row in table)).wait()
    rows = values.new_empty(end - begin, part.whole_row)
    for arrived, (_, _, width, column) in zip(incoming, table, strict=True):
        rows[:, column : column + width] = arrived.view(end - begin, width)
    if begin < end:
        yield begin * part.whole_row, rows.view(-1)


def wanted_in_whole(
    part: TensorPart,
    name: str,
    bounds: tuple[int, int],
    kind: FileKind = "model",
    *,
    itemsize: int,
    out: Tensor | None = None,
    write: Callable[[int, Tensor], object] | None = None,
) -> Iterator[Wanted]:
    """Part of a tensor that this rank reads.

    Args:
        part: What it has of it.
        name: Of the tensor in the checkpoint.
        bounds: First and one-past-last element that it wants, in the flattened part.
        kind: Weights, or which state.
        itemsize: Bytes per element there.
        out: Where they go, (wanted elements,).
        write: Or what takes them, with the index of the first in `bounds`; in any thread.
    """
    start, stop = bounds
    if part.is_one_range:
        then = None if write is None else partial(write, 0)
        yield Wanted(name, part.offset + start, part.offset + stop, kind, out=out, then=then)
        return
    most = max(1, _READ_BYTES // (part.whole_row * itemsize))
    at = start
    while at < stop:
        first, last = part.whole_rows(at, stop)
        rows = min(last - first, most) if first * part.row == at else 0
        end = at + rows * part.row if rows else min((at // part.row + 1) * part.row, stop)
        spread = partial(_spread, part, max(rows, 1), at - start, end - at, out, write)
        yield Wanted(name, part.whole_index(at), part.whole_index(end - 1) + 1, kind, then=spread)
        at = end


def _spread(
    part: TensorPart,
    rows: int,
    offset: int,
    numel: int,
    out: Tensor | None,
    write: Callable[[int, Tensor], object] | None,
    values: Tensor,
) -> None:
    found = part.pick(values, rows) if rows > 1 else values
    assert found.numel() == numel
    if out is not None:
        out[offset : offset + numel].copy_(found)
    else:
        assert write is not None
        write(offset, found)


MASTER = "master"
"""Kind of state: fp32 master weights."""


@dataclass
class OptimizerTable:
    """Facts about one optimizer's state from all ranks.

    Attributes:
        kinds: State kind -> parameter name -> dtype.
        scalars: Parameter name -> key -> number.
        scalar_dtypes: Key -> dtype name, for numbers that the optimizer keeps as 0-d tensors.
        shapes: State kind -> parameter name -> shape, where that is not the parameter's: of scales, and of states of
            parameters that lie whole on a rank.
    """

    kinds: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    scalar_dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)

    def merge(self, other: OptimizerTable) -> None:
        """Take in another rank's entries."""
        for kind, dtypes in other.kinds.items():
            self.kinds.setdefault(kind, {}).update(dtypes)
        for name, values in other.scalars.items():
            self.scalars.setdefault(name, {}).update(values)
        self.scalar_dtypes.update(other.scalar_dtypes)
        for kind, shapes in other.shapes.items():
            self.shapes.setdefault(kind, {}).update(shapes)


def module_files(engine: TrainState, known: dict[str, Any] | None = None) -> dict[str, bytes]:
    """State of modules beside parameters and buffers, as files of their own; see `module_state`.

    A collective where parameters are sharded, and of the team if the engine's module is a part of a model.

    Args:
        engine: Whose modules.
        known: Their `module_entries`, where these were collected already.

    Raises:
        TypeError: If an entry cannot be stored; names it.
    """
    control = engine.mesh.world_group.control
    extra, entries = extra_states(engine.module), module_entries(engine) if known is None else known

    def files() -> dict[str, bytes]:
        return {**stored(extra, EXTRA_STATE_FILE), **stored(entries, ENTRIES_FILE)}

    # Stages of a pipeline have different modules, and rank 0 writes one file for all of them.
    if engine.is_part:
        everyone = control.all_gather_objects((extra, entries))
        extra = {name: state for part, _ in everyone for name, state in part.items()}
        entries = {name: state for _, part in everyone for name, state in part.items()}
    return together(control, files)


def average_file(engine: TrainState) -> dict[str, bytes]:
    """Averages of buffers, as a file of its own, if averages are kept; else none. A collective as above."""
    if engine.average is None:
        return {}
    found = {name: average.cpu() for name, average in engine.average.held_buffers().items()}
    return _file_of_all(engine, AVERAGE_BUFFERS_NAME, found)


def _file_of_all(engine: TrainState, path: str, found: dict[str, Any]) -> dict[str, bytes]:
    """A file with what was found by name, on all parts of the model."""
    if engine.is_part:
        found = {
            name: state
            for part in engine.mesh.world_group.control.all_gather_objects(found)
            for name, state in part.items()
        }
    if not found:
        return {}
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return {path: buffer.getvalue()}


@dataclass(frozen=True)
class LiveState:
    """This rank's state of a parameter.

    Attributes:
        shape: Of its piece.
        whole: The piece is the whole parameter, so that any state of it can be stored.
        numel: Elements of the whole parameter.
        values: Live ones, by kind; lists and tuples taken apart.
    """

    shape: torch.Size
    whole: bool
    numel: int
    values: Mapping[str, Any]


States = Mapping[str, LiveState]
"""By parameter name."""


def states_of(engine: TrainState, sharded: ShardedOptimizer) -> States:
    """This rank's state of an optimizer, looked up once for all that a save asks of it."""
    names, found = {id(p): name for name, p in engine.model.names()}, {}
    for parameter in sharded.parameters():
        piece = sharded.piece(parameter)
        if piece is not None:
            of_all = piece.numel() == math.prod(engine.model.part_of(parameter).shape)
            whole = of_all and not is_dtensor(parameter)
            values = flattened(sharded.state.get(piece, {}))
            found[names[id(parameter)]] = LiveState(piece.shape, whole, parameter.numel(), values)
    return found


def own_table(engine: TrainState, sharded: ShardedOptimizer, states: States) -> OptimizerTable:
    """Facts about an optimizer's state from this rank.

    Raises:
        TypeError: Naming a state that no file of tensors can hold.
    """
    table, dtypes = OptimizerTable(), dict[torch.dtype, str]()
    parameters = {id(parameter) for parameter in sharded.parameters()}
    for bucket in engine.model.buckets:
        names = [n for n, p in zip(bucket.names, bucket.parameters, strict=True) if id(p) in parameters]
        for kind, storage in _storages(bucket).items():
            table.kinds.setdefault(kind, {}).update(dict.fromkeys(names, storage.dtype))
    for name, state in states.items():
        for key, value in state.values.items():
            # Before the next branch: a parameter that is a scalar has a step of its own shape.
            if isinstance(value, Tensor) and value.dim() == 0:
                table.scalars.setdefault(name, {})[key] = value.item()
                if value.dtype not in dtypes:
                    dtypes[value.dtype] = str(value.dtype).removeprefix("torch.")
                table.scalar_dtypes[key] = dtypes[value.dtype]
            elif isinstance(value, Tensor) and key in SCALES:
                table.kinds.setdefault(key, {})[name] = value.dtype
                table.shapes.setdefault(key, {})[name] = (blocks_of(state.numel),)
            elif isinstance(value, (Tensor, OffloadedPart)) and value.shape == state.shape:
                table.kinds.setdefault(key, {})[name] = value.dtype
            elif isinstance(value, Tensor) and state.whole:
                table.kinds.setdefault(key, {})[name] = value.dtype
                table.shapes.setdefault(key, {})[name] = tuple(value.shape)
            elif value is None or isinstance(value, (bool, int, float, str)):
                table.scalars.setdefault(name, {})[key] = value
            else:
                raise TypeError(
                    f"state {key!r} of {type(sharded.optimizer).__name__} for parameter {name!r} is a "
                    f"{type(value).__name__} that cannot be stored: only one value per element and plain numbers, and "
                    "other tensors of parameters that lie whole on a rank (stage 0, or matrix_optimizers)"
                )
    return table


def _storages(bucket: ParameterBucket) -> dict[str, ShardStorage]:
    """State that a bucket holds itself, by kind."""
    found = {MASTER: bucket.master} if bucket.has_master else {}
    return found | ({AVERAGE: bucket.average} if bucket.average is not None and bucket.average.numel else {})


def stored_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype of a weight in a file: `wanted` converts floating-point ones."""
    return own if wanted is None or not own.is_floating_point else wanted


def pieces_of(
    engine: TrainState,
    order: Sequence[tuple[str, Tensor]],
    saved: Sequence[States],
    tables: Sequence[OptimizerTable],
    dtype: torch.dtype | None,
    values_of: VectorReader = live_values,
) -> Iterator[Entry]:
    """All that this rank writes: views of live memory, weights converted to `dtype`, and what is to be read first.

    A collective of the tensor-parallel ranks if there are several.

    Args:
        engine: The engine.
        order: Weights and buffers, and what else lies among them.
        saved: By optimizer: this rank's states.
        tables: By optimizer: what all ranks know of them.
        dtype: Of weights; None: their own.
        values_of: Gives what reads values of state in tiers; all of these, and nothing else, are read late.
    """
    if engine.mesh.replicate.rank:  # the first replica writes for all
        return
    wanted = {name for name, _ in order}
    kept = kept_in_dtype(wanted)
    for bucket in engine.model.buckets:
        for piece in _slice_pieces(bucket):
            if bucket.names[piece.index] in wanted:
                for found in _weights_pieces(engine, bucket, piece, dtype, values_of):
                    yield "model", found
    # Buffers are alike on all ranks, and no element may have two writers.
    if engine.mesh.rank == 0 and engine.mesh.tensor.rank == 0:
        for name, tensor in order:
            if not isinstance(tensor, nn.Parameter):
                flat = held_by(tensor).detach().contiguous().reshape(-1)
                yield "model", Piece(name, 0, flat.to(stored_dtype(flat.dtype, None if name in kept else dtype)))
    for number, (states, table) in enumerate(zip(saved, tables, strict=True)):
        for kind, dtypes in table.kinds.items():
            own = table.shapes.get(kind, {})
            divided = {name: dtype for name, dtype in dtypes.items() if name not in own}
            of_own_shape = (_scales if kind in SCALES else _whole_states)(engine, states, kind, own)
            for state in chain(of_own_shape, _state_pieces(engine, states, kind, divided, values_of)):
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
) -> Iterator[AnyPiece]:
    """A weight's slice as it is saved: from its master copy where that is finer and wanted."""
    dtype = None if keeps_dtype(bucket.parameters[piece.index]) else dtype
    stored = stored_dtype(bucket.dtype, dtype)
    finer = dtype is not None and bucket.has_master and dtype.itemsize > bucket.dtype.itemsize
    lead = bucket.slice.start - bucket.owned.start if finer else 0
    at, storage = lead + piece.offset - piece.start, bucket.master if finer else bucket.shard
    values: Callable[[int, int], Tensor] = storage.read
    vector = storage.vector
    if vector is not None:
        values = values_of(vector, at + piece.start, at + piece.stop)

    def read(start: int, stop: int) -> Tensor:
        return values(at + start, at + stop).to(stored)

    part, bounds, name = bucket.parts[piece.index], (piece.start, piece.stop), bucket.names[piece.index]
    return pieces_in_whole(part, engine.mesh.tensor, name, bounds, stored, read, late=vector is not None)


def _whole_states(engine: TrainState, states: States, kind: str, own: Collection[str]) -> Iterator[AnyPiece]:
    """State of shapes of its own; written by the owner, or by the rank that writes the parameter's first element."""
    for bucket in engine.model.buckets if own else ():
        for piece in bucket.slice_pieces:
            name = bucket.names[piece.index]
            if name in own and piece.start == 0 < piece.stop:
                yield Piece(name, 0, states[name].values[kind].detach().reshape(-1).contiguous())


def _scales(engine: TrainState, states: States, kind: str, own: Collection[str]) -> Iterator[AnyPiece]:
    """Scales of states of 8 bits; each is written by the rank that writes the first element of its block."""
    for bucket in engine.model.buckets if own else ():
        for piece in bucket.slice_pieces:
            name = bucket.names[piece.index]
            first, stop = blocks_within(piece.start, piece.stop)
            if name in own and first < stop:
                held, _ = blocks_within(bucket.piece_of[piece.index].start, piece.stop)
                yield Piece(name, first, states[name].values[kind][first - held : stop - held])


def _state_pieces(
    engine: TrainState, states: States, kind: str, dtypes: Mapping[str, torch.dtype], values_of: VectorReader
) -> Iterator[AnyPiece]:
    for bucket in engine.model.buckets:
        lead, whole = bucket.slice.start - bucket.owned.start, not bucket.placement.shard_optimizer
        for piece in _slice_pieces(bucket):
            name, part = bucket.names[piece.index], bucket.parts[piece.index]
            if name not in dtypes:
                continue
            values: Callable[[int, int], Tensor]
            if kind in (MASTER, AVERAGE):
                storage = _storages(bucket)[kind]
                at, held = lead + piece.offset - piece.start, storage.vector
                late, values = held is not None, storage.read
            else:
                value = states[name].values[kind] if name in states else torch.empty(0, dtype=dtypes[name])
                held, at = (value.vector, value.start) if isinstance(value, OffloadedPart) else (None, 0)
                at -= 0 if whole else piece.start
                # By the engine's settings, not this rank's value: all ranks exchange rows, or none does.
                late, values = engine.model.optimizer_store is not None, partial(_some, value)
            if held is not None:
                values = values_of(held, at + piece.start, at + piece.stop)
            read, bounds = partial(_shifted, values, at), (piece.start, piece.stop)
            for found in pieces_in_whole(part, engine.mesh.tensor, name, bounds, dtypes[name], read, late=late):
                # What lies in memory is changed by the next step, so it is no longer there when its turn comes.
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
        # The manifest holds plain numbers.
        return value.item() if value.dim() == 0 else value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value
