"""Two Accelerators, a Fabric, a Lightning Trainer and a script's engine over one module, in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy
from tests.integrations.accelerate.training import Job, Run, difference, fresh_state, loader, make
from tests.integrations.lightning.trainers import Module, trainer, zero
from tests.integrations.lightning.trainers import loader as lightning_loader
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


def message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def once_more(job: Job, accelerator: Any) -> Job:
    """Another Accelerator prepares the model of a job, with optimizer and data of its own."""
    model = accelerator.unwrap_model(job.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    return Job(accelerator, *accelerator.prepare(model, optimizer, loader(), scheduler))


def two_accelerators(stage: int | None, second: int | None) -> tuple[Run, dict[str, str]]:
    with fresh_state():
        torch.manual_seed(100 + dist.get_rank())
        first, run, found = Job.of(make(stage, gradient_accumulation_steps=2)), Run(), {}
        first.epoch(run)
        engine = None if stage is None else zero_strategy.engine_of(first.accelerator)
        later = once_more(first, make(second, gradient_accumulation_steps=2))
        later.epoch(run)
        if engine is not None:
            assert engine.ended and zero_strategy.engine_of(later.accelerator) is zero_strategy.engine_of(later.model)
            x, y = next(iter(loader()))
            loss = nn.functional.mse_loss(first.model(x), y)
            later.accelerator.backward(loss)
            found["step"] = message(first.optimizer.step)
            found["clip"] = message(lambda: first.accelerator.clip_grad_norm_(first.model.parameters(), 1.0))
            found["engine"] = message(lambda: first.accelerator.engine(first.model))
            found["state"] = message(first.optimizer.state_dict)
            found["save"] = message(lambda: first.accelerator.save_state("nowhere"))
            later.optimizer.zero_grad()
        return later.finish(run), found


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 3), (3, 3)])
def test_a_second_accelerator_takes_a_model_over(ranks: Launcher, first: int, second: int) -> None:
    plain, _ = ranks(2)(two_accelerators, None, None)[0]
    for ours, found in ranks(2)(two_accelerators, first, second):
        assert difference(plain, ours) < 2e-6 and len(ours.losses) == 12
        for name, text in found.items():
            assert "has ended: another ZeroAccelerator has prepared its module" in text, (name, text)


def every_face(stage: int) -> list[str]:
    """One module under an Accelerator, a Trainer, a Fabric, an engine of the script, and an Accelerator again."""
    import lightning.fabric as fabric

    found: list[str] = []
    module = Module()

    def values() -> dict[str, Tensor]:
        return zero_strategy.engine_of(module).full_state_dict()

    def same(before: dict[str, Tensor]) -> None:
        now = values()
        found.extend(name for name in before if not torch.equal(before[name], now[name]))

    with fresh_state():
        first = make(stage)
        first.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        before = values()
        run = trainer(zero(stage), max_epochs=1, limit_train_batches=0)
        run.fit(module, lightning_loader())
        same(before)
        assert zero_strategy.engine_of(run) is zero_strategy.engine_of(module)
        trainer(zero(stage), max_epochs=1).fit(module, lightning_loader())
        before = values()
        kept = zero_strategy.engine_of(module)
        assert kept is zero_strategy.engine_of(run)  # the same settings: the same engine
        trainer(zero(3 if stage < 3 else 2), max_epochs=1, limit_train_batches=0).fit(module, lightning_loader())
        same(before)
        assert kept.ended and zero_strategy.engine_of(module).stage != stage
        other = fabric.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=f"zero{stage}")
        other.launch()
        wrapped = other.setup_module(module)
        same(before)
        assert zero_strategy.engine_of(other) is zero_strategy.engine_of(wrapped) is zero_strategy.engine_of(module)
        found.append(message(lambda: ZeroEngine(module, load_config(stage=stage))))
        zero_strategy.engine_of(module).close(gather=True)
        found.append(message(lambda: zero_strategy.engine_of(other)))
        mine = ZeroEngine(module, load_config(stage=stage))
        same(before)
        found.append(message(lambda: first.prepare(module)))
        mine.close(gather=True)
        second = make(stage)
        second.prepare(module)
        same(before)
        found.append(message(lambda: second.prepare(nn.Sequential(module))))
        return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_goes_from_face_to_face(ranks: Launcher, stage: int) -> None:
    for found in ranks(2, timeout=120)(every_face, stage):
        assert len(found) == 4, found
        assert "is sharded by another engine already" in found[0]
        assert "Fabric has no engine" in found[1]
        assert "by an engine of the script itself" in found[2] and "close(gather=True)" in found[2]
        assert "shares parameters with the Module that was prepared already" in found[3]


class Seen(nn.Module):
    """Remembers the dtype that its layer computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), torch.float64

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.seen = y.dtype
        return y


def precisions(order: list[str], end: str) -> tuple[list[torch.dtype], list[str]]:
    """Dtypes in which accelerators of these precisions compute one after the other, and what the last one leaves."""
    model, found = Seen(), []
    before = set(vars(model))
    for precision in order:
        with fresh_state():
            make(2, mixed_precision=precision).prepare(model)
            model(torch.ones(2, 4))
            found.append(model.seen)
            if end == "close":
                zero_strategy.engine_of(model).close(gather=True)
    if end != "close":
        zero_strategy.engine_of(model).close(gather=True)
    return found, sorted(set(vars(model)) - before)


@pytest.mark.parametrize("end", ["taken over", "close"])
def test_a_model_computes_in_the_precision_of_the_accelerator_that_has_it(ranks: Launcher, end: str) -> None:
    found, left = ranks(1)(precisions, ["no", "bf16", "no", "bf16"], end)[0]
    assert found == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    assert not left, "marks of `prepare` on a plain module"


def own_forward() -> bool:
    """A forward that a script has set on its model is there again in the end."""
    model = Seen()
    own = model.forward
    model.forward = own  # type: ignore[method-assign]
    with fresh_state():
        make(2, mixed_precision="bf16").prepare(model)
        assert vars(model)["forward"] is not own
        zero_strategy.engine_of(model).close(gather=True)
    return vars(model)["forward"] is own


def test_a_models_own_forward_comes_back(ranks: Launcher) -> None:
    assert ranks(1)(own_forward) == [True]


def refused_takeover() -> tuple[str, bool]:
    with fresh_state():
        prepared, scripts = nn.Linear(4, 4), nn.Linear(4, 4)
        make(2).prepare(prepared)
        engine = zero_strategy.engine_of(prepared)
        mine = ZeroEngine(scripts, load_config(stage=2))
        text = message(lambda: make(2).prepare(nn.Sequential(prepared, scripts)))
        ended = engine.ended
        mine.close(gather=True)
        return text, ended


def test_a_takeover_that_is_refused_ends_no_engine(ranks: Launcher) -> None:
    text, ended = ranks(1)(refused_takeover)[0]
    assert "by an engine of the script itself" in text and not ended
