"""A backward in two halves against one ordinary backward: the same bits, at the right time."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_strategy.activation.functional import Checkpointer
from zero_strategy.pipeline.model_chunk import Entrance, SplitBackward, whole_backward

_WIDTH = 16


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, 2, batch_first=True, dropout=0.1)
        self.stage_inputs = nn.Sequential(nn.Linear(_WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.stage_inputs(x)


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, how: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.inner, x)


def _by_torch(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def _reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=True)


class _Twice(nn.Module):
    """Every kind of parameter used three times, directly and through what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)
        self.matrix = nn.Parameter(torch.randn(_WIDTH, _WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(F.gelu(self.linear(x)) @ self.matrix) + (x @ (self.matrix * 2).t())
        return x


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 1), nn.GroupNorm(2, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class _Embedding(nn.Module):
    """Something off the way that joins it, and an output that depends on parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Embedding(7, _WIDTH), nn.Linear(_WIDTH, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        where = self.places(torch.arange(x.shape[1]))
        return self.head(x + where), where * 2, self.head.weight


class _Scale(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _Scale.runs += 1
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum((0, 1))


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.rand(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_Scale.apply(self.first(x), self.scale))


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layers(x)
        return h, h.detach() * 2


class _HookedTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.matrix = nn.Parameter(torch.randn(_WIDTH, _WIDTH) / 4)
        self.matrix.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.register_hook(lambda gradient: gradient * 2)
        return self.second(h @ self.matrix) @ self.matrix


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[..., :4].add_(self.shift)
        h[..., 4:].mul_(self.shift.sum())
        return self.second(F.relu_(h))


_CASES: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: nn.Sequential(nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, 8)),
    "residual": lambda: nn.Sequential(_Residual(nn.Linear(_WIDTH, _WIDTH)), _Residual(nn.LayerNorm(_WIDTH))),
    "transformer": lambda: nn.Sequential(_Block(), _Block()),
    "twice": _Twice,
    "convolutions": _Convolutions,
    "embedding": _Embedding,
    "custom": _Custom,
    "frozen": _Frozen,
    "hooked": _HookedTensors,
    "in place": _InPlace,
    "gru": lambda: nn.GRU(_WIDTH, _WIDTH, 2, batch_first=True),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(_WIDTH, 8)), nn.Tanh()),
    "checkpoint": lambda: nn.Sequential(nn.Linear(_WIDTH, _WIDTH), _Checkpointed(_Block(), _by_torch)),
    "own checkpoint": lambda: nn.Sequential(_Checkpointed(_Block(), Checkpointer().checkpoint), _Block()),
    "nested checkpoints": lambda: _Checkpointed(nn.Sequential(_Checkpointed(_Block(), _by_torch), _Block()), _by_torch),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()), backend="aot_eager"),
    "re-entrant": lambda: nn.Sequential(nn.Linear(_WIDTH, _WIDTH), _Checkpointed(_Block(), _reentrant)),
}


def _input(name: str) -> Tensor:
    shape = (3, 4, _WIDTH) if name == "convolutions" else (3, 7, _WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _outputs(module: nn.Module, x: Tensor, seed: int, autocast: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = module(x)
    outputs = [one for one in (found if isinstance(found, tuple) else (found,)) if one.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in outputs]
    return outputs, gradients


def _note(fired: list[str], name: str, _: Tensor) -> None:
    fired.append(name)


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("needs_input", [True, False], ids=["middle", "first"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", _CASES)
def test_bits_and_hooks(name: str, autocast: bool, needs_input: bool) -> None:
    found = []
    for split in (False, True):
        torch.manual_seed(1)
        module = _CASES[name]()
        fired: list[str] = []
        for parameter_name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_note, fired, parameter_name))
        inputs = []
        for seed in range(2):
            x = _input(name).requires_grad_(needs_input)
            outputs, gradients = _outputs(module, x, seed, autocast)
            leaves = [x] if needs_input else []
            if not split:
                inputs += whole_backward(outputs, gradients, leaves)
                continue
            backward = SplitBackward(outputs, gradients, leaves)
            before = len(fired)
            inputs += backward.input_half()
            assert backward.whole == (name == "re-entrant" and needs_input)
            assert backward.whole or len(fired) == before
            backward.weight_half()
        found.append((inputs, _gradients(module), sorted(fired)))
    (inputs, ordinary, fired), (split_inputs, split, split_fired) = found
    assert split_fired == fired
    for one, other in zip(split_inputs, inputs, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    assert split.keys() == ordinary.keys()
    for key, value in ordinary.items():
        other = split[key]
        assert (value is None) == (other is None), key
        assert value is None or other is None or torch.equal(value, other), key


def test_what_the_halves_do() -> None:
    """Each half multiplies once per layer; a custom function is run once, and takes only its own parameter along."""
    torch.manual_seed(0)
    x = torch.randn(2, _WIDTH, requires_grad=True)
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))
    backward = SplitBackward([layers(x).sum()], [None], [x])
    products = _count_products(backward.input_half), _count_products(backward.weight_half)
    assert (backward.deferred, backward.early, products) == (3, 0, (3, 3))

    module, _Scale.runs = _Custom(), 0
    backward = SplitBackward([module(y := torch.randn(1, 2, _WIDTH).requires_grad_()).sum()], [None], [y])
    backward.input_half()
    backward.weight_half()
    assert (backward.deferred, backward.early, _Scale.runs) == (2, 1, 1)


def _count_products(call: Callable[[], Any]) -> int:
    with torch.profiler.profile() as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")


def test_a_checkpoint_is_computed_again_once() -> None:
    calls: list[int] = []

    def body(x: Tensor) -> Tensor:
        calls.append(1)
        return linear(x).relu()

    linear, last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
    x = torch.randn(2, _WIDTH, requires_grad=True)
    backward = SplitBackward([last(_by_torch(body, x)).sum()], [None], [x])
    backward.input_half()
    backward.weight_half()
    assert len(calls) == 2 and (backward.deferred, backward.early) == (1, 2)


def test_what_is_not_needed_any_more_goes_between_the_halves() -> None:
    linear = nn.Linear(_WIDTH, _WIDTH)
    x = torch.randn(2, _WIDTH, requires_grad=True)
    h = x * 2
    kept = weakref.ref(h.untyped_storage())  # the weight half needs it
    activated = torch.tanh(linear(h))
    gone = weakref.ref(activated.untyped_storage())
    backward = SplitBackward([(activated * 3).sum()], [None], [x])
    del h, activated
    assert kept() is not None and gone() is not None
    backward.input_half()
    assert kept() is not None and gone() is None
    backward.weight_half()
    assert kept() is None


def test_roots_without_gradients_and_inputs_without_a_way() -> None:
    linear = nn.Linear(4, 4)
    x, y = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    backward = SplitBackward([], [], [x])
    assert backward.input_half() == [None]
    backward.weight_half()
    assert linear.weight.grad is None
    out = linear(x)
    backward = SplitBackward([out, x], [torch.ones_like(out), torch.ones_like(x)], [x, y])
    given, none = backward.input_half()
    assert none is None and given is not None
    assert torch.equal(given, torch.ones(2, 4) @ linear.weight + 1) and linear.weight.grad is None
    backward.weight_half()
    assert torch.equal(linear.weight.grad, torch.ones(4, 2) @ x)


def test_an_entrance_may_be_changed_in_place() -> None:
    """As a stage that begins with an in-place activation; gradients are those of the values that came in."""
    linear, given, anchor = nn.Linear(4, 4), torch.randn(2, 4), torch.empty((), requires_grad=True)
    leaf = given.clone().requires_grad_()
    linear((leaf * 1).relu_()).sum().backward()
    wanted = linear.weight.grad
    assert wanted is not None and leaf.grad is not None
    for split in (False, True):
        linear.weight.grad = None
        entered, other = Entrance.apply(anchor, given.clone(), torch.ones(3))
        edges = [torch.autograd.graph.get_gradient_edge(one) for one in (entered, other)]
        roots = [linear(entered.relu_()).sum()]
        if split:
            backward = SplitBackward(roots, [None], edges)
            found = backward.input_half()
            backward.weight_half()
        else:
            found = whole_backward(roots, [None], edges)
        assert found[0] is not None and torch.equal(found[0], leaf.grad) and found[1] is None
        assert torch.equal(linear.weight.grad, wanted) and anchor.grad is None


def _random_graph(seed: int, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Outputs of some operations on inputs, weights and each other, drawn by a seed."""
    draw = random.Random(seed)
    values, made = list(inputs), [weights[0] * 2, weights[1].t().contiguous()]
    for _ in range(draw.randint(3, 14)):
        x, y = draw.choice(values), draw.choice(values)
        weight = draw.choice(weights + made)
        which = draw.randrange(9)
        if which == 0:
            made.append(torch.tanh(weight) + draw.choice(weights + made))
        else:
            values.append(
                [x @ weight, x + y, x * y, F.layer_norm(x, (4,), weight[0], weight[1]), F.linear(x, weight, weight[2]),
                 x + weight, torch.cat([x, y])[1:5], x.detach() * weight][which - 1]
            )  # fmt: skip
    return draw.sample(values + made, draw.randint(1, 3))


@pytest.mark.parametrize("seed", range(0, 300, 50))
def test_random_graphs(seed: int) -> None:
    """Whatever is shared, joined or left out: the same bits."""
    split_somewhere = 0
    for one in range(seed, seed + 50):
        found = []
        for split in (False, True):
            generator = torch.Generator().manual_seed(one)
            weights = [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(3)]
            inputs = [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2)]
            outputs = list({id(y): y for y in _random_graph(one, inputs, weights) if y.requires_grad}.values())
            gradients = [torch.randn(y.shape, generator=generator) for y in outputs]
            if split:
                backward = SplitBackward(outputs, gradients, inputs)
                given = backward.input_half()
                split_somewhere += backward.deferred > 0
                assert backward.whole or all(weight.grad is None for weight in weights)
                backward.weight_half()
            else:
                given = whole_backward(outputs, gradients, inputs)
            found.append([*given, *(weight.grad for weight in weights)])
        for ours, wanted in zip(*reversed(found), strict=True):
            assert (ours is None) == (wanted is None), one
            assert ours is None or torch.equal(ours, wanted), (one, ours, wanted)
    assert split_somewhere > 10
