"""Scripts that call `loss.backward()`: the gradient of `engine.backward(loss)`, or an error before the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.compat.scripts import plain
from tests.compat.scripts.old_script import data, net
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.optim.full_state import safe_get_full_grad

LR, MICRO, ACCUMULATION = 0.02, 2, 3
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def start(model: nn.Module, stage: int, accumulation: int = ACCUMULATION, **more: Any) -> ScriptEngine:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAMW,
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def own_backwards(how: str) -> list[float]:
    expected = plain.train(2, world=dist.get_world_size(), micro=MICRO, accumulation=ACCUMULATION, lr=LR)["weights"]
    distances = []
    for stage in range(4):
        engine = start(net(), stage)
        for x, y in list(engine.deepspeed_io(data()))[: 2 * ACCUMULATION]:
            loss = engine(x, y)
            if how == "loss":
                loss.backward()
            elif how == "scale":
                engine.scale(loss).backward()
            elif how == "tensor":
                loss.backward(torch.ones_like(loss))
            else:
                with engine.no_sync():
                    loss.backward()
            engine.step()
        found = engine.state_dict()
        distances.append(max(float((found[name] - value).abs().max()) for name, value in expected.items()))
    return distances


@pytest.mark.parametrize("how", ["loss", "scale", "tensor", "no_sync"])
def test_gradients_are_those_of_the_mean_over_micro_batches(ranks: Launcher, how: str) -> None:
    for distances in ranks(2)(own_backwards, how):
        assert max(distances) < 2e-6, distances


@dataclass
class Output:
    hidden: Tensor
    parts: dict[str, Tensor]


class Two(nn.Module):
    """Gives an object with several results; the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Output:
        hidden = self.first(x)
        return Output(hidden, {"y": self.second(hidden), "hidden": hidden})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_results_in_objects_and_several_forwards(stage: int) -> None:
    gradients = []
    for own in (True, False):
        torch.manual_seed(0)
        model = Two()
        engine = start(model, stage, 4)
        for seed in range(4):
            torch.manual_seed(seed)
            first, second = engine(torch.randn(2, 4)), engine(torch.randn(2, 4))
            loss = first.parts["y"].sum() + second.parts["y"].square().mean() + first.hidden.sum()
            if own:
                loss.backward()
            else:
                engine.backward(loss)
            if seed < 3:
                engine.step()
        gradients.append([safe_get_full_grad(parameter) for parameter in model.parameters()])
        engine.destroy()
    for found, expected in zip(*gradients, strict=True):
        assert found is not None and expected is not None
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_loss_across_engines_is_divided_once() -> None:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 1)
    x = torch.randn(2, 4)
    (decoder(encoder(x)).sum() / ACCUMULATION).backward()
    expected = [parameter.grad.clone() for parameter in encoder.parameters() if parameter.grad is not None]
    encoder.zero_grad(), decoder.zero_grad()
    first, second = start(encoder, 1), start(decoder, 1)
    second.backward(second(first(x)).sum())
    for parameter, value in zip(encoder.parameters(), expected, strict=True):
        found = safe_get_full_grad(parameter)
        assert found is not None and torch.allclose(found, value)


@pytest.mark.parametrize("own", [True, False])
def test_what_does_not_come_through_the_engine_is_divided_too(own: bool) -> None:
    weight = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(weight)
    engine = start(model, 1)
    loss = model(torch.ones(2, 4)).sum() + model.weight.square().sum()
    if own:
        loss.backward()
    else:
        engine.backward(loss)
    found = safe_get_full_grad(model.weight)
    assert found is not None and torch.allclose(found, (2 * torch.ones(1, 4) + 2 * weight) / ACCUMULATION)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fp16_needs_the_loss_scale(accumulation: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    norms = []
    for own in (True, False):
        torch.manual_seed(0)
        engine = start(nn.Linear(4, 1), 2, accumulation, fp16=fp16)
        for _ in range(accumulation):
            loss = engine(torch.ones(2, 4).half()).float().sum()
            if own:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and norms[0]
    with pytest.raises(RuntimeError, match=r"fp16 without a loss scale.*engine\.scale\(loss\)\.backward"):
        engine(torch.ones(2, 4).half()).float().sum().backward()


def test_a_step_for_each_micro_batch_has_nothing_to_divide() -> None:
    model = net()
    engine = start(model, 1, 1)
    (x, y), *_ = engine.deepspeed_io(data())
    model(x, y).backward()
    engine.step()
    assert engine.was_step_applied()
