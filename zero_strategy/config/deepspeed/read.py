"""The reader of DeepSpeed's JSON: its keys translated into settings.

Example:
    ```python
    settings = read_deepspeed("ds_config.json")
    settings.zero["stage"]                       # value 2, origin "user: ds_config.json: zero_optimization.stage"
    settings.batch.resolve(world_size=8)         # the three numbers
    settings.found                               # what became of every key
    ```

Defaults are those of one DeepSpeed version, `DEFAULTS_VERSION`.

A key of which only some values can be translated is rejected here, by name.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from zero_strategy.config.deepspeed.classify import AUTO, KeyReport, classify, read_source
from zero_strategy.config.deepspeed.keys import (
    DEFAULTS_VERSION,
    MAX_IN_CPU,
    OBSERVERS,
    REJECTED,
    ROOT,
    TOP_LEVEL,
    TRANSLATED,
    WITHOUT_EFFECT,
    Group,
    Key,
)
from zero_strategy.config.deepspeed.settings import (
    ACCUMULATION,
    MICRO,
    TRAIN,
    BatchSettings,
    DeepSpeedSettings,
    Named,
    Refusal,
    read_optimizer,
    read_scheduler,
    short_name,
)
from zero_strategy.config.schema import ZeroConfig
from zero_strategy.config.section import (
    ACCEPTS,
    Accepts,
    Section,
    Setting,
    check_value,
    from_origin,
    is_section,
    typed_fields,
)
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
        autocast=made.autocast(),
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


DEFAULT_ORIGIN = f"default of DeepSpeed {DEFAULTS_VERSION}"
_NEVER = 2**62
_ZERO = "zero_optimization."
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


class Translation:
    """Reads settings out of the reports on a config's keys.

    Args:
        reports: The reports by key; those of values that cannot be translated are replaced by rejections.
        origin: Where the config came from.

    Raises:
        ValueError: If values contradict each other, or the defaults of another version are asked for.
    """

    def __init__(self, reports: dict[str, KeyReport], origin: str) -> None:
        self.reports = reports
        self.origin = origin
        version = self.value("deepspeed_defaults", DEFAULTS_VERSION)
        if version != DEFAULTS_VERSION:
            raise ValueError(
                f"deepspeed_defaults is {version!r}{from_origin(origin)}; the only version whose defaults are known is "
                f"{DEFAULTS_VERSION!r}"
            )

    # ---- access ----

    def value(self, key: str, default: Any) -> Any:
        """The value of a key; the default if it is absent, null, or ``"auto"``."""
        report = self.reports.get(key)
        return default if report is None or report.value is None or report.value == AUTO else report.value

    def is_auto(self, key: str) -> bool:
        """True if a key is there and ``"auto"``."""
        report = self.reports.get(key)
        return report is not None and report.value == AUTO

    def from_key(self, key: str) -> str:
        """The origin of a value that comes from a key, or DeepSpeed's default if that is absent."""
        report = self.reports.get(key)
        if report is None or report.value is None:
            return f"{DEFAULT_ORIGIN}: {key}"
        return f"{self.origin}: {report.path}" + (" (auto)" if report.value == AUTO else "")

    def reject(self, key: str, reason: str) -> None:
        """Turns the report on a key into a rejection."""
        self.reports[key] = self.reports[key]._replace(classification=REJECTED, note=reason, ours="")

    def renote(self, key: str, note: str) -> None:
        """Replaces the note of a key, if it is there."""
        if key in self.reports:
            self.reports[key] = self.reports[key]._replace(note=note)

    # ---- our settings ----

    def zero_settings(self) -> dict[str, Setting]:
        """Our settings by full key."""
        made = {"stage": self._stage()}
        prefetch = _ZERO + "stage3_prefetch_bucket_size"
        if prefetch in self.reports and not self.is_auto(prefetch):
            made["prefetch"] = Setting(min(self.value(prefetch, 1), 1), self.from_key(prefetch))
        local = "checkpoint.use_node_local_storage"
        if local in self.reports:
            layout = "pieces" if self.value(local, False) else "auto"
            made["checkpoint.layout"] = Setting(layout, self.from_key(local))
        for name, default in (("stages", "auto"), ("partition", "best")):
            key = f"pipeline.{name}"
            if (value := self.value(key, default)) != default:
                made[key] = Setting(value, self.from_key(key))
        for key, names in (
            ("tensor_parallel.autotp_size", ("mesh.tensor",)),
            ("sequence_parallel_size", ("mesh.sequence", "mesh.ulysses")),
        ):
            if (size := self.value(key, 1)) > 1:
                made.update({name: Setting(size, self.from_key(key)) for name in names})
        key = "expert_parallel.autoep_size"
        if self.value("expert_parallel.enabled", False) and (ranks := self.value(key, 1)) != 1:
            made["mesh.expert"] = Setting(ranks, self.from_key(key))
        made.update(self._state_dtypes())
        made.update(self._loss_scale())
        made.update(self._offload())
        if self.value("bf16.enabled", self.is_auto("bf16.enabled")):
            key = "bf16.check_grad_overflow"
            made["nonfinite_gradients"] = Setting("skip" if self.value(key, True) else "ignore", self.from_key(key))
        # Checked here, where the JSON's key is still known.
        rules = dict(_rules(ZeroConfig))
        for key, setting in made.items():
            check_value(key, setting.value, *rules[key], setting.origin)
        return made

    def _stage(self) -> Setting:
        stage = self.value(_ZERO + "stage", 0)
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"{_ZERO}stage is {stage}{from_origin(self.origin)}; accepted: 0, 1, 2, 3")
        return Setting(stage, self.from_key(_ZERO + "stage"))

    def _state_dtypes(self) -> dict[str, Setting]:
        """Dtypes in which weights and gradients are kept and summed."""
        made: dict[str, Setting] = {}
        low = self.value("bf16.bf16_master_weights_and_grads", False)
        states = self.value("bf16.bf16_optimizer_states", False)
        if low != states:
            given = "bf16.bf16_master_weights_and_grads" if low else "bf16.bf16_optimizer_states"
            self.reject(
                given,
                "optimizer state has the dtype of the weights that it updates; set bf16_master_weights_and_grads and "
                "bf16_optimizer_states alike",
            )
        elif low:
            origin = self.from_key("bf16.bf16_master_weights_and_grads")
            made["precision.master_weights"] = Setting(False, origin)
            made["precision.gradient_dtype"] = Setting("parameter", origin)
        computed = self.precision().value
        kept = self._dtype_rule("data_types.grad_accum_dtype", computed, "gradients are accumulated")
        if kept:
            dtype = "float32" if kept == "fp32" else "parameter"
            made["precision.gradient_dtype"] = Setting(dtype, self.from_key("data_types.grad_accum_dtype"))
        sent = self._dtype_rule("communication_data_type", computed, "gradients are summed")
        if sent == "fp32":
            made["precision.reduce_dtype"] = Setting("float32", self.from_key("communication_data_type"))
        elif sent:
            origin = self.from_key("communication_data_type")
            if kept == "fp32":
                self.reject(
                    "communication_data_type",
                    "gradients that are accumulated in fp32 (data_types.grad_accum_dtype) are summed in fp32; leave "
                    "out one of the two",
                )
                return made
            made["precision.reduce_dtype"] = Setting("gradient", origin)
            made.setdefault("precision.gradient_dtype", Setting("parameter", origin))
        return made

    def _offload(self) -> dict[str, Setting]:
        """State that is kept off the device."""
        made: dict[str, Setting] = {}
        paths: dict[str, str] = {}
        for ours, section, old in (
            ("optimizer", "offload_optimizer", "cpu_offload"),
            ("parameters", "offload_param", "cpu_offload_param"),
        ):
            device, key = self.value(f"{_ZERO}{section}.device", "none"), f"{_ZERO}{section}.device"
            if device == "none" and self.value(_ZERO + old, False):
                device, key = "cpu", _ZERO + old
            if device != "none":
                made[f"offload.{ours}"] = Setting(device, self.from_key(key))
            path = self.value(f"{_ZERO}{section}.nvme_path", None)
            if device == "nvme" and path is not None:
                paths.setdefault(path, self.from_key(f"{_ZERO}{section}.nvme_path"))
        if "offload.parameters" in made and "offload.optimizer" not in made:
            origin = f"needed by {made['offload.parameters'].origin}"
            made["offload.optimizer"] = Setting("cpu", origin)  # parameters off the device are updated on the host
        ratio, key = self.value(f"{_ZERO}offload_optimizer.ratio", 1.0), f"{_ZERO}offload_optimizer.ratio"
        if ratio != 1.0 and "offload.optimizer" in made:
            if not 0.0 <= ratio <= 1.0:
                raise ValueError(f"{key} is {ratio:g}{from_origin(self.origin)}; accepted: 0 to 1")
            made["offload.optimizer_ratio"] = Setting(float(ratio), self.from_key(key))
        if "offload.parameters" in made and made["offload.parameters"].value == "nvme":
            key = f"{_ZERO}offload_param.max_in_cpu"
            itemsize = 4 if self.precision().value == "fp32" else 2
            made["offload.resident_bytes"] = Setting(self.value(key, MAX_IN_CPU) * itemsize, self.from_key(key))
        if paths:
            made["offload.nvme_path"] = Setting(list(paths), next(iter(paths.values())))
        return made

    def _dtype_rule(self, key: str, computed: str | None, what: str) -> str | None:
        """The dtype that a key names, in its short spelling; None if it is absent or cannot be done."""
        name = self.value(key, None)
        dtype: str | None = _DTYPES.get(name, name)
        if dtype in (None, "fp32", computed):
            return dtype
        self.reject(key, f"{what} in fp32 or in the precision of the computation ({computed or 'auto'}); use fp32")
        return None

    def _loss_scale(self) -> dict[str, Setting]:
        """Loss scaling, where fp16 is in use or may be."""
        if not self.value("fp16.enabled", self.is_auto("fp16.enabled")):
            return {}
        power, static = self.value("fp16.initial_scale_power", 16), self.value("fp16.loss_scale", 0)
        if not 0 <= power <= 64:
            raise ValueError(f"fp16.initial_scale_power is {power}{from_origin(self.origin)}; accepted: 0 to 64")
        if static < 0 or not math.isfinite(static):
            raise ValueError(f"fp16.loss_scale is {static}{from_origin(self.origin)}; accepted: 0 (dynamic) or more")
        if static:
            origin = self.from_key("fp16.loss_scale")
            self.renote("fp16.loss_scale", "static: it neither grows nor falls, and an overflow ends the run")
            dynamic = (
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "consecutive_hysteresis",
                "min_loss_scale",
            )
            for name in dynamic:
                self.renote(f"fp16.{name}", "no effect: fp16.loss_scale is static")
            found = {"initial": float(static), "minimum": float(static), "growth_interval": _NEVER}
            return {f"loss_scale.{name}": Setting(value, origin) for name, value in found.items()}
        keys: tuple[tuple[str, str, Any, Callable[[Any], Any]], ...] = (
            ("initial", "initial_scale_power", 16, lambda power: 2.0**power),
            ("growth_interval", "loss_scale_window", 1000, int),
            # DeepSpeed grows the scale where the steps since the last overflow, this one left out, fill the window.
            ("growth_delay", "loss_scale_window", 1000, lambda window: 1),
            ("hysteresis", "hysteresis", 2, int),
            ("consecutive_hysteresis", "consecutive_hysteresis", False, bool),
            ("minimum", "min_loss_scale", 1, float),
        )
        return {
            f"loss_scale.{ours}": Setting(convert(self.value(f"fp16.{name}", default)), self.from_key(f"fp16.{name}"))
            for ours, name, default, convert in keys
        }

    # ---- what a framework or a script owns ----

    def batch(self) -> BatchSettings:
        """The batch sizes."""
        return BatchSettings(*(self.value(name, None) for name in _BATCH))

    def clipping(self) -> Setting:
        """The largest norm; None for ``"auto"``."""
        key = "gradient_clipping"
        clip = None if self.is_auto(key) else float(self.value(key, 1.0))
        if clip is not None and not 0 <= clip < math.inf:
            raise ValueError(f"{key} is {clip}{from_origin(self.origin)}; accepted: finite, 0 (no clipping) or more")
        return Setting(clip, self.from_key(key))

    def precision(self) -> Setting:
        """Dtype of computations; None for ``"auto"``."""
        names = ("fp16", "bf16")
        chosen = [name for name in names if self.value(f"{name}.enabled", False)]
        if len(chosen) == 2:
            raise ValueError(f"fp16.enabled and bf16.enabled are both true{from_origin(self.origin)}; keep one")
        if chosen:
            return Setting(chosen[0], self.from_key(f"{chosen[0]}.enabled"))
        undecided = [name for name in names if self.is_auto(f"{name}.enabled")]
        if undecided:
            return Setting(None, self.from_key(f"{undecided[0]}.enabled"))
        said = [name for name in names if f"{name}.enabled" in self.reports]
        return Setting("fp32", self.from_key(f"{said[0] if said else names[0]}.enabled"))

    def autocast(self) -> Setting | None:
        """Autocast around forwards; None where it is off, or asks for float32."""
        if not self.value("torch_autocast.enabled", False):
            return None
        key = "torch_autocast.dtype" if "torch_autocast.dtype" in self.reports else "torch_autocast.enabled"
        name = self.value("torch_autocast.dtype", "bfloat16").removeprefix("torch.")
        dtype = _DTYPES.get(name, name)
        if dtype == "fp32":
            return None
        if self.precision().value == "fp16":
            self.reject(
                "torch_autocast.enabled", "fp16.enabled scales losses of an fp16 model; leave one of the two out"
            )
            return None
        return Setting(dtype, self.from_key(key))

    def optimizer(self) -> Named | None:
        """The optimizer, if there is one that is supported."""
        clip = self.reports.get("gradient_clipping")
        return self._named("optimizer", partial(read_optimizer, clipping=None if clip is None else clip.value))

    def scheduler(self) -> Named | None:
        """The schedule, if there is one that is supported."""
        return self._named("scheduler", read_scheduler)

    def _named(self, path: str, read: Callable[[str, Mapping[str, Any], str, str], Named]) -> Named | None:
        name, params = self.value(f"{path}.type", None), self.value(f"{path}.params", {})
        if name is None:
            if params:
                where = f"'{path}.params'{from_origin(self.origin)}"
                raise ValueError(f"{where} stands without '{path}.type'; name the type")
            return None
        try:
            made = read(name, params, path, f"{self.origin}: {path}")
        except Refusal as error:
            self.reject(f"{path}.type", str(error))
            return None
        if made.type == "AdamW" and short_name(name).lower() == "adam":
            self.renote(f"{path}.type", f"{made.type}: weight decay is decoupled, as adam_w_mode is true by default")
        return made

    def activations(self) -> dict[str, Any]:
        """Options of checkpointed activations, by their keys in the section."""
        return self._section("activation_checkpointing.")

    def pipeline(self) -> dict[str, Any]:
        """Options of pipelines, by their keys in the section."""
        return self._section("pipeline.")

    def observers(self) -> dict[str, dict[str, Any]]:
        """Sections of what observes a run that are on, by name: their keys, defaults included."""
        found: dict[str, dict[str, Any]] = {}
        for name in OBSERVERS:
            group = ROOT.keys[name]
            assert isinstance(group, Group)
            if self.value(f"{name}.enabled", False):
                defaults = {key: entry.default for key, entry in group.keys.items() if isinstance(entry, Key)}
                found[name] = {key: self.value(f"{name}.{key}", default) for key, default in defaults.items()}
        return found

    def _section(self, prefix: str) -> dict[str, Any]:
        found = {key: report.value for key, report in self.reports.items() if key.startswith(prefix)}
        return {key.removeprefix(prefix): value for key, value in found.items() if value is not None}

    def owned(self) -> dict[str, Setting]:
        """Settings that are set, not ``"auto"``, and may be owned by a framework, by DeepSpeed's key."""
        values: dict[str, Any] = {name: self.value(name, None) for name in (*_BATCH, "gradient_clipping")}
        values["dataloader_drop_last"] = self.value("dataloader_drop_last", None)
        made = {name: Setting(value, self.from_key(name)) for name, value in values.items() if value is not None}
        precision, autocast = self.precision(), self.autocast()
        if autocast is not None:
            made["torch_autocast"] = autocast
        # Under autocast frameworks call fp32 parameters mixed precision.
        said = precision.value is not None and not precision.origin.startswith(DEFAULT_ORIGIN)
        if said and (autocast is None or precision.value != "fp32"):
            made["precision"] = precision
        for path in ("optimizer", "scheduler"):
            report = self.reports.get(f"{path}.type")
            if report is not None and report.classification == TRANSLATED and report.value is not None:
                made[path] = Setting(report.value, self.from_key(f"{path}.type"))
        return made


def _rules(section: type[Section]) -> Iterator[tuple[str, tuple[Any, Accepts | None]]]:
    """Type and accepted values of each of our settings, by full key."""
    for field, hint in typed_fields(section):
        if is_section(hint):
            yield from _rules(hint)
        else:
            yield section.prefix + field.name, (hint, field.metadata.get(ACCEPTS))


_BATCH = (TRAIN, MICRO, ACCUMULATION)
