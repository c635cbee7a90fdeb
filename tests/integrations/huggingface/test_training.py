"""The transformers Trainer and ours: the same losses, weights that reload without this package, resume, generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.training import (
    KINDS,
    StopAfter,
    Trained,
    difference,
    generated,
    history,
    resume,
    run,
    trainer_of,
    whole,
)
from tests.launcher import Launcher
from tests.warm import run_warm
from zero_strategy.config import UnitsConfig
from zero_strategy.integrations.transformers import ZeroTrainer
from zero_strategy.optim import MuonAdamW, split_matrices

STAGES = {"gpt2": [1, 2], "llama": [3], "bert": [2], "t5": [1, 3]}
RELOAD = """
import json, sys
sys.modules["zero_strategy"] = None
import torch, transformers
found = {}
for folder in sys.argv[1:]:
    config = json.load(open(f"{folder}/config.json"))
    kind = getattr(transformers, config["architectures"][0])
    model, problems = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(problems.values()), problems
    found[folder] = {name: float(value.double().abs().sum()) for name, value in model.state_dict().items()}
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_training(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    plain, _ = ranks(2, timeout=120)(run, None, kind, str(tmp_path / "plain"))[0]
    folders, expected = [], {}
    for stage in STAGES[kind]:
        folder = tmp_path / str(stage)
        ours, state = ranks(2, timeout=120)(run, stage, kind, str(folder))[0]
        assert difference(plain, ours) < 1e-5 and len(ours) > 8
        folders.append(str(folder / "model"))
        expected[folders[-1]] = {name: float(value.double().abs().sum()) for name, value in state.items()}
    done = run_warm(RELOAD, *folders, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def saved_twice(folder: str) -> list[list[str]]:
    """Saved before and after more training, into a new directory, one with other files, and one with a checkpoint."""
    with fresh_state():
        trainer, found = trainer_of(3, "gpt2", Path(folder) / "run", save_strategy="epoch", num_train_epochs=1), []
        for name in ("new", "new", "mixed", "run/checkpoint-4"):
            (Path(folder) / "mixed").mkdir(exist_ok=True)
            (Path(folder) / "mixed" / "notes.txt").write_text("mine")
            trainer.train()
            trainer.save_model(f"{folder}/{name}")
            trainer.accelerator.wait_for_everyone()
            paths = [path for path in (Path(folder) / name).rglob("*") if path.is_file()]
            found.append(sorted(path.relative_to(Path(folder) / name).as_posix() for path in paths))
            state = whole(trainer)
            stored = load_file(f"{folder}/{name}/model.safetensors")
            assert all(torch.equal(value, state[key]) for key, value in stored.items()) and stored
            trainer.accelerator.wait_for_everyone()
        return found


def test_save_model_writes_a_model_and_no_checkpoint(ranks: Launcher, tmp_path: Path) -> None:
    """Files of an upload: no manifest, no random states of ranks, nothing of an earlier save."""
    model = ["config.json", "generation_config.json", "model.safetensors", "training_args.bin"]
    beside = ["rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"]
    for found in ranks(2, timeout=120)(saved_twice, str(tmp_path)):
        assert found == [model, model, sorted([*model, "notes.txt"]), sorted([*model, *beside])]


def frozen_model(folder: str) -> None:
    with fresh_state():
        trainer = trainer_of(3, "gpt2", Path(folder), zero={"checkpoint": {"frozen": "reference"}}, max_steps=1)
        trainer.model.transformer.wte.weight.requires_grad_(False)
        trainer.train()
        trainer.save_model(f"{folder}/model")
        trainer.accelerator.wait_for_everyone()
        stored, state = load_file(f"{folder}/model/model.safetensors"), whole(trainer)
        assert torch.equal(stored["transformer.wte.weight"], state["transformer.wte.weight"])
        assert all(torch.equal(value, state[name]) for name, value in stored.items())
        assert not (Path(folder) / "model" / "manifest.json").exists()


def test_save_model_writes_frozen_weights_that_checkpoints_leave_out(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2, timeout=120)(frozen_model, str(tmp_path))


def in_fp16(stage: int, folder: str, resumed: bool) -> tuple[Trained, list[float], float, str]:
    """Trained, the gradient norms, the scale at the end, and what the model computes in."""
    seen: list[str] = []
    zero = {"loss_scale": {"initial": 64.0, "growth_interval": 4}}
    with fresh_state():
        arguments = {"fp16": True, "save_strategy": "epoch", "num_train_epochs": 2}
        trainer = trainer_of(stage, "gpt2", Path(folder), zero=zero, **arguments)
        trainer.model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *call: seen.append(str(call[2].dtype)))
        if not resumed:
            trainer.add_callback(StopAfter(1))
        trainer.train(resume_from_checkpoint=resumed)
        norms = [record["grad_norm"] for record in history(trainer) if "grad_norm" in record]
        return (history(trainer), whole(trainer)), norms, trainer.accelerator.scaler.get_scale(), seen[0]


def test_fp16_with_a_scale_that_is_resumed(ranks: Launcher, tmp_path: Path) -> None:
    """Plain Trainer computes in fp32 on the CPU; ours in what was asked for."""
    plain, _ = ranks(2, timeout=120)(resume, None, "gpt2", str(tmp_path / "plain"), 2)[0]
    ranks(2, timeout=120)(in_fp16, 2, str(tmp_path / "fp16"), False)
    (logged, state), norms, scale, dtype = ranks(2, timeout=120)(in_fp16, 3, str(tmp_path / "fp16"), True)[0]
    assert dtype == "torch.float16" and state["transformer.wte.weight"].dtype == torch.float32
    assert 0 < difference(plain, logged) < 2e-2 and max(norms) < 20, "norms are those of unscaled gradients"
    assert scale == 64.0 * 2 ** (len(norms) // 4)


def test_gradient_checkpointing_and_label_smoothing(ranks: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_checkpointing": True, "label_smoothing_factor": 0.1, "num_train_epochs": 1}
    plain, _ = ranks(2, timeout=120)(run, None, "llama", str(tmp_path / "plain"), **options)[0]
    ours, _ = ranks(2, timeout=120)(run, 3, "llama", str(tmp_path / "ours"), **options)[0]
    assert difference(plain, ours) < 1e-5


def test_transformers_resume_at_the_same_and_at_another_world_size(ranks: Launcher, tmp_path: Path) -> None:
    for folder in ("whole", "cut"):
        ranks(2, timeout=120)(resume, 2, "gpt2", str(tmp_path / folder), 2 if folder == "whole" else 1)
    through = ranks(2, timeout=120)(resume, 2, "gpt2", str(tmp_path / "other"), 2)[0]
    gone_on = ranks(2, timeout=120)(resume, 3, "gpt2", str(tmp_path / "cut"), None)[0]
    assert difference(through[0], gone_on[0]) < 1e-5
    assert all(float((through[1][name] - value).abs().max()) < 1e-5 for name, value in gone_on[1].items())
    alone = ranks(1, timeout=120)(resume, 1, "gpt2", str(tmp_path / "whole"), None, num_train_epochs=3)[0]
    assert all(bool(torch.isfinite(value).all()) for value in alone[1].values()) and len(alone[0]) > len(through[0])


def test_generating_in_evaluation(ranks: Launcher, tmp_path: Path) -> None:
    plain = ranks(2, timeout=120)(generated, None, str(tmp_path / "plain"))[0]
    assert ranks(2, timeout=120)(generated, 3, str(tmp_path / "ours"))[0] == plain


def test_ranks_that_generate_for_different_lengths(ranks: Launcher, tmp_path: Path) -> None:
    plain = ranks(2, timeout=120)(generated, None, str(tmp_path / "plain"), True)[0]
    assert ranks(2, timeout=120)(generated, 3, str(tmp_path / "ours"), True)[0] == plain


def best(folder: str, stage: int) -> bool:
    with fresh_state():
        trainer = trainer_of(
            stage,
            "gpt2",
            Path(folder),
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            save_total_limit=1,
            learning_rate=0.5,
        )
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.evaluate()
        trainer.train()
        first = trainer.evaluate()["eval_loss"]
        logged = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
        changed = any(not torch.equal(before[name], value) for name, value in whole(trainer).items())
        return changed and abs(first - min(logged[1:])) < 1e-5


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluating_first_and_the_best_model_last(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    assert all(ranks(2, timeout=120)(best, str(tmp_path), stage))


def by_json(path: str, folder: str, **arguments: Any) -> Any:
    with fresh_state():
        trainer = trainer_of(None, "gpt2", Path(folder), **arguments)
        ours: Any = ZeroTrainer
        try:
            trainer = ours(trainer.model, trainer.args, zero_config=path, train_dataset=trainer.train_dataset)
            trainer.train()
        except ValueError as error:
            return str(error)
        return history(trainer), trainer.accelerator.zero_config.stage


SCHEDULE: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}


@pytest.fixture(scope="module")
def plain_with_schedule(ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The log of transformers' own Trainer."""
    return ranks(2, timeout=120)(run_plain, str(tmp_path_factory.mktemp("plain")), **SCHEDULE)[0][0]


@pytest.mark.filterwarnings("ignore:keys without effect")
def test_a_deepspeed_json_of_the_documentation(ranks: Launcher, tmp_path: Path, plain_with_schedule: Any) -> None:
    path = str(Path(__file__).parents[2] / "config" / "data" / "hf_zero2.json")
    logged, stage = ranks(2, timeout=120)(by_json, path, str(tmp_path), **SCHEDULE)[0]
    assert stage == 2 and difference(plain_with_schedule, logged) < 1e-5
    message = ranks(2, timeout=120)(by_json, path, str(tmp_path))[0]
    assert "scheduler is 'WarmupLR'" in message and "lr_scheduler_type" in message
    other = tmp_path / "ds.json"
    other.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 2.0}))
    message = ranks(2, timeout=120)(by_json, str(other), str(tmp_path))[0]
    assert "gradient_clipping is 2.0" in message and "max_grad_norm=0.5" in message


@pytest.mark.filterwarnings("ignore:keys without effect")
@pytest.mark.parametrize("name", ["hf_zero3", "hf_zero2_offload", "hf_zero3_offload", "hf_zero3_nvme"])
def test_the_documentations_other_files(ranks: Launcher, tmp_path: Path, name: str, plain_with_schedule: Any) -> None:
    text = (Path(__file__).parents[2] / "config" / "data" / f"{name}.json").read_text()
    path = tmp_path / "ds.json"
    path.write_text(text.replace("/local_nvme", str(tmp_path / "drive")))
    logged, stage = ranks(2, timeout=120)(by_json, str(path), str(tmp_path), **SCHEDULE)[0]
    assert stage == int(name[7]) and difference(plain_with_schedule, logged) < 1e-5


def run_plain(folder: str, **arguments: Any) -> Any:
    with fresh_state():
        trainer = trainer_of(None, "gpt2", Path(folder), **arguments)
        trainer.train()
        return history(trainer), None


class Plain(torch.nn.Module):
    """A model that is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = torch.nn.Embedding(48, 8)
        self.head = torch.nn.Linear(8, 48)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.table(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def plain_module(folder: str, resumed: bool) -> tuple[list[dict[str, float]], list[str]]:
    with fresh_state():
        made = trainer_of(None, "gpt2", Path(folder), save_strategy="epoch")
        config = {"stage": 2, "units": {"min_numel": 0}}
        trainer: Any = ZeroTrainer(Plain(), made.args, zero_config=config, train_dataset=made.train_dataset)
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4") if resumed else None)
        if resumed:  # into the folder with the checkpoints
            trainer.save_model()
            trainer.accelerator.wait_for_everyone()
        trainer.accelerator.wait_for_everyone()
        return history(trainer), sorted(path.name for path in Path(folder).iterdir())


def test_a_plain_module_resumes_and_checkpoints_stay(ranks: Launcher, tmp_path: Path) -> None:
    whole, names = ranks(2, timeout=120)(plain_module, str(tmp_path), False)[0]
    assert {"checkpoint-4", "checkpoint-8"} <= set(names)
    resumed, names = ranks(2, timeout=120)(plain_module, str(tmp_path), True)[0]
    assert {"checkpoint-4", "checkpoint-8", "model.safetensors"} <= set(names)
    assert difference(whole, resumed) == 0


def refused(folder: str) -> str:
    with fresh_state():
        try:
            trainer_of(2, "gpt2", Path(folder), fsdp="full_shard")
        except ValueError as error:
            return str(error)
        return "made"


def test_two_ways_of_sharding_are_refused(ranks: Launcher, tmp_path: Path) -> None:
    for message in ranks(2, timeout=120)(refused, str(tmp_path)):
        assert "fsdp" in message and "zero_config" in message


def with_muon(stage: int, folder: str) -> dict[str, torch.Tensor]:
    options = {"matrix_optimizers": ["MuonAdamW"], "fused_optimizers": False, "gradient_reduction": "per_micro_batch"}
    with fresh_state():
        trainer = trainer_of(stage, "llama", Path(folder), zero=options)
        split = split_matrices(trainer.model, units=UnitsConfig(min_numel=0))
        assert len(split.matrices) == 14 and len(split.others) == 7
        trainer.optimizer = MuonAdamW(split, muon={"lr": 0.02}, adamw={"lr": 1e-2})
        trainer.train()
        return whole(trainer)


@pytest.mark.parametrize("stage", [1, 3])
def test_muon(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    wanted = ranks(2)(with_muon, 0, str(tmp_path / "plain"))[0]
    for found in ranks(2)(with_muon, stage, str(tmp_path / "ours")):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
