"""Thousands of ranks of which one is real: what building costs it, and the order of what it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_strategy.comm.collectives as collectives
from tests.device.fake_ranks import fake_world
from tests.device.recorder import RecordedCollectives, Recorder
from tests.engine.nets import loss_of, net
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


class Ordered(RecordedCollectives):
    """Notes every collective, of all groups in one list."""

    sent: list[tuple[str, int]]

    def _queue(self, what: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        self.sent.append((what, read[0].numel()))
        return super()._queue(what, read, written)

    def all_gather_small(self, value: torch.Tensor) -> list[torch.Tensor]:
        self.sent.append(("control", value.numel()))
        return super().all_gather_small(value)


def sent_by(rank: int, world: int, **settings: Any) -> tuple[list[tuple[str, int]], int]:
    """Collectives of two steps in their order, and messages to the store while the engine was built."""
    sent: list[tuple[str, int]] = []
    recorder = Recorder()

    def make(group: Any) -> Ordered:
        made = Ordered(group, recorder)
        made.sent = sent
        return made

    with pytest.MonkeyPatch.context() as patch, fake_world(rank, world) as store:
        patch.setattr(collectives, "HostCollectives", make)
        model = net(depth=3)
        engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", **settings))
        messages = store.messages
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine.attach(optimizer)
        for _ in range(2):
            loss_of(model(torch.ones(4, 6))).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
    return sent, messages


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_ranks_send_the_same_in_the_same_order(stage: int) -> None:
    first, _ = sent_by(1, 512, stage=stage)
    assert {what for what, _ in first} == {"all_gather", "reduce_scatter", "control"}
    for rank in (2, 255, 511):
        assert sent_by(rank, 512, stage=stage)[0] == first


def test_building_costs_a_rank_as_many_messages_among_4096_as_among_8() -> None:
    assert sent_by(4095, 4096, stage=3)[1] == sent_by(7, 8, stage=3)[1]
