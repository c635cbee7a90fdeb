"""Connections of a rank in groups of more ranks than tests run with: forks that only make groups and send little."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tests.comm.forked import found_by_forks
from zero_strategy.comm.gloo_address import connecting_late

SCRIPT = Path(__file__).with_name("many_ranks.py")


@pytest.mark.parametrize("ranks", [8, 12])
def test_sockets_of_a_rank_do_not_grow_with_the_ranks(ranks: int, tmp_path: Path) -> None:
    of_ranks = found_by_forks(SCRIPT, ranks, tmp_path)
    found = {key: max(one[key] for one in of_ranks) for key in of_ranks[0]}
    if ranks <= 8:
        assert found["used"] == 3 * ranks, found  # three groups, each from each to each
    else:
        # Two neighbours in each round of the one that is used, and a listening socket of each group.
        # The default group is as the others.
        assert found["started"] <= 1 + 2 * math.ceil(math.log2(ranks)), found
        assert found["made"] <= 4 and found["used"] <= 4 + 2 * math.ceil(math.log2(ranks)), found


def test_what_the_user_says_of_connections_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    with connecting_late(True):
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    with connecting_late(False):
        assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    with connecting_late(True):
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
