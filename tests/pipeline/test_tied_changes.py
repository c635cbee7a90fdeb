"""Changes by users to a tied weight between steps hold on all ranks that use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.pipeline.test_engine import STEPS, Case, batches, config_of, loss_of, module_of
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.pipeline.building import LayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule

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


def names_of_a_shared_weight() -> list[list[str]]:
    embedding, head = nn.Embedding(5, 5), nn.Linear(5, 5, bias=False)
    head.weight = embedding.weight
    engine = PipelineEngine(PipelineModule(nn.Sequential(embedding, nn.Linear(5, 5), head), 2, loss_fn=loss_of))
    asked: list[set[str] | None] = [None, {"2.weight"}, {"0.weight", "1.bias"}]
    return [sorted(engine.full_state_dict(names)) for names in asked]


def test_a_tied_weight_under_its_further_name(ranks: Launcher) -> None:
    everything = ["0.weight", "1.bias", "1.weight", "2.weight"]
    assert ranks(2)(names_of_a_shared_weight) == 2 * [[everything, ["2.weight"], ["0.weight", "1.bias"]]]


class Numbered(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, float | bool]:  # type: ignore[override]
        number = 1 if x[0, 0] > 0 else True
        return super().forward(x), number


def kinds_that_arrive() -> list[str]:
    seen: list[str] = []

    def look(given: tuple[Tensor, float | bool]) -> Tensor:
        seen.append(repr(given[1]))
        return given[0]

    layers = [LayerSpec(Numbered, 4, 4), look, LayerSpec(nn.Linear, 4, 4)]
    module = PipelineModule(layers, 2, loss_fn=lambda x, _: x.mean(), partition_method=[0, 1, 3])
    engine = PipelineEngine(module, {"pipeline": {"stages": 2, "micro_batches": 2}})
    engine.forward_backward([(torch.ones(2, 4), 0), (-torch.ones(2, 4), 0)])
    return seen


def test_numbers_that_are_equal_but_of_another_type(ranks: Launcher) -> None:
    assert ranks(2)(kinds_that_arrive) == [[], ["1", "True"]]
