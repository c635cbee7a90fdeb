"""What users do to a tied weight between steps holds on all ranks that use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.pipeline.test_engine import STEPS, Case, batches, config_of, loss_of, module_of
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline_engine import PipelineEngine
from zero_strategy.sharding.context import GatheredParameters

KEY = "tied_modules.embed.weight"


def change(what: str, step: int, module: nn.Module, engine: PipelineEngine | None) -> None:
    """Before the second step; `what` begins before the first one if it is to be frozen then."""
    weight = dict(module.named_parameters()).get(KEY)
    if what == "unfrozen" and step < 2 and weight is not None:
        weight.requires_grad_(step == 1)
    elif what == "frozen" and step == 1 and weight is not None:
        weight.requires_grad_(False)
    elif what == "written to" and step == 1 and weight is not None:
        with GatheredParameters([weight], modifier_rank=0, enabled=engine is not None), torch.no_grad():
            if engine is None or engine.mesh.rank == 0:
                weight.mul_(1.5)


def train(what: str, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a pipeline; of one process without an engine for one stage."""
    alone = case.stages == 1
    module: PipelineModule = module_of(case, rank=0) if alone else module_of(case)
    change(what, 0, module, None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = None if alone else PipelineEngine(module, config_of(case))
    if engine is not None:
        engine.attach(optimizer)
    losses = []
    for step in range(STEPS):
        if step:
            change(what, step, module, engine)
        if engine is not None:
            losses.append(float(engine.forward_backward(batches(step, 3, module.mpu().data_parallel_id))))
        else:
            given = [pair for copy in range(case.copies) for pair in batches(step, 3, copy)]
            parts = [loss_of(module(x), y) / len(given) for x, y in given]
            sum(parts, torch.zeros(())).backward()
            losses.append(float(sum(part.detach() for part in parts)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.state_dict() if engine is None else engine.full_state_dict()


def train_all(what: str, cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(what, case) for case in cases]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("what", ["frozen", "unfrozen", "written to"])
def test_a_tied_weight_that_changes_between_steps(ranks: Launcher, what: str, copies: int) -> None:
    expected_losses, expected = train(what, Case(1, copies, 0))
    cases = [Case(2, copies, zero) for zero in (1, 3)]
    for found in ranks(2 * copies)(train_all, what, cases):
        for case, (losses, weights) in zip(cases, found, strict=True):
            assert losses == pytest.approx(expected_losses, rel=1e-5), case
            torch.testing.assert_close(weights[KEY], expected[KEY], rtol=1e-4, atol=1e-5, msg=str(case))
