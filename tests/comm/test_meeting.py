"""Ranks that have introduced themselves meet before they connect, and a death is noticed there."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.launcher import Launcher
from zero_strategy.comm.meeting import RankGoneError, introduce, meet
from zero_strategy.comm.process_group import own_group
from zero_strategy.comm.store import gather_everywhere
from zero_strategy.runtime.torch_private import backend_of
from zero_strategy.watchdog.peers import own_card


def meetings() -> list[object]:
    """Before ranks are introduced, after it, and when the second one is taken for one that has ended."""
    found: list[object] = [meet("this")]
    cards = [own_card()._replace(pid=pid, started=started) for _, pid, started in gather_everywhere(own_card())]
    introduce(cards)
    found.append(meet("that"))
    group = own_group([[0, 1]], timeout=timedelta(minutes=7))
    assert group is not None
    found.append(backend_of(group, "cpu").options._timeout)
    if dist.get_rank() == 0:
        introduce([cards[0], cards[1]._replace(started=cards[1].started + 1)])
        with pytest.raises(RankGoneError, match="rank 1 has died before an engine was made"):
            meet("an engine")
    return found


def test_meetings(fresh_ranks: Launcher) -> None:
    assert fresh_ranks(2)(meetings) == [[False, True, timedelta(minutes=7)]] * 2
