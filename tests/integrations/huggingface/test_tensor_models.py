"""`mesh.tensor` for Hugging Face models: their own plan, under transformers, Accelerate, Lightning and Fabric."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.test_sequence import SIZES, WORDS, apart, collate, data, trained
from tests.integrations.lightning import trainers
from tests.launcher import Launcher, RankError
from zero_strategy import PipelineStrategy, ZeroEngine
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.config import load_config
from zero_strategy.fsdp.dtensor import is_dtensor
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.integrations.huggingface import tensor_models
from zero_strategy.integrations.huggingface.pretrained import pipeline_layers, pipeline_loss
from zero_strategy.integrations.transformers import ZeroTrainer, divide_layers, divide_sequences, from_pretrained

ADAPTED: dict[str, Any] = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "init_lora_weights": False,
}


def build(kind: str, tied: bool = False) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": WORDS, "num_key_value_heads": 2, "head_dim": 8, **SIZES}
    config = getattr(transformers, f"{kind}Config")(tie_word_embeddings=tied, **shape)
    model: transformers.PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def loop(stage: int | None, kind: str, tied: bool) -> tuple[float, float]:
    """Differences of losses and weights from the model's own."""
    plain = build(kind, tied)
    model = copy.deepcopy(plain)
    mesh = make_device_mesh("cpu", tensor=2)
    replaced = divide_layers(model, mesh["tp"])
    assert len(replaced) > 10
    engine = ZeroEngine(model, {"stage": stage})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, plain)]
    engine.attach(optimizers[0])
    rank, copies, gaps = dist.get_rank(), dist.get_world_size() // 2, []
    for step in range(6):
        batches = [collate(data("plain", 40)[2 * step + number : 2 * step + number + 1]) for number in range(copies)]
        loss = model(**batches[rank // 2]).loss
        loss.backward()
        whole = [plain(**batch).loss for batch in batches]
        (sum(whole) / copies).backward()  # type: ignore[union-attr]
        gaps.append(abs(float(loss) - float(whole[rank // 2])))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = engine.full_state_dict()
    engine.close()
    return max(gaps), apart(state, dict(plain.state_dict()))


@pytest.mark.parametrize(
    "world, stage, kind, tied",
    [(2, 0, "Llama", False), (4, 2, "Qwen3", True), (4, 3, "Llama", False), (4, 3, "Qwen3", True)],
)
def test_the_plan_of_a_model(ranks: Launcher, world: int, stage: int, kind: str, tied: bool) -> None:
    for losses, weights in ranks(world, timeout=120)(loop, stage, kind, tied):
        assert losses < 2e-6 and weights < 2e-5


def held_and_planned(stage: int, kind: str, tied: bool, dtype: torch.dtype | None, adapter: bool = False) -> Any:
    """Ledgers of an engine after a step, of the plan of the model as it was made, and of the one that was divided."""
    with torch.device("meta"):
        shapes: Any = build(kind, tied)
    model: Any = build(kind, tied)
    if adapter:
        shapes, model = (peft.get_peft_model(each, peft.LoraConfig(**ADAPTED)) for each in (shapes, model))
    divide_layers(model, make_device_mesh("cpu", tensor=2)["tp"])
    config = load_config(stage=stage, mesh={"tensor": 2}, units={"min_numel": 0})
    options: dict[str, Any] = {"world_size": dist.get_world_size(), "compute_dtype": dtype, "device": "cpu"}
    options |= {"optimizer": "SGD", "snapshots": False}
    plans = [config.plan(shapes, **options)]
    plans.append(load_config(stage=stage, units={"min_numel": 0}).plan(model, **options))  # mesh.tensor from its layers
    engine = ZeroEngine(model, config, compute_dtype=dtype)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
    engine.attach(optimizer)
    model(**collate(data("plain", 2)[:1])).loss.backward()
    optimizer.step()
    found = [engine.ledger().merged(), *(plan.ledger(dist.get_rank()).held().merged() for plan in plans)]
    engine.close()
    return found


@pytest.mark.parametrize("kind, tied", [("Llama", False), ("Qwen3", True)])
@pytest.mark.parametrize("stage, dtype", [(0, None), (2, torch.bfloat16), (3, torch.bfloat16)])
def test_the_plan_of_divided_layers_is_the_ledger(
    ranks: Launcher, stage: int, dtype: torch.dtype | None, kind: str, tied: bool
) -> None:
    for held, planned, divided in ranks(4, timeout=120)(held_and_planned, stage, kind, tied, dtype):
        assert held == planned == divided


def test_the_plan_of_divided_adapters_is_the_ledger(ranks: Launcher) -> None:
    for held, planned, divided in ranks(4, timeout=120)(held_and_planned, 3, "Qwen3", True, None, True):
        assert held == planned == divided


def test_a_plan_without_one_of_the_layers_is_refused() -> None:
    config = load_config(mesh={"tensor": 2})
    with pytest.raises(ValueError, match=r"mesh\.tensor is 2, and Linear has no plan of which layers"):
        config.plan(torch.nn.Linear(4, 4), world_size=2)
    heads = transformers.LlamaConfig(vocab_size=WORDS, **{**SIZES, "num_attention_heads": 3, "hidden_size": 48})
    with torch.device("meta"), pytest.raises(ValueError, match="does not divide LlamaForCausalLM's 3 num_attention"):
        config.plan(transformers.LlamaForCausalLM(heads), world_size=2)


def test_tensor_model_trainer_of_transformers(ranks: Launcher, tmp_path: Path) -> None:
    theirs, weights = ranks(2, timeout=120)(trained, None, "llama", "plain", 0, str(tmp_path / "plain"))[0]
    ours, state = ranks(4, timeout=120)(trained, {"tensor": 2}, "llama", "plain", 3, str(tmp_path / "ours"))[0]
    assert max(abs(a[n] - b[n]) for a, b in zip(ours, theirs, strict=True) for n in a) < 2e-5
    assert apart(state, weights) < 2e-5


@pytest.mark.parametrize("form, ulysses", [("packed", 2), ("padded", 1)])
def test_sequences_of_divided_layers(ranks: Launcher, tmp_path: Path, form: str, ulysses: int) -> None:
    """Of four ranks two have each layer, and two each sequence; Llama has four heads, two of keys and values."""
    three = {"samples": 6}  # steps in each of two epochs
    theirs, weights = ranks(1, timeout=120)(trained, None, "llama", form, 0, str(tmp_path / "plain"), **three)[0]
    mesh = {"tensor": 2, "sequence": 2, "ulysses": ulysses}
    for ours, state in ranks(4, timeout=180)(trained, mesh, "llama", form, 3, str(tmp_path / "ours"), **three):
        assert max(abs(a[n] - b[n]) for a, b in zip(ours, theirs, strict=True) for n in a) < 2e-5
        assert apart(state, weights) < 2e-5


def accelerated(way: str, folder: str) -> Any:
    with fresh_state():
        if way == "plain":
            accelerator = Accelerator(cpu=True)
        elif way == "settings":
            accelerator = ZeroAccelerator(zero_config={"stage": 3, "mesh": {"tensor": 2}})
        else:
            sizes = ParallelismConfig(tp_size=2, **{"tp": {"dp_shard_size": 2}, "tp + cp": {"cp_size": 2}}[way])
            accelerator = ZeroAccelerator(zero_config={"stage": 2}, parallelism_config=sizes)
        model = build("Llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # made before layers are divided
        loader = DataLoader(data("plain", 20), batch_size=1, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.gather_for_metrics(loss.detach().view(1)).mean()))
        state = accelerator.get_state_dict(model)
        if way != "plain":
            accelerator.save_model(model, folder)
            state = accelerator.engine(model).full_state_dict()
        found = losses, {name: value.detach().clone() for name, value in state.items()}
        accelerator.free_memory(model)
        return found


@functools.cache
def accelerated_plainly(ranks: Launcher, world: int) -> Any:
    return ranks(world, timeout=120)(accelerated, "plain", "")[0]


@pytest.mark.parametrize("way", ["settings", "tp", "tp + cp"])
def test_tensor_model_loop_of_accelerate(ranks: Launcher, tmp_path: Path, way: str) -> None:
    losses, weights = accelerated_plainly(ranks, 1 if way == "tp + cp" else 2)
    for ours, state in ranks(4, timeout=120)(accelerated, way, str(tmp_path)):
        assert max(abs(a - b) for a, b in zip(ours, losses, strict=True)) < 2e-5 and len(ours) >= 10
        assert apart(state, weights) < 2e-4  # Adam makes steps of rounding where gradients are near zero


def frozen() -> list[str]:
    """Parameters of a model whose head norms are frozen that train nevertheless, or that do not and should."""
    model = build("Qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    divide_layers(model, make_device_mesh("cpu", tensor=2)["tp"])
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad == ("norm" in name)]


def test_what_is_frozen_stays_frozen(ranks: Launcher) -> None:
    assert ranks(2)(frozen) == [[], []]


def adapted(mesh: dict[str, int] | None, stage: int, folder: str) -> Any:
    """Logged figures; the adapter lies in the folder. Ranks draw it from random states of their own."""
    with fresh_state():
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=9, learning_rate=1e-2, optim="sgd",
            max_grad_norm=0.5, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model: Any = build("Qwen3")
        torch.manual_seed(10 + dist.get_rank())
        model = peft.get_peft_model(model, peft.LoraConfig(modules_to_save=["lm_head"], **ADAPTED))
        keywords: dict[str, Any] = {"train_dataset": data("plain"), "data_collator": collate}
        if mesh is None:
            trainer: Any = Trainer(model, arguments, **keywords)
        else:
            config = {"stage": stage, "units": {"min_numel": 0}, "mesh": mesh}
            trainer = ZeroTrainer(model, arguments, zero_config=config, **keywords)
        trainer.train()
        trainer.save_model(folder + "/model")
        return [{n: r[n] for n in ("loss", "grad_norm") if n in r} for r in trainer.state.log_history]


@pytest.mark.parametrize("stage, mesh", [(3, {"tensor": 2}), (2, {"tensor": 2, "sequence": 2})])
def test_adapters_of_divided_layers(ranks: Launcher, tmp_path: Path, stage: int, mesh: dict[str, int]) -> None:
    copies = 4 // (2 * mesh.get("sequence", 1))
    theirs = ranks(copies, timeout=120)(adapted, None, 0, str(tmp_path / "plain"))[0]
    for ours in ranks(4, timeout=120)(adapted, mesh, stage, str(tmp_path / "ours")):
        assert max(abs(a[n] - b[n]) for a, b in zip(ours, theirs, strict=True) for n in a) < 2e-5
        assert len(ours) > 8
    files = [tmp_path / way / "model" / "adapter_model.safetensors" for way in ("ours", "plain")]
    assert apart(*(load_file(file) for file in files)) < 2e-5
    read = [peft.PeftModel.from_pretrained(build("Qwen3"), tmp_path / way / "model") for way in ("ours", "plain")]
    losses = [float(model(**collate(data("plain", 1))).loss.detach()) for model in read]
    assert abs(losses[0] - losses[1]) < 2e-5 and abs(losses[0] - ours[0]["loss"]) > 1e-3, "as trained, not as begun"


def made_before(stepped: bool) -> Any:
    """Losses and weights of an optimizer that has state when the model is prepared, and of one process."""
    with fresh_state():
        accelerator = ZeroAccelerator(zero_config={"stage": 2, "mesh": {"tensor": 2}})
        model, plain = build("Llama"), build("Llama")
        optimizers = [
            torch.optim.Adagrad(each.parameters(), lr=1e-2, initial_accumulator_value=0.1) for each in (model, plain)
        ]
        batches = [collate(data("plain", 8)[number : number + 1]) for number in range(8)]
        if stepped:
            model(**batches[0]).loss.backward()
            optimizers[0].step()
        model, optimizer = accelerator.prepare(model, optimizers[0])
        gaps = []
        for batch in batches:
            losses = [each(**batch).loss for each in (model, plain)]
            accelerator.backward(losses[0])
            losses[1].backward()
            gaps.append(abs(float(losses[0]) - float(losses[1])))
            for each in (optimizer, optimizers[1]):
                each.step()
                each.zero_grad()
        state = accelerator.engine(model).full_state_dict()
        accelerator.free_memory(model)
        return max(gaps), apart(state, dict(plain.state_dict()))


def test_an_optimizer_that_has_state_from_the_start(ranks: Launcher) -> None:
    for losses, weights in ranks(2, timeout=120)(made_before, False):
        assert losses < 5e-6 and weights < 2e-4
    with pytest.raises(RankError, match="Adagrad has state of layers that"):
        ranks(2, timeout=120)(made_before, True)


def lightning(mesh: dict[str, int] | None) -> Any:
    import lightning.pytorch as pl

    from zero_strategy.integrations.lightning import ZeroStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("Llama")

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    module = Module()
    strategy = "ddp" if mesh is None else ZeroStrategy(stage=3, mesh=mesh)
    trainer = trainers.trainer(strategy, max_epochs=1)
    trainer.fit(module, DataLoader(data("plain", 8), batch_size=1, collate_fn=collate))
    if mesh is None:
        return {name: value.detach().clone() for name, value in module.state_dict().items()}
    assert isinstance(trainer.strategy, ZeroStrategy) and trainer.strategy.engine is not None
    return trainer.strategy.engine.full_state_dict()


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 2, "sequence": 2}])
def test_tensor_model_trainer_of_lightning(ranks: Launcher, mesh: dict[str, int]) -> None:
    weights = ranks(4 // (2 * mesh.get("sequence", 1)), timeout=120)(lightning, None)[0]
    for state in ranks(4, timeout=120)(lightning, mesh):
        assert apart(state, weights) < 2e-5


def loaded(folder: str) -> tuple[float, float, int, int]:
    """A model that is read as it is prepared: losses, bytes that this rank reads, and those of its part."""
    with fresh_state(), pytest.MonkeyPatch.context() as patch:
        accelerator = ZeroAccelerator(zero_config={"stage": 3, "mesh": {"tensor": 2}})
        model, read = from_pretrained(transformers.LlamaForCausalLM, folder), []
        preadv = os.preadv
        patch.setattr(os, "preadv", lambda *args: read.append(count := preadv(*args)) or count)
        model = accelerator.prepare(model)
        own = sum(bucket.layout.slice_numel * 4 for bucket in accelerator.engine(model).model.buckets)
        loss = float(model(**collate(data("plain", 1))).loss)
        plain = transformers.LlamaForCausalLM.from_pretrained(folder)
        accelerator.free_memory(model)
        return loss, float(plain(**collate(data("plain", 1))).loss), sum(read), own


@pytest.mark.parametrize("world", [2, 4])
def test_a_model_that_is_read_when_it_is_prepared(ranks: Launcher, tmp_path: Path, world: int) -> None:
    build("Llama").save_pretrained(tmp_path)
    """Of weights that are divided inside of their rows a rank reads whole rows; else its own elements alone."""
    named = build("Llama").named_parameters()
    between = sum(value.nbytes for name, value in named if "o_proj" in name or "down_proj" in name) // world
    for found, expected, read, own in ranks(world, timeout=120)(loaded, str(tmp_path)):
        assert found == pytest.approx(expected, abs=2e-6)
        assert 0.98 * own < read < own + between  # of rows between the parts; `own` has padding


def pipelined(tied: bool, stage: int, folder: str, checkpoint: str) -> Any:
    """A pipeline of two stages under the Trainer, layers divided between two ranks, of weights that are read late."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        pipeline: Any

        def configure_pipeline(self) -> Any:
            model = from_pretrained(transformers.LlamaForCausalLM, folder)
            self.loss_of_the_model = pipeline_loss(model)
            return pipeline_layers(model)

        def pipeline_batch(self, batch: Any) -> Any:
            return {"input_ids": batch["input_ids"]}, batch["labels"]

        def pipeline_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return self.loss_of_the_model(outputs, labels)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.pipeline.loss(batch)
            losses.append(float(loss.detach()))
            kinds.update({name: is_dtensor(value) for name, value in self.named_parameters()})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    losses: list[float] = []
    kinds: dict[str, bool] = {}
    strategy = PipelineStrategy(stages=2, zero_stage=stage, micro_batches=2, mesh={"tensor": 2})
    trainer = trainers.trainer(strategy, max_epochs=1)
    trainer.fit(Module(), DataLoader(rows_of_one_length(), batch_size=2, collate_fn=collate))
    trainer.save_checkpoint(checkpoint)
    engine = trainer.strategy.engine
    assert isinstance(engine, ZeroEngine)
    return losses, engine.full_state_dict(), kinds


def rows_of_one_length() -> Any:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(WORDS, (12, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.mark.parametrize("tied, stage", [(False, 1), (True, 3)])
def test_a_pipeline_divides_layers_by_the_plan_of_its_model(
    ranks: Launcher, tmp_path: Path, tied: bool, stage: int
) -> None:
    plain = build("Llama", tied)
    plain.save_pretrained(tmp_path / "model")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for batch in DataLoader(rows_of_one_length(), batch_size=2, collate_fn=collate):
        loss = plain(**batch).loss
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    checkpoint = str(tmp_path / "checkpoint")
    for losses, state, kinds in ranks(4, timeout=180)(pipelined, tied, stage, str(tmp_path / "model"), checkpoint):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 2e-6
        assert (
            apart({name.removeprefix("pipeline."): value for name, value in state.items()}, plain.state_dict()) < 2e-5
        )
        assert sum(kinds.values()) >= 7


def refused() -> list[str]:
    mesh, found = make_device_mesh("cpu", tensor=2)["tp"], []
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2)
    gpt = transformers.GPT2LMHeadModel(config)
    odd = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, **{**SIZES, "num_attention_heads": 1})
    )
    cases: list[tuple[Any, Any]] = [
        (gpt, None), (odd, None), (build("Llama"), {"model.layers.*.mlp.up_proj": "sideways"}),
        (build("Llama"), {"a": "colwise"}),
    ]  # fmt: skip
    for model, plan in cases:
        with pytest.raises(ValueError) as raised:
            divide_layers(model, mesh, plan)
        found.append(str(raised.value))
    own = {"model.layers.*.mlp.up_proj": ColwiseParallel(), "model.layers.*.mlp.gate_proj": "colwise"}
    assert len(divide_layers(build("Llama"), mesh, {**own, "model.layers.*.mlp.down_proj": RowwiseParallel()})) == 6
    torch.manual_seed(dist.get_rank())
    dropping = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, attention_dropout=0.1, **SIZES)
    )
    with pytest.raises(ValueError, match="different random states"):
        divide_layers(dropping, mesh)
    torch.manual_seed(0)
    assert divide_layers(dropping, mesh)
    weighed = peft.get_peft_model(build("Llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match=r"q_proj is a peft\.\S+Linear, and only torch's Linear"):
        divide_layers(weighed, mesh)
    tiles = {"stage": 0, "activation_checkpointing": {"tile_tokens": 4}}
    divided = build("Llama")
    divide_layers(divided, mesh)
    engine = ZeroEngine(divided, tiles)
    with pytest.raises(ValueError, match=r"is divided by mesh\.tensor"):
        divide_sequences(engine)
    return found


def test_tensor_model_what_cannot_be_divided_is_named(ranks: Launcher) -> None:
    for plan, heads, style, names in ranks(2)(refused):
        assert "GPT2LMHeadModel has no tp_plan" in plan and "1 num_attention_heads" in heads
        assert "'sideways'" in style and "no module of LlamaForCausalLM" in names


class Broken:
    """A communicator whose ranks are gone."""

    closed = False

    def __init__(self, *_: Any) -> None:
        type(self).closed = False

    def broadcast(self, *_: Any) -> None:
        raise RuntimeError("a rank is gone")

    def close(self) -> None:
        type(self).closed = True


class OneMesh:
    device_type = "cpu"

    def get_group(self) -> None:
        """It has none."""


def test_a_copy_that_fails_closes_its_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_models, "Communicator", Broken)
    mesh: Any = OneMesh()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        tensor_models._copy_undivided(torch.nn.Linear(2, 2), mesh)
    assert Broken.closed
