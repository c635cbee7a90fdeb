"""Units that are computed again, their gathers, and refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.activation.unit_nets import WIDTH, Transformer, seeded
from tests.engine.nets import loss_of
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

SMALL = {"min_numel": 0}


def engine_of(model: nn.Module, mode: dict[str, Any], **settings: Any) -> ZeroEngine:
    return ZeroEngine(model, load_config(activation_checkpointing=mode, **{"units": SMALL, **settings}))


def test_one_unit_in_n(ranks: Launcher) -> None:
    for n, numbers in ((1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (9, [0])):
        engine = engine_of(Transformer(5), {"mode": "every_n", "every_n": n}, stage=0)
        assert engine.activations.recomputed == [f"blocks.{number}" for number in numbers]
    assert engine_of(Transformer(2), {"mode": "none"}, stage=0).activations.forwards == []


NESTED = {"min_numel": 0, "patterns": ["blocks.?", "blocks.?.up", "blocks.?.down", "blocks.?.norm?"]}
"""Units inside of units."""


def gathers_of(mode: dict[str, Any], units: dict[str, Any]) -> tuple[float, float]:
    """Gathered elements of one training step as multiples of the model's, and the loss."""
    model = seeded(Transformer)
    engine = engine_of(model, mode, stage=3, prefetch=0, units=units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = torch.zeros(())
    for _ in range(3):
        torch.manual_seed(3)
        engine.counters.reset()
        loss = loss_of(model(x))
        loss.backward()
        sent = engine.counters.elements_sent
        optimizer.step()
        optimizer.zero_grad()
    assert all(not bucket.gathered for unit in engine.model.units for bucket in unit.buckets)
    return sent / sum(bucket.layout.slice_numel for bucket in engine.model.buckets), loss.item()


def gathers(mode: dict[str, Any]) -> list[tuple[float, float]]:
    return [gathers_of(mode, SMALL), gathers_of(mode, NESTED)]


def test_a_unit_is_gathered_once_for_recomputation_and_backward(ranks: Launcher) -> None:
    kept, full, selective = (ranks(2)(gathers, {"mode": mode})[0] for mode in ("none", "full", "selective"))
    for (sent, loss), *others in zip(kept, full, selective, strict=True):
        assert 1 < sent <= 3  # forward, backward, reduction; the last unit of the forward stays for backward
        assert others == [(sent, loss)] * 2


def test_outermost_units_are_computed_again(ranks: Launcher) -> None:
    engine = engine_of(Transformer(2), {"mode": "full"}, stage=0, units=NESTED)
    assert len(engine.model.units) == 11
    assert engine.activations.recomputed == ["blocks.0", "blocks.1"]


def test_a_model_without_units_is_warned_about(ranks: Launcher) -> None:
    with pytest.warns(UserWarning, match=r"mode is 'full'.*no units besides the root.*units.classes"):
        engine_of(nn.Linear(3, 3), {"mode": "full"}, stage=0)


def test_copies_compute_by_themselves(ranks: Launcher) -> None:
    model = seeded(Transformer, 2, WIDTH, 0.0)
    engine = engine_of(model, {"mode": "full"}, stage=0)
    x = torch.randn(2, 5, WIDTH)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.blocks[0].up.weight.zero_()
            copied.blocks[0].up.bias.zero_()
        assert not torch.equal(copied(x), expected)
        assert torch.equal(model(x), expected)
    assert engine.activations.recomputed == ["blocks.0", "blocks.1"]


def test_hooks_of_a_user_see_one_forward(ranks: Launcher) -> None:
    model = seeded(Transformer, 2)
    engine_of(model, {"mode": "full"}, stage=3)
    calls = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    loss_of(model(torch.randn(2, 5, WIDTH))).backward()
    assert calls == ["before", "after"]


def test_a_forward_that_fails_leaves_no_trace(ranks: Launcher) -> None:
    model = seeded(Transformer, 2, WIDTH, 0.0)
    engine = engine_of(model, {"mode": "full"}, stage=3)
    with pytest.raises(RuntimeError, match=r"shape|size|broadcast"):
        model.blocks[0](torch.randn(2, 5, WIDTH + 1))
    engine.reset()
    x = torch.randn(2, 5, WIDTH)
    loss_of(model(x)).backward()
    plain = seeded(Transformer, 2, WIDTH, 0.0)
    loss_of(plain(x)).backward()
    gradients = [p.grad for p in plain.parameters()]
    assert all(torch.equal(p.grad + 0, g) for p, g in zip(model.parameters(), gradients, strict=True) if g is not None)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_kept_result_that_is_changed_in_place_trains_as_in_plain_torch(ranks: Launcher) -> None:
    plain = seeded(InPlace)
    x = torch.randn(2, WIDTH)
    loss_of(plain(x)).backward()
    expected = [p.grad for p in plain.parameters()]
    for mode in ("selective", "full"):
        model = seeded(InPlace)
        engine_of(model, {"mode": mode}, stage=0)
        loss_of(model(x)).backward()
        assert all(
            torch.equal(p.grad + 0, g) for p, g in zip(model.parameters(), expected, strict=True) if g is not None
        )


def test_a_selective_unit_takes_a_second_backward(ranks: Launcher) -> None:
    plain = seeded(Transformer, 2, WIDTH, 0.0)
    x = torch.randn(2, 5, WIDTH)
    loss = loss_of(plain(x))
    loss.backward(retain_graph=True)
    loss.backward()
    expected = [p.grad for p in plain.parameters()]
    model = seeded(Transformer, 2, WIDTH, 0.0)
    engine_of(model, {"mode": "selective"}, stage=3)
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(p.grad + 0, g) for p, g in zip(model.parameters(), expected, strict=True) if g is not None)
