"""Fused optimizers as optimizers: against torch's, with low precision, groups, closures, states from and to torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_strategy.optim import (
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLamb,
    FusedLion,
    FusedOptimizer,
    FusedSGD,
)

Make = Callable[[Any], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "adam": (lambda p: FusedAdam(p, 0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    "adamw": (lambda p: FusedAdamW(p, 0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    "maximize": (lambda p: FusedAdamW(p, 0.01, maximize=True), lambda p: torch.optim.AdamW(p, 0.01, maximize=True)),
    "adagrad": (
        lambda p: FusedAdagrad(p, 0.1, 0.01, 0.1, 0.5),
        lambda p: torch.optim.Adagrad(p, 0.1, 0.01, 0.1, 0.5),
    ),
    "sgd": (lambda p: FusedSGD(p, 0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    "momentum": (
        lambda p: FusedSGD(p, 0.1, 0.9, 0.2, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.2, weight_decay=0.1),
    ),
    "nesterov": (
        lambda p: FusedSGD(p, 0.1, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
    ),
}
ALL: dict[str, Make] = {
    **{name: ours for name, (ours, _) in PAIRS.items()},
    "lion": lambda p: FusedLion(p, 0.01, weight_decay=0.1),
    "lamb": lambda p: FusedLamb(p, 0.01),
}
CLASSES: list[type[FusedOptimizer]] = [FusedAdam, FusedAdamW, FusedLion, FusedAdagrad, FusedSGD, FusedLamb]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(37, 5), (11,), (), (0, 3)]
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    image = torch.randn(4, 3, 2, 5, generator=generator).to(memory_format=torch.channels_last).to(dtype)
    return [*made, nn.Parameter(image)]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for index, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if index == 1 and step % 2 else gradient
        optimizer.step()


@pytest.mark.parametrize("name", PAIRS)
def test_it_follows_torch(name: str) -> None:
    ours, theirs = PAIRS[name]
    a, b, wide = parameters(), parameters(), parameters(torch.float64)
    for make, params in ((ours, a), (theirs, b), (theirs, wide)):
        train(make(params), params, 20)
    for x, y, exact in zip(a, b, wide, strict=True):
        error, reference = (float((t.detach().double() - exact.detach()).abs().sum()) for t in (x, y))
        assert error <= 2 * reference + 1e-7 * x.numel()
        assert x.stride() == y.stride()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("into_torch", [False, True])
def test_states_go_from_and_to_torch(name: str, into_torch: bool) -> None:
    first, second = PAIRS[name] if into_torch else PAIRS[name][::-1]
    a, expected = parameters(), parameters()
    start, alone = first(a), first(expected)
    train(start, a, 3)
    train(alone, expected, 5)
    other = second(a)
    other.load_state_dict(copy.deepcopy(start.state_dict()))
    train(other, a, 2, first=3)
    for x, y in zip(a, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_groups_and_pieces_of_a_step_do_not_matter(name: str) -> None:
    a, b = parameters(), parameters()
    groups = [{"params": b[:2]}, {"params": b[2:]}]
    train(ALL[name](a), a, 5)
    train(ALL[name](groups), b, 5)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_a_master_weight(name: str, dtype: torch.dtype) -> None:
    low = parameters(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in low]
    a, b = ALL[name](low), ALL[name](wide)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(low, wide, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(low, wide, strict=True):
        assert torch.equal(a.state[p]["master"], q)
        assert torch.equal(p, q.to(dtype))
    again = ALL[name](low)
    again.load_state_dict(a.state_dict())
    for p in low:
        for key, value in a.state[p].items():
            assert again.state[p][key].dtype == value.dtype and torch.equal(again.state[p][key], value)


def test_bfloat16_moments_take_half_the_memory() -> None:
    params = parameters()
    optimizer = FusedAdamW(params, moment_dtype="bfloat16")
    train(optimizer, params, 3)
    for p in params:
        assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == torch.bfloat16
    wide = parameters()
    train(FusedAdamW(wide), wide, 3)
    for p, q in zip(params, wide, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_scale_is_part_of_the_step(name: str) -> None:
    a, b = parameters(), parameters()
    ours, scaled = ALL[name](a), ALL[name](b)
    for p, q in zip(a, b, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.full_like(q, 8.0)
    ours.step()
    assert isinstance(scaled, FusedOptimizer)
    scaled.step(grad_scale=0.125)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_closure_and_a_scheduler() -> None:
    model = nn.Linear(3, 1)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(float(optimizer.step(closure)))
        scheduler.step()
    assert losses[2] < losses[1] < losses[0] and optimizer.param_groups[0]["lr"] == 0.1 / 8


def test_a_backward_through_old_values_is_an_error() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([p], lr=0.1)
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", CLASSES)
def test_bad_arguments_are_named(kind: type[Any]) -> None:
    good = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="lr must be at least 0, not -1"):
        kind(good, lr=-1)
    with pytest.raises(ValueError, match="weight_decay must be at least 0"):
        kind(good, weight_decay=-0.1)
    with pytest.raises(TypeError, match=r"parameter 1 of group 0 is torch.float64"):
        kind([*good, nn.Parameter(torch.ones(2).double())])
    with pytest.raises(ValueError, match="empty parameter list"):
        kind([])
    with pytest.raises(TypeError, match="grad_scale must be a number, not Tensor"):
        kind(good).step(grad_scale=torch.ones(1))


def test_options_of_the_namesakes_are_checked() -> None:
    good = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"betas\[1\] must be in \[0, 1\), not 1.0"):
        FusedAdamW(good, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        FusedSGD(good, nesterov=True)
    with pytest.raises(ValueError, match="moment_dtype must be 'float32' or 'bfloat16', not 'float16'"):
        FusedAdam(good, moment_dtype="float16")
    optimizer = FusedAdamW(good)
    optimizer.param_groups[0]["amsgrad"] = True
    good[0].grad = torch.ones(2)
    with pytest.raises(ValueError, match="FusedAdamW does not support amsgrad=True"):
        optimizer.step()


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = FusedAdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        optimizer.step()


def test_a_transposed_gradient_meets_its_elements() -> None:
    a, b = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    gradient = torch.arange(12.0).view(4, 3).t()
    a.grad, b.grad = gradient, gradient.contiguous()
    for p in (a, b):
        FusedSGD([p], lr=0.1).step()
    assert torch.equal(a, b)
