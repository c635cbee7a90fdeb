"""The reader of DeepSpeed's JSON, and the comparison of its values with those that a framework owns.

from its keys to our settings, and to what a framework or a script owns.

Example:
    settings = read_deepspeed("ds_config.json")
    settings.zero["stage"]                       # value 2, origin "user: ds_config.json: zero_optimization.stage"
    settings.batch.resolve(world_size=8)         # the three numbers
    settings.found                               # what became of every key

Defaults are those of one DeepSpeed version, `DEFAULTS_VERSION`.

A number in the JSON that nobody acts on would be a run other than the one that was asked for. So each of these keys is
``"auto"``, or equal to the framework's own value, or an error that names both.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Literal

from zero_strategy.config.deepspeed.classify import AUTO, KeyReport, classify, read_source
from zero_strategy.config.deepspeed.keys import DEFAULTS_VERSION, ROOT, TOP_LEVEL, WITHOUT_EFFECT, Group
from zero_strategy.config.deepspeed.settings import BatchSettings, DeepSpeedSettings, Named
from zero_strategy.config.deepspeed.translate import Translation
from zero_strategy.config.resolve import Fact
from zero_strategy.config.schema import ZeroConfig
from zero_strategy.config.section import Setting, from_origin, is_section, typed_fields
from zero_strategy.config.sources import Layer, owned_key

__all__ = [
    "DEFAULTS_VERSION",
    "BatchSettings",
    "DeepSpeedSettings",
    "KeyReport",
    "Named",
    "inspect_deepspeed",
    "is_deepspeed",
    "read_deepspeed",
]


def read_deepspeed(source: Mapping[str, Any] | str | os.PathLike[str] | Layer) -> DeepSpeedSettings:
    """Reads a DeepSpeed config, and warns about keys without effect, once, with the reasons.

    Args:
        source: A mapping, the path of a JSON file (comments and trailing commas are allowed), base64 of JSON, or a
            layer that was read before.

    Raises:
        FileNotFoundError: If the file does not exist.
        TypeError: If a value is not of its type.
        ValueError: If a key is unknown or rejected, given twice, or its value is not accepted; all rejected keys are
            named, with the reason of each.
    """
    settings = inspect_deepspeed(source)
    rejected = [report for report in settings.rejected() if not report.idle]
    if rejected:
        reasons = "; ".join(f"'{report.path}: {_shown(report.value)}': {report.note}" for report in rejected)
        where = from_origin(settings.origin)
        raise ValueError(f"this DeepSpeed config{where} asks for what is not done here: {reasons}")
    message = _without_effect(settings)
    if message:
        warnings.warn(message, stacklevel=3)
    return settings


def inspect_deepspeed(source: Mapping[str, Any] | str | os.PathLike[str] | Layer) -> DeepSpeedSettings:
    """Reads a DeepSpeed config like `read_deepspeed`, with rejected keys reported in `found` instead of raised."""
    layer = source if isinstance(source, Layer) else read_source(source)
    is_deepspeed(layer.values, layer.origin)  # only to say which keys are of the other kind, rather than unknown
    made = Translation(classify(layer), layer.origin)
    return DeepSpeedSettings(
        origin=layer.origin,
        zero=made.zero_settings(),
        batch=made.batch(),
        gradient_clipping=made.clipping(),
        precision=made.precision(),
        optimizer=made.optimizer(),
        scheduler=made.scheduler(),
        drop_last=made.value("dataloader_drop_last", False),
        owned=made.owned(),
        activations=made.activations(),
        pipeline=made.pipeline(),
        observers=made.observers(),
        found=tuple(made.reports.values()),
    )


def is_deepspeed(values: Mapping[Any, Any], origin: str) -> bool:
    """True if a mapping is a DeepSpeed config: it has one of DeepSpeed's keys that are none of ours.

    Raises:
        ValueError: If it has keys of both.
    """
    kinds = {name: _kind(name, value) for name, value in values.items() if isinstance(name, str)}
    theirs = [name for name, kind in kinds.items() if kind == "theirs"]
    if not theirs:
        return False
    both = [name for name in own_keys(values) if name not in TOP_LEVEL]
    if not both:
        return True
    mixed = f"'{theirs[0]}' is a key of DeepSpeed's JSON and '{both[0]}' is one of ours; a config has keys of one kind"
    owned = owned_key(ZeroConfig, theirs[0], origin)
    raise ValueError(f"{owned} ({mixed})" if owned else f"{mixed}{from_origin(origin)}")


def own_keys(values: Mapping[Any, Any]) -> list[str]:
    """The top-level keys that can only be meant as ours."""
    return [name for name, value in values.items() if isinstance(name, str) and _kind(name, value) == "ours"]


def _kind(name: str, value: Any) -> Literal["ours", "theirs", "either"]:
    """Owner of the key; a section that both have is told by what is in it."""
    sections = {field.name: hint for field, hint in typed_fields(ZeroConfig)}
    if name not in sections:
        return "theirs" if name in TOP_LEVEL else "either"
    if name not in TOP_LEVEL:
        return "ours"
    if not isinstance(value, Mapping) or not value or not is_section(sections[name]):
        return "either"
    group, ours = ROOT.keys[name], {field.name for field, _ in typed_fields(sections[name])}
    theirs = set(group.keys) if isinstance(group, Group) else set()
    if (ours - theirs) & value.keys():
        return "ours"
    return "theirs" if (theirs - ours) & value.keys() else "either"


def _without_effect(settings: DeepSpeedSettings) -> str:
    reports = [report for report in settings.found if report.classification == WITHOUT_EFFECT]
    lost = "; ".join(f"'{report.path}': {report.note}" for report in reports if not report.idle)
    idle = ", ".join(f"'{report.path}'" for report in reports if report.idle)
    parts = [part for part in (lost, idle and f"at a default or switched off: {idle}") if part]
    if not parts:
        return ""
    return f"keys without effect here{from_origin(settings.origin)}, and why nothing is lost: " + "; ".join(parts)


def _shown(value: Any) -> str:
    return AUTO if value == AUTO else repr(value)


LATER_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "optimizer")
"""Keys that can only be compared once there are a data loader and an optimizer."""

# Facts by their names in a framework, then by DeepSpeed's own, for faces that act on the key themselves.
_FACTS = {
    "train_batch_size": ("samples_per_step", "train_batch_size"),
    "train_micro_batch_size_per_gpu": ("micro_batch_per_rank", "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": ("accumulate_grad_batches", "gradient_accumulation_steps"),
    "gradient_clipping": ("gradient_clip_val", "gradient_clipping"),
    "precision": ("training_precision",),
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
    "dataloader_drop_last": ("dataloader_drop_last",),
}


def check_owned(config: ZeroConfig, facts: Mapping[str, Fact], later: Collection[str] = ()) -> None:
    """Raises where a DeepSpeed config and the framework disagree. Other configs pass.

    Args:
        config: The config, as `load_config` made it.
        facts: What the framework has, by name.
        later: Keys that are compared in a later call if there is no fact about them yet.

    Raises:
        ValueError: If a value differs from the framework's, or nobody would act on it; names the key and the
            framework's own argument. The fact about the optimizer is the optimizer itself.
    """
    if config.deepspeed is None:
        return
    for key, setting in config.deepspeed.owned.items():
        fact = next((facts[name] for name in _FACTS[key] if name in facts), None)
        if fact is None:
            if key not in later and not _idle(key, setting):
                raise ValueError(_nobody(key, setting))
        elif key == "optimizer":
            _check_optimizer(config.deepspeed.optimizer, fact)
        elif _comparable(key, fact.value) != setting.value:
            raise ValueError(
                f"{key} is {setting.value!r}{from_origin(setting.origin)}, but {fact.value!r} in "
                f'{fact.origin}; make them equal, or write "auto" in the JSON'
            )
    algorithm = facts.get("gradient_clip_algorithm")
    clip = config.deepspeed.owned.get("gradient_clipping")
    if clip is not None and clip.value and algorithm is not None and algorithm.value == "value":
        raise ValueError(
            f"gradient_clipping is {clip.value}{from_origin(clip.origin)}, a bound on the norm, but {algorithm.origin} "
            'clips values; use one of the two, or write "auto" in the JSON'
        )


def dtype_fact(compute_dtype: object) -> dict[str, Fact]:
    """The fact of an engine in a loop of its user's: what its parameters are computed in, None for their own dtype."""
    return {"training_precision": Fact(str(compute_dtype), f"ZeroEngine(compute_dtype={compute_dtype})")}


def _idle(key: str, setting: Setting) -> bool:
    """True if a value asks nobody to do anything."""
    return (key, setting.value) in (
        ("gradient_clipping", 0.0),
        ("gradient_accumulation_steps", 1),
        ("dataloader_drop_last", False),
    )


def _check_optimizer(named: Named | None, fact: Fact) -> None:
    """Compares an optimizer of the JSON with the one that there is, by class and by what is not ``"auto"``."""
    assert named is not None, "owned means that it was accepted"
    if fact.value is named:
        return  # a face that made it from the JSON
    kind = type(fact.value).__name__.removeprefix("Fused")
    if kind != named.type:
        raise ValueError(
            f"optimizer.type is {named.type!r}{from_origin(named.origin)}, but {fact.origin} is {kind}; make them "
            "equal, or leave the section out"
        )
    for name, value in named.params.items():
        there = getattr(fact.value, "defaults", {}).get(name)
        if value != AUTO and (list(value) != list(there or ()) if isinstance(value, (list, tuple)) else value != there):
            raise ValueError(
                f"optimizer.params.{name} is {value!r}{from_origin(named.origin)}, but {there!r} in {fact.origin}; "
                'make them equal, or write "auto" in the JSON'
            )


def _nobody(key: str, setting: Setting) -> str:
    if key == "dataloader_drop_last":
        where = f"'{key}'{from_origin(setting.origin)}"
        return f"{where} cannot be set here: set DataLoader(drop_last=True) and leave it out"
    message = owned_key(ZeroConfig, key, setting.origin)
    assert message is not None
    way_out = "leave the section out" if key in ("optimizer", "scheduler") else 'write "auto" in the JSON'
    return f"{message}; and {way_out} (it has {setting.value!r})"


def _comparable(key: str, value: Any) -> Any:
    if key == "gradient_clipping":
        return float(value or 0.0)
    if key == "precision":
        # Lightning's bf16-mixed, 16-true, 32-true, ...; Accelerate's bf16, fp16, no; torch.bfloat16, torch.float16.
        flag = str(value).removeprefix("torch.")
        low = {"bf": "bf16", "16": "fp16", "fp16": "fp16", "float16": "fp16"}
        return next((name for start, name in low.items() if flag.startswith(start)), "fp32")
    return value
