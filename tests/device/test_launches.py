"""Kernels per clip and per step without the native library: no more than torch's own, on a model of 1.2 billion."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.device.launches import Launches
from tests.warm import run_warm
from zero_strategy import engine_mesh
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.ops import foreach
from zero_strategy.ops.library import libraries

ROOT = Path(__file__).resolve().parents[2]
FACTOR = 1024
"""Elements of the 1.2 billion for which one of the small model stands: both have 32 times more rows and columns."""
COUNT = """
import sys, torch
from unittest.mock import patch
from torch import distributed as dist
from tests.device.fake_ranks import silent_world
from tests.device.launches import Launches
from tests.device.test_launches import FACTOR, SmallLlama, backward
from zero_strategy import ops
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.ops import multi_tensor, optimizers
from zero_strategy.optim import elementwise_step

stage, kind, world = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
places = (multi_tensor, optimizers, elementwise_step)
ranks = silent_world(world - 1, world)
ranks.__enter__()
model = SmallLlama()
engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}, watchdog="off"))
options = {"plain": {}, "fused": {"fused": True}, "foreach": {"foreach": True}}[kind]
optimizer = torch.optim.AdamW(model.parameters(), **options)
engine.attach(optimizer)
for module in places:
    patch.object(module, "lacks_kernels", lambda device: True).start()
for _ in range(2):
    optimizer.zero_grad()
    backward(model)
    held = [each for bucket in engine.model.buckets for each in engine.model.gradient_of(bucket).held()]
    held = [tensor for kind, tensor in held if kind != "handles"]
    for tensor in held:
        tensor.fill_(1.0)  # ranks that are not there have sent nothing: any numbers
    held += [bucket.master.tensor for bucket in engine.model.buckets]
    held += [bucket.weights.values for bucket in engine.model.buckets]
    held = [tensor for tensor in held if tensor.numel()]
    with Launches(FACTOR, held) as clip:
        engine.clip_grad_norm_(1e-3)
    with Launches(FACTOR, held) as step:
        optimizer.step()
print(clip.total, step.total, dict(ops.ops_report("cpu"))["adam_"])
engine.close()
ranks.__exit__(None, None, None)
"""


class Block(nn.Module):
    """A block of Llama 3.2 1B with matrices of 1/32 in each direction."""

    def __init__(self) -> None:
        super().__init__()
        for name, out, into in (
            ("q", 64, 64), ("k", 16, 64), ("v", 16, 64), ("o", 64, 64), ("gate", 256, 64), ("up", 256, 64),
            ("down", 64, 256),
        ):  # fmt: skip
            setattr(self, name, nn.Linear(into, out, bias=False))
        self.first, self.second = nn.RMSNorm(2), nn.RMSNorm(2)  # 2048 / FACTOR

    def forward(self, x: Tensor) -> Tensor:
        """Not a Llama's, but of all parameters."""
        x = self.first(x.view(-1, 2)).view(-1, 64)
        x = x + self.o(self.q(x) + torch.cat([self.k(x), self.v(x)], dim=1).repeat(1, 2))
        x = self.second(x.view(-1, 2)).view(-1, 64)
        return x + self.down(self.gate(x).sigmoid() * self.up(x))


class SmallLlama(nn.Module):
    """Parameters of Llama 3.2 1B, each with 1/1024 of the elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(4008, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(16))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T


def backward(model: nn.Module) -> None:
    model(torch.arange(8)).logsumexp(dim=1).sum().backward()


def of_torch() -> tuple[int, int]:
    """Launches of torch's clip and of its step."""
    model = SmallLlama()
    assert 1.1e9 < sum(parameter.numel() for parameter in model.parameters()) * FACTOR < 1.3e9
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        with Launches(FACTOR) as clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)
        with Launches(FACTOR) as step:
            optimizer.step()
    assert clip.calls["_foreach_norm"] > 50 and step.calls["_fused_adamw_"] > 50, "of the large model"
    return clip.total, step.total


def without_library(stage: int, kind: str, world: int) -> tuple[int, int]:
    """The engine's, as on a device."""
    environment = {**os.environ, "ZERO_STRATEGY_NATIVE": "0", "PYTHONPATH": str(ROOT)}
    done = run_warm(COUNT, str(stage), kind, str(world), cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    clip, step, how = done.stdout.split(maxsplit=2)
    assert how.startswith("reference"), how
    return int(clip), int(step)


@pytest.mark.parametrize(
    ("stage", "kind", "world"),
    [(0, "plain", 1), (2, "fused", 1), (2, "plain", 2), (3, "plain", 2)],
)
def test_a_clip_and_a_step_launch_no_more_than_torchs(stage: int, kind: str, world: int) -> None:
    clip, step = without_library(stage, kind, world)
    torch_clip, torch_step = of_torch()
    print(f"stage {stage}, {kind}, {world} ranks: {clip} + {step} launches, torch's {torch_clip} + {torch_step}")
    # of a stage's own, a clip carries its factor out in the step or at once; torch's does both at once
    assert clip <= 1.1 * torch_clip
    assert clip + step <= 1.1 * (torch_clip + torch_step)


def test_norms_launch_no_more_than_torchs_whatever_the_optimizer() -> None:
    gradients = [torch.ones(numel) for numel in (1_000_000, 10_000_000, 3)]
    with Launches() as ours:
        foreach.power_sums(gradients, 2.0)
    with Launches() as theirs:
        torch.nn.utils.get_total_norm(gradients, foreach=True)
    assert ours.total <= theirs.total


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.AdamW, foreach=True), torch.optim.NAdam])
def test_the_library_is_asked_for_whatever_the_optimizer(
    make: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_status", {})
    model = nn.Linear(4, 4)
    engine = ZeroEngine(model, load_config(stage=2, watchdog="off"))
    engine.attach(make(model.parameters()))
    assert libraries.status("cpu") is not None, "before the first step"
    engine.close()


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_library_is_built_before_ranks_wait_for_each_other(
    offload: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build takes a minute, and may be due on some hosts only."""
    monkeypatch.setattr(libraries, "_status", {})
    known: list[bool] = []

    def compare(name: str, values: object, *, timeout: float) -> None:
        known.append(libraries.status("cpu") is not None)

    monkeypatch.setattr(engine_mesh, "check_same_values", compare)
    settings = {} if offload is None else {"offload": {"optimizer": offload}}
    ZeroEngine(nn.Linear(4, 4), load_config(stage=2, watchdog="off", **settings)).close()
    assert known == [True]


def test_steps_and_norms_make_no_temporaries_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach, "BATCH", 1 << 12)
    made: list[Tensor] = []

    class Made(Launches):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            made.extend(each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, Tensor))
            return result

    gradients = [torch.ones(100_000, dtype=torch.bfloat16), torch.ones(10)]
    params, first, second = ([torch.zeros(each.numel()) for each in gradients] for _ in range(3))
    rows = torch.tensor([[1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 0.5]] * 2, dtype=torch.float64)
    known = {each.untyped_storage().data_ptr() for each in (*gradients, *params, *first, *second)}
    with Made():
        foreach.stats_on_host(gradients, 2.0)
        foreach.stats_on_host(gradients, 3.0)
        foreach.adam(params, gradients, first, second, [], rows, True)
    fresh = [each.untyped_storage() for each in made if each.untyped_storage().data_ptr() not in known]
    assert max(each.nbytes() for each in fresh) <= 4 * foreach.BATCH
