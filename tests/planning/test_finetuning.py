"""Plans of quantised weights with adapters are what an engine of PEFT's and bitsandbytes' own layers then holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.huggingface.adapters import adapted
from tests.integrations.huggingface.test_pretrained import saved
from tests.integrations.huggingface.training import build
from tests.launcher import Launcher
from tests.planning.models import gpt
from tests.planning.test_command import as_json, run
from tests.quantized.layers import KINDS, SETTINGS, Net, quantised
from zero_strategy.cli.plan_model import Finetuning
from zero_strategy.config import UnitsConfig, load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.engine_of import engine_of
from zero_strategy.planning.finetuning import finetuned
from zero_strategy.planning.gpt_shape import gpt_shape
from zero_strategy.planning.ledger import DEQUANTISED, Entry
from zero_strategy.planning.model_shape import ModelShape
from zero_strategy.quantized.foreseen import QUANTISATIONS
from zero_strategy.quantized.scales import attach_scales

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")
SETTING = {"nf4-double": "nf4", "nf4": "nf4-single", "fp4-double": "fp4", "int8": "int8"}
"""The planner's name for one of `tests.quantized.layers.SETTINGS`."""
UNITS = {"min_numel": 1}
Facts = dict[str, tuple[Any, ...]]


def meta_model(path: str) -> Any:
    """The model of a folder as the command builds it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path), dtype=torch.float32)


def facts(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    """All parameters in order."""
    return [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("how", list(SETTING))
def test_parameters_are_those_of_transformers_and_peft(tmp_path: Path, kind: str, how: str) -> None:
    path = saved(tmp_path, kind)
    real = quantised(kind, path, how, ours=False)
    planned = finetuned(meta_model(path), quantize=SETTING[how], lora=4)
    foreseen, shape = ModelShape.of(planned), ModelShape.of(real)
    assert foreseen.units == shape.units
    assert foreseen.buffers == shape.buffers
    attach_scales(real)
    assert facts(planned) == facts(real)
    assert shape.units == ModelShape.of(real).units


def shapes_in_slices(path: str, how: str) -> list[bool]:
    """True if a plan of a model without values, loaded in slices, is one of its config, with the engine's names."""
    transformers.logging.set_verbosity_error()
    foreseen = ModelShape.of(finetuned(meta_model(path), quantize=SETTING[how], lora=4))
    with fresh_state():
        model = quantised("llama", path, how, ours=True)
        found = [ModelShape.of(model).units == foreseen.units]
        make(3).prepare(model)
        engine = engine_of(model)
        assert engine is not None
        names = {name for bucket in engine.model.buckets for name in bucket.names}
        return [*found, {name for unit in foreseen.units for name, _ in unit.parameters} == names]


@pytest.mark.parametrize("how", ["nf4-double", "int8"])
def test_models_that_are_loaded_in_slices(ranks: Launcher, tmp_path: Path, how: str) -> None:
    assert ranks(2)(shapes_in_slices, saved(tmp_path, "llama"), how) == [[True, True]] * 2


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5"])
def test_the_layers_that_transformers_quantises(tmp_path: Path, kind: str) -> None:
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    model = build(kind)
    planned = {name for name, _, dtype, _ in facts(finetuned(model, quantize="int8")) if dtype == torch.int8}
    skipped = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    replace_with_bnb_linear(model, skipped, config)
    real = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)}
    assert planned == real and real


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5"])
def test_adapters_on_plain_weights_are_those_of_peft(kind: str) -> None:
    plain = build(kind)
    before = facts(plain)
    planned = finetuned(plain, lora=4)
    assert facts(plain) == before and all(parameter.is_meta for parameter in planned.parameters())
    options = {"r": 4, "target_modules": "all-linear", "fan_in_fan_out": kind == "gpt2"}
    real = get_peft_model(plain, LoraConfig(**options))
    assert facts(planned) == facts(real)


def trained(model: Any, stage: int, dtype: torch.dtype | None) -> tuple[ZeroEngine, Any]:
    engine = ZeroEngine(model, load_config(stage=stage, units=UNITS), compute_dtype=dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6)).loss.backward()
        optimizer.step()
    return engine, optimizer


def planned_entries(model: Any, stage: int, dtype: torch.dtype | None) -> list[Entry]:
    plan = load_config(stage=stage, units=UNITS).plan(
        model, world_size=dist.get_world_size(), compute_dtype=dtype, device="cpu", snapshots=False
    )
    found: list[Entry] = plan.ledger(dist.get_rank()).held().merged()
    return found


def compared(path: str, how: str, dtype: torch.dtype | None) -> list[list[list[Entry]]]:
    """By stage: held entries of the engine, of a plan of the config, of a plan of the real module."""
    transformers.logging.set_verbosity_error()
    found = []
    for stage in (1, 2, 3):
        model = quantised("llama", path, how, ours=False)
        of_real = planned_entries(model, stage, dtype)
        engine, optimizer = trained(model, stage, dtype)
        assert optimizer.state
        foreseen = finetuned(meta_model(path), quantize=SETTING[how], lora=4)
        found.append([engine.ledger().merged(), planned_entries(foreseen, stage, dtype), of_real])
    return found


@pytest.mark.parametrize("how", ["nf4-double", "nf4", "int8"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_plan_of_quantised_weights_is_the_ledger_to_the_byte(
    ranks: Launcher, tmp_path: Path, how: str, dtype: torch.dtype | None
) -> None:
    for results in ranks(2, timeout=120)(compared, saved(tmp_path, "llama"), how, dtype):
        for stage, (held, foreseen, of_real) in enumerate(results, 1):
            assert sum(entry.taken for entry in held) > 0
            assert held == foreseen, (stage, how)
            assert held == of_real, (stage, how)


@pytest.mark.parametrize("how", KINDS)
def test_layers_of_the_library_that_are_not_quantised_yet(how: str) -> None:
    real = Net(how)
    waiting = Net(how).to("cpu")
    for index, block in enumerate(waiting.blocks):
        with torch.device("meta"):
            options: dict[str, Any] = {"bias": False}
            if how == "int8":
                block.base = bitsandbytes.nn.Linear8bitLt(96, 96, has_fp16_weights=False, **options)
            else:
                old: Any = real.blocks[index].base
                names = ("compress_statistics", "quant_type", "quant_storage")
                options |= {name: getattr(old.weight, name) for name in names}
                block.base = bitsandbytes.nn.Linear4bit(96, 96, compute_dtype=torch.float32, **options)
    names = [name for name, _ in waiting.named_parameters()]
    assert ModelShape.of(waiting).units == ModelShape.of(real).units
    assert [name for name, _ in waiting.named_parameters()] == names


def test_what_cannot_be_sharded_is_refused_by_a_plan_too() -> None:
    with pytest.raises(ValueError, match=r"0 is a Linear8bitLt with has_fp16_weights=True"):
        ModelShape.of(nn.Sequential(bitsandbytes.nn.Linear8bitLt(8, 8).to("cpu")))


@pytest.mark.parametrize("options", [("nf4", 4), ("int8", None), (None, 4), ("fp4-single", 2)])
def test_plain_numbers_are_a_module_of_their_shape(options: Any) -> None:
    with torch.device("meta"):
        module = gpt(64, 3, 100)
    units = UnitsConfig(min_numel=1)
    shape, real = (
        Finetuning(*options).gpt(gpt_shape(64, 3, 100)),
        Finetuning(*options).shape(module, units, "GPT"),
    )
    assert [(u.name, dict(u.parameters)) for u in shape.units] == [(u.name, dict(u.parameters)) for u in real.units]
    assert [[name for name, _ in u.parameters] for u in shape.units[1:]] == [
        [name for name, _ in u.parameters] for u in real.units[1:]
    ]
    assert all("head" not in name for unit in real.units for name, _ in unit.parameters)


def test_the_command_on_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    run_of = ("--world", "2", "--stage", "3", "--device", "cpu", "--no-snapshots", "--host-mem", "1GB")
    status, found = as_json(capsys, path, "--quantize", "nf4", "--lora", "4", *run_of)
    assert status == 0 and found["model"].endswith("config.json, nf4, LoRA of rank 4")
    model = finetuned(meta_model(path), quantize="nf4", lora=4)
    plan = load_config(stage=3).plan(model, world_size=2, device="cpu", snapshots=False)
    assert found["parameters"] - found["trainable"] == sum(p.numel() for p in build("llama").parameters())
    assert found["ledger"] == json.loads(json.dumps(plan.ledger().to_json()))
    assert found["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    status, out, _ = run(capsys, path, "--quantize", "int8", "--lora", "4", *run_of)
    assert status == 0 and "int8, LoRA of rank 4" in out and "of them frozen" in out and "come on top" in out


@pytest.mark.parametrize("how", list(SETTING))
def test_a_folder_that_is_quantised_already(capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str) -> None:
    path = saved(tmp_path, "llama")
    options = BitsAndBytesConfig(**SETTINGS[how])
    stored = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=options)
    stored.save_pretrained(tmp_path / "stored")
    _, found = as_json(capsys, str(tmp_path / "stored"), "--lora", "4", "--device", "cpu")
    _, expected = as_json(capsys, path, "--quantize", SETTING[how], "--lora", "4", "--device", "cpu")
    assert found["ledger"] == expected["ledger"] and f", {SETTING[how]}, LoRA" in found["model"]


def test_snapshots_leave_frozen_weights_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, file = saved(tmp_path, "llama"), tmp_path / "zero.yaml"
    file.write_text("checkpoint:\n  frozen: include\n")
    sizes = []
    for options in ((), ("--config", str(file))):
        _, found = as_json(capsys, path, "--quantize", "nf4", "--lora", "4", "--device", "cpu", *options)
        sizes.append(next(row["asked"] for row in found["ledger"]["sums"] if row["category"] == "snapshot"))
    assert sizes[0] == 12 * found["trainable"] < sizes[1]


def test_the_command_on_numbers_and_factories(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for how in (None, "nf4", "nf4-single", "fp4", "int8"):
        options = ("--quantize", how) if how else ()
        _, found = as_json(capsys, "--params", "1e9", "--lora", "8", "--gpu-mem", "80GB", "--dtype", "bf16", *options)
        sizes[how] = next(row["asked"] for row in found["ledger"]["sums"] if row["category"] == "parameters")
    assert sizes["nf4"] == sizes["fp4"] < sizes["nf4-single"] < sizes["int8"] < sizes[None]
    status, found = as_json(
        capsys, "tests.planning.models:Stack", "--quantize", "nf4", "--lora", "2", "--device", "cpu"
    )
    assert status == 0 and found["trainable"] == 3 * 2 * (128 + 128)
    largest = {}
    for options in ((), ("--quantize", "nf4", "--lora", "8")):
        _, models = as_json(capsys, "--largest", "--gpu-mem", "2GB", "--host-mem", "4GB", "--dtype", "bf16", *options)
        largest[options] = models[0]["parameters"]
    assert len(set(largest.values())) == 2


def test_values_that_a_layer_computes_with_are_a_peak() -> None:
    shape = Finetuning("nf4", 8).gpt(gpt_shape(256, 2, 1000))
    plan = load_config(stage=3).plan(shape, world_size=2, device="cuda", compute_dtype=torch.bfloat16)
    (peak,) = [entry for entry in plan.ledger() if entry.owner == DEQUANTISED]
    assert peak.peak and peak.taken == 2 * 4 * 256 * 256
    assert not [entry for entry in plan.ledger().held() if entry.owner == DEQUANTISED]


class Plain(nn.Module):
    """A model of no library, with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)


def test_the_head_of_a_plain_model_stays() -> None:
    names = [name for name, _, _, _ in facts(finetuned(Plain(), quantize="nf4", lora=2))]
    assert "base_model.model.head.weight" in names
    assert sum("lora_A" in name for name in names) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--params", "1e8", "--lora", "0"), "the rank of LoRA is 0; accepted: 1 or more"),
        (("--params", "1e8", "--quantize", "nf4", "--world", "2", "--tensor", "2"), "mesh.tensor is 2.*quantised"),
        (("tests.planning.test_finetuning:Scales", "--quantize", "nf4"), "'nf4', but Scales has no linear layer"),
        (("tests.planning.test_finetuning:Scales", "--lora", "4"), "lora is 4, but Scales has no linear layer"),
        (("tests.planning.test_finetuning:with_adapters", "--lora", "4"), "has adapters already"),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == "" and re.search(said, err), err


def test_a_quantisation_that_is_not_known_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"'int4' is not known to the planner; accepted: {', '.join(QUANTISATIONS)}"):
        finetuned(Plain(), quantize="int4")
    with pytest.raises(SystemExit):
        run(capsys, "--params", "1e8", "--quantize", "int4")
    assert "invalid choice: 'int4'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(None, 4), (None, None)])
def test_ranks_divide_adapters_with_their_layers(options: Any) -> None:
    base = build("llama")
    foreseen = Finetuning(*options).shape(base, UnitsConfig(**UNITS), "model")
    real = base if options[1] is None else get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    shape = ModelShape.of(real, UnitsConfig(**UNITS))
    assert foreseen.divided == shape.divided and foreseen.divided
    assert foreseen.of_tensor_rank(2).units == shape.of_tensor_rank(2).units


def test_layers_that_ranks_cannot_divide_have_a_plan_without() -> None:
    real = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    plan = load_config(stage=3).plan(real, world_size=2, device="cpu")
    assert plan.model.trainable == sum(p.numel() for p in real.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match=r"only torch's Linear and Embedding, and plain LoRA of a Linear, are divided"):
        plan.model.of_tensor_rank(2)


def test_ranks_divide_adapters_of_a_gpt() -> None:
    plain, adapted_gpt = gpt_shape(64, 2, 100), Finetuning(None, 4).gpt(gpt_shape(64, 2, 100))
    whole, part = adapted_gpt.parameters, adapted_gpt.of_tensor_rank(2).parameters
    # Of qkv and up B is divided, of out and down A.
    assert whole - part == plain.parameters - plain.of_tensor_rank(2).parameters + 2 * 4 * (96 + 32 + 128 + 128)


class Scales(nn.Module):
    """Nothing linear."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def with_adapters() -> nn.Module:
    """A module that has adapters."""
    return adapted("llama")
