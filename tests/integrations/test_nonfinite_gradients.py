"""`nonfinite_gradients: skip` as scripts of each framework meet it, and a DeepSpeed file's `check_grad_overflow`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.lightning.trainers import Module, loader, trainer, weights
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.integrations.lightning import ZeroStrategy

BAD = 1
"""The step in which the last rank's gradients are not finite."""


def factor(step: int) -> float:
    return float("inf") if step == BAD and dist.get_rank() == dist.get_world_size() - 1 else 1.0


# ---- a script of DeepSpeed's ----


def deepspeed_script(stage: int, clipping: float, check: dict[str, bool]) -> list[Any]:
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True, **check},
        "gradient_clipping": clipping,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    applied, rates = [], []
    for step in range(3):
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum() * factor(step))
        engine.step()
        applied.append(engine.was_step_applied())
        rates.append(scheduler.get_last_lr()[0])
    finite = all(bool(value.isfinite().all()) for value in engine.state_dict().values())
    return [applied, engine.skipped_steps, engine.global_steps, finite, rates[1] == rates[0], engine.zero.steps.skipped]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_deepspeed_script_in_bf16_skips(ranks: Launcher, stage: int, clipping: float) -> None:
    for check in ({}, {"check_grad_overflow": True}):
        for found in ranks(2)(deepspeed_script, stage, clipping, check):
            assert found == [[True, False, True], 1, 3, True, True, 1]
    for found in ranks(2)(deepspeed_script, stage, clipping, {"check_grad_overflow": False}):
        assert found == [[True, True, True], 0, 3, False, False, 0]


def test_the_setting_comes_from_a_deepspeed_file_in_bf16_alone() -> None:
    for section, expected in [
        ({"bf16": {"enabled": True}}, "skip"),
        ({"bf16": {"enabled": "auto"}}, "skip"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "ignore"),
        ({"bf16": {"enabled": False}}, "ignore"),
        ({"fp16": {"enabled": True}}, "ignore"),
        ({}, "ignore"),
    ]:
        config = load_config({"zero_optimization": {"stage": 2}, **section})
        assert config.nonfinite_gradients == expected, section
    assert load_config(stage=2).nonfinite_gradients == "ignore"
    with pytest.raises(ValueError, match="accepted: 'ignore', 'skip', 'raise'"):
        load_config(nonfinite_gradients="drop")


# ---- pipelines ----


def pipeline(stages: int) -> list[Any]:
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]
    steps = iter(range(3))
    now = [0]
    net = deepspeed.pipe.PipelineModule(
        layers, num_stages=stages, loss_fn=lambda out, y: (out - y).square().mean() * factor(now[0])
    )
    config = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }  # fmt: skip
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
    applied = []
    batch = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16)
    for now[0] in steps:
        engine.train_batch(iter([batch] * 2))
        applied.append(engine.was_step_applied())
    finite = all(bool(value.isfinite().all()) for value in engine.state_dict().values())
    return [applied, engine.skipped_steps, finite]


def test_all_stages_of_a_pipeline_skip(ranks: Launcher) -> None:
    for found in ranks(2)(pipeline, 2):
        assert found == [[True, False, True], 1, True]


# ---- Lightning ----


class Bad(Module):
    """A batch whose loss is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * factor(batch_idx)


def lightning(stage: int, choice: str, clip: float | None) -> list[Any]:
    module, flags = Bad(), {"max_steps": 3, "gradient_clip_val": clip}
    strategy = ZeroStrategy(stage=stage, nonfinite_gradients=choice, units={"min_numel": 0})
    fitting = trainer(strategy, **flags)
    if choice == "raise":
        try:
            fitting.fit(module, loader(48))
        except FloatingPointError as error:
            return [str(error)]
        return ["no error"]
    fitting.fit(module, loader(48))
    return [fitting.strategy.engine.steps.counters(), weights(module)]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("stage", range(4))
def test_lightning(ranks: Launcher, stage: int, clip: float | None) -> None:
    for counters, found in ranks(2)(lightning, stage, "skip", clip):
        assert counters == {"global_steps": 2, "skipped_steps": 1}
        assert all(value.isfinite().all() for value in found.values())
    for (message,) in ranks(2)(lightning, stage, "raise", clip):
        assert "gradients are not finite (" in message and "'net.inner.weight'" in message


# ---- Accelerate ----


def accelerate(stage: int, clip: bool) -> list[Any]:
    with fresh_state():
        accelerator = make(stage, {"nonfinite_gradients": "skip"})
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        skipped, rates = [], []
        for step in range(3):
            accelerator.backward(model(torch.ones(2, 4)).sum() * factor(step))
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return [skipped, rates[1] == rates[0], all(bool(value.isfinite().all()) for value in state.values())]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_accelerate_skips_and_holds_the_schedule(ranks: Launcher, stage: int, clip: bool) -> None:
    for found in ranks(2)(accelerate, stage, clip):
        assert found == [[False, True, False], True, True]
