"""The loss scale after each step of an fp16 script, against DeepSpeed's rule for the keys of its JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher

PATTERN = [1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1]
"""Steps whose gradients overflow, on rank 1 alone."""
CASES: list[dict[str, Any]] = [
    {"hysteresis": 3, "loss_scale_window": 4},
    {"hysteresis": 1, "loss_scale_window": 1},
    {"hysteresis": 1, "loss_scale_window": 3},
    {"loss_scale_window": 3, "min_loss_scale": 64},
    {"hysteresis": 2, "loss_scale_window": 3, "consecutive_hysteresis": True},
]
Seen = list[tuple[float, int]]


def by_the_rule(fp16: dict[str, Any]) -> tuple[Seen, bool]:
    """Scale and skipped steps after each step, and whether the run ends at the least scale.

    In step i without an overflow the scale doubles if the steps since the last overflow, i itself left out, are a
    multiple of the window.
    """
    window, hysteresis = fp16["loss_scale_window"], fp16.get("hysteresis", 2)
    consecutive, minimum = fp16.get("consecutive_hysteresis", False), fp16.get("min_loss_scale", 1)
    scale, last, left, skipped, seen = 256.0, -1, hysteresis, 0, []
    for step, overflow in enumerate(PATTERN):
        if overflow:
            if left > 1:
                left -= 1
            elif scale <= minimum:
                return seen, True
            else:
                scale = max(scale / 2, minimum)
            last, skipped = step, skipped + 1
        else:
            before = step - last - 1
            grows = before > 0 and before % window == 0
            left = hysteresis if grows or consecutive else left
            scale = scale * 2 if grows else scale
        seen.append((scale, skipped))
    return seen, False


def sequences(stage: int) -> list[tuple[Seen, bool]]:
    found: list[tuple[Seen, bool]] = []
    for fp16 in CASES:
        engine = deepspeed.initialize(
            model=nn.Linear(8, 4),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "fp16": {"enabled": True, "initial_scale_power": 8, **fp16},
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            },
        )[0]
        seen: Seen = []
        ended = False
        for step, overflow in enumerate(PATTERN):
            generator = torch.Generator().manual_seed(step)
            loss = engine(torch.randn(4, 8, generator=generator).half()).float().square().mean()
            engine.backward(loss * (float("inf") if overflow and engine.global_rank == 1 else 1.0))
            try:
                engine.step()
            except FloatingPointError:
                ended = True
                break
            seen.append((engine.loss_scale, engine.skipped_steps))
        found.append((seen, ended))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_scales_are_those_of_deepspeeds_rule(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(sequences, stage):
        for fp16, sequence in zip(CASES, found, strict=True):
            assert sequence == by_the_rule(fp16), fp16
