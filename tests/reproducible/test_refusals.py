"""Refusals by name of all that would depend on the number of ranks, and of steps that have not all of their slots."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher, RankError
from tests.reproducible.training import build, digest_of, tokens_of
from zero_strategy.config import load_config, resolve
from zero_strategy.engine import ZeroEngine


@pytest.mark.parametrize(
    ("config", "world", "said"),
    [
        (
            {"reproducible": 8},
            3,
            "3 data-parallel ranks do not divide it; accepted: a multiple of the ranks, such as 9",
        ),
        ({"reproducible": 8, "mesh": {"tensor": 2}}, 2, "mesh.tensor is 2: parts of a product are summed"),
        ({"reproducible": 8, "mesh": {"sequence": 2}}, 2, "mesh.sequence is 2: attention is summed"),
        ({"reproducible": 8, "mesh": {"expert": 2}}, 2, "mesh.expert is 2: tokens of these ranks"),
        ({"reproducible": 8, "precision": {"reduce_dtype": "gradient"}}, 2, "precision.reduce_dtype is 'gradient'"),
        (
            {"reproducible": 8, "precision": {"gradient_dtype": "parameter"}},
            2,
            "precision.gradient_dtype is 'parameter'",
        ),
        ({"reproducible": 8, "uneven_batches": "join"}, 2, "uneven_batches is 'join': a step has all of its slots"),
        (
            {"reproducible": 8, "pipeline": {"stages": 2, "micro_batches": 3}, "stage": 1},
            4,
            "pipeline.micro_batches is 3",
        ),
    ],
    ids=str,
)
def test_settings_that_slots_exclude(config: dict[str, Any], world: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve(load_config(config), world)


def test_slots_are_written_as_a_number() -> None:
    assert load_config({"reproducible": 8}).reproducible.slots == 8
    assert load_config(reproducible={"slots": 4, "seed": 3}).reproducible.seed == 3
    assert (
        resolve(
            load_config({"reproducible": 8, "stage": 1, "pipeline": {"stages": 2}}), 4
        ).config.pipeline.micro_batches
        == 4
    )
    with pytest.raises(TypeError, match="reproducible"):
        load_config({"reproducible": "eight"})


class Counting(nn.Module):
    """A model whose buffer counts forwards; `seen` tells torch of it."""

    count: Tensor

    def __init__(self, seen: bool) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 1), seen
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.seen:
            self.count += 1
        else:
            self.count.data.add_(1)
        return self.linear(x).mean()


class Still(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean()


def one(module: nn.Module, *, slots: int = 2, **config: Any) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    engine = ZeroEngine(module, {"stage": 2, "reproducible": {"slots": slots, "seed": 1}, **config})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.attach(optimizer)
    return engine, optimizer


@pytest.mark.parametrize("seen", [True, False])
def test_a_buffer_that_a_forward_changes_is_named(seen: bool) -> None:
    module = Counting(seen)
    engine, _ = one(module)
    with engine, pytest.raises(RuntimeError, match=r"has changed the buffer\(s\) count: with reproducible.slots"):
        for _ in range(2):
            module(torch.ones(2, 4)).backward()


def test_a_buffer_that_stays_is_none() -> None:
    module = Still(False)
    engine, optimizer = one(module)
    with engine:
        for _ in range(4):
            module(torch.ones(2, 4)).backward()
            if engine.slots.complete:
                optimizer.step()
                optimizer.zero_grad()
        assert engine.steps.taken == 2


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_running_statistics_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"'1' is a {kind.__name__}: its running statistics"):
        one(nn.Sequential(nn.Linear(4, 4), kind(4)))


@pytest.mark.parametrize("optimizer", ["LBFGS", "FusedLamb"])
def test_optimizers_that_sum_over_parts_are_refused(optimizer: str) -> None:
    from zero_strategy.optim.fused import FusedLamb

    module = nn.Linear(4, 1)
    made = FusedLamb(module.parameters()) if optimizer == "FusedLamb" else torch.optim.LBFGS(module.parameters())
    with ZeroEngine(module, {"stage": 1, "reproducible": 1}) as engine, pytest.raises(ValueError, match=optimizer):
        engine.attach(made)


def test_a_step_has_all_of_its_slots() -> None:
    module = Still(False)
    engine, optimizer = one(module, slots=3)
    with engine:
        module(torch.ones(2, 4)).backward()
        with pytest.raises(RuntimeError, match=r"after 1 of 3 micro-batches: reproducible.slots is 3"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"is read after 1 of 3 micro-batches"):
            module.linear.weight.grad.sum()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="after 1 of 3 micro-batches"):
            engine.clip_grad_norm_(1.0)
        for _ in range(2):
            module(torch.ones(2, 4)).backward()
        with pytest.raises(RuntimeError, match="this is backward number 4 since the last step"):
            module(torch.ones(2, 4)).backward()
        engine.reset()


@pytest.mark.parametrize("call", ["token_mean", "add_gradient"])
def test_calls_of_ranks_are_refused(call: str) -> None:
    module = Still(False)
    engine, _ = one(module)
    with engine, pytest.raises(RuntimeError, match=rf"{call}.*and reproducible.slots is 2"):
        if call == "token_mean":
            engine.token_mean(torch.ones(()), 3)
        else:
            engine.add_gradient(module.linear.weight, torch.zeros(1, 4))


def test_without_slots_there_are_no_micro_batches() -> None:
    with ZeroEngine(nn.Linear(2, 1), {"stage": 2}) as engine:
        with pytest.raises(ValueError, match=r"reproducible.slots is 0"):
            engine.micro_batch()
        assert engine.slots.own == []


def dropped() -> str:
    """Gradients of an unfinished step are removed; the step is taken anew."""
    torch.set_num_threads(1)
    model = build()
    with ZeroEngine(model, {"stage": 3, "reproducible": {"slots": 4, "seed": 1}}) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.attach(optimizer)
        for attempt in range(2):
            for _ in range(1 if attempt == 0 and engine.slots.count > 1 else engine.slots.count):
                with engine.micro_batch() as slot:
                    model(tokens_of(0, slot)).backward()
            if attempt == 0:
                optimizer.zero_grad()
        optimizer.step()
        return digest_of(engine)


def test_gradients_that_were_removed_begin_a_step_anew(ranks: Launcher) -> None:
    assert len({ranks(world)(dropped)[0] for world in (1, 2, 4)}) == 1


def two_losses(stage: int) -> str:
    """Two backwards of one micro-batch are one slot's."""
    torch.set_num_threads(1)
    model = build()
    with ZeroEngine(model, {"stage": stage, "reproducible": {"slots": 4, "seed": 1}}) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.attach(optimizer)
        for _ in range(engine.slots.count):
            with engine.micro_batch(backwards=2) as slot:
                model(tokens_of(0, slot)).backward()
                (0.5 * model(tokens_of(1, slot))).backward()
        optimizer.step()
        return digest_of(engine)


def test_several_backwards_of_a_micro_batch_are_one_slot(ranks: Launcher) -> None:
    assert len({ranks(world)(two_losses, stage)[0] for world, stage in ((1, 1), (2, 2), (2, 3), (4, 1))}) == 1


@pytest.mark.parametrize(("said", "had"), [(2, 1), (1, 2)])
def test_backwards_are_as_many_as_was_said(said: int, had: int) -> None:
    module = Still(False)
    engine, _ = one(module)
    with engine, pytest.raises(RuntimeError, match=r"micro_batch\(backwards="):
        with engine.micro_batch(backwards=said):
            for _ in range(had):
                module(torch.ones(2, 4)).backward()


def other_slots(folder: str) -> list[str]:
    made = []
    for slots in (2, 4):
        engine, _ = one(Still(False), slots=slots)
        with engine, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if slots == 2:
                engine.save(folder).wait()
            else:
                engine.load(folder)
            made += [str(one.message) for one in told if "reproducible" in str(one.message)]
    return made


def test_a_checkpoint_of_other_slots_is_said_to_be_one(tmp_path: Any) -> None:
    assert "the checkpoint's run had 2" in other_slots(str(tmp_path / "saved"))[0]


def unequal() -> None:
    model = Still(False)
    engine, _ = one(model, slots=4, watchdog={"wait_seconds": 1.0, "silence_seconds": 1.0})
    with engine:
        for _ in range(engine.slots.count + engine.mesh.rank):
            model(torch.ones(2, 4)).backward()


def test_a_rank_with_more_micro_batches_is_an_error(ranks: Launcher) -> None:
    with pytest.raises(RankError, match="this is backward number 3 since the last step"):
        ranks(2)(unequal)
