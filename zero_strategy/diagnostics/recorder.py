"""The recorder: writes down where the time and the memory of each step go.

The engine knows nothing of diagnostics. The integrations and `initialize` call this; so does a loop of one's own:

    engine = ZeroEngine(module, {"stage": 3, "diagnostics": {"run_dir": "runs/today"}})
    install_diagnostics(engine)

It also reads the memory in use at one moment, of the device and the host.

`see_memory_usage`.

What of it belongs to an engine, buffer by buffer, is in its ledger (`ZeroEngine.ledger()`).
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.comm.process_group import world_rank
from zero_strategy.config import DiagnosticsConfig
from zero_strategy.diagnostics.run_files import PREFIX, Interval, MemorySample, RunWriter, StepRecord, facts_of
from zero_strategy.diagnostics.step_clock import (
    FORWARDS,
    DeviceClock,
    FlopMeter,
    Flow,
    HostClock,
    Moved,
    Part,
    StepClock,
    Traffic,
    amount,
    peak_operations,
)
from zero_strategy.engine import ZeroEngine
from zero_strategy.planning.held import resident
from zero_strategy.planning.machine import host_memory
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.observer import Mark, Span, Transfer
from zero_strategy.runtime.terminal import report
from zero_strategy.runtime.torch_private import in_backward, uncompiled
from zero_strategy.survive.history import Beginning, History

if TYPE_CHECKING:
    from zero_strategy.diagnostics.journal import StepJournal
    from zero_strategy.diagnostics.monitor import Monitor
    from zero_strategy.engine import ZeroEngine


PHASES, TRAINING, PIPELINE = "phase", "training", "pipeline"
"""Rows in which intervals do not overlap, or lie within one another."""
MOST = 50_000
"""Intervals of a step; what comes later is left out."""


class Intervals:
    """Collects them while a step is traced; `add` may be called from any thread."""

    def __init__(self) -> None:
        self._found: list[Interval] | None = None
        self._phases: list[tuple[str, float]] = []
        self._shift = time.time() - time.perf_counter()

    def start(self, traced: bool) -> None:
        """A step begins, which is traced or not."""
        self._found = [] if traced else None
        self._phases = []

    def add(self, name: str, row: str, begin: float, end: float, detail: str = "") -> None:
        """Note one; times are those of `time.perf_counter`."""
        if (found := self._found) is not None and len(found) < MOST:
            found.append(Interval(name, row, begin + self._shift, end + self._shift, detail))

    def turn(self, phase: str) -> None:
        """A phase begins; an empty one gets its name from what follows."""
        if self._found is not None:
            if phase not in ("", "optimizer"):  # as in `StepClock.turn`
                name = "data_wait" if phase in FORWARDS else "other"
                self._phases = [(known or name, begin) for known, begin in self._phases]
            if not self._phases or self._phases[-1][0] != phase:
                self._phases.append((phase, time.perf_counter()))

    def take(self) -> list[Interval]:
        """The step is over: all of them, by time; none if it was not traced."""
        if self._found is None:
            return []
        self.turn("other")
        end = time.perf_counter()
        starts = [begin for _, begin in self._phases]
        for (name, begin), stop in zip(self._phases, [*starts[1:], end]):
            self.add(name, PHASES, begin, stop)
        found, self._found = self._found, None
        return sorted(found, key=lambda one: (one.begin, -one.end))


_PARTS: dict[Span, Part] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "control": "control",
    "fetch": "copies",
    "copy": "copies",
    "disk": "disk",
    "compute": "compute",
    "bubble": "pipeline_bubble",
    "clip": "optimizer",
    "save": "checkpoint",
    "load": "checkpoint",
    "evaluation": "evaluation",
}


def record(engine: ZeroEngine, settings: DiagnosticsConfig | None = None) -> StepRecorder:
    """Begin to record an engine's steps.

    Args:
        engine: The engine.
        settings: Default: those of its config.

    Raises:
        ValueError: If no directory is named, or somebody observes the engine already.
        OSError: If the directory cannot be written to.
    """
    settings = engine.config.config.diagnostics if settings is None else settings
    if not settings.run_dir:
        raise ValueError("diagnostics.run_dir is empty: name a directory for what is recorded")
    if engine.observed.observer is not None:
        raise ValueError("this engine is observed already; one recorder is enough, close() it before another")
    recorder = StepRecorder(engine, settings)
    engine.observed.observer = recorder
    engine.when_plain(recorder.close)
    return recorder


class StepRecorder:
    """The observer of one engine; see `runtime.observer.Observer`.

    Args:
        engine: The engine.
        settings: What to record.

    Attributes:
        last: The step that was recorded last.
    """

    def __init__(self, engine: ZeroEngine, settings: DiagnosticsConfig) -> None:
        self._engine, self._settings = ref(engine), settings
        self._thread = threading.get_ident()
        device = engine.model.device
        self._clock = StepClock(DeviceClock(device) if device.type == "cuda" else HostClock())
        self._traffic, self._intervals = Traffic(), Intervals()
        self._meter = FlopMeter(engine.module) if settings.flops else None
        self._writer = RunWriter(settings.run_dir, engine.mesh.world_group.rank)
        self._parts = dict(_PARTS)
        if engine.config.config.offload.parameters == "nvme":
            self._parts["fetch"] = "disk"
        self._recording = self._due(engine.steps.taken + 1)
        self._recorded = self._depth = 0
        self._stepping = self._backward_inside = False
        self._peak_rate: float | None = None
        self._messages: Flow = Flow(0, 0, 0.0)
        self._metrics: StepRecord | None = None
        self._history: History | None = None
        self.last: StepRecord | None = None
        self._forget_work()
        self._hooks = _ForwardHooks(engine.module, self.forward, self._forward_gave)

    @property
    def directory(self) -> Path:
        """The place where it writes, which is below the named directory if another engine writes there."""
        return self._writer.directory

    def close(self) -> None:
        """Stop listening, and close the files."""
        self._hooks.remove()
        self._writer.close()
        engine = self._engine()
        if engine is not None and engine.observed.observer is self:
            engine.observed.observer = None

    # ---- what is told ----

    def span(self, kind: Span, name: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
        """See `Observer.span`."""
        return self._span(kind, name, nbytes) if self._recording else nullcontext()

    @contextmanager
    def _span(self, kind: Span, name: str, nbytes: int) -> Iterator[None]:
        in_front = self._in_front()
        divides = in_front and self._clock.running  # the first step begins with a forward
        if divides:
            self._clock.enter(self._parts[kind])
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            if divides:
                self._clock.leave()
            if nbytes:
                self._traffic.add(Moved(kind, nbytes, begin, end))
            self._intervals.add(kind, "training" if in_front else f"{kind} in the background", begin, end, name)

    def transfer(self, kind: Transfer, nbytes: int) -> Callable[[], None]:
        """See `Observer.transfer`."""
        return partial(self._moved, kind, nbytes, time.perf_counter()) if self._recording else _nothing

    def _moved(self, kind: Transfer, nbytes: int, begin: float) -> None:
        end = time.perf_counter()
        self._traffic.add(Moved(kind, nbytes, begin, end))
        self._intervals.add(kind, kind, begin, end, f"{nbytes} bytes")

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """See `Observer.forward`."""
        if not self._recording or self._engine() is None:
            yield
            return
        trains, outermost = torch.is_grad_enabled(), self._depth == 0
        if outermost:
            self._backward_inside, self._told_inputs = False, False
            self._turn("compute" if trains else "evaluation")
        counts = trains and inputs is not None and not self._told_inputs
        if counts:
            self._told_inputs = True
            self._note_inputs(inputs)
        self._depth += 1
        try:
            with self._meter.count(inputs) if counts and self._meter is not None else nullcontext():
                yield
        finally:
            self._depth -= 1
            if counts and self._meter is not None:
                self._operations.append(self._meter.operations(inputs))
            if outermost and self._backward_inside:
                self._turn_later()

    def mark(self, mark: Mark, value: Any = None) -> None:
        """See `Observer.mark`."""
        if mark == "step over":
            self._step_over(value)
        elif mark == "copied":
            self._note_history(*value)
        elif not self._recording:
            return
        elif mark == "backward over":
            self._backward_inside = True
            if not self._depth:
                self._turn_later()
        elif mark == "step begins":
            self._stepping = True
            self._turn("optimizer")
        elif mark == "optimizer over":
            self._stepping = False
            self._turn_later()
        elif mark == "loss":
            self._losses.append(value)
        elif mark == "batch":
            self._amounts.append(amount(value))
        else:
            for event in value:
                number = "" if event.micro_batch is None else str(event.micro_batch)
                self._intervals.add(f"{event.kind}{number}", "pipeline", event.start, event.end, f"chunk {event.chunk}")

    def take_metrics(self) -> Mapping[str, float] | None:
        """See `Observer.take_metrics`."""
        record, self._metrics = self._metrics, None
        if record is None or self._history is None:
            return None if record is None else record.metrics()
        return {**record.metrics(), **{PREFIX + name: value for name, value in self._history.metrics().items()}}

    def _note_history(self, over: Sequence[Beginning], history: History) -> None:
        """A copy in memory is there: the first rank writes down which beginnings are over with it."""
        self._history = history
        engine = self._engine()
        if over and engine is not None and engine.mesh.world_group.rank == 0:
            self._writer.beginnings(over)

    # ---- the step ----

    def _due(self, step: int) -> bool:
        return step % self._settings.every_n_steps == 0

    def _in_front(self) -> bool:
        """True if this is the thread that trains, or autograd's, for which that one waits."""
        return threading.get_ident() == self._thread or in_backward()

    def _begin(self) -> None:
        if self._clock.running:
            return
        self._start("diagnostics")
        engine = self._engine()
        if engine is not None and not self._recorded and engine.mesh.world_group.rank == 0:
            self._writer.facts(facts_of(engine))

    def _start(self, phase: Part) -> None:
        self._traffic.take()
        self._intervals.start(self._recorded < self._settings.trace_steps)
        self._clock.start(phase)
        self._intervals.turn(phase)

    def _turn(self, phase: Part) -> None:
        self._begin()
        self._clock.turn(phase)
        self._intervals.turn(phase)

    def _turn_later(self) -> None:
        if self._stepping:  # the backward of a closure
            self._turn("optimizer")
        else:
            self._begin()
            self._clock.turn_later()
            self._intervals.turn("")

    def _step_over(self, step: int) -> None:
        engine = self._engine()
        if engine is None:
            return
        self._stepping, self._depth = False, 0
        measured = None
        if self._recording and self._clock.running:
            measured = *self._clock.end(), self._traffic.take(), self._intervals.take()
        self._recorded += measured is not None
        self._recording = self._due(step + 1)
        if self._recording:
            self._start("diagnostics")
        if measured is not None:
            seconds, parts, moved, intervals = measured
            self.last = self._metrics = self._record(engine, step, seconds, parts, moved)
            self._writer.step(self.last)
            if intervals:
                self._writer.trace(step, intervals)
        self._forget_work()
        if self._recording:
            self._turn("data_wait")

    def _record(
        self, engine: ZeroEngine, step: int, seconds: float, parts: Mapping[str, float], flows: Mapping[str, Flow]
    ) -> StepRecord:
        tokens = [tokens for tokens, _ in self._amounts if tokens is not None]
        samples = [samples for _, samples in self._amounts if samples is not None]
        counted = [count for count in self._operations if count is not None]
        peak = self._peak(engine)
        return StepRecord(
            step=step,
            rank=engine.mesh.world_group.rank,
            time=time.time(),
            seconds=seconds,
            parts=parts,
            flows={**flows, **self._messages_sent(engine)},
            loss=_mean(self._losses or self._outputs),
            tokens=sum(tokens) if tokens else None,
            samples=sum(samples) if samples else None,
            operations=sum(counted) if counted and len(counted) == len(self._operations) else None,
            peak=None if peak is None else peak * seconds,
            copies=engine.mesh.world_size,
            memory=sample_memory(engine) if self._memory_due() else None,
            experts=engine.model.experts.take_rows() or None,
        )

    def _memory_due(self) -> bool:
        every = self._settings.memory_every_n_steps
        return bool(every) and (self._recorded - 1) % every == 0

    def _messages_sent(self, engine: ZeroEngine) -> dict[str, Flow]:
        """Between stages; how long they were under way is not known."""
        counters = getattr(getattr(engine, "executor", None), "counters", None)
        if counters is None:
            return {}
        before = self._messages
        self._messages = Flow(sum(counters.calls.values()), sum(counters.bytes.values()), 0.0)
        found = Flow(self._messages.calls - before.calls, self._messages.nbytes - before.nbytes, 0.0)
        return {"point_to_point": found} if found.calls > 0 else {}

    def _peak(self, engine: ZeroEngine) -> float | None:
        """Operations per second; looked up, or measured, once."""
        if self._settings.peak_tflops:
            return self._settings.peak_tflops * 1e12
        if self.last is None and self._meter is not None:
            dtype = self._dtype or engine.model.buckets[0].dtype
            self._peak_rate = peak_operations(engine.model.device, dtype, measure=self._settings.measure_peak)
        return self._peak_rate

    # ---- what a step computes ----

    def _forget_work(self) -> None:
        self._losses: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._amounts: list[tuple[int | None, int | None]] = []
        self._operations: list[int | None] = []
        self._told_inputs = False
        self._dtype: torch.dtype | None = None

    def _note_inputs(self, inputs: Any) -> None:
        if not isinstance(inputs, int):
            self._amounts.append(amount(inputs))
        engine = self._engine()
        if engine is not None and torch.is_autocast_enabled(engine.model.device.type):
            self._dtype = torch.get_autocast_dtype(engine.model.device.type)

    def _forward_gave(self, output: Any) -> None:
        """A module that returns its loss, alone or among other things, has told it."""
        if self._recording and torch.is_grad_enabled():
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
                self._outputs.append(loss.detach())


class _ForwardHooks:
    """Hooks that enter `around(inputs)` for every forward of a module, and call `gave` with what it returns."""

    def __init__(
        self,
        module: nn.Module,
        around: Callable[[Any], AbstractContextManager[None]],
        gave: Callable[[Any], object],
    ) -> None:
        scopes: list[AbstractContextManager[None]] = []

        def before(args: Any, kwargs: Any) -> None:
            scope = around((args, kwargs))
            scope.__enter__()
            scopes.append(scope)

        def after(args: Any, output: Any) -> None:
            if scopes:
                scopes.pop().__exit__(None, None, None)
            if output is not None:
                gave(output)

        self._handles = (
            module.register_forward_pre_hook(_Hook(before), with_kwargs=True, prepend=True),
            module.register_forward_hook(_Hook(after), always_call=True),
        )

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _Hook(EphemeralHook):
    """A hook of a whole module, whoever calls that; a copy of the module has none."""

    def __init__(self, told: Callable[[Any, Any], None]) -> None:
        self._told = told

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, more: Any) -> None:
        self._told(args, more)


def _nothing() -> None:
    pass


def _mean(losses: list[Tensor]) -> float | None:
    if not losses:
        return None
    return float(torch.stack([loss.reshape(()).double() for loss in losses]).mean())


@dataclass(frozen=True)
class Installed:
    """Observers of an engine.

    Attributes:
        recorder: Of where time and memory of each step go (`diagnostics.run_dir`), or None.
        monitor: Writes what a DeepSpeed JSON asks to be written (tensorboard, ...), or None.
        journal: Of the bits of each step of slots (`diagnostics.journal`), or None.
    """

    recorder: StepRecorder | None = None
    monitor: Monitor | None = None
    journal: StepJournal | None = None


def install_diagnostics(engine: ZeroEngine) -> Installed:
    """Begin what an engine's settings ask to be recorded; nothing is loaded where they ask for nothing.

    Raises:
        ValueError: If somebody observes the engine already, or a section cannot be carried out for such an engine.
        OSError: If a directory cannot be written to.
    """
    settings = engine.config.config
    recorder: StepRecorder | None = None
    monitor: Monitor | None = None
    journal: StepJournal | None = None
    closing: list[Callable[[], None]] = []
    if settings.diagnostics.run_dir:
        recorder = record(engine)
        # The stages of a pipeline have forwards of their own, and no journal yet.
        if settings.diagnostics.journal and engine.slots.slots and settings.pipeline.stages == 1:
            from zero_strategy.diagnostics.journal import keep_journal

            journal = keep_journal(engine, recorder.directory)
            closing.append(journal.close)
    if settings.deepspeed is not None and settings.deepspeed.observers:
        from zero_strategy.diagnostics.monitor import Monitor

        monitor = Monitor(engine, settings.deepspeed)
        closing.append(monitor.close)
    engine.note_diagnostics(*closing)
    return Installed(recorder, monitor, journal)


def sample_memory(engine: ZeroEngine) -> MemorySample:
    """The ledger's sums, and what the process and the device's allocator say."""
    tiers: dict[str, dict[str, int]] = {}
    for (tier, category), total in engine.ledger().sums("tier", "category").items():
        tiers.setdefault(tier, {})[category] = total.taken
    now, peak = resident()
    device = engine.model.device
    if device.type != "cuda":
        return MemorySample(tiers, now, peak)
    allocated, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return MemorySample(tiers, now, peak, allocated, most)


logger = logging.getLogger(__name__)

_GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. None: there is no such thing here.

    Attributes:
        allocated: Of tensors on the current CUDA device.
        max_allocated: The most of it since the last `see_memory_usage` or reset.
        reserved: What torch's allocator has taken from the device (its cache included).
        max_reserved: The most of it.
        resident: Host memory that this process occupies.
        virtual: Its address space.
        host_used: Host memory of all processes that cannot be had.
        host_total: All there is.
    """

    allocated: int | None
    max_allocated: int | None
    reserved: int | None
    max_reserved: int | None
    resident: int | None
    virtual: int | None
    host_used: int | None
    host_total: int | None

    @classmethod
    def now(cls, root: Path = Path("/")) -> MemoryUse:
        """The figures of this moment.

        Args:
            root: Where `proc` is.
        """
        has_device = torch.cuda.is_available()
        return cls(
            torch.cuda.memory_allocated() if has_device else None,
            torch.cuda.max_memory_allocated() if has_device else None,
            torch.cuda.memory_reserved() if has_device else None,
            torch.cuda.max_memory_reserved() if has_device else None,
            *_process(root),
            *_host(root),
        )

    def lines(self) -> list[str]:
        """For people: the device's, then the host's."""
        host = f"host memory: process {_gib(self.resident)} resident, {_gib(self.virtual)} virtual"
        if self.host_used is not None and self.host_total:
            percent = 100 * self.host_used / self.host_total
            host += f"; all processes {_gib(self.host_used)} of {_gib(self.host_total)} ({percent:.1f} %)"
        if self.allocated is None:
            return ["device memory: no CUDA device", host]
        return [
            f"device memory: allocated {_gib(self.allocated)}, at most {_gib(self.max_allocated)}; "
            f"cached {_gib(self.reserved)}, at most {_gib(self.max_reserved)}",
            host,
        ]


def see_memory_usage(message: str, force: bool = False, *, rank: int | None = 0) -> None:
    """Log memory of the device and the host, and begin with new peaks.

    The logger is this module's, the level INFO; where no logging is set up, the line goes to stderr.

    Args:
        message: What it is about.
        force: Collect garbage before, and give the allocator's cache back to the device.
        rank: The global rank that logs; None: all of them. Garbage is collected on every rank.
    """
    if force:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if rank is None or world_rank() == rank:
        report(logger, "%s | %s", message, " | ".join(MemoryUse.now().lines()))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def get_ma_status() -> int:
    """Bytes of tensors on the current CUDA device; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def get_autocast_status() -> dict[str, torch.dtype]:
    """Kinds of devices whose operations run in mixed precision here, and the lower dtype that they use."""
    kinds = ("cpu", "cuda")
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def _gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / _GIB:.2f} GiB"


def _process(root: Path) -> tuple[int | None, int | None]:
    """Resident and virtual bytes of this process."""
    try:
        pages = (root / "proc/self/statm").read_text().split()
    except OSError:  # not Linux
        return None, None
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[1]) * size, int(pages[0]) * size


def _host(root: Path) -> tuple[int | None, int | None]:
    """Bytes of host memory that cannot be had, and all of it."""
    known = host_memory(root)
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    return (None, None) if total is None or available is None else (total - available, total)
