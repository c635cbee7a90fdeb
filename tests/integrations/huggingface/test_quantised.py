"""`from_pretrained` with bitsandbytes: transformers' own values, trained with adapters, never whole on a rank."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.huggingface.adapters import adapted
from tests.integrations.huggingface.test_pretrained import Live, saved
from tests.integrations.huggingface.training import difference, history, resume, rows, run, trainer_of
from tests.integrations.lightning import trainers
from tests.launcher import Launcher
from tests.quantized.layers import KINDS, SETTINGS, exact_evaluation, quantisation, quantised, same_bits
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.huggingface.quantised import WeightQuantiser
from zero_strategy.integrations.transformers import from_pretrained, pipeline_layers
from zero_strategy.pipeline.module import PipelineModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]


def plain_model(path: str, how: str) -> Any:
    transformers.logging.set_verbosity_error()
    settings = BitsAndBytesConfig(**SETTINGS[how])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=settings)
    return exact_evaluation(model)


def loaded(kind: str, path: str, how: str, stage: int) -> list[str]:
    """Differences from what transformers itself loads: state, classes, outputs."""
    transformers.logging.set_verbosity_error()
    options = {"quantization_config": BitsAndBytesConfig(**SETTINGS[how])} if how else {}
    plain = exact_evaluation(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options))
    with fresh_state():
        model = from_pretrained(AutoModelForCausalLM, path, dtype=torch.float32, **options)
        flags = [
            [getattr(m, name, None) for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method")]
            for m in (plain, model)
        ]
        wrong = [] if flags[0] == flags[1] else [f"{flags}"]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        accelerator: Any = make(stage)
        accelerator.prepare(model)
        wrong += same_bits(accelerator.engine(model).full_state_dict(), plain.state_dict())
        inputs = torch.arange(3, 9).view(1, 6)
        with torch.no_grad():
            outputs = [net(inputs).logits for net in (plain, model)]
        if not torch.allclose(*outputs, atol=1e-5):
            wrong.append("outputs")
    return wrong


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_and_scales_are_those_of_transformers(
    ranks: Launcher, tmp_path: Path, kind: str, how: str, stage: int
) -> None:
    path = saved(tmp_path, kind)
    for wrong in ranks(2)(loaded, kind, path, how, stage):
        assert not wrong


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("how", KINDS)
def test_files_that_are_quantised_already(ranks: Launcher, tmp_path: Path, kind: str, how: str) -> None:
    plain_model(saved(tmp_path, kind), how).save_pretrained(tmp_path / "quantised")
    for world in (2, 3):
        for wrong in ranks(world)(loaded, kind, str(tmp_path / "quantised"), "", 3):
            assert not wrong


def exported(kind: str, path: str, how: str, folder: str) -> None:
    transformers.logging.set_verbosity_error()
    with fresh_state():
        options: dict[str, Any] = {"quantization_config": BitsAndBytesConfig(**SETTINGS[how]), "dtype": torch.float32}
        model = from_pretrained(AutoModelForCausalLM, path, **options)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        accelerator: Any = make(3)
        accelerator.prepare(model)
        engine = accelerator.engine(model)
        engine.save_pretrained(folder)
        state = engine.full_state_dict()
        engine.load(folder, optimizers=False)
        assert not same_bits(engine.full_state_dict(), state)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("how", KINDS)
def test_transformers_opens_what_ranks_have_exported(ranks: Launcher, tmp_path: Path, kind: str, how: str) -> None:
    path = saved(tmp_path, kind)
    ranks(2)(exported, kind, path, how, str(tmp_path / "exported"))
    transformers.logging.set_verbosity_error()
    read = exact_evaluation(AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32))
    plain = plain_model(path, how)
    assert not same_bits(read.state_dict(), plain.state_dict())
    inputs = torch.arange(3, 9).view(1, 6)
    with torch.no_grad():
        assert torch.equal(read(inputs).logits, plain(inputs).logits)


def makes(kind: str, path: str, how: str, *, ours: bool) -> Any:
    model = quantised(kind, path, how, ours=ours)
    model.enable_input_require_grads()
    return model


TWENTY_STEPS: dict[str, Any] = {"max_steps": 20, "learning_rate": 1e-3}


def trained_plainly(ranks: Launcher, folder: Path, how: str, make: Any) -> Any:
    """Files of a model, and what the Trainer under `DistributedDataParallel` makes of it."""
    path = saved(folder, "llama")
    made = functools.partial(make, path=path, how=how)
    return path, ranks(2, timeout=120)(run, None, "llama", str(folder / "plain"), make=made, **TWENTY_STEPS)[0]


@pytest.fixture(scope="module")
def plain_trainings(ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Once for each quantisation, not for each test."""
    return functools.cache(
        lambda how: trained_plainly(ranks, tmp_path_factory.mktemp(how), how, functools.partial(makes, ours=False))
    )


@pytest.mark.parametrize("how", ["nf4-double", "nf4", "int8"])
@pytest.mark.parametrize("memory", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_s_losses_and_adapters(
    ranks: Launcher, plain_trainings: Any, tmp_path: Path, how: str, memory: str, stage: int
) -> None:
    path, plain = plain_trainings(how)
    offload = {"optimizer": memory, **({"parameters": memory} if stage == 3 else {})}
    made = functools.partial(makes, path=path, how=how, ours=True)
    ours = ranks(2, timeout=120)(
        run, stage, "llama", str(tmp_path), zero={"offload": offload}, make=made, **TWENTY_STEPS
    )[0]
    assert len(ours[0]) > 20 and difference(plain[0], ours[0]) < 1e-5
    trained = {name for name in plain[1] if "lora_" in name}
    assert trained and max(float((plain[1][n] - ours[1][n]).abs().max()) for n in trained) < 2e-6
    frozen = plain[1].keys() - trained
    assert not same_bits({n: ours[1][n] for n in frozen}, {n: plain[1][n] for n in frozen})
    read = PeftModel.from_pretrained(plain_model(path, how), tmp_path / "model")
    assert not same_bits({n: read.state_dict()[n] for n in trained}, {n: ours[1][n] for n in trained})


def test_a_run_goes_on_at_another_number_of_ranks(ranks: Launcher, tmp_path: Path) -> None:
    given = {"path": saved(tmp_path, "llama"), "how": "nf4-double"}
    made = functools.partial(makes, ours=True, **given)
    whole = ranks(2, timeout=120)(resume, 3, "llama", str(tmp_path / "whole"), 2, make=made)[0]
    ranks(2, timeout=120)(resume, 3, "llama", str(tmp_path / "cut"), 1, make=made)
    for world, stage in ((2, 2), (2, 3)):
        gone_on = ranks(world, timeout=120)(resume, stage, "llama", str(tmp_path / "cut"), None, make=made)[0]
        assert difference(whole[0], gone_on[0]) < 1e-5
        assert all(float((whole[1][n].double() - v.double()).abs().max()) < 1e-5 for n, v in gone_on[1].items())


def peak(path: str, how: str) -> dict[str, int]:
    transformers.logging.set_verbosity_error()
    options = {"quantization_config": quantisation(how)}
    with fresh_state(), Live() as live:
        model = from_pretrained(AutoModelForCausalLM, path, dtype=torch.bfloat16, **options)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        made = live.peak
        accelerator: Any = make(3)
        accelerator.prepare(model)
        units = accelerator.engine(model).model.units
        slices = sum(b.weights.numel * b.weights.dtype.itemsize for unit in units for b in unit.buckets)
        linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
        units = [{name.partition(".weight")[0] for bucket in unit.buckets for name in bucket.names} for unit in units]
        largest = max(sum(2 * m.in_features * m.out_features for n, m in linear.items() if n in unit) for unit in units)
        return {"made": made, "beyond": live.peak - slices, "unit": largest}


@pytest.mark.parametrize("how", ["nf4-double", "fp4-double", "int8", "torchao-int8"])
def test_no_rank_ever_has_more_than_a_unit(ranks: Launcher, tmp_path: Path, how: str) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, num_key_value_heads=2, **shape))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    for found in ranks(2)(peak, str(tmp_path), how):
        assert found["made"] < found["unit"]
        assert found["beyond"] <= found["unit"]


def by_accelerate(path: str, how: str, stage: int | None) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """A loop of one's own with an evaluation and a generation."""
    with fresh_state():
        transformers.logging.set_verbosity_error()
        accelerator: Any = make(stage)
        model = makes("llama", path, how, ours=stage is not None)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        data = torch.stack([row["input_ids"] for row in rows(16)])[dist.get_rank() :: 2]
        for step in range(4):
            batch = data[2 * step : 2 * step + 2]
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        plain = accelerator.unwrap_model(model).eval()
        answer = plain.generate(input_ids=data[:1, :4], max_new_tokens=4, do_sample=False)
        state = accelerator.get_state_dict(model)
        return losses, {n: v for n, v in state.items() if "lora_" in n}, answer[0].tolist()


@pytest.mark.parametrize("how", ["nf4-double", "int8"])
def test_a_loop_of_accelerate(ranks: Launcher, tmp_path: Path, how: str) -> None:
    path = saved(tmp_path, "llama")
    plain = ranks(2, timeout=120)(by_accelerate, path, how, None)[0]
    ours = ranks(2, timeout=120)(by_accelerate, path, how, 3)[0]
    assert max(abs(a - b) for a, b in zip(plain[0], ours[0], strict=True)) < 1e-5
    assert ours[2] == plain[2]


class OtherHfQuantizer:
    """One of transformers' quantizers whose library is not here."""

    pre_quantized = False
    quantization_config = SimpleNamespace(quant_method="other")


def test_other_methods_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"quantised by other cannot be read in slices; accepted: BitsAndBytesConfig"):
        WeightQuantiser(torch.nn.Linear(2, 2), OtherHfQuantizer())


def torn(path: str) -> None:
    transformers.logging.set_verbosity_error()
    with fresh_state(), pytest.raises(ValueError, match=r"q_proj.weight is stored in 4 bits without its scales"):
        from_pretrained(AutoModelForCausalLM, path)


def test_a_file_without_scales_is_named(ranks: Launcher, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain_model(saved(tmp_path, "llama"), "nf4").save_pretrained(tmp_path / "quantised")
    file = tmp_path / "quantised" / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "q_proj.weight.absmax" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    ranks(1)(torn, str(tmp_path / "quantised"))


class Language(LightningModule):
    """A quantised model with an adapter in a module of the user's."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def under_lightning(path: str, how: str, strategy: Any) -> dict[str, Tensor]:
    transformers.logging.set_verbosity_error()
    module = Language(quantised("llama", path, how, ours=strategy != "ddp"))
    lightning = trainers.trainer("ddp" if strategy == "ddp" else trainers.zero(strategy))
    lightning.fit(module, torch.utils.data.DataLoader(rows(8), batch_size=2))
    return trainers.weights(module)


@pytest.mark.parametrize("how", ["nf4-double", "int8"])
def test_quantised_weights_under_lightning(ranks: Launcher, tmp_path: Path, how: str) -> None:
    path = saved(tmp_path, "llama")
    plain, ours = (ranks(2, timeout=120)(under_lightning, path, how, kind)[0] for kind in ("ddp", 3))
    trained = {name for name in plain if "lora_" in name}
    assert trained and max(float((plain[n] - ours[n]).abs().max()) for n in trained) < 2e-6
    assert not same_bits({n: plain[n] for n in plain.keys() - trained}, {n: ours[n] for n in plain.keys() - trained})


@pytest.mark.parametrize("how", ["nf4-double", "int8"])
def test_stages_of_a_pipeline_read_their_own_layers(tmp_path: Path, how: str) -> None:
    transformers.logging.set_verbosity_error()
    path, x = saved(tmp_path, "llama"), torch.arange(3, 11).view(1, 8)
    plain = quantised("llama", path, how, ours=False).eval().base_model.model
    expected, state, hidden = plain(x).logits, {}, x
    for rank in range(2):
        waiting = quantised("llama", path, how, ours=True).base_model.model
        part = PipelineModule(pipeline_layers(waiting), 2, rank=rank).eval()
        engine = ZeroEngine(part, {"stage": 0})
        hidden = part(hidden)
        state |= engine.full_state_dict()
    assert torch.equal(hidden, expected)  # type: ignore[arg-type]
    assert not same_bits(state, plain.state_dict())


def with_mesh(path: str, how: str, mesh: dict[str, int]) -> Any:
    with fresh_state():
        made = functools.partial(makes, path=path, how=how, ours=True)
        zero = {"mesh": mesh}
        trainer = trainer_of(3, "llama", Path(path) / "out", zero=zero, make=made, max_steps=3)
        trainer.train()
        return history(trainer)


def test_long_sequences_divide_and_train(ranks: Launcher, tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    whole = ranks(1, timeout=120)(with_mesh, path, "nf4-double", {})[0]
    divided = ranks(2, timeout=120)(with_mesh, path, "nf4-double", {"sequence": 2, "ulysses": 1})[0]
    assert difference(whole, divided) < 1e-5


def divided_weights(path: str) -> None:
    with pytest.raises(ValueError, match=r"mesh.tensor divides no quantised weights, such as .*leave mesh.tensor at 1"):
        with_mesh(path, "nf4-double", {"tensor": 2})


def test_tensor_parallelism_is_refused(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(divided_weights, saved(tmp_path, "llama"))


def test_an_adapter_on_quantised_weights_has_the_names_of_one_on_plain_ones(tmp_path: Path) -> None:
    model = plain_model(saved(tmp_path, "llama"), "nf4")
    assert {n for n, _ in adapted("llama", model).named_parameters() if "lora_" in n} == {
        n for n, _ in adapted("llama").named_parameters() if "lora_" in n
    }
