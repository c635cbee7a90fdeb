"""transformers' models, sharded from the start: `from_pretrained` without a full model anywhere, and pipeline layers.

The library itself reads the config, builds the model on the meta device, initialises what the files lack, ties, and
reports. One step of it is replaced, in a subclass: instead of reading tensors, their places in the files are noted.

A model as layers of a pipeline:

    PipelineModule(pipeline_layers(model), num_stages=2, loss_fn=pipeline_loss(model))

Between layers travels a dict: the hidden states, and of attention mask and position ids what the batch has. The blocks'
own masks and rotary embeddings are calculated from these by each block, with transformers' functions: that is less than
what would have to be sent. Keys and values are not collected. The last layer returns the logits.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
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
from zero_strategy.fsdp.divided_elsewhere import instead_of, sizes_of
from zero_strategy.integrations.huggingface.quantised import SLICED, WeightQuantiser
from zero_strategy.pipeline.building import ModelLayer, finished, model_layer
from zero_strategy.quantized.wrapped import is_holding, where_parts_are

logger = logging.get_logger(__name__)

_ELSEWHERE = ("device_map", "distributed_config", "gguf_file", "state_dict", "tp_plan")
"""Arguments that say where weights lie, which is decided by sharding."""
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
        if (given := keywords.get(name)) is not None:
            ways = instead_of(sizes_of(given)) if name == "distributed_config" else ""
            raise ValueError(f"{name}={given!r}: weights are placed by sharding; drop it{ways}")
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
    # The subclass has done its work, and copies and pickles are those of the real one.
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
    """Places by name of the parameter; `noted` says that transformers came to where they are."""

    noted = False


def _noting(kind: type[PreTrainedModel], places: _Places) -> Any:
    """A subclass that fills `places` where transformers would load."""

    def load(
        model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *_: Any, **__: Any
    ) -> tuple[LoadStateDictInfo, None]:
        files = checkpoint_files or []
        others = [file for file in files if not file.endswith(".safetensors")]
        if others or not files:
            raise ValueError(
                f"{model.config.name_or_path}: {others or 'no weights'}: only safetensors can be read in parts; load "
                "the model with transformers once and save it with save_pretrained()"
            )
        places.noted = True
        return _Noter(model, files, load_config).note(places), None

    # transformers writes and looks up classes by their names.
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
        quantizer = load_config.hf_quantizer
        self.quantiser = None if quantizer is None else WeightQuantiser(model, quantizer)

    def note(self, places: dict[str, Source]) -> LoadStateDictInfo:
        mapping = self.load_config.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        # Quantised weights of files are read as they are: transformers' conversion puts whole ones together.
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter) and not _reads_quantised(entry)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        converted: dict[str, list[tuple[str, str]]] = {}
        quantised: dict[str, dict[str, str]] = {}
        # transformers' order, in which the parts of a converted weight are put together.
        for key in sorted(self.readers, key=dot_natural_key):
            prefix = self.model.base_model_prefix
            companion = None if self.quantiser is None else self.quantiser.companion(key)
            if companion is not None:
                target, _ = rename_source_key(companion[0], renamings, [], prefix, self.expected)
                quantised.setdefault(target, {})[companion[1]] = key
                continue
            target, pattern = rename_source_key(key, renamings, converters, prefix, self.expected)
            # As transformers does: such a key need not be renamed, but may lack the prefix.
            if target not in self.expected and key in self.expected:
                target, pattern = rename_source_key(key, [], [], prefix, self.expected)
            if target not in self.expected:
                targets = by_pattern[pattern].target_patterns if pattern is not None else [target]
                first = targets[0]
                self.info.unexpected_keys.update(target.replace(first, other) for other in targets)
            elif pattern is not None:
                converted.setdefault(target, []).append((pattern, key))
            elif self.quantiser is not None and self.quantiser.wants(target):
                quantised.setdefault(target, {})["weight"] = key
            elif target not in places:
                self._note_stored(target, key, places)
        for target, sources in converted.items():
            self._note_converted(target, by_pattern[sources[0][0]], sources, places)
        for target, keys in quantised.items():
            self._note_quantised(target, keys, places)
        # Saving reverses the conversions that are listed here.
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

    def _note_quantised(self, target: str, keys: dict[str, str], places: dict[str, Source]) -> None:
        """A weight that is quantised in the file, or becomes so when it is read."""
        quantiser = self.quantiser
        assert quantiser is not None
        self.info.missing_keys.discard(target)
        if quantiser.in_file:
            kept = {name: key for name, key in keys.items() if name == "weight" or name in SLICED}
            specs = {name: self.readers[key].spec(key) for name, key in kept.items()}
            shapes = {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
            small = {name: self.readers[key].full(key) for name, key in keys.items() if name not in kept}
            for name in quantiser.expect_stored(target, shapes, small):
                key = keys[name.removeprefix(target.removesuffix("weight"))]
                places[name] = Stored(self.readers[key], key)
            return
        key, dtype = keys["weight"], self._quantised_dtype(target)
        reader, recipe = self.readers[key], quantiser.recipe(target, dtype)
        conversion = Conversion(lambda: recipe.quantise(reader.full(key)))
        for name in quantiser.expect(target, torch.Size(reader.spec(key).shape), dtype):
            places[name] = Converted(conversion, name)

    def _quantised_dtype(self, target: str) -> torch.dtype:
        """Dtype in which values are quantised: what was asked for, as in transformers."""
        planned = [dtype for pattern, dtype in self.load_config.dtype_plan.items() if _matches(pattern, target)]
        found: torch.dtype = planned[0] if planned else self.load_config.dtype
        return found

    def _convert(
        self, target: str, converter: Any, sources: list[tuple[str, str]], dtype: torch.dtype, device: str = "cpu"
    ) -> dict[str, Tensor]:
        def load(key: str) -> Tensor:
            if device == "meta":
                return torch.empty(self.readers[key].spec(key).shape, dtype=dtype, device="meta")
            return self.readers[key].full(key).to(dtype)

        # A converter collects tensors, and a conversion may run again.
        mapping = copy.deepcopy(converter)
        for pattern, key in sources:
            mapping.add_tensor(target, key, pattern, functools.partial(load, key))
        with torch.no_grad():
            found = mapping.convert(target, model=self.model, config=self.model.config, loading_info=self.info)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def _dtype(self, target: str) -> torch.dtype:
        """Dtype of the model, unless the class keeps it in float32."""
        for pattern, dtype in self.load_config.dtype_plan.items():
            if _matches(pattern, target):
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


def _matches(pattern: str, target: str) -> bool:
    return re.search(pattern.replace("*", ".*"), target) is not None


def _reads_quantised(converter: Any) -> bool:
    return any(
        type(operation).__module__ == "transformers.integrations.bitsandbytes" for operation in converter.operations
    )


def _equal(one: Stored, other: Stored) -> bool:
    specs = [stored.reader.spec(stored.name) for stored in (one, other)]
    if (specs[0].dtype, specs[0].shape) != (specs[1].dtype, specs[1].shape):
        return False
    # An embedding need not be in memory as a whole.
    block = one.reader.block
    for start in range(0, specs[0].numel, block):
        stop = min(start + block, specs[0].numel)
        parts = [stored.reader.read(stored.name, start, stop) for stored in (one, other)]
        if not torch.equal(*parts):
            return False
    return True


def _defer(model: Any, path: str, places: Mapping[str, Source]) -> None:
    # Not by `get_parameter`: names of scales have dots of their own.
    entries, seen, named = [], set(), dict(model.named_parameters(remove_duplicate=False))
    for name, source in places.items():
        parameter = named[name]
        # Tied names share a parameter.
        if parameter.is_meta and id(parameter) not in seen:
            seen.add(id(parameter))
            entries.append((parameter, source))
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta and id(parameter) not in seen]
    if lost:
        raise ValueError(f"{path}: nothing gives parameters {lost[:5]} of {type(model).__name__} their values")
    DeferredWeights(path, entries).attach(model)
    for module in model.modules():
        if is_holding(module):
            where_parts_are(module)  # no longer on the meta device: PEFT makes adapters where a weight says that it is


_TRAVELLING = ("attention_mask", "position_ids")
_TAKEN = {"input_ids", *_TRAVELLING, "token_type_ids", "labels"}

State = dict[str, Any]


def pipeline_layers(model: nn.Module) -> list[ModelLayer]:
    """The layers of a Hugging Face model: embedding, blocks, head.

    The first takes a batch: a dict with "input_ids" and, where wanted, "attention_mask", "position_ids" and
    "token_type_ids" ("labels" are for the loss, and not looked at), or the input ids alone. The last returns what the
    model calls logits. Parameters keep their names in the model, so that checkpoints are the model's own.

    Args:
        model: One of `RECIPES`: GPT2LMHeadModel, LlamaForCausalLM, BertForMaskedLM, BertForSequenceClassification.

    Raises:
        ValueError: If there is no recipe for it.
    """
    return finished(model, _recipe(model)[0](model))


def pipeline_loss(model: nn.Module) -> Callable[..., Tensor]:
    """The loss that the model itself would calculate: a function of logits and labels.

    Raises:
        ValueError: If there is no recipe for the model.
    """
    return _recipe(model)[1](model)


def _recipe(model: nn.Module) -> tuple[Callable[[Any], list[ModelLayer]], Callable[[Any], Callable[..., Tensor]]]:
    for each in type(model).__mro__:
        if each.__name__ in RECIPES and each.__module__.startswith("transformers."):
            return RECIPES[each.__name__]
    raise ValueError(
        f"there is no pipeline recipe for {type(model).__name__}, only for {', '.join(RECIPES)}; "
        "zero_strategy.pipeline.building.pipeline_layers(model, blocks=..., embedding=..., head=...) takes any model"
    )


# ---- what is the same for all ----


def _batch(inputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Input ids, and all of the batch."""
    batch = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        raise TypeError(f"the first layer takes input_ids, or a dict that has them, not {type(inputs).__name__}")
    if unknown := sorted(name for name, value in batch.items() if name not in _TAKEN and value is not None):
        raise ValueError(f"the first layer does not take {unknown}; it takes {sorted(_TAKEN)}")
    return batch["input_ids"], batch


def _start(hidden_states: Tensor, batch: Mapping[str, Any]) -> State:
    travelling = {name: batch[name] for name in _TRAVELLING if batch.get(name) is not None}
    return {"hidden_states": hidden_states, **travelling}


def _positions(state: State) -> Tensor:
    hidden, given = state["hidden_states"], state.get("position_ids")
    if given is not None:
        return given  # type: ignore[no-any-return]
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


def _causal_mask(config: Any, state: State, positions: Tensor | None) -> Any:
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(
        config=config,
        inputs_embeds=state["hidden_states"],
        attention_mask=state.get("attention_mask"),
        past_key_values=None,
        position_ids=positions,
    )


def _names(container: str, module: Any) -> list[str]:
    return [f"{container}.{index}" for index in range(len(module))]


def _causal_loss(model: Any) -> Callable[..., Tensor]:
    return partial(_call_loss, model.loss_function, model.config.vocab_size)


def _call_loss(loss: Callable[..., Tensor], vocab_size: int, logits: Tensor, labels: Any, **kwargs: Any) -> Tensor:
    return loss(logits=logits, labels=_labels(labels), vocab_size=vocab_size, **kwargs)


def _labels(labels: Any) -> Tensor:
    found = labels.get("labels") if isinstance(labels, Mapping) else labels
    if not isinstance(found, Tensor):
        raise TypeError(f"the loss takes labels, or a dict that has them, not {type(labels).__name__}")
    return found


# ---- GPT-2 ----


def _gpt2(model: Any) -> list[ModelLayer]:
    config, base = model.config, "transformer"
    if config.add_cross_attention:
        raise ValueError("the GPT-2 recipe has no cross-attention, which config.add_cross_attention asks for")
    first = [f"{base}.{name}" for name in ("wte", "wpe", "drop")]
    names = _names(f"{base}.h", model.transformer.h)
    blocks = [model_layer(model, name, partial(_gpt2_block, config)) for name in names]
    head = model_layer(model, [f"{base}.ln_f", "lm_head"], _norm_and_head)
    return [model_layer(model, first, _gpt2_embedding), *blocks, head]


def _gpt2_embedding(wte: Any, wpe: Any, drop: Any, inputs: Any) -> State:
    input_ids, batch = _batch(inputs)
    hidden = wte(input_ids)
    positions = _positions({"hidden_states": hidden, "position_ids": batch.get("position_ids")})
    hidden = hidden + wpe(positions)
    if batch.get("token_type_ids") is not None:
        hidden = hidden + wte(batch["token_type_ids"])
    return _start(drop(hidden), batch)


def _gpt2_block(config: Any, block: Any, state: State) -> State:
    positions = _positions(state)
    mask = _causal_mask(config, state, positions)
    hidden = block(state["hidden_states"], None, mask, None, use_cache=False, position_ids=positions)
    return {**state, "hidden_states": hidden}


def _norm_and_head(norm: Any, head: Any, state: State) -> Tensor:
    logits: Tensor = head(norm(state["hidden_states"]))
    return logits


# ---- Llama ----


def _llama(model: Any) -> list[ModelLayer]:
    config, rotary = model.config, "model.rotary_emb"
    names = _names("model.layers", model.model.layers)
    blocks = [model_layer(model, [name, rotary], partial(_llama_block, config), name=name) for name in names]
    head = model_layer(model, ["model.norm", "lm_head"], _norm_and_head)
    return [model_layer(model, "model.embed_tokens", _llama_embedding), *blocks, head]


def _llama_embedding(embed_tokens: Any, inputs: Any) -> State:
    input_ids, batch = _batch(inputs)
    return _start(embed_tokens(input_ids), batch)


def _llama_block(config: Any, block: Any, rotary: Any, state: State) -> State:
    hidden, positions = state["hidden_states"], _positions(state)
    hidden = block(
        hidden,
        attention_mask=_causal_mask(config, state, positions),
        position_embeddings=rotary(hidden, position_ids=positions),
        position_ids=positions,
        past_key_values=None,
        use_cache=False,
    )
    return {**state, "hidden_states": hidden}


# ---- BERT ----


def _bert(model: Any) -> list[ModelLayer]:
    config = model.config
    if config.add_cross_attention:
        raise ValueError("the BERT recipe has no cross-attention, which config.add_cross_attention asks for")
    names = _names("bert.encoder.layer", model.bert.encoder.layer)
    blocks = [model_layer(model, name, partial(_bert_block, config)) for name in names]
    return [model_layer(model, "bert.embeddings", _bert_embedding), *blocks]


def _bert_masked_lm(model: Any) -> list[ModelLayer]:
    return [*_bert(model), model_layer(model, "cls", _on_hidden_states)]


def _bert_classification(model: Any) -> list[ModelLayer]:
    return [*_bert(model), model_layer(model, ["bert.pooler", "dropout", "classifier"], _bert_classify)]


def _bert_embedding(embeddings: Any, inputs: Any) -> State:
    input_ids, batch = _batch(inputs)
    positions, types = batch.get("position_ids"), batch.get("token_type_ids")
    return _start(embeddings(input_ids=input_ids, position_ids=positions, token_type_ids=types), batch)


def _bert_block(config: Any, block: Any, state: State) -> State:
    from transformers.masking_utils import create_bidirectional_mask

    hidden = state["hidden_states"]
    if config.is_decoder:
        mask = _causal_mask(config, state, None)
    else:
        mask = create_bidirectional_mask(
            config=config, inputs_embeds=hidden, attention_mask=state.get("attention_mask")
        )
    return {**state, "hidden_states": block(hidden, mask, None, position_ids=state.get("position_ids"))}


def _on_hidden_states(head: Any, state: State) -> Tensor:
    logits: Tensor = head(state["hidden_states"])
    return logits


def _bert_classify(pooler: Any, dropout: Any, classifier: Any, state: State) -> Tensor:
    logits: Tensor = classifier(dropout(pooler(state["hidden_states"])))
    return logits


def _masked_lm_loss(model: Any) -> Callable[..., Tensor]:
    return partial(_flat_cross_entropy, model.config.vocab_size)


def _flat_cross_entropy(classes: int, logits: Tensor, labels: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.view(-1, classes), _labels(labels).view(-1))


def _classification_loss(model: Any) -> Callable[..., Tensor]:
    return partial(_classify_loss, model.config.problem_type, model.num_labels)


def _classify_loss(problem: str | None, classes: int, logits: Tensor, labels: Any) -> Tensor:
    targets = _labels(labels)
    if problem is None:
        whole = targets.dtype in (torch.long, torch.int)
        problem = "regression" if classes == 1 else ("single_label" if whole else "multi_label") + "_classification"
    if problem == "regression":
        if classes == 1:
            logits, targets = logits.squeeze(), targets.squeeze()
        return nn.functional.mse_loss(logits, targets)
    if problem == "single_label_classification":
        return _flat_cross_entropy(classes, logits, targets)
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)


RECIPES: Mapping[str, tuple[Callable[[Any], list[ModelLayer]], Callable[[Any], Callable[..., Tensor]]]] = {
    "GPT2LMHeadModel": (_gpt2, _causal_loss),
    "LlamaForCausalLM": (_llama, _causal_loss),
    "BertForMaskedLM": (_bert_masked_lm, _masked_lm_loss),
    "BertForSequenceClassification": (_bert_classification, _classification_loss),
}
"""Class name -> what makes its layers, and what makes its loss."""
