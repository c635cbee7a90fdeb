"""`WeightAveragingCallback`: what is evaluated, left and saved, against the formula on the gathered model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.training import build, rows, trainer_of, whole
from tests.launcher import Launcher
from zero_strategy.integrations.transformers import WeightAveragingCallback


class Following(TrainerCallback):
    """The average by hand after each step."""

    def __init__(self, trainer: Any, state: dict[str, Tensor] | None = None) -> None:
        self.trainer, self.average = trainer, state or {}

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        weights = whole(self.trainer)
        kept = self.average
        self.average = {n: 0.7 * kept[n] + (1 - 0.7) * weights[n] for n in kept} if kept else weights


def evaluated(state: dict[str, Tensor]) -> float:
    """The loss of a plain model on the rows that are evaluated, in batches as there."""
    model = build("llama").eval()
    model.load_state_dict(state)
    with torch.no_grad():
        losses = [float(model(**{key: value[None] for key, value in row.items()}).loss) for row in rows(9)]
    return sum(losses) / len(losses)


def averaged(stage: int, folder: str, best: bool) -> tuple[list[str], float, float]:
    options: dict[str, Any] = {"save_strategy": "epoch", "load_best_model_at_end": best, "max_grad_norm": 0.0}
    with fresh_state():
        trainer = trainer_of(stage, "llama", Path(folder), eval_strategy="epoch", **options)
        following = Following(trainer)
        trainer.add_callback(WeightAveragingCallback(decay=0.7))
        trainer.add_callback(following)
        trainer.train()
        found, wanted = whole(trainer), following.average
        losses = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return wrong, losses[-1], evaluated(wanted)


@pytest.mark.parametrize("stage, best", [(1, False), (3, False), (2, True)])
def test_the_average_is_evaluated_and_left(ranks: Launcher, tmp_path: Path, stage: int, best: bool) -> None:
    """The loss falls, so the best checkpoint is the last one."""
    for wrong, seen, wanted in ranks(2)(averaged, stage, str(tmp_path), best):
        assert wrong == [] and seen == pytest.approx(wanted, rel=1e-5)


def resumed(folder: str) -> list[str]:
    with fresh_state():
        whole_run = trainer_of(3, "llama", Path(folder), save_strategy="epoch")
        whole_run.add_callback(WeightAveragingCallback(decay=0.7))
        whole_run.train()
        wanted = whole(whole_run)
    with fresh_state():
        again = trainer_of(1, "llama", Path(folder), save_strategy="epoch")
        again.add_callback(WeightAveragingCallback(decay=0.7))
        again.train(resume_from_checkpoint=str(min(Path(folder).glob("checkpoint-*"), key=lambda p: len(p.name))))
        found = whole(again)
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def test_a_run_resumes(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(resumed, str(tmp_path)) == [[], []]


def misplaced(folder: str) -> None:
    with fresh_state(), pytest.raises(ValueError, match="give it to a ZeroTrainer"):
        trainer = trainer_of(None, "llama", Path(folder))
        trainer.add_callback(WeightAveragingCallback())
        trainer.train()


def test_a_plain_trainer_is_refused(ranks: Launcher, tmp_path: Path) -> None:
    ranks(1)(misplaced, str(tmp_path))
