"""Tiny models of every architecture that transformers knows, made without a download.

A configuration is the class's own default with small sizes, and inputs follow from the signature of `forward`. Several
recipes are tried until one forward and backward of the plain model runs; an architecture without one is reported as
not built, with the reason.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.conformance.tiny_inputs import RECIPES, Recipe, loss_of, make_inputs
from tests.conformance.tiny_sizes import small_values

LONGEST = 4.0
"""Processor seconds of one plain step."""
LARGEST = 26_000_000
"""Parameters of a model that counts as tiny: small sizes did not reach a wide part of it otherwise."""
PREFERRED = (
    "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC", "PRETRAINING",
    "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION",
    "MASKED_IMAGE_MODELING", "SEQUENCE_CLASSIFICATION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM",
    "TIME_SERIES_PREDICTION", "QUESTION_ANSWERING", "MASK_GENERATION",
)  # fmt: skip
"""Heads of transformers' auto mappings, in the order of their choice."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Give all generators of random numbers a seed; models and samplers draw from each of them."""
    random.seed(seed)
    np.random.seed(seed % 2**31)
    torch.manual_seed(seed)
    yield


def classes() -> dict[str, list[str]]:
    """Names of model classes by model type, with the head that is trained most first and the bare model last.

    Model types with the most heads come first: a run that ends early has then seen those that people use most.
    """
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for mapping in [*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in PREFERRED), "MODEL_MAPPING_NAMES"]:
        for kind, name in getattr(modeling_auto, mapping).items():
            for each in (name,) if isinstance(name, str) else name:
                if each not in found.setdefault(kind, []):
                    found[kind].append(each)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


@dataclass
class Architecture:
    """A class of models that can be built and trained plainly.

    Attributes:
        cls: The class.
        values: Overrides of its configuration.
        recipe: The way of making inputs.
        parameters: Count of numbers.
    """

    cls: Any
    values: dict[str, Any]
    recipe: Recipe
    parameters: int

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
    """Run one forward and backward; raises what the model raises, ValueError if a number is not finite."""
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


def sized(cls: Any, default: Any, recipe: int) -> Architecture:
    """A class with one recipe of sizes; raises what the class raises, ValueError if it stays large."""
    values = small_values(default, recipe)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(cls.config_class(**values)).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters with small sizes")
    architecture = Architecture(cls, values, RECIPES[0], count)
    architecture.build(1)
    return architecture


def find_architecture(kind: str, names: list[str]) -> Architecture:
    """The first class and recipe of a model type that trains plainly; raises LookupError with the reason met most."""
    import transformers

    reasons: list[str] = []
    for name in names[:4]:
        try:
            cls = getattr(transformers, name)
            cls.config_class  # noqa: B018  a stand-in for a class whose library is missing raises here
        except (AttributeError, ImportError) as error:
            reasons.append(f"{name}: {first_line(error)}")
            continue
        for sizes, inputs in itertools.product(range(4), RECIPES):
            try:
                if inputs is RECIPES[0]:
                    architecture = None
                    architecture = sized(cls, cls.config_class(), sizes)
                if architecture is not None:
                    architecture.recipe = inputs
                    trains(architecture.build(1), inputs)
                    return architecture
            except TooSlow as error:
                raise LookupError(f"{name}: {error}") from None
            except Exception as error:
                reasons.append(f"{name}: {first_line(error)}")
    raise LookupError(
        max(reversed(list(dict.fromkeys(reasons))), key=reasons.count) if reasons else f"{kind} has no class"
    )
