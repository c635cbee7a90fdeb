"""The reader of DeepSpeed's JSON: from its keys to our settings, and to what a framework or a script owns.

Example:
    settings = read_deepspeed("ds_config.json")
    settings.zero["stage"]                       # value 2, origin "user: ds_config.json: zero_optimization.stage"
    settings.batch.resolve(world_size=8)         # the three numbers
    settings.found                               # what became of every key

Defaults are those of one DeepSpeed version, `DEFAULTS_VERSION`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from .batch import BatchSettings
from .deepspeed.classify import AUTO, KeyReport, classify
from .deepspeed.keys import WITHOUT_EFFECT, Group
from .deepspeed.named import Named
from .deepspeed.runtime_keys import DEFAULTS_VERSION, ROOT, TOP_LEVEL
from .deepspeed.settings import DeepSpeedSettings
from .deepspeed.text import read_source
from .deepspeed.translate import Translation
from .rules import from_origin
from .schema import ZeroConfig
from .section import is_section, typed_fields
from .sources import Layer
from .unknown import owned_key

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
    _check_kind(layer)
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
    """Whether a mapping is a DeepSpeed config: it has one of DeepSpeed's keys that are none of ours.

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
    """Whose key it is; a section that both have is told by what is in it."""
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


def _check_kind(layer: Layer) -> None:
    # Only to say which keys are of the other kind, rather than that one of them is unknown.
    is_deepspeed(layer.values, layer.origin)


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
