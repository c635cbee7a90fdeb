"""Parameters of every kind, touched by some ranks, by none, frozen and unfrozen: all as in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import Block, loss_of, net, seeded
from tests.engine.trainings import DEFAULTS, PlainTraining, Script, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.comm.collectives import PendingWork
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

EXACT_LOW_PRECISION = {
    "precision": {"master_weights": False, "gradient_dtype": "parameter", "reduce_dtype": "gradient"}
}
"""Low-precision parameters are then trained as plain torch trains them."""


class Zoo(nn.Module):
    """One parameter of every awkward kind, in the root and in units."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty_rows = nn.Parameter(torch.zeros(0, 4))
        self.empty_columns = nn.Parameter(torch.zeros(3, 0))
        self.single = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(3, 1, 2))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.twofold = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.frozen_short = nn.Parameter(torch.randn(4).bfloat16(), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(200, 215, dtype=torch.uint8).view(3, 5), requires_grad=False)
        self.places = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.small = nn.Parameter(torch.tensor([-3, 9], dtype=torch.int16), requires_grad=False)
        self.eighth = nn.Parameter(torch.randn(6).to(torch.float8_e4m3fn), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.only_empty = nn.ModuleList(Holder() for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("fixed", torch.linspace(0.0, 1.0, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = x * self.scalar + self.fixed
        for block in self.blocks:
            x = block(x)
        x = x[:, :4] + self.transposed.sum(0) + self.single + self.frozen_short.float()
        x = x + self.twofold.sum() + self.short.float().sum(1)[:4] * self.codes[0, :4] / 255
        x = x * self.mask + self.cube.flatten()[self.places].sum() + self.small.sum() + self.eighth.float().sum()
        return x.float() + self.empty_rows.sum() + self.empty_columns.sum() + self.only_empty[0](x).sum()


class Holder(nn.Module):
    """A unit without a single element to train."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.nothing * 2


def every_kind(training: PlainTraining) -> None:
    model = seeded(Zoo)
    before = {name: (id(p), p.shape, p.dtype, p.ndim, p.requires_grad) for name, p in model.named_parameters()}
    training.shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, foreach=False)
    training.attach(optimizer)
    for step in range(3):
        loss = loss_of(model(training.data(step, 2, 6)))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
        after = {name: (id(p), p.shape, p.dtype, p.ndim, p.requires_grad) for name, p in model.named_parameters()}
        assert after == before


@pytest.mark.parametrize("world", [2, 3])
def test_every_kind_of_parameter(ranks: Launcher, world: int) -> None:
    settings = [Setting(s.stage, s.order, EXACT_LOW_PRECISION) for s in DEFAULTS]
    for wrong in ranks(world)(play, every_kind, settings):
        assert not wrong


# ------------------------------------------------------------------------------------------ touched or not


class Choosy(nn.Module):
    """Uses `extra` when told to, in the root and inside a unit."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6)
            self.extra = nn.Linear(6, 6)

        def forward(self, x: Tensor, use: bool) -> Tensor:
            x = torch.tanh(self.base(x))
            return x + self.extra(x) if use else x

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))
        self.never = nn.Parameter(torch.ones(3, 2))
        self.extra = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = x + self.extra if use else x
        for part in self.parts:
            x = part(x, use)
        return x


def train_choosy(training: PlainTraining, use: list[list[bool]]) -> None:
    """`use[step][rank]` says who uses the extra parameters."""
    model = seeded(Choosy)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False, weight_decay=0.1))
    for step, chosen in enumerate(use):
        for micro in range(2):
            loss = loss_of(model(training.data(2 * step + micro, 2, 6), chosen[training.rank] and micro == step % 2))
            training.note(loss)
            training.backward(loss, sync=micro == 1)
        training.note(*training.gradients())
        training.step()
        training.zero_grad()


def touched_on_one_rank(training: PlainTraining) -> None:
    train_choosy(training, [[True, False], [False, True], [True, True], [False, True]])


def touched_on_no_rank(training: PlainTraining) -> None:
    train_choosy(training, [[False, False], [True, True], [False, False], [True, False]])


class Branches(nn.Module):
    """Ranks go through different units."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.experts[number](x)
        return self.out(x)


def other_units_on_other_ranks(training: PlainTraining) -> None:
    model = seeded(Branches)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    orders = [([0, 1], [2]), ([3], [3, 0, 1, 2]), ([], [1]), ([1, 0], [0, 1]), ([2, 2], []), ([0, 1, 2], [3, 2, 1, 0])]
    for step, by_rank in enumerate(orders):
        training.backward(loss_of(model(training.data(step, 2, 6), by_rank[training.rank])))
        training.clip(2.0)
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("script", [touched_on_one_rank, touched_on_no_rank], ids=lambda script: script.__name__)
def test_untouched_parameters_keep_gradient_none_and_step_count(ranks: Launcher, script: Script) -> None:
    for wrong in ranks(2)(play, script):
        assert not wrong


def test_ranks_may_take_different_branches_below_stage_3(ranks: Launcher) -> None:
    settings = [setting for setting in DEFAULTS if setting.stage < 3]
    for wrong in ranks(2)(play, other_units_on_other_ranks, settings, tolerance=1e-6):
        assert not wrong


# -------------------------------------------------------------------------------------- frozen and unfrozen


def freezing_between_steps(training: PlainTraining) -> None:
    """Frozen from the start, unfrozen, frozen again: in the root, in a unit, and a whole unit."""
    model = net()
    chosen = [*model.blocks[1].parameters(), model.blocks[0].up.weight, model.scale, model.head.bias]
    for p in chosen:
        p.requires_grad_(False)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(6):
        for p in chosen:
            p.requires_grad_(step in (2, 3, 5))
        for micro in range(2):
            loss = loss_of(model(training.data(2 * step + micro, 2, 6)))
            training.note(loss)
            training.backward(loss, sync=micro == 1)
        training.note([p.grad is None for p in model.parameters()])
        training.step()
        training.zero_grad()


def only_the_head_is_trained(training: PlainTraining) -> None:
    """Units whose inputs and parameters need no gradient."""
    model = net()
    for p in [*model.stem.parameters(), *model.blocks.parameters()]:
        p.requires_grad_(False)
    training.shard(model)
    training.attach(torch.optim.SGD(model.head.parameters(), lr=0.05, foreach=False))
    training.optimizers[0].add_param_group({"params": [model.scale]})
    for step in range(3):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.step()
        training.zero_grad()


class Adapter(nn.Module):
    """LoRA: a frozen layer and two small trainable ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters_on_a_frozen_base(training: PlainTraining) -> None:
    model = net().requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for block in model.blocks:
            block.up = Adapter(block.up)
    training.shard(model)
    training.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, foreach=False))
    for step in range(3):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.clip(0.5)
        training.step()
        training.zero_grad()


FROZEN: list[Script] = [freezing_between_steps, only_the_head_is_trained, adapters_on_a_frozen_base]


@pytest.mark.parametrize("script", FROZEN, ids=lambda script: script.__name__)
def test_frozen_and_unfrozen(ranks: Launcher, script: Script) -> None:
    for wrong in ranks(2)(play, script, tolerance=1e-6 if script is adapters_on_a_frozen_base else 0.0):
        assert not wrong


# ----------------------------------------------------------------------------------------------------- ties


class Tied(nn.Module):
    """Ties within a unit, between two units, between a unit and the root, and between units of one parent."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()
            self.two.up.weight = self.one.up.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 6, bias=False)
        self.pairs = nn.ModuleList(self.Pair() for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[0].down.weight = self.blocks[2].down.weight
        self.head = nn.Linear(6, 6)
        self.head.weight = self.embedding.weight
        self.blocks[1].norm.bias = self.head.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for part in [*self.pairs, *self.blocks]:
            x = part(x)
        return self.head(x)


def tied_parameters(training: PlainTraining) -> None:
    model = seeded(Tied)
    training.shard(model)
    assert model.head.weight is model.embedding.weight
    assert model.pairs[0].one.up.weight is model.pairs[0].two.up.weight
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        training.note(loss_of(model(training.data(step, 2, 6))))
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.step()
        training.zero_grad()


def test_ties_within_and_across_units(ranks: Launcher) -> None:
    settings = [*DEFAULTS, *(Setting(s, "per_micro_batch", {"units": {"classes": ["Block", "Pair"]}}) for s in (2, 3))]
    for wrong in ranks(2)(play, tied_parameters, settings):
        assert not wrong


def layout_of_ties() -> dict[str, list[str]]:
    training = ShardedTraining(Setting(3, "per_micro_batch", {"units": {"classes": ["Block", "Pair"]}}))
    training.shard(seeded(Tied))
    return {unit.name: [name for bucket in unit.buckets for name in bucket.names] for unit in training.own.model.units}


def test_a_tie_belongs_to_the_common_ancestor(ranks: Launcher) -> None:
    units = ranks(1)(layout_of_ties)[0]
    assert units["pairs.0"] == ["pairs.0.one.up.weight"]
    assert {"embedding.weight", "blocks.0.down.weight", "blocks.1.norm.bias", "head.bias"} & set(units[""]) == set(
        units[""]
    )
    assert not any(name in units["blocks.2"] for name in ("blocks.2.down.weight", "blocks.0.down.weight"))


class FailingOnce(PendingWork):
    """A gather that fails, and says so once."""

    def __init__(self) -> None:
        super().__init__([])
        self.fails = True

    def wait(self) -> None:
        if self.fails:
            self.fails = False
            raise ConnectionError


def test_a_gather_that_failed_is_not_taken_for_done() -> None:
    model = net()
    bucket = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0})).model.buckets[0]
    bucket.release()
    assert not bucket.gathered
    bucket._pending = FailingOnce()
    with pytest.raises(ConnectionError):
        bucket.finish_unshard()
    bucket.finish_unshard()
    assert not bucket.gathered and not bucket.pending


def test_a_release_that_fails_leaves_no_unit_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZeroEngine(net(), load_config(stage=3, units={"min_numel": 0})).model

    def fails() -> None:
        raise ConnectionError

    monkeypatch.setattr(model.units[0], "release", fails)
    with pytest.raises(ConnectionError), model.gathered():
        assert all(unit.pinned == 1 for unit in model.units)
    assert all(unit.pinned == 0 for unit in model.units)
