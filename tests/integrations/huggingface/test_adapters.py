"""PEFT adapters: the Trainer's losses, adapters that PEFT reads, checkpoints without the frozen weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.huggingface.adapters import adapted
from tests.integrations.huggingface.training import build, difference, resume, rows, run, trainer_of
from tests.launcher import Launcher

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
STAGES = {"llama": [1, 2, 3], "gpt2": [3]}


def with_head(kind: str) -> PeftModel:
    return adapted(kind, modules_to_save=["lm_head"])


def with_two(kind: str) -> PeftModel:
    """A second adapter, which is not active."""
    model = adapted(kind)
    model.add_adapter("other", model.peft_config["default"])
    return model


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def expect_adapter(folder: Path, kind: str, state: dict[str, Tensor]) -> None:
    """PEFT alone reads there what was trained."""
    read = PeftModel.from_pretrained(build(kind), folder)
    theirs = read.state_dict()
    assert theirs.keys() == state.keys()
    assert all(torch.equal(theirs[name], value) for name, value in state.items())
    names = set(get_peft_model_state_dict(read))
    assert set(load_file(folder / "adapter_model.safetensors")) == names


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_same_training_and_an_adapter_that_peft_reads(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    plain, _ = ranks(2, timeout=120)(run, None, kind, str(tmp_path / "plain"), make=adapted)[0]
    for stage in STAGES[kind]:
        ours, state = ranks(2, timeout=120)(run, stage, kind, str(tmp_path / str(stage)), make=adapted)[0]
        assert difference(plain, ours) < 1e-5 and len(ours) > 8
        saved = tmp_path / str(stage) / "model"
        assert {path.name for path in saved.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
        assert not (saved / "model.safetensors").exists()
        expect_adapter(saved, kind, state)


def test_modules_to_save(ranks: Launcher, tmp_path: Path) -> None:
    plain, _ = ranks(2, timeout=120)(run, None, "llama", str(tmp_path / "plain"), make=with_head)[0]
    ours, state = ranks(2, timeout=120)(run, 3, "llama", str(tmp_path / "ours"), make=with_head)[0]
    assert difference(plain, ours) < 1e-5
    expect_adapter(tmp_path / "ours" / "model", "llama", state)


def test_several_adapters(ranks: Launcher, tmp_path: Path) -> None:
    _, state = ranks(2, timeout=120)(run, 3, "llama", str(tmp_path), make=with_two)[0]
    other = load_file(tmp_path / "model" / "other" / "adapter_model.safetensors")
    for name, value in other.items():
        module, _, what = name.rpartition(".")
        assert torch.equal(state[f"{module}.other.{what}"], value)


def test_adapters_resume_at_the_same_and_at_another_world_size(ranks: Launcher, tmp_path: Path) -> None:
    for folder, epochs in (("whole", 2), ("cut", 1)):
        through = ranks(2, timeout=120)(resume, 3, "llama", str(tmp_path / folder), epochs, make=adapted)[0]
        if folder == "whole":
            expected = through
    gone_on = ranks(2, timeout=120)(resume, 2, "llama", str(tmp_path / "cut"), None, make=adapted)[0]
    assert difference(expected[0], gone_on[0]) < 1e-5
    assert all(float((expected[1][name] - value).abs().max()) < 1e-5 for name, value in gone_on[1].items())
    last = tmp_path / "whole" / "checkpoint-8"
    expect_adapter(last, "llama", expected[1])
    assert bytes_in(last) < sum(value.nbytes for value in expected[1].values()) / 2  # no frozen weights
    alone = ranks(1, timeout=120)(resume, 1, "llama", str(tmp_path / "whole"), None, make=adapted, num_train_epochs=3)[
        0
    ]
    assert len(alone[0]) > len(expected[0]) and all(bool(value.isfinite().all()) for value in alone[1].values())


def test_adapters_resuming_what_the_trainer_itself_saved(ranks: Launcher, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    ranks(2, timeout=120)(resume, None, "llama", folder, 1, make=adapted)
    shutil.copytree(folder, tmp_path / "other")
    plain = ranks(2, timeout=120)(resume, None, "llama", folder, None, make=adapted)[0]
    ours = ranks(2, timeout=120)(resume, 3, "llama", str(tmp_path / "other"), None, make=adapted)[0]
    assert difference(plain[0], ours[0]) < 1e-5


def best(folder: str, stage: int, **more: Any) -> bool:
    settings: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True, **more}  # so that it is not the last
    with fresh_state():
        trainer = trainer_of(stage, "llama", Path(folder), make=adapted, save_total_limit=1, **settings)
        trainer.train()
        logged = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
        return logged[0] > logged[1] and abs(trainer.evaluate()["eval_loss"] - logged[0]) < 1e-5


@pytest.mark.parametrize("stage", [1, 3])
def test_the_best_model_last(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    assert all(ranks(2, timeout=120)(best, str(tmp_path / "whole"), stage))
    assert all(ranks(2, timeout=120)(best, str(tmp_path / "weights"), stage, save_only_model=True))


def by_accelerate(folder: str, stage: int | None) -> list[float]:
    """A loop of one's own, as PEFT's documentation has it, with a save and a resume in the middle."""
    with fresh_state():
        accelerator: Any = make(stage)
        model, losses = adapted("llama"), []
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        data = torch.stack([row["input_ids"] for row in rows(16)])[dist.get_rank() :: 2]
        for step in range(4):
            batch = data[2 * step : 2 * step + 2]
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if step == 1 and stage is not None:
                accelerator.save_state(f"{folder}/state")
                accelerator.wait_for_saves()
                accelerator.load_state(f"{folder}/state")
        plain = accelerator.unwrap_model(model)
        state = accelerator.get_state_dict(model)
        plain.save_pretrained(f"{folder}/adapter", state_dict=state, is_main_process=accelerator.is_main_process)
        accelerator.wait_for_everyone()
        return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_accelerate(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    plain = ranks(2, timeout=120)(by_accelerate, str(tmp_path / "plain"), None)[0]
    ours = ranks(2, timeout=120)(by_accelerate, str(tmp_path / "ours"), stage)[0]
    assert max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < 1e-6
    files = [load_file(tmp_path / which / "adapter" / "adapter_model.safetensors") for which in ("plain", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(float((files[0][name] - value).abs().max()) < 1e-5 for name, value in files[1].items())
    PeftModel.from_pretrained(build("llama"), tmp_path / "ours" / "adapter")
