"""The Trainer on ranks with different numbers of batches, against one process that does the sums by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import zero_strategy
from tests.integrations.lightning.stateful import Dropping, Stateful, differences, left
from tests.integrations.lightning.test_fabric import fabric
from tests.integrations.lightning.test_fabric import zero as fabric_zero
from tests.integrations.lightning.trainers import Module, Net, data, loader, raises, trainer, weights, zero
from tests.launcher import Launcher
from tests.reference import ORDERS, Order, _reduce, clip, unequal
from zero_strategy.integrations.lightning.uneven import _Resumed, needs_more

COUNTS = (5, 3)
EPOCHS = 2
ROWS = 4


class Rows(IterableDataset[Any]):
    """A rank's rows, without a length."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter(list(data(ROWS * COUNTS[self.rank], seed=self.rank)))


def batches(rank: int | None = None, sized: bool = True) -> DataLoader[Any]:
    rank = dist.get_rank() if rank is None else rank
    rows: Any = data(ROWS * COUNTS[rank], seed=rank) if sized else Rows(rank)
    return DataLoader(rows, ROWS)


class CollectiveRecord(Module):
    """Remembers what hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.before_backward: list[float] = []
        self.validated: list[int] = []
        self.estimated = 0.0

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches  # makes the loader
        return super().configure_optimizers()

    def on_before_backward(self, loss: Tensor) -> None:
        self.before_backward.append(loss.item())

    def on_validation_start(self) -> None:
        self.validated.append(len(self.losses))

    def train_dataloader(self) -> DataLoader[Any]:
        return batches()


class Manual(CollectiveRecord):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]


CASES: dict[str, tuple[type[CollectiveRecord], int, str, dict[str, Any]]] = {
    "join": (CollectiveRecord, 3, "join", {"num_sanity_val_steps": 1}),
    "active, accumulation, clipping": (
        CollectiveRecord, 2, "join_active", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    ),
    "manual, loaded anew": (Manual, 1, "join_active", {"reload_dataloaders_every_n_epochs": 1}),
    "no length": (CollectiveRecord, 1, "join", {"sized": False}),
    "four batches": (CollectiveRecord, 0, "join_active", {"limit_train_batches": 4, "val_check_interval": 0.5}),
}  # fmt: skip


def run(name: str) -> dict[str, Any]:
    """One case on a rank."""
    made, stage, policy, flags = CASES[name]
    flags = dict(flags)
    sized = flags.pop("sized", True)
    module = made()
    fitted = trainer(zero(stage, uneven_batches=policy, fused_optimizers=False), max_epochs=EPOCHS, **flags)
    fitted.fit(module, batches(sized=sized) if name != "manual, loaded anew" else None, loader(8, seed=5))
    assert module.estimated == (fitted.global_step if sized else -1)
    return {
        "weights": weights(module),
        "losses": module.losses,
        "before": module.before_backward,
        "validated": module.validated,
        "metric": fitted.callback_metrics["val_loss"].item(),
        "steps": fitted.global_step,
        "batches": fitted.num_training_batches,
    }


def run_all() -> dict[str, dict[str, Any]]:
    return {name: run(name) for name in CASES}


def by_hand(name: str) -> dict[str, Tensor]:
    """The weights: sums over ranks with a batch, in their order, divided by all; or weighted."""
    _, stage, policy, flags = CASES[name]
    accumulation, limit = flags.get("accumulate_grad_batches", 1), flags.get("limit_train_batches", max(COUNTS))
    order: Order = ORDERS[stage > 1]
    module = Module()
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    parameters = list(module.parameters())
    own = [list(batches(rank)) for rank in range(2)]

    def gradients(rank: int, index: int) -> list[Any]:
        if index >= len(own[rank]):
            return [None] * len(parameters)
        factor = 1.0 if policy == "join" else 2 / sum(index < count for count in COUNTS)
        module.zero_grad()
        (module.loss(own[rank][index]) / accumulation * factor).backward()
        return [None if p.grad is None else p.grad.clone() for p in parameters]

    for _ in range(EPOCHS):
        for first in range(0, limit, accumulation):
            indices = range(first, min(first + accumulation, limit))
            per_rank = [[gradients(rank, index) for index in indices] for rank in range(2)]
            for parameter, gradient in zip(parameters, _reduce(per_rank, order), strict=True):
                parameter.grad = gradient
            if "gradient_clip_val" in flags:
                clip([p.grad for p in parameters if p.grad is not None], flags["gradient_clip_val"])
            optimizer.step()
            scheduler.step()
    return weights(module)


def test_training_equals_sums_by_hand(ranks: Launcher) -> None:
    """Bit for bit, and what hooks see of a rank without a batch is the loss of the batch that it repeats."""
    by_rank = ranks(2, timeout=120)(run_all)
    for name, (_, _, _, flags) in CASES.items():
        expected, limit = by_hand(name), flags.get("limit_train_batches", max(COUNTS))
        first, second = (found[name] for found in by_rank)
        for found in (first, second):
            assert unequal(found["weights"], expected) == {}, name
            assert len(found["losses"]) == EPOCHS * limit
            accumulation = flags.get("accumulate_grad_batches", 1)
            assert found["before"] == [torch.tensor(loss).div(accumulation).item() for loss in found["losses"]]
            assert min(found["losses"]) > 0
        for key in ("validated", "metric", "steps", "batches"):
            assert first[key] == second[key], (name, key)
        in_between = [2, 4, 6, 8] if "val_check_interval" in flags else [5, 10]
        assert first["validated"][-len(in_between) :] == in_between


# ------------------------------------------------------------------------------------------------------ resuming


def resumed(tmp: str, late: bool, name: str | None = None) -> dict[str, Any]:
    """Two epochs, saved after every step, or what comes after one of these saves, which is not saved."""
    torch.manual_seed(3 + dist.get_rank() + (1000 if name else 0))
    folder = f"{tmp}/whole"
    callbacks = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder, "epoch-{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True),
    ]
    saving = {"enable_checkpointing": False} if name else {"enable_checkpointing": True, "callbacks": callbacks}
    module = Dropping()
    strategy = zero(2, uneven_batches="join_active")
    made = trainer(strategy, max_epochs=EPOCHS, **saving)
    own = Stateful(data(3 * COUNTS[dist.get_rank()], seed=dist.get_rank()), 3, late)  # type: ignore[arg-type]
    made.fit(module, own, loader(8, seed=5), ckpt_path=f"{folder}/{name}.ckpt" if name else None)
    found = left(made, module)
    count = COUNTS[dist.get_rank()]  # another batch may be repeated, at no weight
    found["losses"] = {n: loss for n, loss in found["losses"].items() if n % 5 < count or n == 5 * EPOCHS - 1}
    found["losses"][5 * EPOCHS - 1] *= count == max(COUNTS)
    return found


PLACES = {
    False: ("step=2", "step=3", "step=5", "epoch-epoch=0", "step=9"),
    True: ("step=3", "step=4", "step=5", "epoch-epoch=0"),
}
"""Before a rank has run out, where it had its last batch, without one; at the end of the epoch; in the next one.

By whether a loader is `late`, which makes a difference only where it is saved at its end.
"""


def resume_everywhere(tmp: str) -> dict[str, list[str]]:
    found = {}
    for late, places in PLACES.items():
        expected = resumed(f"{tmp}/{late}", late)
        for name in places:
            found[f"{name}, {late}"] = differences(resumed(f"{tmp}/{late}", late, name), expected)
    return found


def test_a_run_goes_on_inside_of_an_epoch(ranks: Launcher, tmp_path: Path) -> None:
    """Bit for bit, whoever had run out when it was saved, and whatever loaders do with a state from their end."""
    for found in ranks(2, timeout=120)(resume_everywhere, str(tmp_path)):
        assert not any(found.values()), {name: wrong for name, wrong in found.items() if wrong}


# --------------------------------------------------------------------------------------------------- other integrations


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def plain(policy: str) -> dict[str, Tensor]:
    """One epoch of SGD in this process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    own = [list(batches(rank)) for rank in range(2)]
    for index in range(max(COUNTS)):
        present = [rank for rank in range(2) if index < COUNTS[rank]]
        factor = 1.0 if policy == "join" else 2 / len(present)
        for rank in present:
            (loss_of(model, own[rank][index]) * factor / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def in_fabric(policy: str) -> dict[str, Tensor]:
    run = fabric(fabric_zero(3, uneven_batches=policy))
    module = net()
    model, optimizer = run.setup(module, torch.optim.SGD(module.parameters(), 0.1, foreach=False))
    own = run.setup_dataloaders(batches(), use_distributed_sampler=False)
    for batch, weight in run.strategy.engines[0].join_batches(own):  # type: ignore[attr-defined]
        run.backward(loss_of(model, batch) * weight)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def in_script(policy: str) -> dict[str, Tensor]:
    config = {"stage": 2, "units": {"min_numel": 0}, "train_micro_batch_size_per_gpu": ROWS, "uneven_batches": policy}
    sgd = lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=False)  # noqa: E731
    engine = zero_strategy.initialize(model=net(), optimizer=sgd, config=config)[0]
    joined = engine.join_batches(batches())
    assert len(joined) == 5
    for batch, weight in joined:
        engine.backward(loss_of(engine, batch) * weight)
        engine.step()
    assert engine.global_steps == 5
    return {name: value.clone() for name, value in engine.state_dict().items()}


def other_faces() -> list[dict[str, str]]:
    integrations, policies = (in_fabric, in_script), ("join", "join_active")
    return [unequal(train(policy), plain(policy)) for train in integrations for policy in policies]


def test_uneven_loaders_fabric_and_scripts(ranks: Launcher) -> None:
    for found in ranks(2)(other_faces):
        assert found == [{}] * 4


# ------------------------------------------------------------------------------------------------------ mistakes


class Takes(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class MayStop(CollectiveRecord):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def fit(module: pl.LightningModule, loaders: Any = None, policy: str = "error", **flags: Any) -> int:
    """Losses that were computed."""
    validation = flags.pop("validation", None)
    trainer(zero(1, uneven_batches=policy), **flags).fit(module, batches() if loaders is None else loaders, validation)
    return len(getattr(module, "losses", []))


INSIDE = {"val_check_interval": 2, "min_epochs": 0}


def checks() -> None:
    rank = dist.get_rank()
    module = CollectiveRecord()
    with raises(ValueError, "rank 0: 5, rank 1: 3", "uneven_batches: join", "limit_train_batches=3"):
        fit(module)
    assert not module.losses
    with raises(ValueError, "rank 0: 5, rank 1: 3"):
        fit(CollectiveRecord(), max_steps=3, validation=loader(8))
    with raises(ValueError, "rank 0: 5, rank 1: 3"):
        fit(CollectiveRecord(), max_steps=4, val_check_interval=0.5)
    assert fit(CollectiveRecord(), max_steps=2, validation=loader(8)) == 2
    assert fit(CollectiveRecord(), max_steps=3) == 3
    assert fit(CollectiveRecord(), limit_train_batches=3, max_epochs=2, validation=loader(8)) == 6
    assert fit(CollectiveRecord(), loader(16), overfit_batches=2) == 2
    for module, flags, part in (
        (MayStop(), {}, "MayStop.on_train_batch_start"),
        (
            CollectiveRecord(),
            {"callbacks": [EarlyStopping("val_loss", stopping_threshold=1e3)], **INSIDE},
            "EarlyStopping",
        ),
        (Manual(), {"max_steps": 2}, "max_steps=2"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module, validation=loader(8), **flags)
        found = [str(one.message) for one in caught if "rank 0: 5, rank 1: 3" in str(one.message)]
        assert len(found) == (rank == 0), found
        assert all(part in text for text in found)
    with raises(ValueError, "rank(s) [0] have no length"):
        fit(CollectiveRecord(), batches(sized=rank == 1))
    with raises(ValueError, "rank(s) [1] have no batches"):
        fit(CollectiveRecord(), loader(8 if rank == 0 else 0, split=False))
    for policy in ("join", "join_active"):
        with raises(ValueError, "rank(s) [1] give no batch at all"):
            fit(CollectiveRecord(), loader(8 if rank == 0 else 0, split=False), policy)
    with raises(ValueError, "one training loader, and there are 2"):
        fit(CollectiveRecord(), CombinedLoader([batches(), batches()], "max_size_cycle"), "join")
    with raises(ValueError, "dataloader_iter"):
        fit(Takes(), policy="join")


def test_what_cannot_be_is_said_before_the_first_step(ranks: Launcher) -> None:
    ranks(2, timeout=120)(checks)


@pytest.mark.parametrize(
    ("shortest", "done", "accumulation", "steps_left", "validates", "expected"),
    [
        (3, 0, 1, float("inf"), False, True),
        (3, 0, 1, 4, False, True),
        (3, 0, 1, 3, False, False),
        (3, 0, 1, 3, True, True),
        (3, 0, 1, 2, True, False),
        (3, 2, 1, 1, False, False),
        (3, 2, 1, 2, False, True),
        (5, 0, 2, 2, False, False),
        (5, 0, 2, 3, False, True),
        (4, 0, 2, 2, True, True),
        (4, 0, 2, 1, True, False),
    ],
)
def test_when_a_run_needs_more(
    shortest: int, done: int, accumulation: int, steps_left: float, validates: bool, expected: bool
) -> None:
    assert needs_more(shortest, done, accumulation, steps_left, validates) is expected


class Counted:
    """Counts the batches that are made."""

    def __init__(self) -> None:
        self.made = 0

    def load_state_dict(self, state: Any) -> None:
        """Nothing to go back to."""

    def __iter__(self) -> Iterator[int]:
        for batch in range(4):
            self.made += 1
            yield batch


def test_a_spare_batch_is_the_only_one_that_is_made() -> None:
    loader = Counted()
    assert _Resumed(loader, {}, 4, True).spare() == 0
    assert loader.made == 1
