"""Two sources for one thing, and preparing twice: each is an error that names both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from zero_strategy.integrations.accelerate import ZeroAccelerator

FILE = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One process; Accelerate's state is global."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_model_is_prepared_once() -> None:
    accelerator = ZeroAccelerator(cpu=True, zero_config={"stage": 2})
    model = accelerator.prepare(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="this Linear was prepared by this ZeroAccelerator already"):
        accelerator.prepare(model, optimizer)
    prepared = accelerator.prepare(optimizer)  # what the error advises
    accelerator.backward(model(torch.ones(1, 2)).sum())
    prepared.step()
    assert len(accelerator._models) == 1 and accelerator.prepare(prepared) is prepared
    accelerator.free_memory()
    assert accelerator.prepare(model) is model  # let go of, as between runs of a Trainer


def test_a_model_that_was_evaluated_first_is_prepared_for_training() -> None:
    accelerator = ZeroAccelerator(cpu=True, zero_config={"stage": 2})
    model = accelerator.prepare_model(nn.Linear(2, 1), evaluation_mode=True)
    for _ in range(2):
        assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert accelerator.prepare(model) is model and len(accelerator._models) == 1
    with pytest.raises(ValueError, match="this Linear was prepared by this ZeroAccelerator already"):
        accelerator.prepare(model)


def test_a_script_and_the_environment_are_two_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero.yaml").write_text("stage: 1\n")
    monkeypatch.setenv("ZERO_STRATEGY_CONFIG", str(tmp_path / "zero.yaml"))
    assert ZeroAccelerator(cpu=True).zero_config.stage == 1
    with pytest.raises(ValueError, match=r"a zero_config, and the variable ZERO_STRATEGY_CONFIG names .*zero\.yaml"):
        ZeroAccelerator(cpu=True, zero_config={"stage": 2})


def test_a_schedule_of_the_json_and_one_of_the_script(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from zero_strategy.integrations.transformers import ZeroTrainer

    class Model(nn.Linear):
        def forward(self, x: Any) -> Any:
            return {"loss": super().forward(x).sum()}

    model = Model(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    given = (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    config = {**FILE, "scheduler": schedule}
    trainer = ZeroTrainer(model, args, zero_config=config, train_dataset=[{"x": torch.ones(2)}], optimizers=given)
    with pytest.raises(ValueError, match=r"StepLR\) and scheduler 'WarmupDecayLR' \[.*\] are two schedules"):
        trainer.train()
