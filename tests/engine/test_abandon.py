"""An engine that ends without its ranks leaves a plain module, wherever an exception has left it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.experts.model import EXPERTS, batch, make
from tests.faulty import Torn, no_number
from tests.launcher import Launcher
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule


class Layers(nn.Module):
    """Two units, between which a backward may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.torn = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.torn:
            x = Torn.apply(x)
        result: Tensor = self.layers[1](x)
        return result


def abandoned(stage: int, where: str) -> list[str]:
    """Differences from a plain module, and from one that trains again under another engine."""
    torch.manual_seed(0)
    model = Layers()
    x, objects = torch.randn(4, 8), list(model.parameters())
    shapes = [parameter.shape for parameter in objects]
    engine = ZeroEngine(model, {"stage": stage, "units": {"patterns": ["layers.*"]}})
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hook = model.layers[1].register_forward_pre_hook(no_number) if where == "forward" else None
    model.torn = where == "backward"
    if where in ("forward", "backward"):
        with pytest.raises(ArithmeticError, match="today"):
            model(x).sum().backward()
    elif where == "gradients":
        model(x).sum().backward()
    if hook is not None:
        hook.remove()
    model.torn = False
    engine.abandon("a test")
    wrong = []
    if [parameter.shape for parameter in model.parameters()] != shapes or list(model.parameters()) != objects:
        wrong.append("parameters")
    if any(type(parameter) is not nn.Parameter or parameter.grad is not None for parameter in objects):
        wrong.append("classes or gradients")
    if any(child._forward_hooks or child._forward_pre_hooks for child in model.modules()):
        wrong.append("hooks")
    with pytest.raises(RuntimeError, match="an engine that has ended: a test"):
        optimizer.step()
    for parameter in objects:
        nn.init.ones_(parameter.data)
    plain = model(x)
    again = ZeroEngine(model, {"stage": stage})
    if not torch.equal(model(x), plain):
        wrong.append("another engine's forward")
    again.close()
    engine.close()
    return wrong


@pytest.mark.parametrize("where", ["rest", "forward", "backward", "gradients"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_abandoned_module_is_plain(ranks: Launcher, stage: int, where: str) -> None:
    for wrong in ranks(2)(abandoned, stage, where):
        assert not wrong


def abandoned_parts() -> list[str]:
    """Differences of modules of which ranks have had parts."""
    model, wrong = make(), []
    shapes = [parameter.shape for parameter in model.parameters()]
    engine = ZeroEngine(model, {"stage": 3, "mesh": {"expert": 2}})
    model(batch(engine.mesh.rank, 0)).backward()
    engine.abandon("a test")
    if [parameter.shape for parameter in model.parameters()] != shapes or model.blocks[0].experts.count != EXPERTS:
        wrong.append("experts")
    module = PipelineModule([nn.Linear(8, 8), nn.Linear(8, 8)], 2, loss_fn=lambda outputs, _: outputs.sum())
    pipeline = PipelineEngine(module, {"stage": 1})
    pipeline.forward_backward([(torch.randn(4, 8), None)] * 2)
    pipeline.abandon("a test")
    if not pipeline.ended or any(type(parameter) is not nn.Parameter for parameter in module.parameters()):
        wrong.append("pipeline")
    return wrong


def test_an_abandoned_part_is_whole_again(ranks: Launcher) -> None:
    """Experts have all of them, and a stage of a pipeline its layers."""
    for wrong in ranks(2)(abandoned_parts):
        assert not wrong
