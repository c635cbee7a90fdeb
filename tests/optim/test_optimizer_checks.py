"""Optimizer classes that nobody has declared: what a trial on a small matrix finds out, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, PlainTraining, play
from tests.launcher import Launcher
from tests.optim.test_optimizers import train
from zero_strategy.optim.optimizer_checks import check_elementwise, why_not_elementwise

Rule = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


class Own(Optimizer):
    """Moves every parameter by what `rule` says of it, its gradient and its state."""

    rule: Rule

    def __init__(self, params: Any, lr: float | Tensor = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.log: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.log.append(len(self.log))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(type(self).rule(p, p.grad, self.state[p]) * group["lr"])


def own(rule: Rule) -> type[Own]:
    return type(rule.__name__, (Own,), {"rule": staticmethod(rule)})


def plain_descent(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient


def sign_of_momentum(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    momentum = state.setdefault("momentum", torch.zeros_like(p))
    return momentum.mul_(0.9).add_(gradient, alpha=0.1).sign() + 0.01 * p


def bias_correction(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    state["step"] = state.get("step", 0) + 1
    square = state.setdefault("square", torch.zeros_like(p))
    square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    return gradient / ((square / (1 - 0.99 ** state["step"])).sqrt() + 1e-8)


def decayed(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient + 0.1 * p * torch.ones_like(p)


ELEMENTWISE = [plain_descent, sign_of_momentum, bias_correction, decayed]


def gradient_normalised(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient / gradient.norm()


def trust_ratio(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient.sign() * p.norm() / gradient.sign().norm()


def centred(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient - gradient.mean(dim=-1, keepdim=True)


def matrices_otherwise(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient + 0.1 * p if p.ndim >= 2 else gradient


def factored_if_large(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """As Adafactors do it."""
    return factored(p, gradient, state) if min(p.shape) >= 128 else gradient / gradient.abs()


def orthogonal(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    if p.ndim < 2:
        return gradient
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    return left @ right


def factored(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    square = gradient.square()
    rows = square.mean(dim=-1, keepdim=True)
    return gradient / (rows * square.mean(dim=0, keepdim=True) / rows.mean()).sqrt() if p.ndim == 2 else gradient


COUPLED = [gradient_normalised, trust_ratio, centred, matrices_otherwise, orthogonal, factored, factored_if_large]


def reason(rule: Rule, **options: Any) -> str | None:
    return why_not_elementwise(own(rule)(net().parameters(), **options))


@pytest.mark.parametrize("rule", ELEMENTWISE)
def test_what_treats_every_element_by_itself_may_run(rule: Rule) -> None:
    assert reason(rule) is None


@pytest.mark.parametrize("rule", COUPLED)
def test_what_needs_more_is_found_out(rule: Rule) -> None:
    found = reason(rule)
    assert found is not None and "in pieces" in found


@pytest.mark.parametrize("lr", [0.0, 1e-8])
def test_a_learning_rate_of_nothing_hides_nothing(lr: float) -> None:
    """As after a scheduler has begun to warm up."""
    assert all(reason(rule, lr=lr) is not None for rule in COUPLED)
    assert all(reason(rule, lr=lr) is None for rule in ELEMENTWISE)
    assert reason(plain_descent, lr=torch.tensor(lr)) is None


def idle(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return torch.zeros_like(p)


def noisy(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient + torch.randn_like(p)


def failing(p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    raise KeyError("exp_avg")


def test_noise_and_errors_are_told() -> None:
    assert "draws random numbers" in str(reason(noisy))
    assert "KeyError: 'exp_avg'" in str(reason(failing))
    assert "changed no element" in str(reason(idle))


class ByClosure(Own):
    """Evaluates the loss."""

    rule = staticmethod(plain_descent)

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class NormOfAll(Own):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / total, alpha=group["lr"])


class StateOfItsConstructor(Own):
    """Has a state before the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / self.state[p]["sum"].addcmul_(p.grad, p.grad).sqrt(), alpha=group["lr"])


def test_steps_of_every_kind() -> None:
    parameters = list(net().parameters())
    assert "closure" in str(why_not_elementwise(ByClosure(parameters)))
    assert "in pieces" in str(why_not_elementwise(NormOfAll(parameters)))
    assert why_not_elementwise(StateOfItsConstructor(parameters)) is None


class CoupledInOneGroup(Own):
    """Normalises where a group says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() if group["normalise"] else 1.0), alpha=group["lr"])


def test_every_group_is_tried_with_its_own_options() -> None:
    first, *rest = net().parameters()
    groups = [{"params": rest}, {"params": [first], "normalise": True}]
    assert why_not_elementwise(CoupledInOneGroup(groups, normalise=False)) is not None
    assert why_not_elementwise(CoupledInOneGroup([first, *rest], normalise=False)) is None


def test_nothing_of_the_users_is_touched() -> None:
    model = net()
    optimizer = own(sign_of_momentum)(model.parameters())
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it replaces `step` of the object
    loss_of(model(torch.ones(2, 6))).backward()
    before = [p.detach().clone() for p in model.parameters()]
    state, log = torch.get_rng_state(), list(optimizer.log)
    assert why_not_elementwise(optimizer) is None
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state) and not calls and optimizer.log == log and not optimizer.state


def trained(training: PlainTraining, rule: Rule) -> None:
    train(training, own(rule))


@pytest.mark.parametrize("rule", ELEMENTWISE)
def test_it_trains_at_every_stage_as_one_process_would(ranks: Launcher, rule: Rule) -> None:
    for wrong in ranks(2)(play, partial(trained, rule=rule), DEFAULTS, tolerance=1e-6):
        assert not wrong


class OfFewBits(torch.optim.AdamW):
    """Says of its state what bitsandbytes' optimizers of 8 bits say, which keep 32 where a trial looks."""

    def __init__(self, params: Any, bits: int) -> None:
        super().__init__(params)
        self.args = SimpleNamespace(optim_bits=bits)


def test_states_in_blocks_are_refused_whatever_the_trial_finds() -> None:
    assert why_not_elementwise(OfFewBits(net().parameters(), 8)) is None
    for declared in ((), ("OfFewBits",)):
        with pytest.raises(TypeError, match=r"of 8 bits, with a scale for each block.*matrix_optimizers=\['OfFewBits'"):
            check_elementwise(OfFewBits(net().parameters(), 8), declared)
        with pytest.raises(TypeError, match=r"with the setting optimizer: \{state_bits: 8\}"):
            check_elementwise(OfFewBits(net().parameters(), 8), declared)
    check_elementwise(OfFewBits(net().parameters(), 8), whole=True)
    check_elementwise(OfFewBits(net().parameters(), 32))
