"""Settings of a script's config, in the package's own terms.

A script has no framework that owns batch size, accumulation, clipping and precision, so its config does:

    {"stage": 3, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
     "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}

or DeepSpeed's JSON (`config/deepspeed/read.py`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_strategy.compat.deepspeed.scripts.config_objects import Config
from zero_strategy.config import Layer, ZeroConfig, load_config, load_layers
from zero_strategy.config.deepspeed.classify import read_base64, read_json_file
from zero_strategy.config.deepspeed.read import own_keys, read_deepspeed
from zero_strategy.config.deepspeed.settings import ACCUMULATION, MICRO, TRAIN, BatchSettings, DeepSpeedSettings, Named
from zero_strategy.config.load import config_of
from zero_strategy.config.section import PYTHON
from zero_strategy.config.sources import read_file, read_mapping

CLIPPING, ZERO = "gradient_clipping", "zero_optimization"
SCRIPT_KEYS = (TRAIN, MICRO, ACCUMULATION, CLIPPING, "fp16", "bf16", "optimizer", "scheduler")


@dataclass(frozen=True)
class ScriptSettings:
    """A script's settings.

    Attributes:
        zero: The config of the engine.
        batch: Samples and micro-batches, as far as they follow; the number of micro-batches always does.
        clipping: Bound on the gradient norm; 0: none.
        compute_dtype: fp16, bf16, or None for the parameters' own dtype.
        optimizer: Optimizer to make, if the config names one.
        scheduler: Scheduler to make, if the config names one.
        drop_last: The loader of the training data leaves an incomplete last batch out.
    """

    zero: ZeroConfig
    batch: BatchSettings
    clipping: float
    compute_dtype: torch.dtype | None
    optimizer: Named | None
    scheduler: Named | None
    drop_last: bool = False


def settings_of(config: Any, world: int, *, pipeline: bool = False) -> ScriptSettings:
    """Read a script's config.

    Args:
        config: A mapping, the path of a JSON or YAML file, base64 of JSON, a `ZeroConfig`, or a config object of
            chapter 2.
        world: Data-parallel ranks.
        pipeline: Whether the model is a pipeline, whose micro-batches are the accumulation steps.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If a value has another type.
        ValueError: If a key is unknown (names the nearest), or two say the same thing differently.
    """
    if isinstance(config, ZeroConfig):
        if config.deepspeed is not None:  # with what others own in the file
            return replace(_of_deepspeed(config.deepspeed, world), zero=load_config(config))
        return _settings(load_config(config), {}, 0.0, world, pipeline=pipeline)
    layer = _read(config)
    native = own_keys(layer.values)
    if native and ZERO in layer.values:
        raise ValueError(
            f"{sorted(native)[0]!r} is this package's spelling and {ZERO!r} DeepSpeed's; one config has one of them"
        )
    script = {key: value for key, value in layer.values.items() if key in SCRIPT_KEYS}
    if native:
        own = {key: value for key, value in layer.values.items() if key not in SCRIPT_KEYS}
        return _settings(load_layers([Layer(own, layer.origin)]), script, 0.0, world, layer.origin, pipeline=pipeline)
    return _of_deepspeed(read_deepspeed(layer), world)


def _of_deepspeed(settings: DeepSpeedSettings, world: int) -> ScriptSettings:
    """What DeepSpeed's JSON says; in a script there is nobody else to decide what it leaves open."""
    deciding = (TRAIN, MICRO, ACCUMULATION, CLIPPING, "fp16.", "bf16.", "optimizer.", "scheduler.")
    open_keys = [r.path for r in settings.found if r.value == "auto" and r.key.startswith(deciding)]
    for section, made in (("optimizer", settings.optimizer), ("scheduler", settings.scheduler)):
        params = {} if made is None else made.params
        open_keys += [f"{section}.params.{key}" for key, value in params.items() if value == "auto"]
    if open_keys:
        raise ValueError(
            f'"auto" leaves the choice to a framework, and a script has none: give {", ".join(map(repr, open_keys))} a '
            "value, or leave it out for DeepSpeed's default"
        )
    return ScriptSettings(
        zero=config_of(settings),
        batch=settings.batch.derive(max(1, world)),
        clipping=float(settings.gradient_clipping.value),
        compute_dtype={"fp16": torch.float16, "bf16": torch.bfloat16}.get(settings.precision.value),
        optimizer=None if settings.optimizer is None else _with_its_decay(settings.optimizer),
        scheduler=settings.scheduler,
        drop_last=settings.drop_last,
    )


def _with_its_decay(named: Named) -> Named:
    """The reader has decided what "Adam" means: it calls the one with decoupled weight decay AdamW."""
    return replace(named, params={**named.params, "adam_w_mode": False}) if named.type == "Adam" else named


def _settings(
    zero: ZeroConfig,
    script: Mapping[str, Any],
    clipping: float,
    world: int,
    origin: str = PYTHON,
    *,
    pipeline: bool = False,
) -> ScriptSettings:
    clip = script.get(CLIPPING, clipping)
    if not isinstance(clip, (int, float)) or isinstance(clip, bool):
        raise TypeError(f"{CLIPPING} must be a number, not {clip!r}")
    if not clip >= 0:
        raise ValueError(f"{CLIPPING} must be 0 (none) or more, not {clip}")
    steps = script.get(ACCUMULATION)
    if steps is None and pipeline:
        steps = zero.pipeline.micro_batches
    return ScriptSettings(
        zero=zero,
        batch=BatchSettings(script.get(TRAIN), script.get(MICRO), steps).derive(max(1, world)),
        clipping=float(clip),
        compute_dtype=_dtype(script),
        optimizer=_named(script, "optimizer", origin),
        scheduler=_named(script, "scheduler", origin),
    )


def _read(config: Any) -> Layer:
    if isinstance(config, Config):
        return Layer(config.settings(), f"user: {type(config).__name__}")
    if isinstance(config, Mapping):
        return read_mapping(config)
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config must be a mapping, a path or a config object, not {type(config).__name__}")
    encoded = None if os.path.exists(config) else read_base64(config)
    if encoded is not None:
        return encoded
    if Path(config).suffix != ".json":
        return read_file(config)
    return read_json_file(config)


def _dtype(script: Mapping[str, Any]) -> torch.dtype | None:
    on = {key: _enabled(script, key) for key in ("fp16", "bf16")}
    if all(on.values()):
        raise ValueError("fp16.enabled and bf16.enabled are both true; a model has one of them")
    return torch.float16 if on["fp16"] else torch.bfloat16 if on["bf16"] else None


def _enabled(script: Mapping[str, Any], key: str) -> bool:
    section = _mapping(script.get(key) or {}, key)
    _check_keys(section, ("enabled",), key + ".")
    enabled = section.get("enabled", False)
    if not isinstance(enabled, bool):
        raise TypeError(f"{key}.enabled must be true or false, not {enabled!r}")
    return enabled


def _named(script: Mapping[str, Any], key: str, origin: str) -> Named | None:
    if script.get(key) is None:
        return None
    section = _mapping(script[key], key)
    _check_keys(section, ("type", "params"), key + ".")
    kind = section.get("type")
    if not isinstance(kind, str):
        raise TypeError(f"{key}.type must be a name, not {kind!r}")
    return Named(kind, _mapping(section.get("params") or {}, key + ".params"), f"{origin}: {key}")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {value!r}")
    return value


def _check_keys(values: Mapping[str, Any], known: tuple[str, ...], prefix: str, also: list[str] | None = None) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), [*known, *(also or [])], n=1)
            meant = f"did you mean {prefix + near[0]!r}?" if near else f"accepted: {', '.join(known)}"
            raise ValueError(f"unknown key {prefix + str(key)!r}; {meant}")
