"""Settings of a script's config, in the package's own terms, and config objects.

A script has no framework that owns batch size, accumulation, clipping and precision, so its config does:

    {"stage": 3, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
     "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}

A config object is a struct that is made from keywords or dictionaries, and grouped by subclassing (DeepSpeed 0.3):

    config = TrainingConfig(batch={"train_batch_size": 32, "gradient_accumulation_steps": 2}, fp16=FP16Config(clip=1.0))
    config.is_valid(), config.batch.train_micro_batch_size_per_gpu, config["fp16"]["clip"]
"""

from __future__ import annotations

import difflib
import inspect
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from zero_strategy.comm.process_group import world_rank, world_size
from zero_strategy.config import Layer, ZeroConfig, load_config, load_layers
from zero_strategy.config.deepspeed.classify import read_base64, read_json_file
from zero_strategy.config.deepspeed.read import own_keys, read_deepspeed
from zero_strategy.config.deepspeed.settings import ACCUMULATION, MICRO, TRAIN, BatchSettings, DeepSpeedSettings, Named
from zero_strategy.config.load import config_of
from zero_strategy.config.section import PYTHON
from zero_strategy.config.sources import read_file, read_mapping
from zero_strategy.reproducible.accumulation import accumulation_of

C = TypeVar("C", bound="Config")


class Config:
    """A struct with item and attribute access.

    A subclass declares its settings as class attributes with their defaults; one annotated with another `Config`
    class takes a dictionary as well. A class that declares none takes any keywords.

    Args:
        **kwargs: Values.

    Raises:
        TypeError: If a value shall be a config, and is neither that nor a mapping.
        ValueError: If the class declares settings and a keyword is none of them (names the nearest), or a keyword is
            the name of a method.
    """

    def __init__(self, **kwargs: Any) -> None:
        declared = _declared(type(self))
        for name, default in declared.items():
            setattr(self, name, default)
        for name, value in kwargs.items():
            self[name] = value

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """A config of the values of a dictionary.

        Raises:
            TypeError: If it is none.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"{cls.__name__}.from_dict takes a mapping of settings, not {values!r}")
        return cls(**values)

    def resolve(self) -> None:
        """Infer what is missing, if possible; here, in all configs below this one."""
        for _, config in self._parts():
            config.resolve()

    def is_valid(self) -> bool:
        """Resolve, and tell whether this config and all below it are valid."""
        try:
            self.resolve()
        except (TypeError, ValueError):
            return False
        return all(config.is_valid() for _, config in self._parts())

    def settings(self) -> dict[str, Any]:
        """The values that are set, as plain dictionaries."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value is not None:
                found[name] = value.settings() if isinstance(value, Config) else value
        return found

    def _parts(self) -> Iterator[tuple[str, Config]]:
        for name, value in vars(self).items():
            if isinstance(value, Config):
                yield name, value

    def __getitem__(self, name: str) -> Any:
        if name not in vars(self):
            raise KeyError(name)
        return vars(self)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        declared = _declared(type(self))
        if declared and name not in declared:
            near = difflib.get_close_matches(name, declared, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(declared)}"
            raise ValueError(f"{type(self).__name__} has no setting {name!r}; {meant}")
        if callable(getattr(Config, name, None)):
            raise ValueError(f"{name!r} cannot be a setting of {type(self).__name__}, for it is one of its methods")
        section = _section(type(self), name)
        if section is not None and isinstance(value, Mapping):
            value = section.from_dict(value)
        elif section is not None and not isinstance(value, (section, type(None))):
            raise TypeError(
                f"{type(self).__name__}.{name} takes a {section.__name__} or a mapping of its settings, not {value!r}"
            )
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class BatchConfig(Config):
    """Batch sizes; two of the three give the third. `train_step_batch_size` is another name of the second."""

    train_batch_size: int | None = None
    """Samples per optimizer step over all ranks."""
    train_micro_batch_size_per_gpu: int | None = None
    """Samples per rank and micro-batch."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "train_step_batch_size":
            name = MICRO
            if self.train_micro_batch_size_per_gpu not in (None, value):
                raise ValueError(
                    f"train_step_batch_size {value} and {MICRO} {self.train_micro_batch_size_per_gpu} are two names of "
                    "one setting; give one"
                )
        super().__setitem__(name, value)

    @property
    def train_step_batch_size(self) -> int | None:
        """See `train_micro_batch_size_per_gpu`."""
        return self.train_micro_batch_size_per_gpu

    @train_step_batch_size.setter
    def train_step_batch_size(self, value: int | None) -> None:
        self.train_micro_batch_size_per_gpu = value

    def resolve(self) -> None:
        """Derive the third of two, for the ranks of the process group.

        Raises:
            TypeError, ValueError: If they are no positive integers, do not divide, or disagree; names them.
        """
        given = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        sizes = BatchSettings(*given).derive(world_size())
        if sum(value is not None for value in given) >= 2:
            vars(self).update(vars(sizes))

    def is_valid(self) -> bool:
        """Resolve, and tell whether all three are known and agree."""
        return super().is_valid() and None not in vars(self).values()


class FP16Config(Config):
    """Training in fp16."""

    enabled: bool | None = None
    """Whether to."""
    clip: float | None = None
    """Bound on the gradient norm."""

    def is_valid(self) -> bool:
        """True if `enabled` is a truth value and `clip` no negative number, where they are set."""
        number = isinstance(self.clip, (int, float)) and not isinstance(self.clip, bool) and self.clip >= 0
        return super().is_valid() and isinstance(self.enabled, (bool, type(None))) and (self.clip is None or number)


class TrainingConfig(Config):
    """The whole of a training run."""

    batch: BatchConfig | None = None
    """Batch sizes."""
    fp16: FP16Config | None = None
    """Training in fp16."""

    def settings(self) -> dict[str, Any]:
        """The settings in the keys of a DeepSpeed JSON."""
        found: dict[str, Any] = dict(self.batch.settings()) if self.batch is not None else {}
        fp16 = self.fp16 or FP16Config()
        return {**found, "fp16": {"enabled": bool(fp16.enabled)}, "gradient_clipping": fp16.clip or 0.0}


def _declared(cls: type[Config]) -> dict[str, Any]:
    """Settings that a class and its bases declare, with their defaults."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(Config)]):
        found.update(dict.fromkeys(name for name in inspect.get_annotations(base) if not name.startswith("_")))
        for name, value in vars(base).items():
            if not name.startswith("_") and not callable(value) and not isinstance(value, (property, classmethod)):
                found[name] = value
    return found


def _section(cls: type[Config], name: str) -> type[Config] | None:
    """The config class that a setting is annotated with."""
    if not any(name in inspect.get_annotations(base) for base in cls.__mro__):
        return None
    hint = get_type_hints(cls).get(name)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)), None)


# ---- settings ----

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
        autocast: Dtype of autocast around the engine's forward; None: there is none.
    """

    zero: ZeroConfig
    batch: BatchSettings
    clipping: float
    compute_dtype: torch.dtype | None
    optimizer: Named | None
    scheduler: Named | None
    drop_last: bool = False
    autocast: torch.dtype | None = None

    @property
    def scales_loss(self) -> bool:
        """True if gradients are computed in fp16, so that losses need a scale."""
        return torch.float16 in (self.compute_dtype, self.autocast)


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
            return _of_deepspeed(config.deepspeed, world, load_config(config))
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
    found = read_deepspeed(layer)
    return _of_deepspeed(found, world, config_of(found))


def _of_deepspeed(settings: DeepSpeedSettings, world: int, zero: ZeroConfig) -> ScriptSettings:
    """Contents of DeepSpeed's JSON; in a script there is nobody else to decide what it leaves open."""
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
        zero=zero,
        batch=_batch(settings.batch, zero, world),
        clipping=float(settings.gradient_clipping.value),
        compute_dtype=_LOW.get(settings.precision.value),
        autocast=None if settings.autocast is None else _LOW[settings.autocast.value],
        optimizer=None if settings.optimizer is None else _with_its_decay(settings.optimizer),
        scheduler=settings.scheduler,
        drop_last=settings.drop_last,
    )


_LOW: Mapping[Any, torch.dtype] = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16})


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
        batch=_batch(BatchSettings(script.get(TRAIN), script.get(MICRO), steps), zero, world),
        clipping=float(clip),
        compute_dtype=_dtype(script),
        optimizer=_named(script, "optimizer", origin),
        scheduler=_named(script, "scheduler", origin),
    )


def _batch(given: BatchSettings, zero: ZeroConfig, world: int) -> BatchSettings:
    """Batch sizes, of which two give the third; with `reproducible.slots` the number of micro-batches is known.

    Raises:
        ValueError: If numbers disagree.
    """
    ranks, name = max(1, world), ACCUMULATION
    if not zero.reproducible.slots:
        return given.derive(ranks)
    steps = given.gradient_accumulation_steps
    if steps is None and None not in (given.train_batch_size, given.train_micro_batch_size_per_gpu):
        steps, name = given.derive(ranks).gradient_accumulation_steps, f"{TRAIN} / ({MICRO} x {ranks} rank(s))"
    wanted = accumulation_of(zero, ranks, steps or 1, name, tells=world_rank() == 0)
    return replace(given, gradient_accumulation_steps=wanted).derive(ranks)


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
