"""Names are known whichever package is imported first, and importing ours imports no framework."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import zero_strategy
from zero_strategy.integrations import strategy_class
from zero_strategy.integrations.lightning.namespaces import MODULES
from zero_strategy.registration import NAMES, START_METHODS

ROOT = Path(__file__).parents[3]
OURS_FIRST = """
UNWANTED = ("torch", "lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed", "hydra")
import sys
import zero_strategy
loaded = [name for name in sys.modules if name.partition(".")[0] in UNWANTED]
assert not loaded, loaded
import pytorch_lightning as pl
assert pl.Trainer(strategy="ZERO3", accelerator="cpu", logger=False).strategy.config.stage == 3
assert zero_strategy.ZeroStrategy is zero_strategy.integrations.strategy_class("pytorch_lightning")
import lightning.fabric.strategies
from lightning.fabric import Fabric
assert Fabric(strategy="zero2", accelerator="cpu").strategy.config.stage == 2
import lightning
strategy = lightning.Trainer(strategy="zero1", accelerator="cpu", logger=False).strategy
assert strategy.config.stage == 1
assert isinstance(strategy, lightning.pytorch.strategies.DDPStrategy)
module = sys.modules["lightning.pytorch.strategies"]
assert "zero_strategy" not in repr(type(module.__loader__)) + repr(type(module.__spec__.loader))
print("fine")
"""


def test_ours_first() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", OURS_FIRST], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("fine"), done.stderr


def test_theirs_first() -> None:
    """The names are entered again by hand here, as if our package came last."""
    import lightning.pytorch.strategies
    import lightning_fabric.strategies

    trainers = lightning.pytorch.strategies.StrategyRegistry
    fabrics = lightning_fabric.strategies.STRATEGY_REGISTRY
    for registry in (trainers, fabrics):
        for name in list(registry):
            if name.startswith("zero"):
                registry.remove(name)
    zero_strategy.registration.install()
    expected = {name + suffix for name in NAMES for suffix in START_METHODS}
    for registry in (trainers, fabrics):
        assert expected <= set(registry)
    assert trainers.get("zero2_spawn")._start_method == "spawn"
    assert trainers.get("zero2_notebook")._start_method == "fork"
    origin = trainers.get("zero2_fork").config.origin_of("stage")
    assert origin == 'Trainer(strategy="zero2_fork")'


@pytest.mark.parametrize("namespace", MODULES)
def test_every_setting_is_a_keyword_of_every_strategy(namespace: str) -> None:
    keywords = inspect.signature(strategy_class(namespace)).parameters
    settings = {field.name for field in dataclasses.fields(zero_strategy.ZeroConfig)}
    assert settings <= set(keywords)
    described = inspect.getdoc(strategy_class(namespace).__init__) or ""
    assert all(f"{name}: " in described for name in keywords if name != "self")


@pytest.mark.parametrize("namespace", MODULES)
def test_strategies_can_be_pickled(namespace: str) -> None:
    """As the spawning launchers do."""
    strategy = strategy_class(namespace)(stage=2, mesh={"replicate": 2})
    copied = pickle.loads(pickle.dumps(strategy))
    assert type(copied) is type(strategy) and copied.config == strategy.config


def test_unknown_namespace() -> None:
    with pytest.raises(ValueError, match=r"keras.*lightning\.fabric"):
        strategy_class("keras")


# ---- LightningCLI ----


def cli(*arguments: str) -> Any:
    """The Trainer that a command line makes."""
    from lightning.pytorch.cli import LightningCLI

    from tests.integrations.lightning.trainers import Module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LightningCLI(
            Module, args=["--trainer.accelerator=cpu", "--trainer.logger=false", *arguments], run=False
        ).trainer


def test_cli_takes_names() -> None:
    assert cli("--trainer.strategy=zero2").strategy.config.stage == 2


def test_cli_takes_the_class_with_settings() -> None:
    strategy = cli(
        "--trainer.strategy=zero_strategy.ZeroStrategy",
        "--trainer.strategy.stage=1",
        "--trainer.strategy.mesh.replicate=1",
        "--trainer.strategy.prefetch=4",
        "--trainer.strategy.start_method=spawn",
    ).strategy
    assert type(strategy) is strategy_class("lightning.pytorch")
    assert (strategy.config.stage, strategy.config.prefetch, strategy._start_method) == (1, 4, "spawn")


def test_cli_reads_class_path_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  strategy:\n    class_path: zero_strategy.ZeroStrategy\n"
        "    init_args:\n      stage: 3\n      units: {min_numel: 0}\n      loss_scale: {initial: 8}\n"
    )
    settings = cli(f"--config={config}").strategy.config
    assert (settings.stage, settings.units.min_numel, settings.loss_scale.initial) == (3, 0, 8.0)


def test_cli_refuses_wrong_types(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--trainer.strategy=zero_strategy.ZeroStrategy", "--trainer.strategy.stage=three")
    assert "stage" in capsys.readouterr().err


def test_short_forms_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of LightningCLI, whose parser decides by the annotations."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    monkeypatch.setattr(sys, "argv", ["train.py"])
    words = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--trainer.barebones=true"]
    words += ["--trainer.strategy=zero_strategy.ZeroStrategy", "--trainer.strategy.stage=2"]
    for given, mode in (("full", "full"), ("true", "full"), ("false", "none"), ('{"mode": "budget"}', "budget")):
        own = [f"--trainer.strategy.activation_checkpointing={given}", "--trainer.strategy.offload=cpu"]
        found = LightningCLI(BoringModel, args=[*words, *own], run=False, save_config_callback=None)
        config = found.trainer.strategy.config
        assert (config.activation_checkpointing.mode, config.offload.optimizer) == (mode, "cpu"), given
    own = ['--trainer.strategy.offload={"optimizer": "nvme", "nvme_path": "/local"}']
    found = LightningCLI(BoringModel, args=[*words, *own], run=False, save_config_callback=None)
    assert found.trainer.strategy.config.offload.nvme_path == ["/local"]
