"""A look at the other ranks' processes before connections are made, in runs that go on when processes die.

gloo connects the ranks of a group within its time-out, and waits all of it for one that has died before. So ranks that
have introduced themselves meet in the store first, where a death is noticed, and connect within seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_strategy.runtime.torch_private import default_store
from zero_strategy.watchdog.peers import ProcessCard, condition

CONNECT_SECONDS = timedelta(seconds=5)
"""In which ranks connect that have met."""
_CARDS = "zero_strategy/cards"
_MOST_SECONDS = 1800.0
"""Longest wait for ranks that are alive and do not come; whatever comes next then says who is missing."""
_LOOK_SECONDS = 0.05


class RankGoneError(RuntimeError):
    """A process has ended before its rank was connected with the others."""


def introduce(cards: Sequence[ProcessCard]) -> None:
    """Let the ranks of the default process group be looked at; all of them call it.

    Args:
        cards: Processes, by rank.
    """
    default_store().set(_CARDS, json.dumps(cards))


def meet(what: str) -> bool:
    """Wait for the other ranks of the default process group, if these have introduced themselves.

    Args:
        what: Is about to be made, for the message.

    Returns:
        Whether they have, so that all of them are there now.

    Raises:
        RankGoneError: If a process has ended that has not come; names it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
    if not store.check([_CARDS]):
        return False
    key = f"zero_strategy/meeting{store.add(f'zero_strategy/meetings/of{rank}', 1)}"
    store.set(f"{key}/{rank}", "")
    if store.add(f"{key}/arrived", 1) == ranks:
        store.set(f"{key}/answer", "")
    end, pause = time.monotonic() + _MOST_SECONDS, 0.0005
    while not store.check([f"{key}/answer"]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _LOOK_SECONDS)
        if pause == _LOOK_SECONDS and (gone := _gone(store, key)):
            # For those on other hosts, who cannot see that.
            store.set(f"{key}/answer", f"rank {gone[0]} has died before {what} was made")
    if text := store.get(f"{key}/answer").decode():
        raise RankGoneError(text)
    return True


def _gone(store: Any, key: str) -> list[int]:
    """Ranks that have not come, and whose processes have ended."""
    cards = [ProcessCard(*card) for card in json.loads(store.get(_CARDS))]
    gone = [rank for rank, card in enumerate(cards) if condition(card) == "gone"]
    return [rank for rank in gone if not store.check([f"{key}/{rank}"])]
