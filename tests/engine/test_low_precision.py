"""In bf16 and fp16, on 2 and 4 ranks, the engine is no further from one fp32 process than plain DDP is.

Like is compared with like: Lightning's "-mixed" precisions are autocast over fp32 parameters on both sides; "-true" is
a low-precision model, which plain DDP trains without and the engine with fp32 master weights.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.launcher import Launcher
from tests.models import Kind, build, loss_fn, param_groups
from tests.reference import MODEL_SEED, OptimizerFactory, adamw, global_batch, micro_batch, train_plain, weights_of
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.full_state import safe_get_full_fp32_param
from zero_strategy.optim.loss_scale import LossScaler

STEPS = 6
DTYPES = {"bf16-mixed": None, "bf16-true": torch.bfloat16, "16-mixed": None, "16-true": torch.float16}
ORDER_OF_SUMMATION = 1.01
"""Autocast on both sides differs only in the order of a sum, which rounding turns into noise of either sign."""
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def adamw_for_half(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The default eps is 0 in fp16, and plain fp16 parameters become NaN."""
    return torch.optim.AdamW(groups, foreach=False, eps=1e-4)


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "bf16-mixed": adamw,
    "bf16-true": adamw,
    "16-mixed": adamw,
    "16-true": adamw_for_half,
}


def train(kind: Kind, precision: str, stage: int | None) -> dict[str, Tensor]:
    """Final weights of one run on every rank; stage None is plain DDP."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(kind, MODEL_SEED)
    dtype = DTYPES[precision]
    engine = None
    forward: nn.Module = model
    scaler = None
    if stage is None:
        model.to(dtype or torch.float32)
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu")
        forward = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}), compute_dtype=dtype)
        if precision == "16-mixed":
            engine.use_loss_scaler(LossScaler(engine.config.config.loss_scale))
    optimizer = OPTIMIZERS[precision](param_groups(model))
    if engine is not None:
        engine.attach(optimizer)
    for step in range(STEPS):
        batch = micro_batch(global_batch(kind, step, world, 1), rank, world, 0)
        with autocast_of(precision):
            loss = loss_fn(forward, batch)
        if engine is not None:
            engine.scale_loss(loss).backward()
            finite = engine.unscale_gradients(optimizer)
            optimizer.step()
            if engine.scaler is not None:
                engine.scaler.update(finite=finite)
        elif scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    if engine is None:
        return {name: weight.float() for name, weight in weights_of(model).items()}
    names = [name for name, _ in model.named_parameters()]
    if dtype is None:
        state = engine.full_state_dict()
        return {name: state[name] for name in names}
    return {name: safe_get_full_fp32_param(parameter).float() for name, parameter in model.named_parameters()}


def autocast_of(precision: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", MIXED[precision]) if precision in MIXED else contextlib.nullcontext()


def train_all(kind: Kind, precision: str) -> dict[str, dict[str, Tensor]]:
    stages: list[int | None] = [None, 0, 1, 2, 3]
    return {str(stage): train(kind, precision, stage) for stage in stages}


@cache
def one_process(kind: Kind, world: int, optimizer: OptimizerFactory) -> dict[str, Tensor]:
    return train_plain(kind, world, 1, STEPS, None, optimizer).weights


def distance(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Relative L2 distance over all weights together."""
    apart = sum(float((weights[name].double() - reference[name].double()).square().sum()) for name in reference)
    return (apart / sum(float(value.double().square().sum()) for value in reference.values())) ** 0.5


@pytest.mark.parametrize(
    ("precision", "world"), [*((precision, 2) for precision in DTYPES), ("bf16-mixed", 4), ("16-true", 4)]
)
def test_no_further_from_one_process_than_ddp(ranks: Launcher, precision: str, world: int) -> None:
    """Every stage, the transformer; on four ranks, whose sums are longer, a mixed precision and a true one."""
    kind: Kind = "transformer"
    runs = ranks(world, timeout=120)(train_all, kind, precision)[0]
    reference = one_process(kind, world, OPTIMIZERS[precision])
    ddp = distance(runs.pop("None"), reference)
    ours = {stage: distance(weights, reference) for stage, weights in runs.items()}
    print(f"{precision} on {world} ranks: DDP {ddp:.3g}, stages", {s: f"{d / ddp:.3f}" for s, d in ours.items()})
    bound = ORDER_OF_SUMMATION if precision in MIXED else 1.0
    assert all(found <= ddp * bound for found in ours.values()), (ours, ddp)
