"""The first value that is not finite is named: rank, micro-batch, module, forward or backward; and nothing changes."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.diagnostics.nonfinite import NonFiniteError, NonFiniteWatch
from zero_strategy.diagnostics.norms import GRADIENT, UPDATE, ParameterNorms
from zero_strategy.engine import ZeroEngine

WIDTH = 4
FORWARD, OWN_CODE, BACKWARD, LOSS = 91.0, 92.0, 93.0, 94.0
"""First number of a batch that makes something go wrong."""


class Part(nn.Module):
    """Goes wrong for some inputs: in its forward, or only in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, mark: float) -> Tensor:
        y = self.norm(self.lin(x))
        if mark == FORWARD:
            y = y / 0.0
        if mark == BACKWARD:
            y = y + torch.sqrt(y * 0.0)  # its derivative there is infinite
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        mark = float(x.detach()[0, 0])
        x = self.stem(torch.where(x > 90, torch.zeros_like(x), x))
        for number, part in enumerate(self.parts):
            if mark == OWN_CODE and number == 2:
                x = x * math.inf
            x = x + part(x, mark if number == 1 else 0.0)
        out: Tensor = self.head(x)
        return out


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    loss: Tensor = out.square().mean()
    if float(batch[0, 0]) == LOSS:
        loss = loss + (out - out.detach()).norm().sqrt()
    return loss


def start(stage: int) -> tuple[Model, ZeroEngine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine.attach(optimizer)
    return model, engine, optimizer


def train(model: Model, engine: ZeroEngine, marks: dict[tuple[int, int], float]) -> None:
    """Two micro-batches; marks by (rank, micro-batch)."""
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for micro in range(2):
        batch = torch.randn(3, WIDTH, generator=generator)
        rank = dist.get_rank() if dist.is_initialized() else 0
        batch[0, 0] = marks.get((rank, micro), batch[0, 0])
        loss_of(model, batch).backward()


CASES = [FORWARD, OWN_CODE, BACKWARD, LOSS]


def searched(stages: list[int]) -> dict[tuple[int, float], str]:
    found = {}
    for stage in stages:
        for mark in CASES:
            model, engine, optimizer = start(stage)
            watch = NonFiniteWatch(engine)
            train(model, engine, {})
            engine.clip_grad_norm_(1.0)
            assert watch.found is None
            optimizer.step()
            optimizer.zero_grad()
            train(model, engine, {(1, 1): mark})
            before = [buffer.nan_to_num() for buffer in model.buffers()] + [torch.get_rng_state()]
            engine.clip_grad_norm_(1.0)
            after = [buffer.nan_to_num() for buffer in model.buffers()] + [torch.get_rng_state()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert all(parameter.requires_grad for parameter in model.parameters())
            found[stage, mark] = str(watch.found)
            watch.close()
            optimizer.zero_grad()
            with torch.no_grad():  # running statistics that took what is not finite
                for buffer in model.buffers():
                    buffer.copy_(torch.ones_like(buffer))
            train(model, engine, {})  # and training goes on
            assert math.isfinite(engine.clip_grad_norm_(1.0))
            optimizer.step()
    return found


@pytest.mark.parametrize("stages", [[0, 2], [3]], ids=["whole", "sharded"])
def test_first_nonfinite_two_ranks(ranks: Launcher, stages: list[int]) -> None:
    first, second = ranks(2, timeout=90)(searched, stages)
    assert first == second
    expected = {
        FORWARD: "forward of parts.1, from finite inputs",
        OWN_CODE: "forward of the model itself, in its own code, before parts.2",
        BACKWARD: "backward of parts.1, from finite gradients",
        LOSS: "backward of (loss), the gradient of the output of the model is not finite already",
    }
    for (stage, mark), text in first.items():
        assert text.startswith("step 1: gradients are not finite (stem.weight, stem.bias, "), text
        assert f"rank 1, micro-batch 1, {expected[mark]}" in text, (stage, text)


def test_raising_and_logging(caplog: pytest.LogCaptureFixture) -> None:
    model, engine, _ = start(2)
    watch = NonFiniteWatch(engine, raises=True)
    with torch.no_grad():
        model.parts[2].lin.bias[1] = math.nan  # type: ignore[union-attr, index, operator]
    train(model, engine, {})
    with pytest.raises(NonFiniteError, match=r"forward of parts.2.lin, its bias is not finite") as info:
        engine.clip_grad_norm_(1.0)
    assert info.value.found.parameters["head.weight"] == WIDTH and info.value.found.rank == 0
    watch.raises = False
    with caplog.at_level(logging.ERROR, logger="zero_strategy"):
        engine.grad_norm()
    assert "first nan: rank 0, micro-batch 0, forward of parts.2.lin" in caplog.text


# ------------------------------------------------------------------------------------------------------------ norms


def norms_of(stage: int, norm_type: float) -> tuple[dict[str, float], dict[str, float]]:
    model, engine, optimizer = start(stage)
    norms = ParameterNorms(engine)
    assert norms.gradients() == {}
    train(model, engine, {})
    engine.clip_grad_norm_(0.5, norm_type)
    found = norms.gradients()
    with norms.updates() as moved:
        optimizer.step()
    norms.close()
    return found, moved


def test_norms_of_parameters(ranks: Launcher) -> None:
    for norm_type in (2.0, math.inf):
        expected = None
        for stage in (0, 1, 3):
            both = ranks(2)(norms_of, stage, norm_type)
            assert both[0] == both[1]
            gradients, updates = both[0]
            if expected is None:
                names = [name for name, _ in Model().named_parameters()]
                assert sorted(gradients) == sorted(GRADIENT + name for name in names)
                assert sorted(updates) == sorted(UPDATE + name for name in names)
                # AdamW's first step is the learning rate per element
                assert updates[UPDATE + "head.bias"] == pytest.approx(0.01, rel=0.1)
                expected = both[0]
            assert gradients == pytest.approx(expected[0], rel=1e-5) and updates == pytest.approx(expected[1], rel=1e-3)


def test_norms_of_one_process_are_torchs() -> None:
    model, engine, _ = start(0)
    norms = ParameterNorms(engine)
    train(model, engine, {})
    engine.grad_norm(3.0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        wanted = float(torch.linalg.vector_norm(parameter.grad.double(), 3.0))
        assert norms.gradients()[GRADIENT + name] == pytest.approx(wanted, rel=1e-9)
