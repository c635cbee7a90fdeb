"""The same script under Accelerate's class (DistributedDataParallel) and under ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integrations.accelerate.training import Job, Net, Run, difference, fresh_state, loader, make, train
from tests.launcher import Launcher
from zero_strategy.integrations.accelerate import ZeroAccelerator


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2])  # of 6 batches a rank and epoch; 4 would leave a short tail
def test_the_same_training_as_plain_accelerate(ranks: Launcher, stage: int, steps: int) -> None:
    plain, ours = ranks(2)(train, None, steps=steps)[0], ranks(2)(train, stage, steps=steps)[0]
    assert difference(plain, ours) < 2e-6
    assert len(ours.norms) == 12 // steps and ours.norms[0] > 0.3, "clipping was at work"


def test_a_short_tail_of_accumulation(ranks: Launcher) -> None:
    plain, ours = ranks(2)(train, None, steps=4)[0], ranks(2)(train, 2, steps=4)[0]
    assert difference(plain, ours) < 2e-6 and len(ours.norms) == 4


@pytest.mark.parametrize("order", ["optimizer first", "apart"])
def test_prepare_in_any_order(ranks: Launcher, order: str) -> None:
    assert difference(ranks(2)(train, 3)[0], ranks(2)(train, 3, order)[0]) == 0


def test_bf16_is_autocast_as_in_accelerate(ranks: Launcher) -> None:
    plain = ranks(2)(train, None, mixed_precision="bf16")[0]
    ours = ranks(2)(train, 2, mixed_precision="bf16")[0]
    assert difference(plain, ours) < 2e-2  # bf16 rounds sums of another order differently
    assert ours.state["first.weight"].dtype == torch.float32


def test_accelerate_one_process() -> None:
    code = train_alone(None), train_alone(3)
    assert difference(*code) < 2e-6


def train_alone(stage: int | None) -> Run:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    job, run = Job.of(make(stage)), Run()
    job.epoch(run)
    job.finish(run)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return run


def by_json(**keys: Any) -> str:
    with fresh_state():
        config = {"zero_optimization": {"stage": 2}, **keys}
        try:
            Job.of(ZeroAccelerator(zero_config=config, gradient_accumulation_steps=2))
        except ValueError as error:
            return str(error)
        return "prepared"


@pytest.mark.filterwarnings("ignore:keys without effect")
def test_a_deepspeed_json_is_held_against_the_script(ranks: Launcher) -> None:
    agreeing = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    assert ranks(2)(by_json, **agreeing) == ["prepared"] * 2
    assert "gradient_accumulation_steps is 4" in ranks(2)(by_json, gradient_accumulation_steps=4)[0]
    assert "train_batch_size is 32" in ranks(2)(by_json, train_batch_size=32)[0]
    assert "gradient_clipping" in ranks(2)(by_json, gradient_clipping=1.0)[0]
    assert "optimizer.params.lr is 0.5" in ranks(2)(by_json, optimizer={"type": "AdamW", "params": {"lr": 0.5}})[0]


# ---- two models ----


def adversaries(stage: int | None) -> dict[str, Tensor]:
    with fresh_state():
        accelerator = make(stage)
        torch.manual_seed(7)
        one, two = Net(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.AdamW(two.parameters(), lr=0.01)
        one, two, first, second = accelerator.prepare(one, two, first, second)
        one.eval()
        for x, _ in accelerator.prepare(loader(16)):
            accelerator.backward(two(one(x).detach()).square().mean() - two(x).mean())
            accelerator.clip_grad_value_(two.parameters(), 0.05)
            second.step()
            second.zero_grad()
            accelerator.backward(two(one(x)).mean())
            first.step()
            first.zero_grad()
            second.zero_grad()
        states = [accelerator.get_state_dict(model) for model in (one, two)]
        return {f"{n}.{name}": value.clone() for n, state in enumerate(states) for name, value in state.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_two_models_and_two_optimizers(ranks: Launcher, stage: int) -> None:
    plain, ours = ranks(2)(adversaries, None)[0], ranks(2)(adversaries, stage)[0]
    assert plain.keys() == ours.keys()
    assert max(float((plain[name] - ours[name]).abs().max()) for name in plain) < 2e-6


# ---- clipping some of the parameters ----


def clipped_in_part(stage: int | None, norm_type: float | str) -> list[float]:
    with fresh_state():
        job = Job.of(make(stage))
        x = torch.full((4, 6), 1.0 + dist.get_rank())
        job.model.eval()
        job.accelerator.backward(job.model(x).square().mean())
        norms = []
        for block in job.model.module.blocks if stage is None else job.model.blocks:
            norms.append(float(job.accelerator.clip_grad_norm_(block.parameters(), 0.01, norm_type)))
        norms.append(float(job.accelerator.clip_grad_norm_(job.model.parameters(), float("inf"), norm_type)))
        return norms


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), "inf"])
def test_a_subset_is_clipped_by_its_own_norm(ranks: Launcher, norm_type: float | str) -> None:
    plain = ranks(2)(clipped_in_part, None, norm_type)[0]
    for stage in (1, 3):
        assert ranks(2)(clipped_in_part, stage, norm_type)[0] == pytest.approx(plain, rel=1e-5)


# ---- evaluation first; training twice; mistakes ----


def evaluated_first(stage: int) -> Run:
    with fresh_state():
        torch.manual_seed(100 + dist.get_rank())
        accelerator = make(stage)
        model = Net()
        accelerator.prepare_model(model, evaluation_mode=True)
        with torch.no_grad():
            model(torch.ones(2, 6))
        Net()  # leaves the random state where the other training begins
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        job = Job(accelerator, *accelerator.prepare(model, optimizer, loader(), scheduler))
        run = Run()
        job.epoch(run)
        job.epoch(run)
        return job.finish(run)


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluating_before_training_changes_nothing(ranks: Launcher, stage: int) -> None:
    assert difference(ranks(2)(train, stage)[0], ranks(2)(evaluated_first, stage)[0]) == 0


def trained_twice(stage: int | None) -> Run:
    with fresh_state():
        accelerator, model, run = make(stage), Net(), Run()
        model.eval()
        for _ in range(2):
            accelerator.free_memory()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
            prepared = accelerator.prepare(model, optimizer, loader(), scheduler)
            Job(accelerator, *prepared).epoch(run)
        run.state = accelerator.get_state_dict(model)
        return run


def test_a_second_training_with_a_new_optimizer(ranks: Launcher) -> None:
    plain, ours = ranks(2)(trained_twice, None)[0], ranks(2)(trained_twice, 2)[0]
    assert difference(plain, ours) < 2e-6


def messages() -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    with fresh_state():
        job = Job.of(make(2))
        stranger = job.accelerator.prepare(torch.optim.SGD(Net().parameters(), lr=0.1))
        note("foreign optimizer", stranger.step)
        note("foreign parameters", lambda: job.accelerator.clip_grad_norm_(Net().parameters(), 1.0))
        note("unknown model", lambda: job.accelerator.engine(Net()))
        note("no place", job.accelerator.save_state)
        note("nothing there", lambda: job.accelerator.load_state("/nonexistent"))
    return found


def test_accelerate_mistakes_are_named(ranks: Launcher) -> None:
    for found in ranks(2)(messages):
        assert "prepare the model too" in found["foreign optimizer"]
        assert "not all of prepared models" in found["foreign parameters"]
        assert "Net was not prepared" in found["unknown model"]
        assert "output_dir" in found["no place"]
        assert "/nonexistent" in found["nothing there"]
