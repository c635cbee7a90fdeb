"""Deferred weights: each parameter knows where its values are, and they are read when it is sharded.

Each parameter knows where its values are, and has no memory.

Until then a parameter is one NaN, expanded to its shape, on the CPU: modules can be wrapped, frozen and counted, and an
adapter's own weights are made beside it as beside a real one. Where the values are is kept with the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import FileKind
from zero_strategy.checkpoint.reader import CheckpointReader, StateReader, Wanted, check_out
from zero_strategy.comm.collectives import Communicator
from zero_strategy.quantized.scales import OFFSET, lacking_offsets, weight_of
from zero_strategy.runtime.torch_private import map_tensors, swap_values

if TYPE_CHECKING:
    from typing_extensions import Self


_SLOT = "_zero_strategy_deferred"
_OPENED = "_zero_strategy_opened"


class _Shared:
    """A place stays the same for a copy of the module."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True, eq=False)
class Stored(_Shared):
    """Values that lie in a file as they are.

    Attributes:
        reader: The file.
        name: The tensor there.
    """

    reader: CheckpointReader
    name: str


@dataclass(frozen=True, eq=False)
class Conversion(_Shared):
    """Tensors that are computed from those of files, together.

    Attributes:
        run: Gives them by name, whole, on the CPU.
    """

    run: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Converted(_Shared):
    """Values that are one result of a conversion."""

    conversion: Conversion
    name: str


Source = Stored | Converted


class DeferredWeights:
    """Place of the values of a module's parameters.

    Args:
        directory: What it was read from, for messages.
        parameters: Each with its source; on the meta device.
    """

    def __init__(self, directory: str, parameters: Sequence[tuple[nn.Parameter, Source]]) -> None:
        self.directory = directory
        self.parameters = list(parameters)
        self._hooks: list[RemovableHandle] = []
        self._shapes = [parameter.shape for parameter, _ in parameters]

    @property
    def shapes(self) -> dict[int, torch.Size]:
        """Shapes of parameters as they are stored, by id; those of a copied module have other ids."""
        return {id(parameter): shape for (parameter, _), shape in zip(self.parameters, self._shapes, strict=True)}

    def attach(self, module: nn.Module) -> None:
        """Keep this with a module, whose parameters become NaNs without memory."""
        for parameter, _ in self.parameters:
            hollow = torch.full((), float("nan")).to(parameter.dtype).expand(parameter.shape)
            # Swapped, not assigned: ties, and whoever else holds the parameter, keep this very object.
            swap_values(parameter, hollow)
        self.keep_with(module)

    def keep_with(self, module: nn.Module) -> None:
        """Keep this with a module that has parameters without memory."""
        vars(module)[_SLOT] = self
        self._hooks.append(module.register_forward_pre_hook(self._refuse))
        self._hooks.append(module.register_state_dict_pre_hook(self._refuse_to_save))
        # Torch sets an attribute on such a hook, which a bound method does not let it do.
        self._hooks.append(module.register_state_dict_post_hook(partial(self._show_no_values)))

    def detach(self) -> None:
        """Let the module be used."""
        for hook in self._hooks:
            hook.remove()

    def follow(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Have the values of parameters ready for those that took their place, of the same shapes."""
        self.parameters = [(replaced.get(parameter, parameter), source) for parameter, source in self.parameters]

    def part_for(self, module: nn.Module) -> DeferredWeights:
        """The part for the parameters that a module has."""
        own = {id(parameter) for parameter in module.parameters()}
        kept = [(entry, shape) for entry, shape in zip(self.parameters, self._shapes) if id(entry[0]) in own]
        part = DeferredWeights(self.directory, [entry for entry, _ in kept])
        part._shapes = [shape for _, shape in kept]
        return part

    def _refuse_to_save(self, module: nn.Module, prefix: str, _: bool) -> None:
        if not prefix:  # else somebody around it asks, who may want the names alone, as PEFT does
            self._refuse(module)

    def _show_no_values(self, module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
        """A NaN would be saved without a word; what is on the meta device cannot be."""
        waiting = {id(parameter) for parameter, _ in self.parameters}
        # PEFT's copies were made of NaNs, too, and are given the original's values.
        waiting |= {id(copied) for copied, original in _copies(module) if id(original) in waiting}
        for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            if id(parameter) in waiting and name in state:
                state[name] = torch.empty_like(parameter, device="meta")

    def _refuse(self, module: nn.Module, *_: object) -> None:
        raise RuntimeError(
            f"the weights of {type(module).__name__} are not read yet, so that it cannot run or be saved: give it to "
            "ZeroTrainer, to ZeroAccelerator.prepare or to ZeroEngine first"
        )


def is_deferred(module: nn.Module) -> bool:
    """True if a module, or one inside of it, has weights that are not read yet."""
    return any(_SLOT in vars(owner) for owner in module.modules())


def hand_over(module: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Keep what a module waits for with parts of it instead, for those that go on without it.

    Args:
        module: Is as one that waits for nothing afterwards, but for its parts.
        parts: Modules inside of it.
    """
    distinct = {id(part): part for part in parts}
    inside = {id(inner) for part in distinct.values() for inner in part.modules()}
    for owner in list(module.modules()):
        if _SLOT not in vars(owner) or id(owner) in inside:
            continue
        whole: DeferredWeights = vars(owner).pop(_SLOT)
        whole.detach()
        for part in distinct.values():
            if (held := whole.part_for(part)).parameters:
                held.keep_with(part)


def make_replaceable(module: nn.Module) -> Callable[[Mapping[nn.Parameter, nn.Parameter]], None]:
    """Let parameters that wait for values be replaced by others of the same shapes: they are on the meta device then.

    Returns:
        To be called with {parameter: the one in its place}.

    Raises:
        ValueError: If one was written to before.
    """
    found = [vars(owner)[_SLOT] for owner in module.modules() if _SLOT in vars(owner)]
    for deferred in found:
        for parameter, _ in deferred.parameters:
            if parameter.is_meta:
                continue
            # Others cannot hold a NaN, by which a write would be noticed.
            if parameter.is_floating_point() and _touched(parameter):
                raise ValueError(
                    f"parameters were written to before the weights of {deferred.directory} are there, and before "
                    "layers are divided; write to them in GatheredParameters when the model is sharded"
                )
            swap_values(parameter, torch.empty_like(parameter, device="meta"))

    def follow(replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for deferred in found:
            deferred.follow(replaced)

    return follow


def open_deferred(module: nn.Module, device: torch.device | None = None) -> StateReader | None:
    """Tensors to read into a module, by the names of its parameters, which become meta ones; None if nothing is.

    Args:
        module: One that has deferred weights, or has such modules inside.
        device: Where its other tensors move; None leaves them.

    Call `close_deferred` when it was read.

    Raises:
        ValueError: If a parameter was computed from values that are not there yet, or nothing gives it any; names it.
        RuntimeError: If it was opened before, and not read to the end.
    """
    _check_closed(module)
    owners = {id(vars(owner)[_SLOT]): owner for owner in module.modules() if _SLOT in vars(owner)}
    if not owners:
        return None
    found = [vars(owner)[_SLOT] for owner in owners.values()]
    sources = {id(parameter): source for deferred in found for parameter, source in deferred.parameters}
    # A copy that is to be trained begins with the values of its original.
    for copied, original in _copies(module):
        if id(original) in sources:
            sources[id(copied)] = sources[id(original)]
    named = dict(module.named_parameters())
    directory = ", ".join(dict.fromkeys(deferred.directory for deferred in found))
    empty = [name for name, parameter in named.items() if parameter.is_meta and id(parameter) not in sources]
    if empty:
        raise ValueError(
            f"parameters {empty[:5]} are on the meta device beside weights of {directory} that are read only now; make "
            "them with memory (not on the meta device, without low_cpu_mem_usage)"
        )
    filled = [p for p in named.values() if id(p) in sources and p.is_floating_point() and not p.is_meta]
    touched = {id(p): _touched(p) for p in filled}
    written = [name for name, p in named.items() if touched.get(id(p)) == "in place"]
    if written:
        raise ValueError(
            f"parameters {written[:5]} were written to before the weights of {directory} are there; write to them in "
            "GatheredParameters when the model is sharded, or assign module.name = nn.Parameter(values) now"
        )
    for number in (number for number, how in touched.items() if how == "replaced"):
        del sources[number]  # the new values count
    spoiled = [n for n, p in named.items() if id(p) not in sources and p.is_floating_point() and p.isnan().any()]
    spoiled += [n for n, p in named.items() if any(p.shape != f.shapes.get(id(p), p.shape) for f in found)]
    if spoiled:
        raise ValueError(
            f"parameters {spoiled[:5]} were computed from weights of {directory} that are read only now, when the "
            "model is sharded. Load with transformers' own from_pretrained to resize embeddings or to use adapters "
            "that start from the weights (DoRA, PiSSA, OLoRA)"
        )
    waiting = {name: parameter for name, parameter in named.items() if id(parameter) in sources}
    places = {name: (sources[id(p)], p.shape, p.dtype) for name, p in waiting.items()}
    # Only now: up to here a refusal leaves the module as it was.
    for parameter in waiting.values():
        swap_values(parameter, torch.empty_like(parameter, device="meta"))
    for owner in owners.values():
        vars(owner).pop(_SLOT).detach()
        # Until all is read: should the engine fail first, the next one would take empty parameters for new ones.
        vars(owner)[_OPENED] = directory
    if device is not None:
        map_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return DeferredReader(directory, places)


def close_deferred(module: nn.Module, reader: StateReader | None, control: Communicator) -> None:
    """All that `open_deferred` gave was read. A collective where weights were quantised meanwhile.

    Args:
        module: It.
        reader: What `open_deferred` gave.
        control: All ranks: those that have quantised a weight tell the others its offset.
    """
    if states := lacking_offsets(module):
        known = dict[str, float]()
        for theirs in control.all_gather_objects(reader.offsets if isinstance(reader, DeferredReader) else {}):
            known |= theirs
        if unknown := sorted(states.keys() - known.keys()):
            raise ValueError(f"nothing gives the scales of quantised weights {unknown[:5]} their offset")
        for name, state in states.items():
            state.offset.fill_(known[name])
    for owner in module.modules():
        vars(owner).pop(_OPENED, None)


def _check_closed(module: nn.Module) -> None:
    """An engine that failed leaves parameters without values, which the next one would initialise."""
    unread = [vars(owner)[_OPENED] for owner in module.modules() if _OPENED in vars(owner)]
    if unread:
        raise RuntimeError(
            f"weights of {unread[0]} were not read to the end, for an earlier engine of this module failed: load the "
            "model with from_pretrained again"
        )


def _touched(parameter: nn.Parameter) -> str:
    """Change of a parameter that waits: none, "replaced" values, or a write "in place"."""
    hollow = not any(parameter.stride())  # every element is the same one
    nan = (parameter.detach().as_strided((min(parameter.numel(), 1),), (1,)) if hollow else parameter.detach()).isnan()
    if bool(nan.all()):
        return ""
    return "in place" if (hollow and parameter.numel() > 1) or bool(nan.any()) else "replaced"


def _copies(module: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Parameters that PEFT copied to train them (`modules_to_save`), each with its original."""
    for owner in module.modules():
        copied, original = getattr(owner, "modules_to_save", None), getattr(owner, "original_module", None)
        if not isinstance(copied, nn.ModuleDict) or not isinstance(original, nn.Module):
            continue
        originals = dict(original.named_parameters())
        for copy in copied.values():
            for name, parameter in copy.named_parameters():
                yield parameter, originals[name]


class DeferredReader(StateReader):
    """The sources behind the interface of an open checkpoint. Of conversions it keeps the last one's results.

    Args:
        directory: For messages.
        sources: Name -> source, shape, and dtype that a conversion has.
    """

    of_whole_model = False  # stages of a pipeline have their layers' alone

    def __init__(self, directory: str, sources: Mapping[str, tuple[Source, torch.Size, torch.dtype]]) -> None:
        self.directory = Path(directory)
        self.aliases = {}
        self._sources = {name: source for name, (source, _, _) in sources.items()}
        self._weights = {
            name: TensorSpec(name, _stored_dtype(source, dtype), tuple(shape))
            for name, (source, shape, dtype) in sources.items()
        }
        self._last: tuple[Conversion, Mapping[str, Tensor]] | None = None
        self.offsets: dict[str, float] = {}
        """Of the weights that were quantised here, by name; see `close_deferred`."""

    def states(self, optimizer: str) -> dict[str, Mapping[str, TensorSpec]]:
        """None."""
        return {}

    def spec(self, name: str, kind: FileKind = "model") -> TensorSpec:
        """See `StateReader.spec`."""
        return self._weights[name]

    def extra(self, path: str) -> bytes:
        """There are no files.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{self.directory}: has no file {path!r}")

    def read(
        self, name: str, start: int = 0, stop: int | None = None, out: Tensor | None = None, kind: FileKind = "model"
    ) -> Tensor:
        """See `StateReader.read`."""
        source = self._sources[name]
        if isinstance(source, Stored):
            return source.reader.read(source.name, start, stop, out)
        results = self._converted(source)
        if (offset := results.get(f"{weight_of(source.name)}.{OFFSET}")) is not None:
            self.offsets[weight_of(name)] = offset.item()
        values = results[source.name].reshape(-1)[start:stop]
        if out is None:
            return values.clone()
        check_out(name, self._weights[name].dtype, len(values), out)
        return out.copy_(values)

    def read_many(self, wanted: Sequence[Wanted]) -> None:
        """Ranges of files file by file; then what is converted."""
        ranges: dict[int, tuple[CheckpointReader, list[Wanted]]] = {}
        others = []
        for item in wanted:
            source = self._sources[item.name]
            if isinstance(source, Stored):
                there = Wanted(source.name, item.start, item.stop, out=item.out, then=item.then)
                ranges.setdefault(id(source.reader), (source.reader, []))[1].append(there)
            else:
                others.append((source, item))
        for reader, items in ranges.values():
            reader.read_many(items)
        # Read from the end, so that the first place of each conversion is what stays.
        order = {id(source.conversion): place for place, (source, _) in reversed(list(enumerate(others)))}
        # All results of a conversion behind each other: only the last one's are kept, and none runs twice.
        super().read_many([item for source, item in sorted(others, key=lambda pair: order[id(pair[0].conversion)])])
        self._last = None

    def _converted(self, source: Converted) -> Mapping[str, Tensor]:
        if self._last is None or self._last[0] is not source.conversion:
            self._last = None  # before the next one is there
            self._last = (source.conversion, source.conversion.run())
        return self._last[1]


def _stored_dtype(source: Source, dtype: torch.dtype) -> torch.dtype:
    return source.reader.spec(source.name).dtype if isinstance(source, Stored) else dtype
