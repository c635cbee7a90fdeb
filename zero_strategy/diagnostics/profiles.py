"""Profiles of an engine: messages per step, parameters, operations and time of its modules.

`comms_logger` of a DeepSpeed JSON.

`flops_profiler` of a DeepSpeed JSON.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import nn

from zero_strategy.diagnostics.step_clock import Operations
from zero_strategy.runtime.compute_device import synchronize
from zero_strategy.runtime.terminal import table

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


_logs: WeakSet[MessageLog] = WeakSet()
"""The one table of the process: `deepspeed.comm.log_summary()` names no engine."""


class MessageLog:
    """Messages of one engine and rank.

    Args:
        engine: The engine.
        kinds: Such as "all_gather"; None: all.
        verbose: Print a line after each step, on rank 0.
    """

    def __init__(self, engine: ZeroEngine, kinds: Collection[str] | None, *, verbose: bool) -> None:
        self._counters, self._rank = engine.counters, engine.mesh.world_group.rank
        self._kinds, self._verbose = kinds, verbose
        self._before: dict[str, tuple[int, int]] = {}
        _logs.add(self)

    def step_over(self, step: int) -> None:
        """Print what was sent since the last step, if that is asked for."""
        if not self._verbose:
            return
        now = self._sent()
        if self._rank == 0:
            parts = []
            for kind, (calls, nbytes) in now.items():
                calls_before, bytes_before = self._before.get(kind, (0, 0))
                if calls > calls_before:
                    parts.append(f"{kind} {calls - calls_before} x, {_size(nbytes - bytes_before)}")
            print(f"comms_logger: step {step}: {'; '.join(parts) or 'nothing sent'}", flush=True)
        self._before = now

    def summary(self) -> str:
        """A table of all kinds: messages, bytes that this rank sent, bytes of a message."""
        rows = [("message", "calls", "sent", "per call")]
        for kind, (calls, nbytes) in sorted(self._sent().items()):
            rows.append((kind, str(calls), _size(nbytes), _size(nbytes / calls) if calls else "-"))
        return f"comms_logger: sent by rank {self._rank}\n{table(rows)}"

    def _sent(self) -> dict[str, tuple[int, int]]:
        counters = self._counters
        return {
            kind: (calls, counters.bytes[kind])
            for kind, calls in counters.calls.items()
            if self._kinds is None or kind in self._kinds
        }


def log_summary(show_straggler: bool = False) -> None:
    """Print on rank 0 what the engines with `comms_logger` have sent.

    Args:
        show_straggler: False: counters know no times; `zero-strategy report` of a `diagnostics.run_dir` compares ranks.

    Raises:
        ValueError: If it is True.
    """
    if show_straggler:
        raise ValueError(
            "log_summary(show_straggler=True) is not done here: set diagnostics.run_dir and read zero-strategy report"
        )
    for log in list(_logs):
        if log._rank == 0:
            print(log.summary(), flush=True)


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


@dataclass
class Spent:
    """Time spent in all forwards of one module, with what is inside of it.

    Attributes:
        operations: Of products and attention; a multiplication and an addition are two.
        seconds: Until the device was done.
        calls: Number of forwards.
    """

    operations: int = 0
    seconds: float = 0.0
    calls: int = 0


class ModuleProfile:
    """Measures forwards between `start` and `stop`.

    Args:
        module: The module; its parts are found when measuring starts.

    Attributes:
        spent: By module, what was measured; modules that were not called are not in it.
        backward_operations: Of the backwards that belong to these forwards, derived from the operands that want
            gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.spent: dict[nn.Module, Spent] = {}
        self.backward_operations = 0
        self._open: list[tuple[nn.Module, int, float]] = []
        self._mode: Operations | None = None
        self._hooks: list[Any] = []

    @property
    def running(self) -> bool:
        """True while it measures."""
        return self._mode is not None

    @property
    def whole(self) -> Spent:
        """Operations and time of the module itself."""
        return self.spent.get(self.module, Spent())

    def start(self, *, in_forward: bool = False) -> None:
        """Begin to measure.

        Args:
            in_forward: A forward of the module has begun already, and is measured from here to `stop`.
        """
        assert self._mode is None, "it is measuring"
        for part in self.module.modules():
            if not (in_forward and part is self.module):
                self._hooks.append(part.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(part.register_forward_hook(self._leave, always_call=True))
        self._mode = Operations()
        self._mode.__enter__()
        if in_forward:
            self._enter(self.module, ())

    def stop(self) -> None:
        """Measure no more; a second call does nothing."""
        if self._mode is None:
            return
        if self._open:
            self._leave(self._open[0][0], (), None)
        self._mode.__exit__(None, None, None)
        self.backward_operations += self._mode.total - self._mode.forward
        self._mode = None
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleProfile:
        return self  # what is copied with a module's hooks measures nothing of the copy

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._mode is not None:
            self._open.append((module, self._mode.forward, _now()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._mode is None or not any(module is opened for opened, _, _ in self._open):
            return
        opened, operations, begin = self._open.pop()
        while opened is not module:  # left by an exception that somebody caught
            opened, operations, begin = self._open.pop()
        spent = self.spent.setdefault(module, Spent())
        spent.operations += self._mode.forward - operations
        spent.seconds += _now() - begin
        spent.calls += 1

    # ---- the report ----

    def report(
        self, title: str, facts: Sequence[tuple[str, str]], *, depth: int, top: int, detailed: bool, again: float = 0.0
    ) -> str:
        """A text for people.

        Args:
            title: The first line.
            facts: Further rows at the beginning.
            depth: Of the modules whose classes are compared; -1 is the deepest.
            top: Classes that are listed at each depth.
            detailed: With a line for each module.
            again: Forwards that are computed again in backward.
        """
        whole = self.whole
        backward = self.backward_operations + again * whole.operations
        rate = whole.operations / whole.seconds if whole.seconds > 0 else 0.0
        rows = [
            *facts,
            ("parameters", number(parameters_of(self.module))),
            ("multiply-adds of the forward", number(whole.operations / 2)),
            ("operations of the forward", number(whole.operations)),
            ("operations of the backward", number(backward)),
            ("operations of both", number(whole.operations + backward)),
            ("seconds of the forward", f"{whole.seconds:.3g}"),
            ("operations per second of the forward", number(rate)),
        ]
        lines = ["-" * len(title), title, "-" * len(title), *(f"{what:38}{value}" for what, value in rows), ""]
        lines += self._by_depth(depth, top)
        if detailed:
            lines += ["", "modules: parameters, operations, seconds (shares of the whole)"]
            lines += self._tree(self.module, "", 0)
        return "\n".join(lines)

    def _by_depth(self, depth: int, top: int) -> Iterator[str]:
        """The classes that take most, at each depth down to `depth`."""
        top, depths = max(1, top), _depths(self.module)
        last = max(depths) if depth < 0 else min(depth, max(depths))
        yield f"top {top} class(es) of modules at each depth"
        for level in range(last + 1):
            found: dict[str, list[float]] = {}
            for module in depths[level]:
                spent, sums = self.spent.get(module, Spent()), found.setdefault(type(module).__name__, [0, 0, 0.0])
                for column, value in enumerate((parameters_of(module), spent.operations, spent.seconds)):
                    sums[column] += value
            for column, what in enumerate(("parameters", "operations", "seconds")):
                largest = sorted(found.items(), key=lambda item, column=column: -item[1][column])[:top]  # type: ignore[misc]
                shown = ", ".join(f"{name} {number(sums[column])}" for name, sums in largest)
                yield f"  depth {level}: {what:12}{shown}"

    def _tree(self, module: nn.Module, name: str, depth: int) -> Iterator[str]:
        whole, spent, parameters = self.whole, self.spent.get(module, Spent()), parameters_of(module)
        shares = [
            f"{number(parameters)} ({_share(parameters, parameters_of(self.module))})",
            f"{number(spent.operations)} ({_share(spent.operations, whole.operations)})",
            f"{spent.seconds:.3g} s ({_share(spent.seconds, whole.seconds)})" if spent.calls else "not called",
        ]
        title = f"{name}: {type(module).__name__}" if name else type(module).__name__
        yield f"{'  ' * depth}{title}  {', '.join(shares)}"
        for child_name, child in module.named_children():
            yield from self._tree(child, child_name, depth + 1)


def parameters_of(module: nn.Module) -> int:
    """Elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def number(value: float) -> str:
    """A number for people: 1.234 K, 5 M."""
    for unit in ("", " K", " M", " G", " T"):
        if abs(value) < 1000:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g} P"


def _depths(root: nn.Module) -> dict[int, list[nn.Module]]:
    found: dict[int, list[nn.Module]] = {}
    for name, module in root.named_modules():
        found.setdefault(name.count(".") + bool(name), []).append(module)
    return found


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _now() -> float:
    synchronize()
    return time.perf_counter()


class FlopsProfile:
    """Measures the first forward with gradients of one step, and prints what it finds when that is over.

    Args:
        engine: The engine.
        options: `profile_step` (counted from 0), `module_depth` (-1: the deepest), `top_modules`, `detailed`,
            `recompute_fwd_factor`, `output_file` (None: standard output).

    Raises:
        ValueError: If the engine trains stages of a pipeline, which are in no single forward.
    """

    def __init__(self, engine: ZeroEngine, options: Mapping[str, Any]) -> None:
        if not _has_forward(engine.module):
            raise ValueError(
                "flops_profiler.enabled is true, and a pipeline has no forward of the whole module to profile; turn it "
                "off, and set diagnostics.run_dir for what each stage computes"
            )
        self._engine, self._options = ref(engine), options
        self._profile: ModuleProfile | None = None
        self._hooks = [
            engine.module.register_forward_pre_hook(self._begin, prepend=True),
            engine.module.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Measure nothing any more."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._profile is not None:
            self._profile.stop()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlopsProfile:
        return self  # hooks of a copied module find that this is not theirs

    def _begin(self, module: nn.Module, args: Any) -> None:
        engine = self._engine()
        if engine is None or module is not engine.module or self._profile is not None or not torch.is_grad_enabled():
            return
        steps = engine.steps.taken + engine.steps.skipped
        if steps == self._options["profile_step"]:
            self._profile = ModuleProfile(module)
            self._profile.start(in_forward=True)
        elif steps > self._options["profile_step"]:
            self.close()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        engine, profile = self._engine(), self._profile
        if engine is None or profile is None or module is not profile.module:
            return
        self.close()
        options = self._options
        text = profile.report(
            f"flops_profiler: step {options['profile_step']}, one micro-batch of rank {engine.mesh.world_group.rank}",
            [("data-parallel ranks", str(engine.mesh.world_size))],
            depth=options["module_depth"],
            top=options["top_modules"],
            detailed=options["detailed"],
            again=options["recompute_fwd_factor"],
        )
        if options["output_file"]:
            place = Path(options["output_file"])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text + "\n")
        else:
            print(text, flush=True)


def _has_forward(module: nn.Module) -> bool:
    from zero_strategy.pipeline.module import PipelineModule

    return not isinstance(module, PipelineModule)
