"""Accelerate's `mixed_precision="fp8"`: the layers that Accelerate converts, trained as it trains them, sharded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AORecipeKwargs
from torch import Tensor

from tests.engine.float8 import IN_BLOCKS, Net, float8_net, kinds, plain_net, recipe
from tests.integrations.accelerate.training import fresh_state
from tests.integrations.lightning.trainers import raises
from tests.launcher import Launcher
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.integrations.accelerate.float8 import check_recipe
from zero_strategy.integrations.casts import cast_bytes
from zero_strategy.pipeline.module import PipelineModule

STEPS = 3


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return x, x.cos()


def ours(stage: int, handler: AORecipeKwargs | None = None, gathers: str = "values", **more: Any) -> ZeroAccelerator:
    zero = {"stage": stage, "units": {"min_numel": 0}, "fused_optimizers": False}
    zero["communication"] = {"parameters": gathers}
    handlers = None if handler is None else [handler]
    return ZeroAccelerator(zero_config=zero, cpu=True, mixed_precision="fp8", kwargs_handlers=handlers, **more)


def of_one_process(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Accelerate's own in one process, on the micro-batches of both ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = recipe(name)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)])
    model: Any = plain_net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(2):
            x, y = batch(step, rank)
            loss = (model(x) - y).square().mean() / 2
            accelerator.backward(loss)
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert kinds(model) == IN_BLOCKS
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


def trained(stage: int, name: str, gathers: str) -> tuple[list[float], dict[str, Tensor]]:
    with fresh_state():
        accelerator = ours(stage, AORecipeKwargs(config=recipe(name)), gathers)
        model: Any = plain_net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert kinds(model) == IN_BLOCKS
        losses = []
        for step in range(STEPS):
            x, y = batch(step, dist.get_rank())
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses, accelerator.get_state_dict(model)


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process: that of a test before this one, too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_all_stages_train_as_accelerate_in_one_process(ranks: Launcher, name: str) -> None:
    losses, weights = of_one_process(name)
    ways = [*((stage, "values") for stage in range(4)), *([(3, "float8")] if name == "tensorwise" else [])]
    for stage, gathers in ways:
        for found, state in ranks(2)(trained, stage, name, gathers):
            assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-7
            assert state.keys() == weights.keys()
            assert max(float((state[key] - weights[key]).abs().max()) for key in weights) < 1e-7


def by_default() -> tuple[set[str], bool, float, float]:
    """Layers converted; whether all weights are plain ones; the loss before and after a few steps."""
    with fresh_state():
        accelerator = ours(3)
        model: Any = plain_net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        optimizer, model = accelerator.prepare(optimizer, model)
        x, y = batch(0, 0)
        seen = []
        for _ in range(4):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        config = model.blocks[0].up.config
        assert config.pad_inner_dim and not config.enable_fsdp_float8_all_gather
        return kinds(model), "Float8" in str({type(p) for p in model.parameters()}), seen[0], seen[-1]


def test_the_default_recipe_without_the_gathers_of_fsdp(ranks: Launcher) -> None:
    for found, wrapped, before, after in ranks(2)(by_default):
        assert found == IN_BLOCKS and not wrapped and after < before


def from_another_precision() -> None:
    """A model that an Accelerator without float8 has trained."""
    with fresh_state():
        zero = {"stage": 3, "units": {"min_numel": 0}}
        model: Any = ZeroAccelerator(zero_config=zero, cpu=True).prepare(plain_net())
        AcceleratorState._reset_state()
        again = ours(3, AORecipeKwargs(config=recipe("tensorwise"))).prepare(model)
        assert kinds(again) == IN_BLOCKS
        wanted = float8_net(recipe("tensorwise"))
        x, _ = batch(0, 0)
        with torch.autocast("cpu", torch.bfloat16):
            expected = wanted(x).float()
        assert torch.equal(again(x), expected)


def test_a_model_that_was_trained_in_another_precision(ranks: Launcher) -> None:
    ranks(2)(from_another_precision)


def evaluated_first() -> tuple[set[str], set[str]]:
    """Layers in float8 in an evaluation, for which Accelerate converts none, and in the training after it."""
    with fresh_state():
        accelerator = ours(3, AORecipeKwargs(config=recipe("tensorwise")))
        model: Any = accelerator.prepare_model(plain_net(), evaluation_mode=True)
        model(batch(0, 0)[0])
        before = kinds(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(batch(0, 0)[0]).square().mean())
        optimizer.step()
        with raises(ValueError, "was prepared by this ZeroAccelerator already"):
            accelerator.prepare(model)
        return before, kinds(model)


def test_a_model_that_was_evaluated_before(ranks: Launcher) -> None:
    assert ranks(2)(evaluated_first) == [(set(), IN_BLOCKS)] * 2


def refusals() -> None:
    with fresh_state():
        asked = AORecipeKwargs(config=recipe("tensorwise", enable_fsdp_float8_all_gather=True))
        with raises(ValueError, "AORecipeKwargs(config=...)", "enable_fsdp_float8_all_gather=True", "FSDP2"):
            ours(3, asked)
    with fresh_state(), raises(ValueError, "pipeline", "convert_to_float8_training"):
        ours(1).prepare(PipelineModule([torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)], 2))
    with fresh_state(), raises(ValueError, "verify", "factory"):
        ours(1).verify(lambda: None)


def test_what_is_refused(ranks: Launcher) -> None:
    ranks(2)(refusals)


@pytest.mark.parametrize(
    "attribute, library", [("te_recipe_handler", "Transformer E"), ("msamp_recipe_handler", "MS-AMP")]
)
def test_layers_of_other_libraries_are_refused(attribute: str, library: str) -> None:
    with pytest.raises(ValueError, match=rf"by {library}.*AORecipeKwargs\(\).*ACCELERATE_FP8_BACKEND=AO"):
        check_recipe(SimpleNamespace(fp8_enabled=True, **{attribute: object()}))


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(ImportError, match=r"mixed_precision='fp8'.*zero-strategy\[float8\]"):
        ZeroAccelerator(mixed_precision="fp8", cpu=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ImportError, match=r"zero-strategy\[float8\]"):
        ZeroAccelerator(cpu=True)


def test_no_copies_of_float8_weights_are_told() -> None:
    accelerator = ours(3, AORecipeKwargs(config=recipe("tensorwise")))
    model: Net = accelerator.prepare(plain_net())
    outside = sum(p.numel() for part in (model.first, model.last) for p in part.parameters())
    assert cast_bytes(accelerator.engine(model), torch.bfloat16)[0] == 2 * outside
