"""Inputs for a training step of any model, by the names of its `forward`, and a loss of its outputs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from tests.conformance.tiny_sizes import WORDS

LENGTH, BATCH = 16, 2


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
