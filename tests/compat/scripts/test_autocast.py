"""`torch_autocast` of a JSON: forwards of a script's engine under autocast, against plain torch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher
from zero_strategy.config import check_owned, load_config, read_deepspeed
from zero_strategy.config.resolve import Fact
from zero_strategy.pipeline.module import PipelineModule

STEPS, LR, OVERFLOWS = 4, 0.25, (1,)
Losses = list[float]
Weights = dict[str, Tensor]


def layers() -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return [nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(outputs: Tensor, step: int, scaled: bool) -> Tensor:
    """A loss outside of the forward, with a product that autocast would round."""
    loss = (outputs.float() @ torch.ones(4, 4) - 1).square().mean()
    return loss * (float("inf") if scaled and step in OVERFLOWS else 1.0)


def plain(dtype: torch.dtype | None, world: int) -> tuple[Losses, Weights, list[float]]:
    """Losses of rank 0, weights, and loss scales after each step."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    losses, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                outputs = model(batch(step, rank))
            loss = loss_of(outputs, step, dtype == torch.float16)
            losses += [loss.item()] if rank == 0 else []
            scaler.scale(loss / world).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return losses, {name: value.detach() for name, value in model.named_parameters()}, scales


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "torch_autocast": {
            "enabled": True,
            "dtype": dtype,
            "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
        },
        **more,
    }


def trained(stage: int, dtype: str) -> tuple[Losses, Weights, list[float]]:
    engine = deepspeed.initialize(model=nn.Sequential(*layers()), config=config(stage, dtype))[0]
    low = {"bfloat16": torch.bfloat16, "torch.float16": torch.float16}[dtype]
    seen: set[torch.dtype] = set()
    engine.module[0].register_forward_hook(lambda *call: seen.add(call[2].dtype))
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == low and not engine.fp16_enabled()
    losses, scales = [], []
    for step in range(STEPS):
        loss = loss_of(engine(batch(step, engine.global_rank)), step, low == torch.float16)
        losses.append(loss.item())
        if step % 2:
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()
        scales.append(engine.loss_scale)
    assert seen == {low}
    return losses, {name: value.clone() for name, value in engine.state_dict().items()}, scales


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forwards_run_under_autocast_with_a_scaled_loss_in_fp16(ranks: Launcher, stage: int, dtype: str) -> None:
    low = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    want, exact = plain(low, 2), plain(None, 2)
    assert max(float((want[1][name] - value).abs().max()) for name, value in exact[1].items()) > 1e-4
    for rank, (losses, weights, scales) in enumerate(ranks(2)(trained, stage, dtype)):
        assert losses == want[0] or rank
        assert scales == want[2]
        for name, value in want[1].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


def piped(dtype: str) -> tuple[Losses, Weights]:
    module = PipelineModule(layers(), num_stages=2, loss_fn=lambda outputs, step: loss_of(outputs, int(step[0]), False))
    settings = config(1, dtype, gradient_accumulation_steps=2)
    engine = deepspeed.initialize(model=module, config=settings)[0]
    losses = []
    for step in range(STEPS):
        data = [(batch(step, part), torch.full((4,), step)) for part in range(2)]
        losses.append(float(engine.train_batch(iter(data))))
    return losses, {name: value.clone() for name, value in engine.state_dict().items()}


def test_a_pipelines_stages_run_under_autocast_and_its_loss_does_not(ranks: Launcher) -> None:
    want = list(plain(torch.bfloat16, 2)[1].values())
    for _, weights in ranks(2)(piped, "bfloat16"):
        assert len(weights) == len(want)
        for found, value in zip(weights.values(), want, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=1e-6)


def beside_bf16() -> tuple[bool, torch.dtype]:
    engine = deepspeed.initialize(model=nn.Sequential(*layers()), config=config(3, "bfloat16", bf16={"enabled": True}))[
        0
    ]
    inside: list[bool] = []
    engine.module[0].register_forward_hook(lambda *call: inside.append(torch.is_autocast_enabled("cpu")))
    engine.backward(loss_of(engine(batch(0, dist.get_rank()).bfloat16()), 0, False))
    engine.step()
    return all(inside), next(iter(engine.state_dict().values())).dtype


def test_beside_bf16_both_are_done(ranks: Launcher) -> None:
    assert ranks(2)(beside_bf16) == [(True, torch.bfloat16)] * 2


def unscaled() -> str:
    engine = deepspeed.initialize(model=nn.Sequential(*layers()), config=config(2, "torch.float16"))[0]
    with pytest.raises(RuntimeError) as error:
        loss_of(engine(batch(0, 0)), 0, False).backward()
    return str(error.value)


def test_a_backward_without_its_scale_is_named(ranks: Launcher) -> None:
    for error in ranks(2)(unscaled):
        assert "engine.scale(loss).backward()" in error


ON: dict[str, Any] = {"enabled": True}


def test_a_framework_owns_autocast() -> None:
    made = load_config({"train_batch_size": "auto", "bf16": {"enabled": False}, "torch_autocast": ON})
    check_owned(made, {"training_precision": Fact("bf16-mixed", "Trainer(precision=...)")})
    with pytest.raises(ValueError, match=r"torch_autocast asks for autocast to bf16.*has '32-true'.*bf16-mixed"):
        check_owned(made, {"training_precision": Fact("32-true", "Trainer(precision=...)")})


def test_words_that_are_not_done_are_named() -> None:
    with pytest.raises(ValueError, match=r"torch_autocast\.dtype is 'int8'"):
        read_deepspeed({"train_batch_size": 2, "torch_autocast": {**ON, "dtype": "int8"}})
    with pytest.raises(ValueError, match=r"torch_autocast\.enabled: True.*leave one of the two out"):
        read_deepspeed({"train_batch_size": 2, "torch_autocast": ON, "fp16": ON})
    off = read_deepspeed({"train_batch_size": 2, "torch_autocast": {"enabled": False, "dtype": "float16"}, "fp16": ON})
    assert off.autocast is None
