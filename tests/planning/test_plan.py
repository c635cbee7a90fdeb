"""The plan of a model on the meta device is what the engine then holds, entry by entry, to the byte."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.live import live_bytes, only_new
from tests.engine.nets import Block, loss_of, seeded
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import FusedLion
from zero_strategy.planning.ledger import Entry
from zero_strategy.planning.model_shape import ModelShape, optimizer_state, state_of

WIDTH = 10


class Odd(nn.Module):
    """Tied, odd-sized, frozen, 0-d and empty parameters, two dtypes, buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.position = nn.Parameter(torch.randn(7, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, WIDTH))
        self.register_buffer("version", torch.tensor(1))
        self.register_buffer("cache", torch.ones(5), persistent=False)
        self.blocks[1].norm.bias.requires_grad_(False)  # type: ignore[union-attr]
        for parameter in self.blocks[3].parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.scale.to(x.dtype)
        return out.float() + self.empty.sum().float() + self.wide.sum().float()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "lion bf16": lambda p: FusedLion(p, lr=1e-3, moment_dtype="bfloat16"),
}


@dataclass(frozen=True)
class Case:
    stage: int
    dtype: torch.dtype | None = None
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    average: bool = False

    def __str__(self) -> str:
        return f"{self.stage} {self.dtype} {self.optimizer} {self.options} {self.accumulation} {self.average}"


def trained(case: Case) -> tuple[ZeroEngine, Any]:
    model = seeded(Odd)
    config = load_config(stage=case.stage, units={"min_numel": 0}, **case.options)
    engine = ZeroEngine(model, config, compute_dtype=case.dtype)
    optimizer = OPTIMIZERS[case.optimizer](p for p in model.parameters() if p.requires_grad)
    engine.attach(optimizer)
    if case.average:
        engine.average_weights()
    tokens = torch.arange(14).view(2, 7) % 13
    for _ in range(2):
        optimizer.zero_grad()
        for micro in range(2):  # both are reduced, but where there is accumulation
            with nullcontext() if case.accumulation == 1 or micro else engine.no_sync():
                loss_of(model(tokens)).backward()
        optimizer.step()
    return engine, optimizer


def planned(case: Case, optimizer: torch.optim.Optimizer) -> list[Entry]:
    with torch.device("meta"):
        model = Odd()
    plan = load_config(stage=case.stage, units={"min_numel": 0}, **case.options).plan(
        model,
        world_size=dist.get_world_size(),
        compute_dtype=case.dtype,
        optimizer=replace(state_of(optimizer), average=case.average),
        device="cpu",
        snapshots=False,
        accumulation=case.accumulation,
    )
    return plan.ledger(dist.get_rank()).held().merged()


def compared(cases: list[Case]) -> list[tuple[list[Entry], list[Entry]]]:
    """By case: held entries of the engine and of the plan."""
    found = []
    for case in cases:
        engine, optimizer = trained(case)
        found.append((engine.ledger().merged(), planned(case, optimizer)))
    return found


def check(found: list[Any], cases: list[Case]) -> None:
    for rank, results in enumerate(found):
        for case, (held, foreseen) in zip(cases, results, strict=True):
            assert sum(entry.taken for entry in held) > 0
            assert held == foreseen, (rank, str(case))


def ledger_and_live(case: Case) -> tuple[int, int]:
    """Bytes of the ledger, and of all tensors there are."""
    with only_new():
        before = live_bytes()
        engine, optimizer = trained(case)
        taken = engine.ledger().total.taken
        live = live_bytes() - before
        assert optimizer.param_groups
    return taken, live


STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_plan_is_the_ledger_to_the_byte(ranks: Launcher, world: int) -> None:
    cases = [
        Case(stage, dtype, accumulation=accumulation)
        for stage in STAGES
        for dtype in (None, torch.bfloat16)
        for accumulation in ((1, 2) if stage == 1 else (1,))
    ]
    waiting = {"gradient_reduction": "per_step"}
    cases += [Case(stage, options=waiting, accumulation=count) for stage in (2, 3) for count in (1, 2)]
    cases += [
        Case(stage, dtype, average=True) for stage, dtype in ((0, None), (1, torch.bfloat16), (3, torch.bfloat16))
    ]
    packed = {"matrix_optimizers": ["Muon"]}
    cases += [Case(1, None, options=packed), Case(3, torch.bfloat16, options=packed)]
    cases += [Case(2, torch.bfloat16, options={"matrix_parameters": ["*.weight"]})]
    cases += [Case(3, dtype, options={"reshard_after_backward": False}) for dtype in (None, torch.bfloat16)]
    if world == 2:
        cases += [Case(1, options={"mesh": {"replicate": 2}}, accumulation=count) for count in (1, 2)]
    else:  # half of them on one rank, which divides nothing, and the others on three, which divide unevenly
        cases = cases[world // 2 :: 2]
    check(ranks(world)(compared, cases), cases)


def random_runs(seeds: list[int]) -> list[tuple[list[Entry], list[Entry]]]:
    """Sizes, frozen parameters, units, stages, reductions and precisions by chance, alike on all ranks."""
    found = []
    for seed in seeds:
        chance = random.Random(seed)
        sizes = [chance.randint(1, 70) for _ in range(chance.randint(3, 7))]
        frozen = [chance.random() < 0.25 for _ in sizes]
        stage, dtype = chance.randint(0, 3), chance.choice([None, torch.bfloat16])
        config = load_config(
            stage=stage,
            gradient_reduction=chance.choice([None, "per_step", "per_micro_batch"]),
            units={"min_numel": chance.choice([0, 500, 10**6])},
            precision={"gradient_dtype": chance.choice(["float32", "parameter"]), "master_weights": seed % 2 == 0},
        )

        def build(sizes: list[int] = sizes, frozen: list[bool] = frozen) -> nn.Module:
            layers = [nn.Linear(a, b, bias=b % 2 == 0) for a, b in itertools.pairwise(sizes)]
            for layer, fixed in zip(layers[1:], frozen):
                layer.requires_grad_(not fixed)
            return nn.Sequential(*layers)

        model = build()
        engine = ZeroEngine(model, config, compute_dtype=dtype)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
        engine.attach(optimizer)
        model(torch.ones(2, sizes[0], dtype=dtype)).float().sum().backward()
        optimizer.step()
        with torch.device("meta"):
            shape = build()
        options = {"world_size": dist.get_world_size(), "compute_dtype": dtype, "optimizer": optimizer}
        plan = config.plan(shape, device="cpu", snapshots=False, **options)
        found.append((engine.ledger().merged(), plan.ledger(dist.get_rank()).held().merged()))
    return found


def test_random_models(ranks: Launcher) -> None:
    for results in ranks(3)(random_runs, list(range(12))):
        for seed, (held, foreseen) in enumerate(results):
            assert held == foreseen, seed


@pytest.mark.parametrize("stage", STAGES)
def test_no_tensor_is_missing(ranks: Launcher, stage: int) -> None:
    for taken, live in ranks(2)(ledger_and_live, Case(stage, torch.bfloat16)):
        assert abs(live - taken) < 600  # what is left are tiny tensors of hooks and messages


def test_both_reductions_and_precisions(ranks: Launcher) -> None:
    """A stage's own reduction with plain low precision is in `test_plan_is_the_ledger_to_the_byte`."""
    cases = []
    for stage in STAGES:
        for reduction in ("per_step", "per_micro_batch"):
            if (reduction == "per_step") != (stage < 2):
                cases.append(Case(stage, torch.bfloat16, options={"gradient_reduction": reduction}))
            precision = {"gradient_dtype": "parameter", "reduce_dtype": "float32", "master_weights": False}
            cases.append(Case(stage, torch.bfloat16, "sgd", {"gradient_reduction": reduction, "precision": precision}))
    check(ranks(3)(compared, cases), cases)


def test_optimizers(ranks: Launcher) -> None:
    cases = [Case(stage, None, name) for stage in (0, 2) for name in OPTIMIZERS if name != "lion bf16"]
    cases += [Case(stage, torch.bfloat16, "lion bf16") for stage in (1, 3)]
    check(ranks(2)(compared, cases), cases)


def test_replicas(ranks: Launcher) -> None:
    cases = [Case(stage, torch.bfloat16, options={"mesh": {"replicate": 2}}) for stage in STAGES]
    check(ranks(4)(compared, cases), cases)


@pytest.mark.parametrize(
    ("build", "moments"),
    [
        (torch.optim.Adadelta, 2), (torch.optim.Adagrad, 1), (torch.optim.Adam, 2), (torch.optim.Adamax, 2),
        (torch.optim.AdamW, 2), (torch.optim.ASGD, 1), (torch.optim.NAdam, 2), (torch.optim.RAdam, 2),
        (torch.optim.RMSprop, 1), (torch.optim.Rprop, 2), (torch.optim.SGD, 0),
    ],
)  # fmt: skip
def test_table_of_states_is_what_torch_keeps(build: Any, moments: int) -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = build([parameter], lr=0.1)
    parameter.grad = torch.ones(5)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    known = state_of(optimizer)
    assert sum(value.numel() == 5 for value in kept) == known.moments == moments
    assert sum(value.numel() * value.itemsize for value in kept if value.dim() == 0) == known.scalar_bytes


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match=r"'Shampoo' is not known.*adamw.*OptimizerState"):
        optimizer_state("Shampoo")


def saved(cases: list[Case], directory: str) -> list[list[list[Entry]]]:
    """By case: entries of a snapshot in the ledger and in the plan."""
    found = []
    for number, case in enumerate(cases):
        engine, optimizer = trained(case)
        engine.save(f"{directory}/{number}", asynchronous=True).wait()
        with torch.device("meta"):
            model = Odd()
        plan = load_config(stage=case.stage, units={"min_numel": 0}, **case.options).plan(
            model, world_size=dist.get_world_size(), compute_dtype=case.dtype, optimizer=optimizer, device="cpu"
        )
        ledgers = engine.ledger().merged(), plan.ledger(dist.get_rank()).held().merged()
        found.append([[entry for entry in entries if entry.category == "snapshot"] for entries in ledgers])
        engine.detach()
    return found


def test_snapshot_of_a_save_in_the_background(ranks: Launcher, tmp_path: Path) -> None:
    common = {"nvme_path": [str(tmp_path / "state")], "staging_bytes": 1 << 16, "probe_seconds": 0}
    in_files = [tiers for tiers in TIERS if "nvme" in tiers.values()][1::3]
    cases = [Case(0, None), Case(3, torch.bfloat16)]
    cases += [Case(3, torch.bfloat16, options={"offload": common | tiers}) for tiers in in_files]
    cases += [Case(stage, torch.bfloat16, options={"offload": common | {"optimizer": "nvme"}}) for stage in (0, 2)]
    reference = {"checkpoint": {"frozen": "reference"}}
    cases += [Case(stage, torch.bfloat16, options=reference) for stage in (1, 3)]
    cases += [Case(3, torch.bfloat16, options={"offload": common | in_files[0], **reference})]
    for results in ranks(2)(saved, cases, str(tmp_path / "saved")):
        for case, (held, foreseen) in zip(cases, results, strict=True):
            in_memory = "offload" not in case.options
            assert [(each.tier, each.taken) for each in held] == [(each.tier, each.taken) for each in foreseen], case
            assert in_memory or held == foreseen, str(case)
            assert [each.tier for each in held] == ["host" if in_memory else "nvme"] and held[0].taken > 0


TIERS = [
    {"optimizer": "cpu"},
    {"optimizer": "nvme"},
    {"optimizer": "cpu", "parameters": "cpu"},
    {"optimizer": "nvme", "parameters": "cpu"},
    {"optimizer": "nvme", "parameters": "nvme"},
    {"optimizer": "cpu", "optimizer_ratio": 0.3},
    {"optimizer": "nvme", "gradients": "cpu"},
    {"optimizer": "cpu", "gradients": "nvme"},
    {"optimizer": "nvme", "gradients": "none"},
    {"optimizer": "nvme", "optimizer_ratio": 0.6, "parameters": "nvme"},
    {"optimizer": "nvme", "optimizer_ratio": 0.6, "gradients": "cpu"},
    {"optimizer": "nvme", "resident_bytes": 60_000},
    {"optimizer": "nvme", "parameters": "nvme", "resident_bytes": 30_000},
    {"optimizer": "nvme", "parameters": "nvme", "resident_bytes": 90_000, "optimizer_ratio": 0.6},
    {"optimizer": "cpu", "parameters": "nvme", "resident_bytes": 20_000},
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_offloaded_is_planned(ranks: Launcher, tmp_path: Path, world: int) -> None:
    """Every tier on two ranks; on others, a third of them. The optimizers by turns, so that each tier is with both."""
    common = {"nvme_path": [str(tmp_path)], "staging_bytes": 1 << 19, "probe_seconds": 0}
    both = ["adamw", "lion bf16"]
    cases = [
        Case(stage, torch.bfloat16, both[(number + stage + world) % 2], {"offload": common | tiers})
        for stage in (1, 2, 3)
        for number, tiers in enumerate(TIERS)
        if world == 2 or number % 3 == world // 2
        if (stage == 3 or "parameters" not in tiers) and (stage > 1 or "gradients" not in tiers)
    ]
    if world == 2:  # these have parameters off the device, so stage 3 alone, and are in the third of two ranks
        cases += [Case(3, torch.bfloat16, both[number % 2], {"offload": common | TIERS[number]}) for number in (2, 14)]
    own = {"offload": common | {"optimizer": "nvme", "parameters": "nvme", "resident_bytes": 40_000}}
    cases += [Case(3, torch.bfloat16, name, own) for name in ("amsgrad", "nadam")]
    cases += [Case(3, torch.bfloat16, options={"offload": common | tiers}, average=True) for tiers in TIERS[1:7:3]]
    check(ranks(world, timeout=180)(compared, cases), cases)


def test_gradients_on_their_way_to_the_host_are_planned_on_a_device() -> None:
    """Those of the largest bucket; where micro-batches are added, with the sum that they are added to."""
    model = nn.Sequential(*[nn.Linear(64 * wide, 64, bias=False) for wide in (1, 3, 2)])
    shape = ModelShape.of(model)

    def planned(device: str, accumulation: int, gradients: str) -> int:
        offload = {"optimizer": "cpu", "gradients": gradients}
        config = load_config(stage=2, units={"classes": ["Linear"], "min_numel": 0}, offload=offload)
        ledger = config.plan(shape, device=device, accumulation=accumulation).ledger()
        return sum(entry.asked for entry in ledger if entry.owner.unit == "on their way to the host")

    largest = 3 * 64 * 64 * 4
    assert planned("cuda", 1, "cpu") == largest
    assert planned("cuda", 4, "cpu") == 2 * largest
    assert planned("cuda", 4, "none") == planned("cpu", 4, "cpu") == 0
