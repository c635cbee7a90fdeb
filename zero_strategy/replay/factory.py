"""The training of a factory, by step and slot.

def factory():
    return model, lambda m: torch.optim.AdamW(m.parameters()), batches, lambda m, batch: m(batch).loss

`batches` is a function of (step, slot), a mapping with such keys, or a list or loader whose number
step x slots + slot is the batch of a slot; a list starts over at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_strategy.runtime.torch_private import tree_map
from zero_strategy.verify.subject import Factory, Subject, call_factory, subject_of

Batch = Callable[[int, int], Any]


@dataclass
class SlotSubject:
    """Subject of a replay.

    Attributes:
        subject: Model, optimizer and loss.
        batch: Gives that of (step, slot).
    """

    subject: Subject
    batch: Batch

    def batch_on(self, device: torch.device, step: int, slot: int) -> Any:
        """A batch of its own, on the device."""
        return tree_map(lambda x: x.to(device, copy=True) if isinstance(x, Tensor) else x, self.batch(step, slot))


def slot_subject(factory: Factory, seed: int, slots: int) -> SlotSubject:
    """Call a factory under a seed.

    Raises:
        ValueError: If it cannot be found, or returns something else than asked for; says what.
    """
    made = call_factory(factory, seed)
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 4):
        return SlotSubject(subject_of(made, 1), _nothing)  # raises, saying what is accepted
    place = len(made) - (1 if len(made) == 2 else 2)
    given = made[place]
    if callable(given) and not isinstance(given, Iterable):
        batch: Batch = given
    elif isinstance(given, Mapping):
        batch = _of_mapping(given)
    elif isinstance(given, Sequence):
        batch = _of_sequence(given, slots)
    else:
        batch = _InOrder(given, slots)
    return SlotSubject(subject_of([*made[:place], [None], *made[place + 1 :]], 1), batch)


def _nothing(step: int, slot: int) -> Any:
    raise AssertionError("no factory")


def _of_mapping(batches: Mapping[Any, Any]) -> Batch:
    def batch(step: int, slot: int) -> Any:
        if (step, slot) not in batches:
            raise ValueError(f"the factory's batches have no ({step}, {slot}), which are step and slot")
        return batches[step, slot]

    return batch


def _of_sequence(batches: Sequence[Any], slots: int) -> Batch:
    if not len(batches):
        raise ValueError("the factory's batches are empty: give at least one")
    return lambda step, slot: batches[(step * slots + slot) % len(batches)]


class _InOrder:
    """Batches of a loader, which are asked for in order; it starts over at its end.

    Args:
        batches: May be iterated again and again.
        slots: Of a step.
    """

    def __init__(self, batches: Any, slots: int) -> None:
        if not isinstance(batches, Iterable):
            raise ValueError(
                f"the factory's batches are a {type(batches).__name__}: give a list, a loader, a mapping with keys "
                "(step, slot), or a function of these"
            )
        self._batches, self._slots = batches, slots
        self._next, self._iterator = 0, iter(batches)

    def __call__(self, step: int, slot: int) -> Any:
        """The batch; those before it are passed over."""
        wanted = step * self._slots + slot
        assert wanted >= self._next, "in order"
        while self._next < wanted:
            self._take()
        return self._take()

    def _take(self) -> Any:
        self._next += 1
        for batch in self._each():
            return batch
        raise ValueError("the factory's batches are empty: give at least one")

    def _each(self) -> Iterator[Any]:
        yield from self._iterator
        self._iterator = iter(self._batches)
        yield from self._iterator
