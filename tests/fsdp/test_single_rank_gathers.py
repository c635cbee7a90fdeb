"""Stage 3 where one rank has all slices: gathers copy nothing, and the plan knows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.released import is_released

SETTINGS: dict[str, Any] = {"stage": 3, "units": {"min_numel": 0}}


class Copies(TorchDispatchMode):
    """Bytes that are copied into some storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages, self.bytes = storages, 0

    def is_there(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in str(func):
            self.bytes += sum(each.nbytes for each in tree_leaves(args[0]) if self.is_there(each))
        return func(*args, **(kwargs or {}))


def copied(mesh: dict[str, int], dtype: torch.dtype | None) -> tuple[int, list[int], bool]:
    """Bytes that a second step copies into the parameters, differences of the plan, and whether they are released."""
    model: Any = net()
    config = load_config(**SETTINGS, mesh=mesh)
    engine = ZeroEngine(model, config, compute_dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    counting = Copies({bucket.flat.untyped_storage()._cdata for bucket in engine.model.buckets})
    for _ in range(2):
        counting.bytes = 0
        with counting:
            loss_of(model(torch.ones(2, 6, dtype=dtype)).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = load_config(**SETTINGS, mesh=mesh).plan(
        net(), world_size=engine.mesh.world_size, optimizer=optimizer, compute_dtype=dtype, device="cpu"
    )
    planned, held = plan.ledger(engine.mesh.rank), engine.ledger()
    differences = [
        planned.only(category=each).total.taken - held.only(category=each).total.taken
        for each in ("parameters", "gather buffers", "master weights")
    ]
    released = all(map(is_released, model.parameters()))
    engine.close()
    return counting.bytes, differences, released


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_rank_alone_copies_nothing(dtype: torch.dtype | None) -> None:
    assert copied({}, dtype) == (0, [0, 0, 0], True)


def test_replicas_of_all_copy_nothing(ranks: Launcher) -> None:
    assert ranks(2)(copied, {"replicate": 2}, None) == [(0, [0, 0, 0], True)] * 2


def test_released_parameters_raise_as_on_many_ranks() -> None:
    model: Any = net()
    engine = ZeroEngine(model, load_config(**SETTINGS))
    with pytest.raises(RuntimeError, match="released"):
        model.head.weight.sum()
    with pytest.raises(RuntimeError, match="released"), torch.no_grad():
        nn.init.zeros_(model.head.weight)
    engine.close()
