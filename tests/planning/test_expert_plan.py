"""The plan of a model whose experts ranks divide is what the engine then holds, entry by entry, to the byte."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import loss_of, seeded
from tests.launcher import Launcher
from tests.planning.models import Mixture, Stack
from tests.planning.test_command import MODELS, as_json, run
from tests.planning.test_ledger import peaks_of_step
from zero_strategy.config import UnitsConfig, load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.layout import build_layout
from zero_strategy.planning.changes import changes_that_fit, gather_advice
from zero_strategy.planning.gpt_shape import gpt_shape
from zero_strategy.planning.ledger import COMMUNICATORS, Entry
from zero_strategy.planning.memory_plan import ASSUMED_COMMUNICATOR_BYTES, MemoryPlan
from zero_strategy.planning.model_shape import ModelShape
from zero_strategy.planning.room import Budget

MIXTRAL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def mixtral() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**MIXTRAL)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def wide() -> nn.Module:
    """Slices, and what is sent to experts, are large enough for memory that ranks of a host share."""
    return Mixture(8, 192, 2, rows=300)


BUILDERS: dict[str, Any] = {"mixture": Mixture, "mixtral": mixtral, "wide": wide}


@dataclass(frozen=True)
class Case:
    model: str
    stage: int
    dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    expert: int = 2
    replicate: int = 1
    accumulation: int = 1

    def config(self) -> Any:
        mesh = {"expert": self.expert, "replicate": self.replicate}
        return load_config(stage=self.stage, units={"min_numel": 0}, mesh=mesh, **self.options)


def forward(model: nn.Module) -> Tensor:
    found: Tensor
    if isinstance(model, Mixture):
        rows, width, dtype = model.rows, model.width, next(model.parameters()).dtype
        found = model(torch.linspace(-1, 1, rows * width, dtype=dtype).view(rows, width))
    else:
        found = model(input_ids=torch.arange(14).view(2, 7)).logits
    return found


def trained(case: Case) -> tuple[ZeroEngine, Any]:
    model = seeded(BUILDERS[case.model])
    engine = ZeroEngine(model, case.config(), compute_dtype=case.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        for left in reversed(range(case.accumulation)):
            with engine.no_sync() if left else nullcontext():
                loss_of(forward(model)).backward()
        optimizer.step()
    return engine, optimizer


def planned(case: Case, world: int, **options: Any) -> MemoryPlan:
    with torch.device("meta"):
        model = BUILDERS[case.model]()
    options = {"device": "cpu", "snapshots": False, "accumulation": case.accumulation} | options
    return case.config().plan(model, world_size=world, compute_dtype=case.dtype, **options)


def compared(cases: list[Case]) -> list[tuple[list[Entry], list[Entry]]]:
    """By case: held entries of the engine and of the plan."""
    found = []
    for case in cases:
        engine, optimizer = trained(case)
        plan = planned(case, dist.get_world_size(), optimizer=optimizer)
        found.append((engine.ledger().merged(), plan.ledger(dist.get_rank()).held().merged()))
    return found


def check(found: list[Any], cases: list[Case]) -> None:
    for rank, results in enumerate(found):
        for case, (held, foreseen) in zip(cases, results, strict=True):
            assert sum(entry.taken for entry in held) > 0
            assert held == foreseen, (rank, case)


STAGES = [0, 1, 2, 3]
BF16 = torch.bfloat16
TO_HOST = {"offload": {"optimizer": "cpu"}}
ALL_TO_HOST = {"offload": {"optimizer": "cpu", "parameters": "cpu"}}


@pytest.mark.parametrize("model", ["mixture", "mixtral"])
def test_a_plan_of_experts_is_the_ledger_to_the_byte(ranks: Launcher, model: str) -> None:
    cases = [Case(model, stage, dtype) for stage in STAGES for dtype in (None, BF16)]
    cases += [Case(model, 2, BF16, TO_HOST), Case(model, 3, BF16, ALL_TO_HOST)]
    cases += [Case(model, 1, BF16, accumulation=2), Case(model, 3, BF16, {"reshard_after_backward": False})]
    check(ranks(2)(compared, cases), cases)


def test_those_with_the_same_experts_shard_them(ranks: Launcher) -> None:
    cases = [Case("mixture", stage, dtype) for stage, dtype in ((1, None), (2, BF16), (3, BF16))]
    cases += [Case("mixture", stage, BF16, replicate=2) for stage in (0, 2, 3)]
    cases += [Case("mixture", 3, BF16, ALL_TO_HOST), Case("mixture", 3, expert=4)]
    cases += [Case("wide", 2, BF16), Case("wide", 3)]
    check(ranks(4)(compared, cases), cases)


def test_optimizer_state_in_files(ranks: Launcher, tmp_path: Path) -> None:
    files = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path)}
    cases = [Case("mixture", 3, BF16, {"offload": files}), Case("mixtral", 3, BF16, {"offload": files})]
    cases += [Case("mixture", 2, None, {"offload": {**files, "parameters": "none"}})]
    check(ranks(2)(compared, cases), cases)


def saved(case: Case, path: str) -> tuple[list[Entry], list[Entry]]:
    engine, optimizer = trained(case)
    engine.save(path, asynchronous=True).wait()
    plan = planned(case, dist.get_world_size(), optimizer=optimizer, snapshots=True)
    found = engine.ledger().merged(), plan.ledger(dist.get_rank()).held().merged()
    engine.close()
    return found


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_snapshots(ranks: Launcher, tmp_path: Path, tier: str) -> None:
    tiers = {"optimizer": tier, "parameters": tier, "nvme_path": str(tmp_path / "tier")}
    case = Case("mixture", 3, BF16, {"offload": tiers})
    for held, foreseen in ranks(2)(saved, case, str(tmp_path / "saved")):
        assert any(entry.category == "snapshot" for entry in held)
        assert [replace(e, asked=0) for e in held] == [replace(e, asked=0) for e in foreseen]  # of copies it is taken


def padded(shapes: list[tuple[int, ...]], slices: int, itemsize: int = 4) -> int:
    """Elements of a bucket of these parameters, divided into so many slices."""
    return build_layout([(str(n), shape) for n, shape in enumerate(shapes)], itemsize, slices).numel


@pytest.mark.parametrize(("world", "expert"), [(4, 2), (8, 2), (8, 8)])
def test_dense_parameters_over_all_ranks_and_experts_over_all_ranks(world: int, expert: int) -> None:
    """At stage 3 with AdamW in bf16 a rank holds 18 bytes per element: weight, gradient, master, two moments."""
    depth, count, width = 3, 8, 10
    with torch.device("meta"):
        model = Mixture(count, width, depth)
    config = load_config(stage=3, units={"min_numel": 0}, mesh={"expert": expert})
    plan = config.plan(model, world_size=world, compute_dtype=BF16, device="cpu", snapshots=False)
    dense = depth * padded([(width, width), (width,), (count, width)], world, 2) + padded([(3, width), (3,)], world, 2)
    held = count // expert
    experts = depth * padded([(held, width, width), (held, width)], world // expert, 2)
    ledger = plan.ledger(0).held()
    kinds = {"parameters": 2, "gradients": 4, "master weights": 4}
    sums = {category: taken.taken for (category,), taken in ledger.sums("category").items()}
    for category, nbytes in kinds.items():
        assert sums[category] == nbytes * (dense // world + experts // (world // expert)), category
    asked = sum(plan.ledger(rank).held().only(category="parameters").total.asked for rank in range(world))
    assert asked == 2 * sum(parameter.numel() for parameter in model.parameters()), "each element once"
    # Two units and the root are whole at a time; of experts what this rank has, unless it has no need to gather them.
    gathered = plan.ledger(0).only(category="gather buffers").total.taken
    window = 2 * (dense - padded([(3, width), (3,)], world, 2)) // depth + padded([(3, width), (3,)], world, 2)
    assert gathered == 2 * (window + (2 * experts // depth if world > expert else 0))


def peaks(stage: int, expert: int) -> dict[str, int]:
    torch.manual_seed(0)
    model = Mixture()
    config = load_config(stage=stage, units={"min_numel": 0}, mesh={"expert": expert})
    return peaks_of_step(model, config, torch.linspace(-1, 1, 60).view(6, 10))


@pytest.mark.parametrize("world", [2, 4])
def test_peaks_with_experts_are_reached_and_not_passed(ranks: Launcher, world: int) -> None:
    for stage in (1, 2, 3):
        for found in ranks(world)(peaks, stage, 2):
            assert found["gather"] == found["planned gather"], (stage, found)
            assert (found["in place"] > 0) == (stage == 3 and world == 2), "experts that nobody else has are there"
            assert 0.5 * found["planned local"] <= found["local"] <= found["planned local"], (stage, found)


def test_communicators_of_nccl() -> None:
    def groups(world: int, **mesh: int) -> float:
        plan = load_config(stage=2, mesh=mesh).plan(Mixture(), world_size=world, device="cuda")
        found = plan.ledger().only(category="communication")
        assert {entry.owner for entry in found} <= {COMMUNICATORS}
        return found.total.taken / ASSUMED_COMMUNICATOR_BYTES

    assert groups(4) == 2
    assert groups(4, expert=4) == 3, "the ranks that divide experts"
    assert groups(4, expert=2) == 5, "two more for those that have the same ones"
    assert groups(8, expert=2, replicate=2) == 6


class Divided(Mixture):
    """Says of itself what cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_plan = {"blocks.*": "unheard_of"}


@pytest.mark.parametrize(
    ("build", "expert", "message"),
    [
        (Stack, 2, r"mesh\.expert is 2 \[.*\], and Stack has no layer of experts.*Leave mesh\.expert at 1"),
        (Mixture, 3, r"mesh\.expert is 3 \[.*\], which does not divide the 4 experts of blocks\.0\.experts"),
        (Divided, 2, r"Divided's ep_plan for blocks\.\* is 'unheard_of'.*leave mesh\.expert at 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_as_by_the_engine(
    ranks: Launcher, build: Any, expert: int, message: str
) -> None:
    config = load_config(stage=2, mesh={"expert": expert})
    with pytest.raises(ValueError, match=message) as planned:
        config.plan(build(), world_size=expert, device="cpu")
    for said in ranks(expert)(refusal, build, config):
        assert said == str(planned.value)
    load_config(stage=2).plan(build(), world_size=expert, device="cpu")  # of no concern to whoever divides none


def refusal(build: Any, config: Any) -> str:
    with pytest.raises(ValueError) as refused:
        ZeroEngine(build(), config)
    return str(refused.value)


def test_experts_that_tensor_parallelism_divides_are_refused() -> None:
    shape = replace(ModelShape.of(Mixture(), UnitsConfig(min_numel=0)), divided={"blocks.1.experts.weight": 1})
    config = load_config(stage=3, mesh={"expert": 2, "tensor": 2})
    with pytest.raises(ValueError, match=r"mesh\.tensor divides experts of blocks\.1\.experts, too"):
        config.plan(shape, world_size=4, device="cpu")
    beside = replace(shape, divided={"blocks.1.dense.weight": 0})
    plan = config.plan(beside, world_size=4, device="cpu", snapshots=False)
    found = [entry for rank in (0, 2) for entry in plan.ledger(rank).only(category="parameters")]
    asked = {entry.owner.names[-1]: 0 for entry in found}
    for entry in found:
        asked[entry.owner.names[-1]] += entry.asked
    assert asked["blocks.1.router.weight"] == 4 * (100 / 2 + 10 + 40), "of the dense ones, half of a matrix"
    assert asked["blocks.1.experts.bias"] == 4 * (400 + 40)


def divided_already() -> str:
    model = Mixture()
    engine = ZeroEngine(model, load_config(stage=2, mesh={"expert": 2}))
    with pytest.raises(ValueError) as refused:
        load_config(stage=2).plan(model, world_size=2, device="cpu")
    engine.close(gather=True)
    load_config(stage=2, mesh={"expert": 2}).plan(model, world_size=2, device="cpu")
    return str(refused.value)


def test_a_model_that_an_engine_has_divided_is_no_whole_one(ranks: Launcher) -> None:
    for said in ranks(2)(divided_already):
        assert "divide the experts of blocks.0.experts already" in said and "meta device" in said


def test_plain_numbers_have_no_experts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"mesh\.expert is 2.*--params.*without experts.*leave mesh\.expert at 1"):
        load_config(mesh={"expert": 2}).plan(gpt_shape(64, 2, 512), world_size=2)
    status, _, said = run(capsys, "--params", "1e8", "--world", "2", "--expert", "2")
    assert status == 2 and "mesh.expert is 2" in said and "config.json" in said
    status, _, said = run(capsys, f"{MODELS}:Mixture", "--world", "6", "--expert", "4")
    assert status == 2 and "mesh.expert is 4" in said and "divisor of the 6 ranks" in said


def test_the_plan_command_knows_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    mixtral().config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    options = ("--world", "4", "--expert", "2", "--dtype", "bf16", "--device", "cpu", "--no-snapshots")
    status, found = as_json(capsys, str(path), *options, "--host-mem", "1GB")
    assert status == 0 and found["settings"]["mesh"] == {"replicate": 1, "shard": 4, "tensor": 1, "expert": 2}
    with torch.device("meta"):
        model = mixtral()
    plan = load_config(stage=3, mesh={"expert": 2}).plan(
        model, world_size=4, compute_dtype=BF16, device="cpu", snapshots=False, ranks_per_host=4
    )
    assert found["ledger"] == json.loads(json.dumps(plan.ledger().to_json()))
    _, out, _ = run(capsys, f"{MODELS}:Mixture", *options, "--host-mem", "1GB")
    assert "4, 4 per host, experts divided among 2" in out


def test_changes_leave_the_experts_as_they_are() -> None:
    shape = ModelShape.of(wide())
    now = load_config(stage=1, mesh={"expert": 2}).plan(
        shape, world_size=2, compute_dtype=BF16, device="cuda", snapshots=False
    )
    now = now.changed(communicator_bytes=0)
    needed = now.ledger().tier_bytes("device")
    budget = Budget(device=int(0.9 * needed), host=1 << 40, disk=1 << 40, gpus=3, margin=0.0)
    found = changes_that_fit(now, budget)
    assert found and all(change.plan.resolved.config.mesh.expert == 2 for change in found)
    assert all(change.plan.resolved.world_size % 2 == 0 for change in found)


def test_a_link_carries_slices_of_experts_to_those_that_have_them() -> None:
    found = []
    for expert in (1, 4):
        config = load_config(stage=2, mesh={"expert": expert})
        plan = config.plan(Mixture(), world_size=4, compute_dtype=BF16, device="cpu")
        found.append(float(re.search(r"values take about (\S+) s", gather_advice(plan, 1e-6)).group(1)))  # type: ignore[union-attr]
    dense = sum(p.numel() for name, p in Mixture().named_parameters() if "experts" not in name)
    every = sum(p.numel() for p in Mixture().parameters())
    assert found == [float(f"{count * 3 / 4 * 16 / 1e3:.2g}") for count in (every, dense)]
