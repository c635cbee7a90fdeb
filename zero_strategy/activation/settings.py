"""Settings of functional checkpointing: from a DeepSpeed JSON or arguments; model-parallel place; timings.

Settings come from a DeepSpeed JSON and from arguments; arguments win.

`CheckpointTimings` has the seconds of checkpointed forwards, and of their backwards with the recomputation.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import world_rank
from zero_strategy.config.deepspeed.classify import read_source
from zero_strategy.runtime.compute_device import synchronize
from zero_strategy.runtime.terminal import report

if TYPE_CHECKING:
    import torch.distributed as dist


_PREFIXES = ("get_model_parallel_", "get_tensor_model_parallel_")
"""The second is what Megatron has called it since it has had pipelines as well."""


@dataclass(frozen=True)
class ModelParallel:
    """A model-parallel group, from this rank's point of view.

    Attributes:
        rank: This process in its group.
        size: Ranks of the group.
        data_rank: This process among those that have the same place in their groups.
        group: The process group; None for a group of one.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mpu: Any) -> ModelParallel:
        """Setting of a unit.

        Args:
            mpu: An object with `get_model_parallel_rank`, `_world_size` and `_group`, or their `tensor_model_parallel`
                namesakes, and `get_data_parallel_rank`; None: every process is a group of one.

        Raises:
            TypeError: If it lacks one of them; names it.
        """
        if mpu is None:
            return cls(data_rank=world_rank())
        size = int(_ask(mpu, "world_size"))
        # Ranks of one group are neighbours in Megatron's order, by which a unit without the method is placed.
        place = mpu.get_data_parallel_rank() if hasattr(mpu, "get_data_parallel_rank") else world_rank() // size
        group = _ask(mpu, "group") if size > 1 else None
        return cls(int(_ask(mpu, "rank")), size, int(place), group)

    def communicator(self, counters: CommunicationCounters) -> Communicator:
        """Collectives of the group."""
        return Communicator(self.group, counters)


def _ask(mpu: Any, what: str) -> Any:
    for prefix in _PREFIXES:
        if hasattr(mpu, prefix + what):
            return getattr(mpu, prefix + what)()
    raise TypeError(f"mpu must have {' or '.join(f'{p}{what}()' for p in _PREFIXES)}; {type(mpu).__name__} has neither")


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
    """Treatment of the inputs that checkpoints keep for their recomputation.

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
            # A string such as "false" in a JSON would count as true.
            if field.name != "num_checkpoints" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False, not {value!r}")
        number = self.num_checkpoints
        # A bool is an int in Python.
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
        """True if inputs are kept anywhere else than where they are."""
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


_logger = logging.getLogger(__name__)


@dataclass
class CheckpointTimings:
    """Seconds since the last `reset`.

    Attributes:
        forwards: Checkpoints whose forward was measured.
        forward_seconds: In all of them together.
        backwards: Checkpoints whose backward was measured.
        backward_seconds: In all of them together, from the beginning of the recomputation to the gradients of the
            checkpoint's inputs, the next checkpoint's backward, or the end of all, whichever comes first.
    """

    forwards: int = 0
    forward_seconds: float = 0.0
    backwards: int = 0
    backward_seconds: float = 0.0

    def reset(self) -> None:
        """Start again from zero."""
        self.forwards = self.backwards = 0
        self.forward_seconds = self.backward_seconds = 0.0

    def as_metrics(self) -> dict[str, float]:
        """Totals and means by name, for a logger."""
        return {
            "checkpoint/forwards": self.forwards,
            "checkpoint/forward_seconds": self.forward_seconds,
            "checkpoint/backwards": self.backwards,
            "checkpoint/backward_seconds": self.backward_seconds,
        }

    def add_forward(self, seconds: float) -> None:
        """Count one, and log it."""
        self.forwards += 1
        self.forward_seconds += seconds
        report(_logger, "checkpoint %d: forward %.3f ms", self.forwards, 1e3 * seconds)

    def add_backward(self, seconds: float) -> None:
        """Count one, and log it."""
        self.backwards += 1
        self.backward_seconds += seconds
        report(_logger, "checkpoint backward %d: %.3f ms", self.backwards, 1e3 * seconds)


@dataclass
class InBackward:
    """Backward that is under way, among the checkpoints of one `Checkpointer`.

    Attributes:
        watch: Its stopwatch; None between backwards.
    """

    watch: Stopwatch | None = None


class Stopwatch:
    """Marks the ends of a checkpoint's forward and backward, and waits for the device at each of them.

    So work that is under way counts where it belongs. Checkpoints inside of others have none.

    Args:
        timings: Where measured times go; None: nothing is measured.
        shared: With the other checkpoints, since the beginning of one's backward is the end of another's.
    """

    def __init__(self, timings: CheckpointTimings | None, shared: InBackward) -> None:
        self._timings, self._shared = timings, shared
        self._began = 0.0

    def forward_begins(self) -> None:
        """Before the function is called."""
        self._began = self._now()

    def forward_ends(self) -> None:
        """After it has returned."""
        end = self._now()
        if self._timings is not None:
            self._timings.add_forward(end - self._began)

    def backward_begins(self) -> None:
        """Before what is kept is fetched and the function is called again."""
        if self._shared.watch is not None:
            self._shared.watch.backward_ends()
        self._shared.watch = self
        self._began = self._now()

    def backward_ends(self) -> None:
        """After the gradients of the inputs are there; once for each beginning."""
        # The gradients, the next checkpoint and the end of the pass all come here; the first of them counts.
        if self._shared.watch is not self:
            return
        self._shared.watch = None
        end = self._now()
        if self._timings is not None:
            self._timings.add_backward(end - self._began)

    @staticmethod
    def _now() -> float:
        synchronize()
        return time.perf_counter()
