"""Pipelines whose tensors go from device to device: exact, and no neighbour that is gone or has failed is a hang.

Gloo stands for the device's backend; its transfers are begun and end beside the host, as those of a device.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.faulty import Faulty, die, no_number
from tests.launcher import Launcher, RankError
from tests.pipeline.pipelines import Case, build_stages, data_of, expected, gradients_of, loss_fn
from zero_strategy.pipeline import device_payloads, peers
from zero_strategy.pipeline.executor import Executor
from zero_strategy.watchdog.waits import Group

_SECONDS = 10.0


class DeviceGroup(Group):
    """Transfers end in a thread of their own, and a wait for one is the device's."""

    on_device = True

    def __init__(self, backend: Any, ranks: list[int]) -> None:
        super().__init__(backend, ranks)
        self.broken = threading.Event()

    def send(self, buffer: Tensor, to: int, tag: int) -> Any:
        return DeviceWork(super().send(buffer, to, tag))

    def receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        return DeviceWork(super().receive(buffer, source, tag))

    def abort(self) -> None:
        self.broken.set()


class DeviceWork:
    def __init__(self, work: Any) -> None:
        self._thread = threading.Thread(target=work.wait, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(60.0)
        assert not self._thread.is_alive()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


class SilentGroup(DeviceGroup):
    """Its transfers end when it is broken. A wait for one holds the device; the host goes on."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def send(self, buffer: Tensor, to: int, tag: int) -> Any:
        return SilentWork(self, buffer.numel() == 1)

    receive = send


class SilentWork:
    def __init__(self, group: SilentGroup, first: bool) -> None:
        self._group, self._first = group, first

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self._first or self._group.broken.is_set()


def _groups(channels: Any, rank: int, seconds: float, place: Any) -> dict[tuple[int, int], Group]:
    return {
        way: DeviceGroup(
            dist.ProcessGroupGloo(place("-".join(map(str, way))), way.index(rank), 2, timedelta(seconds=seconds)),
            list(way),
        )
        for way in device_payloads.ways_of(channels)
        if rank in way
    }


def _train(case: Case) -> tuple[float, dict[str, Tensor], Counter[str], Counter[str], int]:
    """Gradients of a batch, the loss, and what was sent: first by the device, then as on the CPU."""
    rank, ways = dist.get_rank(), 0
    results = []
    for beside in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers, "goes_beside", lambda device, beside=beside: beside)
            patch.setattr(device_payloads, "device_groups", _groups)
            stages = build_stages(case, rank)
            executor = Executor(stages, case.placement(), loss_fn=loss_fn, timeout=60.0, name=f"beside {beside}")
            for _ in range(2):
                for stage in stages:
                    stage.zero_grad()
                loss = executor.run(case.schedules()[rank], data_of(case, rank)).loss
            assert loss is not None and executor.counters is not None
            results.append((float(loss), gradients_of(case, rank, stages), Counter(executor.counters.calls)))
            transport = executor._pipeline_peers._transport
            assert transport is not None
            ways = ways or len(transport._payloads._groups)
            executor.close()
    (loss, gradients, calls), (plain_loss, plain, plain_calls) = results
    assert loss == plain_loss
    assert gradients.keys() == plain.keys() and all(torch.equal(gradients[name], plain[name]) for name in plain)
    return loss, gradients, calls, plain_calls, ways


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", 4, 1, 6, True),
        Case("interleaved_1f1b", 2, 2, 4, False),
        Case("zbv", 2, 2, 4, True),
        Case("TrainSchedule", 2, 1, 4, False),
    ],
    ids=str,
)
def test_tensors_by_the_device_train_what_one_process_trains(ranks: Launcher, case: Case) -> None:
    """Bit by bit as tensors in messages; with as many of these, and as many transfers beside them."""
    loss, total = expected(case)
    for result in ranks(case.ranks)(_train, case):
        found, gradients, calls, plain, ways = result
        assert found == pytest.approx(loss, abs=1e-6) and ways <= 4
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, total[name], rtol=1e-5, atol=1e-6)
        for kind in ("activation", "gradient", "loss", "end"):
            assert calls[kind] == plain[kind]
        headers = calls["activation"] + calls["gradient"]
        assert headers <= calls["control"] <= headers + plain["control"]


def _wait_for_device(executor: Executor, given: Any) -> Any:
    """As `.item()` would, somewhere in a user's model: for a device that waits for another rank."""
    transport = executor._pipeline_peers._transport
    assert transport is not None
    groups = [group for group in transport._payloads._groups.values() if isinstance(group, SilentGroup)]
    for group in groups:
        assert group.broken.wait(3 * _SECONDS)
    return given


def _left_alone(fault: Any, where: str) -> tuple[str, str, float]:
    """Rank 0's device never sends, and its host fails after the first header. The others wait for their devices."""
    rank, case = dist.get_rank(), Case("1f1b", 2, 1, 2, False)
    silent = SilentGroup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "goes_beside", lambda device: True)
        ways = [(0, 1), (1, 0)]
        patch.setattr(device_payloads, "device_groups", lambda *_: {way: silent for way in ways})
        stages = list(build_stages(case, rank))
        if rank == 0:
            stages[0] = Faulty(stages[0], fault, at=2)
        executor = Executor(stages, case.placement(), loss_fn=loss_fn, timeout=2.0 if where == "hang" else 60.0)
        if rank == 1 and where != "end":
            stages[0] = Faulty(stages[0], lambda given: _wait_for_device(executor, given), at=1)
            executor.chunks[0].module = stages[0]
        started = time.monotonic()
        try:
            executor.run(case.schedules()[rank], data_of(case, rank))
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - started
        raise AssertionError("nothing happened")


@pytest.mark.parametrize("where", ["user code", "end"])
def test_a_stage_that_fails_while_a_device_waits_for_it(ranks: Launcher, where: str) -> None:
    kind, text, seconds = ranks(2)(_left_alone, no_number, where)[1]
    assert kind == "PipelineError" and seconds < _SECONDS
    assert "stage 0 (rank 0), forward of micro-batch 1 in stage 0: FloatingPointError" in text


def test_a_stage_that_dies_while_a_device_waits_for_it(ranks: Launcher) -> None:
    """The host waits for the device in code that is not ours: nothing else could notice."""
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2, grace=3 * _SECONDS)(_left_alone_and_told, die)
    failures = caught.value.failures
    assert failures.pop(0).kind == "died" and time.monotonic() - started < 3 * _SECONDS
    (failure,) = failures.values()
    assert (
        "PipelineError in " in failure.text and "stage 0 (rank 0) is gone: its connection broke while" in failure.text
    )
    told = re.search(r"told after ([0-9.]+) s", failure.text)
    assert told is not None and float(told[1]) < _SECONDS


def _left_alone_and_told(fault: Any) -> None:
    kind, text, seconds = _left_alone(fault, "user code")
    raise RuntimeError(f"{kind} in {text}; told after {seconds:.1f} s")


def _stall(given: Any) -> Any:
    time.sleep(8.0)
    return given


def test_a_stage_that_does_not_get_on_while_a_device_waits_for_it(ranks: Launcher) -> None:
    kind, text, seconds = ranks(2)(_left_alone, _stall, "hang")[1]
    assert kind == "PipelineError" and seconds < _SECONDS
    assert "stage 1 (rank 1) has waited 2 s for the tensors of the activation of micro-batch 0, and stage 0" in text
