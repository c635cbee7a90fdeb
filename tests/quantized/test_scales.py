"""Scales of bitsandbytes' weights as parameters: the same values, names and outputs, and no cast."""

from __future__ import annotations

import copy
import io
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

from tests.quantized.layers import KINDS, Net, layer, same_bits
from zero_strategy.quantized.scales import Scale, attach_scales, detach_scales, keeps_dtype

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")
NAMES = {
    "nf4": {"weight.absmax"},
    "nf4-double": {"weight.absmax", "weight.nested_absmax"},
    "nf4-in-bf16": {"weight.absmax"},
    "fp4-double": {"weight.absmax", "weight.nested_absmax"},
    "int8": {"SCB"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_scales_become_parameters_and_plain_tensors_again(kind: str) -> None:
    net = Net(kind)
    x = torch.randn(3, 8)
    before, names, expected = copy.deepcopy(net.state_dict()), [n for n, _ in net.named_parameters()], net(x)
    attach_scales(net)
    attach_scales(net)
    added = {name for name, _ in net.named_parameters()} - set(names)
    assert added == {f"blocks.{index}.base.{name}" for index in range(2) for name in NAMES[kind]}
    assert torch.equal(net(x), expected) and not same_bits(net.state_dict(), before)
    detach_scales(net)
    assert [name for name, _ in net.named_parameters()] == names
    assert torch.equal(net(x), expected) and not same_bits(net.state_dict(), before)
    assert not any(isinstance(getattr(m.weight, "absmax", None), Scale) for m in net.modules() if hasattr(m, "weight"))


@pytest.mark.parametrize(
    ("kind", "torn", "named"),
    [
        ("nf4", "absmax", r"blocks.0.base.weight.absmax has \d+ elements, .* ask for \d+"),
        ("nf4-double", "nested", r"blocks.0.base.weight.nested_absmax has 0 elements, .* ask for 1"),
        ("nf4-double", "no nested", r"blocks.0.base.weight.absmax is of uint8, .* there is no weight.nested_absmax"),
        ("nf4", "weight", r"blocks.0.base.weight has \d+ elements, .* ask for \d+"),
        ("int8", "SCB", r"blocks.0.base.SCB has \d+ elements, .* ask for \d+"),
        ("nf4", "nan", r"blocks.0.base.weight.absmax has 1 of \d+ elements that are not finite"),
        ("nf4-double", "inf", r"blocks.0.base.weight.nested_absmax has 1 of 1 elements that are not finite"),
    ],
)
def test_torn_scales_are_named(kind: str, torn: str, named: str) -> None:
    net = Net(kind)
    base: Any = net.blocks[0].base
    state = getattr(base.weight, "quant_state", None)
    if torn == "absmax":
        state.absmax = state.absmax[:-1]
    elif torn == "nested":
        state.state2.absmax = state.state2.absmax[:-1]
    elif torn == "no nested":
        state.state2, state.nested = None, False
    elif torn == "nan":
        state.absmax[0] = torch.nan
    elif torn == "inf":
        state.state2.absmax[0] = torch.inf
    elif torn == "weight":
        base.weight.data = base.weight.data[:-1]
    else:
        base.weight.SCB = base.weight.SCB[:-1]
    with pytest.raises(ValueError, match=named):
        attach_scales(net)
    assert not any(isinstance(parameter, Scale) for parameter in net.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_inputs_are_those_of_the_library(kind: str) -> None:
    found = []
    for attached in (False, True):
        net = Net(kind).train()
        if attached:
            attach_scales(net)
        net(torch.ones(2, 8)).sum().backward()
        found.append([p.grad for p in net.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "to"])
@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
def test_a_module_s_cast_leaves_scales_alone(kind: str, cast: str) -> None:
    net = Net(kind)
    attach_scales(net)
    scales = {name: p.clone() for name, p in net.named_parameters() if isinstance(p, Scale)}
    net.to(torch.bfloat16) if cast == "to" else getattr(net, cast)()
    after = {name: p for name, p in net.named_parameters() if isinstance(p, Scale)}
    assert scales.keys() == after.keys()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in scales.items())


def test_a_scale_itself_is_cast_as_any_tensor() -> None:
    net = Net("nf4")
    attach_scales(net)
    scale = next(p for p in net.parameters() if isinstance(p, Scale))
    assert scale.double().dtype == scale.to(torch.float64).dtype == torch.float64
    assert scale.half().dtype == torch.float16 and scale.bfloat16().dtype == torch.bfloat16
    assert scale.float() is scale


def test_layers_share_one_table_of_code_values() -> None:
    net = Net("nf4-double")
    attach_scales(net)
    states = [block.base.weight.quant_state for block in net.blocks]
    assert states[0].code is states[1].code and states[0].state2.code is states[1].state2.code


def test_which_parameters_keep_their_dtype() -> None:
    net = Net("nf4-in-bf16")
    attach_scales(net)
    kept = {name for name, parameter in net.named_parameters() if keeps_dtype(parameter)}
    assert kept == {f"blocks.{index}.base.weight{end}" for index in range(2) for end in ("", ".absmax")}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_embeddings_that_the_library_cannot_save_are_refused(kind: str) -> None:
    table: nn.Module = bitsandbytes.nn.EmbeddingNF4(32, 64) if kind == "nf4" else bitsandbytes.nn.Embedding8bit(32, 64)
    net = nn.Sequential(table.to("cpu"), layer(kind, 64, 64))
    with pytest.raises(ValueError, match=r"0 is a Embedding.*cannot save"):
        attach_scales(net)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_loads_what_it_reads(kind: str) -> None:
    net, other = Net(kind), Net(kind)
    other.blocks[0].base = layer(kind, 96, 96)
    attach_scales(net)
    twin = copy.deepcopy(net)
    twin.load_state_dict(other.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(twin(x), other(x))
    attach_scales(twin)
    assert torch.equal(twin(x), other(x))


def test_an_int8_module_is_pickled_as_the_library_s_own() -> None:
    net = Net("int8")
    attach_scales(net)
    x = torch.randn(3, 8)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), net(x))


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_layers_that_share_a_weight(kind: str) -> None:
    net = nn.ModuleDict({"a": layer(kind, 64, 64), "b": layer(kind, 64, 64)})
    net["b"].weight = net["a"].weight
    if kind == "int8":
        net["b"].state = net["a"].state
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    attach_scales(net)
    detach_scales(net)
    assert [name for name, _ in net.named_parameters(remove_duplicate=False)] == names


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_layers_that_are_not_quantised_are_named(kind: str) -> None:
    made = bitsandbytes.nn.Linear8bitLt if kind == "int8" else bitsandbytes.nn.Linear4bit
    more = {"has_fp16_weights": False} if kind == "int8" else {}
    net = nn.Sequential(nn.Linear(4, 4), made(8, 8, **more))
    with pytest.raises(ValueError, match=r"1 is a Linear.* whose weight is not quantised yet.*model.to\(device\)"):
        attach_scales(net)
    assert not any(isinstance(p, Scale) for p in net.parameters())


def test_weights_that_are_quantised_in_each_forward_are_refused() -> None:
    net = nn.Sequential(bitsandbytes.nn.Linear8bitLt(8, 8).to("cpu"))
    with pytest.raises(ValueError, match=r"0 is a Linear8bitLt with has_fp16_weights=True.*int8 copy"):
        attach_scales(net)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strict_load_takes_weights_scales_and_offsets(kind: str) -> None:
    torch.manual_seed(1)
    source, target = Net(kind), Net(kind)
    source.blocks[0].base = layer(kind, 96, 96)
    attach_scales(target)
    target.load_state_dict(source.state_dict())
    assert not same_bits(target.state_dict(), source.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(target(x), source(x))


def test_a_load_of_another_quantisation_is_refused() -> None:
    target = Net("nf4-double")
    attach_scales(target)
    with pytest.raises(
        ValueError, match=r"blocks.0.base.weight is stored with quant_type fp4, and the model's has nf4"
    ):
        target.load_state_dict(Net("fp4-double").state_dict())
    with pytest.raises(ValueError, match=r"nested_blocksize None, and the model's has 256"):
        target.load_state_dict(Net("nf4").state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_a_module_of_its_own(kind: str) -> None:
    net = Net(kind)
    attach_scales(net)
    x = torch.randn(3, 8)
    expected = net(x)
    twin = copy.deepcopy(net)
    attach_scales(twin)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            if isinstance(parameter, Scale):
                parameter.zero_()
    assert not torch.equal(twin(x), expected)  # the parameters are what the library reads
