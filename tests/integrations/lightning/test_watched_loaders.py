"""Wrappers around a pipeline's data loaders: what others find in them, and in copies."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.types import _Stateful

from zero_strategy.integrations.lightning.uneven import SameNumber, same_number


class Plain:
    worker_init_fn = None

    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Positioned(Plain):
    position = 3

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def watched(loader: Any) -> SameNumber:
    ranks: Any = None
    return same_number(loader, ranks, [0])


def test_a_loader_that_is_watched_can_be_copied() -> None:
    loader = watched(Positioned())
    copied = copy.copy(loader)
    assert type(copied) is type(loader) and copied.position == 3


def test_the_state_of_a_loader_is_found_in_the_class() -> None:
    """Python 3.12 looks there for the methods of a protocol, which Lightning asks by."""
    loader = watched(Positioned())
    assert all(inspect.getattr_static(loader, name, None) for name in ("state_dict", "load_state_dict"))
    assert isinstance(loader, _Stateful) and not isinstance(watched(Plain()), _Stateful)
    state: Any = loader
    state.load_state_dict({"position": 5})
    assert loader.position == 5 and state.state_dict() == {"position": 5}


def test_what_lightning_sets_on_a_watched_loader_reaches_it() -> None:
    inner = Plain()
    loader: Any = watched(inner)
    loader.worker_init_fn = len
    assert vars(inner)["worker_init_fn"] is len
