"""Any number of backwards per step, in any mix, and whatever a script does to `p.grad` in between."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import DEFAULTS, SETTINGS, PlainTraining, Script, Setting, ShardedTraining, play
from tests.launcher import Launcher

ROWS = 2


def start(training: PlainTraining, lr: float = 0.05) -> tuple[Net, torch.optim.Optimizer]:
    """A sharded net with one optimizer attached."""
    model = net(depth=2)
    training.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    training.attach(optimizer)
    return model, optimizer


def one_backward(training: PlainTraining, model: nn.Module, step: int, *, sync: bool = True) -> None:
    loss = loss_of(model(training.data(step, ROWS, 6)))
    training.note(loss)
    training.backward(loss, sync=sync)


# --------------------------------------------------------------------------------------- backwards in any mix


def one_backward_per_step(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(4):
        one_backward(training, model, step)
        training.step()
        training.zero_grad()


def several_backwards_without_no_sync(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        for micro in range(3):
            one_backward(training, model, 10 * step + micro)
        training.step()
        training.zero_grad()


def no_sync_then_sync(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        for micro in range(3):
            one_backward(training, model, 10 * step + micro, sync=micro == 2)
        training.step()
        training.zero_grad()


def sync_then_no_sync(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        for micro in range(3):
            one_backward(training, model, 10 * step + micro, sync=micro == 0)
        training.step()
        training.zero_grad()


def all_under_no_sync(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        for micro in range(2):
            one_backward(training, model, 10 * step + micro, sync=False)
        training.step()
        training.zero_grad()


def changing_mix(training: PlainTraining) -> None:
    model, _ = start(training)
    mixes = [(True,), (False, True, False), (True, True), (False,), (False, True, True, False), (True,)]
    for step, mix in enumerate(mixes):
        for micro, sync in enumerate(mix):
            one_backward(training, model, 10 * step + micro, sync=sync)
        training.step()
        training.zero_grad()


def steps_without_zero_grad(training: PlainTraining) -> None:
    """Gradients pile up from step to step, as in plain torch."""
    model, _ = start(training)
    for step in range(4):
        one_backward(training, model, 2 * step, sync=step % 2 == 0)
        one_backward(training, model, 2 * step + 1)
        training.step()
        if step == 2:
            training.zero_grad()


def zero_grad_between_no_sync_and_sync(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        one_backward(training, model, 3 * step, sync=False)
        training.zero_grad()
        one_backward(training, model, 3 * step + 1, sync=False)
        one_backward(training, model, 3 * step + 2)
        training.step()
        training.zero_grad()


def module_zero_grad(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        one_backward(training, model, step)
        training.step()
        model.zero_grad()


def backward_twice_through_one_forward(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        loss = loss_of(model(training.data(step, ROWS, 6)))
        training.backward(loss, retain_graph=True, sync=step != 1)
        training.backward(loss * 0.5)
        training.step()
        training.zero_grad()


def two_losses_from_one_forward(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        output = model(training.data(step, ROWS, 6))
        training.backward(loss_of(output[:, :1]), retain_graph=True)
        training.backward(output[:, 1:].square().sum())
        training.step()
        training.zero_grad()


def two_forwards_then_two_backwards(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        first, second = model(training.data(2 * step, ROWS, 6)), model(training.data(2 * step + 1, ROWS, 6))
        training.backward(loss_of(first), sync=step == 0)
        training.backward(loss_of(second))
        training.step()
        training.zero_grad()


def two_forwards_one_backward(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        first, second = model(training.data(2 * step, ROWS, 6)), model(training.data(2 * step + 1, ROWS, 6))
        training.backward(loss_of(first) + loss_of(first * second))
        training.step()
        training.zero_grad()


def forward_without_backward_in_between(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        output = model(training.data(step, ROWS, 6))
        training.note(model(training.data(50 + step, ROWS, 6)))
        training.backward(loss_of(output))
        training.note(model(training.data(60 + step, ROWS, 6)))
        training.step()
        training.zero_grad()


def gradients_by_autograd_grad(training: PlainTraining) -> None:
    """`autograd.grad` with respect to parameters neither uses nor spoils what `backward` has summed."""
    model, _ = start(training)
    for step in range(3):
        one_backward(training, model, 3 * step)
        found = torch.autograd.grad(
            loss_of(model(training.data(3 * step + 1, ROWS, 6))), [model.scale, model.head.weight]
        )
        training.note(*found)
        one_backward(training, model, 3 * step + 2)
        training.note(*torch.autograd.grad(loss_of(model(training.data(90, ROWS, 6))), [model.blocks[0].up.weight]))
        training.step()
        training.zero_grad()


def gradient_of_the_input(training: PlainTraining) -> None:
    """A gradient penalty: second derivatives with respect to parameters."""
    model, _ = start(training)
    for step in range(3):
        x = training.data(step, ROWS, 6).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        training.note(slope)
        training.backward(loss_of(output) + slope.square().sum())
        training.step()
        training.zero_grad()


def backward_to_some_inputs_only(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        loss = loss_of(model(training.data(step, ROWS, 6)))
        training.backward(loss, inputs=[model.head.weight, model.blocks[1].up.weight])
        training.step()
        training.zero_grad()


def first_no_sync_late(training: PlainTraining, with_what: str) -> None:
    """Reduced gradients wait, and then for the first time some of this rank have to wait, too."""
    model, _ = start(training)
    own = training.own.no_sync if isinstance(training, ShardedTraining) else nullcontext
    for step in range(3):
        one_backward(training, model, step)
        if step == 1:
            loss = loss_of(model(training.data(20, ROWS, 6)))
            if with_what == "nothing":
                with own():
                    training.note(*torch.autograd.grad(loss, [model.head.weight]))
            elif with_what == "some":
                training.backward(loss, inputs=[model.head.weight], sync=False)
            else:
                training.backward(loss, sync=False)
                one_backward(training, model, 21, sync=with_what == "all")
        training.note(*training.gradients())
        training.step()
        training.zero_grad()


def first_no_sync_with_nothing(training: PlainTraining) -> None:
    first_no_sync_late(training, "nothing")


def first_no_sync_with_some(training: PlainTraining) -> None:
    first_no_sync_late(training, "some")


def first_no_sync_with_all(training: PlainTraining) -> None:
    first_no_sync_late(training, "all")


def first_no_sync_with_two(training: PlainTraining) -> None:
    first_no_sync_late(training, "two")


EXACT: list[Script] = [
    one_backward_per_step,
    several_backwards_without_no_sync,
    no_sync_then_sync,
    sync_then_no_sync,
    all_under_no_sync,
    changing_mix,
    steps_without_zero_grad,
    zero_grad_between_no_sync_and_sync,
    module_zero_grad,
    backward_twice_through_one_forward,
    two_losses_from_one_forward,
    two_forwards_then_two_backwards,
    two_forwards_one_backward,
    forward_without_backward_in_between,
    gradients_by_autograd_grad,
    gradient_of_the_input,
    backward_to_some_inputs_only,
    first_no_sync_with_nothing,
    first_no_sync_with_some,
    first_no_sync_with_all,
    first_no_sync_with_two,
]


ONE_BACKWARD = {
    one_backward_per_step,
    module_zero_grad,
    two_forwards_one_backward,
    gradient_of_the_input,
    backward_to_some_inputs_only,
}
"""Scripts of one backward per step, in which there is one order of summation."""


@pytest.mark.parametrize("script", EXACT, ids=lambda script: script.__name__)
def test_backwards_in_any_mix_equal_plain_torch(ranks: Launcher, script: Script) -> None:
    for wrong in ranks(2)(play, script, DEFAULTS if script in ONE_BACKWARD else SETTINGS):
        assert not wrong


@pytest.mark.parametrize("world", [1, 3])
def test_other_world_sizes(ranks: Launcher, world: int) -> None:
    for script in (changing_mix, steps_without_zero_grad):
        for wrong in ranks(world)(play, script):
            assert not wrong, script.__name__


# ---------------------------------------------------------------------------- what a script does to `p.grad`


def zero_grad_in_place(training: PlainTraining) -> None:
    """A gradient of zeros is not None: momentum and decay go on."""
    model, _ = start(training)
    model.head.bias.requires_grad_(True)
    for step in range(4):
        one_backward(training, model, 2 * step, sync=step != 1)
        one_backward(training, model, 2 * step + 1)
        training.note([p.grad is None for p in model.parameters()])
        training.step()
        training.zero_grad(set_to_none=False)
        training.note([p.grad is None for p in model.parameters()])
        if step == 1:
            training.step()


def zero_grad_in_place_then_unused(training: PlainTraining) -> None:
    model, _ = start(training)
    one_backward(training, model, 0)
    training.step()
    training.zero_grad(set_to_none=False)
    for step in range(1, 3):
        training.backward(loss_of(model.head(training.data(step, ROWS, 6))))
        training.step()
        training.zero_grad(set_to_none=False)


def zero_grad_in_place_before_the_sync(training: PlainTraining) -> None:
    """A sum that is averaged already, and one that is not yet, are cleared alike; other parameters have only one."""
    model, _ = start(training)
    for step in range(3):
        one_backward(training, model, 4 * step)
        training.backward(loss_of(model.head(training.data(4 * step + 1, ROWS, 6))), sync=False)
        if step:
            training.zero_grad(set_to_none=False)
        one_backward(training, model, 4 * step + 2, sync=step != 1)
        training.step()
        training.zero_grad()


def one_gradient_removed(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(4):
        one_backward(training, model, 2 * step, sync=step < 2)
        if step % 2:
            training.assign(model.blocks[1].up.weight, None)
            training.assign(model.scale, None)
        one_backward(training, model, 2 * step + 1)
        if step == 2:
            training.assign(model.head.bias, None)
        training.step()
        training.zero_grad()


def one_gradient_assigned(training: PlainTraining) -> None:
    """Assigned gradients are the same on all ranks, as for DDP."""
    model, _ = start(training)
    for step in range(4):
        one_backward(training, model, 2 * step, sync=step < 2)
        if step % 2:
            training.assign(model.blocks[1].up.weight, torch.full_like(model.blocks[1].up.weight, 0.25))
            training.assign(model.scale, torch.tensor(0.5))
        one_backward(training, model, 2 * step + 1, sync=step != 3)
        if step == 2:
            training.assign(model.head.bias, torch.arange(3.0))
        training.step()
        training.zero_grad()


def gradients_assigned_without_backward(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        for number, p in enumerate(model.parameters()):
            if number % 3 != step:
                p.grad = torch.full(p.shape, 0.1 * number)
        training.step()
        training.zero_grad()


HANDLED: list[Script] = [
    zero_grad_in_place,
    zero_grad_in_place_then_unused,
    zero_grad_in_place_before_the_sync,
    one_gradient_removed,
    one_gradient_assigned,
    gradients_assigned_without_backward,
]


@pytest.mark.parametrize("script", HANDLED, ids=lambda script: script.__name__)
def test_gradients_removed_zeroed_or_assigned(ranks: Launcher, script: Script) -> None:
    for wrong in ranks(2)(play, script):
        assert not wrong


def edits_in_place(training: PlainTraining) -> None:
    model, _ = start(training)
    for step in range(3):
        one_backward(training, model, 2 * step)
        one_backward(training, model, 2 * step + 1)
        training.settle()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5).add_(0.01)
        training.step()
        training.zero_grad()


def test_gradients_edited_in_place_at_stage_0(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, edits_in_place, [Setting(0, "per_step"), Setting(0, "per_micro_batch")]):
        assert not wrong


def edit_of_a_partial_sum() -> str:
    """At stage 0 too, while a part of the gradient is not averaged yet."""
    training = ShardedTraining(Setting(0, "per_step"))
    model, optimizer = start(training)
    one_backward(training, model, 0)
    one_backward(training, model, 1, sync=False)
    gradient = model.scale.grad
    assert gradient is not None
    try:
        gradient.mul_(0.5)
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "silent"


def test_a_partial_sum_cannot_be_edited(ranks: Launcher) -> None:
    for message in ranks(2)(edit_of_a_partial_sum):
        assert "'scale'" in message


def edit_is_refused(stage: int, name: str, edit: str) -> str:
    """The message of the error that an in-place edit of `name`'s gradient leads to, or 'silent'."""
    training = ShardedTraining(Setting(stage, "per_step" if stage == 1 else "per_micro_batch"))
    model, optimizer = start(training)
    one_backward(training, model, 0)
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    try:
        if edit == "add_":
            gradient.add_(0.5)
        elif edit == "fill_":
            gradient.fill_(0.5)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "silent"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_edited_in_place_elsewhere_are_an_error(ranks: Launcher, stage: int) -> None:
    """A gradient that is not whole cannot be edited: no edit is lost, or taken for a zero, in silence."""
    for name in ("head.weight", "scale"):
        for edit in ("add_", "fill_", "clip"):
            for message in ranks(2)(edit_is_refused, stage, name, edit):
                assert message != "silent", (name, edit)
