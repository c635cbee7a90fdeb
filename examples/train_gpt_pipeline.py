"""Train the byte-level GPT of ``train_gpt.py`` as a pipeline: its layers divided among ranks.

``python examples/train_gpt_pipeline.py strategy.schedule=gpipe strategy.micro_batches=8 model=gpt-10m``

Everything else is as in ``train_gpt.py``: configuration, data, checkpoints, the report; and the losses are those
of a run without a pipeline. The run also draws which rank did what in one of its steps.
"""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from gpt_lightning import GPTModule
from gpt_metrics import MetricsWriter
from gpt_model import GPT, Block, rotary_tables
from train_gpt import build_loaders, build_trainer, report
from zero_strategy.cli import main as zero_strategy_command
from zero_strategy.pipeline.building import ModelLayer
from zero_strategy.pipeline.module import PipelineModule

TIMELINE_STEP = 2
"""The step whose timeline is drawn: later than what only the first ones do."""


def run_block(block: Block, x: Tensor) -> Tensor:
    """A block with the rotary tables that it needs."""
    cos, sin = rotary_tables(x.shape[1], x.shape[2] // block.attention.n_head, like=x)
    out: Tensor = block(x, cos, sin)
    return out


def gpt_layers(gpt: GPT) -> list[ModelLayer]:
    """A GPT in its order; parameters keep their names. The head's weight is tied to the embedding's on another rank."""
    blocks = [ModelLayer({f"blocks.{number}": block}, run_block) for number, block in enumerate(gpt.blocks)]
    return [ModelLayer({"embedding": gpt.embedding}), *blocks, ModelLayer({"norm": gpt.norm, "head": gpt.head})]


class PipelinedGPT(GPTModule):
    """The same training with ``self.pipeline`` in place of ``self.model``."""

    pipeline: PipelineModule

    def configure_model(self) -> None:
        """Nothing: the strategy calls ``configure_pipeline``."""

    def configure_pipeline(self) -> list[ModelLayer]:
        """The layers, all built from one seed. A model too large for that is a list of ``LayerSpec``s."""
        return gpt_layers(GPT(self.model_config))

    def pipeline_batch(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Each byte of a window, and the byte after it."""
        return windows[:, :-1], windows[:, 1:]

    def pipeline_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def training_step(self, windows: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """The loss of all micro-batches, and once more detached."""
        loss = self.pipeline.loss(windows)
        return {"loss": loss, "micro_loss": loss.detach()}

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """Log the mean over all windows of all copies."""
        self.log_validation(self.pipeline.loss(windows), len(windows))


class TimelineOfOneStep(Callback):
    """Lets the strategy write its timeline (`strategy.timeline`) in one step only."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Recording may be switched on and off between batches."""
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        first = batch_idx % trainer.accumulate_grad_batches == 0
        engine.executor.record = first and trainer.global_step == TIMELINE_STEP


def draw_timeline(path: Path) -> None:
    """Picture that `zero-strategy schedule show --timeline` draws."""
    picture = path.with_suffix(".png")
    zero_strategy_command(["schedule", "show", "--timeline", str(path), "--output", str(picture)])
    print(f"timeline:   {picture}")


@hydra.main(version_base="1.3", config_path="../configs", config_name="train_gpt_pipeline")
def main(config: DictConfig) -> None:
    """Train, validate, report. Lightning starts this script once more for every further rank."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # slicing a tensor needs none
    train_pipeline(config, Path(HydraConfig.get().runtime.output_dir))


def train_pipeline(config: DictConfig, run_dir: Path) -> Trainer:
    """The run, into ``run_dir``."""
    seed_everything(config.seed, workers=True)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    module = PipelinedGPT(model=plain["model"], optim=plain["optim"])
    tokens = config.data.batch_size * config.model.block_size // config.strategy.stages  # of a rank
    metrics = MetricsWriter(run_dir / "metrics.jsonl", tokens, config.metrics_every_n_steps)
    timeline = run_dir / "timeline.jsonl"
    config.strategy.timeline = str(timeline)
    trainer = build_trainer(config, run_dir, metrics)
    trainer.callbacks.append(TimelineOfOneStep())  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        (run_dir / "model_config.json").write_text(json.dumps(asdict(module.model_config), indent=2) + "\n")

    train, validation = build_loaders(config)
    trainer.fit(module, train, validation, ckpt_path=config.ckpt_path)
    if metrics.validated_step != trainer.global_step:
        trainer.validate(module, validation, verbose=False)
    if trainer.is_global_zero:
        report(trainer, run_dir, config)
        if timeline.exists() and config.plot:
            draw_timeline(timeline)
    return trainer


if __name__ == "__main__":
    main()
