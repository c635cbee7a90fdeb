"""The step clock: the time of a step divided without gaps, its work and its traffic.

    phase    | data_wait |     compute                        |  optimizer            |
    spans                    [all_gather]   [reduce_scatter]      [disk]
    parts     data_wait  compute  all_gather  compute ...        optimizer  disk ...

A part is what the innermost span says, else the phase. So the parts of a step add up to it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zero_strategy.fsdp.unshard import tensors_in
from zero_strategy.runtime.compute_device import synchronize
from zero_strategy.runtime.torch_private import (
    TorchDispatchMode,
    in_backward,
    is_compiled_in_place,
    packet_of,
    schema_of,
)

Part = Literal[
    "compute",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "control",
    "pipeline_bubble",
    "copies",
    "disk",
    "optimizer",
    "data_wait",
    "evaluation",
    "checkpoint",
    "diagnostics",
    "other",
]
"""What a step consists of: `compute`: forward and backward; waits for collectives by kind; `pipeline_bubble`: for other
stages; `copies`: between tiers of memory; `disk`: for files; `data_wait`: from the end of a backward or a step to the
next forward; `diagnostics`: what measuring took at the end of the step before."""

PARTS: tuple[Part, ...] = get_args(Part)
MOST_SECTIONS = 4096
"""Of a step, before those that are over are added up: a long evaluation has any number of them."""
FORWARDS = ("compute", "evaluation")
"""Phases that begin with a forward."""


class Clock(Protocol):
    """Takes the time, and says later what it was."""

    def now(self) -> Any:
        """A moment."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments; may wait for the second."""


class HostClock:
    """The process's own."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Their difference."""
        return end - begin


class DeviceClock:
    """Moments in the stream on which this thread computes, so that what the host does meanwhile does not count.

    Args:
        device: Its GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between them, once the device has come to the second."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass
class _Section:
    part: Part | None
    """None: not decided yet."""
    begin: Any


class StepClock:
    """Divides the time of one thread into parts.

    Args:
        clock: What takes the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sections: list[_Section] = []
        self._spans: list[Part] = []
        self._phase: Part | None = "other"
        self._undecided: list[_Section] = []
        self._folded: dict[str, float] = {}

    @property
    def running(self) -> bool:
        """True if a step is being measured."""
        return bool(self._sections)

    def start(self, phase: Part) -> None:
        """A step begins now."""
        self._sections, self._undecided, self._folded, self._phase = [], [], {}, phase
        self._turn()

    def turn(self, phase: Part) -> None:
        """Another phase begins. A gap after a backward that ends with a forward was a wait for data.

        A step may begin before that forward: it runs in a closure then.
        """
        if phase != "optimizer":
            for section in self._undecided:
                section.part = "data_wait" if phase in FORWARDS else "other"
            self._undecided = []
        if phase != self._phase:
            self._phase = phase
            self._turn()

    def turn_later(self) -> None:
        """A backward is over; what follows is known when the next phase begins."""
        if self._phase is not None:
            self._phase = None
            self._turn()

    def enter(self, part: Part) -> None:
        """A span begins."""
        self._spans.append(part)
        self._turn()

    def leave(self) -> None:
        """The innermost span is over."""
        if self._spans:
            self._spans.pop()
            self._turn()

    def end(self) -> tuple[float, dict[str, float]]:
        """The step ends now: its seconds, and those of its parts."""
        self.turn("other")  # decides what is undecided
        self._fold(self._clock.now())
        self._sections = []
        return sum(self._folded.values()), self._folded

    def _fold(self, end: Any) -> None:
        """Add up all sections, the last one until `end`."""
        moments = [*(section.begin for section in self._sections), end]
        for section, begin, stop in zip(self._sections, moments, moments[1:]):
            assert section.part is not None
            self._folded[section.part] = self._folded.get(section.part, 0.0) + self._clock.seconds(begin, stop)

    def _turn(self) -> None:
        part = self._spans[-1] if self._spans else self._phase
        section = _Section(part, self._clock.now())
        if len(self._sections) >= MOST_SECTIONS and not self._undecided:
            self._fold(section.begin)
            self._sections = []
        if part is None:
            self._undecided.append(section)
        self._sections.append(section)


MOST_SHAPES = 8
"""Shapes of batches that are counted; others are taken in proportion to their tokens or samples."""
_PEAK = {
    "B200": (2250e12, 1125e12),
    "H200": (989e12, 495e12),
    "H100 PCIe": (756e12, 378e12),
    "H100": (989e12, 495e12),
    "A100": (312e12, 156e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 62e12),
    "L40S": (362e12, 183e12),
    "L4": (121e12, 60e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}
"""Operations per second of dense matrix products by what is in a device's name: in 16 bits, in TF32 or fp32."""
_MEASURED_WIDTH = 1024


def amount(inputs: Any) -> tuple[int | None, int | None]:
    """Tokens and samples of a micro-batch, as far as its tensors tell.

    Tokens are the elements of the first integer tensor with two dimensions (batch, length); samples the first
    dimension of the first tensor that has one.
    """
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.dim()]
    ids = (t for t in tensors if t.dim() == 2 and not t.is_floating_point() and not t.is_complex())
    tokens = next((t.numel() for t in ids if t.dtype != torch.bool), None)
    return tokens, (len(tensors[0]) if tensors else None)


def peak_operations(device: torch.device, dtype: torch.dtype, *, measure: bool = False) -> float | None:
    """Operations per second that a device can do in a dtype; None if that is not known.

    Args:
        device: The device.
        dtype: What matrix products are computed in.
        measure: Where no table knows it, time matrix products for a few tenths of a second.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = next((rates for model, rates in _PEAK.items() if re.search(rf"\b{model}\b", name)), None)
        if found is not None:
            return found[0] if dtype in (torch.bfloat16, torch.float16) else found[1]
    return _measured_peak(device, dtype) if measure else None


def _measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of several products."""
    width = _MEASURED_WIDTH * (8 if device.type == "cuda" else 1)
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        left @ right
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * width**3 / best


class FlopMeter:
    """Counts the operations of forwards and of the backwards that belong to them, once for each shape of inputs.

    Those of a backward are not watched but derived: each operand that wants a gradient takes as many as the product
    itself. So what is computed again for lack of memory does not count, as MFU is defined.

    Args:
        module: What is run; a compiled one is not counted, since it would have to be run without its compiler.
    """

    def __init__(self, module: nn.Module) -> None:
        self._counted: dict[Any, int] = {}
        self._amounts: dict[Any, int] = {}
        self._compiled = any(is_compiled_in_place(part) for part in module.modules())

    @contextmanager
    def count(self, inputs: Any) -> Iterator[None]:
        """Around a forward: counted if these shapes are new."""
        key = _key(inputs)
        if inputs is None or self._compiled or key in self._counted or len(self._counted) >= MOST_SHAPES:
            yield
            return
        with Operations() as operations:
            yield
        self._counted[key], self._amounts[key] = operations.total, _size(inputs)

    def operations(self, inputs: Any) -> int | None:
        """Operations of the forward and backward of these inputs; None if nothing was counted."""
        key = _key(inputs)
        if key in self._counted or not self._counted:
            return self._counted.get(key)
        size = _size(inputs)
        nearest = min(self._amounts, key=lambda known: abs(self._amounts[known] - size))
        return round(self._counted[nearest] * size / self._amounts[nearest])


def _key(inputs: Any) -> Any:
    """Shapes, which decide how much is computed; of a pipeline its micro-batches, taken to be alike in every step."""
    return inputs if isinstance(inputs, int) else tuple((t.shape, t.dtype) for t in tensors_in(inputs))


def _size(inputs: Any) -> int:
    if isinstance(inputs, int):
        return max(inputs, 1)
    tokens, samples = amount(inputs)
    return max(tokens or samples or 1, 1)


class Operations(TorchDispatchMode):
    """Adds up the operations of products and attention, by torch's formulas.

    Attributes:
        forward: Of forwards.
        total: With those of the backwards that belong to them.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = self.forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if in_backward():  # a backward, or what is computed again in one
            return result
        formula: Any = flop_registry.get(packet_of(func))
        if formula is not None:
            operations = int(formula(*args, **kwargs, out_val=result))
        elif str(schema_of(func)).startswith("aten::_scaled_dot_product"):
            operations = int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
        else:
            return result
        self.forward += operations
        self.total += round(operations * (1 + _backward_share(str(func), args)))
        return result


def _backward_share(name: str, args: Any) -> float:
    """Operations of the backward of one op, as a multiple of its own."""
    if not torch.is_grad_enabled():
        return 0.0
    wanted = [tensor.requires_grad for tensor in args if isinstance(tensor, Tensor)]
    if "_scaled_dot_product" in name:  # two products forward, four backward
        return 2.0 * any(wanted)
    operands = wanted[1:] if "addmm" in name or "baddbmm" in name else wanted[:2]  # a bias takes none
    return float(sum(operands))


class Moved(NamedTuple):
    """One movement that is over.

    Attributes:
        kind: Such as "all_gather", "disk_read", "copy".
        nbytes: Sent, read, written or copied by this rank.
        begin, end: Seconds of the process's clock.
    """

    kind: str
    nbytes: int
    begin: float
    end: float


class Flow(NamedTuple):
    """All movements of one kind in a step.

    Attributes:
        calls: Their number.
        nbytes: Their bytes.
        seconds: In which at least one of them was under way.
    """

    calls: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float | None:
        """While something moved; None if that took no time."""
        return self.nbytes / self.seconds if self.seconds > 0 else None


MOST_MOVED = 4096
"""Movements that are kept one by one; a long evaluation has any number of them."""


class Traffic:
    """Collects movements; `add` may be called from any thread."""

    def __init__(self) -> None:
        self._moved: list[Moved] = []
        self._folded: dict[str, Flow] = {}
        self._lock = threading.Lock()

    def add(self, moved: Moved) -> None:
        """Note one that is over."""
        with self._lock:
            self._moved.append(moved)
            if len(self._moved) >= MOST_MOVED:
                self._fold()

    def take(self) -> dict[str, Flow]:
        """Give, by kind, what has been noted since this was called last."""
        with self._lock:
            self._fold()
            found, self._folded = self._folded, {}
        return found

    def _fold(self) -> None:
        for kind, flow in flows(self._moved).items():
            before = self._folded.get(kind, Flow(0, 0, 0.0))
            added = Flow(before.calls + flow.calls, before.nbytes + flow.nbytes, before.seconds + flow.seconds)
            self._folded[kind] = added
        self._moved = []


def flows(moved: Iterable[Moved]) -> dict[str, Flow]:
    """Flows by kind, in alphabetical order."""
    by_kind: dict[str, list[Moved]] = {}
    for one in moved:
        by_kind.setdefault(one.kind, []).append(one)
    return {
        kind: Flow(len(found), sum(one.nbytes for one in found), _covered(found))
        for kind, found in sorted(by_kind.items())
    }


def _covered(moved: list[Moved]) -> float:
    """Seconds that the union of their intervals takes."""
    covered, until = 0.0, float("-inf")
    for one in sorted(moved, key=lambda one: one.begin):
        covered += max(0.0, one.end - max(one.begin, until))
        until = max(until, one.end)
    return covered
