"""The options of checkpointed activations: from a DeepSpeed JSON, and from arguments, which win."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zero_strategy.config.deepspeed.text import read_source

SECTION = "activation_checkpointing"
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
"""The JSON's names, and ours."""


@dataclass(frozen=True)
class CheckpointSettings:
    """What happens to the inputs that checkpoints keep for their recomputation.

    Attributes:
        partition_activations: Each rank of the model-parallel group keeps its part of an input, which all of them have.
        contiguous_checkpointing: They lie in one buffer, made once, of `num_checkpoints` layers; all layers must have
            inputs of the same shapes then. Needs `partition_activations`.
        num_checkpoints: Layers whose inputs are kept at one time.
        checkpoint_in_cpu: They are kept in host memory.
        synchronize: Wait for the device at the beginning and the end of each forward and backward of a checkpoint.
        profile: Measure these forwards and backwards, and log them; waits for the device, too.

    Raises:
        TypeError: If a value is of another type.
        ValueError: If an option lacks what it needs; names it and the accepted values.
    """

    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "num_checkpoints" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False, not {value!r}")
        number = self.num_checkpoints
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"num_checkpoints must be an integer or None, not {number!r}")
        if number is not None and number < 1:
            raise ValueError(f"num_checkpoints is {number}; accepted: 1 or more, or None without a contiguous buffer")
        if self.contiguous_checkpointing and number is None:
            raise ValueError(
                "contiguous_checkpointing (contiguous_memory_optimization in the JSON) is on and num_checkpoints "
                "(number_checkpoints) is None; accepted: 1 or more, the number of checkpointed layers of the model"
            )
        if self.contiguous_checkpointing and not self.partition_activations:
            raise ValueError(
                "contiguous_checkpointing (contiguous_memory_optimization in the JSON) is on and partition_activations "
                "is False; accepted: True, which without a model-parallel group keeps whole inputs"
            )

    @property
    def stores(self) -> bool:
        """Whether inputs are kept anywhere else than where they are."""
        return self.partition_activations or self.contiguous_checkpointing or self.checkpoint_in_cpu


def read_settings(deepspeed_config: Any, given: Mapping[str, Any]) -> CheckpointSettings:
    """The options of a config, overridden by what is given.

    Args:
        deepspeed_config: A mapping or the path of a JSON file, whose section `activation_checkpointing` counts, or an
            object with an attribute `activation_checkpointing_config`; None: none.
        given: Options by our names; None stands for "not given".

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If a value is of another type.
        ValueError: If a key is unknown, or an option lacks what it needs.
    """
    options = of_section(_section(deepspeed_config))
    return CheckpointSettings(**{**options, **{name: value for name, value in given.items() if value is not None}})


def of_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Options by our names, from the JSON's; what is null is left out.

    Raises:
        ValueError: If a key is unknown.
    """
    for key in section:
        if key not in _KEYS:
            raise ValueError(f"unknown key '{SECTION}.{key}'; accepted: {', '.join(_KEYS)}")
    return {ours: section[key] for key, ours in _KEYS.items() if section.get(key) is not None}


def _section(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike, Mapping)):
        section = read_source(config).values.get(SECTION) or {}
        if not isinstance(section, Mapping):
            raise TypeError(f"'{SECTION}' must be a mapping with keys among {', '.join(_KEYS)}, not {section!r}")
        return section
    # The object that scripts got from DeepSpeed's own reader of the file.
    found = getattr(config, "activation_checkpointing_config", None)
    if found is None:
        raise TypeError(f"deepspeed_config must be a path or a mapping, not {type(config).__name__}")
    return {key: getattr(found, key) for key in _KEYS if hasattr(found, key)}
