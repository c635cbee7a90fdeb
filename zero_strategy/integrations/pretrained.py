"""transformers' `from_pretrained` without anybody who holds the whole model: names now, bytes when it is sharded.

transformers itself reads the config, builds the model on the meta device, initialises what the files lack, ties, and
reports. One step of it is replaced, in a subclass: instead of reading tensors, their places in the files are noted.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    set_param_for_module,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _get_model_class
from transformers.utils import logging
from transformers.utils.loading_report import LoadStateDictInfo

from zero_strategy.checkpoint.deferred import Conversion, Converted, DeferredWeights, Source, Stored
from zero_strategy.checkpoint.reader import CheckpointReader

logger = logging.get_logger(__name__)

_ELSEWHERE = ("device_map", "distributed_config", "gguf_file", "quantization_config", "state_dict", "tp_plan")
"""Arguments that say where or how weights lie, which is decided by sharding."""
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def from_pretrained(model_class: Any, path: str | os.PathLike[str], *arguments: Any, **keywords: Any) -> Any:
    """A pretrained model for `ZeroTrainer` and `ZeroAccelerator`, whose weights no process ever holds as a whole.

    Its parameters take no memory and are NaN until the model is prepared; then each rank reads its slices out of the
    safetensors files. Where transformers converts weights while loading, each rank converts one result at a time.
    What the files lack is initialised, and reported, as by transformers.

    Args:
        model_class: A model class of transformers, or one of its Auto classes.
        path: What `model_class.from_pretrained` takes.
        *arguments, **keywords: Further arguments of it, such as `dtype`.

    Returns:
        As `model_class.from_pretrained` does.

    Raises:
        ValueError: For arguments that place or quantise weights, for code that is not transformers' own behind an Auto
            class, and for files other than safetensors.
    """
    for name in _ELSEWHERE:
        if keywords.get(name) is not None:
            raise ValueError(f"{name}={keywords[name]!r}: weights are placed by sharding; drop it")
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        raise ValueError(
            f"{os.fspath(path)} holds a PEFT adapter: load the model that it belongs to, then "
            "PeftModel.from_pretrained(model, path)"
        )
    kind = _concrete(model_class, path, keywords)
    places = _Places()
    with_info = bool(keywords.pop("output_loading_info", False))
    model, info = _noting(kind, places).from_pretrained(path, *arguments, output_loading_info=True, **keywords)
    if not places.noted:
        raise RuntimeError(
            f"transformers {transformers.__version__} has loaded {os.fspath(path)} by itself, whole on every rank, and "
            "not by PreTrainedModel._load_pretrained_model: take a version that does, or load with its own "
            "from_pretrained"
        )
    model.__class__ = kind
    _defer(model, os.fspath(path), places)
    return (model, info) if with_info else model


def _concrete(model_class: Any, path: str | os.PathLike[str], keywords: Mapping[str, Any]) -> type[PreTrainedModel]:
    """The class of the model behind an Auto class."""
    if not issubclass(model_class, _BaseAutoModelClass):
        kind: type[PreTrainedModel] = model_class
        return kind
    config = keywords.get("config")
    if not hasattr(config, "to_dict"):
        hub = {name: keywords[name] for name in _HUB if name in keywords}
        config = AutoConfig.from_pretrained(path if config is None else config, **hub)
    if type(config) not in model_class._model_mapping:
        raise ValueError(
            f"{os.fspath(path)}: {model_class.__name__} has no class of transformers for {type(config).__name__}; "
            "give the model's class itself"
        )
    found: type[PreTrainedModel] = _get_model_class(config, model_class._model_mapping)
    return found


class _Places(dict[str, Source]):
    """By name of the parameter; `noted` says that transformers came to where they are."""

    noted = False


def _noting(kind: type[PreTrainedModel], places: _Places) -> Any:
    """A subclass that fills `places` where transformers would load."""

    def load(
        model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *_: Any, **__: Any
    ) -> tuple[LoadStateDictInfo, None]:
        if load_config.hf_quantizer is not None:
            raise ValueError(f"{model.config.name_or_path}: quantised weights cannot be sharded")
        files = checkpoint_files or []
        others = [file for file in files if not file.endswith(".safetensors")]
        if others or not files:
            raise ValueError(
                f"{model.config.name_or_path}: {others or 'no weights'}: only safetensors can be read in parts; load "
                "the model with transformers once and save it with save_pretrained()"
            )
        places.noted = True
        return _Noter(model, files, load_config).note(places), None

    content = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**content, "_load_pretrained_model": staticmethod(load)})


class _Noter:
    """Finds which tensors of files become which of a model's, by transformers' rules."""

    def __init__(self, model: Any, files: list[str], load_config: Any) -> None:
        self.model, self.load_config = model, load_config
        self.readers: dict[str, CheckpointReader] = {}
        for file in files:
            reader = CheckpointReader(file)
            self.readers.update(dict.fromkeys(reader.weights, reader))
        self.expected: dict[str, Tensor] = model.state_dict()
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.info = LoadStateDictInfo(set(self.expected), set(), set(), [], {}, set())

    def note(self, places: dict[str, Source]) -> LoadStateDictInfo:
        mapping = self.load_config.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        converted: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(self.readers, key=dot_natural_key):
            prefix = self.model.base_model_prefix
            target, pattern = rename_source_key(key, renamings, converters, prefix, self.expected)
            if target not in self.expected and key in self.expected:
                target, pattern = rename_source_key(key, [], [], prefix, self.expected)
            if target not in self.expected:
                targets = by_pattern[pattern].target_patterns if pattern is not None else [target]
                first = targets[0]
                self.info.unexpected_keys.update(target.replace(first, other) for other in targets)
            elif pattern is not None:
                converted.setdefault(target, []).append((pattern, key))
            elif target not in places:
                self._note_stored(target, key, places)
        for target, sources in converted.items():
            self._note_converted(target, by_pattern[sources[0][0]], sources, places)
        self.model._weight_conversions = [entry for entry in mapping if entry.was_used()]
        self._compare_tied(places)
        return self.info

    def _note_stored(self, target: str, key: str, places: dict[str, Source]) -> None:
        spec, dtype = self.readers[key].spec(key), self._dtype(target)
        if target not in self.parameters:  # a buffer
            self._set(target, self.readers[key].full(key).to(dtype))
        elif self._set(target, torch.empty(spec.shape, dtype=dtype, device="meta")):
            places[target] = Stored(self.readers[key], key)

    def _note_converted(
        self, target: str, converter: Any, sources: list[tuple[str, str]], places: dict[str, Source]
    ) -> None:
        dtype = self._dtype(target)
        run = functools.partial(self._convert, target, converter, sources, dtype)
        conversion = Conversion(run)
        for name, value in run("meta").items():
            if self._set(name, value):
                places[name] = Converted(conversion, name)

    def _convert(
        self, target: str, converter: Any, sources: list[tuple[str, str]], dtype: torch.dtype, device: str = "cpu"
    ) -> dict[str, Tensor]:
        def load(key: str) -> Tensor:
            if device == "meta":
                return torch.empty(self.readers[key].spec(key).shape, dtype=dtype, device="meta")
            return self.readers[key].full(key).to(dtype)

        mapping = copy.deepcopy(converter)
        for pattern, key in sources:
            mapping.add_tensor(target, key, pattern, functools.partial(load, key))
        with torch.no_grad():
            found = mapping.convert(target, model=self.model, config=self.model.config, loading_info=self.info)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def _dtype(self, target: str) -> torch.dtype:
        """Dtype of the model, unless the class keeps it in float32."""
        for pattern, dtype in self.load_config.dtype_plan.items():
            if re.search(pattern.replace("*", ".*"), target):
                planned: torch.dtype = dtype
                return planned
        return self.expected[target].dtype

    def _set(self, target: str, value: Tensor) -> bool:
        """Give the model what stands for a value; whether it has its shape."""
        set_param_for_module(self.model, target, value, self.info, None)  # type: ignore[arg-type]
        return all(target != name for name, *_ in self.info.mismatched_keys)

    def _compare_tied(self, places: dict[str, Source]) -> None:
        """Weights that are tied by the config and stored twice: one, if they are equal, else two."""
        for target, source in list(self.model.all_tied_weights_keys.items()):
            one, other = places.get(source), places.get(target)
            if not isinstance(one, Stored) or not isinstance(other, Stored):
                continue
            if _equal(one, other):
                self.info.missing_keys.add(target)  # so that it is tied
                del places[target]
            else:
                logger.warning(f"{source} and {target} are tied by the config and differ in the files: not tied")
                self.model.all_tied_weights_keys.pop(target)


def _equal(one: Stored, other: Stored) -> bool:
    specs = [stored.reader.spec(stored.name) for stored in (one, other)]
    if (specs[0].dtype, specs[0].shape) != (specs[1].dtype, specs[1].shape):
        return False
    block = one.reader.block
    for start in range(0, specs[0].numel, block):
        stop = min(start + block, specs[0].numel)
        parts = [stored.reader.read(stored.name, start, stop) for stored in (one, other)]
        if not torch.equal(*parts):
            return False
    return True


def _defer(model: Any, path: str, places: Mapping[str, Source]) -> None:
    entries, seen = [], set()
    for name, source in places.items():
        parameter = model.get_parameter(name)
        if parameter.is_meta and id(parameter) not in seen:
            seen.add(id(parameter))
            entries.append((parameter, source))
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta and id(parameter) not in seen]
    if lost:
        raise ValueError(f"{path}: nothing gives parameters {lost[:5]} of {type(model).__name__} their values")
    DeferredWeights(path, entries).attach(model)
