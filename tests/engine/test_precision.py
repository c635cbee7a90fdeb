"""bf16 and fp16 with fp32 master weights, loss scaling that all ranks agree on, and every opt-out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import Net, loss_of, net
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import full_state

STEPS = 4
MICROS = 2
HALVES = [torch.bfloat16, torch.float16]


def engine_for(model: nn.Module, stage: int, dtype: torch.dtype | None, **options: Any) -> ZeroEngine:
    config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=5.0, **options)
    return ZeroEngine(model, config, compute_dtype=dtype)


def data(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def average(values: list[Tensor]) -> list[Tensor]:
    """Over ranks, in rank order."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    return [sum(column[1:], start=column[0]) * (1 / len(parts)) for column in zip(*parts, strict=True)]


def by_hand(dtype: torch.dtype, per_step: bool) -> dict[str, Tensor]:
    """Masters in fp32, a copy of them in `dtype` that computes; gradients are summed and averaged in fp32."""
    masters = net()
    low = net().to(dtype)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.05, foreach=False)
    for step in range(STEPS):
        sums: list[Tensor] = []
        for micro in range(MICROS):
            low.zero_grad()
            loss_of(low(data(MICROS * step + micro, dist.get_rank(), dtype)).float()).backward()
            found = [p.grad.float() for p in low.parameters() if p.grad is not None]
            found = found if per_step else average(found)
            sums = found if not sums else [total + new for total, new in zip(sums, found, strict=True)]
        for p, gradient in zip(masters.parameters(), average(sums) if per_step else sums, strict=True):
            p.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(low.parameters(), masters.parameters(), strict=True):
                p.copy_(q)
    return {name: p.detach().clone() for name, p in masters.named_parameters()}


def by_engine(stage: int, dtype: torch.dtype, made_low: bool) -> dict[str, Any]:
    model = net().to(dtype) if made_low else net()
    engine = engine_for(model, stage, dtype)
    assert all(p.dtype == dtype for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    engine.attach(optimizer)
    engine.use_loss_scaler(None)  # the same gradients with and without
    for step in range(STEPS):
        for micro in range(MICROS):
            loss = loss_of(model(data(MICROS * step + micro, dist.get_rank(), dtype)).float())
            if micro == 0:
                with engine.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = {name: full_state.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    low = engine.full_state_dict()
    assert all(torch.equal(low[name], value.to(dtype)) for name, value in masters.items())
    return {"masters": masters, "bytes": engine.state_bytes()}


def compare_masters(dtype: torch.dtype) -> dict[str, list[str]]:
    wrong = {}
    for stage in (0, 1, 2, 3):
        expected = by_hand(dtype, stage < 2)
        actual = by_engine(stage, dtype, made_low=False)["masters"]
        found = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
        if found:
            wrong[f"stage {stage}"] = found
    return wrong


@pytest.mark.parametrize("dtype", HALVES)
def test_master_weights_equal_training_by_hand(ranks: Launcher, dtype: torch.dtype) -> None:
    for wrong in ranks(2)(compare_masters, dtype):
        assert not wrong


def in_float32() -> dict[str, Tensor]:
    model = net()
    engine = engine_for(model, 2, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    engine.attach(optimizer)
    for step in range(STEPS):
        for micro in range(MICROS):
            loss_of(model(data(MICROS * step + micro, dist.get_rank(), torch.float32))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value for name, value in engine.full_state_dict().items()}


def distances(dtype: torch.dtype) -> float:
    exact, low = in_float32(), by_engine(2, dtype, made_low=False)["masters"]
    moved = sum(float((exact[n] - p.detach()).square().sum()) for n, p in net().named_parameters()) ** 0.5
    apart = sum(float((exact[n] - low[n]).square().sum()) for n in exact) ** 0.5
    return apart / moved


def test_the_trajectory_stays_close_to_float32(ranks: Launcher) -> None:
    for share in ranks(2)(distances, torch.bfloat16):
        assert share < 0.25
    for share in ranks(2)(distances, torch.float16):
        assert share < 0.1


# ----------------------------------------------------------------------------------------------- loss scaling


def scaled_step(engine: ZeroEngine, model: Net, optimizer: torch.optim.Optimizer, step: int, bad: bool) -> bool:
    loss = loss_of(model(data(step, engine.mesh.rank, torch.float16)).float())
    engine.scale_loss(loss * (1e30 if bad else 1.0)).backward()
    finite = engine.unscale_gradients(optimizer)
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert engine.scaler is not None
    engine.scaler.update(finite=finite)
    return finite


def overflow(stage: int, folder: str) -> dict[str, Any]:
    scaling = {"initial": 64.0, "growth_interval": 2, "minimum": 8.0}
    model = net()
    engine = engine_for(model, stage, torch.float16, loss_scale=scaling)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    engine.attach(optimizer)
    assert engine.scaler is not None

    def picture() -> dict[str, Tensor]:
        values = {name: full_state.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        state = engine.full_optimizer_state(optimizer)
        return values | {f"{name} {key}": value for name, entry in state.items() for key, value in entry.items()}

    found: dict[str, Any] = {"taken": [], "scales": [], "same": []}
    for step, bad in enumerate([False, True, False, False, True, True, False]):
        before = picture()
        taken = scaled_step(engine, model, optimizer, step, bad and engine.mesh.rank == 1)
        after = picture()
        found["taken"].append(taken)
        found["scales"].append(engine.scaler.scale)
        same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        found["same"].append(same)
    engine.save(folder)
    other = net(seed=3)
    again = engine_for(other, stage, torch.float16, loss_scale=scaling)
    again.attach(torch.optim.AdamW(other.parameters(), lr=0.01, foreach=False))
    again.load(folder)
    assert again.scaler is not None
    found["restored"] = again.scaler.state_dict() == engine.scaler.state_dict()
    found["skipped"] = engine.scaler.skipped
    try:
        for step in range(5):
            scaled_step(engine, model, optimizer, step, engine.mesh.rank == 0)
    except FloatingPointError as error:
        found["minimum"] = str(error)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Launcher, stage: int, tmp_path: Any) -> None:
    for found in ranks(2)(overflow, stage, str(tmp_path / "saved")):
        assert found["taken"] == [True, False, True, True, False, False, True]
        assert found["scales"] == [64.0, 32.0, 32.0, 64.0, 32.0, 16.0, 16.0]
        assert found["same"] == [False, True, False, False, True, True, False]
        assert found["restored"] and found["skipped"] == 3
        assert "smallest loss scale 8" in found["minimum"]


# --------------------------------------------------------------------------------------------------- opt-outs


class Big(nn.Module):
    """Large enough that padding does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def opted_out(stage: int, precision: dict[str, Any], mesh: dict[str, Any]) -> dict[str, Any]:
    model = Big()
    engine = engine_for(model, stage, torch.bfloat16, precision=precision, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    engine.attach(optimizer)
    for step in range(3):
        engine.counters.reset()
        x = torch.randn(2, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().mean().backward()
        engine.clip_grad_norm_(1.0)
        bytes_now = engine.state_bytes()
        optimizer.step()
        optimizer.zero_grad()
    numel = sum(p.numel() for p in model.parameters())
    state = engine.state_bytes()
    return {
        "parameters": state["parameters"] / numel,
        "optimizer": state["optimizer"] / numel,
        "gradients": bytes_now["gradients"] / numel,
        "reduced": engine.counters.bytes["reduce_scatter"] / numel,
        "gathered": engine.counters.bytes["all_gather"] / numel,
        "finite": all(bool(value.isfinite().all()) for value in engine.full_state_dict().values()),
    }


CASES: list[tuple[int, dict[str, Any], dict[str, float]]] = [
    (3, {}, {"parameters": 1, "optimizer": 6, "gradients": 2, "reduced": 2}),
    (3, {"master_weights": False}, {"parameters": 1, "optimizer": 2, "gradients": 2, "reduced": 2}),
    (3, {"reduce_dtype": "gradient"}, {"parameters": 1, "optimizer": 6, "gradients": 2, "reduced": 2}),
    (2, {"gradient_dtype": "parameter"}, {"parameters": 2, "optimizer": 6, "gradients": 1, "reduced": 2}),
    (
        2,
        {"gradient_dtype": "parameter", "reduce_dtype": "gradient"},
        {"parameters": 2, "optimizer": 6, "gradients": 1, "reduced": 1},
    ),
    (1, {}, {"parameters": 2, "optimizer": 6, "gradients": 2, "reduced": 2}),
    (0, {"gradient_dtype": "parameter", "master_weights": False}, {"parameters": 2, "optimizer": 4, "gradients": 2}),
]
"""Bytes per element on each of two ranks."""


@pytest.mark.parametrize("stage, precision, expected", CASES)
def test_bytes_of_every_opt_out(
    ranks: Launcher, stage: int, precision: dict[str, Any], expected: dict[str, float]
) -> None:
    for found in ranks(2)(opted_out, stage, precision, {}):
        assert found["finite"]
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=0.01), key


# --------------------------------------------------------------------------------------- replicate times shard


def hybrid(stage: int, dtype: torch.dtype | None, folder: str) -> dict[str, Any]:
    """A mesh of 2 x 2 against plain data parallelism over the same four ranks."""
    model, plain = net(), net()
    engine = engine_for(model, stage, dtype, mesh={"replicate": 2})
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    engine.attach(optimizer)
    norms = []
    for step in range(3):
        x = data(step, rank, torch.float32)
        loss_of(model(x.to(dtype or torch.float32)).float()).backward()
        loss_of(plain(x)).backward()
        gradients = average([p.grad for p in plain.parameters() if p.grad is not None])
        for p, gradient in zip(plain.parameters(), gradients, strict=True):
            p.grad = gradient
        norms.append((float(engine.clip_grad_norm_(1.0)), float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    masters = {name: full_state.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    gap = max(float((masters[name] - p.detach()).abs().max()) for name, p in plain.named_parameters())
    from zero_strategy.fsdp.gathered_parameters import GatheredParameters

    with GatheredParameters(model.head.bias, modifier_rank=3), torch.no_grad():
        model.head.bias.fill_(float(rank))
    state = engine.full_state_dict()
    engine.save(folder)
    other = net(seed=5)
    again = engine_for(other, 1, dtype)
    again.attach(torch.optim.AdamW(other.parameters(), lr=0.5))
    again.load(folder)
    back = again.full_state_dict()
    return {
        "gap": gap,
        "norms": norms,
        "bias": state["head.bias"].tolist(),
        "back": all(torch.equal(value, back[name]) for name, value in state.items()),
        "states": again.full_optimizer_state(again.optimizers[0].optimizer),
        "expected": engine.full_optimizer_state(optimizer),
        "state": state,
    }


@pytest.mark.parametrize(("stage", "dtype"), [(1, None), (2, torch.bfloat16), (3, None), (3, torch.bfloat16)])
def test_hybrid_sharding_on_four_ranks(ranks: Launcher, stage: int, dtype: Any, tmp_path: Any) -> None:
    results = ranks(4)(hybrid, stage, dtype, str(tmp_path / "saved"))
    for found in results:
        assert found["gap"] <= (1e-5 if dtype is None else 0.05)
        for ours, theirs in found["norms"]:
            assert ours == pytest.approx(theirs, rel=1e-5 if dtype is None else 0.05)
        assert found["bias"] == [3.0, 3.0, 3.0]
        assert found["back"], "a checkpoint of a mesh loads without one"
        assert all(torch.equal(v, results[0]["state"][n]) for n, v in found["state"].items()), "replicas are equal"
        for name, entry in found["expected"].items():
            loaded = found["states"][name]
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(loaded[key])) for key, v in entry.items())


def test_bytes_of_hybrid_sharding(ranks: Launcher) -> None:
    """State is divided by the shard axis; what is sent is a reduce-scatter there and an all-reduce of a slice."""
    for found in ranks(4)(opted_out, 3, {}, {"replicate": 2}):
        assert found["parameters"] == pytest.approx(1, rel=0.01)
        assert found["optimizer"] == pytest.approx(6, rel=0.01)
        # fp32: half of the bucket within the row, then half of the slice to the replica, and back in the all-gather.
        assert found["reduced"] == pytest.approx(4 / 2 + 4 / 4, rel=0.01)
        assert found["gathered"] <= (2 * 2 / 2 + 4 / 4) * 1.01
