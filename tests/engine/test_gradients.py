"""Any number of backwards per step, in any mix, and whatever a script does to `p.grad` in between."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.engine.nets import Net, loss_of, net
from tests.engine.twins import Script, Setting, ShardedTwin, Twin, play
from tests.launcher import Launcher

ROWS = 2


def start(twin: Twin, lr: float = 0.05) -> tuple[Net, torch.optim.Optimizer]:
    """A sharded net with one optimizer attached."""
    model = net()
    twin.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    twin.attach(optimizer)
    return model, optimizer


def one_backward(twin: Twin, model: nn.Module, step: int, *, sync: bool = True) -> None:
    loss = loss_of(model(twin.data(step, ROWS, 6)))
    twin.note(loss)
    twin.backward(loss, sync=sync)


# --------------------------------------------------------------------------------------- backwards in any mix


def one_backward_per_step(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(4):
        one_backward(twin, model, step)
        twin.step()
        twin.zero_grad()


def several_backwards_without_no_sync(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        for micro in range(3):
            one_backward(twin, model, 10 * step + micro)
        twin.step()
        twin.zero_grad()


def no_sync_then_sync(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        for micro in range(3):
            one_backward(twin, model, 10 * step + micro, sync=micro == 2)
        twin.step()
        twin.zero_grad()


def sync_then_no_sync(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        for micro in range(3):
            one_backward(twin, model, 10 * step + micro, sync=micro == 0)
        twin.step()
        twin.zero_grad()


def all_under_no_sync(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        for micro in range(2):
            one_backward(twin, model, 10 * step + micro, sync=False)
        twin.step()
        twin.zero_grad()


def changing_mix(twin: Twin) -> None:
    model, _ = start(twin)
    mixes = [(True,), (False, True, False), (True, True), (False,), (False, True, True, False), (True,)]
    for step, mix in enumerate(mixes):
        for micro, sync in enumerate(mix):
            one_backward(twin, model, 10 * step + micro, sync=sync)
        twin.step()
        twin.zero_grad()


def steps_without_zero_grad(twin: Twin) -> None:
    """Gradients pile up from step to step, as in plain torch."""
    model, _ = start(twin)
    for step in range(4):
        one_backward(twin, model, 2 * step, sync=step % 2 == 0)
        one_backward(twin, model, 2 * step + 1)
        twin.step()
        if step == 2:
            twin.zero_grad()


def zero_grad_between_no_sync_and_sync(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        one_backward(twin, model, 3 * step, sync=False)
        twin.zero_grad()
        one_backward(twin, model, 3 * step + 1, sync=False)
        one_backward(twin, model, 3 * step + 2)
        twin.step()
        twin.zero_grad()


def module_zero_grad(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        one_backward(twin, model, step)
        twin.step()
        model.zero_grad()


def backward_twice_through_one_forward(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        loss = loss_of(model(twin.data(step, ROWS, 6)))
        twin.backward(loss, retain_graph=True, sync=step != 1)
        twin.backward(loss * 0.5)
        twin.step()
        twin.zero_grad()


def two_losses_from_one_forward(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        output = model(twin.data(step, ROWS, 6))
        twin.backward(loss_of(output[:, :1]), retain_graph=True)
        twin.backward(output[:, 1:].square().sum())
        twin.step()
        twin.zero_grad()


def two_forwards_then_two_backwards(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        first, second = model(twin.data(2 * step, ROWS, 6)), model(twin.data(2 * step + 1, ROWS, 6))
        twin.backward(loss_of(first), sync=step == 0)
        twin.backward(loss_of(second))
        twin.step()
        twin.zero_grad()


def two_forwards_one_backward(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        first, second = model(twin.data(2 * step, ROWS, 6)), model(twin.data(2 * step + 1, ROWS, 6))
        twin.backward(loss_of(first) + loss_of(first * second))
        twin.step()
        twin.zero_grad()


def forward_without_backward_in_between(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        output = model(twin.data(step, ROWS, 6))
        twin.note(model(twin.data(50 + step, ROWS, 6)))
        twin.backward(loss_of(output))
        twin.note(model(twin.data(60 + step, ROWS, 6)))
        twin.step()
        twin.zero_grad()


def gradients_by_autograd_grad(twin: Twin) -> None:
    """`autograd.grad` with respect to parameters neither uses nor spoils what `backward` has summed."""
    model, _ = start(twin)
    for step in range(3):
        one_backward(twin, model, 3 * step)
        found = torch.autograd.grad(loss_of(model(twin.data(3 * step + 1, ROWS, 6))), [model.scale, model.head.weight])
        twin.note(*found)
        one_backward(twin, model, 3 * step + 2)
        twin.note(*torch.autograd.grad(loss_of(model(twin.data(90, ROWS, 6))), [model.blocks[0].up.weight]))
        twin.step()
        twin.zero_grad()


def gradient_of_the_input(twin: Twin) -> None:
    """A gradient penalty: second derivatives with respect to parameters."""
    model, _ = start(twin)
    for step in range(3):
        x = twin.data(step, ROWS, 6).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        twin.note(slope)
        twin.backward(loss_of(output) + slope.square().sum())
        twin.step()
        twin.zero_grad()


def backward_to_some_inputs_only(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        loss = loss_of(model(twin.data(step, ROWS, 6)))
        twin.backward(loss, inputs=[model.head.weight, model.blocks[1].up.weight])
        twin.step()
        twin.zero_grad()


def first_no_sync_late(twin: Twin, with_what: str) -> None:
    """Reduced gradients wait, and then for the first time some of this rank have to wait, too."""
    model, _ = start(twin)
    own = twin.own.no_sync if isinstance(twin, ShardedTwin) else nullcontext
    for step in range(3):
        one_backward(twin, model, step)
        if step == 1:
            loss = loss_of(model(twin.data(20, ROWS, 6)))
            if with_what == "nothing":
                with own():
                    twin.note(*torch.autograd.grad(loss, [model.head.weight]))
            elif with_what == "some":
                twin.backward(loss, inputs=[model.head.weight], sync=False)
            else:
                twin.backward(loss, sync=False)
                one_backward(twin, model, 21, sync=with_what == "all")
        twin.note(*twin.gradients())
        twin.step()
        twin.zero_grad()


def first_no_sync_with_nothing(twin: Twin) -> None:
    first_no_sync_late(twin, "nothing")


def first_no_sync_with_some(twin: Twin) -> None:
    first_no_sync_late(twin, "some")


def first_no_sync_with_all(twin: Twin) -> None:
    first_no_sync_late(twin, "all")


def first_no_sync_with_two(twin: Twin) -> None:
    first_no_sync_late(twin, "two")


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


@pytest.mark.parametrize("script", EXACT, ids=lambda script: script.__name__)
def test_backwards_in_any_mix_equal_plain_torch(ranks: Launcher, script: Script) -> None:
    for wrong in ranks(2)(play, script):
        assert not wrong


@pytest.mark.parametrize("world", [1, 3, 4])
def test_other_world_sizes(ranks: Launcher, world: int) -> None:
    for script in (changing_mix, steps_without_zero_grad):
        for wrong in ranks(world)(play, script):
            assert not wrong, script.__name__


# ---------------------------------------------------------------------------- what a script does to `p.grad`


def zero_grad_in_place(twin: Twin) -> None:
    """A gradient of zeros is not None: momentum and decay go on."""
    model, _ = start(twin)
    model.head.bias.requires_grad_(True)
    for step in range(4):
        one_backward(twin, model, 2 * step, sync=step != 1)
        one_backward(twin, model, 2 * step + 1)
        twin.note([p.grad is None for p in model.parameters()])
        twin.step()
        twin.zero_grad(set_to_none=False)
        twin.note([p.grad is None for p in model.parameters()])
        if step == 1:
            twin.step()


def zero_grad_in_place_then_unused(twin: Twin) -> None:
    model, _ = start(twin)
    one_backward(twin, model, 0)
    twin.step()
    twin.zero_grad(set_to_none=False)
    for step in range(1, 3):
        twin.backward(loss_of(model.head(twin.data(step, ROWS, 6))))
        twin.step()
        twin.zero_grad(set_to_none=False)


def zero_grad_in_place_before_the_sync(twin: Twin) -> None:
    """A sum that is averaged already, and one that is not yet, are cleared alike; other parameters have only one."""
    model, _ = start(twin)
    for step in range(3):
        one_backward(twin, model, 4 * step)
        twin.backward(loss_of(model.head(twin.data(4 * step + 1, ROWS, 6))), sync=False)
        if step:
            twin.zero_grad(set_to_none=False)
        one_backward(twin, model, 4 * step + 2, sync=step != 1)
        twin.step()
        twin.zero_grad()


def one_gradient_removed(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(4):
        one_backward(twin, model, 2 * step, sync=step < 2)
        if step % 2:
            twin.assign(model.blocks[1].up.weight, None)
            twin.assign(model.scale, None)
        one_backward(twin, model, 2 * step + 1)
        if step == 2:
            twin.assign(model.head.bias, None)
        twin.step()
        twin.zero_grad()


def one_gradient_assigned(twin: Twin) -> None:
    """Assigned gradients are the same on all ranks, as for DDP."""
    model, _ = start(twin)
    for step in range(4):
        one_backward(twin, model, 2 * step, sync=step < 2)
        if step % 2:
            twin.assign(model.blocks[1].up.weight, torch.full_like(model.blocks[1].up.weight, 0.25))
            twin.assign(model.scale, torch.tensor(0.5))
        one_backward(twin, model, 2 * step + 1, sync=step != 3)
        if step == 2:
            twin.assign(model.head.bias, torch.arange(3.0))
        twin.step()
        twin.zero_grad()


def gradients_assigned_without_backward(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        for number, p in enumerate(model.parameters()):
            if number % 3 != step:
                p.grad = torch.full(p.shape, 0.1 * number)
        twin.step()
        twin.zero_grad()


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


def edits_in_place(twin: Twin) -> None:
    model, _ = start(twin)
    for step in range(3):
        one_backward(twin, model, 2 * step)
        one_backward(twin, model, 2 * step + 1)
        twin.settle()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5).add_(0.01)
        twin.step()
        twin.zero_grad()


def test_gradients_edited_in_place_at_stage_0(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, edits_in_place, [Setting(0, "per_step"), Setting(0, "per_micro_batch")]):
        assert not wrong


def edit_of_a_partial_sum() -> str:
    """At stage 0 too, while a part of the gradient is not averaged yet."""
    twin = ShardedTwin(Setting(0, "per_step"))
    model, optimizer = start(twin)
    one_backward(twin, model, 0)
    one_backward(twin, model, 1, sync=False)
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
    twin = ShardedTwin(Setting(stage, "per_step" if stage == 1 else "per_micro_batch"))
    model, optimizer = start(twin)
    one_backward(twin, model, 0)
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    try:
        if edit == "mul_":
            gradient.mul_(0.5)
        elif edit == "fill_":
            gradient.fill_(0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "silent"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_edited_in_place_elsewhere_are_an_error(ranks: Launcher, stage: int) -> None:
    """A gradient that is not whole cannot be edited: no edit is lost, or taken for a zero, in silence."""
    for name in ("head.weight", "scale"):
        for edit in ("mul_", "fill_", "clip"):
            for message in ranks(2)(edit_is_refused, stage, name, edit):
                assert message != "silent", (name, edit)
