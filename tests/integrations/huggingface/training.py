"""Tiny models built from their configs, and a training of them under the Trainer and under ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from tests.integrations.accelerate.training import fresh_state
from zero_strategy.integrations.transformers import ZeroTrainer, make_zero_trainer

WORDS = 48
KINDS = ["gpt2", "llama", "bert", "t5"]
SEVERAL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=1, **shape))
    if kind == "llama":
        ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SEVERAL, **ends))
    if kind == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=24, **SEVERAL))
    shape = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **shape))


def rows(count: int = 30) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(3, WORDS, (10,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in found]


def trainer_of(
    stage: int | None,
    kind: str,
    folder: Path,
    base: type[Trainer] = Trainer,
    zero: Any = None,
    make: Callable[[str], Any] = build,
    **arguments: Any,
) -> Any:
    """The Trainer of transformers if stage is None, else ours."""
    transformers.logging.set_verbosity_error()
    plain: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    settings = Seq2SeqTrainingArguments(str(folder), **{**plain, **arguments})
    data = {"train_dataset": rows(), "eval_dataset": rows(9)}
    if stage is None:
        return base(make(kind), settings, **data)
    ours: Any = ZeroTrainer if base is Trainer else make_zero_trainer(base)
    return ours(make(kind), settings, zero_config={"stage": stage, "units": {"min_numel": 0}, **(zero or {})}, **data)


def history(trainer: Any) -> list[dict[str, float]]:
    """Metrics of the training itself."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{key: record[key] for key in kept if key in record} for record in trainer.state.log_history]


def difference(a: list[dict[str, float]], b: list[dict[str, float]]) -> float:
    assert [record.keys() for record in a] == [record.keys() for record in b]
    return max(abs(x[key] - y[key]) for x, y in zip(a, b, strict=True) for key in x)


def whole(trainer: Any) -> dict[str, Tensor]:
    """The full state dict, on every rank."""
    if isinstance(trainer, ZeroTrainer):
        assert trainer.zero_engine is not None
        return trainer.zero_engine.full_state_dict()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


Trained = tuple[list[dict[str, float]], dict[str, Tensor]]
"""What was logged, and the full weights."""


def run(stage: int | None, kind: str, folder: str, **arguments: Any) -> Trained:
    """Trains with an evaluation after each epoch, saves the weights to `folder/model`."""
    with fresh_state():
        trainer = trainer_of(stage, kind, Path(folder), eval_strategy="epoch", **arguments)
        trainer.train()
        trainer.save_model(f"{folder}/model")
        dist.barrier()
        return history(trainer), whole(trainer)


def resume(stage: int | None, kind: str, folder: str, first_epochs: int | None, **arguments: Any) -> Trained:
    """Two epochs: saved after the first and stopped there, or (None) gone on from that checkpoint."""
    with fresh_state():
        trainer = trainer_of(stage, kind, Path(folder), save_strategy="epoch", **arguments)
        if first_epochs is not None:
            trainer.add_callback(StopAfter(first_epochs))
        trainer.train(resume_from_checkpoint=first_epochs is None)
        dist.barrier()
        return history(trainer), whole(trainer)


class StopAfter(transformers.TrainerCallback):
    """Ends the training after an epoch, as if it had been interrupted there."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.epoch >= self.epochs - 1e-6


class StopEarly(transformers.StoppingCriteria):
    """Ends the generation on rank 1 long before the other's."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), dist.get_rank() == 1 and input_ids.shape[1] > 2)


def generated(stage: int | None, folder: str, uneven: bool = False) -> list[list[int]]:
    with fresh_state():
        trainer = trainer_of(
            stage, "t5", Path(folder), Seq2SeqTrainer, predict_with_generate=True, generation_max_length=8, max_steps=2
        )
        trainer.train()
        options = {"stopping_criteria": transformers.StoppingCriteriaList([StopEarly()])} if uneven else {}
        found: list[list[int]] = trainer.predict(rows(7), **options).predictions.tolist()
        return found
