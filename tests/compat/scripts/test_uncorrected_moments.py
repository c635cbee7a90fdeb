"""A JSON's `bias_correction: false`, as files for BERT have it, against its formula in float64 and in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher
from zero_strategy.config import read_deepspeed
from zero_strategy.optim import FusedAdamW

LR, BETAS, EPS, DECAY = 0.02, (0.8, 0.95), 1e-6, 0.1
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "Adam", "params": {}},
    "Adam": {"type": "Adam", "params": {"adam_w_mode": False}},
    "Lamb": {"type": "Lamb", "params": {}},
}
PLACES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).to(dtype)


def loss_of(module: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
    loss: Tensor = (module(x) - 1).square().mean()
    return loss


def by_the_formula(kind: str, steps: int, world: int) -> dict[str, Tensor]:
    """Moments that begin with zeros and are used as they are, in float64."""
    model = net(torch.float64)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step in range(steps):
        model.zero_grad()
        for rank in range(world):
            (loss_of(model, step, rank, torch.float64) / world).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                gradient = p.grad + DECAY * p if kind == "Adam" else p.grad
                first, second = moments[name]
                first.mul_(BETAS[0]).add_(gradient * (1 - BETAS[0]))
                second.mul_(BETAS[1]).add_(gradient.square() * (1 - BETAS[1]))
                update = first / (second.sqrt() + EPS)
                if kind != "Adam":
                    update = update + DECAY * p
                trust = p.norm() / update.norm() if kind == "Lamb" else 1.0
                p.sub_(LR * trust * update)
    return {name: p.detach() for name, p in model.named_parameters()}


def start(kind: str, zero: dict[str, Any], **more: Any) -> Any:
    named = KINDS[kind]
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": named["type"], "params": {**params, **named["params"]}},
        **more,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return deepspeed.initialize(model=net(), config=config)[0]


def steps_of(engine: Any, steps: int, first: int = 0) -> dict[str, Tensor]:
    for step in range(first, first + steps):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    return {name: value.detach().clone() for name, value in engine.state_dict().items()}


def places(kind: str) -> list[dict[str, Any]]:
    return PLACES[:4] if kind == "Lamb" else PLACES  # Lamb's norms are of full parameters: not offloaded


def everywhere(kind: str) -> list[dict[str, Tensor]]:
    found = []
    for zero in places(kind):
        engine = start(kind, zero)
        found.append(steps_of(engine, 4))
        engine.destroy()
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_moments_are_used_as_they_are_at_every_stage_and_with_offloaded_state(ranks: Launcher, kind: str) -> None:
    want = by_the_formula(kind, 4, 2)
    for found in ranks(2)(everywhere, kind):
        for zero, weights in zip(places(kind), found, strict=True):
            for name, value in want.items():
                torch.testing.assert_close(weights[name].double(), value, rtol=1e-5, atol=2e-6, msg=f"{zero} {name}")
                if kind != "Lamb":  # whose norms are sums over pieces
                    assert torch.equal(weights[name], found[0][name]), (zero, name)


def resumed(folder: str) -> tuple[dict[str, Tensor], str]:
    engine = start("AdamW", {"stage": 1})
    steps_of(engine, 2)
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()
    engine = start("AdamW", {"stage": 3})
    engine.load_checkpoint(folder, tag="a")
    weights = steps_of(engine, 2, first=2)
    engine.destroy()
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
    )
    with pytest.raises(ValueError, match="without bias correction") as error:
        engine.load_checkpoint(folder, tag="a")
    return weights, str(error.value)


def test_a_checkpoint_resumes_without_correction_and_torchs_adam_does_not_take_it(
    ranks: Launcher, tmp_path: Path
) -> None:
    want = by_the_formula("AdamW", 4, 2)
    for weights, error in ranks(2)(resumed, str(tmp_path)):
        for name, value in want.items():
            torch.testing.assert_close(weights[name].double(), value, rtol=1e-5, atol=2e-6)
        assert "FusedAdamW(bias_correction=False)" in error


@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_classes_of_scripts_take_it(name: str) -> None:
    weight = nn.Parameter(torch.full((3,), 2.0))
    optimizer = getattr(deepspeed.ops.adam, name)([weight], lr=0.5, betas=(0.75, 0.75), eps=0.0, bias_correction=False)
    weight.grad = torch.full((3,), 4.0)
    optimizer.step()  # moments 1 and 4: a step of 1 / 2 of lr, where a corrected one is lr itself
    assert torch.equal(weight, torch.full((3,), 1.75))


def test_a_state_of_torchs_keeps_the_optimizers_own_choice() -> None:
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    ours = FusedAdamW([nn.Parameter(torch.ones(2))], bias_correction=False)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["bias_correction"] is False


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "Adam", "params": {"bias_correction": False, "torch_adam": True}}, "asks for torch's Adam"),
        ({"type": "Lion", "params": {"bias_correction": False}}, "Lion corrects no bias"),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_deepspeed({"train_batch_size": 2, "optimizer": optimizer})


def test_another_value_is_named() -> None:
    with pytest.raises(TypeError, match=r"optimizer\.params\.bias_correction.*'no'"):
        read_deepspeed({"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"bias_correction": "no"}}})
