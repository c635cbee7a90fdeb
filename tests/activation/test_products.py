"""Kept products against plain torch: no write to their memory, by a unit or by what follows it, changes a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.activation.unit_nets import WIDTH, Layer, seeded
from zero_strategy.activation.products import KEPT_OPS, selective_contexts
from zero_strategy.runtime.torch_private import TorchDispatchMode, schema_of


class Ops(TorchDispatchMode):
    """Counts the products that run below it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = schema_of(func).name
        if name in KEPT_OPS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class WritesTo(torch.autograd.Function):
    """A product written into memory that another one was written into before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        first = torch.mm(x, weight)
        second = torch.mm(first, weight, out=torch.empty_like(first))
        return torch.mm(second, weight, out=first).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight.T @ weight.T @ weight.T, None


class Unit(nn.Module):
    """Two products; `use` does something to the first."""

    def __init__(self, use: Callable[[Unit, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use, self.left = use, Tensor()

    def forward(self, x: Tensor) -> Any:
        return self.use(self, self.first(x))


def in_place(unit: Unit, y: Tensor) -> Tensor:
    return torch.tanh(unit.second(F.relu_(y)))


def pieces_in_place(unit: Unit, y: Tensor) -> Tensor:
    left, right = y.unsafe_chunk(2, -1)
    return torch.tanh(unit.second(torch.cat([left.sigmoid_(), right.add_(left).tanh_()], -1)))


def split_in_place(unit: Unit, y: Tensor) -> Tensor:
    left, right = torch.unsafe_split_with_sizes(y, [3, WIDTH - 3], -1)
    return torch.tanh(unit.second(torch.cat([left.sigmoid_(), right.tanh_()], -1)))


def foreach_in_place(unit: Unit, y: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_mul_([y.detach()], 2.0)
    return torch.tanh(unit.second(torch.exp(y.clone())))


def without_autograd(unit: Unit, y: Tensor) -> Tensor:
    y.data.mul_(2)
    return torch.tanh(unit.second(torch.exp(y.clone())))


def into_a_buffer(unit: Unit, y: Tensor) -> Tensor:
    return torch.tanh(unit.second(WritesTo.apply(y, unit.second.weight.detach())))


def only_a_product(unit: Unit, y: Tensor) -> Tensor:
    return unit.second(torch.exp(y))


def two_results(unit: Unit, y: Tensor) -> Any:
    return torch.exp(y), y


def pieces(unit: Unit, y: Tensor) -> Any:
    return torch.exp(y), y.unsafe_chunk(2, -1)


def left_in_attribute(unit: Unit, y: Tensor) -> Tensor:
    unit.left = y
    return torch.exp(y)


def left_in_numpy(unit: Unit, y: Tensor) -> Tensor:
    unit.left = y.detach().numpy()  # type: ignore[assignment]
    return torch.exp(y)


def nothing(unit: Unit, result: Any) -> Any:
    return result


def write_result(unit: Unit, result: Any) -> Any:
    return result.mul_(3)


def write_data(unit: Unit, result: Any) -> Any:
    result.data.mul_(3)
    return result


def write_second(unit: Unit, result: Any) -> Any:
    result[1].data.mul_(3)
    return result[0] * result[1]


def write_pieces(unit: Unit, result: Any) -> Any:
    result[1][0].mul_(3)
    return result[0] * torch.cat(result[1], -1)


def write_left(unit: Unit, result: Any) -> Any:
    if isinstance(unit.left, Tensor):
        unit.left.data.mul_(3)
    else:
        unit.left[:] = 3
    return result


CASES = [
    *((use, nothing) for use in (in_place, pieces_in_place, split_in_place, foreach_in_place, without_autograd)),
    (into_a_buffer, nothing),
    (only_a_product, write_result),
    (only_a_product, write_data),
    (two_results, write_second),
    (pieces, write_pieces),
    (left_in_attribute, write_left),
    (left_in_numpy, write_left),
]


def gradients(run: Callable[[Tensor], Any], model: nn.Module, *, backwards: int = 1, dtype: Any = None) -> list[Tensor]:
    x = torch.linspace(-1, 1, 2 * WIDTH, dtype=dtype).view(2, WIDTH).requires_grad_()
    loss = run(x).square().mean()
    for number in range(backwards):
        loss.backward(retain_graph=number + 1 < backwards)
    return [loss.detach(), *(p.grad for p in [x, *model.parameters()] if p.grad is not None)]


def selective(model: nn.Module) -> Callable[[Tensor], Any]:
    return lambda x: checkpoint(model, x, use_reentrant=False, context_fn=selective_contexts)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize(("use", "afterwards"), CASES, ids=[f"{use.__name__}-{end.__name__}" for use, end in CASES])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_product_whose_memory_is_written_to_is_computed_again(use: Any, afterwards: Any, backwards: int) -> None:
    plain, checked = seeded(Unit, use), seeded(Unit, use)
    expected = gradients(lambda x: afterwards(plain, plain(x.sin())), plain, backwards=backwards)
    run = selective(checked)
    assert equal(gradients(lambda x: afterwards(checked, run(x.sin())), checked, backwards=backwards), expected)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell, nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_gates_are_computed_again(kind: Any, dtype: torch.dtype) -> None:
    cell, other = (seeded(kind, WIDTH, WIDTH).to(dtype) for _ in range(2))

    def first(found: Any) -> Tensor:
        return found[0] if isinstance(found, tuple) else found

    expected = gradients(lambda x: first(cell(x.sin())), cell, dtype=dtype)
    run = selective(other)
    assert equal(gradients(lambda x: first(run(x.sin())), other, dtype=dtype), expected)


def test_products_that_nothing_changes_are_not_computed_again() -> None:
    def count(run: Callable[[Tensor], Any], model: nn.Module) -> Counter[str]:
        with Ops() as ops:
            gradients(lambda x: run(x[None]), model)
        return ops.seen

    plain, checked = seeded(Layer, WIDTH, 0.0), seeded(Layer, WIDTH, 0.0)
    expected = count(plain, plain)
    assert sum(expected.values()) > 5
    assert count(selective(checked), checked) == expected


def test_a_product_in_place_is_computed_once_more_and_no_other() -> None:
    with Ops() as once:
        plain = seeded(Unit, in_place)
        gradients(plain, plain)
    with Ops() as again:
        checked = seeded(Unit, in_place)
        gradients(selective(checked), checked)
    assert again.seen - once.seen == {"aten::addmm": 1}


class Grows(nn.Module):
    """Computes more the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.times):
                self.layer(x)
        self.times += 1
        return torch.tanh(self.layer(x))


def test_a_recomputation_with_more_products_is_refused() -> None:
    model = Grows()
    loss = selective(model)(torch.ones(1, WIDTH, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"selective called aten.addmm.default 1 times .* more often"):
        loss.backward()


class CompiledInside(nn.Module):
    """Compiled parts: one writes to products of the unit, one puts another result where its own product was."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Conv1d(2, 2, 3, padding=1)
        self.write = torch.compile(lambda y: y.mul_(2).sum())
        self.part = torch.compile(lambda y: torch.tanh(self.mix(y) * 3 + 1))

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x), self.second(x)
        piece, other = z.unsafe_chunk(2, -1)
        with torch.no_grad():
            self.write(y)
            self.write(piece)
        y = torch.exp(y.clone()) + torch.exp(torch.cat([piece, other], -1))
        return torch.tanh(self.second(self.part(y[None])))


def test_compiled_parts_of_a_unit_change_no_kept_product() -> None:
    plain, checked = seeded(CompiledInside), seeded(CompiledInside)
    expected = gradients(lambda x: plain(x.sin()), plain)
    run = selective(checked)
    assert equal(gradients(lambda x: run(x.sin()), checked), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell])
def test_a_compiled_unit_of_a_recurrent_cell_has_the_same_gradients(kind: Any, backend: str) -> None:
    cell, other = (seeded(kind, WIDTH, WIDTH) for _ in range(2))
    expected = gradients(cell, cell)
    for one, wanted in zip(gradients(torch.compile(selective(other), backend=backend), other), expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-7)
