"""Copies that autocast makes of sharded parameters: none is kept, and gradients are those of plain autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.nets import loss_of
from tests.launcher import Launcher
from zero_strategy.engine import ZeroEngine
from zero_strategy.runtime.torch_private import has_saved_tensors_hooks, is_compiled_in_place

WIDTH = 16


class Casts(TorchDispatchMode):
    """Memory of copies to bfloat16 of tensors with as many elements as one of these has.

    Args:
        numels: Of the matrices.
    """

    def __init__(self, numels: set[int]) -> None:
        super().__init__()
        self.numels = numels
        self.made: list[tuple[StorageWeakRef, int]] = []

    @property
    def alive(self) -> int:
        """Bytes of those that somebody holds."""
        return sum(nbytes for reference, nbytes in self.made if not reference.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func) and found.dtype == torch.bfloat16 and found.numel() in self.numels:
            self.made.append((StorageWeakRef(found.untyped_storage()), found.nbytes))
        return found


class Block(nn.Module):
    """Matrices by three kinds of products; a norm, whose weight autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.conv = nn.Conv1d(2, 2, 5, padding=2)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.tanh(self.up(self.norm(x))))
        h = self.conv(h.view(-1, 2, WIDTH)).reshape(x.shape)
        # One matrix twice: two copies.
        return x + h + (h @ self.matrix).relu() @ self.matrix


class Net(nn.Module):
    """Blocks around which the root has a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


OF_UNITS = {3 * WIDTH * WIDTH, WIDTH * WIDTH, 2 * 2 * 5}
BATCH = 8


def made(stage: int, **settings: Any) -> tuple[Net, ZeroEngine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Net()
    engine = ZeroEngine(module, {"stage": stage, "units": {"classes": ["Block"], "min_numel": 1}, **settings})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine.attach(optimizer)
    return module, engine, optimizer


@contextmanager
def casting() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        yield


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(stage: int, forward: Callable[[Net, Tensor], Tensor] = lambda module, x: module(x)) -> dict[str, Any]:
    module, engine, optimizer = made(stage)
    losses = []
    for step in range(3):
        with casting():
            loss = loss_of(forward(module, batch(step)).float())
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert not has_saved_tensors_hooks()
    return {"losses": losses, **engine.full_state_dict()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [
        key for key, value in one.items()
        if not (torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key])
    ]  # fmt: skip


def differences() -> list[str]:
    return equal(trained(3), trained(1))


def test_stage_three_trains_the_bits_of_stage_one(ranks: Launcher) -> None:
    assert ranks(2)(differences) == [[], []]


def memory(stage: int, **settings: Any) -> tuple[int, int]:
    """Bytes of all copies of units' matrices in a forward, and of those that live on at its end."""
    module, _, _ = made(stage, **settings)
    counting = Casts(OF_UNITS)
    with casting(), counting:
        output = module(batch(0))
    alive = counting.alive
    loss_of(output.float()).backward()
    return sum(nbytes for _, nbytes in counting.made), alive


def test_no_copy_lives_from_forward_to_backward(ranks: Launcher) -> None:
    for copied, alive in ranks(2)(memory, 3):
        assert copied == 3 * 2 * sum((3 * WIDTH * WIDTH, 3 * WIDTH * WIDTH, 2 * WIDTH * WIDTH, 20)) and alive == 0
    for copied, alive in ranks(2)(memory, 1):  # as in plain torch, which keeps a matrix's two copies
        assert alive == copied


def second_backward() -> list[str]:
    def gradients(stage: int) -> dict[str, Any]:
        module, engine, _ = made(stage)
        x = batch(0).requires_grad_()
        with casting():
            loss = loss_of(module(x).float())
        loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        return {"x": x.grad, "norm": engine.clip_grad_norm_(float("inf"))}

    return equal(gradients(3), gradients(1))


def test_a_second_backward_through_a_graph(ranks: Launcher) -> None:
    assert ranks(2)(second_backward) == [[], []]


def stepped_between() -> str:
    module, _, optimizer = made(3)
    with casting():
        loss = loss_of(module(batch(0)).float())
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_step_between_forward_and_backward_is_an_error_by_name(ranks: Launcher) -> None:
    for message in ranks(2)(stepped_between):
        assert "parameter 'blocks.2." in message and "has changed since the forward" in message


class InPlace(nn.Module):
    """Changes what autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(self.linear(x).float())
        return h.mul_(2.0) + x


def changed_in_place() -> str:
    module = nn.Sequential(InPlace(), nn.Linear(WIDTH, 2))
    ZeroEngine(module, {"stage": 3, "units": {"classes": ["InPlace"], "min_numel": 1}})
    with casting():
        loss = module(batch(0)).float().sum()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_tensor_that_is_changed_in_place_is_an_error_as_without_hooks(ranks: Launcher) -> None:
    for message in ranks(2)(changed_in_place):
        assert "has been modified by an inplace operation" in message


def with_hooks_of_the_user() -> tuple[int, list[str]]:
    packed = []

    def forward(module: Net, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor.shape)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return module(x)

    def on_cpu(module: Net, x: Tensor) -> Tensor:
        with save_on_cpu():
            return module(x)

    expected = trained(1)
    return len(packed), [*equal(trained(3, forward), expected), *equal(trained(3, on_cpu), expected)]


def test_hooks_of_the_user_are_asked_and_ours_are_not(ranks: Launcher) -> None:
    for _, wrong in ranks(2)(with_hooks_of_the_user):
        assert wrong == []


def raising() -> list[str]:
    module, _, optimizer = made(3)
    handle = module.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        try:
            with casting():
                module(batch(0))
        except ZeroDivisionError:
            assert not has_saved_tensors_hooks()
    handle.remove()
    optimizer.zero_grad()
    return equal(trained(3), trained(1))


def test_a_forward_that_raises_leaves_no_hooks(ranks: Launcher) -> None:
    assert ranks(2)(raising) == [[], []]


def penalty() -> list[str]:
    """A gradient of a gradient's norm."""

    def gradients(stage: int) -> dict[str, Any]:
        module, engine, _ = made(stage)
        x = batch(0).requires_grad_()
        with casting():
            (slope,) = torch.autograd.grad(loss_of(module(x).float()), x, create_graph=True)
        slope.square().sum().backward()
        assert x.grad is not None
        return {"x": x.grad, "norm": engine.clip_grad_norm_(float("inf"))}

    return equal(gradients(3), gradients(1))


def test_second_derivatives_are_those_of_stage_one(ranks: Launcher) -> None:
    assert ranks(2)(penalty) == [[], []]


def compiled_units() -> list[str]:
    def forward(module: Net, x: Tensor) -> Tensor:
        for block in module.blocks:
            if not is_compiled_in_place(block):
                block.compile(backend="aot_eager")
        found: Tensor = module(x)
        return found

    return equal(trained(3, forward), trained(1))


def test_compiled_units_train_the_bits_of_plain_ones(ranks: Launcher) -> None:
    assert ranks(2)(compiled_units) == [[], []]
