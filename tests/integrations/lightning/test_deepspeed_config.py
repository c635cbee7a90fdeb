"""A DeepSpeed JSON given to the integrations: it configures ours, and is held against what the framework owns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.lightning.test_fabric import fabric
from tests.integrations.lightning.trainers import Module, error, loader, raises, train, trainer, weights
from tests.launcher import Launcher
from zero_strategy import ZeroStrategy
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations import strategy_class

pytestmark = pytest.mark.filterwarnings("ignore:keys without effect")

OWNED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": "auto"}},
}
"""What the Trainer below has, on two ranks."""
FLAGS: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def ds(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "overlap_comm": True}, **keys}


def trained(folder: str) -> list[float]:
    path = Path(folder) / f"ds{torch.distributed.get_rank()}.json"
    errors = []
    for stage in (2, 3):
        path.write_text(json.dumps(ds(stage, **OWNED)))
        strategy = ZeroStrategy(config=path, units={"min_numel": 0})
        module = Module()
        trainer(strategy, **FLAGS).fit(module, loader())
        table = strategy.explain()
        assert f"user: {path}: zero_optimization.stage" in table and strategy.config.stage == stage
        errors.append(error(weights(module), train(Module(), None, **FLAGS)))
    return errors


def test_a_json_that_agrees_trains(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(trained, str(tmp_path)):
        assert max(found) < 2e-6


def disagreeing() -> None:
    for keys, parts in (
        ({"gradient_clipping": 1.0}, ["gradient_clipping is 1.0", "Trainer(gradient_clip_val=0.5)", '"auto"']),
        ({"gradient_accumulation_steps": 1}, ["accumulation_steps is 1", "Trainer(accumulate_grad_batches=2)"]),
        ({"bf16": {"enabled": True}}, ["precision is 'bf16'", "bf16.enabled", "Trainer(precision="]),
        ({"train_batch_size": 8}, ["train_batch_size is 8", "16 in derived: 2 ranks x 4 x 2"]),
        ({"train_micro_batch_size_per_gpu": 8}, ["per_gpu is 8", "4 in train_dataloader.batch_size"]),
        ({"optimizer": {"type": "SGD"}}, ["optimizer.type is 'SGD'", "configure_optimizers() is AdamW"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, ["optimizer.params.lr is 0.1", "0.01"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["'scheduler'", "cannot be set here", "leave the section out"]),
        ({"dataloader_drop_last": True}, ["DataLoader(drop_last=True)"]),
    ):
        with raises(ValueError, *parts):
            trainer(ZeroStrategy(config=ds(2, **keys)), **FLAGS).fit(Module(), loader())
    with raises(ValueError, "a bound on the norm", "gradient_clip_algorithm"):
        flags = {**FLAGS, "gradient_clip_algorithm": "value"}
        trainer(ZeroStrategy(config=ds(2, gradient_clipping=0.5)), **flags).fit(Module(), loader())


def test_a_json_that_disagrees_with_the_trainer(ranks: Launcher) -> None:
    ranks(2)(disagreeing)


def under_fabric() -> None:
    made = strategy_class("lightning.fabric")
    run = fabric(made(config=ds(2, gradient_clipping="auto", bf16={"enabled": False})))
    run.setup(torch.nn.Linear(8, 8))
    for keys, parts in (
        ({"gradient_clipping": 1.0}, ["'gradient_clipping'", "accelerator.clip_grad_norm_", 'write "auto"', "1.0"]),
        ({"train_batch_size": 8}, ["DataLoader(batch_size=...)"]),
        ({"fp16": {"enabled": True}}, ["precision is 'fp16'", "Fabric(precision='32-true')"]),
    ):
        with raises(ValueError, *parts):
            fabric(made(config=ds(2, **keys))).setup(torch.nn.Linear(8, 8))


def test_under_fabric(ranks: Launcher) -> None:
    ranks(1)(under_fabric)


def in_a_loop_of_ones_own() -> None:
    engine = ZeroEngine(torch.nn.Linear(8, 8), ds(1, bf16={"enabled": True}), compute_dtype=torch.bfloat16)
    assert engine.stage == 1
    with raises(ValueError, "precision is 'bf16'", "ZeroEngine(compute_dtype=None)"):
        ZeroEngine(torch.nn.Linear(8, 8), ds(1, bf16={"enabled": True}))
    with raises(ValueError, "'gradient_clipping'", "cannot be set here"):
        ZeroEngine(torch.nn.Linear(8, 8), ds(1, gradient_clipping=1.0))


def test_in_a_loop_of_ones_own(ranks: Launcher) -> None:
    ranks(1)(in_a_loop_of_ones_own)
