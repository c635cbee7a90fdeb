"""Fabric: the same training as under DDP, saving and loading, several modules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integrations.lightning.trainers import Net, data, error, join, loader, raises, weights
from tests.launcher import Launcher
from zero_strategy.integrations import strategy_class

CLOSE = 2e-6
STAGES = (0, 1, 2, 3)


def fabric(strategy: Any, **flags: Any) -> Fabric:
    join()
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **flags)
    made.launch()
    return made


def zero(stage: int, **settings: Any) -> Any:
    return strategy_class("lightning.fabric")(stage=stage, units={"min_numel": 0}, **settings)


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


def train(run: Fabric, model: Any, optimizer: Any, steps: int = 3, clip: str = "norm") -> list[float]:
    """Two micro-batches per step."""
    norms = []
    for step in range(steps):
        for micro in range(2):
            x, y = next(iter(loader(8, seed=2 * step + micro)))
            with run.no_backward_sync(model, enabled=micro == 0):
                run.backward(F.mse_loss(model(x).squeeze(-1), y) / 2)
        if clip == "norm":
            norms.append(float(run.clip_gradients(model, optimizer, max_norm=0.3)))  # type: ignore[arg-type]
        else:
            run.clip_gradients(model, optimizer, clip_val=0.02)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trained(strategy: Any, clip: str = "norm", **flags: Any) -> tuple[dict[str, Tensor], list[float]]:
    run = fabric(strategy, **flags)
    module = net()
    model, optimizer = run.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    norms = train(run, model, optimizer, clip=clip)
    return weights(module), norms


def compare(clip: str) -> dict[int, tuple[float, float]]:
    expected, expected_norms = trained("ddp", clip)
    found = {}
    for stage in STAGES:
        ours, norms = trained(zero(stage), clip)
        off = [abs(a - b) / b for a, b in zip(norms, expected_norms, strict=True)]
        found[stage] = error(ours, expected), max(off, default=0.0)
    return found


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_trains_as_ddp(ranks: Launcher, clip: str) -> None:
    for found in ranks(2)(compare, clip):
        assert all(weights < CLOSE and norms < 1e-5 for weights, norms in found.values()), found


def low_precision() -> dict[str, tuple[float, float]]:
    exact, _ = trained("ddp")
    found = {}
    for precision in ("bf16-true", "bf16-mixed", "16-true", "64-true"):
        plain = 0.0 if precision in ("64-true", "16-true") else error(trained("ddp", precision=precision)[0], exact)
        ours, _ = trained(zero(3, loss_scale={"initial": 1024.0}), precision=precision)
        found[precision] = error(ours, exact), plain
    return found


def test_precisions(ranks: Launcher) -> None:
    for found in ranks(2)(low_precision):
        assert found["64-true"][0] < CLOSE
        assert found["16-true"][0] < 5e-3
        assert found["bf16-mixed"][0] <= 1.5 * found["bf16-mixed"][1]
        assert found["bf16-true"][0] <= 1.5 * found["bf16-true"][1]


def plain_backward() -> None:
    """loss.backward() is fine, except where the loss has to be scaled."""
    x, y = data(4).tensors
    for stage in STAGES:
        run = fabric(zero(stage))
        model, optimizer = run.setup(module := net(), torch.optim.SGD(module_parameters(module), 0.1))
        F.mse_loss(model(x).squeeze(-1), y).backward()
        optimizer.step()
    run = fabric(zero(3), precision="16-true")
    model, _ = run.setup(module := net(), torch.optim.SGD(module_parameters(module), 0.1))
    with raises(RuntimeError, "fabric.backward"):
        F.mse_loss(model(x).squeeze(-1), y.half()).backward()


def released_in_the_loss() -> None:
    x, y = data(4).tensors
    run = fabric(zero(3))
    model, _ = run.setup(module := net(), torch.optim.SGD(module_parameters(module), 0.1))
    loss = F.mse_loss(model(x).squeeze(-1), y)
    engine = run.strategy.engines[0]
    engine.check_loss(loss)
    with raises(RuntimeError, "is released (stage 3)", "GatheredParameters"):
        engine.check_loss(loss + 1e-3 * sum(p.square().sum() for p in model.parameters()))
    run.backward(loss)


def test_fabric_loss_that_reads_released_parameters(ranks: Launcher) -> None:
    ranks(2)(released_in_the_loss)


def module_parameters(module: nn.Module) -> Any:
    return module.parameters()


def test_plain_backward(ranks: Launcher) -> None:
    ranks(2)(plain_backward)


# ---- saving and loading ----


def save_and_load(tmp: str, saved: int, loaded: int) -> dict[str, Any]:
    run = fabric(zero(saved))
    model, optimizer = run.setup(module := net(), torch.optim.AdamW(module_parameters(module), lr=1e-2))
    train(run, model, optimizer)
    path = os.path.join(tmp, "fabric.ckpt")
    run.save(path, {"model": model, "optimizer": optimizer, "step": 3, "other": {"a": torch.ones(2)}})

    again = fabric(zero(loaded))
    second, second_optimizer = again.setup(copy := net(), torch.optim.AdamW(module_parameters(copy), lr=1e-1))
    state = {"model": second, "optimizer": second_optimizer, "step": 0}
    left = again.load(path, state)
    at_once = error(weights(copy), weights(module))
    train(run, model, optimizer)
    train(again, second, second_optimizer)
    whole = run.load(path)
    with raises(KeyError, "missing"):
        again.load(path, {"model": second, "missing": 1})
    return {
        "at once": at_once,
        "trained": error(weights(copy), weights(module)),
        "step": state["step"],
        "left": sorted(left),
        "whole": sorted(whole),
        "whole optimizer": sorted(whole["optimizer"]),
        "is directory": os.path.isdir(path),
    }


@pytest.mark.parametrize(("saved", "loaded"), [(3, 3), (3, 1), (2, 3)])
def test_save_and_load(ranks: Launcher, tmp_path: Path, saved: int, loaded: int) -> None:
    for found in ranks(2)(save_and_load, str(tmp_path), saved, loaded):
        assert found["at once"] == 0 and found["trained"] < CLOSE
        assert found["step"] == 3 and found["left"] == ["other"] and found["is directory"]
        assert found["whole"] == ["model", "optimizer", "other", "step"]
        assert found["whole optimizer"] == ["param_groups", "state"]


def whole_files(tmp: str) -> None:
    """A filter, or a plugin, or several modules: one file, as under DDP."""
    run = fabric(zero(3))
    model, optimizer = run.setup(module := net(), torch.optim.AdamW(module_parameters(module), lr=1e-2))
    other = run.setup_module(nn.Linear(2, 2))
    train(run, model, optimizer)
    run.save(f"{tmp}/part.ckpt", {"model": model}, filter={"model": lambda name, _: "out" not in name})
    part = torch.load(f"{tmp}/part.ckpt", weights_only=True)["model"]
    assert "inner.weight" in part and "out.weight" not in part
    run.save(f"{tmp}/two.ckpt", {"model": model, "other": other, "optimizer": optimizer})
    plain = fabric("ddp")
    copy = plain.setup_module(net())
    plain.load(f"{tmp}/two.ckpt", {"model": copy}, strict=False)
    assert error(weights(copy.module), weights(module)) == 0
    back, back_optimizer = run.setup(unwrapped := net(), torch.optim.AdamW(module_parameters(unwrapped), lr=1e-2))
    run.load(f"{tmp}/two.ckpt", {"model": back, "optimizer": back_optimizer}, strict=False)
    assert error(weights(unwrapped), weights(module)) == 0
    train(run, back, back_optimizer)
    train(run, model, optimizer)
    assert error(weights(unwrapped), weights(module)) < CLOSE
    io = fabric(zero(3), plugins=[TorchCheckpointIO()])
    third = io.setup_module(net())
    io.save(f"{tmp}/io.ckpt", {"model": third})
    assert os.path.isfile(f"{tmp}/io.ckpt")
    with raises(ValueError, "nowhere://bucket/x.ckpt", "rotocol not known"):
        run.save("nowhere://bucket/x.ckpt", {"model": model})
    raw = fabric(zero(1))
    fourth = raw.setup_module(fresh := net())
    torch.save(torch.load(f"{tmp}/two.ckpt", weights_only=True)["model"], f"{tmp}/raw{dist.get_rank()}.pt")
    raw.load_raw(f"{tmp}/raw{dist.get_rank()}.pt", fourth)
    assert error(weights(fresh), torch.load(f"{tmp}/two.ckpt", weights_only=True)["model"]) == 0


def test_whole_files(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(whole_files, str(tmp_path))


# ---- modules ----


def adversaries(strategy: Any) -> dict[str, Tensor]:
    run = fabric(strategy)
    made, judge = net(), nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
    for parameter in judge.parameters():
        nn.init.constant_(parameter, 0.1)
    one, first = run.setup(made, torch.optim.Adam(made.parameters(), lr=1e-2))
    two, second = run.setup(judge, torch.optim.Adam(judge.parameters(), lr=1e-2))
    for step in range(3):
        x, y = next(iter(loader(8, seed=step)))
        run.backward(F.softplus(-two(one(x))).mean())
        first.step()
        first.zero_grad()
        second.zero_grad()
        run.backward((F.softplus(two(one(x).detach())) + F.softplus(-two(y[:, None]))).mean())
        second.step()
        second.zero_grad()
    return {f"{number}.{name}": value for number, m in enumerate((made, judge)) for name, value in weights(m).items()}


def compare_adversaries() -> list[float]:
    expected = adversaries("ddp")
    return [error(adversaries(zero(stage)), expected) for stage in STAGES]


def test_two_modules_with_an_optimizer_each(ranks: Launcher) -> None:
    for found in ranks(2)(compare_adversaries):
        assert max(found) < CLOSE, found


class WithMethod(nn.Module):
    """Its own parameter is used outside of any module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.bias = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) + self.bias
        return out

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) + self.bias).square().mean()


def methods() -> float:
    run = fabric(zero(3))
    model, optimizer = run.setup(module := WithMethod(), torch.optim.SGD(module_parameters(module), 0.1))
    model.mark_forward_method("loss")
    loss = model.loss(data(4).tensors[0])
    run.backward(loss)
    optimizer.step()
    with raises(ValueError, "SGD", "no module that was set up"):
        run.setup_optimizers(torch.optim.SGD(net().parameters(), 0.1))
    return float(loss.detach())


def test_methods_besides_forward(ranks: Launcher) -> None:
    expected = float(WithMethod().loss(data(4).tensors[0]).detach())
    for found in ranks(2)(methods):
        assert found == pytest.approx(expected, rel=1e-6)


def names() -> tuple[str, str]:
    run = fabric("zero2")
    text: str = run.strategy.explain()  # type: ignore[attr-defined]
    return type(run.strategy).__module__, text


def test_names_and_explanation(ranks: Launcher) -> None:
    module, text = ranks(2)(names)[0]
    assert module == "zero_strategy.integrations.fabric"
    assert 'Fabric(strategy="zero2")' in text and "Fabric(precision='32-true')" in text


def other_namespace() -> float:
    import lightning_fabric
    from lightning_fabric.strategies import DDPStrategy

    join()
    run = lightning_fabric.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="zero3")
    run.launch()
    assert isinstance(run.strategy, DDPStrategy)
    model, optimizer = run.setup(module := net(), torch.optim.AdamW(module_parameters(module), lr=1e-2))
    train(run, model, optimizer)  # type: ignore[arg-type]
    return error(weights(module), trained("ddp")[0])


def test_lightning_fabric(ranks: Launcher) -> None:
    assert max(ranks(2)(other_namespace)) < CLOSE
