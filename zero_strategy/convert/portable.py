"""The portable state: a whole training state without a file format, and its reader.

Every importer gives this form, and every exporter takes it.

    foreign directory --read--> PortableState --write_portable--> our checkpoint
    our checkpoint --portable_of--> PortableState --write--> foreign directory

Tensors are loaded when they are asked for, one at a time, so that a state may be larger than memory.

The engine loads foreign directories as its own.
"""

from __future__ import annotations

import io
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import (
    AVERAGE,
    INDEX_NAME,
    FileKind,
    Manifest,
    OptimizerRecord,
    Scalar,
    WeightRecord,
)
from zero_strategy.checkpoint.plan import DEFAULT_MAX_FILE_BYTES, CheckpointPlan
from zero_strategy.checkpoint.reader import StateReader, check_out
from zero_strategy.checkpoint.writer import CheckpointWriter, Piece

CLIENT_STATE_NAME = "client_state.pt"
"""`torch.save({"client_state": ..., "lr_scheduler": ...})`, loadable under weights_only=True."""

OWN_KEY = "zero_strategy"
"""Key of the engine's own entry in the manifest's user metadata."""

Progress = Callable[[int], object]
"""Is given the number of bytes that were moved since it was called last."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor somewhere on disk.

    Attributes:
        spec: Its name, dtype and shape.
        load: Gives the full tensor on the CPU, in that dtype and shape; called when needed, possibly more than once.
    """

    spec: TensorSpec
    load: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> StoredTensor:
        """One that is in memory already."""
        return cls(TensorSpec.of(name, tensor), lambda: tensor.detach().cpu())

    def named(self, name: str) -> StoredTensor:
        """A copy under another name."""
        return StoredTensor(TensorSpec(name, self.spec.dtype, self.spec.shape), self.load)


@dataclass
class PortableOptimizer:
    """State of one optimizer, in full tensors under parameter names.

    Attributes:
        kinds: State kind, such as "exp_avg", or "master" for fp32 master weights -> parameter name -> tensor. A fp32
            parameter has no master: the weight itself is it. Names in the order of the weights.
        scalars: Parameter name -> key, such as "step" -> number.
        scalar_dtypes: Key -> torch dtype name ("float32"), where torch's optimizer keeps a 0-d tensor.
        param_groups: Hyper-parameters of each group, and "params": names.
        unnamed: Why parameters are called "#0", "#1", ..., counted through the groups, instead of by their names: a
            file that does not say them. Such state can be loaded into an optimizer; `with_names` makes it whole.
    """

    kinds: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    scalar_dtypes: dict[str, str] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    unnamed: str = ""

    def with_names(self, names: Sequence[str], weights: Mapping[str, StoredTensor]) -> PortableOptimizer:
        """The state with names instead of numbers.

        Args:
            names: Of all parameters, through the groups.
            weights: The weights, whose shapes the state must have.

        Raises:
            ValueError: If the number of names or a shape does not fit.
        """
        numbers = [number for group in self.param_groups for number in group["params"]]
        if len(numbers) != len(names):
            raise ValueError(f"the state is that of {len(numbers)} parameters, {len(names)} names were given")
        of = dict(zip(numbers, names, strict=True))
        kinds = {kind: {of[n]: tensor for n, tensor in tensors.items()} for kind, tensors in self.kinds.items()}
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                if name in weights and weights[name].spec.shape != tensor.spec.shape:
                    raise ValueError(
                        f"state {kind!r} in the place of parameter {name!r} has the shape {tensor.spec.shape}, "
                        f"the parameter {weights[name].spec.shape}: the optimizer had its parameters in another order"
                    )
        return PortableOptimizer(
            kinds={kind: {n: tensor.named(n) for n, tensor in tensors.items()} for kind, tensors in kinds.items()},
            scalars={of[number]: values for number, values in self.scalars.items()},
            scalar_dtypes=self.scalar_dtypes,
            param_groups=[{**group, "params": [of[n] for n in group["params"]]} for group in self.param_groups],
        )


@dataclass
class PortableState:
    """A whole training state.

    Attributes:
        weights: Name -> tensor, in the order of the state dict, a tied tensor once.
        aliases: Further name of a tied tensor -> its first name.
        optimizers: In the order in which they are attached.
        counters: "global_steps", "global_samples", "skipped_steps" and the like.
        user: Anything that JSON can hold, for the manifest.
        extra_files: Relative path -> content.
        loss_scaler: In the form of `LossScaler.state_dict()`, or None.
        client_state: What the user saved besides.
        lr_scheduler: The scheduler's state dict, or None.
    """

    weights: dict[str, StoredTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizers: list[PortableOptimizer] = field(default_factory=list)
    counters: dict[str, Scalar] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    extra_files: dict[str, bytes] = field(default_factory=dict)
    loss_scaler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
    lr_scheduler: dict[str, Any] | None = None

    def tensors(self) -> Iterator[tuple[FileKind, StoredTensor]]:
        """All tensors with their kind: "model", or (number of the optimizer, state kind)."""
        for tensor in self.weights.values():
            yield "model", tensor
        for number, optimizer in enumerate(self.optimizers):
            for kind, tensors in sorted(optimizer.kinds.items()):
                for tensor in tensors.values():
                    yield (str(number), kind), tensor


def write_portable(
    state: PortableState,
    directory: str | os.PathLike[str],
    *,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes a checkpoint directory of ours, atomically; one process does it, with one tensor in memory at a time.

    Args:
        state: What to write.
        directory: The checkpoint; an existing one is replaced. The name of no `latest` is changed.
        max_file_bytes: Most bytes of tensor data in one weights file.
        progress: Is told of the bytes written.

    Raises:
        ValueError: If names clash, a loaded tensor is not what its spec says, an optimizer's parameters have no names,
            or the client state holds objects that are not plain data; names them.
        OSError: If the file system fails. The target is then as it was.
    """
    if unnamed := [optimizer.unnamed for optimizer in state.optimizers if optimizer.unnamed]:
        raise ValueError(unnamed[0])
    extra_files = {**state.extra_files, **client_state_file(state)}
    plan = portable_plan(state, max_file_bytes)
    own = {
        **state.user.get(OWN_KEY, {}),
        "scalar_dtypes": [optimizer.scalar_dtypes for optimizer in state.optimizers],
        "loss_scaler": state.loss_scaler,
    }
    manifest = plan.manifest(
        world_size=1,
        stage=0,
        scalars={str(number): optimizer.scalars for number, optimizer in enumerate(state.optimizers)},
        param_groups={str(number): optimizer.param_groups for number, optimizer in enumerate(state.optimizers)},
        counters=state.counters,
        user={**state.user, OWN_KEY: own},
    )
    writer = CheckpointWriter(directory, rank=0, world_size=1, token=uuid.uuid4().hex[:12])
    try:
        writer.prepare(plan)
        writer.write("model", _pieces(state.weights.values(), progress))
        for number, optimizer in enumerate(state.optimizers):
            for kind, tensors in sorted(optimizer.kinds.items()):
                writer.write((str(number), kind), _pieces(tensors.values(), progress))
        writer.commit(manifest, extra_files, update_latest=False)
    except BaseException:
        writer.abandon()
        raise


def portable_plan(state: PortableState, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES) -> CheckpointPlan:
    """The files that `write_portable` makes of a state."""
    states = {
        str(number): {
            kind: [tensor.spec for tensor in tensors.values()] for kind, tensors in sorted(optimizer.kinds.items())
        }
        for number, optimizer in enumerate(state.optimizers)
    }
    specs = [tensor.spec for tensor in state.weights.values()]
    return CheckpointPlan.build(
        specs, states, aliases=state.aliases, max_file_bytes=max_file_bytes, metadata={"format": "pt"}
    )


def _own_values(value: Any, source: str) -> dict[str, Any]:
    """Notes of a conversion among the user's values.

    Raises:
        ValueError: If it is something else; names the checkpoint.
    """
    dtypes = value.get("scalar_dtypes", []) if isinstance(value, dict) else None
    if not isinstance(dtypes, list) or not all(isinstance(each, dict) for each in dtypes):
        raise ValueError(f"{source}: user.{OWN_KEY} is {str(value)[:80]}, not what a conversion notes there")
    return dict(value)


def portable_of(reader: StateReader) -> PortableState:
    """The state of an open checkpoint of ours, or of plain weights; tensors are read when they are asked for.

    Raises:
        ValueError: If the client state is damaged or holds objects that are not plain data.
    """
    state = PortableState(
        weights={name: _stored(reader, name, spec, "model") for name, spec in reader.weights.items()},
        aliases=dict(reader.aliases),
    )
    if not reader.has_manifest:
        return state
    manifest = reader.manifest
    own = _own_values(manifest.user.get(OWN_KEY, {}), str(reader.directory))
    dtypes = dict(enumerate(own.pop("scalar_dtypes", [])))
    state.loss_scaler = own.pop("loss_scaler", None)
    for name in sorted(manifest.optimizers, key=lambda name: (len(name), name)):
        record = manifest.optimizers[name]
        kinds = {
            kind: {n: _stored(reader, n, spec, (name, kind)) for n, spec in specs.items()}
            for kind, specs in reader.states(name).items()
        }
        scalars = {parameter: dict(values) for parameter, values in record.scalars.items()}
        groups = [dict(group) for group in record.param_groups]
        scalar_dtypes = dict(dtypes.get(len(state.optimizers), {}))
        state.optimizers.append(PortableOptimizer(kinds, scalars, scalar_dtypes, groups))
    state.counters = dict(manifest.counters)
    state.user = {key: value for key, value in manifest.user.items() if key != OWN_KEY}
    if own:
        state.user[OWN_KEY] = own
    with_tensors = {record.file for record in manifest.weights.values()} | {INDEX_NAME, CLIENT_STATE_NAME}
    with_tensors |= {path for record in manifest.optimizers.values() for path in record.states.values()}
    state.extra_files = {path: reader.extra(path) for path in manifest.files if path not in with_tensors}
    if CLIENT_STATE_NAME in manifest.files:
        source = f"{reader.directory}/{CLIENT_STATE_NAME}"
        state.client_state, state.lr_scheduler = parse_client_state(reader.extra(CLIENT_STATE_NAME), source)
    return state


def without_averages(state: PortableState) -> PortableState:
    """The state without running averages of weights, which formats of others do not know."""
    optimizers = [
        replace(optimizer, kinds={kind: found for kind, found in optimizer.kinds.items() if kind != AVERAGE})
        for optimizer in state.optimizers
    ]
    return replace(state, optimizers=optimizers)


def client_state_file(state: PortableState) -> dict[str, bytes]:
    """The client state and the scheduler's as a file, or no file where there are none.

    Raises:
        ValueError: If they hold what cannot be loaded under weights_only=True; names the key.
    """
    if not state.client_state and state.lr_scheduler is None:
        return {}
    for key, value in [*state.client_state.items(), ("lr_scheduler", state.lr_scheduler)]:
        try:
            _unpacked(_packed(value))
        except Exception as error:
            raise ValueError(
                f"client state {key!r} ({type(value).__name__}) is not plain data and could not be loaded safely: "
                f"{error}; leave it out, or turn it into numbers, strings, tensors, lists and dicts"
            ) from None
    return {CLIENT_STATE_NAME: _packed({"client_state": state.client_state, "lr_scheduler": state.lr_scheduler})}


def parse_client_state(content: bytes, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The client state and the scheduler's state from the content of `client_state.pt`.

    Args:
        content: The file's.
        source: Its name, for errors.

    Raises:
        ValueError: If it is damaged or holds objects that are not plain data.
    """
    try:
        found = _unpacked(content)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{source}: cannot be loaded as plain data: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("client_state", {}), dict):
        raise ValueError(f"{source}: holds no client state")
    return found.get("client_state", {}), found.get("lr_scheduler")


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _stored(reader: StateReader, name: str, spec: TensorSpec, kind: FileKind) -> StoredTensor:
    return StoredTensor(spec, lambda: reader.full(name, kind))


def _pieces(tensors: Iterable[StoredTensor], progress: Progress | None) -> Iterator[Piece]:
    """The tensors in the order of a file's bytes, each loaded when its turn comes."""
    for tensor in sorted(tensors, key=lambda tensor: -tensor.spec.dtype.itemsize):
        yield Piece(tensor.spec.name, 0, loaded(tensor).contiguous().reshape(-1))
        if progress is not None:
            progress(tensor.spec.nbytes)


def loaded(tensor: StoredTensor) -> torch.Tensor:
    """The tensor, checked against its spec.

    Raises:
        ValueError: If its dtype or shape is another one.
    """
    value, spec = tensor.load(), tensor.spec
    if value.dtype != spec.dtype or tuple(value.shape) != spec.shape:
        raise ValueError(
            f"tensor {spec.name!r} was announced as {spec.dtype} {spec.shape}, "
            f"its file has {value.dtype} {tuple(value.shape)}"
        )
    return value.detach()


class PortableReader(StateReader):
    """A portable state, open for reading.

    It keeps the tensor that was read last, since ranks and blocks ask for parts of one after the other.

    Args:
        state: The state.
        directory: Where it came from, for errors.

    Its manifest has records without files: of the files, it lists those that `extra` gives.
    """

    block = sys.maxsize  # any part costs as much as the whole

    def __init__(self, state: PortableState, directory: Path) -> None:
        self.state = state
        self.directory = directory
        self.aliases = dict(state.aliases)
        self._tensors = self._by_kind()
        self._weights = {name: tensor.spec for name, tensor in state.weights.items()}
        self._files = {**state.extra_files, **client_state_file(state)}
        self._last: tuple[FileKind, str, torch.Tensor] | None = None
        self._manifest = self._described()

    def states(self, optimizer: str) -> dict[str, Mapping[str, TensorSpec]]:
        """See `StateReader.states`."""
        if optimizer not in self.manifest.optimizers:
            known = sorted(self.manifest.optimizers)
            raise ValueError(f"{self.directory}: has no optimizer {optimizer!r}; it has {known}")
        kinds = self.state.optimizers[int(optimizer)].kinds
        return {kind: {name: tensor.spec for name, tensor in tensors.items()} for kind, tensors in kinds.items()}

    def name_parameters(self, optimizer: str, names: Sequence[str]) -> None:
        """See `StateReader.name_parameters`."""
        number = int(optimizer)
        if not self.state.optimizers[number].unnamed:
            return
        try:
            self.state.optimizers[number] = self.state.optimizers[number].with_names(names, self.state.weights)
        except ValueError as error:
            raise ValueError(f"{self.directory}: optimizer {optimizer}: {error}") from None
        self._tensors, self._manifest = self._by_kind(), self._described()

    def spec(self, name: str, kind: FileKind = "model") -> TensorSpec:
        """See `StateReader.spec`."""
        return self._find(name, kind).spec

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        out: torch.Tensor | None = None,
        kind: FileKind = "model",
    ) -> torch.Tensor:
        """See `StateReader.read`."""
        tensor = self._find(name, kind)
        spec = tensor.spec
        stop = spec.numel if stop is None else stop
        if not 0 <= start <= stop <= spec.numel:
            raise ValueError(
                f"{self.directory}: elements [{start}, {stop}) are not within tensor {name!r} "
                f"of shape {spec.shape} ({spec.numel} elements)"
            )
        if out is None:
            out = torch.empty(stop - start, dtype=spec.dtype)
        check_out(name, spec.dtype, stop - start, out)
        return out.copy_(self._whole(tensor, kind)[start:stop])

    def extra(self, path: str) -> bytes:
        """See `StateReader.extra`."""
        if path not in self._files:
            raise ValueError(f"{self.directory}: has no file {path!r}; it has {sorted(self._files)}")
        return self._files[path]

    def _find(self, name: str, kind: FileKind) -> StoredTensor:
        tensors = self._tensors.get(kind)
        if tensors is None:
            raise ValueError(f"{self.directory}: has no optimizer state {kind!r}")
        stored = self.stored_name(name, tensors)
        if stored not in tensors:
            what = "tensor" if kind == "model" else f"state {kind!r} of"
            raise ValueError(f"{self.directory}: has no {what} {name!r}")
        return tensors[stored]

    def _whole(self, tensor: StoredTensor, kind: FileKind) -> torch.Tensor:
        if self._last is None or self._last[:2] != (kind, tensor.spec.name):
            self._last = None  # before the next one is loaded, so that there is never more than one
            self._last = (kind, tensor.spec.name, loaded(tensor).contiguous().reshape(-1))
        return self._last[2]

    def _by_kind(self) -> dict[FileKind, Mapping[str, StoredTensor]]:
        found: dict[FileKind, Mapping[str, StoredTensor]] = {"model": self.state.weights}
        for number, optimizer in enumerate(self.state.optimizers):
            found |= {(str(number), kind): tensors for kind, tensors in optimizer.kinds.items()}
        return found

    def _described(self) -> Manifest:
        state = self.state
        own = {
            **state.user.get(OWN_KEY, {}),
            "scalar_dtypes": [optimizer.scalar_dtypes for optimizer in state.optimizers],
            "loss_scaler": state.loss_scaler,
        }
        return Manifest(
            files={path: len(content) for path, content in self._files.items()},
            weights={name: WeightRecord(spec.dtype, spec.shape, "") for name, spec in self._weights.items()},
            aliases=self.aliases,
            optimizers={
                str(number): OptimizerRecord(dict.fromkeys(entry.kinds, ""), entry.scalars, entry.param_groups)
                for number, entry in enumerate(state.optimizers)
            },
            counters=state.counters,
            user={**state.user, OWN_KEY: own},
        )
