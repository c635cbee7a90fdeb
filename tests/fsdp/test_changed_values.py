"""`communication.parameters: delta` has the bits of a gather of values, and sends fewer bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.config import load_config
from zero_strategy.fsdp.changed_values import ChangedValues
from zero_strategy.optim import MuonAdamW, split_matrices

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
    "torch's": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True),
    "muon": lambda model: MuonAdamW(split_matrices(model), muon={"lr": 1e-5}, adamw={"lr": 1e-5}),
}
STEPS = 5


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_coding_changes_of_a_gpu_is_warned_of(device: str) -> None:
    mesh: Any = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ChangedValues(mesh, torch.device(device))
    words = [str(one.message) for one in told]
    assert ["communication.parameters: delta codes changes on the host" in one for one in words] == [True] * len(words)
    assert len(words) == (1 if device == "cuda:1" else 0) and all("from cuda:1 twice" in one for one in words)


class Run:
    """A training, and what it sends."""

    def __init__(self, parameters: str, stage: int, kind: str, dtype: torch.dtype | None, **options: Any) -> None:
        self.model = net(width=64)
        settings = {"stage": stage, "communication": {"parameters": parameters}, **options}
        self.engine = ZeroEngine(self.model, settings, compute_dtype=dtype)
        self.dtype = dtype or torch.float32
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.engine.attach(self.optimizer)

    def step(self) -> None:
        chance = torch.Generator().manual_seed(10 * self.engine.steps.taken + dist.get_rank())
        loss_of(self.model(torch.randn(6, 64, generator=chance).to(self.dtype))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def sent(self) -> int:
        """Bytes of parameters since the last call."""
        found = self.engine.counters.bytes["all_gather"] + self.engine.counters.bytes["all_to_all"]
        self.engine.counters.reset()
        return int(found)


def compared(stage: int, kind: str, dtype: torch.dtype | None, options: dict[str, Any]) -> list[float]:
    runs = [Run(parameters, stage, kind, dtype, **options) for parameters in ("values", "delta")]
    shares = []
    for _ in range(STEPS):
        sent = []
        for run in runs:
            run.step()
            sent.append(run.sent())
        assert all(map(torch.equal, *(run.weights() for run in runs)))
        shares.append(sent[1] / max(sent[0], 1))
    return shares


@pytest.mark.parametrize(
    "stage, world, kind, dtype, options",
    [
        (1, 2, "fused", torch.bfloat16, {}),
        (2, 2, "fused", torch.bfloat16, {}),
        (2, 4, "fused", torch.bfloat16, {}),
        (2, 4, "fused", torch.bfloat16, {"mesh": {"replicate": 2}}),
        (1, 2, "torch's", torch.bfloat16, {}),
        (2, 2, "muon", torch.bfloat16, {}),
        (2, 2, "fused", None, {}),
        (1, 1, "fused", torch.bfloat16, {}),
        (2, 2, "fused", torch.bfloat16, {"offload": {"optimizer": "cpu"}}),
    ],
)
def test_changes_have_the_bits_of_values(
    ranks: Launcher, stage: int, world: int, kind: str, dtype: torch.dtype | None, options: dict[str, Any]
) -> None:
    for shares in ranks(world)(compared, stage, kind, dtype, options):
        if dtype is not None and world > 1 and kind != "muon":  # which sends directions, too
            assert shares[0] == 1.0  # nothing is known of the values before the first step
            assert max(shares[1:]) < (0.6 if options.get("mesh") else 0.4)  # replicas gather gradients, too


def edited(stage: int) -> None:
    runs = [Run(parameters, stage, "fused", torch.bfloat16) for parameters in ("values", "delta")]
    state = runs[0].engine.full_state_dict()

    def ours(run: Run) -> None:
        run.model.head.weight.detach().mul_(1.5)

    def one_ranks(run: Run) -> None:
        if dist.get_rank() == 1:
            run.model.head.weight.detach().mul_(1.5)

    def silent(run: Run) -> None:
        run.model.head.weight.data.add_(dist.get_rank())  # on each rank another, which no version tells

    for change in (ours, lambda run: run.model.load_state_dict(state), one_ranks, silent):
        for run in runs:
            run.step()
            run.step()
            change(run)
            run.step()
            run.step()
        assert all(map(torch.equal, *(run.weights() for run in runs))), change


@pytest.mark.parametrize("stage", [1, 2])
def test_values_that_changed_otherwise(ranks: Launcher, stage: int) -> None:
    ranks(2)(edited, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_other_stages_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match=rf"'delta' at stage {stage}: only stages 1 and 2"):
        load_config(stage=stage, communication={"parameters": "delta"})
