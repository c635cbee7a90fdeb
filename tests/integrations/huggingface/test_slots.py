"""Slots under the transformers Trainer: the bits of a training on any number of processes, its resume on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.slots import (
    Trained,
    by_engine,
    plain_losses,
    rows,
    train_part,
    train_trainers,
    trainer_of,
)
from tests.launcher import Launcher
from zero_strategy.integrations.transformers import ZeroTrainer

STAGES: list[dict[str, Any]] = [{"zero": {"stage": 1}}, {"zero": {"stage": 3}}]


def one(found: list[list[list[Trained]]]) -> Trained:
    """The one result of all runs, ranks and cases."""
    every = [each for run in found for rank in run for each in rank]
    assert all(each == every[0] for each in every), [(e.digest[:8], e.counts, e.loss, e.log) for e in every]
    return every[0]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_trainer_has_the_same_bits_on_any_ranks(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    """Weights, states, logged losses and norms, numbers of steps and tokens; those of a loop over the engine."""
    common = {"kind": kind, "lr_scheduler_type": "constant"}
    found = one([ranks(world, timeout=300)(train_trainers, str(tmp_path), STAGES, **common) for world in (1, 2, 4)])
    assert found.counts[:2] == [8, 8 * 8 * 10]
    assert found.digest == ranks(1)(by_engine, kind)[0]


def test_trainer_has_the_mean_over_the_tokens_of_a_step(ranks: Launcher, tmp_path: Path) -> None:
    """Losses of transformers' own Trainer, whose steps have the same samples in other micro-batches."""
    plain = ranks(1)(plain_losses, str(tmp_path))[0]
    common = {"dropout": 0.0, "data": rows(32), "train_sampling_strategy": "sequential"}
    found = one([ranks(2)(train_trainers, str(tmp_path), STAGES[1:], **common)])
    assert [entry["loss"] for entry in found.log if "loss" in entry] == pytest.approx(plain, rel=2e-5)


def test_trainer_has_slots_on_three_ranks(ranks: Launcher, tmp_path: Path) -> None:
    """Logged every other step."""
    common = {"slots": 12, "logging_steps": 2, "num_train_epochs": 3}
    one([ranks(world)(train_trainers, str(tmp_path), STAGES[1:], **common) for world in (1, 3)])


def test_trainer_resumes_slots_on_other_ranks_inside_an_epoch(ranks: Launcher, tmp_path: Path) -> None:
    """Saved by 2 ranks, gone on with by 1, by 4 and by 2 in the end; once by one run on 2 ranks."""
    zero = {"stage": 3}
    whole = ranks(2, timeout=300)(train_part, str(tmp_path / "whole"), zero, None, False)[0]
    folder, last, log = str(tmp_path / "parts"), None, []
    for world, until in ((2, 1), (1, 3), (4, 6), (2, None)):
        last = ranks(world, timeout=300)(train_part, folder, zero, until, last is not None)[0]
        log = [*(entry for entry in last.log if "loss" in entry)]
    assert last is not None and last.digest == whole.digest and last.counts == whole.counts
    assert log == [entry for entry in whole.log if "loss" in entry]


def evaluated(folder: str) -> tuple[float, float]:
    """The loss of an evaluation, and the model's own of the same samples."""
    with fresh_state():
        own = {"eval_dataset": rows(8)}
        trainer = trainer_of({"stage": 2}, folder, own=own, max_steps=1, per_device_eval_batch_size=4)
        trainer.train()
        found = trainer.evaluate()["eval_loss"]
        with torch.no_grad():
            return found, float(trainer.model(**default_data_collator(rows(8))).loss)


def test_trainer_evaluates_no_slots(ranks: Launcher, tmp_path: Path) -> None:
    """A batch of an evaluation has a mean of its own tokens, which are no part of a step."""
    for found, expected in ranks(2)(evaluated, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-4)


# ---- what users write into a Trainer ----


class Noisy(ZeroTrainer):
    """Draws before the Trainer's own step, and scales the loss by a draw."""

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        inputs["input_ids"] = torch.where(torch.rand(inputs["input_ids"].shape) < 0.1, 5, inputs["input_ids"])
        return super().training_step(model, inputs, *rest, **more)

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        weight = 0.5 + torch.rand(())
        return super().compute_loss(*arguments, **keywords) * weight


class Masks:
    """A collation that draws, as those of masked language models."""

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        batch = default_data_collator(features)
        batch["labels"][torch.rand(batch["labels"].shape) < 0.3] = -100
        return batch


def mean_of_tokens(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def test_trainer_draws_by_slots_whatever_users_override(ranks: Launcher, tmp_path: Path) -> None:
    """A step and a loss of the user's, masks drawn by a worker; and a loss function."""
    noisy = {"trainer": Noisy, "own": {"data_collator": Masks()}, "dataloader_num_workers": 1, "max_steps": 3}
    one([ranks(world, timeout=300)(train_trainers, str(tmp_path), STAGES[1:], **noisy) for world in (1, 2)])
    own = {"own": {"compute_loss_func": mean_of_tokens}, "max_steps": 3, "dropout": 0.0}
    plain = {"dropout": 0.0, "max_steps": 3}
    functions = one([ranks(world)(train_trainers, str(tmp_path), STAGES[1:], **own) for world in (1, 2)])
    usual = ranks(2)(train_trainers, str(tmp_path), STAGES[1:], **plain)[0][0]
    assert functions.loss == pytest.approx(usual.loss, rel=1e-5)


# ---- refusals ----


class Stream(IterableDataset[Any]):
    """Samples without indices."""

    def __iter__(self) -> Any:
        yield from rows(8)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "accumulation": (
        {"gradient_accumulation_steps": 3},
        ["(gradient_accumulation_steps) is 3", "slots is 4", "set it to 2", "slots to 6"],
    ),
    "batch size": ({"auto_find_batch_size": True}, ["auto_find_batch_size=True", "slots 4", "set the size"]),
    "own means": (
        {"average_tokens_across_devices": False},
        ["average_tokens_across_devices=False", "leave it at True"],
    ),
    "lengths": ({"train_sampling_strategy": "group_by_length"}, ["LengthGroupedSampler", "Subset"]),
    "stream": ({"data": Stream(), "max_steps": 1}, ["Stream", "length and indices"]),
    "split": ({"accelerator_config": {"split_batches": True}}, ["split_batches=True", "slots 4"]),
}


def refused_by_trainer(folder: str, what: str) -> str:
    with fresh_state():
        try:
            trainer_of({"stage": 1}, folder, **REFUSED[what][0]).train()
        except ValueError as error:
            return str(error)
        return "trained"


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_trainer_refuses_what_is_no_step_of_slots(ranks: Launcher, tmp_path: Path, what: str) -> None:
    for found in ranks(2)(refused_by_trainer, str(tmp_path), what):
        assert all(part in found for part in REFUSED[what][1]), found
