"""Pipelines among the models of a `ZeroAccelerator`.

model = PipelineModule(layers, num_stages=2, loss_fn=loss_fn)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:                     # the ranks of one pipeline get the same batches
    loss = model.loss(batch)             # all micro-batches of the batch, forward and backward
    accelerator.backward(loss)           # the gradients are there from here on
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from zero_strategy.config import ResolvedConfig, ZeroConfig, resolve
from zero_strategy.integrations.pipeline_runs import IntegrationRunner
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.engine_setup import derive_schedule
from zero_strategy.pipeline.module import PipelineModule


class AcceleratorRunner(IntegrationRunner):
    """Runs the batches of one prepared `PipelineModule`; its `runner`."""

    def __init__(self, engine: PipelineEngine, accelerator: Accelerator) -> None:
        super().__init__(engine, None)
        self._accelerator, self._steps = accelerator, 0

    def loss(self, batch: Any) -> Tensor:
        """See `PipelineModule.loss`. Gradients that a step has used are dropped, if `zero_grad` was not called yet."""
        self.accumulation = self._accelerator.gradient_accumulation_steps
        steps = self.engine.steps.taken + self.engine.steps.skipped
        if steps != self._steps:
            self._steps = steps
            self.begin_step(first=True)
        return super().loss(batch)


def pipeline_engine(
    model: PipelineModule, config: ZeroConfig, world_size: int, device: torch.device, accelerator: Accelerator
) -> PipelineEngine:
    """Shard a pipeline's layers in place, and let `model.loss` run them."""
    engine = PipelineEngine(model, resolve_for(config, model, world_size), device=device)
    model.runner = AcceleratorRunner(engine, accelerator)
    return engine


def waiting_runners(models: Sequence[Any]) -> list[AcceleratorRunner]:
    """Runners of pipelines among prepared models that have made gradients which nobody has seen yet."""
    runners = [model.runner for model in models if isinstance(model, PipelineModule)]
    return [runner for runner in runners if isinstance(runner, AcceleratorRunner) and runner.waits]


def check_dispatch(dispatch_batches: bool | None) -> None:
    """Raise if one process would read for all.

    Raises:
        ValueError: Then; says what to set.
    """
    if dispatch_batches:
        raise ValueError(
            "dispatch_batches=True gives every process a part of each batch, and the ranks of a pipeline need the "
            "same one: take DataLoaderConfiguration(dispatch_batches=False)"
        )


def resolve_for(config: ZeroConfig, model: PipelineModule, world_size: int) -> ResolvedConfig:
    """The settings for a pipeline, what its module decides filled in."""
    # Another model may have other stages.
    asked = deepcopy(config)
    if asked.origin_of("pipeline.stages") == "default":
        asked.pipeline.record("stages", model.num_stages, "derived: the PipelineModule")
    derive_schedule(asked, model)
    return resolve(asked, world_size)
