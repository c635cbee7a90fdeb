"""Models in stages, run by the executor with every schedule; the oracle is the model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.huggingface.test_pipeline_models import batch, build
from tests.launcher import Launcher
from zero_strategy.integrations.huggingface.pretrained import pipeline_layers, pipeline_loss
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import SCHEDULES, build_table

MICRO_BATCHES = 4
Found = dict[str, tuple[Tensor, dict[str, Tensor]]]


def micro_batches(kind: str) -> list[tuple[dict[str, Tensor], Tensor]]:
    whole = batch(kind, "mask")
    labels = whole.pop("labels")
    return [
        ({name: value.roll(shift, 0) for name, value in whole.items()}, labels.roll(shift, 0))
        for shift in range(MICRO_BATCHES)
    ]


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def by_the_executor(kind: str, interval: int) -> Found:
    from zero_strategy.pipeline.executor import Executor, ExecutorHooks

    class Hooks(ExecutorHooks):
        def reduce_tied_grads(self) -> None:
            part.allreduce_tied_weight_gradients()

    found: Found = {}
    for name in SCHEDULES:
        table, model = build_table(name, dist.get_world_size(), MICRO_BATCHES), build(kind)
        part = PipelineModule(
            pipeline_layers(model),
            table.ranks,
            loss_fn=pipeline_loss(model),
            chunks=table.chunks,
            placement=table.placement.shape,
            partition_method="type:block|layer",
            activation_checkpoint_interval=interval,
        )
        ranks, loss_fn = part.mpu().pp_group, part.loss_fn
        executor = Executor(
            part.chunk_functions(), part.placement, ranks=ranks, loss_fn=loss_fn, hooks=Hooks(), name=name
        )
        run: Any = executor.run(lower(table)[part.stage_id], iter(micro_batches(kind)))
        found[name] = run.loss, gradients(part)
    return found


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_schedule_gives_the_model_s_gradients(ranks: Launcher, kind: str, interval: int) -> None:
    model, total = build(kind), torch.zeros(())
    for inputs, labels in micro_batches(kind):
        loss = model(**inputs, labels=labels).loss / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
    expected = gradients(model)
    parts = ranks(2)(by_the_executor, kind, interval)
    tied = {"transformer.wte.weight", "lm_head.weight"} if kind == "gpt2" else set()
    for name in SCHEDULES:
        assert set().union(*(found[name][1] for found in parts)) == set(expected)
        for loss, found in (part[name] for part in parts):
            torch.testing.assert_close(loss, total, rtol=0, atol=1e-6)
            # What holders add up has another order of summation than one process.
            assert [key for key in found if key not in tied and not torch.equal(found[key], expected[key])] == []
            for key in tied & set(found):
                torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-7)
