"""The `pytorch_lightning` package, whose classes are not those of `lightning.pytorch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.integrations.lightning.trainers import PLAIN, Net, error, join, loader, weights
from tests.launcher import Launcher
from tests.warm import run_warm_script
from zero_strategy import load_from_checkpoint


def fit(tmp: str) -> tuple[float, str]:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    join()
    found = {}
    for strategy in ("ddp", "zero3"):
        module = Module()
        trainer = pl.Trainer(
            strategy=strategy,
            devices=dist.get_world_size(),
            precision="32-true",
            gradient_clip_val=0.1,
            max_epochs=1,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            **PLAIN,  # type: ignore[arg-type]
        )
        trainer.fit(module, loader(), loader(8))
        found[strategy] = weights(module)
    trainer.save_checkpoint(f"{tmp}/pl.ckpt")
    again = Module()
    trainer.validate(again, loader(8), ckpt_path=f"{tmp}/pl.ckpt", verbose=False)
    assert error(weights(load_from_checkpoint(Module, f"{tmp}/pl.ckpt")), found["zero3"]) == 0
    return error(found["zero3"], found["ddp"]), type(trainer.strategy).__module__


def test_trains_as_ddp_and_saves(ranks: Launcher, tmp_path: Path) -> None:
    for found, module in ranks(2)(fit, str(tmp_path)):
        assert found < 2e-6
        assert module == "zero_strategy.integrations.pytorch_lightning"


WAYS = {
    "named before Lightning is imported": (
        "from zero_strategy import ZeroStrategy",
        "from pytorch_lightning import Trainer",
        "made = Trainer(accelerator='cpu', devices=1, strategy=ZeroStrategy(stage=2), barebones=True)",
    ),
    "a library uses the other one": (
        "import library",
        "import pytorch_lightning as pl, zero_strategy",
        "made = pl.Trainer(accelerator='cpu', devices=1, strategy=zero_strategy.ZeroStrategy(stage=2), barebones=True)",
    ),
    "inside of a function": (
        "import library",
        "def fit():",
        "    import pytorch_lightning as pl",
        "    from zero_strategy import PipelineStrategy",
        "    return pl.Trainer(accelerator='cpu', devices=1, strategy=PipelineStrategy(stages=1), barebones=True)",
        "made = fit()",
    ),
    "the other way round": (
        "import library",
        "import lightning as L",
        "from zero_strategy import ZeroStrategy",
        "made = L.Trainer(accelerator='cpu', devices=1, strategy=ZeroStrategy(stage=2), barebones=True)",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_strategy_is_for_the_trainer_in_use(way: str, tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("import lightning.pytorch, pytorch_lightning\n")
    (tmp_path / "train.py").write_text("\n".join((*WAYS[way], "print('made', type(made.strategy).__module__)")))
    done = run_warm_script("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = "lightning" if way == "the other way round" else "pytorch_lightning"
    assert done.stdout.splitlines()[-1] == f"made zero_strategy.integrations.{wanted}"


def test_what_is_refused_names_the_right_class() -> None:
    """Code that uses both gets that of `lightning.pytorch`."""
    import lightning.pytorch
    import pytorch_lightning as pl

    from zero_strategy import ZeroStrategy

    assert issubclass(ZeroStrategy, lightning.pytorch.strategies.Strategy)
    right = r"pytorch_lightning takes zero_strategy\.integrations\.pytorch_lightning\.ZeroStrategy"
    with pytest.raises(ValueError, match=right):
        pl.Trainer(accelerator="cpu", devices=1, strategy=ZeroStrategy(stage=2), barebones=True)
