"""Norms of every parameter reach the framework's logger, as one process has them: Trainer, Accelerate, pipelines."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F

from tests.diagnostics.test_integrations import Kept
from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.lightning.trainers import PLAIN, Module, loader, trainer, zero
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.diagnostics.norms import GRADIENT, UPDATE, NormLog, NormSettings
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.lightning import ParameterNorms
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule

CLIP, STEPS, EVERY = 0.05, 4, 2
Logged = list[tuple[int | None, dict[str, float]]]


class Keeps(DummyLogger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Logged = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        if any(name.startswith((GRADIENT, UPDATE)) for name in metrics):
            self.seen.append((step, metrics))


def by_the_trainer(stage: int) -> Logged:
    logger, callback = Keeps(), ParameterNorms(every_n_steps=EVERY, updates=True)
    fit = trainer(zero(stage), logger=logger, callbacks=[callback], gradient_clip_val=CLIP, accumulate_grad_batches=2)
    fit.fit(Module(), loader(batch=2))
    return logger.seen


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return x, x[:, :2].cos()


def by_accelerate(clip: float | None, precision: str) -> Logged:
    with fresh_state():
        kept = Kept()
        accelerator = make(3, {"loss_scale": {"initial": 1024.0}}, log_with=kept, mixed_precision=precision)
        accelerator.init_trackers("test")
        accelerator.log_parameter_norms(every_n_steps=EVERY, updates=True)  # type: ignore[attr-defined]
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.02))
        for step in range(STEPS):
            x, y = batch_of(step, dist.get_rank())
            accelerator.backward(F.mse_loss(model(x).float(), y))
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return kept.seen


def by_a_pipeline() -> tuple[list[dict[str, float]], float]:
    torch.manual_seed(3)
    module = PipelineModule(list(Net()), num_stages=2, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = PipelineEngine(module, {"stage": 1, "pipeline": {"stages": 2}})
    engine.forward_backward([batch_of(0, rank) for rank in range(2)])
    norm = engine.grad_norm().value
    engine.reset()
    for parameter in module.parameters():
        parameter.grad = None
    engine.attach(optimizer)
    log, found = NormLog(engine, NormSettings(EVERY, updates=True)), []
    for step in range(STEPS):
        engine.forward_backward([batch_of(step, rank) for rank in range(2)])
        log.before_step()
        optimizer.step()
        optimizer.zero_grad()
        found.append(log.after_step())
    log.close()
    return found, norm


def unattached(stage: int) -> tuple[float, float, float]:
    """The norm of a module without an optimizer, and what clipping makes of it."""
    net = Net()
    engine = ZeroEngine(net, load_config(stage=stage, units={"min_numel": 0}))
    x, y = batch_of(0, dist.get_rank())
    F.mse_loss(net(x), y).backward()
    return engine.grad_norm().value, float(engine.clip_grad_norm_(CLIP)), engine.grad_norm().value


def by_all() -> tuple[Any, ...]:
    return (
        by_the_trainer(2),
        by_the_trainer(3),
        by_accelerate(CLIP, "no"),
        by_accelerate(None, "no"),
        by_accelerate(CLIP, "fp16"),
        by_a_pipeline(),
        [unattached(stage) for stage in (0, 2, 3)],
    )


def plain(
    model: nn.Module, optimizer: Any, batches: list[Any], loss: Any, clip: float | None, scheduler: Any = None
) -> list[dict[str, float]]:
    """One process, on the batches of both ranks at once; the norms of each step."""
    found = []
    for batch in batches:
        loss(batch).backward()
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]
        norms = {GRADIENT + name: float(parameter.grad.norm()) for name, parameter in named}  # type: ignore[union-attr]
        before = {name: parameter.detach().clone() for name, parameter in named}
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        norms |= {UPDATE + name: float((parameter.detach() - before[name]).norm()) for name, parameter in named}
        found.append(norms)
    return found


def check(logged: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-4) -> None:
    for found, wanted in zip(logged, expected[::EVERY], strict=True):
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=rel, abs=1e-7)


def test_norms_are_logged(ranks: Launcher) -> None:
    first, second = ranks(2, timeout=120)(by_all)
    module = Module()
    made = module.configure_optimizers()
    schedule = made["lr_scheduler"]["scheduler"]
    expected = plain(module, made["optimizer"], list(loader(batch=8, split=False)), module.loss, CLIP, schedule)
    for logged, others in zip(first[:2], second[:2], strict=True):
        assert [step for step, _ in logged] == [0, 2] and not others  # rank 0's logger
        check([norms for _, norms in logged], expected)
    both = [tuple(torch.cat(parts) for parts in zip(batch_of(step, 0), batch_of(step, 1))) for step in range(STEPS)]

    def alone(clip: float | None) -> list[dict[str, float]]:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        return plain(net, optimizer, both, lambda batch: F.mse_loss(net(batch[0]), batch[1]), clip)

    for logged, clip, rel in ((first[2], CLIP, 1e-4), (first[3], None, 1e-4), (first[4], CLIP, 0.05)):
        assert [step for step, _ in logged] == [1, 3]
        check([norms for _, norms in logged], alone(clip), rel)
    assert not second[2]
    assert first[5] == second[5]
    check([norms for norms in first[5][0] if norms], alone(None))
    norm = sum(value**2 for name, value in alone(None)[0].items() if name.startswith(GRADIENT)) ** 0.5
    assert first[5][1] == pytest.approx(norm, rel=1e-5)
    for found in first[6]:
        assert found == pytest.approx((norm, norm, CLIP), rel=1e-4)


def test_norm_log_what_is_refused() -> None:
    with pytest.raises(ValueError, match="every_n_steps is -1"):
        ParameterNorms(-1)
    with pytest.raises(ValueError, match="neither gradients nor updates"):
        ParameterNorms(gradients=False)
    fit = pl.Trainer(max_steps=1, devices=1, callbacks=[ParameterNorms()], enable_checkpointing=False, **PLAIN)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ParameterNorms reads sharded gradients, and the strategy is SingleDevice"):
        fit.fit(Module(), loader())
