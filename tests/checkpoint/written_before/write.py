"""A small checkpoint of each kind, as two ranks write it; and all that is in one, as ranks load it.

`written.tar.xz` was written by commit b93aa15, before the packages got their names of today. To write it again, in a
worktree of that commit with this folder copied into its `tests/checkpoint`:

    PYTHONPATH=$PWD python -m tests.checkpoint.written_before.write written.tar.xz

Each kind is a folder of the archive, with the checkpoint in `saved` and its content in `expected.pt`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy
from tests.launcher import Launcher
from zero_strategy.integrations.lightning import ParameterNorms

ARCHIVE = Path(__file__).parent / "written.tar.xz"
STEPS = 2
Content = dict[str, Any]
"""Tensors and plain values, by name."""


class Net(nn.Module):
    """A tie, a buffer, parameters of several shapes: 156 elements."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8)) for _ in range(1))
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(6, 8, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return torch.nn.functional.linear(self.norm(x), self.last.weight.T)


def batch(step: int) -> Tensor:
    """Of this rank."""
    seed = 10 * step + (dist.get_rank() if dist.is_initialized() else 0)
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two, for their order is in a checkpoint, too."""
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def content(engine: Any, optimizer: torch.optim.Optimizer, **more: Any) -> Content:
    """Full weights and optimizer state, bit for bit."""
    found = {f"weight {name}": tensor.clone() for name, tensor in engine.full_state_dict().items()}
    for name, values in engine.full_optimizer_state(optimizer).items():
        found |= {f"state {name} {key}": value for key, value in values.items()}
    for number, group in enumerate(optimizer.param_groups):
        found[f"group {number}"] = {key: value for key, value in group.items() if key != "params"}
    return found | more


# ---------------------------------------------------------------------------------------------------- engines


def engine_of(
    stage: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Net, Any, torch.optim.Optimizer]:
    net = Net().to(dtype)
    engine = zero_strategy.ZeroEngine(net, zero_strategy.load_config(stage=stage, units={"min_numel": 0}, **settings))
    optimizer = torch.optim.AdamW(groups(net), lr=0.02)
    engine.attach(optimizer)
    return net, engine, optimizer


def train(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        dtype = next(net.parameters()).dtype
        net(batch(step).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.seen.add_(1)


def save_engine(folder: Path, stage: int, **settings: Any) -> Content:
    net, engine, optimizer = engine_of(stage, **settings)
    train(net, optimizer)
    engine.save_checkpoint(folder, "tag", {"mine": [1, 2.5]}).finish()
    return content(engine, optimizer, client={"mine": [1, 2.5]}, steps=engine.steps.taken)


def load_engine(folder: Path, stage: int, **settings: Any) -> Content:
    _, engine, optimizer = engine_of(stage, **settings)
    _, client = engine.load_checkpoint(folder)
    return content(engine, optimizer, client=client, steps=engine.steps.taken)


# ---------------------------------------------------------------------------------------------------- pipeline


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def pipeline_of() -> tuple[Any, torch.optim.Optimizer]:
    from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
    from zero_strategy.pipeline.module import PipelineModule

    torch.manual_seed(6)
    tied = [TiedLayerSpec("embed", nn.Embedding, 7, 4), TiedLayerSpec("embed", nn.Embedding, 7, 4, forward_fn=head)]
    layers = [tied[0], *(LayerSpec(Layer) for _ in range(4)), LayerSpec(nn.LayerNorm, 4), tied[1]]
    module = PipelineModule(layers, min(2, dist.get_world_size()), loss_fn=nn.functional.cross_entropy)
    engine = zero_strategy.PipelineEngine(
        module, {"stage": 1, "pipeline": {"stages": min(2, dist.get_world_size()), "micro_batches": 2}}
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine.attach(optimizer)
    return engine, optimizer


def head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def save_pipeline(folder: Path) -> Content:
    engine, optimizer = pipeline_of()
    tokens = torch.arange(10) % 7
    for _ in range(STEPS):
        engine.forward_backward(iter([(tokens[:4], tokens[1:5]), (tokens[4:8], tokens[5:9])]))
        optimizer.step()
        optimizer.zero_grad()
    engine.save(folder).finish()
    return content(engine, optimizer)


def load_pipeline(folder: Path) -> Content:
    engine, optimizer = pipeline_of()
    engine.load(folder)
    return content(engine, optimizer)


# --------------------------------------------------------------------------------------------------- Lightning


class Module(pl.LightningModule):
    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()

    def training_step(self, rows: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(rows[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(groups(self.net), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Counting(pl.Callback):
    """State of its own, and, where a training begins from a checkpoint, all that was loaded."""

    def __init__(self) -> None:
        self.batches = 0
        self.found: Content = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step:
            self.found = trained(trainer, self)
            trainer.should_stop = True


def trained(trainer: pl.Trainer, counting: Counting) -> Content:
    strategy: Any = trainer.strategy
    optimizer = trainer.optimizers[0]
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return content(
        strategy.engine, optimizer, batches=counting.batches, global_step=trainer.global_step,
        epoch=trainer.current_epoch, scheduler=scheduler.last_epoch,
    )  # fmt: skip


def trainer_of(folder: Path, stage: int, counting: Counting, **settings: Any) -> pl.Trainer:
    join_as_launched()
    strategy = zero_strategy.ZeroStrategy(stage=stage, units={"min_numel": 0}, **settings)
    best = ModelCheckpoint(folder.parent / "unused", save_top_k=0)
    return pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_steps=2 * STEPS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[counting, best, ParameterNorms()], num_sanity_val_steps=0,
    )  # fmt: skip


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.cat([batch(step) for step in range(2 * STEPS)])), 2)


class Saving(Counting):
    """Saves in the middle of the epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def state_key(self) -> str:
        return "Counting"

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:  # type: ignore[override]
        self.batches += 1
        if trainer.global_step == STEPS:
            trainer.save_checkpoint(self.folder)
            self.found = trained(trainer, self)
            trainer.should_stop = True


class Loading(Counting):
    @property
    def state_key(self) -> str:
        return "Counting"


def save_lightning(folder: Path, stage: int, **settings: Any) -> Content:
    saving = Saving(folder)
    trainer_of(folder, stage, saving, **settings).fit(Module(), loader())
    return saving.found


def load_lightning(folder: Path, stage: int, **settings: Any) -> Content:
    loading = Loading()
    trainer_of(folder, stage, loading, **settings).fit(Module(), loader(), ckpt_path=str(folder), weights_only=False)
    return loading.found


# -------------------------------------------------------------------------------------------------- Accelerate


class Registered:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def accelerator_of() -> tuple[Any, Net, Any, Registered]:
    join_as_launched()
    reset_accelerate()
    accelerator = zero_strategy.ZeroAccelerator(zero_config={"stage": 3, "units": {"min_numel": 0}})
    net, registered = Net(), Registered()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(groups(net), lr=0.02))
    accelerator.register_for_checkpointing(registered)
    return accelerator, net, optimizer, registered


def save_accelerate(folder: Path) -> Content:
    accelerator, net, optimizer, registered = accelerator_of()
    for step in range(STEPS):
        accelerator.backward(net(batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        registered.seen += 1
    accelerator.step = 5
    accelerator.save_state(str(folder))
    return accelerated(accelerator, net, optimizer, registered)


def load_accelerate(folder: Path) -> Content:
    accelerator, net, optimizer, registered = accelerator_of()
    accelerator.load_state(str(folder))
    return accelerated(accelerator, net, optimizer, registered)


def accelerated(accelerator: Any, net: Net, optimizer: Any, registered: Registered) -> Content:
    engine = accelerator.engine(net)
    try:
        return content(engine, optimizer.optimizer, seen=registered.seen, step=accelerator.step)
    finally:
        reset_accelerate()


def reset_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def join_as_launched() -> None:
    """Make frameworks see the ranks of a pool as processes that a launcher started."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"ACCELERATE_USE_CPU": "true"}


# ------------------------------------------------------------------------------------------------------- kinds


class Kind(NamedTuple):
    save: Callable[..., Content]
    load: Callable[..., Content]
    settings: dict[str, Any] = {}


KINDS = {
    "stage 1": Kind(save_engine, load_engine, {"stage": 1}),
    "stage 2, bfloat16": Kind(save_engine, load_engine, {"stage": 2, "dtype": torch.bfloat16}),
    "stage 3": Kind(save_engine, load_engine, {"stage": 3}),
    "pieces": Kind(save_engine, load_engine, {"stage": 3, "checkpoint": {"layout": "pieces"}}),
    "offloaded": Kind(save_engine, load_engine, {"stage": 3, "offload": {"optimizer": "cpu"}}),
    "pipeline": Kind(save_pipeline, load_pipeline),
    "Trainer": Kind(save_lightning, load_lightning, {"stage": 3}),
    "Trainer, single file": Kind(save_lightning, load_lightning, {"stage": 2, "checkpoint": {"format": "file"}}),
    "Accelerate": Kind(save_accelerate, load_accelerate),
}


def save_all(root: Path) -> None:
    """On each rank."""
    for name, kind in KINDS.items():
        (root / name).mkdir(exist_ok=True)
        found = kind.save(root / name / "saved", **kind.settings)
        if dist.get_rank() == 0:
            torch.save(found, root / name / "expected.pt")


def load_all(root: Path, names: list[str]) -> dict[str, Content]:
    """On each rank."""
    return {name: KINDS[name].load(root / name / "saved", **KINDS[name].settings) for name in names}


def main(target: str) -> None:
    launcher = Launcher()
    with tempfile.TemporaryDirectory() as root:
        launcher(2, timeout=300)(save_all, Path(root))
        for name in KINDS:
            shutil.rmtree(Path(root) / name / "unused", ignore_errors=True)
        with tarfile.open(target, "w:xz") as archive:
            for name in KINDS:
                archive.add(Path(root) / name, name)
    launcher.close()


if __name__ == "__main__":
    main(sys.argv[1])
