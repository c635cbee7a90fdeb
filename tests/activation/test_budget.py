"""Mode budget: bytes within it, at the least computation, the same choice on all ranks."""

from __future__ import annotations

import itertools
import random
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.activation.alive import peak_of
from tests.activation.test_exact import NETS, trains
from tests.activation.unit_nets import WIDTH, Transformer, seeded
from tests.engine.nets import loss_of
from tests.engine.trainings import Setting, play
from tests.launcher import Launcher
from zero_strategy.activation.budget import Profile, StepProfile, UnitCall, choose
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

FRACTIONS = (0.3, 0.45, 0.6, 0.8, 0.95)


def brute_force(profile: Profile, budget: int) -> int | None:
    units = profile.units
    subsets = itertools.chain.from_iterable(itertools.combinations(units, n) for n in range(len(units) + 1))
    return min((profile.cost(s) for s in subsets if profile.peak(s) <= budget), default=None)


def test_the_choice_is_that_of_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(300):
        order = list(range(draw.randint(1, 8)))
        order += draw.choices(order, k=draw.choice([0, 0, 3]))  # units that are used again
        sizes = {unit: draw.randint(1, 50) for unit in order}
        calls = []
        for unit in order:
            inputs = draw.randint(0, 10)
            kept = sizes[unit] + draw.randint(0, 3)
            calls.append(UnitCall(unit, kept, inputs, draw.randint(0, kept), sizes[unit] * draw.randint(1, 3)))
        profile = Profile(tuple(calls), draw.randint(0, 20))
        budget = int(draw.uniform(0.2, 1.1) * profile.kept)
        chosen, best = choose(profile, budget), brute_force(profile, budget)
        assert (chosen is None) == (best is None)
        if chosen is not None and best is not None:
            assert profile.peak(chosen) <= budget
            assert profile.cost(chosen) == best


def test_many_different_units_are_chosen_in_no_time() -> None:
    draw = random.Random(1)
    calls = []
    for number in range(80):
        kept, inputs = draw.randint(10**6, 10**9), draw.randint(10**3, 10**6)
        calls.append(UnitCall(number, kept, inputs, 10 ** draw.randint(5, 8), draw.randint(1, 10**9)))
    profile = Profile(tuple(calls), 0)
    chosen = choose(profile, profile.kept // 2)
    assert chosen is not None and profile.peak(chosen) <= profile.kept // 2
    density = sorted(calls, key=lambda call: call.cost / (call.kept - call.inputs))
    saved = cost = 0.0
    for call in density:  # the bound of a knapsack that may be cut
        part = min(1.0, max(0.0, (profile.kept / 2 - saved) / (call.kept - call.inputs)))
        saved, cost = saved + part * (call.kept - call.inputs), cost + part * call.cost
    assert profile.cost(chosen) <= 1.05 * cost


class Uneven(nn.Module):
    """Eight units of different widths inside, which takes different bytes and work."""

    def __init__(self) -> None:
        super().__init__()
        factors = (1, 8, 2, 16, 4, 1, 12, 6)
        self.blocks = nn.ModuleList(Wide(WIDTH, factor * WIDTH, number % 3) for number, factor in enumerate(factors))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        for block in self.blocks:
            x = block(x, mask)
        return x


class Wide(nn.Module):
    def __init__(self, width: int, inner: int, more: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.more = nn.ModuleList(nn.Linear(inner, inner) for _ in range(more))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = F.gelu(self.up(mask @ x))
        for layer in self.more:
            hidden = layer(hidden)
        return torch.tanh(F.dropout(self.down(hidden), 0.1, self.training))


def measured() -> None:
    x = torch.randn(64, 32, WIDTH, generator=torch.Generator().manual_seed(1))
    for fraction in FRACTIONS:
        model = seeded(Uneven)
        config = load_config(
            stage=0,
            units={"min_numel": 0},
            gradient_reduction="per_step",
            activation_checkpointing={"mode": "budget", "budget": fraction},
        )
        engine = ZeroEngine(model, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine.attach(optimizer)
        loss_of(model(x)).backward()
        assert engine.activations.profile is not None
        profile = engine.activations.profile.result()
        assert profile is not None
        optimizer.step()
        optimizer.zero_grad()
        limit = int(fraction * profile.kept)
        chosen = frozenset(number for number, f in enumerate(engine.activations.forwards) if f.recomputed)
        assert profile.peak(chosen) <= limit
        assert profile.cost(chosen) == brute_force(profile, limit)
        weights = sum(p.numel() * 4 for p in model.parameters())
        passing = weights + 2 * 64 * 32 * 16 * WIDTH * 4  # gradients come and go on top of what is kept
        assert peak_of(model, x) <= limit + passing
        for forward in engine.activations.forwards:
            forward.recomputed = False
        assert profile.kept <= peak_of(model, x) <= profile.kept + passing


def test_peak_is_within_the_budget(ranks: Launcher) -> None:
    measured()


def too_small() -> str:
    model = seeded(Transformer)
    settings = {"mode": "budget", "budget": 0.02}
    engine = ZeroEngine(model, load_config(stage=2, units={"min_numel": 0}, activation_checkpointing=settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    rows = 3 + dist.get_rank()  # ranks keep different numbers of bytes
    loss_of(model(torch.randn(rows, 5, WIDTH))).backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_a_budget_that_is_too_small_is_refused_alike(ranks: Launcher) -> None:
    first, second = ranks(2)(too_small)
    assert first == second
    found = re.search(r"budget is 0.02: of the \d+ bytes.*accepted here: (0\.\d+) or more", first)
    assert found is not None and 0.02 < float(found[1]) < 0.6


def default_of_a_small_model() -> tuple[int, int, list[str]]:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(16, 1))
    engine = ZeroEngine(model, {"stage": 2, "units": {"min_numel": 0}, "activation_checkpointing": "budget"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    model(torch.randn(4, 17, 16)).sum().backward()
    assert engine.activations.profile is not None
    profile = engine.activations.profile.result()
    assert profile is not None
    optimizer.step()
    return profile.peak(profile.units), profile.kept, engine.activations.recomputed


def test_the_default_budget_is_what_there_can_be(ranks: Launcher) -> None:
    for least, kept, recomputed in ranks(2)(default_of_a_small_model):
        assert least > 0.5 * kept, "half is less than there can be"
        assert recomputed == ["0"]


BUDGET = {"activation_checkpointing": {"mode": "budget", "budget": 0.6}}
SETTINGS = [Setting(0, "per_step", BUDGET), Setting(3, "per_micro_batch", BUDGET)]


@pytest.mark.parametrize("net, shape", NETS, ids=lambda value: getattr(value, "__name__", ""))
def test_measuring_and_choosing_change_no_bit(net: type[nn.Module], shape: tuple[int, ...], ranks: Launcher) -> None:
    for wrong in ranks(2)(play, partial(trains, build=net, shape=shape), SETTINGS):
        assert not wrong


def chosen() -> tuple[list[str], list[str]]:
    """Before and after a step; rank 1 has fewer rows, and none of its own to measure in the first step."""
    model = seeded(Uneven)
    settings = {"mode": "budget", "budget": 0.5}
    engine = ZeroEngine(model, load_config(stage=1, units={"min_numel": 0}, activation_checkpointing=settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    before = engine.activations.recomputed
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(torch.randn(8 - 4 * dist.get_rank(), 5, WIDTH)).float())
    loss.backward()
    optimizer.step()
    return before, engine.activations.recomputed


def test_ranks_choose_alike(ranks: Launcher) -> None:
    (before, after), (_, other) = ranks(2)(chosen)
    assert len(before) == 8 and 0 < len(after) < 8
    assert after == other


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_compiles_itself_is_measured() -> None:
    query, weight = torch.randn(1, 2, 16, 8), nn.Parameter(torch.ones(8))
    profile = StepProfile(frozenset())
    result = profile.measure(0, nn.Module(), lambda: flex_attention(query, query, query) * weight, [query])
    result(query * weight)
    found = profile.result()
    assert found is not None and found.calls[0].kept == query.nbytes and found.calls[0].cost > 0


def test_what_a_measured_forward_kept_is_let_go() -> None:
    x, kept = torch.randn(4, 4, requires_grad=True), []

    def run() -> Tensor:
        result = torch.tanh(x)  # keeps its own result for the backward
        kept.append(StorageWeakRef(result.untyped_storage()))
        return result

    StepProfile(frozenset()).measure(0, nn.Module(), run, [x])
    assert kept[0].expired()
