"""Training of sharded models by ranks with different numbers of batches.

A rank that has run out goes on taking part in what the others do, without data: it sends zeros, follows their gathers,
and steps its slices. A gradient is still the sum over ranks divided by all of them, as under torch's `Join` and
DistributedDataParallel with its default `divide_by_initial_world_size=True`.

Before every forward ranks tell each other whether they have a batch. While all do, nothing else changes. From the
first forward that some rank lacks on, those with a batch announce whatever the others must follow, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.unshard import InertHook
from zero_strategy.runtime.torch_private import uncompiled


class _Announced(NamedTuple):
    """Next action of a rank with a batch; `what` and `where` are the same on all such ranks."""

    what: str
    where: tuple[Any, ...]
    value: Any


class UnevenTraining:
    """One loop over batches, of which ranks may have different numbers.

    Args:
        models: Every model that the loop calls, in the same order on all ranks.
        calls: What ranks without a batch do where the others are in `together(name, *arguments)`.

    Attributes:
        followed: Whether this rank has run out of batches before another.
    """

    def __init__(self, models: Sequence[ShardedModel], calls: Mapping[str, Callable[..., object]]) -> None:
        self._models, self._calls = list(models), calls
        self._control = models[0].mesh.control
        self._some_idle = False
        self._inside = 0
        self.followed = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around the loop; returns when no rank has a batch left.

        Raises:
            RuntimeError: On all ranks, if those with a batch do different things.
        """
        hooks = [
            model.module.register_forward_pre_hook(_BeforeForward(self, number), prepend=True)
            for number, model in enumerate(self._models)
        ]
        try:
            yield
            self._follow()
        finally:
            for hook in hooks:
                hook.remove()
            for model in self._models:
                model.reducer.announce_to(None)
                if model.unsharder is not None and self._some_idle:
                    model.unsharder.announce_to(None)
                    model.unsharder.release_idle()
                    model.unsharder.forget_order()  # which ranks that followed have not seen

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Around code with collectives of its own; ranks without a batch do `calls[name](*arguments)` meanwhile.

        The arguments may be anything that can be pickled; those of one rank count.

        Raises:
            ValueError: If there is no such call.
        """
        if name not in self._calls:
            raise ValueError(f"{name} cannot be followed by ranks that have no batch left; do without in such a loop")
        if not self._some_idle or self._inside:
            yield
            return
        self._exchange(_Announced("gradients", (name,), [model.reducer.shown() for model in self._models]))
        for model in self._models:
            model.reducer.settle()  # announces by itself what `no_sync` kept back
        self._exchange(_Announced(name, (), arguments))
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    # ---- ranks with a batch ----

    def before_forward(self, number: int) -> None:
        """A forward of model `number` begins."""
        if self._inside:
            return
        if self._some_idle:
            self._exchange(_Announced("forward", (number,), None))
        elif not all(self._have_batches(True)):
            self._begin_announcing()

    def _begin_announcing(self) -> None:
        self._some_idle = True
        for number, model in enumerate(self._models):
            model.reducer.announce_to(partial(self._announce_reduction, number))
            if model.unsharder is not None:
                model.unsharder.release_idle()  # nothing is gathered on any rank now
                model.unsharder.announce_to(partial(self._announce_gather, number))

    def _announce_reduction(self, number: int, what: str, value: Any) -> None:
        if not self._inside:
            where = (number,) if what == "backward" else (number, value)
            self._exchange(_Announced(what, where, value))

    def _announce_gather(self, number: int, unit: int) -> None:
        if not self._inside:
            self._exchange(_Announced("gather", (number, unit), None))

    # ---- ranks without one ----

    def _follow(self) -> None:
        if not self._some_idle:
            if not any(self._have_batches(False)):
                return
            self._begin_announcing()
        while (announced := self._exchange(None)) is not None:
            self.followed = True
            self._inside += 1
            try:
                self._do(announced)
            finally:
                self._inside -= 1

    def _do(self, announced: _Announced) -> None:
        if announced.what in self._calls:
            self._calls[announced.what](*announced.value)
        elif announced.what == "gather":
            number, index = announced.where
            unsharder = self._models[number].unsharder
            assert unsharder is not None
            unsharder.units[index].gather()
            unsharder.units[index].release()
        elif announced.what == "gradients":
            for model, shown in zip(self._models, announced.value, strict=True):
                model.reducer.follow_shown(shown)
        elif announced.what != "forward":
            self._models[announced.where[0]].reducer.follow(announced.what, announced.value)

    # ---- messages ----

    def _have_batches(self, mine: bool) -> list[bool]:
        return [bool(one) for one in self._control.all_gather_small(torch.tensor([mine], dtype=torch.int8))]

    def _exchange(self, mine: _Announced | None) -> _Announced | None:
        """Next action of the ranks with a batch; None if there are none left."""
        everyone: list[_Announced | None] = self._control.all_gather_objects(mine)
        told = {rank: one for rank, one in enumerate(everyone) if one is not None}
        if len({(one.what, one.where) for one in told.values()}) > 1:
            shown = {rank: f"{one.what} {one.where or ''}".strip() for rank, one in told.items()}
            raise RuntimeError(
                f"ranks with a batch left do different things while others have none: {shown}. Every rank must do the "
                "same for each of its batches; let even_batches=True repeat samples where that cannot be"
            )
        return next(iter(told.values()), None)


class _BeforeForward:
    """The hook of one model."""

    def __init__(self, training: UnevenTraining, number: int) -> None:
        self._training, self._number = training, number

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Tell the others."""
        self._training.before_forward(self._number)

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()
