"""Whole-file checkpoints of pipelines are those of one process, optimizer state too; stages with nothing to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from tests.integrations.lightning.pipelines import CLOSE, VOCABULARY, WIDTH, Block, Module, Plain, loader, pipeline
from tests.integrations.lightning.trainers import error, raises, trainer, weights
from tests.launcher import Launcher
from zero_strategy.pipeline.building import LayerSpec
from zero_strategy.pipeline.module import PipelineModule


class Grouped(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.3},
                {"params": [p for p in self.parameters() if p.ndim < 2], "lr": 1e-2},
            ],
            lr=2e-2,
        )


class PlainGrouped(Grouped, Plain):
    """One process."""


def run(folder: str, kind: str, epochs: int, source: str | None = None) -> dict[str, Tensor]:
    """Fit, saving whole files; the weights."""
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    flags: dict[str, Any] = {"max_epochs": epochs, "enable_checkpointing": True, "callbacks": [checkpoint]}
    if kind == "plain":
        module: Module = PlainGrouped()
        trainer("auto", **flags).fit(module, loader(), ckpt_path=source)
        return weights(module)
    chosen = pipeline(zero=1, schedule=kind)
    fitted = trainer(chosen, plugins=[TorchCheckpointIO()], **flags)
    fitted.fit(Grouped(), loader(copies=1), ckpt_path=source)
    return dict(fitted.strategy.lightning_module_state_dict())


def test_whole_files_are_those_of_one_process(ranks: Launcher, tmp_path: Path) -> None:
    """Weights, moments, their numbers and param groups; each continues the other's."""
    (expected,) = ranks(1)(run, str(tmp_path / "plain"), "plain", 2)
    for kind in ("1f1b", "zbv"):
        for found in ranks(2)(run, str(tmp_path / kind), kind, 2):
            assert error(found, expected) < 20 * CLOSE
        theirs, ours = (torch.load(tmp_path / name / "epoch=0.ckpt", weights_only=False) for name in ("plain", kind))
        assert ours["state_dict"].keys() == theirs["state_dict"].keys()
        (theirs,), (ours,) = theirs["optimizer_states"], ours["optimizer_states"]
        assert ours["param_groups"] == theirs["param_groups"] and list(ours["state"]) == list(theirs["state"])
        for number, values in theirs["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(ours["state"][number][key], value, rtol=1e-4, atol=1e-7)
        (found,) = ranks(1)(run, str(tmp_path / "again"), "plain", 2, str(tmp_path / kind / "epoch=0.ckpt"))
        assert error(found, expected) < 20 * CLOSE
    for found in ranks(2)(run, str(tmp_path / "from-plain"), "1f1b", 2, str(tmp_path / "plain" / "epoch=0.ckpt")):
        assert error(found, expected) < 20 * CLOSE


# ---- stages that have nothing to train ----


class Idle(Module):
    """Its second stage of three is a ReLU."""

    groups = True

    def configure_pipeline(self) -> Any:
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), nn.ReLU(), LayerSpec(Block)]
        head = LayerSpec(nn.Linear, WIDTH, VOCABULARY)
        return PipelineModule([*layers, head], 3, loss_fn=self.pipeline_loss, partition_method=[0, 1, 2, 4])

    def configure_optimizers(self) -> Any:
        parameters = self.parameters()
        return torch.optim.AdamW([{"params": parameters}] if self.groups else parameters, lr=2e-2)


def idle() -> list[float]:
    module, bare = Idle(), Idle()
    trainer(pipeline(3), max_steps=3, gradient_clip_val=0.3).fit(module, loader())
    bare.groups = False
    with raises((ValueError, RuntimeError), "stage 1, which has nothing to train", "[{'params': self.parameters()}]"):
        trainer(pipeline(3), max_steps=1).fit(bare, loader())
    return module.losses


def test_a_stage_without_parameters(ranks: Launcher) -> None:
    first, *others = ranks(3)(idle)
    assert first[2] != first[0] and others == [first, first]
