"""Weights that torchao quantises under an engine: one process's values, bytes divided, guards, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.launcher import Launcher
from tests.quantized.layers import WRAPPED, Net, apart, same_bits
from tests.quantized.test_engine import MORE, UNITS, in_one_process, prepared, step, trained
from zero_strategy import ZeroEngine
from zero_strategy.config import load_config
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.quantized.wrapped import inner_tensors, is_wrapped


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wrapped_weights_give_the_values_of_one_process(ranks: Launcher, kind: str, stage: int) -> None:
    expected = apart(in_one_process(kind, 2))
    found = ranks(2)(trained, kind, stage, {})[0]
    frozen = {name for name in expected if "base" in name}
    assert found.keys() == expected.keys()
    assert not same_bits({n: found[n] for n in frozen}, {n: expected[n] for n in frozen})
    assert all((found[n] - expected[n]).abs().max() < 2e-6 for n in expected.keys() - frozen)


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("more", ["offloaded", "recomputed"])
def test_wrapped_weights_under_other_settings(ranks: Launcher, kind: str, more: str) -> None:
    found, expected = (ranks(2)(trained, kind, 3, settings)[0] for settings in (MORE[more], {}))
    assert not same_bits(found, expected)


def read_at_rest(kind: str) -> list[str]:
    net, optimizer, _ = prepared(kind, 3)
    step(net, optimizer, 0)
    weight = net.blocks[0].base.weight
    assert weight.shape == (128, 128) and weight.dtype == torch.float32 and not weight.requires_grad
    errors = []
    # Of the library's functions, of torch's that the library answers, and of operators below Python.
    for read in (
        lambda: weight.to(torch.float64),
        weight.clone,
        lambda: nn.functional.linear(torch.ones(1, 128), weight),
    ):
        with pytest.raises(RuntimeError, match=r"released \(stage 3\)") as caught:
            read()
        errors.append(str(caught.value))
    parts = list(inner_tensors(weight).values())
    plain = Net(kind).blocks[0].base.weight
    with GatheredParameters([weight]):
        for one, other in zip(parts, inner_tensors(plain).values(), strict=True):
            assert torch.equal(one, other)
        ones = torch.ones(1, 128)
        assert torch.equal(nn.functional.linear(ones, weight), nn.functional.linear(ones, plain))
    return errors


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_read_of_a_wrapped_weight_names_its_part(ranks: Launcher, kind: str) -> None:
    for errors in ranks(2)(read_at_rest, kind):
        assert all("blocks.0.base.weight." in error for error in errors), errors


def saved_parts(kind: str, folder: str) -> dict[str, Tensor]:
    net, optimizer, engine = prepared(kind, 3)
    step(net, optimizer, 0)
    engine.save(folder)
    engine.save(f"{folder}-half", optimizers=False, weights_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"would have the quantised weight blocks.0.base.weight without"):
        engine.save_pretrained(f"{folder}-plain")
    step(net, optimizer, 1)
    return engine.full_state_dict()


def loaded_parts(kind: str, folder: str, stage: int) -> dict[str, Tensor]:
    net = Net(kind)
    for block in net.blocks:
        block.base.weight = other_weight(kind)
    net, optimizer, engine = prepared(kind, stage, net)
    engine.load(folder)
    step(net, optimizer, 1)
    return engine.full_state_dict()


def other_weight(kind: str) -> nn.Parameter:
    layer = nn.Linear(128, 128, bias=False)
    quantize_(layer, WRAPPED[kind]())
    return layer.weight


@pytest.mark.parametrize("kind", WRAPPED)
def test_checkpoints_of_wrapped_weights_go_on_elsewhere(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    expected = ranks(2)(saved_parts, kind, str(tmp_path / "c"))[0]
    frozen = {name for name in expected if "base" in name}
    for world, stage in ((1, 0), (3, 3)):
        for found in ranks(world)(loaded_parts, kind, str(tmp_path / "c"), stage):
            assert not same_bits({n: found[n] for n in frozen}, {n: expected[n] for n in frozen})
            assert all((found[n] - expected[n]).abs().max() < 2e-6 for n in expected.keys() - frozen)


def given_and_closed(kind: str) -> None:
    plain = Net(kind)
    net, optimizer, engine = prepared(kind, 3)
    step(net, optimizer, 0)
    plan = load_config(stage=3, units=UNITS).plan(Net(kind), world_size=2, device="cpu", snapshots=False)
    assert engine.ledger().merged() == plan.ledger(dist.get_rank()).held().merged()
    given = {name: value.clone() for name, value in engine.weights()}
    base = plain.blocks[0].base.weight
    values = base.get_original_weight() if "nf4" in kind else base.dequantize()
    assert torch.equal(given["blocks.0.base.weight"], values)
    assert given.keys() == dict(plain.named_parameters()).keys()
    step(net, optimizer, 1)
    net.blocks[1].base.weight = other_weight(kind)
    with pytest.raises(RuntimeError, match=r"blocks.1.base has another quantised weight"):
        step(net, optimizer, 2)


@pytest.mark.parametrize("kind", WRAPPED)
def test_plan_and_given_weights(ranks: Launcher, kind: str) -> None:
    ranks(2)(given_and_closed, kind)


def left(kind: str) -> None:
    net, optimizer, engine = prepared(kind, 3)
    step(net, optimizer, 0)
    engine.close(gather=True)
    plain = Net(kind)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert type(net.blocks[0].base.weight) is type(plain.blocks[0].base.weight)
    frozen = {name: value for name, value in net.state_dict().items() if "base" in name}
    expected = {name: value for name, value in plain.state_dict().items() if "base" in name}
    assert not same_bits(apart(frozen), apart(expected))
    net(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_closed_engine_leaves_torchao_s_own_weights(ranks: Launcher, kind: str) -> None:
    ranks(2)(left, kind)


def refused() -> None:
    net = Net("torchao-int8")
    layer = nn.Linear(128, 128)
    quantize_(layer, Int8WeightOnlyConfig())
    net.experts = layer.weight
    with pytest.raises(ValueError, match=r"experts is a Int8Tensor.*named weight"):
        ZeroEngine(net, {"stage": 3, "units": UNITS})
    net.experts = None
    net.blocks[1].base.weight = nn.Parameter(net.blocks[1].base.weight.detach(), requires_grad=True)
    with pytest.raises(ValueError, match=r"blocks.1.base.weight is quantised \(Int8Tensor\) and requires a gradient"):
        ZeroEngine(net, {"stage": 3, "units": UNITS})
    net.blocks[1].base.weight.requires_grad_(False)
    prepared("", 3, net)


def test_wrapped_weights_that_cannot_be_divided_are_named(ranks: Launcher) -> None:
    ranks(2)(refused)


def replaced(kind: str, stage: int) -> None:
    """Another weight in place of a divided one counts, and nothing of the former is left."""
    net, optimizer, engine = prepared(kind, stage)
    step(net, optimizer, 0)
    given = other_weight(kind)
    net.blocks[0].base.weight = given
    with pytest.raises(RuntimeError, match=r"blocks.0.base has another quantised weight"):
        engine.weights()
    engine.close(gather=True)
    assert [name for name, _ in net.named_parameters() if "blocks.0.base" in name] == ["blocks.0.base.weight"]
    expected = net(torch.ones(2, 8)).detach()
    again = ZeroEngine(net, {"stage": stage, "units": UNITS})
    assert torch.equal(net(torch.ones(2, 8)), expected)
    part = net.blocks[1].base.weight
    name = next(iter(inner_tensors(part)))
    setattr(part, name, torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"blocks.1.base has another quantised weight"):
        again.weights()


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_that_replaces_a_wrapped_one_counts(ranks: Launcher, kind: str, stage: int) -> None:
    ranks(2)(replaced, kind, stage)


def like_plain_modules(kind: str) -> None:
    plain = Net(kind)
    net = Net(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="Nope"):
        ZeroEngine(net, {"stage": 3, "units": {"classes": ["Nope"]}})
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
    engine = ZeroEngine(net, {"stage": 0, "units": UNITS})
    engine.attach(optimizer)
    step(net, optimizer, 0)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(list(plain.parameters())) - 2 and not any(map(is_wrapped, held))
    net.load_state_dict(net.state_dict())
    net.load_state_dict(engine.full_state_dict())
    other = Net(kind)
    other.blocks[0].base.weight = other_weight(kind)
    net.load_state_dict(other.state_dict())
    assert not same_bits(apart(other.state_dict()), engine.full_state_dict())
    weight, expected = net.blocks[0].base.weight, other.blocks[0].base.weight
    copied = copy.deepcopy(net.blocks[0].base)
    ones = torch.ones(1, 128)
    assert torch.equal(copied(ones), net.blocks[0].base(ones)) and "parameters" in repr(weight)
    copied.load_state_dict({name: torch.zeros_like(part) for name, part in copied.state_dict().items()})
    assert torch.equal(net.blocks[0].base(ones), nn.functional.linear(ones, expected))
    if kind == "torchao-int8":  # torchao cuts no NF4Tensor
        assert torch.equal(weight[:64].dequantize(), expected[:64].dequantize())
    weight.copy_(Net(kind).blocks[0].base.weight)
    assert torch.equal(nn.functional.linear(ones, weight), plain.blocks[0].base(ones))


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_weights_do_what_they_do_in_plain_modules(ranks: Launcher, kind: str) -> None:
    ranks(2)(like_plain_modules, kind)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        net = Net(kind)
        self.first, self.blocks, self.last = net.first, net.blocks, net.last
        self.blocks[1].base.weight = self.blocks[0].base.weight

    forward = Net.forward


def tied(kind: str) -> None:
    net = Tied(kind)
    net, optimizer, engine = prepared(kind, 3, net)
    step(net, optimizer, 0)
    plan = load_config(stage=3, units=UNITS).plan(Tied(kind), world_size=2, device="cpu", snapshots=False)
    assert engine.ledger().merged() == plan.ledger(dist.get_rank()).held().merged()


@pytest.mark.parametrize("kind", WRAPPED)
def test_layers_that_share_a_wrapped_weight_share_its_parts(ranks: Launcher, kind: str) -> None:
    ranks(2)(tied, kind)
