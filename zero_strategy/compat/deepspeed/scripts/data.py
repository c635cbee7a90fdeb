"""Data loaders of scripts, and the one owner of optimizer and scheduler steps.

Each rank has one part of a dataset, and a loader that begins again.

The engine of a script alone steps the optimizer and the scheduler.

Gradients are those of `engine.backward(loss)`.

That divides the loss by the number of micro-batches per step; here every gradient is divided when it reaches its
parameter. Scripts have it so under DeepSpeed since 0.18.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

T = TypeVar("T")


def distributed_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Sampler[int] | None = None,
    pin_memory: bool | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """A loader of this rank's micro-batches.

    Samples are shuffled with the sampler's seed, the same way in each epoch unless `loader.sampler.set_epoch(epoch)` is
    called, and repeated so that every rank has as many.

    Args:
        dataset: With a length and indices.
        batch_size: Samples per micro-batch of this rank.
        rank: Of the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        collate_fn: Makes a batch of a list of samples.
        sampler: Which samples this rank takes; default: torch's `DistributedSampler`.
        pin_memory: Page-locked batches; default: where there is a GPU.
        num_workers: Processes that load.
        drop_last: Leave an incomplete last batch out.

    Raises:
        TypeError: If the dataset cannot be divided among ranks.
    """
    if isinstance(dataset, (DataLoader, IterableDataset)) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"training_data must be a dataset with a length, to be divided among ranks, not {type(dataset).__name__}; "
            "leave training_data out and iterate over a loader of your own"
        )
    if sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    pinned = torch.cuda.is_available() if pin_memory is None else pin_memory and torch.cuda.is_available()
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        pin_memory=pinned,
        num_workers=num_workers,
        drop_last=drop_last,
    )


class RepeatingLoader(Generic[T]):
    """An iterator over a loader that begins again at its end, for ever.

    Args:
        loader: Any iterable that can be iterated over again.

    Raises:
        ValueError: If the loader is empty, when a batch is asked for.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        for batch in self._iterator:
            return batch
        self._iterator = iter(self.loader)
        for batch in self._iterator:
            return batch
        raise ValueError(f"{type(self.loader).__name__} has no batches to repeat")


class OptimizerOwner:
    """Refuses steps of an optimizer outside of `stepping()`, before anything has happened.

    A step by the script would take gradients that are neither clipped nor unscaled, and the engine's own would take
    them once more.

    Args:
        optimizer: To which nothing is attached yet, since hooks run in the order of their coming.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._open = False
        optimizer.register_step_pre_hook(self._check)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The engine's step is inside."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def _check(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if not self._open:
            raise RuntimeError(
                f"both the engine and the script step the {type(optimizer).__name__}: engine.step() does it at each "
                "boundary, clipped and unscaled. Drop optimizer.step() from the script"
            )


class SchedulerOwner:
    """Notices that a scheduler has moved since the engine stepped it; one that does not count its steps is not seen."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._known: Any = None

    def stepped(self, scheduler: Any) -> None:
        """Call it when the engine has stepped the scheduler."""
        self._seen = _count(scheduler)

    def forget(self) -> None:
        """Call it when something else may rightly have moved the scheduler, such as a checkpoint."""
        self._seen = None

    def check(self, scheduler: Any, optimizer: Optimizer | None) -> None:
        """Raise if somebody else has stepped it, or if it is a new one that was made for another optimizer.

        Raises:
            RuntimeError: If it was stepped.
            ValueError: If it is another optimizer's; see `check_scheduler_of`.
        """
        if scheduler is not self._known:
            if scheduler is not None and optimizer is not None:
                check_scheduler_of(scheduler, optimizer)
            self._known, self._seen = scheduler, None
        if self._seen is not None and _count(scheduler) != self._seen:
            raise RuntimeError(
                f"both the engine and the script step the {type(scheduler).__name__}: engine.step() does it "
                "after each update. Drop scheduler.step() from the script, or do not pass the scheduler to initialize()"
            )


def check_scheduler_of(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise if a scheduler was made for another optimizer than the engine's.

    Raises:
        ValueError: Then; names both.
    """
    made_for = _optimizers_of(scheduler)
    if made_for and not any(other is optimizer for other in made_for):
        other, used = type(made_for[0]).__name__, type(optimizer).__name__
        raise ValueError(
            f"the {type(scheduler).__name__} changes the learning rates of another optimizer ({other}) than the one "
            f"that is trained with ({used}), whose rates would stay as they are; pass a callable, lr_scheduler=lambda "
            "optimizer: ..., which makes it of that optimizer, or pass the other one to initialize(optimizer=...)"
        )


def _optimizers_of(scheduler: Any) -> list[Optimizer]:
    """Optimizer that a scheduler was made for, or the schedulers that it holds, if it is made of others."""
    held = [scheduler, *getattr(scheduler, "__dict__", {}).values()]
    inner = [entry for value in held if isinstance(value, (list, tuple)) for entry in value]
    found = (getattr(one, "optimizer", None) for one in (*held, *inner) if callable(getattr(one, "step", None)))
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def _count(scheduler: Any) -> int | None:
    """Number of times a scheduler was stepped, where it tells."""
    count = getattr(scheduler, "last_batch_iteration", getattr(scheduler, "last_epoch", None))
    return count if isinstance(count, int) else None


class _Running:
    """Counts the calls of `engine.backward` that go on in this process: of any engine, as a loss may use several."""

    def __init__(self) -> None:
        self.count = 0


_running = _Running()


class PlainBackward:
    """Tells by what the gradients of a backward are divided.

    Args:
        micro_batches: Of a step.
        scaled: Losses need a loss scale (fp16).

    Attributes:
        micro_batches: See the argument.
    """

    def __init__(self, micro_batches: int, *, scaled: bool) -> None:
        self.micro_batches, self._needs_scale = micro_batches, scaled
        self._has_scale = False

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Inside runs `engine.backward`, which has divided and scaled the loss."""
        _running.count += 1
        try:
            yield
        finally:
            _running.count -= 1

    def was_scaled(self) -> None:
        """The script has asked for a scaled loss."""
        self._has_scale = True

    def step_over(self) -> None:
        """A micro-batch has ended."""
        self._has_scale = False

    def divisor(self) -> int:
        """The number by which gradients of the backward that begins now are to be divided.

        Raises:
            RuntimeError: If the loss lacks its scale.
        """
        if _running.count:
            return 1
        if self._needs_scale and not self._has_scale:
            raise RuntimeError(
                "loss.backward() in fp16 without a loss scale: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self.micro_batches
