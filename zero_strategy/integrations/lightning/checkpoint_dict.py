"""The framework's checkpoint dict beside the engine's files, and back.

A checkpoint directory holds weights and optimizer state as safetensors, written by the engine. All else that
Lightning (or Fabric) puts into its checkpoint dict goes into one small file of its own there, written by
`torch.save`; so do entries of a module's `state_dict` besides parameters and buffers (`get_extra_state`, metrics), of
any type. States that every rank has of its own, such as a data loader's position, go into a small file of each.

Lightning builds one dict with everything in it, hands it to the user's hooks, and then saves it (or loads from it).
Sharded weights should not be gathered on the way. So the dict holds state dicts that are made when somebody looks
into them: a hook that reads or changes one gets the real thing; where no hook does, the engine moves the shards by
itself.

`LoadsFromDirectory` builds a LightningModule from such a directory, without a Trainer and without sharding.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint import StateReader
from zero_strategy.checkpoint.contents import MASTER
from zero_strategy.checkpoint.disk import beside, remove, replace_directory, sync
from zero_strategy.checkpoint.manifest import AVERAGE
from zero_strategy.checkpoint.storage import is_remote, is_remote_checkpoint
from zero_strategy.checkpoint.writer import check_replaceable
from zero_strategy.convert.averages import averages_of, has_averages
from zero_strategy.convert.convert import open_any
from zero_strategy.engine import ZeroEngine
from zero_strategy.runtime.torch_private import saves_tensors_itself, version_of

if TYPE_CHECKING:
    from zero_strategy.checkpoint import StateReader
    from zero_strategy.comm.mesh import Mesh


LIGHTNING_FILE = "lightning.pt"
"""The rest of the Trainer's checkpoint dict."""

FABRIC_FILE = "fabric.pt"
"""The rest of the state dict given to `Fabric.save`."""


@dataclass(frozen=True)
class StoredWeights:
    """Place of the weights of a checkpoint dict.

    Attributes:
        reader: The directory.
        extra: What the module's state dict holds besides tensors.
    """

    reader: StateReader
    extra: Mapping[str, Any]

    def whole(self) -> dict[str, Any]:
        """The full state dict, every tensor under every name it has, tied names sharing one."""
        weights = {name: self.reader.full(name) for name in self.reader.weights}
        aliases = {alias: weights[first] for alias, first in self.reader.aliases.items()}
        return {**weights, **aliases, **self.extra}

    def load_into(self, engine: ZeroEngine, strict: bool) -> None:
        """Read each rank's part into live shards."""
        engine.load_weights(self.reader, strict=strict)
        load_extra_state(engine.module, self.extra)


_ENGINE = "zero_strategy"
"""The engine's own entry in the manifest's user metadata."""


def is_directory_checkpoint(path: str | os.PathLike[str]) -> bool:
    """True if `path` is for `CheckpointReader`: a directory, or one safetensors file."""
    if is_remote(path):
        return is_remote_checkpoint(os.fspath(path))
    found = Path(path)
    return found.is_dir() or found.suffix == ".safetensors"


def pack(rest: Mapping[str, Any], module: nn.Module) -> bytes:
    """The rest of a checkpoint dict, and what only the module itself knows how to save, as a file's content."""
    buffer, extra = io.BytesIO(), extra_state(module)
    torch.save({**whole(dict(rest)), **({EXTRA_KEY: extra} if extra else {})}, buffer)
    return buffer.getvalue()


AVERAGING_STATE = "averaging_state"
"""Key of Lightning's checkpoints by which it is known that an averaging callback was at work."""


def write_file(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a whole checkpoint dict as one file, in the place of a file or of a checkpoint directory.

    Raises:
        ValueError: If the path is a directory and no checkpoint.
        OSError: If the file system fails; what was there stays.
    """
    target, token = Path(os.path.abspath(path)), uuid.uuid4().hex[:12]
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(target, token, "tmp")
    try:
        torch.save(dict(checkpoint), temporary)
        sync(temporary)
        replace_directory(temporary, target, beside(target, token, "old"))
    finally:
        remove(temporary)


def unpack(content: bytes, source: str, weights_only: bool | None) -> dict[str, Any]:
    """The rest of a checkpoint dict.

    Args:
        content: What `pack` gave.
        source: Its file, for errors.
        weights_only: False allows arbitrary pickled objects; None means True, as in torch.

    Raises:
        UnpicklingError: If it holds such objects and they are not allowed; names them and the ways out.
    """
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only is not False)
    except UnpicklingError as error:
        raise UnpicklingError(
            f"{source} holds objects (hyper-parameters or callback state) that are not plain data: {error}. If you "
            "trust it, allow their classes with torch.serialization.add_safe_globals([...]), or allow everything with "
            "ZeroStrategy(load_weights_only=False)."
        ) from None
    return dict(found)


def read_checkpoint(
    path: str | os.PathLike[str], weights_only: bool | None, *, verify: bool = True, resumes: bool = False
) -> dict[str, Any]:
    """The Trainer's checkpoint dict from a directory; weights and optimizer state come when they are looked into.

    Args:
        path: The checkpoint.
        weights_only: See `unpack`.
        verify: Compare checksums.
        resumes: Training goes on: the weights are the model's, where else those of an averaging callback are averages.

    Raises:
        ValueError: If the directory is no complete checkpoint; names what is wrong.
    """
    return checkpoint_of(open_any(path, verify=verify), weights_only, resumes=resumes)


def checkpoint_of(reader: StateReader, weights_only: bool | None, *, resumes: bool = False) -> dict[str, Any]:
    """The dict of `read_checkpoint`, from a checkpoint that is open."""
    rest: dict[str, Any] = {}
    if reader.has_manifest and LIGHTNING_FILE in reader.manifest.files:
        rest = unpack(reader.extra(LIGHTNING_FILE), f"{reader.directory}/{LIGHTNING_FILE}", weights_only)
    rest.setdefault("pytorch-lightning_version", "2.6.0")  # plain weights: nothing to migrate
    averaged = not resumes and AVERAGING_STATE in rest and has_averages(reader)
    rest["state_dict"] = weights_on_demand(averages_of(reader) if averaged else reader, rest)
    if reader.has_manifest and reader.manifest.optimizers:
        rest["optimizer_states"] = [
            StateOnDemand(lambda name=name: whole_optimizer_state(reader, name), nested=True, source=reader)  # type: ignore[misc]
            # Names are numbers, of which 10 comes after 9.
            for name in sorted(reader.manifest.optimizers, key=int)
        ]
    return rest


def weights_on_demand(reader: StateReader, rest: dict[str, Any]) -> StateOnDemand:
    """The state dict of a checkpoint; its extra state moves there from `rest`."""
    stored = StoredWeights(reader, rest.pop(EXTRA_KEY, {}))
    return StateOnDemand(stored.whole, source=stored)


def whole_optimizer_state(reader: StateReader, optimizer: str) -> dict[str, Any]:
    """An optimizer's whole state in the form of torch's `Optimizer.state_dict()`, master weights left out."""
    record, states = reader.manifest.optimizers[optimizer], reader.states(optimizer)
    dtypes = dict(reader.manifest.user.get(_ENGINE, {}).get("scalar_dtypes", {})[int(optimizer)])
    numbers: dict[str, int] = {}
    groups = []
    for stored in record.param_groups:
        for name in stored["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**stored, "params": [numbers[name] for name in stored["params"]]})
    state: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        # JSON knows no dtypes, and optimizers keep some numbers as tensors.
        values: dict[str, Any] = {
            key: torch.tensor(value, dtype=getattr(torch, dtypes[key])) if key in dtypes else value
            for key, value in record.scalars.get(name, {}).items()
        }
        for kind, specs in states.items():
            # torch's form of a state has no place for these two.
            if kind not in (MASTER, AVERAGE) and name in specs:
                values[kind] = reader.full(name, (optimizer, kind))
        if values:
            state[number] = values
    return {"state": state, "param_groups": groups}


def describe(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of the rest for a reader of the manifest."""
    known = ("epoch", "global_step", "pytorch-lightning_version")
    return {"lightning": {key: rest[key] for key in known if isinstance(rest.get(key), (int, str))}}


def check_options(path: str, storage_options: Any) -> None:
    """Raise if a checkpoint cannot be written as asked.

    Raises:
        ValueError: For options that only a `CheckpointIO` has a use for.
    """
    if storage_options is not None:
        raise ValueError(
            f"{path}: storage_options={storage_options!r}: a checkpoint directory is written by all ranks themselves "
            "and has no use for them. For a URL give options to fsspec (its configuration or environment variables), "
            "or pass plugins=[a CheckpointIO] to save one whole file through it."
        )


class StateOnDemand(MutableMapping[str, Any]):
    """A state dict that `make` makes at the first access; under stage 3 all ranks must then access it.

    Args:
        make: Gives the full state dict.
        nested: Values are containers, whose changes are not seen: to have been looked into counts as changed.
        source: What it is made from, for who can take it from there.
        take_part: What a rank calls that has no use for it while others make it; default: `make`.
    """

    def __init__(
        self,
        make: Callable[[], dict[str, Any]],
        *,
        nested: bool = False,
        source: Any = None,
        take_part: Callable[[], object] | None = None,
    ) -> None:
        self._make, self._nested, self.source, self._take_part = make, nested, source, take_part or make
        self._made: dict[str, Any] | None = None
        self._original: dict[str, Any] = {}
        self._versions: dict[str, int] = {}

    def whole(self) -> dict[str, Any]:
        """The real dict."""
        if self._made is None:
            self._made = dict(self._make())
            self._original = dict(self._made)
            tensors = {key: value for key, value in self._made.items() if isinstance(value, Tensor)}
            # Inference tensors have no version counter.
            self._versions = {key: version_of(value) for key, value in tensors.items() if not value.is_inference()}
        return self._made

    def take_part(self) -> None:
        """Do this rank's share in `whole` of others, and keep nothing."""
        if self._made is None:
            self._take_part()

    @property
    def changed(self) -> bool:
        """True if somebody added, removed, replaced or wrote to an entry."""
        if self._made is None:
            return False
        if self._nested or self._made.keys() != self._original.keys():
            return True
        if any(self._made[key] is not value for key, value in self._original.items()):
            return True
        return any(version_of(self._original[key]) != version for key, version in self._versions.items())

    def __getitem__(self, key: str) -> Any:
        return self.whole()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.whole()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.whole()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return len(self.whole())

    def __bool__(self) -> bool:
        return True  # asked for by `if state_dict:`, which should not gather a model

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        # A file loads also where this package is not installed.
        return dict, (self.whole(),)


def untouched(value: Any) -> bool:
    """True if the engine may move this state by itself: it is on demand, and nobody changed it."""
    return isinstance(value, StateOnDemand) and not value.changed


def whole(value: Any) -> Any:
    """The real thing in place of a state on demand, also inside dicts and lists."""
    if isinstance(value, StateOnDemand):
        return value.whole()
    if type(value) is dict:
        return {key: whole(item) for key, item in value.items()}
    if type(value) is list:
        return [whole(item) for item in value]
    return value


def take_part(value: Any) -> None:
    """This rank's share in `whole` of others, for the same dict."""
    if isinstance(value, StateOnDemand):
        value.take_part()
    elif type(value) is dict:
        take_part(list(value.values()))
    elif type(value) is list:
        for item in value:
            take_part(item)


EXTRA_KEY = "zero_strategy.extra_state"
"""Its key in the framework's file."""

_SUFFIX = "_extra_state"


def extra_state(module: nn.Module) -> dict[str, Any]:
    """The entries of `module.state_dict()` that are no parameters and no buffers, by full name."""
    found: dict[str, Any] = {}
    for name, child in _savers(module):
        prefix = f"{name}." if name else ""
        tensors = {key for key, _ in [*child.named_parameters(), *child.named_buffers()]}
        state = child.state_dict() if _is_own(child) else {_SUFFIX: child.get_extra_state()}
        found.update({prefix + key: value for key, value in state.items() if key not in tensors})
    return found


def load_extra_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules back what `extra_state` took; names that no module knows are left alone."""
    for name, child in _savers(module):
        prefix = f"{name}." if name else ""
        mine = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if _is_own(child):
            if mine:
                # Tensors are the engine's, and missing here.
                child.load_state_dict(mine, strict=False)
        elif _SUFFIX in mine:
            child.set_extra_state(mine[_SUFFIX])


def _savers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if _is_own(child) or type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child


def _is_own(child: nn.Module) -> bool:
    """True if the module saves something of its own that calling its `state_dict` gives, without gathering anything."""
    cls = type(child)
    overrides = (
        cls.state_dict is not nn.Module.state_dict
        or saves_tensors_itself(cls)
        or cls.get_extra_state is not nn.Module.get_extra_state
    )
    return overrides and not any(True for _ in child.parameters())


_DIRECTORY = "ranks"


def path_of(rank: int) -> str:
    """The file of a rank, relative to the checkpoint; written by `torch.save`."""
    return f"{_DIRECTORY}/rank-{rank:05d}.pt"


def own_file(state: Any, mesh: Mesh) -> dict[str, bytes]:
    """This rank's state as a file, {path: content}; nothing for an empty state, or where there is one rank only."""
    if not state or mesh.world_size == 1 or mesh.tensor.rank:  # ranks that divide layers have the same data
        return {}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {path_of(mesh.rank): buffer.getvalue()}


def load_own(reader: StateReader, mesh: Mesh, weights_only: bool | None, what: str) -> Any:
    """Argument of this rank for `own_file`; None where rank 0's, in the framework's own file, is the one to take.

    Saved by another number of ranks, states cannot be handed out again; that rank 0's goes to all is told, unless all
    saved the same.

    Args:
        reader: The checkpoint.
        mesh: Who loads it.
        weights_only: See `unpack`.
        what: What is in the states, for the warning.
    """
    files = reader.manifest.files if reader.has_manifest else {}
    # Paths in a manifest have slashes on every system.
    saved = [path for path in files if str(PurePosixPath(path).parent) == _DIRECTORY]
    if not saved:
        return None
    mine = path_of(mesh.rank)
    if len(saved) == mesh.world_size and mine in files:
        return unpack(reader.extra(mine), f"{reader.directory}/{mine}", weights_only)
    checksums = reader.manifest.checksums
    if mesh.rank == 0 and (checksums is None or len({checksums.files[path] for path in saved}) > 1):
        warnings.warn(
            f"{reader.directory} was saved by {len(saved)} ranks, each with a state of its own ({what}), and is loaded "
            f"by {mesh.world_size}: every rank gets the one of rank 0. In the rest of this epoch data may be seen "
            "twice or not at all; go on from the end of an epoch, or with as many ranks, to avoid that.",
            stacklevel=2,
        )
    return None


if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object

T = TypeVar("T")


class _OfClasses(classmethod):  # type: ignore[type-arg]
    """A classmethod that instances have, too, and that fails when it is called on one, as Lightning's own does."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        method = super().__get__(instance, owner)
        if instance is None:
            return method

        @functools.wraps(method)
        def refuse(*arguments: Any, **keywords: Any) -> Any:
            name = f"{type(instance).__name__}.{method.__name__}"
            raise TypeError(f"{name}() makes a new object: call it on the class, not on an instance")

        return refuse


class LoadsFromDirectory(_Base):
    """A base class that lets `MyModule.load_from_checkpoint(path)` take a checkpoint directory as well as a file.

    Example:
        ```python
        class MyModule(zero_strategy.LoadsFromDirectory, LightningModule): ...
        model = MyModule.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        ```
    """

    @_OfClasses  # type: ignore[arg-type]
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *arguments: Any, weights_only: bool | None = None, **keywords: Any
    ) -> Any:
        """See `zero_strategy.load_from_checkpoint`, which takes what Lightning's does."""
        load = functools.partial(super().load_from_checkpoint, weights_only=weights_only)
        if not isinstance(checkpoint_path, (str, os.PathLike)) or not is_directory_checkpoint(checkpoint_path):
            return load(checkpoint_path, *arguments, **keywords)
        with open_checkpoint(checkpoint_path, weights_only=weights_only) as file:
            return load(file, *arguments, **keywords)


def load_from_checkpoint(
    cls: type[T], path: str | os.PathLike[str], *, weights_only: bool | None = None, **kwargs: Any
) -> T:
    """`cls.load_from_checkpoint(path, **kwargs)` for a checkpoint directory, or for an ordinary checkpoint file.

    Args:
        cls: A LightningModule or LightningDataModule class.
        path: The checkpoint.
        weights_only: False allows checkpoints whose hyper-parameters or callback states are arbitrary pickled objects.
        **kwargs: What the class's own `load_from_checkpoint` takes: `map_location`, `strict`, hyper-parameters, ...

    Returns:
        The module, not sharded, in eval or train mode as Lightning leaves it.

    Example:
        ```python
        model = zero_strategy.load_from_checkpoint(GPTModule, "checkpoints/last.ckpt")
        ```
    """
    load: Any = cls.load_from_checkpoint  # type: ignore[attr-defined]
    if not is_directory_checkpoint(path):
        return load(path, weights_only=weights_only, **kwargs)  # type: ignore[no-any-return]
    with open_checkpoint(path, weights_only=weights_only) as file:
        return load(file, weights_only=weights_only, **kwargs)  # type: ignore[no-any-return]


def open_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, optimizers: bool = False
) -> IO[bytes]:
    """A checkpoint directory as one open file, such as `torch.load` and `load_from_checkpoint` take.

    The file is a temporary one without a name: it takes as much disk as the model, and goes when it is closed.

    Args:
        path: The checkpoint directory.
        weights_only: See `load_from_checkpoint`.
        optimizers: Include the optimizers' states.

    Example:
        ```python
        with zero_strategy.open_checkpoint("last.ckpt") as file:
            model = GPTModule.load_from_checkpoint(file)
        ```
    """
    checkpoint = read_checkpoint(path, weights_only)
    if not optimizers:
        checkpoint.pop("optimizer_states", None)
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    torch.save(whole(checkpoint), file)
    file.seek(0)
    return file
