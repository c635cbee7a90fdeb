"""Gradients that are reduced from where autograd left them: the same bits, and nothing copied where nothing has to be.

Where all are copied, small ones are in one call.

Small messages go through shared memory here, too, in many rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.nets import seeded
from tests.engine.test_exactness import CLIP_NORMS, differences
from tests.engine.training import Case, train_cases
from tests.launcher import Launcher
from tests.models import KINDS, Kind
from tests.reference import Order, Trained, train_rank_separated
from zero_strategy.comm import shared_memory, transport
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp import grad_accumulation
from zero_strategy.fsdp.grad_accumulation import LocalSums

STEPS = 5
"""On two ranks some have clipped gradients, and some have not."""


@contextmanager
def small_messages() -> Iterator[None]:
    with mock.patch.object(transport, "LEAST_BYTES", 0), mock.patch.object(shared_memory, "SLOT_BYTES", 1 << 11):
        yield


def train(cases: Sequence[Case]) -> list[Trained]:
    with small_messages():
        return train_cases(cases, STEPS)


@functools.cache
def oracle(kind: Kind, world: int, accumulation: int, order: Order) -> Trained:
    return train_rank_separated(kind, world, accumulation, STEPS, CLIP_NORMS[kind][accumulation], order)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_bits_are_the_oracles(ranks: Launcher, world: int) -> None:
    cases = [
        Case(kind, accumulation, CLIP_NORMS[kind][accumulation], stage, "per_step" if stage == 1 else "per_micro_batch")
        for kind in KINDS
        for accumulation in (1, 3)
        for stage in (1, 2, 3)
        if world == 2 or (kind == "transformer" and (world == 3 or accumulation == 1))
    ]
    by_rank = ranks(world, timeout=180)(train, cases)
    for index, case in enumerate(cases):
        expected = oracle(case.kind, world, case.accumulation, case.order)
        assert differences([results[index] for results in by_rank], expected) == {}, case


WIDTH = 16


class Twice(nn.Module):
    """A layer whose gradient may come in two parts in one backward."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        if self.twice:  # a graph of its own inside of the backward
            x = x + checkpoint(self.layers[0], x, use_reentrant=True)
        return x


class Watch:
    """Results for gradients."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.sums = [bucket.own for bucket in engine.model.gradients]
        self.handed = self.copied = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        add = LocalSums.add

        def watched(own: LocalSums, index: int, gradient: Tensor, **options: Any) -> None:
            add(own, index, gradient, **options)
            self.handed += index in own.handed
            self.copied += index not in own.handed

        with mock.patch.object(LocalSums, "add", watched):
            yield


def counts(stage: int, precision: dict[str, Any], low: bool, micro_batches: int = 1) -> dict[str, int]:
    with small_messages():
        module = seeded(Twice)
        config = load_config(stage=stage, units={"min_numel": 0}, precision=precision)
        engine = ZeroEngine(module, config, compute_dtype=torch.bfloat16 if low else None)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        watch = Watch(engine)
        with watch.on():
            for step in range(3):
                for _ in range(micro_batches):
                    x = torch.ones(4, WIDTH, dtype=torch.bfloat16 if low else None, requires_grad=True)
                    module(x).float().square().mean().backward()
                if step == 0:  # the first exchange finds out whether there is such memory
                    watch.handed = watch.copied = 0
                assert not any(own.handed for own in watch.sums)
                optimizer.step()
                optimizer.zero_grad()
        return {"handed": watch.handed, "copied": watch.copied}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_copied_where_nothing_has_to_be(ranks: Launcher, stage: int) -> None:
    """Six parameters, two steps."""
    same = {"gradient_dtype": "parameter", "reduce_dtype": "gradient"}
    for precision, low, expected in (
        ({}, False, {"handed": 12, "copied": 0}),
        (same, True, {"handed": 12, "copied": 0}),
        ({}, True, {"handed": 0, "copied": 12}),
    ):
        assert ranks(2)(counts, stage, precision, low) == [expected] * 2, (precision, low)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_added_to_earlier_sums_goes_through_the_buffer(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(counts, stage, {}, False, 2) == [{"handed": 12, "copied": 12}] * 2


def test_where_sums_are_shown_as_they_are(ranks: Launcher) -> None:
    assert ranks(2)(counts, 0, {}, False) == [{"handed": 0, "copied": 12}] * 2


def lent(stage: int) -> dict[str, Tensor]:
    """A gradient that the caller goes on using before it is reduced."""
    with small_messages():
        module = seeded(Twice)
        engine = ZeroEngine(module, load_config(stage=stage, units={"min_numel": 0}))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        for _ in range(3):
            for parameter in module.parameters():
                gradient = torch.ones_like(parameter)
                engine.add_gradient(parameter, gradient)
                gradient.zero_()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_added_stays_the_callers(ranks: Launcher, stage: int) -> None:
    module = seeded(Twice)
    for found in ranks(2)(lent, stage):
        for name, value in module.state_dict().items():
            torch.testing.assert_close(found[name], value - 3 * 0.1, rtol=1e-6, atol=1e-6)


def twice(stage: int) -> dict[str, Tensor]:
    with small_messages():
        module = seeded(Twice, twice=True)
        engine = ZeroEngine(module, load_config(stage=stage, units={"min_numel": 0}))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        for _ in range(3):
            x = torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()


def test_a_gradient_in_two_parts(ranks: Launcher) -> None:
    """The same on both ranks, so the mean is that of one process."""
    module = seeded(Twice, twice=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (1, 2, 3):
        for found in ranks(2)(twice, stage):
            for name, value in module.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def kept(stage: int) -> list[bool]:
    """A hook of the user's keeps what autograd made; the engine reduces it, and never writes to it."""
    with small_messages():
        module = seeded(Twice)
        seen: list[tuple[Tensor, Tensor]] = []
        weight = module.layers[0].weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad, p.grad.clone())))  # type: ignore
        engine = ZeroEngine(module, load_config(stage=stage, units={"min_numel": 0}))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        for _ in range(3):
            module(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [torch.equal(value, copy) for value, copy in seen]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_hook_has_kept_stays(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(kept, stage) == [[True] * 3] * 2


class Copies:
    """Joint copies into a bucket's buffer, by how many gradients they brought."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        copy = grad_accumulation.foreach_copy_

        def watched(into: list[Tensor], values: list[Tensor]) -> None:
            self.sizes.append(len(values))
            copy(into, values)

        with mock.patch.object(grad_accumulation, "foreach_copy_", watched):
            yield


class Normed(nn.Module):
    """Three layers of one matrix and seven vectors."""

    WIDTH = 64
    VECTOR = 4 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.LayerNorm(self.WIDTH) for _ in range(9))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), next(norms), next(norms), next(norms)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def waits(own: LocalSums) -> int:
    """Bytes that are held beside the buffer."""
    return sum(held.nbytes for held in own.held() if held is not own.whole)


def joint(
    stage: int, most: int, micro_batches: int = 1, sync: bool = True, create_graph: bool = False
) -> tuple[list[int], set[int], float]:
    """Joint copies of one step; bytes that wait after its backwards; the error of a sum that is read on the way."""
    module = seeded(Normed)
    with mock.patch.object(grad_accumulation, "MOST_WAITING", most):
        engine = ZeroEngine(module, load_config(stage=stage, units={"min_numel": 0}))
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    buckets, seen = engine.model.gradients, list[Tensor]()
    early, late = module.layers[1][3].bias, module.layers[1][0].weight
    place = engine.model.place(early)
    assert place is not None
    bucket = next(bucket for bucket in buckets if bucket.bucket is place[0])

    def look(_: Tensor) -> None:
        found = bucket.local_sum(place[1])
        assert found is not None
        seen.append(found.clone())

    hook, copies, waiting, x = late.register_hook(look), Copies(), set[int](), torch.ones(4, Normed.WIDTH)
    with copies.on():
        for last in [False] * (micro_batches - 1) + [True]:
            with nullcontext() if last and sync else engine.no_sync():
                module(x.clone().requires_grad_()).square().mean().backward(create_graph=create_graph)
            waiting |= {waits(each.own) for each in buckets}
            assert not any(held.requires_grad for each in buckets for held in each.own.held())
    hook.remove()
    plain = seeded(Normed)
    plain(x).square().mean().backward()
    expected = plain.layers[1][3].bias.grad
    assert len(seen) == micro_batches
    return copies.sizes, waiting, max((each / n - expected).abs().max().item() for n, each in enumerate(seen, start=1))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_small_gradients_are_copied_together(ranks: Launcher, stage: int) -> None:
    """Those of a layer in one call, but where somebody looks at one before the last has come."""
    for sizes, waiting, error in ranks(2)(joint, stage, 1 << 20):
        assert sum(sizes) == 21 and 3 <= len(sizes) <= 4, sizes
        assert waiting == {0} and error < 1e-6


def test_no_more_wait_than_may(ranks: Launcher) -> None:
    for sizes, waiting, error in ranks(2)(joint, 2, 2 * Normed.VECTOR):
        assert sum(sizes) == 21 and max(sizes) == 2 and waiting == {0} and error < 1e-6, sizes
    assert [sizes for sizes, _, _ in ranks(2)(joint, 2, Normed.VECTOR - 1)] == [[], []]


def test_none_waits_beyond_a_backward(ranks: Launcher) -> None:
    """Of the second all are added, and nothing is reduced."""
    for sizes, waiting, error in ranks(2)(joint, 1, 1 << 20, 2, False):
        assert sum(sizes) == 21 and waiting == {0} and error < 1e-6, sizes


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph")
def test_what_waits_may_have_a_graph(ranks: Launcher) -> None:
    for sync in (True, False):
        for sizes, waiting, error in ranks(2)(joint, 1, 1 << 20, 2, sync, True):
            assert sum(sizes) >= 21 and waiting == {0} and error < 1e-6, sizes


def test_gradients_that_are_shown_do_not_wait(ranks: Launcher) -> None:
    assert [sizes for sizes, _, _ in ranks(2)(joint, 0, 1 << 20)] == [[], []]


def parts() -> list[bool]:
    """True where a gradient waits: one that is a part of a larger tensor, one that is lent, one that is alone."""
    module = seeded(Normed)
    engine = ZeroEngine(module, load_config(stage=2, units={"min_numel": 0}))
    place = engine.model.place(module.layers[0][1].weight)
    assert place is not None
    own = next(bucket.own for bucket in engine.model.gradients if bucket.bucket is place[0])
    found = []
    for gradient, lent in (
        (torch.ones(2, Normed.WIDTH)[0], False),
        (torch.ones(Normed.WIDTH), True),
        (torch.ones(Normed.WIDTH), False),
    ):
        own.add(place[1], gradient, lent=lent)
        found.append(waits(own) > 0)
        sum_ = own.sum_of(place[1])
        assert sum_ is not None and bool((sum_ == 1).all()) and not waits(own)
        own.clear()
    return found


def test_what_waits_keeps_no_more_than_itself(ranks: Launcher) -> None:
    assert ranks(2)(parts) == [[False, False, True]] * 2
