"""A step as slots, from an engine's point of view: its micro-batches, their random numbers, what a checkpoint says.

Where `reproducible.slots` is 0 a step is whatever the caller makes of it, and all of this does nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.preemption import StepWatch
from zero_strategy.config import ZeroConfig
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.reproducible.samples import SlotSampler
from zero_strategy.reproducible.slot_tree import children
from zero_strategy.reproducible.slots import SlotCount
from zero_strategy.reproducible.streams import NumberedLayers, SlotStreams

SEED, SLOTS, MICRO = "reproducible_seed", "reproducible_slots", "reproducible_micro_batches"
"""Counters of a checkpoint."""

SlotEvent = Literal["inputs", "clip", "slot over"]
"""`inputs`: what a micro-batch computes with, as an integration or a script says it; `clip`: (norm or value, bound, for
some parameters only), when gradients are about to be clipped; `slot over`: the number of a slot whose backward is over,
while the random streams are still its own."""


class SlotSteps:
    """Slots of the steps of one engine.

    Args:
        model: What it trains.
        config: Its resolved settings.
        steps: Its count of steps.

    Attributes:
        slots: Of a step; 0: it is no number of slots.
        in_a_batch: Slots of one batch of a framework's loader: 1, or all of this rank's for a pipeline.
        listeners: Called with each event and its value, where steps are slots.
    """

    def __init__(self, model: ShardedModel, config: ZeroConfig, steps: StepWatch) -> None:
        self._model, self._steps = model, steps
        self.listeners: list[Callable[[SlotEvent, Any], None]] = []
        self._count, self.slots, self.in_a_batch = model.slots, config.reproducible.slots, 1
        self._streams: SlotStreams | None = None
        self._losses: dict[int, Tensor] = {}
        self._last_losses: dict[int, Tensor] = {}
        self._mean: Tensor | None = None
        self._last_mean: Tensor | None = None
        self._numbered = [child for child in model.module.modules() if isinstance(child, NumberedLayers)]
        if self._count is not None:
            seed = _agreed_seed(model, config)
            self._streams = SlotStreams(seed, self._count, lambda: steps.taken + steps.skipped)
            model.reducer.follow_slots(self.begin, self._slot_over)
            for layers in self._numbered:
                layers.follow_streams(self._streams)
            steps.beside = self

    @property
    def own(self) -> list[int]:
        """This rank's slots of a step, in the order in which it computes them."""
        return [] if self._count is None else self._count.own

    @property
    def count(self) -> int:
        """Micro-batches of each rank in a step.

        Raises:
            ValueError: If a step is no number of slots.
        """
        return self._asked().places.count

    @property
    def batches(self) -> int:
        """Batches of a framework's loader in a step."""
        return self.count // self.in_a_batch

    @property
    def slot(self) -> int:
        """The slot of the micro-batch at hand."""
        return self._asked().slot

    @property
    def complete(self) -> bool:
        """True if all micro-batches of the step are done, so that the optimizer's step is due."""
        return self._asked().complete

    @property
    def seed(self) -> int:
        """Seed of the random numbers of all slots."""
        self._asked()
        assert self._streams is not None
        return self._streams.seed

    def close(self) -> None:
        """The engine ends: layers draw from the generators as they are again."""
        for layers in self._numbered:
            layers.follow_streams(None)

    def _asked(self) -> SlotCount:
        if self._count is None:
            raise ValueError("reproducible.slots is 0: a step has no slots; set it to a multiple of the ranks")
        return self._count

    def refuse(self, what: str) -> None:
        """Raise if a step has slots, for what depends on the ranks.

        Raises:
            RuntimeError: Naming the way out.
        """
        if self._count is not None:
            raise RuntimeError(
                f"{what}, and reproducible.slots is {self.slots}: the result would depend on their number. Divide the "
                "loss of a slot by a number of its own, or by one of the whole step that all ranks know"
            )

    def begin(self) -> None:
        """A micro-batch begins, if it has not; see `SlotStreams.begin`."""
        if self._streams is not None:
            # First: without its gradients a step that was begun begins anew, with its first slot.
            self._model.reducer.notice_dropped()
            self._streams.begin()

    def micro_batch(self, backwards: int = 1) -> AbstractContextManager[int]:
        """One micro-batch, from its first random number to its last backward; gives its slot.

        Args:
            backwards: How many there are.
        """
        self._asked()
        return self._micro_batch(backwards)

    @contextmanager
    def _micro_batch(self, backwards: int) -> Iterator[int]:
        self.begin()
        slot = self.slot
        with self._model.reducer.backwards_of_slot(backwards):
            yield slot

    def tell(self, event: SlotEvent, value: Any) -> None:
        """Tell whoever listens; nothing happens where a step is no number of slots."""
        if self._count is not None:
            for listener in self.listeners:
                listener(event, value)

    def _slot_over(self) -> None:
        """The backward of a slot is over; the count says already which one comes next."""
        assert self._count is not None and self._streams is not None
        if not self._count.mixed:  # of a pipeline's slots the layers of a stage alone are known
            self.tell("slot over", self._count.own[self._count.micro - 1])
        self._streams.end()

    def step_over(self) -> None:
        """An optimizer has taken its step, or declined to."""
        if self._count is not None and self._streams is not None:
            if self._count.complete:
                self._count.micro = 0
            self._last_losses, self._losses = self._losses, {}
            self._last_mean, self._mean = self._mean, None
            self._streams.end()

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """See `SlotStreams.generator`."""
        self._asked()
        assert self._streams is not None
        return self._streams.generator(name, device)

    def mean(self, values: Sequence[Tensor | float]) -> Tensor:
        """The mean over all slots of a step, in float64, by the tree of gradients. A collective.

        Args:
            values: This rank's, one for each of its slots, in its order; 0-d.
        """
        count = self._asked()
        if len(values) != count.places.count:
            raise ValueError(f"mean() takes {count.places.count} values, one of each own slot, not {len(values)}")
        pairs = [[float(slot), float(value)] for slot, value in zip(self.own, values, strict=True)]
        own = torch.tensor(pairs, dtype=torch.float64)
        everyone = torch.cat(self._model.mesh.control.all_gather_small(own, "values of slots"))
        found = {int(slot): value for slot, value in everyone}
        return _tree_sum(found, (0, self.slots)) / self.slots

    def note_loss(self, loss: Tensor) -> None:
        """Keep the loss of the micro-batch at hand, or a part of it, until the step is over; 0-d."""
        if self._count is not None:
            known = self._losses.get(self._count.micro)
            self._losses[self._count.micro] = loss if known is None else known + loss

    def note_mean(self, loss: Tensor) -> None:
        """Keep the mean loss over all slots of the step at hand, where it is known already."""
        self._mean = loss

    def step_loss(self) -> Tensor | None:
        """The mean loss over all slots of the last step, float64; None: not all were noted. A collective."""
        if self._last_mean is not None:
            return self._last_mean
        if len(self._last_losses) != self.count:
            return None
        return self.mean([self._last_losses[micro] for micro in range(self.count)])

    def sampler(
        self, dataset: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> SlotSampler:
        """Samples of this rank's slots, for `DataLoader(dataset, batch_size, sampler=...)`; see `SlotSampler`."""
        self._asked()
        return SlotSampler(dataset, self.slots, self.own, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    # ---- checkpoints ----

    def counters(self) -> dict[str, int]:
        """For the manifest."""
        return {} if self._streams is None else {SEED: self._streams.seed, SLOTS: self.slots, MICRO: self.batches}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Go on with the random streams of a checkpoint."""
        if self._count is None or self._streams is None:
            return
        if counters.get(SEED) is not None:
            self._streams.seed = int(counters[SEED])
        if (before := counters.get(SLOTS)) is not None and before != self.slots:
            warnings.warn(
                f"reproducible.slots is {self.slots}, and the checkpoint's run had {before}: training goes on, and not "
                f"in the bits of that run; set reproducible.slots: {before} for these",
                stacklevel=2,
            )
        self._count.micro = 0
        self._streams.end()


def _tree_sum(values: Mapping[int, Tensor], node: tuple[int, int]) -> Tensor:
    if node[1] - node[0] == 1:
        return values[node[0]]
    left, right = children(node)
    return _tree_sum(values, left) + _tree_sum(values, right)


def _agreed_seed(model: ShardedModel, config: ZeroConfig) -> int:
    """The first rank's seed. A collective of all ranks, of which some may have other layers.

    Raises:
        ValueError: On all ranks, if one of them has a layer that cannot be; naming it and the way out.
    """
    wanted = torch.initial_seed() if config.reproducible.seed is None else config.reproducible.seed
    mine = int(wanted), _refusal(model.module, config, model.device)
    everyone = model.mesh.world_group.control.all_gather_objects(mine)
    if refusal := next((text for _, text in everyone if text), ""):
        raise ValueError(refusal)
    return int(everyone[0][0])


def _refusal(module: nn.Module, config: ZeroConfig, device: torch.device) -> str:
    """Error for what a rank's own slots would leave in the model, or what has no order of its own; "" for none."""
    slots = config.reproducible.slots
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return (
            f"reproducible.slots is {slots}, and {device} may add numbers up in any order (atomics): call "
            "torch.use_deterministic_algorithms(True), or train with Trainer(deterministic=True)"
        )
    for name, child in module.named_modules():
        tracks = getattr(child, "track_running_stats", False) and getattr(child, "running_mean", None) is not None
        if tracks or isinstance(child, nn.SyncBatchNorm):
            return (
                f"reproducible.slots is {slots}, and {name!r} is a {type(child).__name__}: its running statistics, or "
                "those of a batch over all ranks, depend on the slots that a rank has computed. Use GroupNorm or "
                "LayerNorm, or track_running_stats=False"
            )
    return ""
