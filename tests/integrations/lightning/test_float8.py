"""`ZeroPrecision(float8=...)` under the Trainer and Fabric: layers converted once, trained as in one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.engine.float8 import (
    IN_BLOCKS,
    STEPS,
    Net,
    batches,
    error_of,
    float8_net,
    in_blocks,
    kinds,
    optimizer_of,
    plain_net,
    recipe,
)
from tests.integrations.lightning.trainers import join, raises, trainer, weights, zero
from tests.launcher import Launcher
from zero_strategy import PipelineStrategy
from zero_strategy.integrations import fabric as fabrics
from zero_strategy.integrations.lightning import ZeroPrecision


def loader() -> DataLoader[Any]:
    """This rank's batches."""
    return DataLoader(batches(dist.get_rank()), batch_size=None)  # type: ignore[arg-type]


class Module(pl.LightningModule):
    """The net of the tests."""

    def __init__(self, net: Net | None = None) -> None:
        super().__init__()
        self.net = net or plain_net()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = error_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def of_one_process(name: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by rank, and weights, of plain torch on the micro-batches of both ranks."""
    model = float8_net(recipe(name))
    optimizer, losses = optimizer_of(model), [[], []]
    for micro in zip(batches(0), batches(1), strict=True):
        for rank, x in enumerate(micro):
            loss = error_of(model, x)
            (loss / 2).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


def fit(module: Module, plugin: Any, stage: int = 3, **settings: Any) -> None:
    trainer(zero(stage, fused_optimizers=False, **settings), plugins=[plugin]).fit(module, loader())


def trained(stage: int, name: str, gathers: str) -> tuple[list[float], dict[str, Tensor]]:
    module = Module()
    fit(module, ZeroPrecision(float8=recipe(name)), stage, communication={"parameters": gathers})
    assert kinds(module.net) == IN_BLOCKS
    return module.losses, weights(module.net)


def trained_in_fabric(stage: int, name: str, gathers: str) -> tuple[list[float], dict[str, Tensor]]:
    join()
    settings: dict[str, Any] = {"units": {"min_numel": 0}, "communication": {"parameters": gathers}}
    strategy = fabrics.ZeroStrategy(stage=stage, fused_optimizers=False, **settings)
    plugin = fabrics.ZeroPrecision(float8=recipe(name), float8_layers=in_blocks)
    run = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin])
    run.launch()
    net, losses = plain_net(), []
    model, optimizer = run.setup(net, optimizer_of(net))
    assert kinds(net) == IN_BLOCKS
    for x in batches(dist.get_rank()):
        loss = error_of(model, x)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights(net)


@pytest.mark.parametrize("script", [trained, trained_in_fabric])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_all_stages_train_as_one_process(ranks: Launcher, script: Any, name: str) -> None:
    losses, expected = of_one_process(name)
    ways = [*((stage, "values") for stage in range(4)), *([(3, "float8")] if name == "tensorwise" else [])]
    for stage, gathers in ways:
        for rank, (found, state) in enumerate(ranks(2)(script, stage, name, gathers)):
            assert max(abs(a - b) for a, b in zip(found, losses[rank], strict=True)) < 1e-7
            assert state.keys() == expected.keys()
            assert max(float((state[key] - expected[key]).abs().max()) for key in expected) < 1e-7


def again_and_otherwise() -> None:
    """A second fit, one by another recipe, and one without float8, of one module."""
    module, plugin = Module(), ZeroPrecision("bf16-true", float8=recipe("tensorwise"))
    run = trainer(zero(3), plugins=[plugin], max_epochs=1)
    run.fit(module, loader())
    layer, engine = module.net.blocks[0].up, run.strategy.engine
    assert run.precision == "bf16-true" and layer.weight.dtype == torch.bfloat16
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    assert module.net.blocks[0].up is layer and run.strategy.engine is engine
    fit(module, ZeroPrecision("bf16-true", float8="rowwise"))
    assert module.net.blocks[0].up.config.round_scales_to_power_of_2
    fit(module, ZeroPrecision("bf16-true"))
    assert kinds(module.net) == IN_BLOCKS, "layers stay what they are"
    plain = Module()
    fit(plain, ZeroPrecision())
    fit(plain, ZeroPrecision(float8=recipe("tensorwise")))
    assert kinds(plain.net) == IN_BLOCKS and len(plain.losses) == 2 * STEPS


def test_later_runs_of_a_module(ranks: Launcher) -> None:
    ranks(2)(again_and_otherwise)


class Configured(Module):
    """Converts its layers itself."""

    def configure_model(self) -> None:
        if not kinds(self.net):
            self.net = float8_net(recipe("tensorwise"))


def in_configure_model() -> dict[str, Tensor]:
    module = Configured()
    trainer(zero(3, fused_optimizers=False)).fit(module, loader())
    return weights(module.net)


def test_a_module_that_converts_its_layers_itself(ranks: Launcher) -> None:
    _, expected = of_one_process("tensorwise")
    for found in ranks(2)(in_configure_model):
        assert max(float((found[key] - expected[key]).abs().max()) for key in expected) < 1e-7


class Odd(pl.LightningModule):
    """Has no layer of sizes that float8 kernels take."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)

    configure_optimizers = Module.configure_optimizers
    training_step = Module.training_step

    def configure_pipeline(self) -> list[nn.Module]:
        return [nn.Linear(16, 16), nn.Linear(16, 16)]


def refusals() -> None:
    with raises(ValueError, "ZeroPrecision(float8=...)", "Odd has no linear layer", "multiples of 16"):
        trainer(zero(1), plugins=[ZeroPrecision(float8="tensorwise")]).fit(Odd(), loader())
    with raises(ValueError, "ZeroPrecision(float8=...)", "configure_pipeline"):
        trainer(PipelineStrategy(), plugins=[ZeroPrecision(float8="tensorwise")]).fit(Odd(), loader())


def test_modules_without_such_layers(ranks: Launcher) -> None:
    ranks(2)(refusals)


def test_what_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"'blockwise' is no recipe.*'tensorwise', 'rowwise', 'rowwise_with_gw_hp'"):
        ZeroPrecision(float8="blockwise")
    with pytest.raises(TypeError, match=r"float8=.* is a dict"):
        ZeroPrecision(float8={"recipe": "rowwise"})
    with pytest.raises(ValueError, match=r"enable_fsdp_float8_all_gather=True.*FSDP2"):
        ZeroPrecision(float8=recipe("tensorwise", enable_fsdp_float8_all_gather=True))
    with pytest.raises(ValueError, match="float8_layers chooses"):
        ZeroPrecision(float8_layers=in_blocks)
    with pytest.raises(ValueError, match=r"does not scale the loss.*ZeroScaledPrecision"):
        fabrics.ZeroStrategy(precision_plugin=fabrics.ZeroPrecision("16-true", float8="tensorwise"))
