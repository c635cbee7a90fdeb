"""One rank's loss without a graph: the report says what works, and that does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher, RankError
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def skipping(stage: int | None, way: str) -> dict[str, Tensor]:
    """Three steps; rank 1 has nothing to learn from the second batch."""
    model: Any = net()
    rank = torch.distributed.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    forward: nn.Module = model
    if stage is None:
        forward = DistributedDataParallel(model)
    else:
        engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}, timeout_seconds=20.0))
        engine.attach(optimizer)
    for step in range(3):
        output = forward(batch(step, rank))
        loss = loss_of(output)
        if step == 1 and rank == 1:
            loss = 0 * output.sum() if way == "advised" else torch.zeros((), requires_grad=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()) if stage is None else engine.full_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_times_the_outputs_is_as_under_ddp(ranks: Launcher, stage: int) -> None:
    plain = ranks(2)(skipping, None, "advised")[0]
    for ours in ranks(2)(skipping, stage, "advised"):
        assert all(torch.allclose(ours[name], plain[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_without_a_graph_is_told_with_what_works(ranks: Launcher, stage: int) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2)(skipping, stage, "constant")
    text = str(caught.value)
    assert re.search(r"loss has no graph of the model [^\n]*`0 \* output\.sum\(\)`", text), text


def embedding(stage: int) -> tuple[list[str], list[str]]:
    """The warnings of three steps with two sparse embeddings, and what differs from dense ones under Adagrad."""
    import warnings

    def make(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict(
            {"one": nn.Embedding(40, 6, sparse=sparse), "bag": nn.EmbeddingBag(30, 6, mode="sum", sparse=sparse)}
        )

    found, states = [], []
    for sparse in (True, False):
        model = make(sparse)
        engine = ZeroEngine(model, load_config(stage=stage))
        engine.attach(optimizer := torch.optim.Adagrad(model.parameters(), lr=0.1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                rows = torch.tensor([[1, 2, 3 + step], [4, 2, engine.mesh.rank]])
                with engine.forward_scope():
                    (model["one"](rows).square().sum() + model["bag"](rows).square().sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
        found += [str(warning.message) for warning in caught if "sparse" in str(warning.message)]
        states.append(engine.full_state_dict())
    return found, [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_sparse_gradient_becomes_dense_and_that_is_said_once(ranks: Launcher, stage: int) -> None:
    first, second = ranks(2)(embedding, stage)
    assert second[0] == [] and not first[1] and not second[1]
    one, bag = sorted(first[0], key=lambda text: "'bag" in text)
    assert "'one.weight' is sparse (192 bytes for 6 rows)" in one and "960 bytes" in one
    assert "'bag.weight' is sparse" in bag and "720 bytes" in bag and "sparse=True of the embedding saves" in bag
