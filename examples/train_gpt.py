"""Train a byte-level GPT on the source of the Python standard library, sharded by ZeRO.

``python examples/train_gpt.py strategy=zero1 trainer.devices=4 model=gpt-50m``

The configuration is composed by Hydra from ``configs/``; any key can be overridden on the command line. A
run writes metrics, checkpoints and a picture of the loss into ``outputs/<date>/<time>``, and prints a
continuation sampled from the best checkpoint.
"""

import json
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader

from gpt_lightning import GPTModule
from gpt_metrics import MetricsWriter
from gpt_progress import StepsProgressBar
from stdlib_data import EvenWindows, RandomWindows, read_corpus


def trainer_arguments(config: DictConfig) -> dict[str, Any]:
    """The Trainer's arguments, with ``auto`` decided: all GPUs if there are any, else two CPU processes."""
    arguments: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    if arguments["accelerator"] == "auto":
        arguments["accelerator"] = "gpu" if torch.cuda.is_available() else "cpu"
    if arguments["devices"] == "auto" and arguments["accelerator"] == "cpu":
        arguments["devices"] = 2
    # A run shorter than the interval is validated, and so saved, once at its end.
    if arguments["max_steps"] > 0:
        micro_batches = arguments["max_steps"] * arguments["accumulate_grad_batches"]
        arguments["val_check_interval"] = min(arguments["val_check_interval"], micro_batches)
    return arguments


def build_trainer(config: DictConfig, run_dir: Path, metrics: MetricsWriter) -> Trainer:
    """A Trainer that keeps the best and the last checkpoint below ``run_dir``."""
    checkpoint = ModelCheckpoint(
        run_dir / "checkpoints", filename="best-{step}", monitor="val_loss", save_top_k=1, save_last=True
    )
    return Trainer(
        strategy=hydra.utils.instantiate(config.strategy),
        callbacks=[metrics, checkpoint, StepsProgressBar(refresh_rate=20)],
        logger=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,  # val_check_interval counts micro-batches over the whole run
        **trainer_arguments(config.trainer),
    )


def build_loaders(config: DictConfig) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Training and validation windows, in the order of their index; Lightning deals them out to the ranks."""
    corpus, data, block = read_corpus(), config.data, config.model.block_size
    train = RandomWindows(corpus.train, data.train_windows, block, config.seed)
    validation = EvenWindows(corpus.validation, data.val_windows, block)
    return DataLoader(train, data.batch_size), DataLoader(validation, data.batch_size)


def report(trainer: Trainer, run_dir: Path, config: DictConfig) -> None:
    """Print the result and where it lies, draw the loss, continue a prompt from the best checkpoint."""
    best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    print(f"\nvalidation: {float(trainer.callback_metrics['val_bpb']):.4f} bits per byte")
    print(f"metrics:    {run_dir / 'metrics.jsonl'}\ncheckpoint: {best}")
    if config.plot:
        from plot_loss import plot  # only here: the other ranks need no matplotlib

        plot([run_dir], run_dir / "loss.png")
        print(f"loss curve: {run_dir / 'loss.png'}")
    if config.sample.bytes:
        script = str(Path(__file__).with_name("sample_gpt.py"))
        sample = ["--prompt", config.sample.prompt, "--bytes", str(config.sample.bytes)]
        print(f"sample:     python {script} {best}\n", flush=True)
        subprocess.run([sys.executable, script, best, *sample], check=True)


@hydra.main(version_base="1.3", config_path="../configs", config_name="train_gpt")
def main(config: DictConfig) -> None:
    """Train, validate, report. Lightning starts this script once more for every further rank."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # slicing a tensor needs none
    seed_everything(config.seed, workers=True)
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    module = GPTModule(model=plain["model"], optim=plain["optim"])
    tokens = config.data.batch_size * config.model.block_size
    metrics = MetricsWriter(run_dir / "metrics.jsonl", tokens, config.metrics_every_n_steps)
    trainer = build_trainer(config, run_dir, metrics)
    if trainer.is_global_zero:
        (run_dir / "model_config.json").write_text(json.dumps(asdict(module.model_config), indent=2) + "\n")

    train, validation = build_loaders(config)
    trainer.fit(module, train, validation, ckpt_path=config.ckpt_path)
    if metrics.validated_step != trainer.global_step:
        trainer.validate(module, validation, verbose=False)
    if trainer.is_global_zero:
        report(trainer, run_dir, config)


if __name__ == "__main__":
    main()
