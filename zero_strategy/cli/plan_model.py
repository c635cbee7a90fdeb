"""The model of `zero-strategy plan`: a factory's, a Hugging Face config's, a GPT of plain numbers."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_strategy.cli.verify import sentence
from zero_strategy.config import UnitsConfig
from zero_strategy.fsdp.materialize import parameters_on_meta
from zero_strategy.planning.finetuning import finetuned, finetuned_shape, told
from zero_strategy.planning.gpt_shape import GPT_LINEARS, gpt_shape
from zero_strategy.planning.model_shape import ModelShape
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_text
from zero_strategy.verify.subject import load_factory, named

HIDDEN_PER_LAYER = 128
"""Of the family of shapes: hidden / layers, that of GPT-3 and of 7B-parameter Llamas."""
VOCABULARY = 50304
"""GPT-2's, rounded up to a multiple of 128."""


class Finetuning(NamedTuple):
    """Options of that name, as `planning.finetuning.finetuned` takes them."""

    quantize: str | None = None
    lora: int | None = None

    def shape(self, module: nn.Module, units: UnitsConfig, title: str) -> ModelShape:
        """The shape of a model that is trained so."""
        if self != Finetuning():
            module = finetuned(module, quantize=self.quantize, lora=self.lora)
        return ModelShape.of(module, units, told(title, self.quantize, self.lora))

    def gpt(self, shape: ModelShape) -> ModelShape:
        """The shape of a GPT that is trained so."""
        linears = {f"{unit.name}.{layer}" for unit in shape.units[1:] for layer in GPT_LINEARS}
        return finetuned_shape(shape, linears, quantize=self.quantize, lora=self.lora)


class Built(NamedTuple):
    """A model without memory, and what it came with."""

    module: nn.Module
    """The model."""
    finetuning: Finetuning
    """How it is trained."""
    title: str
    """For people."""
    made: Any = None
    """What its factory returned; None: it is transformers'."""

    def shape(self, units: UnitsConfig) -> ModelShape:
        """The shape of the model, as it is trained."""
        return self.finetuning.shape(self.module, units, self.title)


def built_model(name: str, arguments: dict[str, Any], finetuning: Finetuning) -> Built:
    """The model that is named on the command line.

    Args:
        name: `path.py:factory` or `package.module:factory`, whose result is a module or what `zero-strategy verify`
            takes; or the path of a Hugging Face config.json or of its directory.
        arguments: Keywords for the factory.
        finetuning: Quantisation and adapters.

    Raises:
        ValueError: If there is no such model, or it cannot be built without memory; says what was tried.
    """
    if os.path.exists(name):
        if name.endswith(".py"):
            raise ValueError(f"model {name!r} is a Python file; give {name}:function, whose result is the model")
        return _hugging_face(Path(name), finetuning)
    if ":" in name:
        return _build(name, arguments, finetuning)
    raise ValueError(
        f"model {name!r} is neither a file or directory nor 'module:factory'; write train.py:build, "
        "my_package.models:build, the path of a Hugging Face config.json, or numbers: --params 7e9 --layers 32 "
        "--hidden 4096"
    )


def _build(name: str, arguments: dict[str, Any], finetuning: Finetuning) -> Built:
    factory: Any = load_factory(name, "model")
    if isinstance(factory, nn.Module):
        return Built(factory, finetuning, name)

    def call() -> tuple[Any, Any]:
        returned = factory(**arguments)
        return returned, model_of(returned)

    whole, made = _without_memory(call, name)
    if isinstance(made, (tuple, list)) and len(made) == 4 and isinstance(made[0], (tuple, list)):
        raise ValueError(
            f"model {name!r} returned the layers of a pipeline; a plan is of a whole model: give a factory that "
            "returns it"
        )
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model {name!r} returned {named(made)}, not a torch module, nor what zero-strategy verify takes, such as "
            "(model, optimizer, batches, loss)"
        )
    return Built(made, finetuning, name, whole)


def model_of(made: Any) -> Any:
    """The model of what a factory returned: itself, or of what `verify` takes."""
    if isinstance(made, Mapping):
        made = made.get("model", made)
    elif isinstance(made, (tuple, list)) and len(made) in (2, 4) and isinstance(made[0], nn.Module):
        made = made[0]
    if hasattr(made, "training_step") and hasattr(made, "configure_model"):
        made.configure_model()  # where some build their layers
    return made


def _without_memory(build: Any, name: str) -> Any:
    """Build on the meta device; where code looks at values while it builds, let parameters alone be without memory."""
    try:
        with torch.device("meta"):
            return build()
    except Exception as first:
        try:
            with parameters_on_meta():
                return build()
        except Exception as error:
            also = "" if _told(first) == _told(error) else f"; on the meta device: {_told(first)}"
            if isinstance(error, TypeError) and "argument" in str(error):
                also += "; give arguments with --args '{...}'"
            raise ValueError(f"model {name!r} cannot be built: {_told(error)}{also}") from error


def _told(error: Exception) -> str:
    return sentence("".join(traceback.format_exception(error)))


def _hugging_face(path: Path, finetuning: Finetuning) -> Built:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = bounded_json.parse(read_text(file), str(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as a Hugging Face config: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{file} has no 'model_type', so it is no Hugging Face config")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{file} needs transformers: pip install transformers accelerate") from error
    options = {key: value for key, value in values.items() if key != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(values["model_type"], **options)
    except ValueError as error:
        raise ValueError(f"{file}: transformers {transformers.__version__} does not know it: {error}") from error
    architectures = [getattr(transformers, name, None) for name in values.get("architectures") or ()]
    named = next((found for found in architectures if found is not None), None)
    build = named._from_config if named is not None else transformers.AutoModelForCausalLM.from_config
    made = _without_memory(lambda: build(config), str(file))
    if finetuning.quantize is None:
        finetuning = finetuning._replace(quantize=_stored_quantisation(values.get("quantization_config")))
    return Built(made, finetuning, f"{type(made).__name__} of {file}")


def _stored_quantisation(settings: Any) -> str | None:
    """The name of bitsandbytes' quantisation that a folder's files have; None for no such one."""
    if not isinstance(settings, dict) or settings.get("quant_method") != "bitsandbytes":
        return None
    if settings.get("load_in_8bit"):
        return "int8"
    name = settings.get("bnb_4bit_quant_type", "fp4")
    return str(name) if settings.get("bnb_4bit_use_double_quant") else f"{name}-single"


def shape_of_numbers(
    parameters: float | None, layers: int | None, hidden: int | None, vocabulary: int | None
) -> ModelShape:
    """A GPT of the given numbers.

    With `parameters`, `layers` and `hidden`, what the layers (12 h^2 + 13 h each) leave is the vocabulary; with the
    vocabulary too, the width of the MLPs makes up the number. `parameters` alone: hidden is 128 x layers.

    Raises:
        ValueError: If they do not fit together; names them.
    """
    if parameters is None:
        if layers is None or hidden is None:
            raise ValueError("plain numbers: give --params, or --layers and --hidden")
        return gpt_shape(hidden, layers, VOCABULARY if vocabulary is None else vocabulary)
    if parameters < 1:
        raise ValueError(f"--params is {parameters:g}; a model has 1 or more")
    if layers is None and hidden is None:
        return family_shape_near(parameters, VOCABULARY if vocabulary is None else vocabulary)
    if layers is None or hidden is None:
        raise ValueError("plain numbers: give both of --layers and --hidden, or neither")
    total, fixed = round(parameters), 2 * hidden
    if vocabulary is None:
        each = 12 * hidden**2 + 13 * hidden
        rows = (total - fixed - layers * each) // hidden
        if rows < 1:
            raise ValueError(
                f"{layers} layers of hidden {hidden} have {layers * each:.3g} parameters, more than --params "
                f"{parameters:g}; give --vocabulary too, and the MLPs' width makes up the number"
            )
        return gpt_shape(hidden, layers, rows)
    inner = (total - fixed - vocabulary * hidden - layers * (4 * hidden**2 + 9 * hidden)) // (layers * (2 * hidden + 1))
    if inner < 1:
        raise ValueError(
            f"--params {parameters:g} leaves nothing for the MLPs of {layers} layers of hidden {hidden} beside "
            f"attention and a vocabulary of {vocabulary}; check the numbers"
        )
    return gpt_shape(hidden, layers, vocabulary, intermediate=inner)


def family_shape(step: int, vocabulary: int, hidden_per_layer: int = HIDDEN_PER_LAYER, width: int = 64) -> ModelShape:
    """Member `step` (1, 2, ...) of a family of GPTs: hidden = step x width, layers = hidden / hidden_per_layer."""
    hidden = step * width
    return gpt_shape(hidden, max(1, round(hidden / hidden_per_layer)), vocabulary)


def family_shape_near(parameters: float, vocabulary: int) -> ModelShape:
    """The member with least distance to a number of parameters."""
    step = 1
    while (shape := family_shape(step, vocabulary)).parameters < parameters:
        step += 1
    before = family_shape(max(1, step - 1), vocabulary)
    return min(before, shape, key=lambda found: abs(found.parameters - parameters))
