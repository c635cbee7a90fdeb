"""The engine's state as a checkpoint: which bytes this rank writes, and which it reads.

Every rank writes its own slices of weights, master weights and optimizer state straight into the final files, under
the module's own names; any world size and stage reads them back by element range.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint import CheckpointPlan, CheckpointReader, CheckpointWriter, Piece, TensorSpec
from zero_strategy.optim.sharded import ShardedOptimizer
from zero_strategy.sharding.parameters import ParameterBucket

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine

_EXTRA_STATE = "extra_state.pt"
_OWN = "zero_strategy"
"""Key of the engine's own entry in the manifest's user metadata."""


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


def save(
    engine: ZeroEngine,
    directory: str | os.PathLike[str],
    *,
    user: Mapping[str, Any] | None,
    extra_files: Mapping[str, bytes] | None,
    optimizers: bool,
    update_latest: bool,
) -> None:
    """Write a checkpoint directory; see `ZeroEngine.save_checkpoint`."""
    engine.mesh.rendezvous.meet(f"save_checkpoint({os.fspath(directory)!r})")
    engine.model.reducer.settle()
    saved = engine.optimizers if optimizers else []
    tables: list[OptimizerTable] = []
    _together(engine, lambda: tables.extend(_own_table(engine, sharded) for sharded in saved))
    tables = [_merged(engine, table) for table in tables]
    shapes = {name: tuple(p.shape) for name, p in engine.model.names()}
    order = list(state_dict_entries(engine.module))
    extra_files = {**(extra_files or {}), **_extra_state_file(engine.module)}
    states = {
        str(number): {
            kind: [TensorSpec(name, dtypes[name], shapes[name]) for name in _in_order(dtypes, order)]
            for kind, dtypes in sorted(table.kinds.items())
        }
        for number, table in enumerate(tables)
    }
    plan = CheckpointPlan.build(
        [TensorSpec.of(name, tensor) for name, tensor in order],
        states,
        aliases={alias: first for alias, first in engine.model.aliases.items()},
        max_file_bytes=engine.config.config.checkpoint.max_file_bytes,
        metadata={"format": "pt"},
    )
    token = engine.mesh.control.gather_objects(uuid.uuid4().hex[:12])[0]
    writer = CheckpointWriter(directory, rank=engine.mesh.rank, world_size=engine.mesh.world_size, token=token)
    try:
        _together(engine, lambda: writer.prepare(plan))
        _together(engine, lambda: _write(engine, writer, order, saved, tables))
        manifest = plan.manifest(
            world_size=engine.mesh.world_size,
            stage=engine.stage,
            scalars={str(number): table.scalars for number, table in enumerate(tables)},
            param_groups={str(number): _groups(engine, sharded) for number, sharded in enumerate(saved)},
            user={
                **(user or {}),
                _OWN: {
                    "scalar_dtypes": [table.scalar_dtypes for table in tables],
                    "loss_scaler": None if engine.scaler is None else engine.scaler.state_dict(),
                },
            },
        )
        _together(engine, lambda: writer.commit(manifest, extra_files, update_latest=update_latest))
    except BaseException:
        writer.abandon()
        raise


def load_weights(engine: ZeroEngine, reader: CheckpointReader, *, strict: bool) -> None:
    """Read this rank's slices of the weights, and all buffers; see `ZeroEngine.load_weights`."""
    entries = dict(state_dict_entries(engine.module))
    if strict:
        reader.check_against(TensorSpec.of(name, tensor) for name, tensor in entries.items())
    present = {name for name in entries if name in reader.weights or name in reader.aliases}
    for name in sorted(present):
        _check_shape(name, tuple(reader.spec(name).shape), tuple(entries[name].shape))

    def read() -> None:
        for bucket in engine.model.buckets:
            if bucket.has_master and not bucket.placement.shard_optimizer:
                _read_whole_master(reader, bucket, present)
            for piece, name in _slice_pieces(engine, bucket):
                if name in present:
                    values = reader.read(name, piece.start, piece.stop)
                    bucket.shard[piece.offset : piece.offset + piece.numel].copy_(values)
                    if bucket.has_master and bucket.placement.shard_optimizer:
                        bucket.master[piece.offset : piece.offset + piece.numel].copy_(values)
        for name, buffer in entries.items():
            if name in present and not isinstance(buffer, nn.Parameter):
                buffer.copy_(reader.full(name))

    with torch.no_grad():
        _release(engine)
        _together(engine, read)
        load_extra_state(engine.module, reader)
        for bucket in engine.model.buckets:
            if not bucket.placement.shard_parameters:
                engine.mesh.gather.all_gather(bucket.flat).wait()
        _release(engine)


def load_optimizers(engine: ZeroEngine, reader: CheckpointReader) -> None:
    """Read this rank's optimizer state and master weights; see `ZeroEngine.load_optimizers`."""
    records = reader.manifest.optimizers
    if len(records) != len(engine.optimizers):
        raise ValueError(
            f"{reader.directory} holds the state of {len(records)} optimizer(s), {len(engine.optimizers)} are "
            "attached; attach the same optimizers in the same order, or load weights only"
        )
    own = reader.manifest.user.get(_OWN, {})
    names = {id(p): name for name, p in engine.model.names()}

    def read() -> None:
        for number, sharded in enumerate(engine.optimizers):
            _set_groups(sharded, records[str(number)].param_groups, names, reader)
            dtypes = own.get("scalar_dtypes", [{}] * len(records))[number]
            available = reader.states(str(number))
            sharded.state.clear()
            for group in sharded.optimizer.param_groups:
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    _load_state(engine, sharded, parameter, name, reader, str(number), available, dtypes, group)

    with torch.no_grad():
        _together(engine, read)

        for work in [bucket.publish() for bucket in engine.model.buckets]:
            work.wait()
        _release(engine)
    if engine.scaler is not None and own.get("loss_scaler"):
        engine.scaler.load_state_dict(own["loss_scaler"])


# ---- saving ----


def state_dict_entries(module: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and objects of parameters and persistent buffers in the order of the module's state dict.

    Args:
        module: The root.
        tied: Give tied tensors under each of their names; else once, under the first.
    """
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            if not tied:
                seen.add(id(tensor))
            yield prefix + key, tensor
        for key, child in module._modules.items():
            if child is not None:
                yield from visit(child, f"{prefix}{key}.")

    yield from visit(module, "")


def _extra_state_file(module: nn.Module) -> dict[str, bytes]:
    """What modules return from `get_extra_state`, as a file of its own; any picklable value."""
    found = {
        name: child.get_extra_state()
        for name, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }
    if not found:
        return {}
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return {_EXTRA_STATE: buffer.getvalue()}


def load_extra_state(module: nn.Module, reader: CheckpointReader) -> None:
    """Give modules back what `get_extra_state` returned, if the checkpoint has it."""
    if not reader.has_manifest or _EXTRA_STATE not in reader.manifest.files:
        return
    stored = torch.load(io.BytesIO(reader.extra(_EXTRA_STATE)), weights_only=True)
    for name, child in module.named_modules():
        if name in stored:
            child.set_extra_state(stored[name])


def _in_order(names: Mapping[str, Any], order: list[tuple[str, Tensor]]) -> list[str]:
    return [name for name, _ in order if name in names]


def _slice_pieces(engine: ZeroEngine, bucket: ParameterBucket) -> Iterator[tuple[Any, str]]:
    """The parts of parameters inside this rank's slice, with their names; offsets count from the slice's start."""
    for piece in bucket.layout.pieces(bucket.slice.start, bucket.slice.stop):
        yield piece, bucket.names[piece.index]


def _merged(engine: ZeroEngine, own: OptimizerTable) -> OptimizerTable:
    merged = OptimizerTable()
    for part in engine.mesh.control.gather_objects(own):
        merged.merge(part)
    return merged


def _own_table(engine: ZeroEngine, sharded: ShardedOptimizer) -> OptimizerTable:
    table, names = OptimizerTable(), {id(p): name for name, p in engine.model.names()}
    for parameter in sharded.parameters():
        place = engine.model.place(parameter)
        assert place is not None
        name, (bucket, _) = names[id(parameter)], place
        if bucket.has_master:
            table.kinds.setdefault("master", {})[name] = torch.float32
        piece = sharded.piece(parameter)
        for key, value in sharded.state_of(parameter).items():
            assert piece is not None
            if isinstance(value, Tensor) and value.dim() == 0:
                table.scalars.setdefault(name, {})[key] = value.item()
                table.scalar_dtypes[key] = str(value.dtype).removeprefix("torch.")
            elif isinstance(value, Tensor) and value.shape == piece.shape:
                table.kinds.setdefault(key, {})[name] = value.dtype
            elif value is None or isinstance(value, (bool, int, float, str)):
                table.scalars.setdefault(name, {})[key] = value
            else:
                raise TypeError(
                    f"state {key!r} of {type(sharded.optimizer).__name__} for parameter {name!r} is a "
                    f"{type(value).__name__} that cannot be stored: only one value per element, or plain numbers"
                )
    return table


def _write(
    engine: ZeroEngine,
    writer: CheckpointWriter,
    order: list[tuple[str, Tensor]],
    saved: list[ShardedOptimizer],
    tables: list[OptimizerTable],
) -> None:
    if engine.mesh.replicate.rank:  # the first replica writes for all
        for number, table in enumerate(tables):
            for kind in table.kinds:
                writer.write((str(number), kind), [])
        writer.write("model", [])
        return

    def weights() -> Iterator[Piece]:
        for bucket in engine.model.buckets:
            for piece, name in _slice_pieces(engine, bucket):
                yield Piece(name, piece.start, bucket.shard[piece.offset : piece.offset + piece.numel])
        if engine.mesh.rank == 0:
            for name, tensor in order:
                if not isinstance(tensor, nn.Parameter):
                    yield Piece(name, 0, tensor.detach().contiguous().reshape(-1))

    writer.write("model", weights())
    for number, (sharded, table) in enumerate(zip(saved, tables, strict=True)):
        for kind, dtypes in table.kinds.items():
            writer.write((str(number), kind), _state_pieces(engine, sharded, kind, dtypes))


def _state_pieces(
    engine: ZeroEngine, sharded: ShardedOptimizer, kind: str, dtypes: Mapping[str, torch.dtype]
) -> Iterator[Piece]:
    for bucket in engine.model.buckets:
        lead = bucket.slice.start - bucket.owned.start
        for piece, name in _slice_pieces(engine, bucket):
            if name not in dtypes:
                continue
            if kind == "master":
                values = bucket.master[lead + piece.offset : lead + piece.offset + piece.numel]
            else:
                values = sharded.state_of(bucket.parameters[piece.index])[kind].reshape(-1)
                if not bucket.placement.shard_optimizer:
                    values = values[piece.start : piece.stop]
            yield Piece(name, piece.start, values.contiguous())


def _groups(engine: ZeroEngine, sharded: ShardedOptimizer) -> list[dict[str, Any]]:
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


# ---- loading ----


def _release(engine: ZeroEngine) -> None:
    engine.model.forget_gathered()


def _check_shape(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if stored != wanted:
        raise ValueError(f"tensor {name!r} has shape {stored} in the checkpoint and {wanted} in the model")


def _read_whole_master(reader: CheckpointReader, bucket: ParameterBucket, present: set[str]) -> None:
    for name, segment in zip(bucket.names, bucket.layout.segments, strict=True):
        if name in present:
            bucket.master[segment.offset : segment.stop].copy_(reader.read(name))


def _set_groups(
    sharded: ShardedOptimizer, stored: Sequence[Mapping[str, Any]], names: dict[int, str], reader: CheckpointReader
) -> None:
    groups = sharded.optimizer.param_groups
    mine = [[names[id(p)] for p in group["params"]] for group in groups]
    theirs = [group["params"] for group in stored]
    if [sorted(group) for group in mine] != [sorted(group) for group in theirs]:
        different = sorted({name for group in mine for name in group} ^ {name for group in theirs for name in group})
        raise ValueError(
            f"{reader.directory}: the param groups of {type(sharded.optimizer).__name__} hold other parameters "
            f"({len(theirs)} group(s) there, {len(mine)} here; first differences: {different[:5]})"
        )
    for group, values in zip(groups, stored, strict=True):
        for key, value in values.items():
            if key != "params":
                old = group.get(key)
                if isinstance(old, Tensor):
                    value = torch.as_tensor(value, dtype=old.dtype, device=old.device)
                group[key] = value


def _load_state(
    engine: ZeroEngine,
    sharded: ShardedOptimizer,
    parameter: nn.Parameter,
    name: str,
    reader: CheckpointReader,
    number: str,
    available: Mapping[str, Mapping[str, TensorSpec]],
    scalar_dtypes: Mapping[str, str],
    group: Mapping[str, Any],
) -> None:
    piece = sharded.piece(parameter)
    place = engine.model.place(parameter)
    assert place is not None
    bucket, index = place
    if piece is None:
        return
    cut = bucket.piece_of[index]
    values: dict[str, Any] = {}
    for kind, specs in available.items():
        if name not in specs:
            continue
        _check_shape(name, tuple(specs[name].shape), tuple(parameter.shape))
        stored = reader.read(name, cut.start, cut.stop, kind=(number, kind))
        if kind == "master":
            bucket.master[cut.offset : cut.offset + cut.numel].copy_(stored)
        else:
            values[kind] = stored.to(piece.device).view(piece.shape)
    for key, value in reader.manifest.optimizers[number].scalars.get(name, {}).items():
        values[key] = value
        if key in scalar_dtypes:
            on_device = bool(group.get("fused") or group.get("capturable"))
            device = piece.device if on_device else torch.device("cpu")
            values[key] = torch.tensor(value, dtype=getattr(torch, scalar_dtypes[key]), device=device)
    if values:
        sharded.set_state_of(parameter, values)


def _together(engine: ZeroEngine, action: Any) -> None:
    """Run `action` on this rank; if it fails on any rank, raise on all."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:
        error = caught
    report = None if error is None else f"{type(error).__name__}: {error}"
    reports = engine.mesh.control.gather_objects(report)
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(reports) if text is not None}
    if failed:
        raise RuntimeError(f"failed on other rank(s): {failed}")
