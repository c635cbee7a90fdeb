"""Tiny models of every architecture that transformers knows, and inputs for them, made without a download.

A configuration is the class's own default with small sizes under the attribute names that families share, and inputs
follow from the signature of `forward`. Several recipes are tried until one forward and backward of the plain model
runs; an architecture without one is reported as not built, with the reason.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

HIDDEN, HEADS, LENGTH, BATCH, WORDS = 64, 4, 16, 2, 128
LONGEST = 4.0
"""Processor seconds of one plain step."""
LARGEST = 26_000_000
"""Parameters of a model that counts as tiny: small sizes did not reach a wide part of it otherwise."""

_SMALL: dict[int, str] = {
    HIDDEN: "hidden_size d_model n_embd dim model_dim hidden_dim dim_model embedding_size decoder_hidden_size word_embed_proj_dim "
    "d_embed qformer_hidden_size cross_attention_hidden_size encoder_hidden_size out_hidden_size text_hidden_size "
    "output_dim lru_width emb_dim text_embed_dim adapter_hidden_size output_proj_dims encoder_dim decoder_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_encoder_layers "
    "num_decoder_layers num_decoder_hidden_layers num_key_value_heads num_kv_heads multi_query_group_num depth_layers "
    "num_experts_per_tok num_experts_per_token moe_topk top_k encoder_num_hidden_layers decoder_num_hidden_layers index_n_heads "
    "num_experts_per_topk moe_k num_global_layers num_local_layers vision_num_hidden_layers n_layers_text",
    1: "n_group topk_group n_shared_experts first_k_dense_replace num_shared_experts moe_layer_start_index num_nextn_predict_layers",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads decoder_num_attention_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts num_memory_blocks encoder_num_attention_heads heads "
    "num_conv_pos_embedding_groups attention_chunk_size linear_num_key_heads linear_num_value_heads",
    16: "head_dim v_head_dim kv_lora_rank projection_dim qk_head_dim d_kv index_head_dim hidden_size_per_layer_input "
    "num_codevectors_per_group codevector_dim proj_codevector_dim time_step_rank attention_head_dim classifier_proj_size "
    "num_queries num_query_tokens vision_embed_dim num_conv_pos_embeddings mamba_d_head kv_channels attention_head_size "
    "conv_kernel_size_text linear_key_head_dim linear_value_head_dim prompt_hidden_size num_latents d_head mamba_headdim",
    8: "qk_rope_head_dim qk_nope_head_dim state_size d_state mamba_d_state index_topk mamba_n_heads ssm_state_size rotary_dim",
    24: "q_lora_rank",
    96: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner feed_forward_size ffn_hidden_size "
    "moe_intermediate_size mlp_dim dim_feedforward decoder_intermediate_size ffn_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size expert_dim encoder_intermediate_size dense_intermediate_size dff",
    128: "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_seq_len "
    "conv_dim_text tdnn_dim_text max_sequence_length rel_max_position vocab_size_per_layer_input sliding_window",
    32: "image_size n_fft_out max_2d_position_embeddings_small",
}  # fmt: skip
SMALL = {name: value for value, names in _SMALL.items() for name in names.split()}
VOCABULARIES = ("vocab_size", "decoder_vocab_size", "encoder_vocab_size", "codebook_size", "src_vocab_size", "tgt_vocab_size",
                "entity_vocab_size", "text_vocab_size", "input_vocab_size", "output_vocab_size", "n_token", "audio_vocab_size")  # fmt: skip
LISTS = {"depths": 1, "num_blocks": 1, "layers": 1, "encoder_depths": 1, "decoder_depths": 1, "layer_depths": 1}
WIDTHS = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "neck_hidden_sizes", "widths", "conv_dim", "tdnn_dim")
OFF = {"apply_spec_augment": False, "use_cache": False, "use_timm_backbone": False, "use_pretrained_backbone": False}
SMALL_EVENTS = {"num_frames": 2, "num_mel_bins": 16, "patch_size": 8, "num_feature_levels": 4, "num_labels": 3}

CHOICES: dict[str, dict[str, Any]] = {
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "is_decoder": True,
        "lsh_attn_chunk_length": 4,
        "num_hidden_layers": 2,
        "hidden_dropout_prob": 0.0,  # drawn from a seed that the model takes from the clock
        "local_attention_probs_dropout_prob": 0.0,
    },
    "longformer": {"attention_window": 8},
    "led": {"attention_window": 8},
    "squeezebert": {"embedding_size": HIDDEN},
    "falcon": {"num_kv_heads": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "glm4v_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "glm_ocr_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen2_5_omni_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "num_attention_heads": 4},
    "bit": {"num_groups": 8},
    "nemotron": {"num_key_value_heads": 2},
}
"""What the shared names cannot say, by model type."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Give all generators of random numbers a seed; models and samplers draw from each of them."""
    random.seed(seed)
    np.random.seed(seed % 2**31)
    torch.manual_seed(seed)
    yield


def small_values(config: Any, recipe: int) -> dict[str, Any]:
    """Overrides for one configuration class, by the names of its default.

    Args:
        config: The default configuration, with its parts.
        recipe: 0 for all names; 1 leaves key-value heads as many as heads; 2 also leaves head sizes to the class; 3
            leaves image and patch sizes as they are.
    """
    accepted = set(inspect.signature(type(config).__init__).parameters) | set(
        getattr(type(config), "attribute_map", ())
    )
    aliases = getattr(type(config), "attribute_map", {})
    given: dict[str, Any] = {}
    special = iter(range(WORDS - 1, 0, -1))
    parts = {
        name for name in getattr(type(config), "sub_configs", {}) if hasattr(getattr(config, name, None), "to_dict")
    }
    for name in sorted(config.to_dict()):
        if name not in accepted and name not in parts:
            continue
        old = getattr(config, name, None)
        if name in parts:
            given[name] = {"model_type": old.model_type, **small_values(old, recipe)}
        elif name in VOCABULARIES and isinstance(old, int):
            given[name] = WORDS if old > WORDS else old
        elif name.endswith(("_token_id", "_token_index", "_idx")) and isinstance(old, int) and old >= WORDS - 20:
            given[name] = next(special)
        elif name in SMALL and isinstance(old, int) and not isinstance(old, bool):
            given[name] = min(old, SMALL[name]) if old > 0 else old
        elif name in SMALL and isinstance(old, (list, tuple)) and name == "image_size":
            given[name] = type(old)(32 for _ in old)
        elif name in OFF:
            given[name] = OFF[name]
        elif name in SMALL_EVENTS and isinstance(old, int):
            given[name] = min(old, SMALL_EVENTS[name])
        elif name in LISTS and isinstance(old, (list, tuple)):
            given[name] = type(old)(min(1, each) if isinstance(each, int) else each for each in old)
        elif name in WIDTHS and isinstance(old, (list, tuple)) and all(isinstance(each, int) for each in old) and old:
            given[name] = type(old)(max(8, each * 16 // min(old)) if min(old) > 16 else each for each in old)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(old, dict) and "mrope_section" in old:
            given[name] = {**old, "mrope_section": [2, 3, 3]}
        elif name == "embed_dim" and isinstance(old, int):
            heads = getattr(config, "num_heads", None)
            given[name] = 8 * heads[0] if isinstance(heads, (list, tuple)) else HIDDEN
    if recipe >= 1:
        for name in ("num_key_value_heads", "num_kv_heads"):
            if name in given:
                given[name] = HEADS
    if recipe >= 2:
        for name in ("head_dim", "v_head_dim", "d_kv", "attention_head_dim"):
            given.pop(name, None)
    if recipe >= 3:
        for name in ("image_size", "patch_size", "num_mel_bins"):
            given.pop(name, None)
    for name, real in aliases.items():
        if name in given and real in given:
            del given[name]
    given |= CHOICES.get(config.model_type, {})
    return given


PREFERRED = (
    "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC", "PRETRAINING",
    "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION", "MASKED_IMAGE_MODELING", "SEQUENCE_CLASSIFICATION",
    "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "TIME_SERIES_PREDICTION", "QUESTION_ANSWERING", "MASK_GENERATION", "",
)  # fmt: skip


def classes() -> dict[str, list[str]]:
    """Names of model classes by model type, with the head that is trained most first and the bare model last."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for head in PREFERRED:
        mapping = getattr(
            modeling_auto, f"MODEL_{f'FOR_{head}_' if head not in ('', 'PRETRAINING') else ''}MAPPING_NAMES"
        )
        if head == "PRETRAINING":
            mapping = modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES
        for kind, name in mapping.items():
            for each in (name,) if isinstance(name, str) else name:
                if each not in found.setdefault(kind, []):
                    found[kind].append(each)
    return found


def probe(outputs: Any) -> torch.Tensor:
    """A loss of all outputs that need a gradient (of all, without gradients): their mean product with drawn numbers.

    A mean square would not do, since it is constant after a layer norm.
    """
    generator = torch.Generator().manual_seed(17)
    total, training = torch.zeros(()), torch.is_grad_enabled()

    def visit(value: Any) -> None:
        nonlocal total
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            if training and not value.requires_grad:
                return
            weights = torch.randn(value.shape, generator=generator)
            clean = torch.where(torch.isfinite(value), value, torch.zeros_like(value)).float()
            total = total + (clean * weights).mean()
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each)

    visit(dict(outputs) if isinstance(outputs, dict) else outputs)
    return total


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss, or the probe of its outputs."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and (loss.requires_grad or not torch.is_grad_enabled()):
        return loss.mean()
    return probe(outputs)


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes in a configuration or in one of its parts."""
    own = [getattr(config, name, None) for name in getattr(type(config), "sub_configs", {})]
    for name in names:
        for each in (config, *own):
            value = getattr(each, name, None)
            if value is not None:
                return value
    return default


def ids(generator: torch.Generator, words: int, length: int = LENGTH) -> torch.Tensor:
    """Token ids that are none of the special ones."""
    return torch.randint(3, max(4, min(words, WORDS - 24)), (BATCH, length), generator=generator)


@dataclass(frozen=True)
class Recipe:
    """One way of making inputs.

    Attributes:
        images: Images beside texts, with as many image tokens as the model gives features.
        labels: The texts as labels.
        shape: Layout of audio features and of images: 0 is the usual one.
    """

    images: bool
    labels: bool
    shape: int


RECIPES = [Recipe(images, labels, shape) for shape in (0, 1, 2) for images in (True, False) for labels in (True, False)]


def image_inputs(config: Any, generator: torch.Generator, shape: int) -> torch.Tensor:
    """Images (batch, channels, height, width), or clips with frames before the channels."""
    size = find(config, "image_size", "crop_size", default=32 if shape == 0 else 64)
    if isinstance(size, dict):
        size = next(iter(size.values()))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = find(config, "num_frames", "frames_per_clip")
    if shape == 2:
        height, width = 2 * height, 2 * width
    if isinstance(frames, int) and shape != 1:
        return torch.randn(BATCH, frames, channels, height, width, generator=generator)
    return torch.randn(BATCH, channels, height, width, generator=generator)


def audio_features(config: Any, generator: torch.Generator, shape: int) -> torch.Tensor:
    """Spectrograms (batch, bins, time), or (batch, time, bins)."""
    bins = find(
        config,
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_size",
        "feature_projection_input_dim",
        "input_dim",
        default=80,
    )
    length = 2 * find(config, "max_source_positions", default=32)
    if shape == 0:
        return torch.randn(BATCH, bins, length, generator=generator)
    return torch.randn(BATCH, 64, bins, generator=generator)


def make_inputs(model: Any, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Inputs for one training step of a model, of the same shapes for each seed."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    known = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    text = config.get_text_config()
    words = find(text, "vocab_size", default=None) or find(config, "vocab_size", "encoder_vocab_size")
    words = words if isinstance(words, int) and words > 8 else None
    if "input_ids" in known and words:
        inputs["input_ids"] = ids(generator, words)
        if "attention_mask" in known:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "bbox" in known:
            inputs["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
    needed = lambda name: name in known and (known[name].default is inspect.Parameter.empty or not inputs)  # noqa: E731
    if "pixel_values" in known and (recipe.images or needed("pixel_values")):
        inputs["pixel_values"] = image_inputs(config, generator, recipe.shape)
        place_images(model, inputs)
    if "input_values" in known and not inputs:
        samples = find(config, "max_length", default=64) if hasattr(config, "frequency_stride") else 3200
        size = (
            (BATCH, samples, config.num_mel_bins)
            if hasattr(config, "frequency_stride")
            else (BATCH, *((1,) * recipe.shape), 3200)
        )
        inputs["input_values"] = torch.randn(*size, generator=generator)
    if "input_features" in known and (not inputs or needed("input_features")):
        inputs["input_features"] = audio_features(config, generator, recipe.shape)
    if "past_values" in known:
        inputs |= series(config, known, generator)
    if "decoder_input_ids" in known and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids(generator, find(config, "decoder_vocab_size", "vocab_size", default=WORDS), 8)
    if recipe.labels and "labels" in known:
        inputs["labels"] = labels_for(model, inputs, generator)
    return {name: value for name, value in inputs.items() if value is not None}


def labels_for(model: Any, inputs: dict[str, Any], generator: torch.Generator) -> Any:
    """Labels by the head of a class."""
    name = type(model).__name__
    if "decoder_input_ids" in inputs:
        return inputs["decoder_input_ids"].clone()
    if (
        any(word in name for word in ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "ForPreTraining"))
        and "input_ids" in inputs
    ):
        return inputs["input_ids"].clone()
    if "Classification" in name:
        return torch.randint(0, model.config.num_labels, (BATCH,), generator=generator)
    if "CTC" in name:
        return torch.randint(1, 20, (BATCH, 3), generator=generator)
    return None


def place_images(model: Any, inputs: dict[str, Any]) -> None:
    """Put as many image tokens into the text as a model gives features for its images."""
    token = find(model.config, "image_token_id", "image_token_index")
    if token is None or "input_ids" not in inputs:
        return
    features = model.get_image_features(pixel_values=inputs["pixel_values"])
    features = getattr(features, "pooler_output", features)
    rows = sum(
        each.reshape(-1, each.shape[-1]).shape[0]
        for each in (features if isinstance(features, (list, tuple)) else [features])
    )
    count = rows // BATCH
    front = torch.full((BATCH, count), token)
    inputs["input_ids"] = torch.cat([front, inputs["input_ids"]], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])


def series(config: Any, known: Any, generator: torch.Generator) -> dict[str, Any]:
    """Inputs of a model of time series."""
    lags = max(getattr(config, "lags_sequence", None) or [0])
    past = (config.context_length if getattr(config, "context_length", None) else 32) + lags
    channels = getattr(config, "num_input_channels", None)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    if channels:
        return {"past_values": draw(BATCH, past, channels)}
    future = getattr(config, "prediction_length", None) or 4
    times = getattr(config, "num_time_features", 0) or 0
    made = {"past_values": draw(BATCH, past)}
    if "past_time_features" in known:
        made |= {"past_time_features": draw(BATCH, past, times), "past_observed_mask": torch.ones(BATCH, past)}
        made |= {"future_values": draw(BATCH, future), "future_time_features": draw(BATCH, future, times)}
    return made


@dataclass
class Architecture:
    """A class of models that can be built and trained plainly.

    Attributes:
        kind: The model type of transformers.
        cls: The class.
        values: Overrides of its configuration.
        recipe: The way of making inputs.
        parameters: Count of numbers.
    """

    kind: str
    cls: Any
    values: dict[str, Any]
    recipe: Recipe
    parameters: int
    reasons: list[str] = field(default_factory=list)

    def build(self, seed: int) -> Any:
        """A model in training mode whose numbers are drawn from this seed."""
        with seeded(seed):
            model = self.cls(self.cls.config_class(**self.values))
        return model.train()

    def inputs(self, model: Any, seed: int) -> dict[str, Any]:
        """Inputs of one step."""
        return make_inputs(model, self.recipe, seed)


def first_line(error: BaseException) -> str:
    """The kind and first line of an error."""
    text = (str(error).strip() or "(no message)").splitlines()[0]
    return f"{type(error).__name__}: {text[:160]}"


class TooSlow(Exception):
    """A plain step takes too long for a suite of hundreds of models, whatever the inputs."""


def trains(model: Any, recipe: Recipe) -> None:
    """Run one forward and backward; raises what the model raises, ValueError if its loss or a gradient is not finite."""
    inputs, began = make_inputs(model, recipe, 5), time.process_time()
    if not inputs:
        raise ValueError(f"no input is known for {sorted(inspect.signature(model.forward).parameters)[:6]}")
    with seeded(3):
        loss = loss_of(model(**inputs))
    if not loss.requires_grad:
        raise ValueError("no output needs a gradient")
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not torch.isfinite(loss) or not grads or not all(bool(torch.isfinite(g).all()) for g in grads):
        raise ValueError("the plain model's loss or gradients are not finite")
    if not any(bool(g.any()) for g in grads):
        raise ValueError("all gradients of the plain model are zero")
    if (seconds := time.process_time() - began) > LONGEST:
        raise TooSlow(f"a plain step takes {seconds:.0f} s of a processor")


def find_architecture(kind: str, names: list[str], say: Callable[[str], None] = lambda text: None) -> Architecture:
    """The first class and recipe of a model type that trains plainly; raises LookupError with the reasons."""
    import transformers

    reasons: list[str] = []
    for name in names[:4]:
        cls = getattr(transformers, name, None)
        if cls is None or getattr(cls, "config_class", None) is None:
            reasons.append(f"{name}: no such class")
            continue
        try:
            default = cls.config_class()
        except Exception as error:
            reasons.append(f"{name}: default configuration: {first_line(error)}")
            continue
        for recipe in range(4):
            try:
                values = small_values(default, recipe)
                with torch.device("meta"):
                    count = sum(p.numel() for p in cls(cls.config_class(**values)).parameters())
                if count > LARGEST:
                    raise ValueError(f"{count:,} parameters with small sizes")
                architecture = Architecture(kind, cls, values, RECIPES[0], count)
                architecture.build(1)
            except Exception as error:
                reasons.append(f"{name}: {first_line(error)}")
                continue
            for inputs in RECIPES:
                try:
                    architecture.recipe = inputs
                    trains(architecture.build(1), inputs)
                except TooSlow as error:
                    raise LookupError(f"{name}: {error}") from None
                except Exception as error:
                    reasons.append(f"{name}: {first_line(error)}")
                    continue
                return architecture
    raise LookupError(max(reversed(list(dict.fromkeys(reasons))), key=reasons.count) if reasons else "no class")
