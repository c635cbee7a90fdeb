"""The examples for Fabric and LightningCLI give what one process gives, and go on from what they saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.integrations.lightning.trainers import join
from tests.launcher import Launcher

CONFIG = Path(__file__).parents[2] / "configs" / "cli_gpt.yaml"
SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "d_model": 16}


def fabric(folder: str, steps: int, world: int, *more: str, strategy: str = "zero3") -> float:
    import fabric_gpt

    if world > 1:
        join()
    shape = [part for name, size in SHAPE.items() for part in ("--" + name.replace("_", "-"), str(size))]
    flags = ["--accelerator=cpu", f"--devices={world}", f"--strategy={strategy}", f"--steps={steps}"]
    return fabric_gpt.main([*flags, f"--batch-size={8 // world}", f"--save={folder}", *shape, *more])


def in_parts(folder: str) -> tuple[float, float]:
    whole = fabric(folder + "/whole", 3, 2)
    fabric(folder + "/half", 2, 2)
    return whole, fabric(folder + "/rest", 1, 2, f"--resume={folder}/half", strategy="zero1")


def test_fabric_example(ranks: Launcher, tmp_path: Path) -> None:
    alone = fabric(str(tmp_path / "alone"), 3, 1, strategy="auto")
    for whole, resumed in ranks(2)(in_parts, str(tmp_path)):
        assert whole == pytest.approx(alone, abs=1e-4) and resumed == pytest.approx(whole, abs=1e-5)
    assert (tmp_path / "rest" / "model.safetensors").is_file()


def cli(folder: str, world: int, *more: str) -> dict[str, Any]:
    import cli_gpt

    join()
    trainer = {"accelerator": "cpu", "devices": world, "max_steps": 3, "val_check_interval": 6}
    trainer |= {"default_root_dir": folder, "enable_progress_bar": "false", "enable_model_summary": "false"}
    flags = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    data = ["--data.val_windows=16", f"--data.batch_size={8 // world}"]
    found = cli_gpt.main(["fit", f"--config={CONFIG}", *flags, *data, f"--model.model={SHAPE}", *more])
    assert isinstance(found.model, nn.Module) and found.datamodule.block_size == SHAPE["block_size"]
    strategy = found.trainer.strategy
    stage = strategy.config.stage if hasattr(strategy, "config") else None
    return {"bits": float(found.trainer.callback_metrics["val_bpb"]), "stage": stage}


def by_two_ways(folder: str) -> list[dict[str, Any]]:
    return [
        cli(folder + "/a", 2, "--trainer.strategy.init_args.stage=2"),
        cli(folder + "/b", 2, "--trainer.strategy=zero1"),
    ]


def test_cli_example(ranks: Launcher, tmp_path: Path) -> None:
    (alone,) = ranks(1)(cli, str(tmp_path / "alone"), 1, "--trainer.strategy=ddp")
    for found in ranks(2)(by_two_ways, str(tmp_path)):
        assert [run["stage"] for run in found] == [2, 1]
        assert [run["bits"] for run in found] == pytest.approx([alone["bits"]] * 2, abs=1e-4)
    assert (tmp_path / "a" / "config.yaml").is_file()
