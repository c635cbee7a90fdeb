"""Mixtures of experts of transformers whose experts ranks divide, under every face, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.distributed import DistributedConfig

from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.huggingface.training import WORDS, rows, trainer_of
from tests.integrations.lightning import trainers
from tests.launcher import Launcher
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.transformers import divide_layers, divide_sequences, from_pretrained

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3": (Qwen3MoeConfig, {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 8}),
    "olmoe": (OlmoeConfig, {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 8}),
    "gpt_oss": (
        GptOssConfig, {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 1, "head_dim": 8}
    ),
}  # fmt: skip
BOUND = 2e-6
"""Relative: the same sums in another order, in float32."""


def build(kind: str, **options: Any) -> PreTrainedModel:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    of, sizes = KINDS[kind]
    config = of(vocab_size=WORDS, **SIZES, **ENDS, **{**sizes, **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model


def tokens(rank: int, step: int, length: int = 7) -> Tensor:
    chance = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(3, WORDS, (2, length), generator=chance)


def plain(kind: str, world: int, steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    """Losses and weights of one process with the batches of all ranks, one by one."""
    model = build(kind, **options).to(dtype)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        total = 0.0
        for rank in range(world):
            loss = model(tokens(rank, step), labels=tokens(rank, step)).loss / world
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {**model.state_dict(), "losses": torch.tensor(losses, dtype=torch.float64)}


def train(
    kind: str,
    config: dict[str, Any],
    steps: int,
    dtype: torch.dtype = torch.float32,
    lengths: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """The same, on ranks; with `lengths` ranks have sequences of different lengths."""
    model, rank, losses = build(kind, **options).to(dtype), dist.get_rank(), []
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.attach(optimizer)
    for step in range(steps):
        batch = tokens(rank, step, 4 + 3 * rank if lengths else 7)
        loss = model(batch, labels=batch).loss
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total / dist.get_world_size())
    found = {**engine.full_state_dict(), "losses": torch.stack(losses)}
    engine.close()
    return found


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest relative difference of a tensor, by its norm."""
    return max(
        float((found[n].double() - w.double()).norm() / w.double().norm().clamp_min(1e-9)) for n, w in wanted.items()
    )


CASES = [(2, 2, 3), (4, 2, 1), (4, 4, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, expert, stage", CASES)
def test_models_train_as_in_one_process(ranks: Launcher, kind: str, world: int, expert: int, stage: int) -> None:
    """20 steps; float64 leaves no doubt of what float32 rounds."""
    config = {"stage": stage, "mesh": {"expert": expert}}
    for dtype, bound in ((torch.float32, BOUND), (torch.float64, 1e-12)):
        wanted = plain(kind, world, 20, dtype)
        found = ranks(world, timeout=180)(train, kind, config, 20, dtype)[0]
        # Transformers computes losses in float32.
        assert furthest({"l": found.pop("losses")}, {"l": wanted.pop("losses")}) < BOUND
        assert furthest(found, wanted) < bound


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_stages_of_models_have_the_same_bits(ranks: Launcher, kind: str) -> None:
    everyone = [
        ranks(4, timeout=120)(train, kind, {"stage": stage, "mesh": {"expert": 2}}, 6)[0] for stage in (1, 2, 3)
    ]
    for other in everyone[1:]:
        assert all(torch.equal(value, other[name]) for name, value in everyone[0].items())


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_other_functions_of_experts(ranks: Launcher, implementation: str) -> None:
    def found_by() -> dict[str, Tensor]:
        return ranks(2, timeout=120)(with_implementation, implementation)[0]

    wanted = plain("qwen3", 2, 3)
    found = found_by()
    del wanted["losses"], found["losses"]
    assert furthest(found, wanted) < BOUND


def with_implementation(implementation: str) -> dict[str, Tensor]:
    config: dict[str, Any] = {"stage": 3, "mesh": {"expert": 2}}
    model = build("qwen3")
    model.set_experts_implementation(implementation)
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.attach(optimizer)
    for step in range(3):
        batch = tokens(dist.get_rank(), step)
        model(batch, labels=batch).loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = {**engine.full_state_dict(), "losses": torch.zeros(1)}
    engine.close()
    return found


def ragged(world: int, steps: int) -> dict[str, Tensor]:
    model = build("mixtral").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for rank in range(world):
            batch = tokens(rank, step, 4 + 3 * rank)
            (model(batch, labels=batch).loss / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def test_ranks_with_sequences_of_other_lengths(ranks: Launcher) -> None:
    config = {"stage": 3, "mesh": {"expert": 2}}
    found = ranks(2)(train, "mixtral", config, 4, torch.float64, True)[0]
    assert furthest(found, ragged(2, 4)) < 1e-7  # losses are float32, and their gradients' scale with them


# ---- the load-balancing loss ----


def balanced_alone(world: int, steps: int) -> dict[str, Tensor]:
    """One process whose batches are those of all ranks together, as the loss of all tokens needs."""
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        batch = torch.cat([tokens(rank, step) for rank in range(world)])
        output = model(batch, labels=batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack([output.loss.detach(), output.aux_loss.detach()]).double())
    return {**model.state_dict(), "losses": torch.stack(losses)}


def balanced(config: dict[str, Any], steps: int) -> dict[str, Tensor]:
    model, rank, losses = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5), dist.get_rank(), []
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.attach(optimizer)
    for step in range(steps):
        output = model(tokens(rank, step), labels=tokens(rank, step))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = torch.stack([output.loss.detach(), output.aux_loss.detach()]).double()
        dist.all_reduce(found)
        losses.append(found / dist.get_world_size())
    whole = {**engine.full_state_dict(), "losses": torch.stack(losses)}
    engine.close()
    return whole


@pytest.mark.parametrize("mesh", [{"expert": 2}, {"expert": 2, "replicate": 2}], ids=str)
def test_the_balance_loss_is_that_of_all_tokens(ranks: Launcher, mesh: dict[str, int]) -> None:
    wanted = balanced_alone(4, 5)
    found = ranks(4)(balanced, {"stage": 3, "mesh": mesh}, 5)[0]
    assert furthest(found, wanted) < BOUND


# ---- faces ----


def by_trainer(stage: int | None, zero: dict[str, Any], folder: str) -> dict[str, Tensor]:
    with fresh_state():
        trainer = trainer_of(
            stage, "mixtral", Path(folder), make=build, zero=zero, learning_rate=1e-3, per_device_train_batch_size=2
        )
        trainer.train()
        dist.barrier()
        if stage is None:
            return dict(trainer.model.state_dict())
        trainer.save_model(f"{folder}/model")
        dist.barrier()
        return dict(trainer.zero_engine.full_state_dict())


def test_experts_under_the_trainer_of_transformers(ranks: Launcher, tmp_path: Path) -> None:
    """Against the Trainer's own data-parallel run."""
    wanted = ranks(2, timeout=120)(by_trainer, None, {}, str(tmp_path / "plain"))[0]
    wanted = {name.removeprefix("module."): value for name, value in wanted.items()}
    for stage in (1, 3):
        found = ranks(2, timeout=120)(by_trainer, stage, {"mesh": {"expert": 2}}, str(tmp_path / str(stage)))[0]
        assert furthest(found, wanted) < BOUND
        read = AutoModelForCausalLM.from_pretrained(tmp_path / str(stage) / "model").state_dict()
        assert all(torch.equal(value, found[name]) for name, value in read.items())


def by_accelerate(stage: int | None, zero: dict[str, Any]) -> dict[str, Tensor]:
    with fresh_state():
        accelerator: Any = make(stage, zero)
        model = build("olmoe")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in range(3):
            batch = tokens(dist.get_rank(), step)
            accelerator.backward(model(batch, labels=batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return dict(accelerator.get_state_dict(model))


def test_experts_under_accelerate(ranks: Launcher) -> None:
    wanted = plain("olmoe", 2, 3)
    del wanted["losses"]
    found = ranks(2)(by_accelerate, 3, {"mesh": {"expert": 2}})[0]
    assert furthest(found, wanted) < BOUND


class Lit(pl.LightningModule):
    """A mixture of experts in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("qwen3")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def by_lightning(expert: int, stage: int, folder: str) -> dict[str, Tensor]:
    trainers.join()
    module = Lit()
    trainer = trainers.trainer(
        trainers.zero(stage, mesh={"expert": expert}), max_epochs=1, gradient_clip_val=1.0, default_root_dir=folder
    )
    data: Any = rows(8)
    sampler: Any = DistributedSampler(data, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=2, sampler=sampler))
    trainer.save_checkpoint(f"{folder}/whole.ckpt")
    engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
    return dict(engine.full_state_dict())


def test_experts_under_the_trainer_of_lightning(ranks: Launcher, tmp_path: Path) -> None:
    wanted = ranks(2, timeout=120)(by_lightning, 1, 2, str(tmp_path / "whole"))[0]
    for stage in (2, 3):
        found = ranks(2, timeout=120)(by_lightning, 2, stage, str(tmp_path / str(stage)))[0]
        assert furthest(found, wanted) < BOUND


# ---- beside other ways to divide, and adapters ----


def alone(model: Any, copies: int, steps: int = 3) -> dict[str, Tensor]:
    """Weights of one process on the batches of so many ranks."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(steps):
        for rank in range(copies):
            batch = tokens(rank, step, 8)
            (model(batch, labels=batch).loss / copies).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def divided(model: Any, config: dict[str, Any], copy: int, sequences: bool = False) -> dict[str, Tensor]:
    """Weights of ranks; `copy` tells whose batches this one has."""
    engine = ZeroEngine(model, config)
    if sequences:
        divide_sequences(engine)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine.attach(optimizer)
    for step in range(3):
        batch = tokens(copy, step, 8)
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = engine.full_state_dict()
    engine.close()
    return found


def with_sequences() -> float:
    found = divided(build("qwen3").double(), {"stage": 3, "mesh": {"sequence": 2, "expert": 2}}, 0, sequences=True)
    return furthest(found, alone(build("qwen3").double(), 1))


def with_tensors() -> float:
    model = build("mixtral").double()
    attention = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in attention.items()}
    divide_layers(model, make_device_mesh("cpu", tensor=2)["tp"], plan)
    config = {"stage": 3, "mesh": {"tensor": 2, "expert": 2}}
    return furthest(divided(model, config, dist.get_rank() // 2), alone(build("mixtral").double(), 2))


def test_experts_beside_divided_sequences_and_layers(ranks: Launcher) -> None:
    assert max(ranks(2)(with_sequences)) < BOUND  # losses are float32
    assert max(ranks(4)(with_tensors)) < 1e-12


def adapted(kind: str) -> Any:
    """Adapters of attention and of stacked experts, which change something from the start."""
    from peft import LoraConfig, get_peft_model

    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(build(kind).double(), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=stacks))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def adapters(kind: str, stage: int) -> tuple[float, float]:
    """Difference from one process, and how far adapters of experts have moved."""
    found = divided(adapted(kind), {"stage": stage, "mesh": {"expert": 2}}, dist.get_rank())
    first = {name: value for name, value in adapted(kind).state_dict().items() if "experts" in name and "lora" in name}
    moved = min(furthest({name: found[name]}, {name: value}) for name, value in first.items())
    return furthest(found, alone(adapted(kind), 2)), moved


@pytest.mark.parametrize("kind, stage", [("mixtral", 3), ("gpt_oss", 1)])
def test_adapters_of_experts(ranks: Launcher, kind: str, stage: int) -> None:
    for difference, moved in ranks(2)(adapters, kind, stage):
        assert difference < 1e-12 and moved > 1e-4


# ---- reading and saving ----


def read_and_save(path: str, folder: str) -> dict[str, Any]:
    """Deferred weights of which a rank reads its experts; the shapes that it has; saved again."""
    transformers.logging.set_verbosity_error()
    model = from_pretrained(AutoModelForCausalLM, path)
    engine = ZeroEngine(model, {"stage": 3, "mesh": {"expert": 2}})
    found = dict(engine.full_state_dict())
    shape = tuple(model.model.layers[0].mlp.experts.down_proj.shape)
    engine.save(folder)
    engine.close()
    return {"weights": found, "shape": shape}


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_pretrained_experts_are_read_by_the_ranks_that_hold_them(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    build(kind).save_pretrained(tmp_path / "given")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "given").state_dict()
    found = ranks(2)(read_and_save, str(tmp_path / "given"), str(tmp_path / "saved"))[0]
    assert found["shape"][0] == 4
    assert all(torch.equal(value, found["weights"][name]) for name, value in wanted.items())


def trained_by_transformers(folder: str) -> bool:
    """True if what transformers' own expert parallelism saves is read with the same bits."""
    if dist.get_rank() == 0:
        build("mixtral").save_pretrained(f"{folder}/given")
    dist.barrier()
    asked = DistributedConfig(ep_size=2, fsdp_size=2)
    theirs: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/given", distributed_config=asked)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    batch = tokens(dist.get_rank(), 0)
    theirs(batch, labels=batch).loss.backward()
    optimizer.step()
    theirs.save_pretrained(f"{folder}/saved")
    dist.barrier()
    wanted = AutoModelForCausalLM.from_pretrained(f"{folder}/saved").state_dict()
    engine = ZeroEngine(from_pretrained(AutoModelForCausalLM, f"{folder}/saved"), {"stage": 3, "mesh": {"expert": 2}})
    found = engine.full_state_dict()
    engine.close()
    return all(torch.equal(value, found[name]) for name, value in wanted.items())


def test_what_transformers_own_expert_parallelism_saves_is_read(ranks: Launcher, tmp_path: Path) -> None:
    assert all(ranks(2, timeout=120)(trained_by_transformers, str(tmp_path)))
