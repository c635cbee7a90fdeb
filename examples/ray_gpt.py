"""Train the byte-level GPT in the workers of Ray Train, sharded by ZeRO, with reports that survive a lost worker.

``python examples/ray_gpt.py --workers 2 --stage 3``

A second start with the same ``--folder`` and ``--name`` goes on from the last report, at any number of workers.
"""

import argparse
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

from gpt_lightning import GPTModule
from stdlib_data import RandomWindows, read_corpus
from zero_strategy.integrations.ray import RayReportCallback, RayZeroStrategy, reported_checkpoint


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="of ZeRO")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=512, help="of an epoch")
    parser.add_argument("--report-every", type=int, default=16, metavar="STEPS", help="besides the end of each epoch")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per worker")
    parser.add_argument("--failures", type=int, default=3, help="times that Ray starts workers anew")
    parser.add_argument("--folder", type=Path, default=Path("outputs/ray"), help="of runs; all hosts see it")
    parser.add_argument("--name", default="gpt", help="of the run")
    for name, size in (("block-size", 64), ("n-layer", 2), ("n-head", 4), ("d-model", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(argv)


class LoggedGPT(GPTModule):
    """The module with its loss logged, so that it is reported."""

    def training_step(self, windows: Any, batch_idx: int) -> Any:
        """See `GPTModule`."""
        found = super().training_step(windows, batch_idx)
        self.log("loss", found["micro_loss"], sync_dist=True)
        return found


def train(config: dict[str, Any]) -> None:
    """Run in each worker: train, from the last report on if there is one."""
    seed_everything(1234)
    optim = {"lr": 2e-3, "min_lr_ratio": 0.1, "warmup_steps": 10, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    windows = RandomWindows(read_corpus(None).train, config["windows"], config["model"]["block_size"], seed=1234)
    trainer = Trainer(
        max_epochs=config["epochs"],
        accelerator="auto" if config["gpu"] else "cpu",
        devices="auto",
        strategy=RayZeroStrategy(stage=config["stage"]),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayReportCallback(every_n_train_steps=config["report_every"])],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    loader = DataLoader(windows, batch_size=config["batch_size"], shuffle=True)
    trainer.fit(LoggedGPT(model=config["model"], optim=optim), loader, ckpt_path=reported_checkpoint())


def main(argv: list[str] | None = None) -> Any:
    """Start the workers; Ray's result."""
    args = parse(argv)
    model = {name: getattr(args, name) for name in ("block_size", "n_layer", "n_head", "d_model")}
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "folder": str(args.folder), "model": model},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            storage_path=str(args.folder.resolve()),
            name=args.name,
            failure_config=FailureConfig(max_failures=args.failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None and result.checkpoint is not None  # an epoch ends with a report
    print(f"loss: {result.metrics['loss']:.4f} nats, checkpoint: {result.checkpoint.path}")
    return result


if __name__ == "__main__":
    main()
