"""Functions that train: in Ray's workers, and in ranks of a pool as the oracle without Ray."""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback, TrainingArguments

from tests.integrations.ray.cluster import wait_for

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def plain_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))


def rows(count: int = 48) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


class Placed(DataLoader[Any]):
    """This rank's batches of four, shuffled anew in each epoch; it knows its place, as torchdata's loader does."""

    def __init__(self) -> None:
        super().__init__(rows(), batch_size=4)
        self.epoch, self.position, self.loaded = -1, 0, False

    def __len__(self) -> int:
        return 12 // dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self.loaded or self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        self.loaded = False
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        x, y = rows().tensors
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.epoch))
        own = order[dist.get_rank() :: dist.get_world_size()].split(4)
        while self.position < len(self):
            chosen = own[self.position]
            self.position += 1
            yield x[chosen], y[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.loaded = state["epoch"], state["position"], True


class Module(pl.LightningModule):
    """A classifier; `before` is called with the number of each step."""

    def __init__(self, before: Callable[[int], None] | None = None, lr: float = 1e-2) -> None:
        super().__init__()
        self.net, self.before, self.lr = plain_net(), before, lr
        self.losses: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.before is not None:
            self.before(self.trainer.global_step)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item().hex())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class OwnLoader(Module):
    """With a loader that is made once the process group is there."""

    def train_dataloader(self) -> Placed:
        return Placed()


def fit(
    trainer: pl.Trainer,
    path: str | None = None,
    placed: bool = False,
    before: Callable[[int], None] | None = None,
    lr: float = 1e-2,
) -> list[str]:
    """Train with shuffled data, which the Trainer divides among ranks; the losses of this rank in each bit.

    With `placed` the loader itself divides the data, and knows its place.
    """
    pl.seed_everything(0)
    module = (OwnLoader if placed else Module)(before, lr)
    trainer.fit(module, None if placed else DataLoader(rows(), batch_size=4, shuffle=True), ckpt_path=path)
    return module.losses


def without_ray(stage: int, epochs: int, path: str | None = None, placed: bool = False, lr: float = 1e-2) -> list[str]:
    """The oracle, on the ranks of a pool."""
    from tests.integrations.lightning.trainers import trainer
    from zero_strategy import ZeroStrategy

    flags = {"max_epochs": epochs, "use_distributed_sampler": not placed}
    return fit(trainer(ZeroStrategy(stage=stage), **flags), path, placed, lr=lr)


def lightning_worker(config: dict[str, Any]) -> None:
    """As in Ray's guide for Lightning, with another strategy; for each stage."""
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from zero_strategy.integrations.ray import RayReportCallback, RayZeroStrategy, reported_checkpoint

    path, placed = reported_checkpoint(), "dies" in config
    for stage in config["stages"]:
        own = RayReportCallback(every_n_train_steps=config.get("every", 0))
        trainer = pl.Trainer(
            max_epochs=config["epochs"],
            devices="auto",
            accelerator="cpu",
            strategy=RayZeroStrategy(stage=stage),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback() if config.get("rays_callback") else own],
            use_distributed_sampler=not placed,
            **QUIET,
        )
        trainer = prepare_trainer(trainer)
        losses = fit(trainer, path, placed, lambda step: happen(step, config), config.get("lr", 1e-2))
        tell(config, f"stage{stage}", {"losses": losses, "world": trainer.world_size, "path": path})


def happen(step: int, config: dict[str, Any]) -> None:
    """An event before a step.

    `dies`: rank 1 is killed in the first attempt, inside of the second epoch, a step behind a report. `meets`: the
    workers of as many runs wait until all of them are in their third step.
    """
    if "dies" in config and step == 11 and dist.get_rank() == 1 and not os.path.exists(config["dies"]):
        Path(config["dies"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "meets" in config and step == 2:
        folder = Path(config["folder"])
        (folder / f"met.rank{dist.get_rank()}").touch()
        wait_for(lambda: len(list(folder.parent.glob("*/met.rank*"))) == config["meets"] * dist.get_world_size())


def sweep_trial(config: dict[str, Any]) -> None:
    """A trial of Ray Tune: workers of its own, which report to it."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    folder = Path(config["folder"], f"lr{config['lr']}")
    folder.mkdir()
    TorchTrainer(
        lightning_worker,
        train_loop_config={**config, "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder), name="run", callbacks=[TuneReportCallback()]),
    ).fit()


def tell(config: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    """Write what a worker found where the test reads it."""
    Path(config["folder"], f"{name}.rank{dist.get_rank()}.json").write_text(json.dumps(found))


def told(folder: Path, name: str, workers: int = 2) -> list[Any]:
    """Findings of each worker."""
    return [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(workers)]


def measured_worker(config: dict[str, Any]) -> None:
    """Growth of this worker's peak of resident memory in a report, in bytes; a small model has reported before."""
    from zero_strategy import ZeroEngine
    from zero_strategy.integrations.ray import report

    settings = {"stage": 3, "units": {"min_numel": 0}}
    for width in (64, config["width"]):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(config["units"])))
        engine, optimizer = ZeroEngine(model, settings), torch.optim.AdamW(model.parameters())
        with ended(engine):
            engine.attach(optimizer)
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            report({"width": width}, engine.save)
            growth, held = resident("VmHWM") - before, sum(engine.state_bytes().values())
    tell(config, "measured", {"growth": growth, "held": held})


def resident(entry: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(entry)).split()[1]) * 1024


# ---- other loops ----


def batches(rank: int, world: int, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of each step's batch."""
    x, y = rows().tensors
    for step in steps:
        own = slice(8 * step + rank * 8 // world, 8 * step + (rank + 1) * 8 // world)
        yield x[own], y[own]


def engine_loop(steps: range, path: str | None = None) -> tuple[list[str], Any]:
    """A loop of one's own over an engine; the losses of this rank, and the engine."""
    from zero_strategy import ZeroEngine

    model = plain_net()
    torch.manual_seed(2)
    engine, optimizer = ZeroEngine(model, {"stage": 3}), torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    if path is not None:
        engine.load(path)
    losses = []
    for x, y in batches(dist.get_rank(), dist.get_world_size(), steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses, engine


def accelerate_loop(steps: range, path: str | None = None) -> tuple[list[str], Any]:
    """The same with an Accelerator."""
    from zero_strategy import ZeroAccelerator

    accelerator = ZeroAccelerator(zero_config={"stage": 3}, cpu=True)
    net = plain_net()
    torch.manual_seed(2)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    if path is not None:
        accelerator.load_state(path)
    losses = []
    for x, y in batches(accelerator.process_index, accelerator.num_processes, steps):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses, accelerator


class Paths(TrainerCallback):
    """Keeps the path of each report."""

    def __init__(self) -> None:
        self.reported: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        from zero_strategy.integrations.ray import reported_checkpoint

        self.reported.append(reported_checkpoint())


def arguments_of(folder: str, **more: Any) -> TrainingArguments:
    """Quiet arguments of transformers' trainer on the CPU, which logs every step."""
    return TrainingArguments(
        folder,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **more,
    )


def transformers_loop(folder: str, callbacks: list[Any], path: str | None = None) -> list[float]:
    """Six steps with transformers' trainer, saved after four; the losses that it logs."""
    from tests.integrations.huggingface.training import build
    from tests.integrations.huggingface.training import rows as texts
    from zero_strategy import ZeroTrainer

    arguments = arguments_of(folder, max_steps=6, save_steps=4)
    trainer = ZeroTrainer(
        build("gpt2"), arguments, train_dataset=texts(), zero_config={"stage": 3}, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=path)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@contextmanager
def ended(runner: Any) -> Iterator[Any]:
    """Let go of an engine, or of what an Accelerator holds, whose `end_training` would end the process group, too."""
    yield runner
    (runner.close if hasattr(runner, "close") else runner.free_memory)()


def loops_worker(config: dict[str, Any]) -> None:
    """Each loop: half of the steps, a report, and the rest in an engine that resumes from it."""
    from zero_strategy.integrations.ray import RaySaveCallback, report, reported_checkpoint

    for name, loop in (("engine", engine_loop), ("accelerate", accelerate_loop)):
        losses, runner = loop(range(3))
        with ended(runner):
            report({"loss": float.fromhex(losses[-1])}, runner.save if name == "engine" else runner.save_state)
        more, runner = loop(range(3, 6), reported_checkpoint())
        with ended(runner):
            tell(config, name, {"losses": losses + more})
    paths = Paths()
    first = transformers_loop(config["folder"] + "/a", [RaySaveCallback(), paths])
    again = transformers_loop(config["folder"] + "/b", [], paths.reported[0])
    tell(config, "transformers", {"first": first, "again": again})
    report({"end": 1})


def loops_without_ray(folder: str) -> dict[str, Any]:
    """The oracle, on the ranks of a pool: no report, no resume."""
    from tests.integrations.accelerate.training import fresh_state
    from tests.integrations.lightning.trainers import join

    join()
    found: dict[str, Any] = {}
    with fresh_state():
        for name, loop in (("engine", engine_loop), ("accelerate", accelerate_loop)):
            found[name], runner = loop(range(6))
            with ended(runner):
                pass
        found["transformers"] = transformers_loop(folder, [])
    return found
