"""Loading a checkpoint into an engine: each rank reads the element ranges that it owns, whichever rank saved them."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint import random_state
from zero_strategy.checkpoint.agreement import catalog_of, check_references, state_dict_entries, whole_shape
from zero_strategy.checkpoint.coded_states import Conversion, StatesOfOtherBits, dtypes_here
from zero_strategy.checkpoint.contents import MASTER, wanted_in_whole
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import AVERAGE
from zero_strategy.checkpoint.module_state import ENTRIES_FILE, EXTRA_STATE_FILE, load_module_entries
from zero_strategy.checkpoint.piece_reader import check_one_save, supplied
from zero_strategy.checkpoint.reader import StateReader, Wanted, average_buffers
from zero_strategy.comm.store import together
from zero_strategy.fsdp.dtensor import held_by
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.ops.dynamic_codes import blocks_of
from zero_strategy.optim.coded_state import SCALES
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.quantized.entries import is_description, undescribed
from zero_strategy.quantized.scales import weight_of
from zero_strategy.runtime.nested_state import nested
from zero_strategy.runtime.terminal import is_shown, progress
from zero_strategy.runtime.torch_private import buffers_of, loads_tensors_itself

if TYPE_CHECKING:
    from zero_strategy.checkpoint.preemption import StepWatch
    from zero_strategy.checkpoint.save import Saver
    from zero_strategy.train_state import TrainState


T = TypeVar("T")
OWN = "zero_strategy"
"""Key of the engine's own entry in the manifest's user metadata."""
_MOMENT_SETTINGS = {"alpha", "betas", "etas", "lambd", "lr_decay", "momentum", "rho"}
"""Hyper-parameters that tell families of optimizers apart, for a state of one means nothing to another."""


Source = str | os.PathLike[str] | StateReader
"""A checkpoint, a folder with `latest`, or what reads one."""


class Loader:
    """Loads checkpoints into one engine; all ranks call its methods.

    Args:
        engine: The engine.
        saver: Its saves, which end before anything is loaded.
        steps: Its counters.
        opened: Opens a checkpoint of any format at a path; the second argument is `checkpoint.verify`.
        publish: Called when weights have changed: other parts of the model may have copies.
    """

    def __init__(
        self,
        engine: TrainState,
        saver: Saver,
        steps: StepWatch,
        opened: Callable[[str | os.PathLike[str], bool], StateReader],
        publish: Callable[[], None],
    ) -> None:
        self._engine, self._saver, self._steps, self._opened, self._publish = engine, saver, steps, opened, publish
        # By the model (its weights) or the optimizer: what is gone is of no concern any more.
        self._half_loaded: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._generations: list[int] = []

    def check_whole(self, call: str, sharded: Iterable[ShardedOptimizer] = ()) -> None:
        """Raise if a load has failed when it had begun to change what is needed, and none has succeeded since.

        Args:
            call: What needs it, for the message.
            sharded: Optimizers whose state it needs, beside the weights.

        Raises:
            RuntimeError: Then; names what is half loaded, from where, and the way out.
        """
        model = self._engine.model
        # Weights that came by `module.load_state_dict` since, or from a callback: each bucket has taken new ones.
        if model in self._half_loaded and all(
            bucket.generation > before for bucket, before in zip(model.buckets, self._generations, strict=True)
        ):
            self.loaded(model)
        for part in (model, *sharded) if self._half_loaded else ():
            if part in self._half_loaded:
                raise RuntimeError(
                    f"{call} needs {_words(part)}, and a load has failed in the middle of it: "
                    f"{self._half_loaded[part]}. Load a checkpoint that is whole first"
                )

    def loaded(self, part: object) -> None:
        """The model's weights, or an optimizer's state, are whole, whatever was before."""
        self._half_loaded.pop(part, None)

    @contextlib.contextmanager
    def _changing(self, reader: StateReader, parts: Sequence[object]) -> Iterator[None]:
        """Inside, these change; an exception leaves them half loaded."""
        try:
            yield
        # Also an interrupt: whatever ends it has left some of the values as they were before.
        except BaseException as error:
            for part in parts:
                self._half_loaded[part] = f"{reader.directory} ({type(error).__name__}: {error})"
            self._generations = [bucket.generation for bucket in self._engine.model.buckets]
            raise
        for part in parts:
            self.loaded(part)

    def load(
        self,
        source: Source,
        *,
        strict: bool = True,
        optimizers: bool = True,
        weights: Callable[[StateReader], None] | None = None,
    ) -> StateReader:
        """Load all; see `ZeroEngine.load`."""
        engine = self._engine
        # First: gradients that wait for a step, and a step that will be skipped, belong to the weights of before.
        engine.model.reducer.drop()
        for sharded in engine.optimizers:
            sharded.skip_next = False
        if weights is None:
            reader = self.weights(source, strict=strict, optimizers=optimizers)
        else:
            reader = self._reader(source)
            if optimizers and engine.optimizers and reader.has_manifest:
                _check_same(engine, reader)
                check_optimizers(engine, reader)  # before it changes the weights
            weights(reader)
        # Before the optimizers, whose reading may fail: other parts of the model have the weights that are here now.
        self._publish()
        if optimizers and engine.optimizers and reader.has_manifest:
            self.optimizers(reader)
            self._steps.load_counters(reader.manifest.counters)
            self.random_state(reader)  # last: what is loaded before may draw numbers
        return reader

    def weights(self, source: Source, *, strict: bool = True, optimizers: bool = False) -> StateReader:
        """Load weights and buffers, without telling other parts of the model; see `ZeroEngine.load_weights`.

        With `optimizers` their state, which is loaded next, is refused as well before anything changes.
        """
        self._engine.model.moved.check("loading a checkpoint")
        if self._engine.average is not None:
            self._engine.average.check_not_shown("loading a checkpoint")
        self._saver.wait()  # it may read what is about to change, or write what is about to be read
        reader = self._reader(source)
        with self._engine.mesh.observed.span("load"):
            changing = self._changing(reader, [self._engine.model])
            load_weights(self._engine, reader, changing, strict=strict, optimizers=optimizers)
        return reader

    def optimizers(self, source: Source) -> None:
        """Load optimizer state, master weights and the loss scale, without telling other parts of the model."""
        reader = self._reader(source)
        self._engine.model.moved.check("loading a checkpoint")
        with self._engine.mesh.observed.span("load"):
            load_optimizers(self._engine, reader, self._changing(reader, list(self._engine.optimizers)))

    def random_state(self, reader: StateReader) -> None:
        """Give this rank its random state back, where the config says so; see `checkpoint.random_state`."""
        if self._engine.config.config.checkpoint.random_state:
            world = self._engine.mesh.world_group
            random_state.load(reader, world.rank, world.world_size)

    def _reader(self, source: Source) -> StateReader:
        if isinstance(source, StateReader):
            return source
        # Ranks that do not come are named within seconds.
        self._engine.mesh.world_group.barrier.wait_for_all("loading a checkpoint")
        verify = self._engine.config.config.checkpoint.verify
        return open_together(self._engine, lambda: self._opened(source, verify))


def _words(part: object) -> str:
    """Name of what is half loaded: a model's weights, or an optimizer's state."""
    return f"the state of {type(part.optimizer).__name__}" if isinstance(part, ShardedOptimizer) else "the weights"


def open_together(engine: TrainState, opened: Callable[[], T]) -> T:
    """Open a checkpoint on all ranks; what hinders one of them is raised on all; see `together`."""
    return together(engine.mesh.world_group.control, opened)


def load_weights(
    engine: TrainState,
    reader: StateReader,
    changing: AbstractContextManager[None],
    *,
    strict: bool,
    optimizers: bool,
) -> None:
    """Read this rank's slices of the weights, and all buffers; see `ZeroEngine.load_weights`.

    Args:
        engine: Whose.
        reader: Of the checkpoint.
        changing: Entered once nothing can be refused any more.
        strict: Missing and unexpected names are errors.
        optimizers: The state of optimizers is loaded next, and refused here.
    """
    # First: it brings small files of other hosts, which all that follows may read.
    check_one_save(engine, reader)
    with contextlib.suppress(OSError):  # what could not be written before is written anew
        engine.offloaded.settle()
    _check_same(engine, reader)
    # Before the first value changes: what is on its way to other ranks is sent from the same memory.
    together(engine.mesh.world_group.control, engine.model.invalidate_unsharded)
    referenced = check_references(engine, reader)
    entries = {name: tensor for name, tensor in state_dict_entries(engine.module) if name not in referenced}
    whole = catalog_of(engine).without(referenced)
    tied = whole.aliases
    resized = _buffers_to_resize(engine.module, reader)
    if strict:
        shapes = {name: tuple(buffer.shape) for name, (_, _, buffer) in resized.items()}
        reader.check_against([replace(spec, shape=shapes.get(spec.name, spec.shape)) for spec in whole.weights], tied)
    sources = reader.sources(entries, tied)
    # In the order of names: all ranks name the same tensor.
    for name, source in sorted(sources.items()):
        if name not in resized:
            _check_shape(name, tuple(reader.spec(source).shape), whole_shape(engine, entries[name]))
    if optimizers and engine.optimizers and reader.has_manifest:
        check_optimizers(engine, reader)

    def check_files() -> None:
        _check_small_files(engine, reader)
        described = _descriptions(reader)
        for name in sources if reader.of_whole_model else ():
            weight = weight_of(name)
            if name.endswith(".nested_absmax") and not any(k.startswith(f"{weight}.quant_state.") for k in described):
                raise ValueError(undescribed(weight))
        # It reads both tensors from end to end; one rank is enough, for all hear of it.
        if engine.mesh.world_group.rank == 0:
            reader.check_ties(tied)

    # Before the first value is read: damage to what one rank alone needs later would stop that one alone.
    together(engine.mesh.world_group.control, check_files)
    wanted: list[Wanted] = []

    def want() -> None:
        for bucket in engine.model.buckets:
            wanted.extend(_wanted_weights(engine, reader, bucket, sources))
        for name, buffer in entries.items():
            if name in sources and not isinstance(buffer, nn.Parameter):
                held = held_by(buffer)
                wanted.append(Wanted(sources[name], 0, held.numel(), then=_copier(held, tuple(held.shape))))

    with changing:
        with torch.no_grad():
            for name, (table, key, buffer) in resized.items():
                table[key] = buffer
                if name in entries:
                    entries[name] = buffer
            together(engine.mesh.world_group.control, want)
            with supplied(engine, reader, wanted):
                together(engine.mesh.world_group.control, lambda: _read(engine, reader, wanted, "weights"))
            load_extra_state(engine.module, reader)
            # Each rank has read its slice only, also of what all of them hold whole.
            for bucket in engine.model.buckets:
                if not bucket.placement.shard_parameters:
                    bucket.ranks.gather.all_gather(bucket.flat).wait()
            engine.model.forget_unsharded()
        # Last: a module's own loader is handed its present parameters, which must be the loaded ones.
        load_module_entries(engine, _entries(reader) | _descriptions(reader))


def _entries(reader: StateReader) -> dict[str, Any]:
    """Entries of state dicts beside parameters and buffers."""
    if not reader.has_manifest or ENTRIES_FILE not in reader.manifest.files:
        return {}
    found: dict[str, Any] = torch.load(io.BytesIO(reader.extra(ENTRIES_FILE)), weights_only=True)
    return found


def _descriptions(reader: StateReader) -> dict[str, Any]:
    """Tables and descriptions of 4-bit weights: entries here, tensors in transformers' files."""
    if not any(name.endswith(".weight.absmax") for name in reader.weights):
        return {}
    tensors = {name: reader.read(name) for name in reader.weights if is_description(name)}
    return tensors | {name: value for name, value in _entries(reader).items() if is_description(name)}


def _buffers_to_resize(
    module: nn.Module, reader: StateReader
) -> dict[str, tuple[MutableMapping[str, Tensor | None], str, Tensor]]:
    """New buffers of the shapes that the checkpoint has, where a module or one around it loads in a way of its own.

    Observers of quantisation and the like resize their buffers when they load; parameters keep their shapes.

    Returns:
        The buffer's name -> the module's table of buffers, the key there, and a buffer of zeros to put there.
    """
    own, found = set[str](), dict[str, tuple[MutableMapping[str, Tensor | None], str, Tensor]]()
    for name, owner in module.named_modules():
        if loads_tensors_itself(owner) or (name and name.rpartition(".")[0] in own) or ("" in own):
            own.add(name)
        for key, buffer in buffers_of(owner).items() if name in own else ():
            stored = reader.weights.get(path := f"{name}.{key}" if name else key)
            if buffer is None or stored is None or stored.shape == tuple(buffer.shape):
                continue
            fresh = torch.zeros(stored.shape, dtype=buffer.dtype, device=buffer.device)
            found[path] = (buffers_of(owner), key, fresh)
    return found


def check_optimizers(engine: TrainState, reader: StateReader) -> None:
    """Refuse optimizer state that does not fit, on all ranks, before anything changes. A collective.

    Raises:
        ValueError: Saying what does not fit.
    """
    records = reader.manifest.optimizers
    if len(records) != len(engine.optimizers):
        raise ValueError(
            f"{reader.directory} holds the state of {len(records)} optimizer(s), {len(engine.optimizers)} are "
            "attached; attach the same optimizers in the same order, or load weights only"
        )
    names = {id(p): name for name, p in engine.model.names()}
    elsewhere = _elsewhere(engine, names)

    def check() -> None:
        for number, sharded in enumerate(engine.optimizers):
            groups = sharded.optimizer.param_groups
            reader.name_parameters(str(number), [names[id(p)] for group in groups for p in group["params"]])
            available = reader.states(str(number))
            stored = reader.manifest.optimizers[str(number)].param_groups
            if available:
                _check_family(sharded, stored, reader)
            _check_groups(sharded, _own_groups(stored, elsewhere), names, reader)
            for parameter in sharded.parameters():
                _check_state_shapes(sharded, parameter, names[id(parameter)], available)

    together(engine.mesh.world_group.control, check)


def _elsewhere(engine: TrainState, names: Mapping[int, str]) -> set[str]:
    """Parameters that other parts of the model hold. A collective where there are such parts."""
    return set(catalog_of(engine).names()).difference(names.values()) if engine.is_part else set()


def load_optimizers(engine: TrainState, reader: StateReader, changing: AbstractContextManager[None]) -> None:
    """Read this rank's optimizer state and master weights; see `ZeroEngine.load_optimizers`.

    Args:
        engine: Whose.
        reader: Of the checkpoint.
        changing: Entered once nothing can be refused any more.
    """
    _check_same(engine, reader)
    check_optimizers(engine, reader)
    records = reader.manifest.optimizers
    own = reader.manifest.user.get(OWN, {})
    names = {id(p): name for name, p in engine.model.names()}
    elsewhere = _elsewhere(engine, names)
    wanted: list[Wanted] = []
    conversions: list[Conversion] = []

    def want() -> None:
        if engine.average is not None:
            engine.average.restart()  # what the checkpoint has no average of begins with the weights that are loaded
        for number, sharded in enumerate(engine.optimizers):
            available = reader.states(str(number))
            _set_groups(sharded, _own_groups(records[str(number)].param_groups, elsewhere))
            dtypes = own.get("scalar_dtypes", [{}] * len(records))[number]
            # What the checkpoint has no state of must not go on with that of before.
            sharded.clear_state()
            for group in sharded.optimizer.param_groups:
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    source = (reader, str(number), available, dtypes)
                    wanted.extend(_load_state(engine, sharded, parameter, name, *source, group, conversions))

    def read() -> None:
        _read(engine, reader, wanted, "optimizer state")
        for convert in conversions:
            convert()
        conversions.clear()

    with changing:
        with torch.no_grad():
            together(engine.mesh.world_group.control, engine.model.invalidate_unsharded)
            together(engine.mesh.world_group.control, want)
            with supplied(engine, reader, wanted):
                together(engine.mesh.world_group.control, read)

            # They gather: in one order on all ranks, the last begun before the first is waited for.
            for work in [bucket.publish() for bucket in engine.model.buckets]:
                work.wait()
            engine.model.forget_unsharded()
        load_average(engine, reader)
        if engine.scaler is not None and own.get("loss_scaler"):
            engine.scaler.load_state_dict(own["loss_scaler"])


def load_average(engine: TrainState, reader: StateReader) -> None:
    """Let the engine's average go on with the checkpoint's, whose values are read; or begin anew, with a warning."""
    facts, average = reader.manifest.user.get(OWN, {}).get(AVERAGE), engine.average
    first = engine.mesh.world_group.rank == 0
    if average is not None and facts is not None:
        average.load(facts, average_buffers(reader))
    elif average is not None:
        average.restart()
        if first:
            warnings.warn(f"{reader.directory} holds no average of the weights: it begins with these", stacklevel=3)
    elif facts is not None and first:
        warnings.warn(
            f"{reader.directory} holds an average of the weights, after {facts['updates']} updates, which is not "
            "loaded: call engine.average_weights(...) before loading, or give the Trainer its averaging callback",
            stacklevel=3,
        )


def _read(engine: TrainState, reader: StateReader, wanted: Sequence[Wanted], what: str) -> None:
    """All of it, with a bar where somebody looks."""
    if not is_shown(engine.mesh.world_group.rank):
        reader.read_many(wanted)
        return
    sizes = [(item.stop - item.start) * reader.spec(item.name, item.kind).dtype.itemsize for item in wanted]
    with progress(f"loading {what}", sum(sizes), engine.mesh.world_group.rank) as tell:
        reader.read_many([replace(item, then=_then(item, size, tell)) for item, size in zip(wanted, sizes)])


def _then(item: Wanted, nbytes: int, tell: Callable[[int], object] | None) -> Callable[[Tensor], None]:
    def take(values: Tensor) -> None:
        if item.then is not None:
            item.then(values)
        if tell is not None:
            tell(nbytes)

    return take


def load_extra_state(module: nn.Module, reader: StateReader) -> None:
    """Give modules back what `get_extra_state` returned, if the checkpoint has it."""
    if not reader.has_manifest or EXTRA_STATE_FILE not in reader.manifest.files:
        return
    stored = torch.load(io.BytesIO(reader.extra(EXTRA_STATE_FILE)), weights_only=True)
    for name, child in module.named_modules():
        if name in stored:
            child.set_extra_state(stored[name])


def _check_shape(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if stored != wanted:
        raise ValueError(f"tensor {name!r} has shape {stored} in the checkpoint and {wanted} in the model")


def _wanted_weights(
    engine: TrainState, reader: StateReader, bucket: ParameterBucket, sources: Mapping[str, str]
) -> Iterator[Wanted]:
    """Elements that this rank reads into a bucket, straight into the shard where dtypes allow."""
    # Weights alone have no masters: these begin with the weights, at their precision.
    if bucket.has_master and not bucket.placement.shard_optimizer:
        for name, part, segment in zip(bucket.names, bucket.parts, bucket.layout.segments, strict=True):
            if name in sources:
                size = reader.spec(sources[name]).dtype.itemsize
                write = _from(bucket.master.write, segment.offset)
                yield from wanted_in_whole(part, sources[name], (0, segment.numel), itemsize=size, write=write)
    for piece in bucket.slice_pieces:
        name = bucket.names[piece.index]
        target: Tensor | None = None
        put: Callable[[int, Tensor], object] | None = None
        if name not in sources:
            continue
        stored = reader.spec(sources[name]).dtype
        if bucket.has_master and bucket.placement.shard_optimizer:
            put = _from(partial(_master_and_weights, bucket), piece.offset)
        # Straight into the shard: there is no second copy, and nothing to convert.
        elif bucket.shard.tensor is not None and stored == bucket.dtype:
            target = bucket.shard.tensor[piece.offset : piece.offset + piece.numel]
        else:
            put = _from(bucket.shard.write, piece.offset)
        part, bounds = bucket.parts[piece.index], (piece.start, piece.stop)
        yield from wanted_in_whole(part, sources[name], bounds, itemsize=stored.itemsize, out=target, write=put)


def _copier(target: Tensor, shape: tuple[int, ...] | None = None) -> Callable[[Tensor], None]:
    def copy(values: Tensor) -> None:
        target.copy_(values if shape is None else values.view(shape))

    return copy


def _master_and_weights(bucket: ParameterBucket, start: int, values: Tensor) -> None:
    bucket.shard.write(start, values)
    bucket.master.write(start, values)


def _from(write: Callable[[int, Tensor], object], first: int) -> Callable[[int, Tensor], object]:
    """A range counted from `first`."""
    return lambda start, values: write(first + start, values)


def _check_groups(
    sharded: ShardedOptimizer, stored: Sequence[Mapping[str, Any]], names: dict[int, str], reader: StateReader
) -> None:
    groups = sharded.optimizer.param_groups
    # Frozen and empty parameters have no state: some hand them to the optimizer, some (and DeepSpeed) leave them out.
    idle = {names[id(p)] for group in groups for p in group["params"] if not (p.requires_grad and p.numel())}
    mine = [[name for p in group["params"] if (name := names[id(p)]) not in idle] for group in groups]
    theirs = [[name for name in group["params"] if name not in idle] for group in stored]
    if [sorted(group) for group in mine] != [sorted(group) for group in theirs]:
        raise ValueError(
            f"{reader.directory}: the param groups of {type(sharded.optimizer).__name__} "
            f"{_other_groups(mine, theirs)}; make the groups of the run that saved, or load weights only"
        )


def _set_groups(sharded: ShardedOptimizer, stored: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(sharded.optimizer.param_groups, stored, strict=True):
        for key, value in values.items():
            if key not in ("params", "state_bits"):  # in what form states are kept is this run's choice
                old = group.get(key)
                # A tensor stays one, on its device: capturable optimizers need that.
                if isinstance(old, Tensor):
                    value = torch.as_tensor(value, dtype=old.dtype, device=old.device)
                group[key] = value


def _other_groups(mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> str:
    """The first differences of groups in words: parameters that only one side has, else those that changed groups."""
    here = {name: number for number, group in enumerate(mine) for name in group}
    there = {name: number for number, group in enumerate(theirs) for name in group}
    counts = f"{len(theirs)} group(s) there, {len(mine)} here"
    if different := sorted(here.keys() ^ there.keys()):
        return f"hold other parameters ({counts}; first differences: {different[:5]})"
    moved = [name for name in here if here[name] != there[name]]
    if not moved:
        return f"hold a parameter several times ({counts})"
    first = f"{moved[0]!r} is in group {there[moved[0]]} there and in group {here[moved[0]]} here"
    return f"hold the same parameters, divided otherwise ({counts}; {first}, with {len(moved) - 1} more)"


def _own_groups(stored: Sequence[Mapping[str, Any]], elsewhere: set[str]) -> list[Mapping[str, Any]]:
    """Param groups without the parameters that other parts of the model hold."""
    if not elsewhere:
        return list(stored)
    return [{**group, "params": [name for name in group["params"] if name not in elsewhere]} for group in stored]


def _check_family(sharded: ShardedOptimizer, stored: Sequence[Mapping[str, Any]], reader: StateReader) -> None:
    for group, values in zip(sharded.optimizer.param_groups, stored, strict=False):
        here, there = (sorted(_MOMENT_SETTINGS & keys.keys()) for keys in (group, values))
        if here and there and here != there:
            raise ValueError(
                f"{reader.directory} holds the state of an optimizer with the hyper-parameters {there}; "
                f"{type(sharded.optimizer).__name__} has {here} and would drop it: attach an optimizer of the kind "
                "that was saved, or load weights only"
            )
        if values.get("bias_correction", True) is False and "bias_correction" not in group:
            raise ValueError(
                f"{reader.directory} holds the state of an optimizer without bias correction, and "
                f"{type(sharded.optimizer).__name__} always corrects: attach zero_strategy.optim."
                "FusedAdamW(bias_correction=False), or load weights only"
            )


def _check_state_shapes(
    sharded: ShardedOptimizer,
    parameter: nn.Parameter,
    name: str,
    available: Mapping[str, Mapping[str, TensorSpec]],
) -> None:
    for kind, specs in available.items():
        if name in specs and sharded.piece(parameter) is not None:
            stored = tuple(specs[name].shape)
            if not _has_own_shape(sharded, parameter, kind, stored):
                shape = sharded.model.part_of(parameter).shape
                wanted = (blocks_of(parameter.numel()),) if kind in SCALES else shape
                _check_shape(name, stored, wanted)


def _has_own_shape(sharded: ShardedOptimizer, parameter: nn.Parameter, kind: str, stored: tuple[int, ...]) -> bool:
    """True of state that has no value for each element, where this rank's piece is the whole parameter."""
    piece = sharded.piece(parameter)
    if stored == sharded.model.part_of(parameter).shape or kind in (MASTER, AVERAGE) or piece is None:
        return False
    return piece.numel() == parameter.numel() and sharded.keeps_any_state


def _scalars(
    reader: StateReader,
    number: str,
    name: str,
    dtypes: Mapping[str, str],
    group: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """A parameter's state that is no tensor of the checkpoint."""
    found: dict[str, Any] = dict(reader.manifest.optimizers[number].scalars.get(name, {}))
    # As in torch: the steps of all other optimizers are counted on the CPU.
    where = device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    for key in found.keys() & dtypes.keys():
        found[key] = torch.tensor(found[key], dtype=getattr(torch, dtypes[key]), device=where)
    return found


def _load_state(
    engine: TrainState,
    sharded: ShardedOptimizer,
    parameter: nn.Parameter,
    name: str,
    reader: StateReader,
    number: str,
    available: Mapping[str, Mapping[str, TensorSpec]],
    scalar_dtypes: Mapping[str, str],
    group: Mapping[str, Any],
    conversions: list[Conversion],
) -> list[Wanted]:
    """Gives a parameter its state; the tensors are filled when what is returned has been read.

    A state that has other bits in the checkpoint is filled by what is added to `conversions`.
    """
    piece = sharded.piece(parameter)
    place = engine.model.place(parameter)
    assert place is not None
    bucket, index = place
    scalars = _scalars(reader, number, name, scalar_dtypes, group, parameter.device)
    if piece is None:  # other ranks have it, and this one knows of it
        kinds = {kind: specs[name].dtype for kind, specs in available.items() if name in specs}
        kinds = dtypes_here(kinds, coded=sharded.coded(parameter))
        elsewhere = {
            kind: torch.empty(0, dtype=dtype, device=parameter.device)
            for kind, dtype in kinds.items()
            if kind not in (MASTER, AVERAGE)
        }
        if elsewhere or scalars:
            sharded.set_state_of(parameter, nested({**elsewhere, **scalars}))
        return []
    cut = bucket.piece_of[index]
    values: dict[str, Any] = {}
    wanted: list[Wanted] = []
    other = StatesOfOtherBits(sharded, parameter, cut, {kind for kind, specs in available.items() if name in specs})
    for kind, specs in available.items():
        if name not in specs:
            continue
        if other.takes(kind):
            wanted.append(other.want(name, number, kind, specs[name].dtype))
            continue
        stored = tuple(specs[name].shape)
        if _has_own_shape(sharded, parameter, kind, stored):
            values[kind] = torch.empty(stored, dtype=specs[name].dtype, device=piece.device)  # not per element
            wanted.append(Wanted(name, 0, values[kind].numel(), (number, kind), out=values[kind].view(-1)))
            continue
        want = partial(
            wanted_in_whole,
            bucket.parts[index],
            name,
            (cut.start, cut.stop),
            (number, kind),
            itemsize=specs[name].dtype.itemsize,
        )
        if kind in (MASTER, AVERAGE):
            storage = bucket.master if kind == MASTER else bucket.average
            wanted.extend(() if storage is None else want(write=_from(storage.write, cut.offset)))
        elif (offloaded := sharded.offloaded_place(parameter, kind)) is not None:
            wanted.extend(want(write=_from(offloaded.vector.write, offloaded.start)))
            values[kind] = offloaded
        else:
            state = torch.empty(cut.numel, dtype=specs[name].dtype, device=piece.device)
            wanted.extend(want(out=state))
            values[kind] = state.view(piece.shape)
    values.update(scalars)
    if values or other.conversion is not None:
        sharded.set_state_of(parameter, nested(values))
    conversions.extend(() if other.conversion is None else [other.conversion])
    return wanted


def _check_same(engine: TrainState, reader: StateReader) -> None:
    """Ranks that read different checkpoints would make a model of pieces of both."""
    ranks = engine.mesh.world_group.control if reader.of_whole_model else engine.mesh.control
    everyone = ranks.all_gather_objects((str(reader.directory), reader.identity()))
    if len({identity for _, identity in everyone}) > 1:
        raise ValueError(
            "the ranks would load different checkpoints: "
            + ", ".join(f"rank {rank} {directory}" for rank, (directory, _) in enumerate(everyone))
            + "; give all of them the same one, on a file system that they share or as equal copies"
        )


def _check_small_files(engine: TrainState, reader: StateReader) -> None:
    """Each rank reads its share: what one rank alone needs later, such as its random state, fails on all, and here."""
    if not reader.has_manifest:
        return
    manifest = reader.manifest
    with_tensors = {record.file for record in manifest.weights.values()}
    with_tensors |= {path for record in manifest.optimizers.values() for path in record.states.values()}
    # Sorted: the ranks divide one list.
    small = sorted(manifest.files.keys() - with_tensors)
    for path in small[engine.mesh.world_group.rank :: engine.mesh.world_group.world_size]:
        reader.extra(path)
