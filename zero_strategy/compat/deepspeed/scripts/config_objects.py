"""Config objects: structs that are made from keywords or dictionaries, and grouped by subclassing.

    config = TrainingConfig(batch={"train_batch_size": 32, "gradient_accumulation_steps": 2}, fp16=FP16Config(clip=1.0))
    config.is_valid(), config.batch.train_micro_batch_size_per_gpu, config["fp16"]["clip"]

`zero_strategy.initialize(config=...)` takes a `TrainingConfig`. The names are those of DeepSpeed 0.3, chapter 2.
"""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from zero_strategy.comm.process_group import world_size
from zero_strategy.config.deepspeed.settings import MICRO, BatchSettings

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
        """The same as `train_micro_batch_size_per_gpu`."""
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
        """Whether `enabled` is a truth value and `clip` no negative number, where they are set."""
        number = isinstance(self.clip, (int, float)) and not isinstance(self.clip, bool) and self.clip >= 0
        return super().is_valid() and isinstance(self.enabled, (bool, type(None))) and (self.clip is None or number)


class TrainingConfig(Config):
    """The whole of a training run."""

    batch: BatchConfig | None = None
    """Batch sizes."""
    fp16: FP16Config | None = None
    """Training in fp16."""

    def settings(self) -> dict[str, Any]:
        """The same in the keys of a DeepSpeed JSON."""
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
