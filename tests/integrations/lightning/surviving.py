"""Processes that fit a small model and survive each other; one kills itself on the way.

They are forked from one process that has imported all that they need: each line of its input is the environment of one,
in JSON, and it answers with the process id.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch

warnings.filterwarnings("ignore")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from zero_strategy import ZeroStrategy  # noqa: E402
from zero_strategy.survive.formation import MembersChangedError  # noqa: E402

ROWS, SLOTS = 60, 6


class Lit(pl.LightningModule):
    """Regression with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Dies(pl.Callback):
    """Kills its own process where the environment variable DIE says: `step.micro-batch`, or `validation.step`."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        micro = batch_idx % trainer.accumulate_grad_batches
        if os.environ.get("DIE") == f"{trainer.global_step}.{micro}":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if os.environ.get("DIE") == f"validation.{trainer.global_step}":
            os.kill(os.getpid(), signal.SIGKILL)


class Saves(ModelCheckpoint):
    """Ends this rank's part where a checkpoint is saved, and ModelCheckpoint has not yet taken note of it.

    The environment variable DIE kills the process (`saved.step`), or takes it out of the ranks (`leaves.step`).
    """

    left = False

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        end, _, step = os.environ.get("DIE", "").partition(".")
        if end not in ("saved", "leaves") or step != str(trainer.global_step) or self.left:
            super()._save_checkpoint(trainer, filepath)
            return
        trainer.save_checkpoint(filepath)
        if end == "saved":
            os.kill(os.getpid(), signal.SIGKILL)
        self.left = True
        raise MembersChangedError("this rank leaves")


class Curve(pl.loggers.logger.DummyLogger):
    """Keeps the losses that were logged, and writes down when steps end."""

    def __init__(self, trace: Path) -> None:
        super().__init__()
        self.curve: list[tuple[int, float]] = []
        self._trace = trace

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "zero/loss" in metrics:
            self.curve.append((int(step or 0), metrics["zero/loss"]))
            with self._trace.open("a") as file:
                file.write(f"{step}\n")


class Slow(pl.Callback):
    """Makes steps last, so that a new process finds the others at work."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(float(os.environ.get("SLOW", "0")))


def digest(module: nn.Module) -> str:
    state = module.state_dict()
    text = b"".join(state[name].detach().contiguous().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(text).hexdigest()


def main(result: Path, survive: bool) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 8, generator=generator)
    rows = TensorDataset(x, x.sum(1, keepdim=True).sin())
    curve = Curve(result.with_suffix(".trace"))
    folder = result.parent / "checkpoints" if survive else result.parent / "undisturbed"
    saves = Saves(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    best = ModelCheckpoint(folder, "best-{step}", monitor="val_loss", save_top_k=1)
    callbacks = [saves, best, Dies(), Slow()]
    trainer = pl.Trainer(
        strategy=ZeroStrategy(
            stage=int(os.environ.get("STAGE", "3")), units={"min_numel": 0},
            reproducible={"slots": int(os.environ.get("SLOTS", SLOTS)), "seed": 7}, survive=survive,
            checkpoint={"asynchronous": "BACKGROUND" in os.environ},
        ),
        accelerator="cpu", devices=1, max_epochs=2, log_every_n_steps=1, gradient_clip_val=0.5,
        logger=[curve, CSVLogger(result.parent / result.stem)], callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
    )  # fmt: skip
    module = Lit()
    objects = list(module.parameters())
    trainer.fit(module, DataLoader(rows, 2, shuffle=True), DataLoader(rows, 10))
    kept: Any = trainer
    assert list(module.parameters()) == objects and kept.callbacks[-2:] == [saves, best]
    found = {
        "digest": digest(module),
        "step": trainer.global_step,
        "world": trainer.world_size,
        "rank": trainer.global_rank,
        "curve": curve.curve,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "saved": sorted(path.name for path in folder.iterdir()),
        "best": saves.best_model_path and os.path.basename(best.best_model_path),
    }
    result.write_text(json.dumps(found))


def run(spec: dict[str, Any]) -> NoReturn:
    """One process, whose output goes to RESULT.log."""
    code = 1
    try:
        result = Path(spec.pop("RESULT"))
        log = os.open(result.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(log, stream)
        survive = bool(spec.pop("SURVIVE"))
        os.environ.update(spec)
        main(result, survive)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import zero_strategy.integrations.lightning.surviving
    import zero_strategy.ops  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        if not (child := os.fork()):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(json.loads(line))
        print(child, flush=True)
