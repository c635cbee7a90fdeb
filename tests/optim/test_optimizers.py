"""Every elementwise optimizer, made before or after the engine, with groups, closures, schedulers, and by twos."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, SETTINGS, PlainTraining, Script, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

Make = Callable[[Iterable[Any]], Optimizer]


def one_step(training: PlainTraining, model: nn.Module, step: int) -> None:
    loss = loss_of(model(training.data(step, 2, 6)))
    training.note(loss)
    training.backward(loss)


def train(training: PlainTraining, make: Make, steps: int = 3, unused: bool = True) -> None:
    model = net()
    model.spare = nn.Parameter(torch.ones(3))
    training.shard(model)
    training.attach(make(model.parameters()))
    for step in range(steps):
        one_step(training, model, step)
        training.step()
        training.zero_grad()


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD nesterov maximize": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "AdamW lr tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.05)}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 1.0}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.05}),
}
FUSED = ("SGD momentum", "Adam", "Adam amsgrad", "AdamW", "AdamW lr tensor", "Adagrad")


def every_optimizer(training: PlainTraining, name: str, foreach: bool) -> None:
    cls, options = OPTIMIZERS[name]
    train(training, partial(cls, foreach=foreach, **options))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_of_torch(ranks: Launcher, name: str) -> None:
    """Each at a stage that divides nothing and at two that do, and with `foreach`, whose lists are pieces, at one."""
    others = (1, 2) if list(OPTIMIZERS).index(name) % 2 else (2, 1)
    stages: dict[bool, tuple[int, ...]] = {False: (0, others[0], 3), True: (others[1],)}
    for foreach in (False, True) if name != "AdamW lr tensor" else (False,):
        script, chosen = partial(every_optimizer, name=name, foreach=foreach), [DEFAULTS[n] for n in stages[foreach]]
        # Kernels of pow and sqrt round differently in the vector body and the tail of a tensor.
        for wrong in ranks(2)(play, script, chosen, tolerance=2e-7):
            assert not wrong, (name, foreach)


def every_fused_optimizer(training: PlainTraining, name: str) -> None:
    cls, options = OPTIMIZERS[name]
    train(training, partial(cls, fused=True, **options))


def test_fused_optimizers(ranks: Launcher) -> None:
    for name in FUSED:
        for wrong in ranks(2)(play, partial(every_fused_optimizer, name=name), DEFAULTS, tolerance=1e-6):
            assert not wrong, name


# ------------------------------------------------------------------------------------- when and with what state


def made_before_the_engine(training: PlainTraining) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    training.shard(model)
    training.attach(optimizer)
    for step in range(3):
        one_step(training, model, step)
        training.step()
        training.zero_grad()


def with_existing_state(training: PlainTraining) -> None:
    """Trained alone on the same data first; then sharded with its state."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False, amsgrad=True)
    for step in range(2):
        loss_of(model(torch.linspace(-1, 1, 12 * (step + 1)).view(-1, 6))).backward()
        optimizer.step()
        optimizer.zero_grad()
    training.shard(model)
    training.attach(optimizer)
    for step in range(3):
        one_step(training, model, step)
        training.step()
        training.zero_grad()


def groups_and_later_groups(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors[:4], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, foreach=False)
    training.attach(optimizer)
    for p in [*vectors[4:], model.scale]:
        p.requires_grad_(False)
    for step in range(4):
        if step == 2:
            for p in [*vectors[4:], model.scale]:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": [*vectors[4:], model.scale], "lr": 0.2})
        one_step(training, model, step)
        training.step()
        training.zero_grad()
        training.note([[p.shape for p in group["params"]] for group in optimizer.param_groups])


def schedulers(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    training.attach(optimizer)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    cycle = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=True)
    for step in range(5):
        one_step(training, model, step)
        training.step()
        training.zero_grad()
        warm.step()
        cycle.step()
        training.note(optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"])


def closures(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    training.attach(optimizer)
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(training.data(step, 2, 6)))
            training.backward(loss)
            training.clip(1.0)
            return loss

        training.note(optimizer.step(closure) if step % 2 else optimizer.step(closure=closure))


STARTS: list[Script] = [made_before_the_engine, with_existing_state, groups_and_later_groups, schedulers, closures]


@pytest.mark.parametrize("script", STARTS, ids=lambda script: script.__name__)
def test_optimizers_in_any_use(ranks: Launcher, script: Script) -> None:
    # The coefficient of the clip is a float64 in the engine and a float32 in torch.
    for wrong in ranks(2)(play, script, tolerance=1e-6 if script is closures else 0.0):
        assert not wrong


# --------------------------------------------------------------------------------------------- several of them


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(depth=2, seed=1), net(depth=2, seed=2)
        self.generator.head = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


def adversaries(training: PlainTraining, toggle: bool, through_root: bool) -> None:
    """The generator's backward also reaches the critic: its gradients are dropped by `zero_grad`."""
    model = Adversaries()
    training.shard(model)
    players = torch.optim.AdamW(model.generator.parameters(), lr=0.05, foreach=False)
    judges = torch.optim.SGD(model.critic.parameters(), lr=0.05, momentum=0.9, foreach=False)
    training.attach(players, judges)

    def only(part: nn.Module | None) -> None:
        if toggle:
            for p in model.parameters():
                p.requires_grad_(part is None or any(p is q for q in part.parameters()))

    for step in range(4):
        x, truth = training.data(2 * step, 2, 6), training.data(2 * step + 1, 2, 6)
        only(model.generator)
        score = model(x) if through_root else model.critic(model.generator(x))
        loss = loss_of(score)
        training.note(loss)
        training.backward(loss)
        training.note(training.clip(0.5, optimizer=players))
        training.step(players)
        training.zero_grad(players)
        only(model.critic)
        training.zero_grad(judges)
        with torch.no_grad():
            made = model.generator(x)
        loss = loss_of(model.critic(made)) - loss_of(model.critic(truth))
        training.note(loss)
        training.backward(loss, sync=step != 1)
        training.clip_value(0.3, optimizer=judges)
        training.note([gradient is None for gradient in training.gradients()])
        training.step(judges)
        training.zero_grad(judges)
        only(None)


@pytest.mark.parametrize("toggle", [False, True])
def test_two_optimizers_in_turn(ranks: Launcher, toggle: bool) -> None:
    # Without the root's forward only at the stages that divide something, each in its own order of summation.
    for through_root, settings in ((True, SETTINGS), (False, DEFAULTS[1:])):
        script = partial(adversaries, toggle=toggle, through_root=through_root)
        for wrong in ranks(2)(play, script, settings, tolerance=1e-6):
            assert not wrong, through_root


def one_steps_more_often(training: PlainTraining) -> None:
    """Gradients of the other optimizer stay until its own step."""
    model = net()
    training.shard(model)
    often = torch.optim.SGD(model.blocks.parameters(), lr=0.05, foreach=False)
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    seldom = torch.optim.AdamW(rest, lr=0.05, foreach=False)
    training.attach(often, seldom)
    for step in range(4):
        one_step(training, model, step)
        training.step(often)
        training.zero_grad(often)
        if step % 2:
            training.step(seldom)
            training.zero_grad(seldom)


def test_gradients_stay_for_the_optimizer_that_steps_later(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, one_steps_more_often):
        assert not wrong


# ---------------------------------------------------------------------------------------------------- clipping


def clipping(training: PlainTraining, norm_type: float | str) -> None:
    model = net()
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        one_step(training, model, step)
        training.note(training.clip([100.0, 0.5, 0.01][step], norm_type))
        training.step()
        training.zero_grad()
        one_step(training, model, 10 + step)
        training.clip_value(0.05 * step)
        training.step()
        training.zero_grad()


WORLDS: dict[float | str, tuple[int, ...]] = {1.0: (3,), 2.0: (2, 3), 3.5: (2,), float("inf"): (3,), "inf": (2,)}
"""Where each norm is tried: three ranks divide unevenly."""


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf"), "inf"])
def test_clipping_by_every_norm_and_by_value(ranks: Launcher, norm_type: float | str) -> None:
    for world in WORLDS[norm_type]:
        for wrong in ranks(world)(play, partial(clipping, norm_type=norm_type), DEFAULTS, tolerance=1e-6):
            assert not wrong, world


def nonfinite_norms(stage: int) -> dict[str, Any]:
    """Rank 1 alone has a bad value."""
    found: dict[str, Any] = {}
    for bad in (float("nan"), float("inf")):
        training = ShardedTraining(Setting(stage, "per_step" if stage < 2 else "per_micro_batch"))
        model = net()
        training.shard(model)
        training.attach(torch.optim.SGD(model.parameters(), lr=0.05))
        loss = loss_of(model(training.data(0, 2, 6))) * (bad if training.rank else 1.0)
        loss.backward()
        for norm_type in (1.0, 2.0, float("inf")):
            try:
                training.own.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
                found[f"{bad} {norm_type}"] = "no error"
            except RuntimeError as error:
                found[f"{bad} {norm_type}"] = str(error)
            norm = training.own.grad_norm(norm_type)
            found[f"{bad} {norm_type} finite"] = norm.finite
    for name, call in {
        "max_norm": lambda: training.own.clip_grad_norm_(-1.0),
        "clip_value": lambda: training.own.clip_grad_value_(-1.0),
        "norm_type": lambda: training.own.clip_grad_norm_(1.0, 0.0),
    }.items():
        try:
            call()
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_norm_that_is_not_finite_is_a_flag_on_all_ranks(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(nonfinite_norms, stage):
        for key, value in found.items():
            if key.endswith("finite"):
                assert value is False, key
            elif key in ("max_norm", "clip_value", "norm_type"):
                assert key in value
            else:
                assert "gradient norm" in value, key


# ------------------------------------------------------------------------------------------ the whole state


def state_round_trip(stage: int, other: int) -> dict[str, Any]:
    """`optimizer_state_dict` of one engine goes into another and into a plain optimizer."""
    outcomes = []
    training = ShardedTraining(Setting(stage, "per_step" if stage < 2 else "per_micro_batch"))
    model = net()
    training.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    training.attach(optimizer)
    for step in range(2):
        one_step(training, model, step)
        training.step()
        training.zero_grad()
    weights, state = training.own.full_state_dict(), training.own.optimizer_state_dict(optimizer)
    for target in (training, ShardedTraining(Setting(other, "per_micro_batch"))):
        if target is not training:
            copied = net(seed=5)
            copied.load_state_dict(weights)
            target.shard(copied)
            target.attach(torch.optim.AdamW(copied.parameters(), lr=0.7, foreach=False))
        target.own.load_optimizer_state_dict(target.optimizers[0], state)
        for step in range(2):
            one_step(target, target.module, 5 + step)
            target.step()
            target.zero_grad()
        outcomes.append({k: v for k, v in target.outcome().items() if not k.startswith("note")})
        training.module.load_state_dict(weights)
    plain = net(seed=5)
    plain.load_state_dict(weights)
    torch.optim.AdamW(plain.parameters(), lr=0.7).load_state_dict(state)
    first, second = outcomes
    return {key: value for key, value in first.items() if not torch.equal(value, second[key])}


@pytest.mark.parametrize("stage, other", [(0, 3), (3, 1), (2, 0)])
def test_whole_optimizer_state_goes_from_stage_to_stage(ranks: Launcher, stage: int, other: int) -> None:
    for wrong in ranks(2)(state_round_trip, stage, other):
        assert not wrong


class FixedGroup(dict[str, Any]):
    """A param group whose parameters cannot be exchanged."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise KeyError("fixed")
        super().__setitem__(key, value)


def test_a_step_that_fails_while_groups_are_exchanged_leaves_gradients() -> None:
    model, plain = net(), net()
    halves = [list(model.blocks.parameters()), [*model.stem.parameters(), *model.head.parameters(), model.scale]]
    groups = [{"params": half} for half in halves]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    engine = ZeroEngine(model, load_config(stage=1))
    engine.attach(optimizer)
    x = torch.ones(2, 6)
    loss_of(model(x)).backward()
    optimizer.param_groups[1] = FixedGroup(optimizer.param_groups[1])
    with pytest.raises(KeyError, match="fixed"):
        optimizer.step()
    optimizer.param_groups[1] = dict(optimizer.param_groups[1])
    engine.reset()
    assert all(parameter.grad is not None for parameter in halves[1])
    optimizer.step()
    loss_of(plain(x)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(model.get_parameter(name), parameter, atol=1e-6), name
