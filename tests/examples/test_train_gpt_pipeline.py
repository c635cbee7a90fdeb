"""The example of a pipeline trains what the main example trains, and draws its timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.integrations.lightning.trainers import join
from tests.launcher import Launcher

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = [
    "model.n_layer=2",
    "model.d_model=16",
    "model.n_head=2",
    "model.block_size=16",
    "data.val_windows=16",
    "trainer.max_steps=4",
    "trainer.accelerator=cpu",
    "sample.bytes=0",
]


def run(folder: str, world: int) -> None:
    from lightning.pytorch import seed_everything

    import train_gpt
    import train_gpt_pipeline
    from gpt_lightning import GPTModule
    from gpt_metrics import MetricsWriter

    join()
    name = "train_gpt_pipeline" if world > 1 else "train_gpt"
    more = [] if world > 1 else ["strategy=ddp", "plot=false"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose(name, [*SMALL, f"trainer.devices={world}", *more])
    if world > 1:
        train_gpt_pipeline.train_pipeline(config, Path(folder))
        return
    seed_everything(config.seed, workers=True)
    plain: Any = OmegaConf.to_container(config, resolve=True)
    metrics = MetricsWriter(Path(folder) / "metrics.jsonl", 1)
    trainer = train_gpt.build_trainer(config, Path(folder), metrics)
    trainer.fit(GPTModule(model=plain["model"], optim=plain["optim"]), *train_gpt.build_loaders(config))


def test_losses_are_those_without_a_pipeline(ranks: Launcher, tmp_path: Path) -> None:
    from gpt_metrics import read_metrics

    (tmp_path / "pipeline").mkdir()
    ranks(1)(run, str(tmp_path / "plain"), 1)
    ranks(2)(run, str(tmp_path / "pipeline"), 2)
    plain, pipelined = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "pipeline"))
    assert len(plain) == len(pipelined) == 5  # four steps, a validation
    for key in ("loss", "val_loss"):
        expected = [row[key] for row in plain if key in row]
        assert [row[key] for row in pipelined if key in row] == pytest.approx(expected, rel=1e-6)
    lines = (tmp_path / "pipeline" / "timeline.jsonl").read_text().splitlines()
    assert sum('"B"' in line for line in lines) == 8, "four micro-batches on each of two ranks, of one step"
    assert (tmp_path / "pipeline" / "timeline.png").is_file()
