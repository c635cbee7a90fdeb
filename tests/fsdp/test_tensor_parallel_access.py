"""Parts of a divided model that users access: full gradients, states, weights; precision, tiers, meta tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.engine.divided import MICRO_BATCHES, adamw, gpt, loss_of, tokens, train_plain
from tests.fsdp.test_tensor_parallel import begin, run_steps
from tests.launcher import Launcher
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.compat.megatron.diagnostics import replica_report
from zero_strategy.config import load_config
from zero_strategy.diagnostics.norms import ParameterNorms
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.fsdp.init import Init
from zero_strategy.optim import full_state

WATCHED = ("blocks.0.up.weight", "blocks.1.down.weight", "embed.weight", "norm.weight", "position")
"""Divided along the first dimension, along the second, unevenly, and not at all."""


def close(found: Tensor, expected: Tensor) -> None:
    assert type(found) in (Tensor, nn.Parameter), type(found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def plain_step() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Gradients of the mean over two copies, and Adam's state after a step with them."""
    model = gpt()
    for number in range(2):
        for micro in range(MICRO_BATCHES):
            (loss_of(model, tokens(number, 0, micro)) / 2).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer = adamw(model)
    optimizer.step()
    return gradients, optimizer.state_dict()


def gradients_and_states(stage: int, expected: dict[str, Tensor], state: dict[str, Any]) -> None:
    model, engine, optimizer, copy_ = begin(stage)
    watched = {name: dict(model.named_parameters())[name] for name in WATCHED}
    for micro in range(MICRO_BATCHES):
        loss_of(model, tokens(copy_, 0, micro)).backward()
    for name, parameter in watched.items():
        grad = parameter.grad
        assert grad is not None and grad.shape == parameter.shape
        if isinstance(grad, DTensor):
            assert stage == 0 and grad.placements == parameter.placements
            grad = grad.full_tensor()
        close(grad * 1.0, expected[name])
        found = full_state.safe_get_full_grad(parameter)
        assert found is not None
        close(found, expected[name])
    norms = ParameterNorms(engine)
    engine.grad_norm()
    each = norms.gradients()
    assert set(each) == {f"zero/gradient_norm/{name}" for name in expected}
    for name, grad in expected.items():
        torch.testing.assert_close(each[f"zero/gradient_norm/{name}"], float(grad.norm()), rtol=1e-5, atol=1e-8)
    norms.close()
    assert not replica_report(model).differences
    largest = max(float(grad.abs().max()) for grad in expected.values())
    torch.testing.assert_close(engine.grad_norm(float("inf")).value, largest, rtol=1e-5, atol=0.0)
    optimizer.step()
    whole = engine.optimizer_state_dict(optimizer)
    for number, values in state["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            close(whole["state"][number][key], values[key])
    doubled = copy.deepcopy(whole)
    for values in doubled["state"].values():
        values["exp_avg"] *= 2
    engine.load_optimizer_state_dict(optimizer, doubled)
    for name, parameter in watched.items():
        found = full_state.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert found is not None
        close(found, engine.full_optimizer_state(optimizer)[name]["exp_avg"])
        full_state.safe_set_full_optimizer_state(parameter, torch.ones(parameter.shape), "exp_avg")
        found = full_state.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert found is not None and found.equal(torch.ones(parameter.shape))
    if stage == 0:
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        held = sum(entry.asked for entry in engine.ledger().merged() if entry.category == "parameters")
        assert held == 4 * sum(part.numel() for part in parts)
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in watched.values())


def assigned_gradients(stage: int) -> None:
    """A full gradient, and a `DTensor`; what is written is what a step uses."""
    model, engine, _, copy_ = begin(stage)
    loss_of(model, tokens(copy_, 0, 0)).backward()
    for name in WATCHED:
        parameter = dict(model.named_parameters())[name]
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        full_state.safe_set_full_grad(parameter, values)
        close(full_state.safe_get_full_grad(parameter), values)  # type: ignore[arg-type]
        parameter.grad = torch.ones(parameter.shape)
        close(full_state.safe_get_full_grad(parameter), torch.ones(parameter.shape))  # type: ignore[arg-type]
        if isinstance(parameter, DTensor):
            local = torch.full(parameter.to_local().shape, 3.0)
            parameter.grad = DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
            close(full_state.safe_get_full_grad(parameter), 3 * torch.ones(parameter.shape))  # type: ignore[arg-type]
    engine.reset()


def weights(stage: int) -> None:
    model, engine, _, _ = begin(stage)
    state = model.state_dict()
    plain = gpt().state_dict()
    for name, value in state.items():
        close(value.full_tensor() if isinstance(value, DTensor) else value, plain[name])
    model.load_state_dict({name: value.detach() * 2.0 for name, value in state.items()})
    for name, value in engine.full_state_dict().items():
        close(value, plain[name] * 2.0)
    for name in WATCHED:
        parameter = dict(model.named_parameters())[name]
        full_state.safe_set_full_fp32_param(parameter, plain[name])
        close(full_state.safe_get_full_fp32_param(parameter), plain[name])
    up = model.blocks[0].up.weight
    with GatheredParameters([up], modifier_rank=0), torch.no_grad():
        up.fill_(0.5)
    close(engine.full_state_dict()["blocks.0.up.weight"], torch.full(up.shape, 0.5))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


PLAN = {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}


def from_meta(stage: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with Init():
        model = Mlp()
    parallelize_module(model, make_device_mesh("cpu", tensor=2)["tp"], PLAN)
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    return engine.full_state_dict()


def one_that_overflows(stage: int) -> list[Any]:
    """fp16; one rank's part of one gradient is infinite: no rank takes the step."""
    torch.manual_seed(3)
    model = Mlp()
    parallelize_module(model, make_device_mesh("cpu", tensor=2)["tp"], PLAN)
    spoilt = [torch.distributed.get_rank() == 1]

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * float("inf") if spoilt[0] else gradient

    weight: Any = model.blocks[0][0].weight  # type: ignore[index]
    if stage:  # hooks outlive the change of precision
        weight.register_hook(spoil)
    else:
        weight.register_hook(spoil).remove()
    accumulated: list[Any] = []
    weight.register_post_accumulate_grad_hook(accumulated.append)
    config = load_config(stage=stage, units={"min_numel": 0}, loss_scale={"initial": 8.0})
    engine = ZeroEngine(model, config, compute_dtype=torch.float16)
    if not stage:
        weight.register_hook(spoil)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    assert all(parameter.dtype == torch.float16 for parameter in model.parameters())
    found: list[Any] = []
    for _ in range(2):
        before = engine.full_state_dict()
        engine.scale_loss(model(torch.ones(2, 4, dtype=torch.float16)).float().square().mean()).backward()
        found.append(engine.unscale_gradients(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        after = engine.full_state_dict()
        found.append(all(after[name].equal(value) for name, value in before.items()))
        spoilt[0] = False
    assert len(accumulated) == 2
    assert full_state.safe_get_full_fp32_param(model.blocks[0][2].weight).dtype == torch.float32  # type: ignore[index,arg-type]
    return found


def everything(expected: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Any]:
    for stage in (0, 2, 3):
        gradients_and_states(stage, expected, state)
        assigned_gradients(stage)
        weights(stage)
    offload = {"optimizer": "cpu", "parameters": "cpu"}
    model, engine, optimizer, copy_ = begin(3, offload=offload, activation_checkpointing={"mode": "full"})
    losses, _ = run_steps(model, engine, optimizer, copy_)
    plan = load_config(stage=3).plan(model, world_size=4, device="cpu")  # of one that is sharded already
    held = sum(segment.numel for bucket in engine.model.buckets for segment in bucket.layout.segments)
    assert plan.ways == 2 and plan.model.parameters == held
    with pytest.raises(ValueError, match=r"mesh\.tensor is 2, and \w+ has no plan of which layers are divided"):
        load_config(mesh={"tensor": 2}).plan(gpt(), world_size=4)
    return {
        "meta": [from_meta(stage) for stage in (1, 3)],
        "overflow": [one_that_overflows(stage) for stage in (0, 3)],
        "offloaded": (copy_, losses, engine.full_state_dict()),
    }


def test_all_that_is_whole_in_plain_torch_is_whole(ranks: Launcher) -> None:
    found = ranks(4)(everything, *plain_step())
    torch.manual_seed(3)
    with Init():
        model = Mlp()
    expected = ZeroEngine(model, load_config(stage=1, units={"min_numel": 0})).full_state_dict()
    losses, _, trained = train_plain(2)
    for each in found:
        for made in each["meta"]:
            assert all(value.equal(expected[name]) for name, value in made.items())
        assert each["overflow"] == [[False, True, True, False]] * 2
        copy_, offloaded, after = each["offloaded"]
        torch.testing.assert_close(offloaded, [one[copy_] for one in losses], rtol=0, atol=1e-6)
        for name, value in after.items():
            close(value, trained[name])


def released_reads() -> list[str]:
    """Outcomes of reads of a divided parameter outside of its forward, at stage 3."""
    model, _, _, _ = begin(3)
    parameter = dict(model.named_parameters())["blocks.0.up.weight"]
    assert isinstance(parameter, DTensor) and type(parameter) is not DTensor
    outcomes = []
    for read in (
        lambda: parameter.full_tensor(),
        lambda: parameter.data.to_local().numpy(),
        lambda: torch.empty(parameter.to_local().shape).copy_(parameter.to_local()),
        lambda: copy.deepcopy(parameter),
        lambda: parameter.detach().sum().to_local(),
        lambda: parameter.mul_(2.0),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError) as refused:
            read()
        outcomes.append(str(refused.value))
    with GatheredParameters([parameter]):
        assert type(parameter) is DTensor and bool(parameter.to_local().isfinite().all())
    return outcomes


def test_reads_of_released_divided_parameters_are_found(ranks: Launcher) -> None:
    for refused in ranks(4)(released_reads):
        assert all("'blocks.0.up.weight' is released (stage 3)" in text for text in refused)
