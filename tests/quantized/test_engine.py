"""Quantised frozen weights under an engine: one process's values at all stages, bytes divided, guards, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import bitsandbytes.functional
import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integrations.huggingface.training import build
from tests.launcher import Launcher
from tests.quantized.layers import KINDS, Net, layer, quantised, same_bits
from zero_strategy import ZeroEngine
from zero_strategy.convert.convert import convert
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.quantized.scales import Scale

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")
STEPS = 4
UNITS = {"classes": ["Adapted"], "min_numel": 1}


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)
    return x[rank::world], y[rank::world]


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)


def in_one_process(kind: str, world: int) -> dict[str, Tensor]:
    net = Net(kind)
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        for rank in range(world):
            x, y = batch(step, rank, world)
            ((net(x) - y).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def prepared(kind: str, stage: int, net: Any = None, **more: Any) -> tuple[Any, Any, ZeroEngine]:
    net = Net(kind) if net is None else net
    optimizer = optimizer_of(net)
    engine = ZeroEngine(net, {"stage": stage, "units": UNITS, **more})
    engine.attach(optimizer)
    return net, optimizer, engine


def step(net: Any, optimizer: Any, number: int) -> None:
    x, y = batch(number, dist.get_rank(), dist.get_world_size())
    (net(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(kind: str, stage: int, more: dict[str, Any]) -> dict[str, Tensor]:
    net, optimizer, engine = prepared(kind, stage, **more)
    for number in range(STEPS):
        step(net, optimizer, number)
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 8))
    state = engine.full_state_dict()
    assert not same_bits(state, net.state_dict())
    return state


MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded": {"offload": {"parameters": "cpu", "optimizer": "cpu"}},
    "recomputed": {"activation_checkpointing": {"mode": "full"}},
    "hybrid": {"mesh": {"replicate": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_are_those_of_one_process(ranks: Launcher, kind: str, stage: int) -> None:
    expected = in_one_process(kind, 2)
    found = ranks(2)(trained, kind, stage, {})[0]
    frozen = {name for name, value in expected.items() if "base" in name}
    assert not same_bits({n: found[n] for n in frozen}, {n: expected[n] for n in frozen})
    assert found.keys() == expected.keys()
    assert all((found[n] - expected[n]).abs().max() < 2e-6 for n in expected.keys() - frozen)


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
@pytest.mark.parametrize("more", ["offloaded", "recomputed", "hybrid"])
def test_other_settings_give_the_same(ranks: Launcher, kind: str, more: str) -> None:
    world = 4 if more == "hybrid" else 2
    found, expected = (ranks(world)(trained, kind, 3, settings)[0] for settings in (MORE[more], {}))
    if more != "hybrid":
        assert not same_bits(found, expected)
    # Two sums of two ranks each are another order of additions.
    assert all((found[n].double() - expected[n].double()).abs().max() < 2e-6 for n in expected)


def held(kind: str) -> tuple[int, int, int]:
    """Bytes of frozen quantised weights and scales: on this rank between steps, by the ledger, of all ranks."""
    net = Net(kind, width=512)
    frozen = {name for name, _ in net.named_parameters() if "base" in name}
    net, optimizer, engine = prepared(kind, 3, net)
    frozen |= {name for name, parameter in net.named_parameters() if isinstance(parameter, Scale)}
    whole = sum(p.numel() * p.element_size() for name, p in net.named_parameters() if name in frozen)
    step(net, optimizer, 0)
    storages = {}
    for unit in engine.model.units:
        for bucket in unit.buckets:
            if frozen.issuperset(bucket.names):
                tensors = [bucket.weights.read(0, bucket.weights.numel), *(p.data for p in bucket.parameters)]
                storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    entries = [entry for entry in engine.ledger() if frozen.issuperset(entry.owner.names) and entry.owner.names]
    return sum(storages.values()), sum(entry.taken for entry in entries if not entry.peak), whole


def test_a_rank_holds_its_share_of_weights_and_scales(ranks: Launcher) -> None:
    weights = 2 * 512 * 512
    for world in (2, 4):
        for at_rest, by_ledger, whole in ranks(world)(held, "nf4-double"):
            assert by_ledger <= 1.03 * 4.13 / 8 * weights / world
            assert whole / world <= by_ledger <= whole / world + 2048
            assert at_rest <= by_ledger + 2048


def read_between_steps(kind: str) -> list[str]:
    net, optimizer, _ = prepared(kind, 3)
    step(net, optimizer, 0)
    weight = net.blocks[0].base.weight
    errors = []
    reads = [
        lambda: weight.quant_state.absmax + 1,
        lambda: bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state),
    ]
    if kind == "int8":
        reads = [lambda: net.blocks[0].base.state.CB * 1, lambda: net.blocks[0].base.state.SCB * 1]
    for read in reads:
        with pytest.raises(RuntimeError, match=r"released \(stage 3\).*GatheredParameters") as caught:
            read()
        errors.append(str(caught.value))
    with GatheredParameters([weight]):
        if kind == "int8":
            state = net.blocks[0].base.state
            values = state.CB.float() * state.SCB.unsqueeze(1) / 127
        else:
            values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        plain = Net(kind).blocks[0].base
        if kind == "int8":
            plain(torch.ones(1, 96))
            expected = plain.state.CB.float() * plain.state.SCB.unsqueeze(1) / 127
        else:
            expected = bitsandbytes.functional.dequantize_4bit(plain.weight.data, plain.weight.quant_state)
        assert torch.equal(values, expected)
    return errors


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_a_read_between_steps_names_the_weight(ranks: Launcher, kind: str) -> None:
    for errors in ranks(2)(read_between_steps, kind):
        assert any("blocks.0.base.weight" in error or "blocks.0.base.SCB" in error for error in errors)


def saved(kind: str, folder: str) -> dict[str, Tensor]:
    net, optimizer, engine = prepared(kind, 3)
    step(net, optimizer, 0)
    engine.save(folder)
    engine.save(f"{folder}-reference", frozen="reference")
    step(net, optimizer, 1)
    return engine.full_state_dict()


def loaded(kind: str, folder: str, stage: int, *, other: bool) -> dict[str, Tensor]:
    net = Net(kind)
    if other:  # values that only the checkpoint corrects, offsets among them
        torch.manual_seed(5 + dist.get_rank())
        for block in net.blocks:
            block.base = layer(kind, 96, 96)
    net, optimizer, engine = prepared(kind, stage, net)
    engine.load(folder)
    step(net, optimizer, 1)
    return engine.full_state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_on_at_other_ranks_and_stages(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    expected = ranks(2)(saved, kind, str(tmp_path / "c"))[0]
    for world, stage in ((1, 0), (3, 3)):
        for found in ranks(world)(loaded, kind, str(tmp_path / "c"), stage, other=True):
            frozen = {name for name in expected if "base" in name}
            assert not same_bits({n: found[n] for n in frozen}, {n: expected[n] for n in frozen})
            assert all((found[n] - expected[n]).abs().max() < 2e-6 for n in expected.keys() - frozen)
    again = ranks(2)(loaded, kind, str(tmp_path / "c-reference"), 3, other=False)[0]
    assert not same_bits(again, expected)


def closed(kind: str) -> None:
    net, optimizer, engine = prepared(kind, 3)
    names = [name for name, _ in Net(kind).named_parameters()]
    step(net, optimizer, 0)
    state = engine.full_state_dict()
    engine.close(gather=True)
    assert [name for name, _ in net.named_parameters()] == names
    assert not same_bits(net.state_dict(), state)
    net(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("kind", ["nf4-double", "nf4-in-bf16", "int8"])
def test_a_closed_engine_leaves_the_library_s_own_module(ranks: Launcher, kind: str) -> None:
    ranks(2)(closed, kind)


def in_half(kind: str) -> dict[str, Tensor]:
    net = Net(kind)
    engine = ZeroEngine(net, {"stage": 3, "units": UNITS}, compute_dtype=torch.bfloat16)
    net(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    return engine.full_state_dict()


@pytest.mark.parametrize("kind", ["nf4-double", "nf4-in-bf16", "int8"])
def test_a_compute_dtype_casts_neither_packed_values_nor_scales(ranks: Launcher, kind: str) -> None:
    expected = {name: value for name, value in Net(kind).state_dict().items() if "base" in name}
    for found in ranks(2)(in_half, kind):
        assert not same_bits({name: found[name] for name in expected}, expected)
        assert found["first.weight"].dtype == torch.bfloat16


def asked_to_train() -> None:
    net = Net("nf4-in-bf16")
    net.blocks[1].base.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"blocks.1.base.weight is quantised and requires a gradient"):
        ZeroEngine(net, {"stage": 3, "units": UNITS})
    net.blocks[1].base.weight.requires_grad_(False)
    prepared("", 3, net)
    net.blocks[1].base.weight.requires_grad_(True)
    x, y = batch(0, dist.get_rank(), 2)
    with pytest.raises(ValueError, match=r"blocks.1.base.weight requires a gradient since the engine was made, and is"):
        (net(x) - y).square().mean().backward()


def test_a_quantised_weight_that_is_asked_to_train_is_named(ranks: Launcher) -> None:
    ranks(2)(asked_to_train)


def llama() -> Any:
    return build("llama")


def saved_llama(folder: Path) -> str:
    llama().save_pretrained(folder / "llama")
    return str(folder / "llama")


def given(kind: str, path: str, merge: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights that an engine gives of a quantised model with an adapter, and the same by the library and by hand."""
    transformers.logging.set_verbosity_error()
    model = quantised("llama", path, kind, ours=True)
    plain = quantised("llama", path, kind, ours=False)
    engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}})
    found = {name: tensor.clone() for name, tensor in engine.weights(merge_adapters=merge)}
    specs = {spec.name: (spec.dtype, spec.shape) for spec in engine.weights(merge_adapters=merge).specs}
    assert specs == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    wanted = {}
    for name, module in plain.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        base, lora = module.base_layer, (module.lora_A["default"].weight, module.lora_B["default"].weight)
        if kind == "int8":
            base.init_8bit_state() if base.weight.CB is not None else None
            values = base.weight.data.float() * base.state.SCB.unsqueeze(1) / 127
        else:
            values = bitsandbytes.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
        merged = values + lora[1] @ lora[0] * 2  # lora_alpha / r
        key = f"{name}.weight".removeprefix("base_model.model.") if merge else f"{name}.base_layer.weight"
        wanted[key] = (merged if merge else values).detach()
    return found, wanted


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_weights_for_a_server_are_values_with_the_adapter(
    ranks: Launcher, tmp_path: Path, kind: str, merge: bool
) -> None:
    for found, wanted in ranks(2)(given, kind, saved_llama(tmp_path), merge):
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in wanted.items())
        assert not [name for name in found if "absmax" in name or "SCB" in name or (merge and "lora_" in name)]
        if merge:
            assert found.keys() == {name for name, _ in llama().named_parameters()}


def cast(kind: str, folder: str) -> list[str]:
    net, _, engine = prepared(kind, 3)
    engine.save(f"{folder}/half", optimizers=False, weights_dtype=torch.bfloat16)
    engine.save(f"{folder}/native")
    engine.save_pretrained(f"{folder}/plain", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"publish\(\) sends weights as .*'blocks.0.base.weight' is quantised"):
        engine.publish(f"{folder}/published")
    return [name for name, _ in net.named_parameters() if "base" in name]


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["nf4-in-bf16", "nf4", "int8"])
def test_a_dtype_of_files_casts_neither_packed_values_nor_scales(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    names = ranks(2)(cast, kind, str(tmp_path))[0]
    convert(tmp_path / "native", tmp_path / "converted", dtype=torch.bfloat16)
    plain = weights_in(tmp_path / "native")
    for folder in ("half", "converted", "plain"):
        found = weights_in(tmp_path / folder)
        assert not same_bits({n: found[n] for n in names}, {n: plain[n] for n in names})
        assert found["first.weight"].dtype == torch.bfloat16
    if kind != "int8":
        with pytest.raises(ValueError, match=r"form 'hf' would have the quantised weight"):
            convert(tmp_path / "native", tmp_path / "foreign", to_format="hf")


def replaced(kind: str) -> None:
    net, optimizer, engine = prepared(kind, 3)
    step(net, optimizer, 0)
    block = net.blocks[1]
    with GatheredParameters(list(block.parameters())):
        fresh = layer(kind, 96, 96)
        block.base.weight = fresh.weight  # as PEFT's merge and unmerge do
        if kind == "int8":
            block.base.state.reset_grads()
            block.base.state.SCB = fresh.weight.SCB
    for call in (lambda: net(torch.ones(2, 8)), engine.full_state_dict):
        with pytest.raises(RuntimeError, match=r"blocks.1.base has another quantised weight.*close\(gather=True\)"):
            call()


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_a_replaced_weight_is_named(ranks: Launcher, kind: str) -> None:
    ranks(2)(replaced, kind)


class Biased(torch.nn.Module):
    """A 4-bit layer with a bias that it casts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 64)
        plain = torch.nn.Linear(64, 64)
        self.base = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_type="nf4")
        self.base.load_state_dict(plain.state_dict())
        self.base.to("cpu").bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(self.first(x))
        return result


def with_bias(stage: int) -> tuple[Tensor, torch.dtype]:
    net = Biased()
    engine = ZeroEngine(net, {"stage": stage, "units": {"min_numel": 1}})
    net(torch.ones(2, 8)).sum().backward()
    found = net(torch.ones(2, 8)).detach()
    with pytest.raises(ValueError, match=r"base.bias"):  # a user's own assignment is not left out
        net.base.bias.data = torch.zeros(64, dtype=torch.bfloat16)
    return found, engine.full_state_dict()["base.bias"].dtype


@pytest.mark.parametrize("stage", [1, 3])
def test_a_bias_that_the_layer_casts(ranks: Launcher, stage: int) -> None:
    for found, dtype in ranks(2)(with_bias, stage):
        assert torch.equal(found, Biased()(torch.ones(2, 8))) and dtype == torch.float32


def half_covered(kind: str, path: str) -> None:
    transformers.logging.set_verbosity_error()
    model = quantised("llama", path, kind, ours=True)
    model.add_adapter("narrow", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "narrow"])
    engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}})
    names = {name for name, _ in engine.weights()}
    assert names == {name for name, _ in llama().named_parameters()}


def test_adapters_that_some_layers_lack(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(half_covered, "nf4-double", saved_llama(tmp_path))


def without_description(folder: str) -> None:
    engine = prepared("nf4-double", 3)[2]
    engine.save(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        weights = load_file(f"{folder}/model.safetensors")
        Path(f"{folder}-bare").mkdir()
        save_file(weights, f"{folder}-bare/model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    with pytest.raises(ValueError, match=r"base.weight is stored with quantised scales and without what describes"):
        prepared("nf4-double", 3)[2].load_weights(f"{folder}-bare")


def test_scales_without_their_offset_are_refused(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(without_description, str(tmp_path / "c"))
