"""Changes of published weights leave a device by one copy for each bucket, and no step waits for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.device.recorder import Recorder
from tests.device.test_streams import CPU, device
from tests.engine.nets import loss_of, net
from zero_strategy.comm import delta
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.offload.tier import DeviceCopies
from zero_strategy.publish.host_copies import SliceCopies, SliceCopy
from zero_strategy.publish.recorder import ChangeRecorder

pytestmark = pytest.mark.filterwarnings("ignore:publish")  # memory that no CUDA has page-locked


def publish(recorder: Recorder, dtype: torch.dtype | None, fused: bool = True, **settings: Any) -> list[str]:
    """Waits of the host in two steps whose changes are recorded; the changes are compared with the values."""
    model = net(depth=4)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", **settings))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused or None)
    engine.attach(optimizer)
    changes = ChangeRecorder(engine, dtype)
    changes.begin()
    known = values_of(changes)
    with recorder:
        for _ in range(2):
            loss_of(model(torch.ones(4, 6, device=CPU))).backward()
            recorder.syncs.clear()
            optimizer.step()
            optimizer.zero_grad()
            changes._wait()
        waits = list(recorder.syncs)
    payloads, changed = changes.take()
    assert changed and payloads
    for key, payload in payloads.items():
        delta.apply(payload, known[key])
    assert {key: words.tolist() for key, words in values_of(changes).items()} == {
        key: words.tolist() for key, words in known.items()
    }
    changes.end()
    engine.close()
    return waits


def values_of(changes: ChangeRecorder) -> dict[str, Any]:
    """Copies of the present values of this rank's slices, by key: numpy fixes the memory that it looks at."""
    return {
        each.key: delta.words_of(changes._values(bucket, each, copy=True))
        for bucket in changes._engine.model.buckets
        for each in changes._logs[id(bucket)].ranges
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_published_step_does_not_wait_for_the_device(stage: int, dtype: torch.dtype | None) -> None:
    with device() as recorder:
        assert publish(recorder, dtype, stage=stage) == []
    assert not recorder.races


def test_a_step_that_copies_former_values_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SliceCopy, "let_change", lambda self: None)
    with device() as recorder:
        publish(recorder, None, stage=2)
    assert recorder.races


def test_rooms_are_used_again_and_those_that_are_too_small_are_left() -> None:
    recorder = Recorder()
    copies = SliceCopies(CPU)
    assert copies.at_once
    copies._copies = DeviceCopies(CPU, recorder)
    begin = partial(copies.begin, first=3, dtype=torch.float32)
    with recorder:
        small, large = begin(torch.ones(8, device=CPU)), begin(torch.ones(4096, device=CPU))
        copies.give_back(small)
        copies.give_back(large)
        assert begin(torch.ones(2048, device=CPU)).room is large.room
        assert begin(torch.ones(9, device=CPU)).room is small.room
    copies.close()
    assert not copies._free
