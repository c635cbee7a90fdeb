"""Waits of the host in forward and backward with state off the device, and what copies hide behind."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import zero_strategy.activation.offload as offload
import zero_strategy.offload.tier as tier
from tests.activation.unit_nets import Transformer, seeded
from tests.device.allocator import TimedDevice
from tests.device.recorder import Clock, Recorder
from tests.device.test_streams import CPU, device
from tests.engine.nets import loss_of, net
from zero_strategy.activation.offload import model_storages
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

DEPTH = 4
STEPS = 3


def train(
    recorder: Recorder | None,
    micro: int = 2,
    width: int = 6,
    dtype: torch.dtype | None = None,
    reads: bool = False,
    **settings: Any,
) -> tuple[list[list[str]], list[torch.Tensor]]:
    """Waits of the host in the forwards and backwards of each step, and, if it `reads` them, the values at the end."""
    model = seeded(Transformer, 3, 64) if width > 6 else net(depth=DEPTH)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", **settings), compute_dtype=dtype)
    if "activations" in settings["offload"]:  # on the CPU they are where they are to go
        engine.activations.store = offload.ActivationStore(CPU, model_storages(engine.model))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    shape = (4, 16, width) if width > 6 else (4, width)
    found: list[list[str]] = []
    with nullcontext() if recorder is None else recorder:
        for _ in range(STEPS):
            before = 0 if recorder is None else len(recorder.syncs)
            for number in range(micro):
                loss_of(model(torch.full(shape, 1.0 + number, dtype=dtype, device=CPU)).float()).backward()
            found.append([] if recorder is None else recorder.syncs[before:])
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    values = [value.clone() for value in engine.full_state_dict().values()] if reads else []
    engine.close()
    assert recorder is None or not recorder.races
    return found, values


IN_HOST_MEMORY: list[dict[str, Any]] = [
    {"stage": 1, "offload": {"optimizer": "cpu"}},
    {"stage": 2, "offload": {"optimizer": "cpu", "gradients": "cpu"}},
    {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu"}},
    {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}, "reshard_after_backward": False},
    {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}, "gradient_reduction": "per_step"},
    {"stage": 3, "offload": {"activations": "cpu"}, "activation_checkpointing": "selective", "width": 64},
]


ALONE = IN_HOST_MEMORY[::3]
"""The optimizer, all of the state, and activations: what one rank does without collectives is the same in each."""


@pytest.mark.parametrize(
    ("settings", "world"), [*((each, 2) for each in IN_HOST_MEMORY), *((each, 1) for each in ALONE)], ids=str
)
def test_the_host_never_waits_in_forward_and_backward(settings: dict[str, Any], world: int) -> None:
    with device(world, Recorder()) as recorder:
        waits, _ = train(recorder, **settings)
    assert waits == [[]] * STEPS


def test_on_drives_the_host_waits_as_often_as_is_listed(tmp_path: Path) -> None:
    """Once per chunk that goes up, but for the first ones, and once per chunk that comes down."""
    drive = dict.fromkeys(("optimizer", "parameters", "gradients"), "nvme")
    offload = {**drive, "nvme_path": [str(tmp_path)], "probe_seconds": 0, "staging_bytes": 1 << 16}
    with device(2, Recorder()) as recorder:
        waits, _ = train(recorder, micro=1, stage=3, offload=offload)
    buckets = DEPTH + 1
    assert all(set(each) == {"an event"} for each in waits)
    assert all(len(each) <= 2 * buckets + buckets for each in waits)


@pytest.mark.parametrize(
    ("settings", "micro", "dtype"),
    [
        (IN_HOST_MEMORY[1], 1, None),
        (IN_HOST_MEMORY[1], 3, torch.bfloat16),
        (IN_HOST_MEMORY[3], 3, None),
        (IN_HOST_MEMORY[3], 1, torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_added_on_the_device_have_the_same_bits(
    settings: dict[str, Any], micro: int, dtype: torch.dtype | None
) -> None:
    with device(1) as recorder:
        _, beside = train(recorder, micro, dtype=dtype, reads=True, **settings)
    with device(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "streams_of", lambda device: None)
        _, at_once = train(None, micro, dtype=dtype, reads=True, **settings)
    assert beside and all(map(torch.equal, beside, at_once))


class Overlap(TimedDevice):
    """Counts, for each copy to the device, what is computed between its beginning and the wait for its end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.computed = 0
        self.between: list[int] = []
        self._begun: dict[tuple[str, int], int] = {}

    def operation(self, what: str, read: Any, written: Any, stream: str | None = None) -> None:
        name = stream or self.current().name
        super().operation(what, read, written, stream)
        if name == self.computing.name:
            self.computed += 1
        elif what == "aten.copy_" and not self._memory(written[0]).host:
            self._begun[name, self.clock(name)[name]] = self.computed

    def learn(self, stream: str, clock: Clock) -> None:
        if stream == self.computing.name:
            for (name, tick), begun in list(self._begun.items()):
                if clock.get(name, 0) >= tick:
                    self.between.append(self.computed - begun)
                    del self._begun[name, tick]
        super().learn(stream, clock)


def cost(stream: str, what: str, nbytes: int) -> int:
    """A copy takes as long as three operations of what computes."""
    return 10 if stream == "computing" else 30


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_come_up_under_what_is_computed(world: int) -> None:
    with device(world, Overlap(cost)) as found:
        assert isinstance(found, Overlap)
        train(found, micro=1, stage=3, offload={"optimizer": "cpu", "parameters": "cpu"})
    each = len(found.between) // STEPS  # the first step knows no order, and begins with each when it is needed
    first, *later = found.between[-each:]
    assert each >= 2 * DEPTH and first == 0
    forward, backward = later[: DEPTH + 1], later[DEPTH + 1 :]
    assert min(later) >= 2 and median(forward) >= 7 and median(backward) >= 20  # a whole unit
