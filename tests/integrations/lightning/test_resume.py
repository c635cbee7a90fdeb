"""A run that was stopped and resumed is, bit by bit, the run that never stopped."""

from __future__ import annotations

import random
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.integrations.lightning.stateful import Dropping, Stateful, differences, left, rank, rows
from tests.integrations.lightning.test_fabric import zero as fabric_zero
from tests.integrations.lightning.trainers import Module, join, loader, trainer, zero
from tests.launcher import Launcher


def seed(number: int) -> None:
    torch.manual_seed(number + rank())
    random.seed(number + rank())


def run(
    tmp: str, stage: int, late: bool, ckpt_path: str | None = None, plain: bool = False, **flags: Any
) -> dict[str, Any]:
    """Train two epochs of seven batches, saving after every step, every validation and every epoch."""
    seed(1000 if ckpt_path else 3)
    folder = f"{tmp}/resumed" if ckpt_path else f"{tmp}/whole"
    callbacks = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder, "epoch-{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True),
        ModelCheckpoint(folder, "val-{step}", mode="max", save_top_k=-1, save_on_train_epoch_end=False),
    ]
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 4, **flags}
    module = Dropping()
    made = trainer(zero(stage), callbacks=callbacks, enable_checkpointing=True, **settings)
    batches = DataLoader(rows(21), 3, shuffle=True) if plain else Stateful(rows(21), 3, late)
    made.fit(module, batches, loader(8, seed=5), ckpt_path=ckpt_path)
    return left(made, module)


def compared(tmp: str, stage: int, names: list[str], late: bool = False, **flags: Any) -> dict[str, list[str]]:
    expected = run(tmp, stage, late, **flags)
    assert len(expected["losses"]) == 14
    return {name: differences(run(tmp, stage, late, f"{tmp}/whole/{name}.ckpt", **flags), expected) for name in names}


EVERYWHERE = ["step=1", "step=2", "val-step=2", "step=4", "epoch-epoch=0", "step=6"]
"""Inside an epoch; before and after a validation there; after an epoch's last batch; at its end; in the next one."""

BY_STEPS = {"max_steps": 8, "max_epochs": -1}


@pytest.mark.parametrize(
    ("world", "stage", "names", "flags"),
    [
        (1, 2, EVERYWHERE, {}),
        (1, 1, ["step=4", "epoch-epoch=0", "val-step=4"], {"val_check_interval": None, **BY_STEPS}),
        (1, 0, ["step=3", "step=4", "epoch-epoch=0", "val-step=4"], {"late": True, "val_check_interval": None}),
        (1, 0, ["step=4", "epoch-epoch=0"], {"late": True, **BY_STEPS}),
        (1, 3, ["epoch-epoch=0", "step=4"], {"plain": True}),
        (2, 1, ["step=1", "step=4", "epoch-epoch=0"], {}),
        (2, 3, ["step=2", "step=5", "epoch-epoch=0"], {"precision": "16-mixed", "gradient_clip_val": 0.5}),
    ],
    ids=[
        "one rank",
        "by steps",
        "loader that ends",
        "loader that ends, by steps",
        "loader without a state",
        "stage 1",
        "stage 3, loss scale",
    ],
)
def test_bit_by_bit(
    ranks: Launcher, tmp_path: Path, world: int, stage: int, names: list[str], flags: dict[str, Any]
) -> None:
    for found in ranks(world, timeout=120)(compared, str(tmp_path), stage, names, **flags):
        assert found == {name: [] for name in names}


# ---- Fabric ----


def fabric_run(tmp: str, stage: int, resume: bool) -> dict[str, Any]:
    """Two epochs of five steps with dropout; saved inside of the second."""
    join()
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=fabric_zero(stage))
    made.launch()
    torch.manual_seed((1000 if resume else 3) + rank())
    random.seed((1000 if resume else 3) + rank())
    module = Dropping().net
    model, optimizer = made.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = Stateful(rows(15), 3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": batches}
    state |= {"step": 0}
    found: dict[int, float] = {}
    if resume:
        made.load(f"{tmp}/middle", state)
    while state["step"] < 10:
        iterator = iter(batches)
        if resume and not found:
            made.load(f"{tmp}/middle", {"model": model, "optimizer": optimizer})  # the iterator drew a number
        for x, y in iterator:
            loss = F.mse_loss(model(F.dropout(x, 0.3)).squeeze(-1), y)
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            found[state["step"]] = loss.item()
            state["step"] += 1
            if state["step"] == 7 and not resume:
                made.save(f"{tmp}/middle", state)
    engine = made.strategy.engines[0]  # type: ignore[attr-defined]
    return {"losses": found, "weights": engine.full_state_dict(), "lr": scheduler.get_last_lr()}


def fabric_resumed(tmp: str, stage: int) -> list[Any]:
    expected, found = fabric_run(tmp, stage, False), fabric_run(tmp, stage, True)
    same = [torch.equal(found["weights"][name], value) for name, value in expected["weights"].items()]
    late = {step: loss for step, loss in expected["losses"].items() if step >= 7}
    return [found["losses"] == late, all(same), found["lr"] == expected["lr"]]


@pytest.mark.parametrize("stage", [1, 3])
def test_fabric(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    assert ranks(2)(fabric_resumed, str(tmp_path), stage) == [[True] * 3] * 2


# ---- other shapes, and what is left alone ----


def saved_by_two(tmp: str) -> dict[str, Any]:
    return run(tmp, 3, False)


def loaded_by_one(tmp: str) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(tmp, 1, False, f"{tmp}/whole/step=1.ckpt")
    told = [str(one.message) for one in caught if "every rank gets the one of rank 0" in str(one.message)]
    return [len(found["losses"]), found["step"], len(told), "saved by 2 ranks" in told[0], left_alone(tmp)]


class FirstState(Callback):
    """Remembers the random state at the first batch."""

    state: torch.Tensor | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self.state = torch.get_rng_state() if self.state is None else self.state


def first_state(tmp: str, **checkpoint: Any) -> torch.Tensor | None:
    """The random state that a resumed run begins with, its own before being the same every time."""
    torch.manual_seed(1)
    seen = FirstState()
    made = trainer(zero(2, checkpoint=checkpoint), max_epochs=1, callbacks=[seen])
    made.fit(Dropping(), Stateful(rows(21), 3), ckpt_path=f"{tmp}/whole/step=1.ckpt")
    return seen.state


def left_alone(tmp: str) -> list[bool]:
    off, on = first_state(tmp, random_state=False), first_state(tmp)
    assert off is not None and on is not None
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # the loader's iterator
    drawn = torch.get_rng_state()
    torch.manual_seed(1)
    trainer(zero(2)).validate(Dropping(), loader(8, seed=5), ckpt_path=f"{tmp}/whole/step=1.ckpt", verbose=False)
    return [torch.equal(off, drawn), torch.equal(on, drawn), torch.equal(torch.get_rng_state(), drawn)]


def test_another_number_of_ranks_is_told_about_loaders(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(saved_by_two, str(tmp_path))
    assert ranks(1)(loaded_by_one, str(tmp_path)) == [[12, 8, 1, True, [True, False, True]]]


def resumed_without_time(tmp: str, stage: int) -> list[int]:
    """Steps at the save, and after a run that resumes when its time is over."""
    first = trainer(zero(stage), max_epochs=1, callbacks=[Timer(timedelta(hours=1))])
    first.fit(Module(), loader())
    first.save_checkpoint(f"{tmp}/c")
    again = trainer(zero(stage), max_epochs=3, callbacks=[Timer(timedelta(microseconds=1))])
    again.fit(Module(), loader(), ckpt_path=f"{tmp}/c")
    return [first.global_step, again.global_step]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_resumes_without_time_left_trains_no_batch(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    for saved, after in ranks(2)(resumed_without_time, str(tmp_path), stage):
        assert saved == after > 0
