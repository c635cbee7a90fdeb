"""offload.activations: the same bits, from memory that went away and came back. On the CPU copies are forced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tests.activation.test_exact import NETS, trains
from tests.activation.unit_nets import WIDTH, Transformer, seeded
from tests.engine.nets import loss_of
from tests.engine.trainings import PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.activation.offload import ActivationStore, HostBlocks, model_storages
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

CPU = torch.device("cpu")


def force(engine: ZeroEngine) -> ActivationStore:
    """Copies where there is nothing to be copied."""
    engine.activations.store = ActivationStore(CPU, model_storages(engine.model))
    return engine.activations.store


class Forcing(ShardedTraining):
    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        force(self.own)
        return module


def forced(training: PlainTraining, build: type[nn.Module], shape: tuple[int, ...]) -> None:
    if isinstance(training, ShardedTraining):
        training.__class__ = Forcing
    trains(training, build, shape)
    if isinstance(training, Forcing):
        store = training.own.activations.store
        assert store is not None and sum(store.fetched.values()) > 0
        assert len(store.moved) == 0  # nothing is kept once backward is over


HOST = {"offload": {"activations": "cpu"}}
MODES = {
    "Transformer": ("none", "full", "selective", "every_n", "budget"),
    "Strange": ("none", "full", "selective", "budget"),
    "Adapters": ("none", "full", "selective", "every_n"),
}
"""By net; "every_n" and "budget" choose among units, which the plain net shows with both."""
LARGE = [(net, (40 * rows, *rest)) for net, (rows, *rest) in NETS]
"""Large enough for whole pages."""


@pytest.mark.parametrize("net, shape", LARGE, ids=lambda value: getattr(value, "__name__", ""))
def test_no_bit_changes(net: type[nn.Module], shape: tuple[int, ...], ranks: Launcher) -> None:
    settings = [
        Setting(3, "per_micro_batch", {"activation_checkpointing": {"mode": mode, "budget": 0.8}, **HOST})
        for mode in MODES[net.__name__]
    ]
    settings += [Setting(1, "per_step", HOST)] if net is Transformer else []
    for wrong in ranks(2)(play, partial(forced, build=net, shape=shape), settings):
        assert not wrong


def kept_here(run: Any) -> tuple[Any, int]:
    """A result, and the bytes that autograd keeps for it in memory that is not the model's."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, sum(found.values())


def engine_of(model: nn.Module, mode: str = "none") -> ZeroEngine:
    settings: dict[str, Any] = {"activation_checkpointing": {"mode": mode}, "offload": {"activations": "cpu"}}
    return ZeroEngine(model, load_config(stage=2, units={"min_numel": 0}, **settings))


def test_units_are_brought_back_one_ahead(ranks: Launcher) -> None:
    model = seeded(Transformer, 6, WIDTH, 0.0)
    store = force(engine_of(model, "full"))
    x = torch.randn(40, 32, WIDTH)
    loss = loss_of(model(x))
    assert store.fetched == {"ahead": 0, "on demand": 0}
    assert len(store.moved) == 6
    seen = []
    for number, block in enumerate(model.blocks):
        block.norm1.weight.register_hook(lambda _, number=number: seen.append((number, sum(store.fetched.values()))))
    loss.backward()
    assert store.fetched == {"ahead": 5, "on demand": 1}
    assert seen == [(5, 2), (4, 3), (3, 4), (2, 5), (1, 6), (0, 6)]
    assert len(store.moved) == 0


def test_with_modes_only_inputs_move(ranks: Launcher) -> None:
    nbytes = {}
    x = torch.randn(64, 32, WIDTH)
    one = x.numel() * 4
    for mode in ("none", "full", "selective"):
        engine = engine_of(seeded(Transformer, 3, WIDTH, 0.0), mode)
        store = force(engine)
        loss = loss_of(engine.module(x))
        nbytes[mode] = store.blocks.taken
        loss.backward()
        assert engine.ledger().only(category="activations", tier="host").total.taken == store.blocks.taken
    assert nbytes["full"] == nbytes["selective"] == 3 * one
    assert nbytes["none"] > 12 * one


class Views(nn.Module):
    """Keeps views of one memory, an expanded tensor, a number, and a tensor that is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Viewing(), Viewing()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x @ self.weight).chunk(2, -1)
        c = (a.transpose(0, 1) * b.transpose(0, 1)).transpose(0, 1)
        d = torch.cat([a * c, b[:1].expand_as(b) * c], -1)
        e = d * d
        mask = (d > 0).to(torch.uint8)
        return F.softplus(e) * mask + e.exp().clamp(max=2.0).to(torch.float64).to(torch.float32)


def test_views_come_back_as_they_were(ranks: Launcher) -> None:
    x = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.1
    gradients: list[Any] = []
    for moves in (False, True):
        model = seeded(Views)
        engine = engine_of(model)
        store = force(engine) if moves else None
        own = x.clone().requires_grad_()
        loss = loss_of(model(own))
        if store is not None:
            assert store.blocks.taken <= 2 * 40 * x.numel() * 4
            loss.backward(retain_graph=True)  # what was brought back once can be brought back again
            own.grad = None
        loss.backward()
        gradients.append(own.grad)
    assert torch.equal(*gradients)


def test_blocks_are_used_again_and_given_up() -> None:
    blocks = HostBlocks(pinned=False)
    first = [blocks.take(size) for size in (5000, 5000, 100_000)]
    assert blocks.taken == 2 * 8192 + 102_400
    for memory in first:
        blocks.give_back(memory)
    again = [blocks.take(size) for size in (8192, 6000)]
    assert {id(memory) for memory in again} == {id(memory) for memory in first[:2]}
    for memory in again:
        blocks.give_back(memory)
    blocks.give_back(blocks.take(4096))  # the pass before did not need the largest
    assert blocks.taken == 2 * 8192 + 4096


class CopyUnderWay:
    """The end of a copy, which has not come yet."""

    over = False

    def query(self) -> bool:
        return self.over


def test_a_block_is_not_unmapped_under_a_copy() -> None:
    """However long the copy takes; when it is over, the next pass gives the block up."""
    blocks, copy = HostBlocks(pinned=False), CopyUnderWay()
    large = blocks.take(100_000)
    large.last = copy
    blocks.give_back(large)
    for over, taken in ((False, 102_400 + 4096), (False, 102_400 + 4096), (True, 4096)):
        copy.over = over
        blocks.give_back(blocks.take(4096))
        assert blocks.taken == taken


def test_nothing_moves_on_the_cpu(ranks: Launcher) -> None:
    engine = engine_of(seeded(Transformer, 2), "full")
    assert engine.activations.store is None
    assert len(engine.activations.forwards) == 2


def test_a_forward_without_backward_is_let_go() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with ActivationStore(CPU, frozenset()).unit(nn.Module()):
        small = torch.tanh(x)  # too small to move: kept as it is
    kept = StorageWeakRef(small.untyped_storage())
    del small
    assert kept.expired()
