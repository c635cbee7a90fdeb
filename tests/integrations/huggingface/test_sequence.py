"""`mesh.sequence` under transformers, Accelerate and Lightning, against trainings whose ranks have whole sequences."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, skip_first_batches
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.lightning import trainers
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.integrations.transformers import ZeroTrainer, divide_sequences

WORDS, TOKENS = 48, 21  # no multiple of anything
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **SIZES))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(vocab_size=WORDS, num_key_value_heads=2, sliding_window=6, **SIZES))
    if kind == "gpt2":
        shape = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **shape))
    none = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=32, **none, **SIZES))


def sample(number: int, kind: str = "plain") -> dict[str, Tensor]:
    """Tokens, and labels of which another part counts in each sample."""
    chance = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, WORDS, (TOKENS,), generator=chance)
    labels = tokens.clone()
    labels[: int(torch.randint(1, TOKENS - 4, (), generator=chance))] = -100
    found = {"input_ids": tokens, "labels": labels}
    if kind == "padded":
        end = int(torch.randint(TOKENS // 2, TOKENS, (), generator=chance))
        found["attention_mask"] = (torch.arange(TOKENS) < end).long()
        labels[end:] = -100
        labels[end - 1] = tokens[end - 1]  # at least one counts
    if kind == "packed":
        found["position_ids"] = torch.cat([torch.arange(8), torch.arange(TOKENS - 8)])
    return found


def data(kind: str, count: int = 12) -> list[dict[str, Tensor]]:
    return [sample(number, kind) for number in range(count)]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - t).abs().max() / t.abs().max().clamp(min=1e-6)) for n, t in theirs.items())


# ---- transformers ----


def accuracy(found: Any) -> dict[str, float]:
    """Of tokens that count: needs logits of whole sequences."""
    guesses, labels = numpy.argmax(found.predictions, -1)[:, :-1], found.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean()), "counted": float(counted.sum())}


def trained(
    mesh: dict[str, int] | None, kind: str, form: str, stage: int, folder: str, asked: Any = None, more: Any = None,
    bf16: bool = False, samples: int = 12,
) -> Any:  # fmt: skip
    """Metrics that the Trainer logs, and the weights; None: the Trainer of transformers."""
    with fresh_state():
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=2,
            num_train_epochs=2, learning_rate=1e-2, optim="sgd", max_grad_norm=0.5, logging_steps=1, save_strategy="no",
            eval_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True, seed=3, parallelism_config=asked,
            bf16=bf16,
        )  # fmt: skip
        keywords: dict[str, Any] = {
            "train_dataset": data(form, samples), "eval_dataset": data(form, 5), "data_collator": collate,
            "compute_metrics": accuracy,
        }  # fmt: skip
        model = build(kind)
        if mesh is None:
            trainer: Any = Trainer(model, arguments, **keywords)
        else:
            config = {"stage": stage, "units": {"min_numel": 0}, "mesh": mesh, **(more or {})}
            trainer = ZeroTrainer(model, arguments, zero_config=config, **keywords)
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_counted", "num_input_tokens_seen")
        logged = [{n: r[n] for n in names if n in r} for r in trainer.state.log_history]
        state = model.state_dict() if mesh is None else trainer.zero_engine.full_state_dict()
        return logged, {name: value.detach().clone() for name, value in state.items()}


@pytest.fixture(scope="module")
def theirs_of_llama(ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The log of transformers' Trainer on plain samples, and its weights: of several tests."""
    return ranks(2, timeout=120)(trained, None, "llama", "plain", 0, str(tmp_path_factory.mktemp("plain")))[0]


@pytest.mark.parametrize(
    "kind, form, stage, mesh",
    [
        ("llama", "plain", 3, {"sequence": 2}),
        ("llama", "padded", 0, {"sequence": 2, "ulysses": 1}),
        ("llama", "packed", 2, {"sequence": 2}),
        ("mistral", "plain", 1, {"sequence": 2, "ulysses": 1}),
        ("gpt2", "plain", 3, {"sequence": 2}),
        ("bert", "padded", 2, {"sequence": 2, "ulysses": 1}),
        ("bert", "plain", 3, {"sequence": 2}),
    ],
)
def test_sequence_trainer_of_transformers(
    ranks: Launcher, tmp_path: Path, kind: str, form: str, stage: int, mesh: dict[str, int], theirs_of_llama: Any
) -> None:
    theirs, weights = theirs_of_llama
    if (kind, form) != ("llama", "plain"):
        theirs, weights = ranks(2, timeout=120)(trained, None, kind, form, 0, str(tmp_path / "plain"))[0]
    for ours, state in ranks(4, timeout=120)(trained, mesh, kind, form, stage, str(tmp_path / "ours")):
        assert [r.keys() for r in ours] == [r.keys() for r in theirs] and len(ours) > 8
        assert max(abs(a[n] - b[n]) for a, b in zip(ours, theirs, strict=True) for n in a) < 2e-5
        assert apart(state, weights) < 2e-5


def test_the_parallelism_config_of_training_arguments(ranks: Launcher, tmp_path: Path, theirs_of_llama: Any) -> None:
    theirs, weights = theirs_of_llama
    sizes = ParallelismConfig(cp_size=2, dp_shard_size=2)
    ours, state = ranks(4, timeout=120)(trained, {}, "llama", "plain", 3, str(tmp_path / "ours"), sizes)[0]
    assert max(abs(a[n] - b[n]) for a, b in zip(ours, theirs, strict=True) for n in a) < 2e-5
    assert apart(state, weights) < 2e-5


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": {"mode": "full", "tile_tokens": 4}}])
def test_the_trainer_of_transformers_under_autocast(ranks: Launcher, tmp_path: Path, more: dict[str, Any]) -> None:
    theirs, _ = ranks(2, timeout=120)(trained, None, "llama", "padded", 0, str(tmp_path / "a"), bf16=True)[0]
    mesh = {"sequence": 2, "ulysses": 1}
    ours, _ = ranks(4, timeout=120)(trained, mesh, "llama", "padded", 3, str(tmp_path / "b"), None, more, bf16=True)[0]
    losses = [[record[n] for record in each for n in record if "loss" in n] for each in (theirs, ours)]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 2e-3 and len(losses[0]) == 8


def evaluated(mesh: dict[str, int] | None, folder: str) -> float:
    """The loss of an evaluation before any training, of which nobody wants logits."""
    with fresh_state():
        arguments = TrainingArguments(
            folder, per_device_eval_batch_size=1, prediction_loss_only=True, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        keywords: dict[str, Any] = {"eval_dataset": data("plain", 4), "data_collator": collate}
        tiles = {"activation_checkpointing": {"tile_tokens": 4}}
        if mesh is None:
            trainer = Trainer(build("llama"), arguments, **keywords)
        else:
            trainer = ZeroTrainer(
                build("llama"), arguments, zero_config={"stage": 3, "mesh": mesh, **tiles}, **keywords
            )
        return float(trainer.evaluate()["eval_loss"])


def test_an_evaluation_comes_first(ranks: Launcher, tmp_path: Path) -> None:
    expected = ranks(2, timeout=120)(evaluated, None, str(tmp_path / "a"))[0]
    for found in ranks(4, timeout=120)(evaluated, {"sequence": 2}, str(tmp_path / "b")):
        assert found == pytest.approx(expected, abs=2e-6)


# ---- Accelerate ----


def loop(kind: str, way: str, steps: int = 20) -> Any:
    """Losses and weights of a script's loop: `plain`, our settings, or Accelerate's examples for `cp` and `sp`."""
    with fresh_state():
        ways = {"cp": {"cp_size": 2}, "sp": {"sp_size": 2}}
        if way == "plain":
            accelerator = Accelerator(cpu=True)
        elif way == "settings":
            accelerator = ZeroAccelerator(zero_config={"stage": 3, "mesh": {"sequence": 2}})
        else:
            sizes = ParallelismConfig(dp_shard_size=dist.get_world_size() // 2, **ways[way])
            accelerator = ZeroAccelerator(zero_config={"stage": 2}, parallelism_config=sizes)
        model = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.99**count)
        loader = DataLoader(data("plain", steps * 2), batch_size=1, collate_fn=collate)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        losses = []
        for batch in loader:
            if way == "sp":
                loss = sp_loss(accelerator, model, batch)
            elif way == "cp":
                shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
                batch = {**batch, "shift_labels": shifted}
                buffers = list(batch.values())
                with accelerator.maybe_context_parallel(
                    buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
                ):
                    loss = model(**batch).loss
            else:
                loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.gather_for_metrics(loss.detach().view(1)).mean()))
        seen = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index]))
        named = accelerator.gather_for_metrics([f"rank {accelerator.process_index}"], use_gather_object=True)
        state = accelerator.unwrap_model(model).state_dict() if way == "plain" else None
        if state is None:
            state = accelerator.engine(model).full_state_dict()
        rates = optimizer.param_groups[0]["lr"]
        found = losses, {name: value.detach().clone() for name, value in state.items()}, rates, seen.tolist(), named
        accelerator.free_memory(model)
        return found


def sp_loss(accelerator: Any, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """As Accelerate's example computes it: means of ranks, by the tokens that each has."""
    group = accelerator.engine(model).sequence.ranks.group
    outputs = model(**batch)
    labels = batch["shift_labels"]
    assert "labels" not in batch and outputs.logits.shape[:2] == labels.shape
    own = model.loss_function(
        logits=outputs.logits, labels=None, shift_labels=labels, vocab_size=model.config.vocab_size
    )
    counted = (labels != -100).sum()
    losses = torch.distributed.nn.functional.all_gather(own, group=group)
    counts = torch.distributed.nn.functional.all_gather(counted, group=group)
    total = sum(loss * count for loss, count in zip(losses, counts, strict=True) if count > 0)
    found: Tensor = total / sum(counts)
    assert abs(float(found) - float(outputs.loss)) < 1e-5
    return found


@pytest.fixture(scope="module")
def plain_loop(ranks: Launcher) -> Any:
    return ranks(2, timeout=120)(loop, "llama", "plain")[0]


@pytest.mark.parametrize("way", ["settings", "cp"])
def test_sequence_loop_of_accelerate(ranks: Launcher, way: str, plain_loop: Any) -> None:
    losses, weights, rate, _, _ = plain_loop
    for ours, state, rates, seen, named in ranks(4, timeout=120)(loop, "llama", way):
        assert max(abs(a - b) for a, b in zip(ours, losses, strict=True)) < 2e-5 and len(ours) == 20
        assert apart(state, weights) < 2e-5
        assert rates == pytest.approx(rate) and seen == [0, 2] and named == ["rank 0", "rank 2"]


def test_the_loop_of_accelerate_where_loaders_cut(ranks: Launcher) -> None:
    """(With gloo, torch's gather that is differentiated knows groups that begin at rank 0 only.)"""
    losses, weights, rate, _, _ = ranks(2, timeout=120)(loop, "llama", "settings")[0]
    for ours, state, rates, seen, named in ranks(2, timeout=120)(loop, "llama", "sp"):
        assert max(abs(a - b) for a, b in zip(ours, losses, strict=True)) < 2e-5 and len(ours) == 40
        assert apart(state, weights) < 2e-5 and rates == pytest.approx(rate) and named == ["rank 0"] and seen == [0]


def skipped() -> tuple[list[Any], list[Any], list[Any], list[Any], bool]:
    """Batches of a loader that cuts, and of loaders that are made of it, from the second one on."""
    with fresh_state():
        sizes = ParallelismConfig(dp_shard_size=1, sp_size=2)
        accelerator = ZeroAccelerator(zero_config={"stage": 2}, parallelism_config=sizes)
        loader = DataLoader(data("plain", 4), batch_size=1, collate_fn=collate)
        _, loader = accelerator.prepare(build("llama"), loader)
        # The function, which the Trainer of transformers calls; an accelerator's method does so, too.
        later = skip_first_batches(loader, 1)
        # As a worker gets it that is not forked.
        sent = pickle.loads(pickle.dumps(loader.collate_fn))
        again = accelerator.prepare(loader)
        parts = [sent([row]) for row in data("plain", 4)][1:]
        return list(loader)[1:], list(later), parts, list(again)[1:], later.device == accelerator.device


def test_loaders_that_skip_batches_cut_and_move_them(ranks: Launcher) -> None:
    for batches, later, parts, again, moved in ranks(2)(skipped):
        assert moved and len(batches) == 3 and batches[0]["input_ids"].shape[1] < TOKENS
        for found in (later, parts, again):
            for one, other in zip(batches, found, strict=True):
                assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- Lightning ----


def lightning(mesh: dict[str, int] | None) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = build("llama"), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    from zero_strategy.integrations.lightning import ZeroStrategy

    module = Module()
    strategy = "ddp" if mesh is None else ZeroStrategy(stage=3, mesh=mesh)
    trainer = trainers.trainer(strategy, max_epochs=2, accumulate_grad_batches=2)
    loaders = [DataLoader(data("plain", count), batch_size=1, collate_fn=collate) for count in (12, 4)]
    trainer.fit(module, *loaders)
    if mesh is None:
        state = module.state_dict()
    else:
        assert trainer.strategy.engine is not None
        state = trainer.strategy.engine.full_state_dict()
    value = float(trainer.callback_metrics["loss"])
    return module.losses, {name: tensor.detach().clone() for name, tensor in state.items()}, value


def test_sequence_trainer_of_lightning(ranks: Launcher) -> None:
    plain = ranks(2, timeout=120)(lightning, None)
    for rank, (losses, state, value) in enumerate(ranks(4, timeout=120)(lightning, {"sequence": 2})):
        expected, weights, wanted = plain[rank // 2]
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 2e-5
        assert apart(state, weights) < 2e-5 and abs(value - wanted) < 2e-5


# ---- loops, and what is refused ----


MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Mixtral": {"num_local_experts": 2},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "dropout": 0.0},
    "Roberta": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "pad_token_id": 1},
    "ModernBert": {"local_attention": 64},
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, config_name)(
        **{
            "vocab_size": WORDS,
            "pad_token_id": 0,
            "max_position_embeddings": 64,
            "num_key_value_heads": 2,
            **SIZES,
            **MODELS[name],
        }
    )
    head = "ForMaskedLM" if name in ("Roberta", "ModernBert") else "ForCausalLM"
    model: PreTrainedModel = getattr(transformers, name + head)(config)
    return model


def one_step(name: str, change: str = "") -> tuple[float, float]:
    """Differences of the loss, and of a step with the whole gradient, from the model's own."""
    plain = model_of(name)
    model = copy.deepcopy(plain)
    settings: dict[str, Any] = {"stage": 2, "mesh": {"sequence": 2, "ulysses": 1}, "units": {"min_numel": 0}}
    if change == "checkpointing of transformers":
        model.gradient_checkpointing_enable()
    if change == "activation_checkpointing":
        settings["activation_checkpointing"] = {"mode": "full"}
    if change == "adapter":
        import peft

        torch.manual_seed(1)
        options: Any = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(**options))  # type: ignore[assignment]
        plain = copy.deepcopy(model)
    engine = ZeroEngine(model, settings)
    divide_sequences(engine)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    engine.attach(optimizer)
    form = "packed" if change == "packed samples" else "plain" if name == "OPT" else "padded"
    batch = collate(data(form, 2))
    loss = model(**batch).loss
    loss.backward()
    whole = plain(**batch, **({"use_cache": False} if form == "packed" else {})).loss
    whole.backward()
    optimizer.step()
    state = engine.full_state_dict()
    gaps = [
        float((state[n] - (p.detach() - p.grad)).abs().max() / max(float(p.grad.abs().max()), 1e-2))
        for n, p in plain.named_parameters()
        if p.grad is not None
    ]
    engine.close()
    return abs(float(loss) - float(whole)), max(gaps)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds(ranks: Launcher, name: str) -> None:
    for loss, gradients in ranks(2, timeout=120)(one_step, name):
        assert loss < 2e-6 and gradients < 2e-5


@pytest.mark.parametrize(
    "change", ["checkpointing of transformers", "activation_checkpointing", "adapter", "packed samples"]
)
def test_layers_that_are_computed_again_adapters_and_packed_samples(ranks: Launcher, change: str) -> None:
    for loss, gradients in ranks(2, timeout=120)(one_step, "Qwen2", change):
        assert loss < 2e-6 and gradients < 2e-5


def tiled(stage: int, sequence: int, mode: str) -> tuple[float, float, bool]:
    """Differences of 20 losses and of the weights from the model's own; and that nobody has logits."""
    plain = build("llama")
    model = copy.deepcopy(plain)
    settings = {"mode": mode, "tile_tokens": 5}
    config = {"stage": stage, "mesh": {"sequence": sequence}, "activation_checkpointing": settings}
    engine = ZeroEngine(model, config)
    divide_sequences(engine)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, plain)]
    engine.attach(optimizers[0])
    gaps, hidden = [], True
    for step in range(20):
        row = 2 * step + engine.mesh.rank // sequence
        outputs, whole = model(**collate([sample(row)])), []
        outputs.loss.backward()
        copies = engine.mesh.world_size // sequence
        for number in range(copies):
            whole.append(plain(**collate([sample(2 * step + number)])).loss)
            (whole[-1] / copies).backward()
        gaps.append(abs(float(outputs.loss) - float(whole[engine.mesh.rank // sequence])))
        hidden = hidden and "logits" not in outputs
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    copied = copy.deepcopy(model) if stage == 0 and sequence == 1 else None
    if copied is not None:
        assert copied(**collate([sample(1)])).logits.shape == (1, TOKENS, WORDS)
    state = engine.full_state_dict()
    engine.close()
    return max(gaps), apart(state, dict(plain.state_dict())), hidden


@pytest.mark.parametrize("stage, sequence, mode", [(0, 1, "none"), (3, 1, "full"), (3, 2, "none"), (2, 2, "full")])
def test_tiles_of_mlps_and_of_the_loss(ranks: Launcher, stage: int, sequence: int, mode: str) -> None:
    for losses, weights, hidden in ranks(2, timeout=120)(tiled, stage, sequence, mode):
        assert losses < 2e-6 and weights < 2e-5 and hidden


def test_the_trainer_of_transformers_with_tiles(ranks: Launcher, tmp_path: Path, theirs_of_llama: Any) -> None:
    theirs, weights = theirs_of_llama
    tiles = {"activation_checkpointing": {"tile_tokens": 4}}
    ours, state = ranks(2, timeout=120)(trained, {}, "llama", "plain", 3, str(tmp_path / "ours"), None, tiles)[0]
    assert max(abs(a[n] - b[n]) for a, b in zip(ours, theirs, strict=True) for n in a) < 2e-5
    assert apart(state, weights) < 2e-5


def untiled() -> list[str]:
    found = []
    shape: dict[str, Any] = {"vocab_size": WORDS, "num_key_value_heads": 2, **SIZES}
    for model in (
        transformers.CohereForCausalLM(transformers.CohereConfig(**shape)),  # a scale of logits
        build("bert"),
        transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=WORDS, hidden_size=12, ffn_dim=16)),
    ):
        engine = ZeroEngine(model, {"stage": 0, "activation_checkpointing": {"tile_tokens": 4}})
        with pytest.raises(ValueError) as raised:
            divide_sequences(engine)
            model(**collate([sample(0)]))
        found.append(str(raised.value))
        engine.close()
    return found


def test_models_without_tiles_are_refused_by_name(ranks: Launcher) -> None:
    scaled, bert, opt = ranks(1)(untiled)[0]
    assert "computes with its logits" in scaled
    assert "BertForMaskedLM is no causal" in bert and "OPTForCausalLM has no modules called mlp" in opt


class Both(torch.nn.Module):
    """Two models, of which the second cannot be tiled."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = build("llama"), build("bert")


def own_loss(logits: Tensor, labels: Any, vocab_size: int, **_: Any) -> Tensor:
    return logits.sum()


def left_by_refusals() -> list[tuple[str, list[str]]]:
    """Refusals of tiles, and attributes that are on the models afterwards."""
    scripts = build("llama")
    scripts.loss_function = own_loss
    found = []
    for module in (scripts, Both()):
        before = {path: {*vars(part)} for path, part in module.named_modules()}
        engine = ZeroEngine(module, {"stage": 0, "activation_checkpointing": {"tile_tokens": 4}})
        with pytest.raises(ValueError) as raised:
            divide_sequences(engine)
        engine.close(gather=True)
        left = [f"{path}.{name}" for path, part in module.named_modules() for name in {*vars(part)} - before[path]]
        models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
        left += [f"{type(one).__name__} hooks" for one in models if one._forward_pre_hooks or one._forward_hooks]
        found.append((str(raised.value), left))
    assert scripts.loss_function is own_loss
    return found


def test_models_whose_tiles_are_refused_stay_as_they_were(ranks: Launcher) -> None:
    (loss, first), (bert, second) = ranks(1)(left_by_refusals)[0]
    assert "own_loss" in loss and "BertForMaskedLM is no causal" in bert and not first and not second


def logits_after_an_evaluation(folder: str) -> tuple[bool, bool]:
    """Tells whether a model gives logits, before and after an evaluation that wants losses alone."""
    with fresh_state():
        arguments = TrainingArguments(
            folder, per_device_eval_batch_size=1, prediction_loss_only=True, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        zero = {"stage": 2, "activation_checkpointing": {"tile_tokens": 4}}
        keywords: dict[str, Any] = {"eval_dataset": data("plain", 2), "data_collator": collate}
        trainer = ZeroTrainer(build("llama"), arguments, zero_config=zero, **keywords)

        def logits() -> bool:
            with torch.no_grad():
                return trainer.model(**collate([sample(0)])).logits is not None

        before = logits()
        trainer.evaluate()
        return before, logits()


def test_a_model_gives_logits_after_an_evaluation_of_losses_alone(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(logits_after_an_evaluation, str(tmp_path)) == [(True, True)]


class Shifted(LlamaForCausalLM):
    """Mixes neighbours, which no rank has whole."""

    def forward(self, input_ids: Any = None, **keywords: Any) -> Any:
        mixed = self.model.embed_tokens(input_ids.roll(1, dims=1))
        return super().forward(inputs_embeds=mixed, **keywords)


class ShiftedForCausalLM(Shifted):
    pass


def generated(stage: int) -> tuple[bool, bool]:
    """Generation, and scores without labels, of whole sequences on every rank; the config that is saved."""
    model = build("llama")
    plain = copy.deepcopy(model)
    engine = ZeroEngine(model, {"stage": stage, "mesh": {"sequence": 2}})
    divide_sequences(engine)
    batch = collate(data("padded", 2))
    batch.pop("labels")
    with torch.no_grad():
        scores = torch.equal(model(**batch).logits, plain(**batch).logits)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    return scores, torch.equal(model.generate(**batch, **options), plain.generate(**batch, **options))


@pytest.mark.parametrize("stage", [0, 3])
def test_generation_has_whole_sequences(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(generated, stage) == [(True, True)] * 2


def model_that(what: str) -> PreTrainedModel:
    llama: dict[str, Any] = {"vocab_size": WORDS, **SIZES}
    if what == "attention_dropout":
        return LlamaForCausalLM(LlamaConfig(attention_dropout=0.1, **llama))
    if what == "heads":
        return LlamaForCausalLM(LlamaConfig(**{**llama, "num_attention_heads": 1}))
    if what == "classifier":
        return BertForSequenceClassification(BertConfig(**llama))
    assert what == "encoder"
    return T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def refusals() -> dict[str, str]:
    found = {}
    for what, mesh in (
        ("attention_dropout", {"sequence": 2}),
        ("heads", {"sequence": 2, "ulysses": 2}),
        ("classifier", {"sequence": 2}),
        ("encoder", {"sequence": 2}),
    ):
        engine = ZeroEngine(model_that(what), {"stage": 0, "mesh": mesh})
        with pytest.raises(ValueError) as raised:
            divide_sequences(engine)
        found[what] = str(raised.value)
        engine.close()
    model = build("llama")
    engine = ZeroEngine(model, {"stage": 0, "mesh": {"sequence": 2}})
    divide_sequences(engine)
    batch = collate(data("plain", 1))
    rank = dist.get_rank()
    for what, more in (
        ("mask", {"attention_mask": torch.ones(1, 1, TOKENS, TOKENS)}),
        ("batches", {"input_ids": batch["input_ids"] + rank}),
        ("logits", {"logits_to_keep": 1}),
    ):
        with pytest.raises(ValueError) as raised:
            model(**{**batch, **more})
        found[what] = str(raised.value)
    engine.close()
    torch.manual_seed(0)
    shifted = ShiftedForCausalLM(LlamaConfig(vocab_size=WORDS, **SIZES))
    engine = ZeroEngine(shifted, {"stage": 0, "mesh": {"sequence": 2}})
    divide_sequences(engine)
    with pytest.raises(ValueError) as raised:
        shifted(**batch)
    found["mixed"] = str(raised.value)
    engine.close()
    alone = ZeroEngine(torch.nn.Linear(2, 2), {"stage": 0, "mesh": {"sequence": 2}})
    optimizer = torch.optim.SGD(alone.module.parameters(), lr=0.1)
    alone.attach(optimizer)
    alone.module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError) as raised:
        optimizer.step()
    found["unused"] = str(raised.value)
    return found


def test_sequence_what_cannot_be_divided_is_refused_by_name(ranks: Launcher) -> None:
    for found in ranks(2)(refusals):
        for what, text in {
            "attention_dropout": "config.attention_dropout=0.1",
            "heads": "mesh.ulysses is 2",
            "classifier": "BertForSequenceClassification",
            "encoder": "T5ForConditionalGeneration",
            "mask": "attention_mask is of 4 dimensions",
            "batches": "different batches",
            "logits": "logits_to_keep",
            "mixed": "ShiftedForCausalLM computes other outputs",
            "unused": "no sequence was divided",
        }.items():
            assert text in found[what], (what, found[what])
