"""The settings as keywords of a constructor: written once, for the strategies that take them beside their own.

Type checkers read the types, and jsonargparse (LightningCLI) reads the types and, for its help, the docstring:

    def __init__(self, config=None, **settings: Unpack[ZeroSettings]) -> None: ...
"""

from __future__ import annotations

from typing import Any, TypedDict

from zero_strategy.config.schema import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    DiagnosticsConfig,
    LossScaleConfig,
    MeshConfig,
    OffloadConfig,
    PipelineConfig,
    PrecisionConfig,
    UnitsConfig,
    WatchdogConfig,
)


class ZeroSettings(TypedDict, total=False):
    """The fields of `ZeroConfig`, each with the short forms that `load_config` takes; None is not given.

    Args:
        stage: ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        units: What is sharded, gathered and released together.
        mesh: How the ranks are laid out, for hybrid sharding and tensor parallelism.
        precision: Dtypes of master weights and gradients. (That of the computation is the framework's `precision`.)
        gradient_reduction: `per_step` or `per_micro_batch`.
        uneven_batches: Ranks that run out of batches before others: `error`, `join` or `join_active`.
        prefetch: Units that are gathered ahead under stage 3.
        reshard_after_forward: Free gathered parameters between forward and backward under stage 3.
        reshard_after_backward: Free them after backward under stage 3 (else after the optimizer's step).
        loss_scale: Dynamic loss scaling for fp16.
        nonfinite_gradients: What a step does whose gradients are not finite: `ignore`, `skip` or `raise`.
        offload: Where state is kept that the device has no room for: "cpu", "nvme", or more.
        activation_checkpointing: Which activations are computed again in backward instead of being kept: "full",
            "selective", "every_n", "budget", or more.
        pipeline: How the layers of a model are divided into pipeline stages.
        checkpoint: How checkpoints are written.
        watchdog: How ranks notice that one has failed or does something else: "off", "default", "strict", or more.
        diagnostics: What is written down of a run.
        elementwise_optimizers: Class names of your own optimizers that may run on pieces of parameters.
        fused_optimizers: Take the steps of torch's Adam, AdamW, SGD and Adagrad in the fused ops.
        timeout_seconds: Seconds until a collective times out.
        barrier_seconds: Seconds that our own waits on other ranks last at most.
    """

    stage: int | None
    units: UnitsConfig | dict[str, Any] | None
    mesh: MeshConfig | dict[str, Any] | None
    precision: PrecisionConfig | dict[str, Any] | None
    gradient_reduction: str | None
    uneven_batches: str | None
    prefetch: int | None
    reshard_after_forward: bool | None
    reshard_after_backward: bool | None
    loss_scale: LossScaleConfig | dict[str, Any] | None
    nonfinite_gradients: str | None
    offload: OffloadConfig | dict[str, Any] | str | None
    activation_checkpointing: ActivationCheckpointingConfig | dict[str, Any] | bool | str | None
    pipeline: PipelineConfig | dict[str, Any] | None
    checkpoint: CheckpointConfig | dict[str, Any] | None
    watchdog: WatchdogConfig | dict[str, Any] | str | None
    diagnostics: DiagnosticsConfig | dict[str, Any] | None
    elementwise_optimizers: list[str] | None
    fused_optimizers: bool | None
    timeout_seconds: float | None
    barrier_seconds: float | None
