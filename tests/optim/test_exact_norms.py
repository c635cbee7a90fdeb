"""Exact norms: equal bits on one to four ranks, at all stages, in all tiers, and those of plain Python."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.ops.test_block_sums import sums_of_blocks
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp import power_sums as taken_on_the_way
from zero_strategy.offload.stores import chunk_numel
from zero_strategy.ops import block_sums
from zero_strategy.optim.full_state import safe_set_full_grad
from zero_strategy.optim.grad_norm import global_norm

ORDERS = (1.0, 2.0, 3.0, 0.5, math.inf)
SHAPES = ((90, 70), (129,), (1,), (), (17, 40), (33, 3))
"""The first one has more elements than a chunk of the smallest tier."""
STAGES = [{"stage": stage} for stage in range(4)]
FACTORS = (1.0, 0.25, 2.0**-13)
"""One after the other."""
Found = list[tuple[str, bool]]
"""Norms as text, which tells all floats apart, and whether all is finite."""


class Linear(nn.Module):
    """A loss whose gradients are given numbers."""

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape, dtype=gradients[0].dtype) for shape in SHAPES)
        self.gradients = gradients

    def forward(self) -> Tensor:
        parts = [(weight * values).sum() for weight, values in zip(self.weights, self.gradients, strict=True)]
        return torch.stack(parts).sum()


def normal(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 3, shape, generator=generator)).to(dtype)
        for shape in SHAPES
    ]


def with_values(dtype: torch.dtype, *values: float) -> list[Tensor]:
    """Normal numbers and a few others, which lie on different ranks."""
    found = normal(dtype)
    for index, value in enumerate(values):
        found[0].view(-1)[index * 1500 + 3] = value
        found[4].view(-1)[index * 100] = value
    return found


CASES: dict[str, Callable[[], list[Tensor]]] = {
    "float32": lambda: normal(torch.float32),
    "bfloat16": lambda: normal(torch.bfloat16),
    "float64": lambda: normal(torch.float64),
    "subnormal": lambda: [values * 1e-41 for values in normal(torch.float32)],
    "huge": lambda: with_values(torch.float32, 3e38, -1e38),
    "huge float64": lambda: with_values(torch.float64, 1e300, -1.5e308, 1e-310),
    "zeros": lambda: [torch.zeros(shape) for shape in SHAPES],
    "infinite": lambda: with_values(torch.float32, 1.0, math.inf),
    "nan": lambda: with_values(torch.float32, math.nan, -math.inf),
}
SENT = ("float32", "bfloat16", "float64", "zeros", "nan")
"""Cases whose sums over up to four ranks are exact, and so their means."""


def expected_norm(gradients: list[Tensor], order: float, factor: float = 1.0) -> tuple[str, bool]:
    """In plain Python, of whole gradients."""
    finite = all(bool(values.isfinite().all()) for values in gradients)
    largest = max(float(values.double().abs().max()) for values in gradients) * factor
    if any(bool(values.isnan().any()) for values in gradients):
        return repr(math.nan), finite
    if not finite or math.isinf(order):
        return repr(largest), finite
    total, exponent = total_of(gradients, order, factor), 0
    if math.isinf(total):
        exponent = math.frexp(largest)[1]
        total = total_of(gradients, order, math.ldexp(factor, -exponent))
    try:
        return repr(math.ldexp(math.sqrt(total) if order == 2 else total ** (1 / order), exponent)), finite
    except OverflowError:
        return repr(math.inf), finite


def total_of(gradients: list[Tensor], order: float, factor: float) -> float:
    blocks = [each for values in gradients for each in sums_of_blocks(values.reshape(-1), order, factor)]
    try:
        return math.fsum(blocks)
    except OverflowError:  # `fsum` of finite numbers
        return math.inf


def build(gradients: list[Tensor], **settings: Any) -> tuple[Linear, ZeroEngine]:
    precision = {"gradient_dtype": "parameter", "reduce_dtype": "gradient"}
    module = Linear(gradients)
    config = load_config(precision=precision, units={"min_numel": 0}, watchdog="off", **settings)
    engine = ZeroEngine(module, config, compute_dtype=gradients[0].dtype)
    engine.model.exact_norms = True
    return module, engine


def by_dtype(cases: Iterable[str]) -> dict[torch.dtype, dict[str, list[Tensor]]]:
    """Gradients of cases that one engine may have, one after the other."""
    found: dict[torch.dtype, dict[str, list[Tensor]]] = {}
    for case in cases:
        gradients = CASES[case]()
        found.setdefault(gradients[0].dtype, {})[case] = gradients
    return found


def given(settings: dict[str, Any]) -> dict[str, Found]:
    """Of gradients that are set, and so are the same numbers whatever the ranks."""
    found = {}
    for cases in by_dtype(CASES).values():
        module, engine = build(next(iter(cases.values())), **settings)
        (module() * 0).backward()
        for case, gradients in cases.items():
            for weight, values in zip(module.weights, gradients, strict=True):
                safe_set_full_grad(weight, values)
            norms = [engine.grad_norm(order) for order in ORDERS]
            found[case] = [(repr(norm.value), norm.finite) for norm in norms]
        engine.close()
    return found


def reduced(settings: dict[str, Any]) -> dict[str, list[Found]]:
    """Of mean gradients, and of these times factors that wait, by case and order."""
    found: dict[str, list[Found]] = {}
    for cases in by_dtype(SENT).values():
        module, engine = build(next(iter(cases.values())), **settings)
        for case, module.gradients in cases.items():
            for order in ORDERS:
                engine.grad_norm(order)  # whose sums the next reduction takes
                module.zero_grad()
                module().backward()
                norms = []
                for factor in FACTORS:
                    engine.scale_gradients(factor)
                    norms.append(engine.grad_norm(order))
                found.setdefault(case, []).append([(repr(norm.value), norm.finite) for norm in norms])
        engine.close()
    return found


def all_given(settings: list[dict[str, Any]]) -> list[dict[str, Found]]:
    return [given(each) for each in settings]


def all_reduced(settings: list[dict[str, Any]]) -> list[dict[str, list[Found]]]:
    return [reduced(each) for each in settings]


def tiers(folder: Path) -> list[dict[str, Any]]:
    host = {"optimizer": "cpu", "gradients": "cpu", "staging_bytes": 1 << 16}
    files = {"optimizer": "nvme", "gradients": "nvme", "nvme_path": [str(folder)], "staging_bytes": 1 << 16}
    files |= {"probe_seconds": 0}
    return [
        {"stage": 1, "gradient_reduction": "per_micro_batch", "offload": host},
        {"stage": 2, "offload": files | {"optimizer_ratio": 0.6}},
        {"stage": 3, "offload": files | {"parameters": "nvme"}},
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exact_norms_of_given_gradients_have_one_value(ranks: Launcher, world: int) -> None:
    expected = {case: [expected_norm(make(), order) for order in ORDERS] for case, make in CASES.items()}
    settings = STAGES if world < 4 else [STAGES[0], STAGES[3], {"stage": 2, "mesh": {"replicate": 2}}]
    for results in ranks(world)(all_given, settings):
        for each, found in zip(settings, results, strict=True):
            for case in CASES:
                assert found[case] == expected[case], (case, each)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_exact_norms_of_reduced_gradients_have_one_value(ranks: Launcher, world: int, tmp_path: Path) -> None:
    so_far = list(accumulate(FACTORS, operator.mul))
    settings = [*STAGES, *tiers(tmp_path)] if world == 2 else [STAGES[2], *tiers(tmp_path)[1:]]
    settings += [{"stage": 3, "mesh": {"replicate": 2}}] * (world == 4)
    expected = {
        case: [[expected_norm(CASES[case](), order, factor) for factor in so_far] for order in ORDERS] for case in SENT
    }
    for results in ranks(world)(all_reduced, settings):
        for each, found in zip(settings, results, strict=True):
            for case in SENT:
                assert found[case] == expected[case], (case, each)


def test_exact_sums_are_taken_while_gradients_pass_to_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read again for a norm, nor with a factor that changes exponents alone."""
    module, engine = build(normal(torch.float32), **tiers(tmp_path)[1])
    passes: list[int] = []
    take = taken_on_the_way.PowerSums._take
    monkeypatch.setattr(
        taken_on_the_way.PowerSums, "_take", lambda self, *chunk: (passes.append(1), take(self, *chunk))[1]
    )
    engine.grad_norm()
    module().backward()
    engine.model.reducer.settle()
    monkeypatch.setattr("zero_strategy.optim.power_sums.visit", lambda parts, look: parts and pytest.fail("read"))
    assert repr(engine.grad_norm().value) == expected_norm(normal(torch.float32), 2.0)[0]
    assert len(passes) > 4, "the first parameter lies in several chunks"
    engine.scale_gradients(2.0**-20)
    assert repr(engine.grad_norm().value) == expected_norm(normal(torch.float32), 2.0, 2.0**-20)[0]
    engine.close()


def test_chunks_of_tiers_are_cut_between_blocks() -> None:
    assert all(chunk_numel(staging) % block_sums.BLOCK == 0 for staging in range(1 << 16, 1 << 24, 12_345))


def test_a_plain_norm_differs_with_the_order_of_additions() -> None:
    """The norms above would not be equal by themselves."""
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).add_(1e-7).log_()
    cuts = [list(values.split(size)) for size in (100_000, 50_000, 10_080, 1600)]
    plain, exact = ({repr(global_norm(parts, 2.0, [], exact=e).value) for parts in cuts} for e in (False, True))
    assert len(plain) > 1 and len(exact) == 1


# ---- messages ----


def own_parts(case: str, world: int) -> list[Tensor]:
    """This rank's parts of gradients, cut between blocks."""
    found, rank = [], dist.get_rank()
    for values in CASES[case]():
        share = len(values.view(-1)) // world // 32 * 32
        found.append(values.view(-1)[rank * share : None if rank == world - 1 else (rank + 1) * share])
    return found


def seen_by(parts: list[Tensor], order: float, group: Communicator, factors: list[float]) -> tuple[str, str]:
    """The norm, and what is found of the own parts."""
    looks: list[tuple[Tensor, Tensor]] = []
    norm = global_norm(parts, order, [group], factors, lambda *stats: looks.append(stats), exact=True)
    return repr(norm), repr([stats.tolist() for stats in looks[0]])


def by_both_ways(world: int) -> list[list[tuple[str, str]]]:
    """Norms and findings by messages, and by a device's collectives."""
    group = Communicator(dist.group.WORLD, CommunicationCounters())
    found = []
    for group.numbers_on in (None, torch.device("cpu")):
        cases = product(CASES, (*ORDERS, 12.0), ([1.0, 0.5, 1.0, -2.0, 1.0, 1.0], [1.0, 0.5, 1.0, 1.0, math.inf, 1.0]))
        found.append([seen_by(own_parts(case, world), order, group, factors) for case, order, factors in cases])
    return found


def test_exact_norms_by_collectives_have_the_bits_of_messages(ranks: Launcher) -> None:
    norms = []
    for world in (2, 3):
        for messages, collectives in ranks(world)(by_both_ways, world):
            assert messages == collectives
            norms.append([norm for norm, _ in messages])
    assert all(each == norms[0] for each in norms)


def messages_of_a_norm() -> list[int]:
    """Messages of a plain norm and of an exact one."""
    counters = CommunicationCounters()
    group, parts = Communicator(dist.group.WORLD, counters), [torch.ones(64)]
    found = []
    for exact in (False, True):
        before = counters.calls["control"]
        global_norm(parts, 2.0, [group], exact=exact)
        found.append(counters.calls["control"] - before)
    return found


def test_an_exact_norm_takes_as_many_messages(ranks: Launcher) -> None:
    assert ranks(2)(messages_of_a_norm) == [[1, 1]] * 2
