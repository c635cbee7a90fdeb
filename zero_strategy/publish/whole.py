"""Whole weights of a sharded model, unit by unit, under the names that a checkpoint of the model has.

An inference server loads these as it loads a checkpoint's. One unit is whole at a time. Adapters of PEFT are merged by
PEFT's own code into a copy of the layer that they adapt, so that the bits are those of `merge_and_unload()`, and the
base weights stay as they are. Names and layouts that transformers changes when it reads a checkpoint (experts stacked
into one tensor) are changed back by transformers.
"""

from __future__ import annotations

import copy
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.agreement import state_dict_entries
from zero_strategy.fsdp.dtensor import is_dtensor
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.shard_storage import PARAMETERS
from zero_strategy.quantized.values import dequantised, hollow_values, leading_key, quantised_layers
from zero_strategy.train_state import TrainState

Conversion = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_PEFT_ROOT = "base_model.model."
"""Prefix of all names of a model in a `PeftModel`."""


@dataclass(frozen=True)
class WeightSpec:
    """A tensor that is to come, as servers ask for it beforehand.

    Attributes:
        name: In a checkpoint of the model.
        dtype: Of the values.
        shape: Of the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Source:
    """Tensors that are made together: one as it is, or those of a layer with adapters.

    Attributes:
        needs: What has to be whole for that.
        make: The tensors by name, whole; views of the units' memory, or copies. A collective of tensor-parallel ranks.
        hollow: The same without values, on the meta device.
    """

    needs: list[Tensor]
    make: Callable[[], dict[str, Tensor]]
    hollow: dict[str, Tensor]


class WholeWeights:
    """The whole weights of a model as pairs (name, tensor), to be iterated by all ranks together, to the end.

    A tensor is valid until the next is asked for, and may be the model's own memory: copy what is to be kept, write to
    nothing. On every rank come the same tensors in the same order. It can be iterated again, at a later step.

    Args:
        engine: Whose.
        names: Those that are wanted, equal on all ranks; None: all.
        dtype: What floating-point tensors are converted to; None: as the forward computes with them.
        merge_adapters: Give PEFT's layers merged, under the base model's names, and no adapters.
        module: Part of the engine's module by whose own names tensors go, such as the Hugging Face model in a
            LightningModule; None: the whole.

    Attributes:
        specs: What will come, in order; costs no communication.

    Raises:
        ValueError: If a name is not one of them, a module is not the engine's, or adapters cannot be merged.
        TypeError: If `dtype` is not one of floating point.
    """

    def __init__(
        self,
        engine: TrainState,
        names: Iterable[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        merge_adapters: bool = True,
        module: nn.Module | None = None,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype={dtype!r}: must be a floating-point torch.dtype, such as torch.bfloat16")
        self._engine, self._dtype = engine, dtype
        engine.model.quantised.check()
        root = engine.module if module is None else module
        if module is not None and all(module is not each for each in engine.module.modules()):
            raise ValueError(f"module={type(module).__name__}(...) is no part of the engine's module")
        # Nothing can be PEFT's where it was not imported, and its import takes seconds.
        sources = list(_sources(root, engine.model, merge_adapters and "peft" in sys.modules))
        self._convert = _reverse_conversion(root, [source.hollow for source in sources])
        parts = [
            _Part(made_at_once, self._converted(_joined(source.hollow for source in made_at_once)))
            for unit in _by_unit(engine, sources)
            # What transformers joins comes from one unit, so that unit is made at once; otherwise each tensor alone.
            for made_at_once in ([unit] if self._convert is not None else [[source] for source in unit])
        ]
        known = [name for part in parts for name in part.coming]
        wanted = known if names is None else list(names)
        for name in wanted:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise ValueError(f"no weight {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        self._names = frozenset(wanted)
        self._parts = [part for part in parts if not self._names.isdisjoint(part.coming)]
        self.specs = [
            WeightSpec(name, self._dtype_of(tensor), tuple(tensor.shape))
            for part in self._parts
            for name, tensor in part.coming.items()
            if name in self._names
        ]

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The pairs; a collective.

        Raises:
            BarrierError: If ranks do not come.
        """
        engine = self._engine
        engine.model.moved.check("weights()", (PARAMETERS,))
        # A rank that does not come is named; a gather would wait for its time-out.
        engine.mesh.barrier.wait_for_all("weights()")
        for parts in _by_unit(engine, self._parts):
            # Once for all parts of a unit: a gather brings whole buckets.
            with engine.model.gathered(p for part in parts for p in part.needs if isinstance(p, nn.Parameter)):
                for part in parts:
                    # Not around the yield: what the caller does with a tensor is his own.
                    with torch.no_grad():
                        made = self._converted(_joined(source.make() for source in part.sources))
                    for name in list(made):
                        # Taken out: a copy goes as soon as its reader has gone on.
                        tensor = made.pop(name)
                        if name in self._names:
                            yield name, tensor.to(self._dtype_of(tensor))

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if self._convert is None else self._convert(tensors)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True)
class _Part:
    """Sources that are made at once: one, or all of a unit where transformers joins or divides tensors.

    Attributes:
        sources: They.
        coming: The tensors that come of them, without values.
    """

    sources: list[_Source]
    coming: dict[str, Tensor]

    @property
    def needs(self) -> list[Tensor]:
        return [tensor for source in self.sources for tensor in source.needs]


def _joined(dicts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for each in dicts for name, tensor in each.items()}


_Needing = TypeVar("_Needing", _Source, _Part)


def _by_unit(engine: TrainState, needing: Iterable[_Needing]) -> list[list[_Needing]]:
    """Sources, or parts, by the unit that has their first parameter; those without one come with the root unit."""
    units = engine.model.units
    number = {id(p): index for index, unit in enumerate(units) for bucket in unit.buckets for p in bucket.parameters}
    found: list[list[_Needing]] = [[] for _ in units]
    for each in needing:
        found[next((number[id(tensor)] for tensor in each.needs if id(tensor) in number), 0)].append(each)
    return [unit for unit in found if unit]


def _sources(module: nn.Module, model: ShardedModel, merge_adapters: bool) -> Iterator[_Source]:
    """All tensors of a module's state dict, tied ones once; those of PEFT merged, if that is asked for."""
    adapted = _Adapters(module, model) if merge_adapters else None
    quantised = quantised_layers(module)
    # Adapters on quantised layers come with the layers' weights.
    around = () if adapted is None else (outer for path in quantised for outer in adapted.paths_around(path))
    beside = tuple(f"{outer}." for outer in around)
    for name, tensor in state_dict_entries(module):
        if (path := name.rpartition(".weight")[0]) in quantised or (path := name.rpartition(".")[0]) in quantised:
            # Values, and no scales: a server quantises in a way of its own, if at all.
            if name == f"{path}.{leading_key(quantised[path])}":
                yield _dequantised(path, quantised[path], adapted)
            elif name == f"{path}.bias":
                yield _plain(name if adapted is None else adapted.name_of(name), tensor, model)
            continue
        if name.startswith(beside):
            continue
        yield from [_plain(name, tensor, model)] if adapted is None else adapted.sources(name, tensor)


def _plain(name: str, tensor: Tensor, model: ShardedModel) -> _Source:
    shape = model.part_of(tensor).shape if isinstance(tensor, nn.Parameter) else tensor.shape
    hollow = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return _Source([tensor], lambda: {name: model.whole_of(tensor)}, {name: hollow})


def _dequantised(path: str, layer: Any, adapted: _Adapters | None) -> _Source:
    """The values of a quantised weight, active adapters added if they are merged."""
    outer = [] if adapted is None else adapted.around(path)
    added = [(each, name) for each in outer for name in _own_adapters(each)]
    name = f"{path}.weight" if adapted is None else adapted.name_of(f"{path}.weight")
    needs = [*layer.parameters(), *(parameter for each in outer for parameter in each.parameters())]
    return _Source(needs, lambda: {name: dequantised(layer, added)}, {name: hollow_values(layer)})


def _own_adapters(layer: Any) -> list[str]:
    """Active adapters that a layer of PEFT has, and that are not merged already."""
    tables = [
        getattr(layer, name) for name in (*layer.adapter_layer_names, "trainable_tokens_delta") if hasattr(layer, name)
    ]
    return [
        name
        for name in layer.active_adapters
        if name not in layer.merged_adapters and any(name in table for table in tables)
    ]


def _merged(prefix: str, layer: Any) -> _Source:
    """The base weights of a layer of PEFT with its active adapters in them."""

    def make() -> dict[str, Tensor]:
        # PEFT merges in place, and the layer goes on being trained.
        merged = copy.deepcopy(layer)
        for each in reversed([each for each in merged.modules() if isinstance(each, _tuner_layer())]):
            # An adapter that is merged already would be added twice.
            adapters = [name for name in each.active_adapters if name not in each.merged_adapters]
            if adapters:
                each.merge(adapter_names=adapters)
        return {prefix + name: tensor.detach() for name, tensor in state_dict_entries(merged.get_base_layer())}

    hollow = {prefix + name: _hollow(tensor) for name, tensor in state_dict_entries(layer.get_base_layer())}
    return _Source([*layer.parameters()], make, hollow)


def _hollow(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _tuner_layer() -> Any:
    """The class of PEFT's layers that stand in place of others."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return BaseTunerLayer


class _Adapters:
    """Layers of a module that PEFT has put in place of others.

    Raises:
        ValueError: If there are adapters that belong to no layer, or layers that lie divided.
    """

    def __init__(self, module: nn.Module, model: ShardedModel) -> None:
        from peft import PeftModel, PromptLearningConfig
        from peft.utils.other import ModulesToSaveWrapper

        self._model = model
        self._root = ""
        if isinstance(module, PeftModel):
            self._root = _PEFT_ROOT
            for adapter, config in module.peft_config.items():
                if isinstance(config, PromptLearningConfig):
                    raise ValueError(
                        f"adapter {adapter!r} ({type(config).__name__}) belongs to no weight and cannot be merged; "
                        "pass merge_adapters=False"
                    )
        self._layers: dict[str, Any] = {}
        self._copies: dict[str, str] = {}
        for path, layer in module.named_modules():
            # A layer inside of another one is merged with it.
            if isinstance(layer, _tuner_layer()) and not any(path.startswith(f"{outer}.") for outer in self._layers):
                named = dict(layer.named_parameters())
                divided = [name for name, each in named.items() if is_dtensor(each) or each in model.experts]
                if divided:
                    by = "mesh.expert" if named[divided[0]] in model.experts else "tensor parallelism"
                    raise ValueError(
                        f"{path}.{divided[0]} is divided by {by}: adapters cannot be merged into it; "
                        "pass merge_adapters=False"
                    )
                self._layers[path] = layer
            elif isinstance(layer, ModulesToSaveWrapper):
                active = [name for name in layer.active_adapters if name in layer.modules_to_save]
                self._copies[path] = f"modules_to_save.{active[0]}." if active else "original_module."
        self._given: set[str] = set()

    def sources(self, name: str, tensor: Tensor) -> list[_Source]:
        """The tensors that are given in place of one of the module's."""
        parents = name.split(".")
        for end in range(1, len(parents)):
            path = ".".join(parents[:end])
            if path in self._layers:
                if path in self._given:
                    return []
                self._given.add(path)
                # PEFT keeps a layer with trainable tokens under this name, inside of what stands in its place.
                return [_merged(self._in_base(path).removesuffix(".token_adapter") + ".", self._layers[path])]
            if path in self._copies:
                copied, rest = self._copies[path], name[len(path) + 1 :]
                in_base = f"{self._in_base(path)}.{rest.removeprefix(copied)}"
                return [_plain(in_base, tensor, self._model)] if rest.startswith(copied) else []
        return [_plain(self._in_base(name), tensor, self._model)]

    def paths_around(self, path: str) -> list[str]:
        """Names of PEFT's outermost layers in place of the module at `path`: one or none."""
        parents = path.split(".")
        return [name for end in range(1, len(parents)) if (name := ".".join(parents[:end])) in self._layers]

    def around(self, path: str) -> list[Any]:
        """PEFT's layers in place of the module at `path`, the innermost first."""
        outer = [self._layers[name] for name in self.paths_around(path)]
        return [each for layer in outer for each in reversed(list(layer.modules())) if isinstance(each, _tuner_layer())]

    def name_of(self, name: str) -> str:
        """The name that a base layer's tensor has without PEFT."""
        return self._in_base(name).replace(".base_layer.", ".")

    def _in_base(self, name: str) -> str:
        return name.removeprefix(self._root)


def _reverse_conversion(module: Any, hollow: Iterable[dict[str, Tensor]]) -> Conversion | None:
    """The way from a Hugging Face model's tensors to those of its checkpoints; None where they are the same."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    peft = sys.modules.get("peft")
    base = module.get_base_model() if peft is not None and isinstance(module, peft.PeftModel) else module
    if not isinstance(base, PreTrainedModel):
        return None
    tensors = _joined(hollow)
    back = revert_weight_conversion(base, dict(tensors))
    same = back.keys() == tensors.keys() and all(back[name] is tensor for name, tensor in tensors.items())
    return None if same else partial(revert_weight_conversion, base)
