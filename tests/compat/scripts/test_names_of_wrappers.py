"""Names that public scripts read on `engine.optimizer` and on engines, with the meaning they have under DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher
from zero_strategy.pipeline.module import PipelineModule

FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}


def start(stage: int, fp16: bool, **more: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Linear(8, 4)
    return deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "fp16" if fp16 else "bf16": FP16 if fp16 else {"enabled": True},
            **more,
        },
    )[0]


def loss_of(engine: Any, factor: float) -> Tensor:
    x = torch.ones(4, 8, dtype=next(engine.module.parameters()).dtype)
    loss: Tensor = engine(x).float().square().mean() * factor
    return loss


def weights_of(engine: Any) -> list[Tensor]:
    return [value.clone() for value in engine.state_dict().values()]


def two_models(stage: int) -> list[tuple[Any, ...]]:
    """An actor and a critic of which both leave a step out where one overflows, on rank 1 alone."""
    actor, critic = start(stage, True), start(stage, True)
    seen = []
    for step in range(4):
        factor = float("inf") if step == 1 and actor.global_rank == 1 else 1.0
        before = weights_of(critic)
        actor.backward(loss_of(actor, factor))
        critic.backward(loss_of(critic, 1.0))
        overflows = [engine.optimizer.check_overflow(external=True) for engine in (actor, critic)]
        assert [engine.optimizer.overflow for engine in (actor, critic)] == overflows
        if overflows[0] and not overflows[1]:
            critic.optimizer.skip_step = True
        actor.step()
        critic.step()
        moved = not all(map(torch.equal, before, weights_of(critic)))
        flags = (actor.optimizer.overflow, critic.optimizer.overflow, critic.optimizer.skip_step)
        scales = (actor.optimizer.cur_scale, critic.optimizer.loss_scale)
        seen.append((overflows, flags, scales, moved, critic.was_step_applied(), critic.skipped_steps))
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_models_leave_a_step_out_together(ranks: Launcher, stage: int) -> None:
    nothing = (False, False, False)
    expected = [
        ([False, False], nothing, (256.0, 256.0), True, True, 0),
        ([True, False], (True, False, False), (128.0, 256.0), False, False, 1),
        ([False, False], nothing, (128.0, 256.0), True, True, 1),
        ([False, False], nothing, (128.0, 256.0), True, True, 1),
    ]
    assert ranks(2)(two_models, stage) == [expected] * 2


def without_a_scale() -> tuple[bool, float, list[str]]:
    engine = start(2, False)
    engine.backward(loss_of(engine, float("nan") if engine.global_rank else 1.0))
    engine.step()
    found = engine.optimizer.overflow, engine.optimizer.cur_scale
    optimizer = engine.optimizer
    check = optimizer.check_overflow
    engine.destroy()
    with pytest.raises(RuntimeError, match="after the engine was closed"):
        check()
    return *found, sorted({"overflow", "cur_scale", "check_overflow", "skip_step"} & vars(optimizer).keys())


def test_bf16_tells_of_steps_left_out_and_names_go_with_the_engine(ranks: Launcher) -> None:
    assert ranks(2)(without_a_scale) == [(True, 1.0, [])] * 2


class Watched(torch.optim.SGD):
    """An optimizer that has one of the names itself."""

    overflow = "mine"


def test_names_of_a_class_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = Watched(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 1})[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.optimizer is optimizer and optimizer.overflow == "mine" and optimizer.__dict__["cur_scale"] == 1.0
    engine.destroy()
    torch.distributed.destroy_process_group()


def test_a_timer_counts_epochs_and_steps() -> None:
    engine = deepspeed.initialize(
        model=nn.Linear(2, 2),
        config={
            "train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )[0]
    assert engine.tput_timer.avg_samples_per_sec() == float("-inf")
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    timer = engine.tput_timer
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (0, 6, 3)
    assert timer.avg_samples_per_sec() == pytest.approx(2 / timer.total_elapsed_time)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 0, 3)
    engine.destroy()
    torch.distributed.destroy_process_group()


def generating() -> tuple[list[tuple[int, ...]], int, bool]:
    """Evaluation of one micro-batch at a time, of other lengths, as text generation over a pipeline does it."""
    module = PipelineModule(
        [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)], num_stages=2, loss_fn=lambda x, y: (x - y).square().mean()
    )
    engine = deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )[0]
    engine.set_has_attention_mask(True)
    shapes = []
    for length in (4, 7):
        before = engine.micro_batches
        engine.micro_batches = 1
        engine.first_output_send = True
        engine.pipe_recv_buf = None
        batch = (torch.ones(length, 8), torch.zeros(length, 4))
        _, logits = engine.eval_batch(iter([batch]), return_logits=True)
        engine.micro_batches = before
        shapes.append(() if logits is None else tuple(logits.shape))
    engine._compute_loss = False
    engine.train_batch(iter([(torch.ones(4, 8), torch.zeros(4, 4))] * 2))
    with pytest.raises(ValueError, match="micro_batches must be"):
        engine.micro_batches = 0
    with pytest.raises(TypeError, match="set_has_attention_mask"):
        engine.set_has_attention_mask(None)
    return shapes, engine.micro_steps, engine.was_step_applied()


def test_a_pipelines_names(ranks: Launcher) -> None:
    found = ranks(2)(generating)
    assert found == [([(), ()], 2, True), ([(4, 4), (7, 4)], 2, True)]
