"""One backward after another on one process: what scripts do to gradients in between, and inside of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

X = torch.ones(1, 3)
STAGES = [(0, "per_step"), (1, "per_step"), (2, "per_micro_batch"), (3, "per_micro_batch")]


def build(stage: int, reduction: str) -> tuple[nn.Sequential, ZeroEngine]:
    """Three layers in one bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    return model, ZeroEngine(
        model, load_config(stage=stage, gradient_reduction=reduction, units={"min_numel": 1 << 20})
    )


def loss_of(model: nn.Sequential) -> Tensor:
    """The sum of each layer's output; the gradient of each weight is 1."""
    with torch.no_grad():
        model(X)  # at stage 3 the root is there from its forward on
    return torch.stack([layer(X).sum() for layer in model]).sum()


@pytest.mark.parametrize(("stage", "reduction"), STAGES)
def test_an_assigned_gradient_beside_others(stage: int, reduction: str) -> None:
    model, engine = build(stage, reduction)
    with engine.forward_scope():
        loss_of(model).backward()
    with engine.no_sync(), engine.forward_scope():
        model[0](X).sum().backward()
    model[0].weight.grad = torch.full((3, 3), 5.0)
    assert engine.grad_norm().value == pytest.approx((9 * 25 + 9 + 9) ** 0.5)
    engine.close()


def add_to_others(model: nn.Module, engine: ZeroEngine) -> list[Tensor]:
    """Add ones to the other weights as the first gradient comes; that weight, once it has."""
    first: list[Tensor] = []
    weights = list(model.parameters())

    def add(parameter: Tensor) -> None:
        if not first:
            first.append(parameter)
            for weight in weights:
                if weight is not parameter:
                    engine.add_gradient(weight, torch.ones(3, 3))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(add)
    return first


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_stands_for_gradients_makes_room_for_more(stage: int) -> None:
    """In a later micro-batch, for what is added before a parameter's own gradient has come, and not for `grad()`."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    config = load_config(stage=stage, gradient_reduction="per_micro_batch", units={"min_numel": 1 << 20})
    engine, x = ZeroEngine(model, config, compute_dtype=torch.bfloat16), X.bfloat16()
    first = add_to_others(model, engine)
    for _ in range(2):
        with engine.forward_scope():
            with torch.no_grad():
                model(x)
            torch.stack([layer(x).sum() for layer in model]).sum().backward()
    with engine.forward_scope():
        with torch.no_grad():
            model(x)
        torch.autograd.grad(model[0](x).sum(), model[0].weight)
    found = {float(layer.weight.grad.float().mean()): layer.weight is first[0] for layer in model}  # type: ignore
    assert found == {2.0: True, 3.0: False}
    engine.close()


@pytest.mark.parametrize(("stage", "reduction"), STAGES)
def test_a_gradient_that_is_added_inside_of_a_backward(stage: int, reduction: str) -> None:
    model, engine = build(stage, reduction)
    add_to_others(model, engine)
    with engine.forward_scope():
        loss_of(model).backward()
    assert engine.grad_norm().value == pytest.approx((9 * 1 + 9 * 4 + 9 * 4) ** 0.5)
    engine.close()


def interrupted(engine: ZeroEngine, model: nn.Sequential) -> None:
    """A backward that raises in the middle."""
    handle = model[1].weight.register_hook(fail)
    with pytest.raises(ArithmeticError), engine.forward_scope():
        loss_of(model).backward()
    handle.remove()
    engine.reset()


def fail(gradient: Tensor) -> None:
    """Raise."""
    raise ArithmeticError


def reset_inside(engine: ZeroEngine, model: nn.Sequential) -> None:
    """A backward in which a script resets the engine."""
    calls: list[int] = []

    def reset(gradient: Tensor) -> None:
        if not calls:
            calls.append(1)
            engine.reset()

    handle = model[2].weight.register_hook(reset)
    with engine.forward_scope():
        loss_of(model).backward()
    handle.remove()
    for layer in model:
        layer.weight.grad = None


def gradients_alone(engine: ZeroEngine, model: nn.Sequential) -> None:
    """`torch.autograd.grad`, which adds to no `p.grad`."""
    with engine.forward_scope():
        loss = loss_of(model)
    found = torch.autograd.grad(loss, [layer.weight for layer in model])
    assert all(torch.equal(each, torch.ones(3, 3)) for each in found)


@pytest.mark.parametrize("between", [interrupted, reset_inside, gradients_alone])
@pytest.mark.parametrize(("stage", "reduction"), STAGES)
def test_nothing_of_it_reaches_the_next_backward(
    stage: int, reduction: str, between: Callable[[ZeroEngine, nn.Sequential], None]
) -> None:
    model, engine = build(stage, reduction)
    with engine.forward_scope():
        loss_of(model).backward()
    for layer in model:
        layer.weight.grad = None
    between(engine, model)
    with engine.forward_scope():
        loss_of(model).backward()
    assert engine.grad_norm().value == pytest.approx(27**0.5)
    engine.close()


def test_norms_of_an_engine_that_has_ended() -> None:
    model, engine = build(2, "per_step")
    loss_of(model).backward()
    engine.close(gather=True)
    for call in (engine.grad_norm, lambda: engine.clip_grad_norm_(1.0), lambda: engine.clip_grad_value_(1.0)):
        with pytest.raises(RuntimeError, match="this engine has ended"):
            call()
