"""The part of `ZeroAccelerator` for models that are pipelines: `PipelineModule`s.

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

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from zero_strategy.config import ResolvedConfig, ZeroConfig, resolve
from zero_strategy.integrations.accelerate_scaler import AgreedGradScaler
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


class PipelineAccelerator(Accelerator):
    """What is different where a pipeline is trained."""

    zero_config: ZeroConfig
    scaler: AgreedGradScaler | None
    _share: tuple[int, int] | None = None

    @property
    def num_processes(self) -> int:
        """Number of processes; while a loader is prepared, of those that get different data."""
        return int(super().num_processes) if self._share is None else self._share[0]

    @property
    def process_index(self) -> int:
        """This process's number; while a loader is prepared, which of those shares it gets."""
        return int(super().process_index) if self._share is None else self._share[1]

    def _pipelines(self) -> list[PipelineModule]:
        return [model for model in self._models if isinstance(model, PipelineModule)]

    def _copies(self) -> int:
        """How many ranks get different data."""
        return next((model.mpu().data_parallel_size for model in self._pipelines()), int(super().num_processes))

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **keywords: Any) -> Any:
        """As Accelerate's; the ranks of one pipeline get the same batches, its copies different ones.

        Raises:
            ValueError: If one process would read for all.
        """
        pipelines = self._pipelines()
        if not pipelines:
            return super().prepare_data_loader(data_loader, *arguments, **keywords)
        if self.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True gives every process a part of each batch, and the ranks of a pipeline need the "
                "same one: take DataLoaderConfiguration(dispatch_batches=False)"
            )
        grid = pipelines[0].mpu()
        with self._sharing(grid.data_parallel_size, grid.data_parallel_id):
            return super().prepare_data_loader(data_loader, *arguments, **keywords)

    @contextmanager
    def _sharing(self, shares: int, mine: int) -> Iterator[None]:
        dispatch, self.dataloader_config.dispatch_batches = self.dispatch_batches, False
        self._share = shares, mine
        try:
            yield
        finally:
            self._share = None
            self.dataloader_config.dispatch_batches = dispatch

    def _pipeline_engine(self, model: PipelineModule) -> PipelineEngine:
        """Shard a pipeline's layers in place."""
        config = resolve_for(self.zero_config, model, int(super().num_processes))
        engine = PipelineEngine(model, config, device=self.device)
        model.runner = AcceleratorRunner(engine, self)
        return engine

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """As Accelerate's; a pipeline's gradients, which are there already, come to light."""
        waiting = [m.runner for m in self._pipelines() if isinstance(m.runner, AcceleratorRunner) and m.runner.waits]
        for runner in waiting:
            runner.begin_backward()
        super().backward(loss, **keywords)
        scale = 1.0 if self.scaler is None or not self.scaler.is_enabled() else float(self.scaler.get_scale())
        for runner in waiting:
            runner.end_backward(scale)


def resolve_for(config: ZeroConfig, model: PipelineModule, world_size: int) -> ResolvedConfig:
    """The settings for a pipeline, what its module decides filled in."""
    asked = deepcopy(config)
    if asked.origin_of("pipeline.stages") == "default":
        asked.pipeline.record("stages", model.num_stages, "derived: the PipelineModule")
    derive_schedule(asked, model)
    return resolve(asked, world_size)
