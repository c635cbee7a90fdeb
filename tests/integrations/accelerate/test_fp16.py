"""`mixed_precision="fp16"`: a loss scale and skipped steps that all ranks agree on, against torch's own GradScaler."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn

from tests.integrations.accelerate.training import Job, Net, Run, difference, fresh_state, loader, make
from tests.launcher import Launcher
from zero_strategy.integrations.accelerate import ZeroAccelerator

STEPS = 10
POISONED = 4
"""The step in which rank 1's gradients, and nobody else's, overflow."""


@dataclass
class Scaled(Run):
    """Results of a training in fp16."""

    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


def loss_of(model: Any, x: Tensor, y: Tensor, step: int, rank: int) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    return loss * float("inf") if (step, rank) == (POISONED, 1) else loss


def ours(stage: int, zero: dict[str, Any] | None = None, **handler: Any) -> Scaled:
    """`handler` for GradScalerKwargs; one model, clipping, a prepared schedule."""
    with fresh_state():
        kept = [GradScalerKwargs(**handler)] if handler else []
        job, run = Job.of(make(stage, zero, mixed_precision="fp16", kwargs_handlers=kept)), Scaled()
        job.loader = job.accelerator.prepare(loader(80, shuffle=False))
        job.model.eval()
        steps(job, run, list(job.loader))
        state = job.accelerator.get_state_dict(job.model)
        run.state = {name: value.clone() for name, value in state.items()}
        return run


def steps(job: Job, run: Scaled, batches: list[Any], first: int = 0) -> None:
    accelerator, rank = job.accelerator, dist.get_rank()
    for step, (x, y) in enumerate(batches, first):
        loss = loss_of(job.model, x, y, step, rank)
        accelerator.backward(loss)
        run.norms.append(float(accelerator.clip_grad_norm_(job.model.parameters(), 0.3)))
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
        run.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        run.rates.append(float(job.scheduler.get_last_lr()[0]))
        run.scales.append(accelerator.scaler.get_scale())
        run.skipped.append(accelerator.optimizer_step_was_skipped)


def by_hand(init_scale: float, growth_interval: int) -> Scaled:
    """The same in one process with torch's own scaler: the gradients of two ranks' batches are averaged."""
    model, run = Net().eval(), Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    batches = list(loader(80, shuffle=False))
    for step in range(STEPS):
        total, sums = 0.0, [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):
            x, y = batches[2 * step + rank]
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
            loss = loss_of(lambda _, output=output: output.float(), x, y, step, rank)
            scaler.scale(loss).backward()
            total += float(loss.detach()) / 2
            for running, parameter in zip(sums, model.parameters(), strict=True):
                running += parameter.grad
                parameter.grad = None
        for running, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = running / 2
        scaler.unscale_(optimizer)
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        run.skipped.append(scaler.get_scale() < before)
        for _ in range(0 if run.skipped[-1] else 2):
            scheduler.step()
        optimizer.zero_grad()
        run.losses.append(total)
        run.rates.append(scheduler.get_last_lr()[0])
        run.scales.append(scaler.get_scale())
    run.state = {name: value.clone() for name, value in model.state_dict().items()}
    return run


def finite(run: Scaled) -> Scaled:
    """Without the poisoned step's loss and norm, which are no numbers."""
    assert not torch.isfinite(torch.tensor([run.losses.pop(POISONED), run.norms.pop(POISONED)])).any()
    return run


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_skip_what_one_cannot_take(ranks: Launcher, stage: int) -> None:
    expected = by_hand(1024.0, 3)
    found = ranks(2)(ours, stage, init_scale=1024.0, growth_interval=3)
    for run in found:
        assert run.scales == expected.scales == [1024.0] * 2 + [2048.0] * 2 + [1024.0] * 3 + [2048.0] * 3
        assert run.skipped == expected.skipped == [step == POISONED for step in range(STEPS)]
        assert run.rates == expected.rates
    assert difference(finite(expected), finite(found[0])) < 2e-6
    assert expected.norms[0] > 0.3, "clipping was at work"


def test_small_gradients_survive(ranks: Launcher) -> None:
    """Purpose of the scale: without one they underflow in fp16."""
    with_scale, without = ranks(2)(tiny, True)[0], ranks(2)(tiny, False)[0]
    assert with_scale > 0 and without == 0


def tiny(enabled: bool) -> float:
    with fresh_state():
        accelerator = make(2, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=enabled)])
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert accelerator.scaler.is_enabled() is enabled
        assert accelerator.scaler.get_scale() == (65536.0 if enabled else 1.0)
        accelerator.backward(model(torch.ones(2, 4)).sum() * 1e-9)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        return norm


# ---- where its settings come from ----


def scales(zero: dict[str, Any], handler: dict[str, Any]) -> tuple[str, list[float]]:
    """The error, or the scales after each of ten steps."""
    try:
        return "", ours(1, zero, **handler).scales
    except ValueError as error:
        return str(error), []


def json_scales(fp16: dict[str, Any], handler: dict[str, Any]) -> tuple[str, list[float]]:
    with fresh_state():
        try:
            kept = [GradScalerKwargs(**handler)] if handler else []
            config = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, **fp16}, "gradient_clipping": "auto"}
            job = Job.of(ZeroAccelerator(zero_config=config, mixed_precision="fp16", kwargs_handlers=kept))
            job.model.eval()
            run = Scaled()
            steps(job, run, list(job.accelerator.prepare(loader(80, shuffle=False))))
        except (ValueError, FloatingPointError) as error:
            return str(error), []
        return "", run.scales


def test_the_config_sets_the_scale(ranks: Launcher) -> None:
    zero = {"loss_scale": {"initial": 64.0, "growth_interval": 100, "hysteresis": 2}}
    assert ranks(2)(scales, zero=zero, handler={})[1] == ("", [64.0] * 10), "the only overflow is tolerated"
    assert ranks(2)(scales, zero=zero, handler={"init_scale": 64.0, "backoff_factor": 0.25})[0] == ("", [64.0] * 10)
    error, _ = ranks(2)(scales, zero=zero, handler={"init_scale": 32.0})[0]
    assert "GradScalerKwargs(init_scale=32.0) and loss_scale.initial = 64.0 [" in error


@pytest.mark.filterwarnings("ignore:keys without effect")
def test_a_deepspeed_json_sets_the_scale(ranks: Launcher) -> None:
    dynamic = {"initial_scale_power": 5, "loss_scale_window": 3, "hysteresis": 1}
    expected = [32.0] * 3 + [64.0] + [32.0] * 4 + [64.0] * 2  # a step more than the window, as in DeepSpeed
    assert ranks(2)(json_scales, dynamic, {})[0] == ("", expected)
    error, _ = ranks(2)(json_scales, dynamic, {"growth_interval": 7})[0]
    assert "GradScalerKwargs(growth_interval=7)" in error and "fp16.loss_scale_window" in error
    for error, _ in ranks(2)(json_scales, {"loss_scale": 128}, {}):
        assert "smallest loss scale 128" in error, "a static scale does not fall: the overflow ends the run"


# ---- several optimizers; order of the calls ----


def one_backward(stage: int) -> tuple[list[float], dict[str, Tensor]]:
    """Two optimizers that share the backward; in the second step it overflows."""
    with fresh_state():
        kept = [GradScalerKwargs(init_scale=256.0, growth_interval=2)]
        accelerator = make(stage, mixed_precision="fp16", kwargs_handlers=kept)
        net = Net().eval()
        groups = [list(net.first.parameters()) + list(net.last.parameters()), list(net.blocks.parameters())]
        model, *optimizers = accelerator.prepare(net, *(torch.optim.SGD(group, lr=0.1) for group in groups))
        found = []
        for step in range(3):
            loss = model(torch.full((2, 6), 1.0 + dist.get_rank())).square().mean()
            accelerator.backward(loss * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append(accelerator.scaler.get_scale())
        return found, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_scale_moves_once_for_a_backward_of_two_optimizers(ranks: Launcher, stage: int) -> None:
    net = Net().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for value in (1.0, 2.0):
            with torch.autocast("cpu", dtype=torch.float16):
                output = net(torch.full((2, 6), value))
            (output.float().square().mean() * 128.0).backward()
        for parameter in net.parameters():
            parameter.grad /= 256.0
        optimizer.step()
        optimizer.zero_grad()
    found, state = ranks(2)(one_backward, stage)[0]
    assert found == [256.0, 128.0, 128.0]
    assert max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items()) < 2e-6


def orders(stage: int) -> dict[str, Any]:
    with fresh_state():
        job = Job.of(make(stage, mixed_precision="fp16"))
        accelerator, model, optimizer = job.accelerator, job.model.eval(), job.optimizer
        found: dict[str, Any] = {}

        def backward() -> None:
            accelerator.backward(model(torch.full((2, 6), 1.0 + dist.get_rank())).square().mean())

        def note(name: str, call: Any) -> None:
            try:
                call()
            except RuntimeError as error:
                found[name] = str(error)

        note("unscaled before a backward", lambda: accelerator.unscale_gradients(optimizer))
        backward()
        accelerator.unscale_gradients()
        accelerator.unscale_gradients(optimizer)  # Accelerate's raises
        found["norms"] = [float(accelerator.clip_grad_norm_(model.parameters(), 100.0)) for _ in range(2)]
        note("unscaled twice", lambda: accelerator.scaler.unscale_(optimizer))
        backward()
        note("clipped while accumulating", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.zero_grad()
        backward()
        found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 100.0)))
        note("closure", lambda: optimizer.step(lambda: 0.0))
        optimizer.step()
        note("update alone", accelerator.scaler.update)
        return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_are_unscaled_once(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(orders, stage):
        assert found["norms"][0] == found["norms"][1] == found["norms"][2] < 10
        assert "accelerator.backward(loss)" in found["unscaled before a backward"]
        assert "unscaled already" in found["unscaled twice"]
        assert "sync_gradients" in found["clipped while accumulating"]
        assert "closure" in found["closure"] and "scaler.step" in found["update alone"]


# ---- checkpoints ----


def interrupted(folder: str, stages: tuple[int, int]) -> Scaled:
    settings = {"init_scale": 1024.0, "growth_interval": 3}
    run = Scaled()
    for part, stage in enumerate(stages):
        with fresh_state():
            job = Job.of(make(stage, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**settings)]))
            batches = list(job.accelerator.prepare(loader(80, shuffle=False)))
            job.model.eval()
            if part:
                job.accelerator.load_state(folder)
                steps(job, run, batches[6:], 6)
                state = job.accelerator.get_state_dict(job.model)
                run.state = {name: value.clone() for name, value in state.items()}
            else:
                steps(job, run, batches[:6])
                job.accelerator.save_state(folder)
                job.accelerator.wait_for_saves()
    return run


def test_the_scale_goes_on_after_a_load(ranks: Launcher, tmp_path: Path) -> None:
    whole = ranks(2)(ours, 2, init_scale=1024.0, growth_interval=3)[0]
    resumed = ranks(2)(interrupted, str(tmp_path / "c"), (2, 3))[0]
    assert resumed.scales == whole.scales and resumed.rates == whole.rates
    assert difference(finite(whole), finite(resumed)) < 2e-6


def from_plain(folder: str) -> dict[str, Any]:
    """A scaler.pt that Accelerate's own save_state would have written on a GPU."""
    with fresh_state():
        job = Job.of(make(None))
        job.epoch(Run())
        job.accelerator.save_state(folder)
        if dist.get_rank() == 0:
            scaler = torch.amp.GradScaler("cpu")
            scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 9})
            torch.save(scaler.state_dict(), Path(folder) / "scaler.pt")
        job.accelerator.wait_for_everyone()
    with fresh_state():
        job = Job.of(make(3, mixed_precision="fp16"))
        job.accelerator.load_state(folder)
        return dict(job.accelerator.scaler.state_dict())


def test_a_plain_scaler_is_gone_on_from(ranks: Launcher, tmp_path: Path) -> None:
    for state in ranks(2)(from_plain, str(tmp_path / "c")):
        assert (state["scale"], state["_growth_tracker"]) == (512.0, 9)
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(state)  # and the other way round
    assert plain.get_scale() == 512.0


def freed(steps: bool) -> list[bool]:
    """Tells of a model and its optimizer whether they are alive after `free_memory`."""
    with fresh_state():
        job = Job.of(make(2, mixed_precision="fp16"))
        job.accelerator.backward(job.model(torch.ones(2, 6)).sum())
        job.accelerator.clip_grad_norm_(job.model.parameters(), 1.0)  # unscales
        if steps:
            job.optimizer.step()
        held = [ref(job.model), ref(job.optimizer.optimizer)]
        job.model, job.optimizer, job.scheduler = job.accelerator.free_memory(job.model, job.optimizer, job.scheduler)
        gc.collect()
        return [one() is not None for one in held]


@pytest.mark.parametrize("steps", [True, False])
def test_the_scaler_holds_no_optimizer_after_free_memory(ranks: Launcher, steps: bool) -> None:
    assert ranks(1)(freed, steps) == [[False, False]]
