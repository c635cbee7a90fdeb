"""`deepspeed.runtime.zero.config`: the section `zero_optimization` as an object, with DeepSpeed's defaults."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, ClassVar

from zero_strategy.config.deepspeed.classify import classify
from zero_strategy.config.deepspeed.keys import ZERO, Group, Key
from zero_strategy.config.sources import Layer

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]


class OffloadDeviceEnum(str, Enum):
    """Places for state; a config takes them as it takes their names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class ZeroStageEnum(IntEnum):
    """Stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class _ConfigSection:
    """Keys of a section, checked as in a file; what is not given has DeepSpeed's default.

    Raises:
        TypeError: If a value is not of its key's type.
        ValueError: If a key is unknown (names the nearest), or a value is not accepted.
    """

    _keys: ClassVar[Group]
    _path: ClassVar[tuple[str, ...]]

    def __init__(self, **values: Any) -> None:
        given: dict[str, Any] = {name: _plain(value) for name, value in values.items() if value is not None}
        content: dict[str, Any] = given
        for name in reversed(self._path):
            content = {name: content}
        prefix = ".".join(self._path) + "."
        reports = classify(Layer(content, f"user: {type(self).__name__}"))
        found = {key.removeprefix(prefix): report.value for key, report in reports.items()}
        for name, key in self._keys.keys.items():
            if isinstance(key, Key):
                setattr(self, name, found.get(name, key.default))
            else:
                inner = given.get(name)
                made = _SECTIONS.get(name)
                setattr(self, name, inner if made is None or inner is None else made(**inner))

    def model_dump(self) -> dict[str, Any]:
        """The values as plain ones, those not given included."""
        return {name: value for name, value in _plain(self).items()}

    dict = model_dump

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _group(name: str) -> Group:
    found = ZERO.keys[name]
    assert isinstance(found, Group)
    return found


class DeepSpeedZeroOffloadParamConfig(_ConfigSection):
    """`offload_param`."""

    _keys, _path = _group("offload_param"), ("zero_optimization", "offload_param")


class DeepSpeedZeroOffloadOptimizerConfig(_ConfigSection):
    """`offload_optimizer`."""

    _keys, _path = _group("offload_optimizer"), ("zero_optimization", "offload_optimizer")


class DeepSpeedZeroConfig(_ConfigSection):
    """`zero_optimization`; attributes have the present spelling of their keys (`stage3_...`)."""

    _keys, _path = ZERO, ("zero_optimization",)


_SECTIONS: dict[str, type[_ConfigSection]] = {
    "offload_param": DeepSpeedZeroOffloadParamConfig,
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
}


def _plain(value: Any) -> Any:
    if isinstance(value, _ConfigSection):
        return {name: _plain(inner) for name, inner in vars(value).items() if inner is not None}
    return value.value if isinstance(value, Enum) else value
