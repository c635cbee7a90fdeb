"""The settings of zero_strategy, with their defaults and accepted values.

`ZeroConfig` can be built in Python, or by `load_config` from a file, a mapping or keywords, or be registered
as a Hydra structured config: ``ConfigStore.instance().store(name="zero", node=ZeroConfig)``.

What a framework owns is no setting here: accumulation, clipping, batch size, mixed precision, the optimizer
and its learning rate stay where Lightning or Accelerate have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from .rules import at_least, between, non_empty, one_of
from .section import Section, table


@dataclass
class UnitsConfig(Section):
    """What is sharded, gathered and released together: module subtrees, such as transformer blocks."""

    prefix: ClassVar[str] = "units."

    classes: list[str] = field(default_factory=list, metadata=non_empty())
    """Class names whose instances are units, such as ``["LlamaDecoderLayer"]``."""

    patterns: list[str] = field(default_factory=list, metadata=non_empty())
    """fnmatch patterns on module names; matching modules are units, such as ``["model.layers.*"]``."""

    min_numel: int = field(default=8192, metadata=at_least(0))
    """Elements. Candidate modules that were found automatically and hold fewer stay with their parent."""


@dataclass
class MeshConfig(Section):
    """How ranks are laid out: ``replicate`` x ``shard`` = world size; several replicas: hybrid sharding."""

    prefix: ClassVar[str] = "mesh."

    replicate: int = field(default=1, metadata=at_least(1))
    """Number of replicas of the sharded state (dp_replicate axis), such as the number of nodes."""

    shard: int | None = field(default=None, metadata=at_least(1))
    """Ranks that the state is divided among (dp_shard axis). None: derived, world size / replicate."""


@dataclass
class PrecisionConfig(Section):
    """In what precision state is kept and summed. The framework sets that of the computation."""

    prefix: ClassVar[str] = "precision."

    master_weights: bool = True
    """Keep fp32 copies of parameters of lower precision for the optimizer."""

    gradient_dtype: str = field(default="float32", metadata=one_of("float32", "parameter"))
    """What gradients are accumulated in: ``float32``, or ``parameter`` for the dtype of each parameter."""

    reduce_dtype: str = field(default="float32", metadata=one_of("float32", "gradient"))
    """What gradients are summed in across ranks: ``float32``, or ``gradient`` for the dtype they have."""


@dataclass
class LossScaleConfig(Section):
    """Dynamic loss scaling, in use where the framework trains in fp16."""

    prefix: ClassVar[str] = "loss_scale."

    initial: float = field(default=65536.0, metadata=between(0, math.inf))
    """Factor on the loss at the first step."""

    growth_factor: float = field(default=2.0, metadata=between(1, math.inf))
    """The scale is multiplied by this after ``growth_interval`` steps in a row without overflow."""

    backoff_factor: float = field(default=0.5, metadata=between(0, 1))
    """The scale is multiplied by this after a step that overflowed."""

    growth_interval: int = field(default=2000, metadata=at_least(1))
    """Optimizer steps without overflow before the scale grows."""

    minimum: float = field(default=1.0, metadata=between(0, math.inf))
    """The scale does not fall below this."""

    def check(self) -> None:
        """Checks the values, and that the scale starts no lower than its minimum."""
        super().check()
        if self.initial < self.minimum:
            raise ValueError(
                f"loss_scale.initial is {self.initial}; accepted: loss_scale.minimum ({self.minimum}) or more"
            )


@dataclass
class CheckpointConfig(Section):
    """How checkpoints are written and read."""

    prefix: ClassVar[str] = "checkpoint."

    max_file_bytes: int = field(default=5_000_000_000, metadata=at_least(1))
    """Bytes of tensor data after which a new file is begun; one larger tensor still goes into one file."""

    verify: bool = True
    """Compare the checksums of all that is loaded with those that were noted when it was saved."""


@dataclass
class ZeroConfig(Section):
    """The whole config."""

    stage: int = field(default=3, metadata=one_of(0, 1, 2, 3))
    """ZeRO stage. 0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters."""

    units: UnitsConfig = field(default_factory=UnitsConfig)
    """What is sharded, gathered and released together."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the ranks are laid out."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """In what precision state is kept and summed."""

    gradient_reduction: str | None = field(default=None, metadata=one_of("per_step", "per_micro_batch"))
    """When gradients are reduced across ranks. None: derived, ``per_step`` for stages 0 and 1 (fewest bytes
    sent), ``per_micro_batch`` for 2 and 3 (no rank holds all gradients)."""

    prefetch: int = field(default=1, metadata=at_least(0))
    """Units that are gathered ahead of their use under stage 3; 0 gathers each when it is needed."""

    release_after_forward: bool = True
    """Stage 3: free gathered parameters between forward and backward. False saves a gather, costs memory."""

    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Dynamic loss scaling."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How checkpoints are written."""

    elementwise_optimizers: list[str] = field(default_factory=list, metadata=non_empty())
    """Class names of optimizers outside torch.optim that you assert to treat every element on its own, so
    that they can run on slices of parameters."""

    fused_optimizers: bool = True
    """Take the steps of torch.optim.Adam, AdamW, SGD and Adagrad in the fused ops, one pass over memory. False, or
    `foreach` or `fused` given to the optimizer, leaves the steps to torch."""

    timeout_seconds: float = field(default=1800.0, metadata=between(0, math.inf))
    """Seconds until a collective of the process group times out."""

    rendezvous_seconds: float = field(default=60.0, metadata=between(0, math.inf))
    """Seconds that our own waits on other ranks last at most before they raise."""

    def origin_of(self, key: str) -> str:
        """Where the value of a setting came from.

        Args:
            key: Full dotted key, such as ``"mesh.shard"``.

        Raises:
            KeyError: If there is no such setting.
        """
        return dict(self.settings())[key].origin

    def explain(self) -> str:
        """A table of all settings: key, value, origin."""
        return table(self.settings())
