"""Three stages that share a weight, are frozen, have nothing to train, or have state that is no parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.launcher import Launcher
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule

VOCABULARY, WIDTH, COUNT, STEPS = 23, 8, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def logits(embedding: Any, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def mixed(embedding: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(logits(embedding, x) @ embedding.weight)


def tied(**more: Any) -> TiedLayerSpec:
    return TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, **more)


def layers(kind: str) -> tuple[list[Any], list[int]]:
    """And the bounds of three stages."""
    if kind.startswith("tied"):
        blocks = [LayerSpec(Block) for _ in range(4)]
        return [tied(), *blocks[:2], tied(forward_fn=mixed), *blocks[2:], tied(forward_fn=logits)], [0, 2, 5, 7]
    if kind == "relu":
        return [nn.Embedding(VOCABULARY, WIDTH), Block(), nn.ReLU(), nn.Linear(WIDTH, VOCABULARY)], [0, 2, 3, 4]
    found = [nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY)]
    for number in {"first": [0, 1], "middle": [2], "others": [2, 3]}[kind]:
        found[number].requires_grad_(False)
    return found, [0, 2, 3, 4]


def make(kind: str, stages: int, **more: Any) -> PipelineModule:
    torch.manual_seed(0)
    given, bounds = layers(kind)
    method: Any = bounds if stages == 3 else "uniform"
    module = PipelineModule(given, stages, loss_fn=loss_of, partition_method=method, **more)
    if kind == "tied, frozen":
        module.tied_modules.requires_grad_(False)
    return module


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(COUNT):
        tokens = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(10 * step + number))
        yield tokens[:, :-1], tokens[:, 1:]


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train(kind: str, zero: int, schedule: str) -> Found:
    module = make(kind, 3)
    optimizer = torch.optim.AdamW([{"params": list(module.parameters())}], lr=0.02)
    engine = PipelineEngine(module, {"stage": zero, "pipeline": {"schedule": schedule, "micro_batches": COUNT}})
    engine.attach(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(float(engine.forward_backward(batches(step))))
        norms.append(float(engine.clip_grad_norm_(0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, engine.full_state_dict())


def train_all(cases: list[tuple[str, int, str]]) -> tuple[list[Found], str]:
    found = [train(*case) for case in cases]
    module = make("relu", 3)
    engine = PipelineEngine(module, {"stage": 1, "pipeline": {"micro_batches": COUNT}})
    if parameters := list(module.parameters()):
        engine.attach(torch.optim.AdamW(parameters))
    with pytest.raises(ValueError, match="different numbers of optimizers") as told:
        engine.forward_backward(batches(0))
    return found, str(told.value)


def plain(kind: str) -> Found:
    module = make(kind, 1, rank=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for inputs, labels in batches(step):
            loss = loss_of(module(inputs), labels) / COUNT
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()})


def test_stages_that_share_or_do_not_train(ranks: Launcher) -> None:
    """A weight at three stages; and an optimizer that one stage lacks is an error, not a hang."""
    cases = [
        ("tied", 1, "1f1b"), ("tied", 3, "zb_h1"), ("tied, frozen", 2, "1f1b"), ("first", 3, "zb_h1"),
        ("middle", 1, "zb_h1"), ("middle", 3, "1f1b"), ("others", 2, "1f1b"), ("relu", 1, "zb_h1"), ("relu", 3, "1f1b"),
    ]  # fmt: skip
    for results, told in ranks(3)(train_all, cases):
        assert "rank 0: 1, rank 1: 0, rank 2: 1" in told and "[{'params': []}]" in told
        for case, found in zip(cases, results, strict=True):
            expected = plain(case[0])
            assert found.losses == pytest.approx(expected.losses, rel=1e-6), case
            assert found.norms == pytest.approx(expected.norms, rel=1e-5), case
            assert found.weights.keys() == expected.weights.keys()
            for name, tensor in found.weights.items():
                torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-4, atol=1e-5, msg=f"{case} {name}")


# ---- state that is no parameter, in checkpoints with and without a pipeline ----


class Counting(nn.Module):
    """Has a state of its own in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        found: Tensor = self.linear(x)
        return found

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    half = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), Counting()]
    return nn.Sequential(*half, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counting(), nn.Linear(WIDTH, 3))


def rows(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * step + number)
        yield torch.randn(4, WIDTH, generator=generator), torch.randint(3, (4,), generator=generator)


def go_on(stages: int, zero: int, source: str | None, folder: str, steps: tuple[int, int]) -> Found:
    """With 0 stages, without a pipeline. Saves in the background, while further steps are taken."""
    module, engine = sequence(), None
    if stages:
        module = PipelineModule(module, stages, loss_fn=F.cross_entropy, partition_method="uniform")
        engine = PipelineEngine(module, {"stage": zero, "pipeline": {"micro_batches": 3}})
    whole = engine or ZeroEngine(module, {"stage": zero})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    whole.attach(optimizer)
    if source is not None:
        whole.load(source)
    losses = []
    for step in range(*steps):
        losses.append(_step(whole, module, step))
        optimizer.step()
        optimizer.zero_grad()
    found = whole.full_state_dict()
    save = whole.save(folder, asynchronous=True)
    for step in range(50, 52):
        _step(whole, module, step)
        optimizer.step()
        optimizer.zero_grad()
    save.wait()
    return Found(losses, [], found)


def _step(engine: ZeroEngine, module: nn.Module, step: int) -> float:
    if isinstance(engine, PipelineEngine):
        return float(engine.forward_backward(rows(step)))
    total = 0.0
    for number, (inputs, labels) in enumerate(rows(step)):
        with nullcontext() if number == 2 else engine.no_sync():
            loss = F.cross_entropy(module(inputs), labels) / 3
            loss.backward()
            total += float(loss.detach())
    return total


def test_buffers_and_extra_state_with_and_without_a_pipeline(ranks: Launcher, tmp_path: Path) -> None:
    """A step, saved; then another one from it, on the other kind of engine."""
    (first,) = ranks(1)(go_on, 0, 1, None, str(tmp_path / "plain"), (0, 1))
    (second,) = ranks(1)(go_on, 0, 1, str(tmp_path / "plain"), str(tmp_path / "unused"), (1, 2))
    for stages, zero in ((2, 1), (3, 3)):
        folder = str(tmp_path / f"{stages}")
        for found in ranks(stages)(go_on, stages, zero, None, folder, (0, 1)):
            _same(found, first)
        for name in ("model.safetensors", "optimizer/exp_avg.safetensors"):
            ours, theirs = ((path / name).read_bytes() for path in (Path(folder), tmp_path / "plain"))
            assert len(ours) == len(theirs)
        for found in ranks(stages)(go_on, stages, zero, str(tmp_path / "plain"), folder + "-on", (1, 2)):
            _same(found, second)
        (back,) = ranks(1)(go_on, 0, zero, folder, folder + "-back", (1, 2))
        _same(back, second)


def _same(found: Found, expected: Found) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
        else:
            assert found.weights[name] == value, name
