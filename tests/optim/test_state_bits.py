"""States of 8 bits: one result at every number of ranks, stage and tier; checkpoints; what is refused."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import FusedAdamW, FusedLamb, FusedLion, FusedSGD
from zero_strategy.optim.full_state import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

SHAPES = {"wide": (130, 71), "odd": (4097,), "bias": (130,), "embed": (90, 60), "cube": (17, 16, 33)}


class Linear(nn.Module):
    """A loss that is linear in each parameter, so that its gradient is a tensor of ours."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            shape = SHAPES[name]
            generator = torch.Generator().manual_seed(len(name))
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, step: int) -> Tensor:
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            total = total + (parameter * gradient(name, parameter.shape, step).to(parameter.dtype)).sum().float()
        return total


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """Multiples of 3/8 of few bits: sums and means over 1 to 4 ranks are exact, in bfloat16 as well."""
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    values = torch.randint(-8, 9, shape, generator=generator).float()
    return values * 0.375 * 4.0 ** -torch.randint(0, 4, shape, generator=generator).float()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_block = Linear(("embed",))
        self.blocks = nn.ModuleList([Linear(("wide", "bias", "odd")), Linear(("cube", "bias"))])

    def forward(self, step: int) -> Tensor:
        return self.embed_block(step) + sum(block(step) for block in self.blocks)  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "fused_adamw": lambda p: FusedAdamW(p, lr=0.01, weight_decay=0.1),
    "lion": lambda p: FusedLion(p, lr=0.01),
}


def made(stage: int, kind: str, dtype: torch.dtype | None = None, **config: Any) -> tuple[ZeroEngine, Optimizer]:
    settings = {"units": {"min_numel": 0}, "optimizer": {"state_bits": 8}, **config}
    net = Net()
    engine = ZeroEngine(net, load_config(stage=stage, **settings), compute_dtype=dtype)
    optimizer = KINDS[kind](net.parameters())
    engine.attach(optimizer)
    return engine, optimizer


def steps(engine: ZeroEngine, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        engine.module(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def digests(engine: ZeroEngine, optimizer: Optimizer) -> tuple[str, str]:
    """Of weights, and of states."""
    weights, states = hashlib.sha256(), hashlib.sha256()
    for name, parameter in engine.module.named_parameters():
        weights.update(name.encode() + safe_get_full_fp32_param(parameter).numpy().tobytes())
    found = engine.optimizer_state_dict(optimizer)["state"]
    for number in sorted(found):
        for key in sorted(found[number]):
            states.update(f"{number} {key}".encode() + torch.as_tensor(found[number][key]).numpy().tobytes())
    return weights.hexdigest(), states.hexdigest()


def trained(stage: int, kind: str, low: bool, config: dict[str, Any]) -> tuple[str, str]:
    engine, optimizer = made(stage, kind, torch.bfloat16 if low else None, **config)
    steps(engine, optimizer, 0, 4)
    found = digests(engine, optimizer)
    engine.close()
    return found


def tiers(path: Path) -> dict[str, dict[str, Any]]:
    # Chunks of 2048 elements, so that parameters lie in several.
    files = {"optimizer": "nvme", "nvme_path": [str(path)], "probe_seconds": 0, "staging_bytes": 1 << 16}
    return {
        "memory": {},
        "host": {"offload": {"optimizer": "cpu", "staging_bytes": 1 << 16}},
        "files": {"offload": files},
    }


@pytest.mark.parametrize("low", [False, True])
def test_one_result_at_every_number_of_ranks_stage_and_tier(ranks: Launcher, tmp_path: Path, low: bool) -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for world in (1, 2, 3, 4):
        for tier, config in tiers(tmp_path).items():
            for stage in range(4):
                for digest in ranks(world)(trained, stage, "adamw", low, config):
                    found.setdefault(digest, []).append(f"{world} ranks, stage {stage}, {tier}")
    assert len(found) == 1, found
    assert sum(map(len, found.values())) == 120


@pytest.mark.parametrize("kind", ["adam", "sgd", "lion", "fused_adamw"])
def test_other_optimizers(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    found = set()
    for world, stage, tier in ((1, 0, "memory"), (2, 3, "memory"), (3, 2, "host"), (2, 1, "files")):
        found |= set(ranks(world)(trained, stage, kind, False, tiers(tmp_path)[tier]))
    assert len(found) == 1


def saved(path: str, stage: int, kind: str, config: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    engine, optimizer = made(stage, kind, **config)
    steps(engine, optimizer, 0, 3)
    engine.save(path)
    at_save = digests(engine, optimizer)
    steps(engine, optimizer, 3, 5)
    found = digests(engine, optimizer)
    engine.close()
    return at_save, found


def resumed(path: str, stage: int, kind: str, config: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    engine, optimizer = made(stage, kind, **config)
    steps(engine, optimizer, 0, 1)  # whatever is there must go
    engine.load(path)
    at_load = digests(engine, optimizer)
    steps(engine, optimizer, 3, 5)
    found = digests(engine, optimizer)
    engine.close()
    return at_load, found


@pytest.mark.parametrize("tier", ["memory", "files"])
def test_resuming_at_another_number_of_ranks_goes_on_with_the_same_bits(
    ranks: Launcher, tmp_path: Path, tier: str
) -> None:
    config = tiers(tmp_path)
    (before, after), *_ = ranks(2)(saved, str(tmp_path / "ckpt"), 3, "adamw", config[tier])
    for world, stage, other in ((3, 2, "memory"), (1, 0, "memory"), (3, 3, "host"), (4, 1, "files")):
        for found in ranks(world)(resumed, str(tmp_path / "ckpt"), stage, "adamw", config[other]):
            assert found == (before, after), (world, stage, other)


def states_of(engine: ZeroEngine, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = safe_get_full_optimizer_state(parameter, key)
            assert value is not None and value.shape == parameter.shape and value.dtype == torch.float32
            found[f"{name} {key}"] = value
    return found


def loaded_with_other_bits(path: str, stage: int, bits: int, config: dict[str, Any]) -> dict[str, Tensor]:
    engine, optimizer = made(stage, "adamw", optimizer={"state_bits": bits}, **config)
    engine.load(path)
    found = states_of(engine, optimizer)
    keys = {key for state in engine.optimizer_state_dict(optimizer)["state"].values() for key in state}
    assert ("exp_avg_codes" in keys) == (bits == 8) and "exp_avg" in keys
    steps(engine, optimizer, 3, 4)
    engine.close()
    return found


def saved_with(path: str, bits: int) -> dict[str, Tensor]:
    engine, optimizer = made(2, "adamw", optimizer={"state_bits": bits})
    steps(engine, optimizer, 0, 3)
    engine.save(path)
    found = states_of(engine, optimizer)
    engine.close()
    return found


@pytest.mark.parametrize("tier", ["memory", "host"])
def test_a_checkpoint_of_other_bits_is_converted(ranks: Launcher, tmp_path: Path, tier: str) -> None:
    config = tiers(tmp_path)[tier]
    eight, *_ = ranks(2)(saved_with, str(tmp_path / "8"), 8)
    for stage in (0, 3):  # pieces of a layout without blocks: codes are decoded exactly
        for found in ranks(3)(loaded_with_other_bits, str(tmp_path / "8"), stage, 32, config):
            assert all(torch.equal(found[key], eight[key]) for key in eight)
    full, *_ = ranks(2)(saved_with, str(tmp_path / "32"), 32)
    results = [ranks(n)(loaded_with_other_bits, str(tmp_path / "32"), 3, 8, config)[0] for n in (1, 3)]
    for key, exact in full.items():
        assert torch.equal(results[0][key], results[1][key])
        apart = (results[0][key] - exact).abs().max()
        assert (float(apart) == 0) if "bias" in key else (0 < float(apart) < 0.02 * float(exact.abs().max()))


def whole_states(stage: int) -> list[str]:
    """`optimizer_state_dict` goes into an engine of 8 and of 32 bits, and into an optimizer by itself."""
    engine, optimizer = made(stage, "fused_adamw")
    steps(engine, optimizer, 0, 3)
    whole, expected = engine.optimizer_state_dict(optimizer), digests(engine, optimizer)
    weights = {n: safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    wrong = []
    steps(engine, optimizer, 3, 4)
    engine.load_optimizer_state_dict(optimizer, whole)
    if digests(engine, optimizer)[1] != expected[1]:
        wrong.append("the engine's own")
    parameter = engine.module.blocks[0].wide
    full = safe_get_full_optimizer_state(parameter, "exp_avg")
    scale = safe_get_full_optimizer_state(parameter, "exp_avg_scale")
    assert full is not None and scale is not None and scale.shape == (-(-130 * 71 // 256),)
    safe_set_full_optimizer_state(parameter, full, "exp_avg")
    again = safe_get_full_optimizer_state(parameter, "exp_avg")
    assert again is not None
    if not torch.allclose(again, full, rtol=0.02, atol=0.02 * float(full.abs().max())):  # -1 has no code
        wrong.append("safe_set of what safe_get gave")
    local = safe_get_local_optimizer_state(parameter, "exp_avg")
    assert local is not None and local.dtype == torch.float32
    engine.close()
    net = Net()
    net.load_state_dict(weights)
    alone = FusedAdamW(net.parameters(), lr=0.01, weight_decay=0.1, state_bits=8)
    alone.load_state_dict(copy.deepcopy(whole))
    net(3).backward()
    alone.step()
    one, stepped = made(stage, "fused_adamw")
    one.load_optimizer_state_dict(stepped, whole)
    for name, parameter in one.module.named_parameters():
        safe_set_full_fp32_param(parameter, weights[name])
    steps(one, stepped, 3, 4)
    for name, parameter in one.module.named_parameters():
        if not torch.equal(safe_get_full_fp32_param(parameter), net.get_parameter(name)):
            wrong.append(f"{name} of the optimizer by itself")
    one.close()
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_states(ranks: Launcher, stage: int) -> None:
    for wrong in ranks(2)(whole_states, stage):
        assert not wrong


def patterns() -> list[str]:
    settings = {"state_bits": 8, "keep_32_bits": ["embed*"]}
    engine, optimizer = made(3, "adamw", optimizer=settings)
    steps(engine, optimizer, 0, 1)
    names = [name for name, _ in engine.module.named_parameters()]
    states = engine.optimizer_state_dict(optimizer)["state"]
    keys = [set(optimizer.state[parameter]) for parameter in engine.module.parameters()]
    engine.close()
    assert all(("exp_avg_codes" in states[i]) == ("exp_avg_codes" in keys[i]) for i in range(len(names)))
    return [name for number, name in enumerate(names) if "exp_avg_codes" in states[number]]


def test_small_parameters_and_patterns_keep_32_bits(ranks: Launcher) -> None:
    for found in ranks(3)(patterns):
        assert found == ["blocks.0.wide", "blocks.0.odd", "blocks.1.cube"]


def refused(stage: int, make: Callable[[Any], Optimizer], config: dict[str, Any], dtype: Any = None) -> str:
    net = Net()
    engine = ZeroEngine(net, load_config(stage=stage, units={"min_numel": 0}, **config), compute_dtype=dtype)
    try:
        engine.attach(make(net.parameters()))
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def eight(parameters: Any) -> Optimizer:
    return FusedAdamW(parameters, state_bits=8)


def adagrad(parameters: Any) -> Optimizer:
    return torch.optim.Adagrad(parameters)


def amsgrad(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, amsgrad=True)


def lamb(parameters: Any) -> Optimizer:
    return FusedLamb(parameters)


def test_what_has_no_form_of_8_bits_is_refused_by_name(ranks: Launcher) -> None:
    setting: dict[str, Any] = {"optimizer": {"state_bits": 8}}
    for make, name in ((adagrad, "Adagrad keeps"), (amsgrad, "AdamW with amsgrad=True keeps"), (lamb, "FusedLamb")):
        for message in ranks(2)(refused, 2, make, setting):
            assert "optimizer.state_bits is 8" in message and name in message
    low = {**setting, "precision": {"master_weights": False}}
    for message in ranks(2)(refused, 2, adamw, low, torch.bfloat16):
        assert "is updated in torch.bfloat16" in message and "precision.master_weights" in message


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters)


def test_an_optimizer_of_8_bits_under_a_config_without_them(ranks: Launcher, tmp_path: Path) -> None:
    for message in ranks(3)(refused, 2, eight, {}):
        assert "FusedAdamW has state_bits=8, and ranks would divide 'embed_block.embed' inside" in message
        assert "add the line `optimizer: {state_bits: 8}`" in message
    for message in ranks(2)(refused, 2, eight, {"offload": {"optimizer": "cpu"}}):
        assert "add the line `optimizer: {state_bits: 8}`" in message
    # No piece begins inside of a block where all ranks have all elements.
    assert ranks(2)(refused, 0, eight, {}) == ["", ""] and ranks(1)(refused, 3, eight, {}) == [""]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"optimizer": {"state_bits": 5}}, r"optimizer\.state_bits is 5.*accepted: 8, 32"),
        ({"optimizer": {"state_bits": 8}, "fused_optimizers": False}, "fused_optimizers is False"),
        ({"optimizer": {"state_bits": 8}, "mesh": {"tensor": 2}}, r"mesh\.tensor is 2"),
        ({"optimizer": {"state_bits": 8}, "matrix_optimizers": ["Shampoo"]}, "matrix_optimizers is"),
        (
            {"optimizer": {"state_bits": 8}, "offload": {"optimizer": "cpu", "optimizer_ratio": 0.5}},
            r"offload\.optimizer_ratio is 0\.5",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_config(config)


def test_bad_options_are_named() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="state_bits must be 8, 32 or None, not 5"):
        FusedAdamW(parameters, state_bits=5)
    with pytest.raises(TypeError, match="state_bits must be 8, 32 or None, not '8'"):
        FusedLion(parameters, state_bits="8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave moment_dtype at 'float32'"):
        FusedAdamW(parameters, state_bits=8, moment_dtype="bfloat16")
    with pytest.raises(ValueError, match="FusedLamb keeps states of 32 bits alone"):
        FusedLamb([{"params": parameters, "state_bits": 8}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FusedAdamW, FusedLion, FusedSGD])
def test_an_optimizer_by_itself_goes_on_from_its_state_dict(kind: Any, dtype: torch.dtype) -> None:
    options = {"momentum": 0.9} if kind is FusedSGD else {}

    def train(reload_at: int | None, channels_last: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(70, 100), (10,), (16, 8, 6, 6)]
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        if channels_last:
            parameters[2] = nn.Parameter(parameters[2].detach().to(memory_format=torch.channels_last))
        optimizer = kind(parameters, lr=0.01, state_bits=8, **options)
        for step in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            if step == reload_at:
                state = optimizer.state_dict()
                optimizer = kind(parameters, lr=0.01, state_bits=8, **options)
                optimizer.load_state_dict(state)
            optimizer.step()
        assert {v.dtype for k, v in optimizer.state[parameters[0]].items() if k.endswith("_codes")} == {torch.uint8}
        assert not [k for k in optimizer.state[parameters[1]] if k.endswith("_codes")]
        return [parameter.detach() for parameter in parameters]

    expected = train(None, False)
    for reload_at, channels_last in ((2, False), (None, True), (2, True)):
        assert all(map(torch.equal, expected, train(reload_at, channels_last)))


def test_states_of_torch_and_of_32_bits_are_taken_and_given() -> None:
    parameter = nn.Parameter(torch.randn(64, 65, generator=torch.Generator().manual_seed(0)))
    theirs = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    theirs.step()
    ours = FusedAdamW([parameter], state_bits=8)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert ours.state[parameter]["step"] == 2 and "exp_avg" not in ours.state[parameter]
    with pytest.raises(KeyError, match="exp_avg"):  # never codes for numbers
        theirs.load_state_dict(ours.state_dict())
        theirs.step()
    full = FusedAdamW([parameter], state_bits=32)
    full.load_state_dict(ours.state_dict())
    full.step()
    assert full.state[parameter]["step"] == 3 and full.state[parameter]["exp_avg"].dtype == torch.float32


def test_bits_of_state() -> None:
    parameter = nn.Parameter(torch.randn(1 << 16))
    optimizer = FusedAdamW([parameter], state_bits=8)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    nbytes = sum(value.nbytes for key, value in optimizer.state[parameter].items() if key != "step")
    assert nbytes / parameter.numel() == 2 + 8 / 256


def losses(make: Callable[[Any], Optimizer], steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 160), nn.GELU(), nn.Linear(160, 8))
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer, generator, found = make(model.parameters()), torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = (model(x) - teacher(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_it_learns_as_well_as_with_32_bits() -> None:
    of_8, of_32 = (losses(lambda p, b=b: FusedAdamW(p, lr=1e-3, state_bits=b), 150) for b in (8, 32))
    assert sum(of_32[-10:]) < 0.5 * sum(of_32[:10])
    assert abs(sum(of_8[-10:]) / sum(of_32[-10:]) - 1) < 0.01
