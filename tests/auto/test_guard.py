"""A run whose memory runs short in the first steps goes on with the same bits, and all ranks compute units again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.auto.guarded import BLOCKS, WIDTH, Block, batch_of, loss, net, trained
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.auto.example import Example
from zero_strategy.auto.guard import FirstSteps, is_alike_for_ranks, is_out_of_memory

UNITS = {"min_numel": 0, "classes": ["Block"]}


def chosen(stage: int) -> dict[str, Any]:
    return {"stage": stage, "units": UNITS, "auto": {"enabled": True}, "activation_checkpointing": {}}


def pinned(stage: int, mode: str = "none") -> dict[str, Any]:
    return {"stage": stage, "units": UNITS, "activation_checkpointing": mode}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("short", ["", "fails", "no room"])
def test_a_run_goes_on_with_the_same_bits(ranks: Launcher, stage: int, short: str) -> None:
    found = ranks(2)(trained, chosen(stage), short)
    plain = ranks(2)(trained, pinned(stage))
    for one, other in zip(found, plain, strict=True):
        assert one["guarded"] and not other["guarded"]
        assert (one["digest"], one["losses"]) == (other["digest"], other["losses"])
        assert one["again"] == (BLOCKS if short else 0)
        assert one["mode"] == (
            ("full", "memory ran short: auto.enabled") if short else ("none", "chosen: auto.enabled")
        )
        assert bool(one["measured"]) == (not short)
    if short:
        (said,) = found[0]["said"]
        assert "rank 1: " in said and "rank 0" not in said and " dropped" in said
        assert ("says the test" in said) == (short == "fails")
    assert not found[1]["said"]


def test_a_limit_of_the_process_is_kept(fresh_ranks: Launcher) -> None:
    """Units keep twelve blocks of 4 MiB each at least, and the process may take hardly more than two units."""
    settings = {**chosen(0), "mmap_threshold": 65536}
    (found,) = fresh_ranks(1)(trained, settings, "limited", 3, 4096)
    (plain,) = fresh_ranks(1)(trained, {**pinned(0), "mmap_threshold": 65536}, "", 3, 4096)
    assert found["guarded"] and found["said"] and found["again"] == BLOCKS
    assert (found["digest"], found["losses"]) == (plain["digest"], plain["losses"])


def test_what_a_user_has_set_is_not_guarded(ranks: Launcher) -> None:
    (found,) = ranks(1)(trained, {**chosen(1), "activation_checkpointing": "none"}, "", 1)
    assert not found["guarded"]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("memory"), False),
    ],
)
def test_errors_of_memory_are_known(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


class Appending(Block):
    """A block that appends to a list of the caller's."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        seen.append(x.detach())
        return super().forward(x)


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Appending() for _ in range(3)])
        self.into, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        x = self.into(x)
        for block in self.blocks:
            x = block(x, seen)
        assert len(seen) == len(self.blocks)
        return torch.as_tensor(self.out(x))


def engine_of(module: nn.Module, classes: list[str] | None = None, **settings: Any) -> ZeroEngine:
    config = {**chosen(0), **settings, "units": {"min_numel": 0, "classes": classes or ["Block"]}}
    return ZeroEngine(module, config, example=Example(batch_of(0, 0), loss))


def test_a_forward_that_fills_a_list_is_not_run_again() -> None:
    module = Listing()
    engine = engine_of(module, ["Appending"])
    assert engine.activations.guard is not None
    next(each for each in module.modules() if isinstance(each, Appending)).fails = True
    with pytest.raises(torch.OutOfMemoryError, match="says the test"):
        loss(module, batch_of(0, 0))
    loss(module, batch_of(0, 0)).backward()
    engine.close()


def test_a_checkpoint_of_the_users_keeps_what_it_would() -> None:
    module = net()
    engine = engine_of(module)
    guard = engine.activations.guard
    assert isinstance(guard, FirstSteps)
    value = checkpoint(lambda batch: loss(module, batch), batch_of(0, 0), use_reentrant=False)
    assert guard.kept.nbytes == 0
    value.backward()
    value = loss(module, batch_of(0, 0))
    assert guard.kept.nbytes > 0
    value.backward()
    assert guard.kept.nbytes == 0
    engine.close()


def test_two_steps_are_guarded_with_two_optimizers() -> None:
    module = net()
    engine = engine_of(module)
    optimizers = [
        torch.optim.SGD(list(module[0].parameters()), lr=0.1),
        torch.optim.SGD(module[1:].parameters(), lr=0.1),
    ]
    for optimizer in optimizers:
        engine.attach(optimizer)
    guarded = []
    for step in range(3):
        guarded.append(engine.activations.guard is not None)
        loss(module, batch_of(step, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert guarded == [True, True, False]
    engine.close()


class InPlace(Block):
    """A block that changes its input, which cannot be computed again."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x


def with_blocks(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 1))


def test_blocks_that_nobody_can_compute_again_are_not_guarded() -> None:
    engine = engine_of(with_blocks(Block(), InPlace()), ["Block", "InPlace"])
    assert engine.activations.guard is None
    engine.close()


def test_blocks_that_one_rank_alone_must_not_compute_again_are_known() -> None:
    """Parameters of two units, a norm of all ranks, units in units."""
    shared, nested = [Block(), Block()], Block()
    shared[1].out = shared[0].out
    nested.out = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(Block())
    for blocks, alike in (([Block()], True), (shared, False), ([nested], False), ([synchronised], False)):
        engine = ZeroEngine(with_blocks(*blocks), pinned(0))
        assert is_alike_for_ranks(engine.config.config, engine.model) == alike
        engine.close()
