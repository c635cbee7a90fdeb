"""A loader with a state, a model with dropout, and what a run leaves behind: to compare runs bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.lightning.trainers import Module, data


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Stateful(DataLoader[Any]):
    """Shuffles by itself, differently on every rank and in every epoch; knows where it is.

    Args:
        dataset: The rows.
        batch: Rows of a batch.
        late: Whether a state from the end of an epoch gives an iterator at its end, as torchdata's loader does; else
            it begins the next epoch.
    """

    def __init__(self, dataset: TensorDataset, batch: int, late: bool = False) -> None:
        super().__init__(dataset, batch_size=batch)
        self.seed, self.epoch, self.position, self.late = 17 + 1000 * rank(), -1, 0, late
        self.loaded = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        torch.empty((), dtype=torch.int64).random_()  # as the loader of torch does
        ended = self.position >= len(self)
        if self.loaded and not (ended and not self.late):
            self.loaded = False
            return self._rest()
        self.loaded = False
        self.epoch, self.position = self.epoch + 1, 0
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        x, y = self.dataset.tensors  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        rows = torch.randperm(len(x), generator=generator).split(self.batch_size or 1)
        while self.position < len(self):
            chosen = rows[self.position]
            self.position += 1
            yield x[chosen], y[chosen] + 0.01 * random.random()  # an augmentation

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self.loaded = True


def rows(count: int) -> TensorDataset:
    """This rank's own rows."""
    return data(count, seed=rank())


class Dropping(Module):
    """With dropout; remembers the loss of every batch by its number in the whole run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss((self.net(F.dropout(x, 0.3)) * self.scale).squeeze(-1).float(), y.float())
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        assert number not in self.seen
        self.seen[number] = loss.item()
        self.log("loss", loss, sync_dist=True)
        return loss


def left(run: pl.Trainer, module: Dropping) -> dict[str, Any]:
    """Losses, weights and moments on this rank; all ranks call it."""
    engine = run.strategy.engine  # type: ignore[attr-defined]
    states = engine.full_optimizer_state(engine.optimizers[0].optimizer)
    return {
        "losses": dict(module.seen),
        "weights": {name: value.clone() for name, value in engine.full_state_dict().items()},
        "moments": {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()},
        "lr": [group["lr"] for group in run.optimizers[0].param_groups],
        "step": run.global_step,
        "scale": run.precision_plugin.state_dict(),
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Differences of a resumed run from the uninterrupted one, bit by bit."""
    wrong = [
        f"loss {number}: {loss} != {expected['losses'].get(number)}"
        for number, loss in found["losses"].items()
        if loss != expected["losses"].get(number)
    ]
    for kind in ("weights", "moments"):
        assert found[kind].keys() == expected[kind].keys()
        wrong += [f"{kind} {name}" for name, value in found[kind].items() if not _same(value, expected[kind][name])]
    wrong += [
        f"{key}: {found[key]} != {expected[key]}" for key in ("lr", "step", "scale") if found[key] != expected[key]
    ]
    if max(found["losses"], default=None) != max(expected["losses"]):
        wrong.append(f"ended with batch {max(found['losses'], default=None)}, not {max(expected['losses'])}")
    return wrong


def _same(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else bool(ours == theirs)
