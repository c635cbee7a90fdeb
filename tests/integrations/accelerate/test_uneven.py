"""`join_uneven_inputs(even_batches=False)` against its formula, and against torch's Join with DDP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs, TorchDynamoPlugin
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from tests.integrations.accelerate.training import Net, fresh_state, loader, make
from tests.launcher import Launcher

CLIP = 0.3
AFTER = 2
"""Batches that all ranks have after the uneven loop: whatever ranks do not agree on would show there."""


@dataclass
class Found:
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def loss_of(model: Any, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), x.cos())


def by_formula(counts: list[int]) -> Found:
    """One process: the gradients of ranks that have a batch, added up and divided by the number of all ranks."""
    model, found = Net().eval(), Found()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    data = [batches(rank, count) for rank, count in enumerate(counts)]
    later = [batches(10 + rank, AFTER) for rank in range(len(counts))]
    uneven = [[mine[step] for mine in data if step < len(mine)] for step in range(max(counts))]
    for step in [*uneven, *zip(*later, strict=True)]:
        for x in step:
            (loss_of(model, x) / len(counts)).backward()
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        for _ in counts:
            scheduler.step()
        optimizer.zero_grad()
        found.rates.append(scheduler.get_last_lr()[0])
    found.state = {name: value.clone() for name, value in model.state_dict().items()}
    return found


def ours(stage: int, counts: list[int], zero: dict[str, Any] | None = None, **keywords: Any) -> Found:
    with fresh_state():
        accelerator, found, net = make(stage, zero, **keywords), Found(), Net().eval()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)

        def train(data: list[Tensor]) -> None:
            for x in data:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x))
                    if accelerator.sync_gradients:
                        found.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                found.rates.append(schedule.get_last_lr()[0])

        with accelerator.join_uneven_inputs([model], even_batches=False):
            train(batches(dist.get_rank(), counts[dist.get_rank()]))
        train(batches(10 + dist.get_rank(), AFTER))
        found.state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        return found


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


COUNTS = [[2, 5], [4, 1], [3, 3], [0, 2]]
# At each stage one rank is longer, at some the other one; a rank without any batch where gradients are sharded, too.
CHOSEN = [(0, 0), (0, 1), (1, 0), (1, 2), (1, 3), (2, 0), (2, 3), (3, 0), (3, 1), (3, 3)]


@pytest.mark.parametrize(
    ("stage", "counts"),
    [(stage, COUNTS[number]) for stage, number in CHOSEN],
    ids=[f"{stage}-counts{number}" for stage, number in CHOSEN],
)
def test_ranks_that_ran_out_count_as_zero_gradients(ranks: Launcher, stage: int, counts: list[int]) -> None:
    expected = by_formula(counts)
    found = ranks(2)(ours, stage, counts)
    longest = found[counts.index(max(counts))]
    assert longest.rates == expected.rates and longest.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(one.rates[-AFTER:] == expected.rates[-AFTER:] for one in found), "the schedule has caught up"
    assert largest(found[0].state, expected.state) < 2e-6
    assert longest.norms[0] > CLIP, "clipping was at work"


@pytest.mark.parametrize("stage", [2, 3])
def test_three_ranks_that_end_one_by_one(ranks: Launcher, stage: int) -> None:
    found = ranks(3)(ours, stage, [1, 4, 2])
    assert largest(found[0].state, by_formula([1, 4, 2]).state) < 2e-6


@pytest.mark.parametrize(
    "stage, zero",
    [
        (1, {"gradient_reduction": "per_micro_batch"}),
        (2, {"gradient_reduction": "per_step"}),
        (2, {"mesh": {"replicate": 2}}),
        (3, {"gradient_reduction": "per_step", "prefetch": 2}),
        (3, {"reshard_after_forward": False}),
        (3, {"reshard_after_backward": False}),
    ],
)
def test_other_settings(ranks: Launcher, stage: int, zero: dict[str, Any]) -> None:
    assert largest(ranks(2)(ours, stage, [2, 4], zero)[0].state, by_formula([2, 4]).state) < 2e-6


def compiled(stage: int) -> dict[str, Tensor]:
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="EAGER", use_regional_compilation=stage == 3)
    return ours(stage, [1, 3], dynamo_plugin=plugin).state


@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_models(ranks: Launcher, stage: int) -> None:
    assert largest(ranks(2, timeout=200)(compiled, stage)[0], by_formula([1, 3]).state) < 2e-6


# ---- gradients that the script changes by itself ----


def edit(model: Any, how: str) -> None:
    """Changes of gradients in a loop without the accelerator, after a backward."""
    weight = next(iter(model.parameters()))
    if how == "removed":
        weight.grad = None
    elif how == "assigned":
        weight.grad = torch.full_like(weight, 0.25)
    elif how == "zeroed":
        weight.grad.zero_()


def edited(stage: int | None, how: str, counts: list[int]) -> dict[str, Tensor]:
    """One process by the formula where there is no stage."""

    def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def drop(model: nn.Module, step: int) -> None:
        model.zero_grad(set_to_none=bool(step % 2))

    if stage is None:
        model, data = Net().eval(), [batches(rank, count) for rank, count in enumerate(counts)]
        plain = make_optimizer(model)
        for step in range(max(counts)):
            drop(model, step)
            for x in (mine[step] for mine in data if step < len(mine)):
                (loss_of(model, x) / len(counts)).backward()
            edit(model, how)
            plain.step()
        return {name: value.detach() for name, value in model.state_dict().items()}
    with fresh_state():
        accelerator, net = make(stage), Net().eval()
        model, optimizer = accelerator.prepare(net, make_optimizer(net))
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for step, x in enumerate(batches(dist.get_rank(), counts[dist.get_rank()])):
                drop(model, step)
                accelerator.backward(loss_of(model, x))
                edit(model, how)
                optimizer.step()
        return accelerator.engine(model).full_state_dict()


@pytest.mark.parametrize("how", ["not", "removed", "assigned", "zeroed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_script_does_to_gradients_is_followed(ranks: Launcher, stage: int, how: str) -> None:
    expected = edited(None, how, [5, 2])
    assert all(largest(state, expected) < 2e-6 for state in ranks(2)(edited, stage, how, [5, 2]))


# ---- what torch's Join gives ----


def joined(stage: int | None, counts: list[int]) -> dict[str, Tensor]:
    """No momentum and no schedule: plain DDP leaves those of ranks that ran out behind."""
    mine = batches(dist.get_rank(), counts[dist.get_rank()])
    net = Net().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if stage is None:
        wrapped = nn.parallel.DistributedDataParallel(net)
        with Join([wrapped], enable=True, throw_on_early_termination=False):  # as Accelerate makes it on GPUs
            for x in mine:
                optimizer.zero_grad()
                loss_of(wrapped, x).backward()
                optimizer.step()
        return {name: value.clone() for name, value in net.state_dict().items()}
    with fresh_state():
        accelerator = make(stage)
        model, optimizer = accelerator.prepare(net, optimizer)
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for x in mine:
                loss = loss_of(model, x)
                model.zero_grad()
                loss.backward()
                optimizer.step()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_the_same_as_join_with_ddp(ranks: Launcher) -> None:
    plain = ranks(2)(joined, None, [5, 2])[0]
    for stage in (1, 3):
        assert largest(plain, ranks(2)(joined, stage, [5, 2])[0]) < 2e-6


# ---- with the rest of Accelerate ----


def epoch(stage: int, even_batches: bool | None) -> tuple[list[int], int]:
    """Sizes of the batches of this rank inside, and their number outside."""
    with fresh_state():
        accelerator = make(stage)
        net = Net().eval()
        model, optimizer, data = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), loader(26, shuffle=False)
        )
        sizes = []
        with accelerator.join_uneven_inputs([model], even_batches=even_batches):
            for x, _ in data:
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()
                sizes.append(len(x))
        return sizes, len(list(data))


def test_prepared_loaders_give_uneven_batches_inside(ranks: Launcher) -> None:
    assert ranks(2)(epoch, 3, False) == [([4, 4, 4, 2], 4), ([4, 4, 4], 4)]
    assert ranks(2)(epoch, 1, None) == [([4, 4, 4, 4], 4)] * 2


def accumulated(stage: int, counts: list[int]) -> dict[str, Tensor]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    return ours(stage, counts, gradient_accumulation_plugin=plugin).state


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_uneven_accumulation(ranks: Launcher, stage: int) -> None:
    """Rank 1 ends in the middle of an accumulation: what it has counts in the step that the others take."""
    model = Net().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    long, short = batches(0, 4), batches(1, 1)
    later = list(zip(batches(10, AFTER), batches(11, AFTER), strict=True))
    for step in ([long[0], long[1], short[0]], long[2:], [x for pair in later for x in pair]):
        for x in step:
            (loss_of(model, x) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        schedule.step()
        optimizer.zero_grad()
    state = ranks(2)(accumulated, stage, [4, 1])[0]
    assert largest(state, {name: value.detach() for name, value in model.state_dict().items()}) < 2e-6


def in_fp16(stage: int, counts: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """The last batch of rank 0 overflows when rank 1 has none left."""
    with fresh_state():
        kept = [GradScalerKwargs(init_scale=256.0)]
        accelerator = make(stage, mixed_precision="fp16", kwargs_handlers=kept)
        net = Net().eval()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        rank, states = dist.get_rank(), []
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for step, x in enumerate(batches(rank, counts[rank])):
                accelerator.backward(loss_of(model, x) * (float("inf") if step == 3 else 1.0))
                optimizer.step()
                optimizer.zero_grad()
                if step == 2 and rank == 0:
                    states.append(accelerator.scaler.get_scale())
        x = batches(10 + rank, 1)[0]
        accelerator.backward(loss_of(model, x))
        accelerator.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        states.append(accelerator.scaler.get_scale())
        return states, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_loss_scale_is_followed(ranks: Launcher, stage: int) -> None:
    found = ranks(2)(in_fp16, stage, [4, 1])
    assert found[0][0] == [256.0, 128.0] and found[1][0] == [128.0]
    assert all(torch.isfinite(value).all() for value in found[0][1].values())
    model = Net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = batches(0, 4), batches(1, 1)
    for step in ([first[0], second[0]], [first[1]], [first[2]], [batches(10, 1)[0], batches(11, 1)[0]]):
        for x in step:
            (loss_of(model, x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest(found[0][1], model.state_dict()) < 2e-3, "but for what fp16 rounds"


def two_models(stage: int) -> list[dict[str, Tensor]]:
    with fresh_state():
        accelerator = make(stage)
        nets = [Net().eval(), nn.Linear(6, 6)]
        made = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        one, two, *optimizers = accelerator.prepare(*nets, *made)
        with accelerator.join_uneven_inputs([one, two], even_batches=False):
            for x in batches(dist.get_rank(), 4 - 3 * dist.get_rank()):
                accelerator.backward(loss_of(lambda x: two(one(x)), x))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return [accelerator.get_state_dict(model) for model in (one, two)]


def test_two_models_in_one_backward(ranks: Launcher) -> None:
    states = [ranks(2)(two_models, stage)[0] for stage in (0, 1, 3)]
    for other in states[1:]:
        assert max(largest(a, b) for a, b in zip(states[0], other, strict=True)) < 2e-6


def refused() -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    def differing(accelerator: Any, model: Any) -> None:
        rank = dist.get_rank()
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for step in range(2 if rank else 0):
                loss = loss_of(model, batches(rank, 1)[0])
                if step == rank - 1:
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
                accelerator.backward(loss)

    with fresh_state():
        accelerator = make(2)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        note("not prepared", lambda: accelerator.join_uneven_inputs([Net()], even_batches=False).__enter__())
        with accelerator.join_uneven_inputs([model], even_batches=False):
            note("closure", lambda: optimizer.step(lambda: 0.0))
        note("different", lambda: differing(accelerator, model))
    with fresh_state():
        accelerator = make(2, gradient_accumulation_steps=2)
        note("accumulation", lambda: accelerator.join_uneven_inputs([accelerator.prepare(Net())]).__enter__())
        model = accelerator.prepare(Net())
        note("accumulation", lambda: accelerator.join_uneven_inputs([model], even_batches=False).__enter__())
    return found


def test_accelerate_uneven_mistakes_are_named(ranks: Launcher) -> None:
    for found in ranks(3)(refused):
        assert "Net was not prepared" in found["not prepared"]
        assert "optimizer.step with a closure" in found["closure"]
        assert "different things" in found["different"] and "clip_grad_value_" in found["different"]
        assert "sync_with_dataloader=False" in found["accumulation"]
