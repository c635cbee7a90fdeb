"""Memory that is whole at any moment is a few buckets, never the model: parameters under `Init`, local gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import Block, loss_of, seeded
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.init import Init
from zero_strategy.fsdp.param_bucket import ParameterBucket

WIDTH, DEPTH = 16, 12


class Tower(nn.Module):
    """Equal blocks and a small root; `extra` of the last block is never used."""

    def __init__(self, unused: bool = False, reverse: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)
        self.reverse = reverse
        if unused:
            self.blocks[-1].register_parameter("extra", nn.Parameter(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in reversed(self.blocks) if self.reverse else self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def sharded(model: nn.Module, stage: int, **options: Any) -> ZeroEngine:
    return ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}, **options))


def bytes_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


# -------------------------------------------------------------------------------------------------- parameters


def whole_while_built(meta: bool) -> dict[str, Any]:
    """The most that is whole of parameters at the moments when a bucket has just been filled."""
    filled: list[ParameterBucket] = []
    peak, fill = 0, ParameterBucket._fill

    def watched(self: ParameterBucket, *args: object, **kwargs: object) -> None:
        nonlocal peak
        fill(self, *args, **kwargs)  # type: ignore[arg-type]
        filled.append(self)
        peak = max(peak, sum(bytes_of(bucket.flat) for bucket in filled))

    ParameterBucket._fill = watched  # type: ignore[method-assign]
    try:
        with Init(enabled=meta):
            model = seeded(Tower)
        engine = sharded(model, 3)
    finally:
        ParameterBucket._fill = fill  # type: ignore[method-assign]
    units = [sum(4 * bucket.layout.numel for bucket in unit.buckets) for unit in engine.model.units]
    return {"peak": peak, "unit": max(units), "units": len(units), "after": sum(bytes_of(b.flat) for b in filled)}


def test_one_unit_at_most_is_whole_while_the_engine_is_built(ranks: Launcher) -> None:
    for meta in (True, False):
        for found in ranks(2)(whole_while_built, meta):
            assert found["units"] == DEPTH + 1
            assert 0 < found["peak"] <= found["unit"]
            assert found["after"] == 0


# --------------------------------------------------------------------------------------------------- gradients


def local_gradients(stage: int, unused: bool, reverse: bool, world: int = 2) -> dict[str, Any]:
    """The most that local gradient buffers take in two steps, once the order of the blocks is known."""
    model = seeded(Tower, unused, reverse)
    engine = sharded(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine.attach(optimizer)
    peak, live = 0, engine.model.gradients
    originals = {name: getattr(GradientBucket, name) for name in ("accumulate", "launch")}

    def watch(name: str) -> Any:
        def watched(self: GradientBucket, *args: Any) -> None:
            nonlocal peak
            originals[name](self, *args)
            peak = max(peak, sum(sum(map(bytes_of, bucket.own.held())) for bucket in live))

        return watched

    def step() -> None:
        for _ in range(2):
            loss_of(model(torch.ones(2, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    try:
        for name in originals:
            setattr(GradientBucket, name, watch(name))
        step()
        step()
    finally:
        for name, original in originals.items():
            setattr(GradientBucket, name, original)
    return {
        "peak": peak,
        "bucket": max(4 * bucket.layout.numel for bucket in engine.model.buckets),
        "whole": sum(4 * bucket.layout.numel for bucket in engine.model.buckets),
        "after": sum(sum(map(bytes_of, bucket.own.held())) for bucket in live),
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_local_gradients_are_a_few_buckets(ranks: Launcher, stage: int) -> None:
    """The bucket that is being filled, two under way, and the root's, whatever is used in whatever order."""
    for unused, reverse in ((False, False), (True, False), (False, True), (True, True)):
        for found in ranks(2)(local_gradients, stage, unused, reverse):
            assert found["whole"] > 2 * 4 * found["bucket"], "else the bound says nothing"
            assert 0 < found["peak"] <= 4 * found["bucket"], (unused, reverse)
            assert found["after"] == 0
