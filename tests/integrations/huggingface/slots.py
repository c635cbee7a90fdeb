"""Trainings in slots under the transformers Trainer, and by a loop over the engine with the same sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.training import SEVERAL, WORDS, build
from tests.reproducible.training import digest_of
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.transformers import ZeroTrainer

SLOTS, SEED = 4, 9


def rows(count: int = 30) -> list[dict[str, Tensor]]:
    """Sequences of which different numbers of tokens count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        tokens = torch.randint(3, WORDS, (10,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + number % 9] = -100  # the first is predicted from nothing
        found.append({"input_ids": tokens, "labels": labels})
    return found


def model_of(kind: str, dropout: float = 0.1) -> Any:
    if kind == "gpt2":
        model = build(kind)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        return model
    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "num_key_value_heads": 1, "attention_dropout": dropout, **SEVERAL}
    return LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=2))


@dataclass
class Trained:
    """Results of a Trainer; equal on all ranks, and at any number of them.

    Attributes:
        digest: Of weights and states.
        log: Everything that was logged but times and speeds.
        counts: Steps, tokens seen, operations, and the epoch.
        loss: The mean loss of the training.
    """

    digest: str = ""
    log: list[dict[str, float]] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    loss: float = 0.0


def arguments_of(folder: str, **more: Any) -> TrainingArguments:
    transformers.logging.set_verbosity_error()
    plain: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "include_num_input_tokens_seen": "all",
        "optim": "adamw_torch",
    }
    return TrainingArguments(folder, **{**plain, **more})


def trainer_of(
    zero: dict[str, Any] | None,
    folder: str,
    *,
    kind: str = "gpt2",
    slots: int = SLOTS,
    dropout: float = 0.1,
    data: Any = None,
    own: dict[str, Any] | None = None,
    trainer: type[Trainer] = ZeroTrainer,
    **more: Any,
) -> Any:
    """Ours with these settings, or that of transformers for None."""
    torch.set_num_threads(1)
    common = {"train_dataset": rows() if data is None else data, **(own or {})}
    model = common.pop("model", None) or model_of(kind, dropout)
    if zero is None:
        return Trainer(model, arguments_of(folder, **more), **common)
    config = {**zero, "reproducible": {"slots": slots, "seed": SEED}}
    made: Any = trainer
    return made(model, arguments_of(folder, **more), zero_config=config, **common)


def result_of(trainer: Any, loss: float) -> Trained:
    state = trainer.state
    timed = ("runtime", "per_second", "preparation_time")
    log = [{k: v for k, v in entry.items() if not any(part in k for part in timed)} for entry in state.log_history]
    counts = [state.global_step, state.num_input_tokens_seen, state.total_flos, state.epoch]
    return Trained(digest_of(trainer.zero_engine), log, counts, loss)


def train_trainers(folder: str, cases: list[dict[str, Any]], **common: Any) -> list[Trained]:
    """One training for each case."""
    found = []
    for case in cases:
        with fresh_state():
            trainer = trainer_of(folder=folder, **{**common, **case})
            found.append(result_of(trainer, trainer.train().training_loss))
            dist.barrier()
    return found


def train_part(folder: str, zero: dict[str, Any], until: int | None, resumed: bool, **common: Any) -> Trained:
    """Train to a step and save there; or from the last checkpoint on."""
    with fresh_state():
        trainer = trainer_of(zero, folder, save_strategy="steps", save_steps=1, **common)
        if until is not None:
            trainer.add_callback(StopAt(until))
        found = result_of(trainer, trainer.train(resume_from_checkpoint=resumed).training_loss)
        dist.barrier()
        return found


class StopAt(transformers.TrainerCallback):
    """Ends the training after a step, as if it had been interrupted there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


def by_engine(kind: str, epochs: int = 2) -> str:
    """The digest of the same training as a loop over the engine."""
    torch.set_num_threads(1)
    data, model = rows(), model_of(kind)
    model.config.use_cache = False  # as the Trainer
    with ZeroEngine(model, {"stage": 0, "reproducible": {"slots": SLOTS, "seed": SEED}}) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        engine.attach(optimizer)
        sampler = engine.slots.sampler(data, 2, seed=SEED)
        loader = DataLoader(data, 2, sampler=sampler, collate_fn=default_data_collator)  # type: ignore[arg-type]
        model.train()
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            batches = list(loader)
            for start in range(0, len(batches), SLOTS):
                step = batches[start : start + SLOTS]
                tokens = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in step)
                for batch in step:
                    with engine.micro_batch():
                        model(**batch, num_items_in_batch=torch.tensor(tokens / SLOTS)).loss.backward()
                engine.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        return digest_of(engine)


def plain_losses(folder: str) -> list[float]:
    """Losses of transformers' own Trainer in one process, of which a step has as many micro-batches."""
    with fresh_state():
        more = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": SLOTS}
        trainer = trainer_of(None, folder, dropout=0.0, data=rows(32), **more)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
