"""Ranks that stopped by an exception agree under their engine's name, however many strategies each has made."""

from __future__ import annotations

import torch.distributed as dist

from tests.launcher import Launcher
from zero_strategy.integrations.lightning.callbacks import FailureAgreement


def agree(more: int) -> list[bool]:
    """Answers of meetings after rank 0 alone has made some more strategies: of one engine, and of ranks that differ."""
    if dist.get_rank() == 0:
        for _ in range(more):
            FailureAgreement(1.0)
    agreement = FailureAgreement(1.0)
    found = []
    for place, engine in (("step 3", "engine0"), ("step 3", "engine0"), ("step 4", "engine1")):
        found.append(agreement.together(place, engine))
        agreement.forget()
    found.append(agreement.together("step 5", f"engine{dist.get_rank()}"))
    return found


def test_ranks_agree_whatever_number_of_strategies_each_has_made(ranks: Launcher) -> None:
    assert ranks(2)(agree, 2) == [[True, True, True, False]] * 2
