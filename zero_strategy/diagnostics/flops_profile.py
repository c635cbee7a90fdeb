"""A profile of one forward, module by module: parameters, operations and time; `flops_profiler` of a DeepSpeed JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from zero_strategy.diagnostics.work import Operations

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


@dataclass
class _Spent:
    """In all forwards of one module, what is inside of it included."""

    operations: int = 0
    seconds: float = 0.0
    calls: int = 0


class FlopsProfile:
    """Measures the first forward with gradients of one step, and prints what it finds when that is over.

    Operations are those of products and attention, an addition and a multiplication being two; what a backward takes is
    derived from them.

    Args:
        engine: The engine.
        options: `profile_step` (counted from 0), `module_depth` (-1: the deepest), `top_modules`, `detailed`,
            `recompute_fwd_factor`, `output_file` (None: standard output).

    Raises:
        ValueError: If the engine trains stages of a pipeline, which are in no single forward.
    """

    def __init__(self, engine: ZeroEngine, options: Mapping[str, Any]) -> None:
        if engine.config.config.pipeline.stages > 1 or not _has_forward(engine.module):
            raise ValueError(
                "flops_profiler.enabled is true, and a pipeline has no forward of the whole module to profile; turn it "
                "off, and set diagnostics.run_dir for what each stage computes"
            )
        self._engine, self._options = ref(engine), options
        self._spent: dict[nn.Module, _Spent] = {}
        self._open: list[tuple[nn.Module, int, float]] = []
        self._mode: Operations | None = None
        self._inner: list[Any] = []
        self._outer = [
            engine.module.register_forward_pre_hook(self._begin, prepend=True),
            engine.module.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Measure nothing any more."""
        for handle in (*self._outer, *self._inner):
            handle.remove()
        self._outer, self._inner = [], []

    def __deepcopy__(self, memo: dict[int, Any]) -> FlopsProfile:
        return self  # hooks of a copied module find that this is not theirs

    # ---- the forward ----

    def _begin(self, module: nn.Module, args: Any) -> None:
        engine = self._engine()
        if engine is None or module is not engine.module or self._mode is not None or not torch.is_grad_enabled():
            return
        steps = engine.steps.taken + engine.steps.skipped
        if steps != self._options["profile_step"]:
            if steps > self._options["profile_step"]:
                self.close()
            return
        for part in module.modules():
            if part is not module:
                self._inner.append(part.register_forward_pre_hook(self._enter, prepend=True))
                self._inner.append(part.register_forward_hook(self._leave, always_call=True))
        self._mode = Operations()
        self._mode.__enter__()
        self._enter(module, args)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._mode is None or not self._open or self._open[0][0] is not module:
            return
        self._leave(module, args, output)
        self._mode.__exit__(None, None, None)
        total, self._mode = self._mode.total, None
        engine = self._engine()
        self.close()
        if engine is None:
            return
        text = self._report(engine, total)
        if self._options["output_file"]:
            place = Path(self._options["output_file"])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text + "\n")
        else:
            print(text, flush=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        assert self._mode is not None
        self._open.append((module, self._mode.forward, self._now()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not any(module is opened for opened, _, _ in self._open) or self._mode is None:
            return
        opened, operations, begin = self._open.pop()
        while opened is not module:  # left by an exception that somebody caught
            opened, operations, begin = self._open.pop()
        spent = self._spent.setdefault(module, _Spent())
        spent.operations += self._mode.forward - operations
        spent.seconds += self._now() - begin
        spent.calls += 1

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    # ---- the report ----

    def _report(self, engine: ZeroEngine, total: int) -> str:
        root, options = engine.module, self._options
        whole = self._spent[root]
        backward = total - whole.operations
        again = options["recompute_fwd_factor"] * whole.operations
        rate = whole.operations / whole.seconds if whole.seconds > 0 else 0.0
        rows = [
            ("data-parallel ranks", str(engine.mesh.world_size)),
            ("parameters", _number(_parameters(root))),
            ("multiply-adds of the forward", _number(whole.operations / 2)),
            ("operations of the forward", _number(whole.operations)),
            ("operations of the backward", _number(backward + again)),
            ("operations of both", _number(total + again)),
            ("seconds of the forward", f"{whole.seconds:.3g}"),
            ("operations per second of the forward", _number(rate)),
        ]
        head = f"flops_profiler: step {options['profile_step']}, one micro-batch of rank {engine.mesh.team.rank}"
        lines = ["-" * len(head), head, "-" * len(head), *(f"{what:38}{value}" for what, value in rows), ""]
        lines += self._by_depth(root)
        if options["detailed"]:
            lines += ["", "modules: parameters, operations, seconds (shares of the whole)", *self._tree(root, "", 0)]
        return "\n".join(lines)

    def _by_depth(self, root: nn.Module) -> Iterator[str]:
        """The classes that take most, at each depth down to `module_depth`."""
        top, depths = max(1, self._options["top_modules"]), self._depths(root)
        deepest = max(depths)
        last = deepest if self._options["module_depth"] < 0 else min(self._options["module_depth"], deepest)
        yield f"top {top} class(es) of modules at each depth"
        for depth in range(last + 1):
            found: dict[str, tuple[int, int, float]] = {}
            for module in depths[depth]:
                spent = self._spent.get(module, _Spent())
                before = found.get(type(module).__name__, (0, 0, 0.0))
                found[type(module).__name__] = (
                    before[0] + _parameters(module), before[1] + spent.operations, before[2] + spent.seconds,
                )  # fmt: skip
            for what, column in (("parameters", 0), ("operations", 1), ("seconds", 2)):
                largest = sorted(found, key=lambda name: -found[name][column])[:top]
                shown = ", ".join(f"{name} {_number(found[name][column])}" for name in largest)
                yield f"  depth {depth}: {what:12}{shown}"

    @staticmethod
    def _depths(root: nn.Module) -> dict[int, list[nn.Module]]:
        found: dict[int, list[nn.Module]] = {}
        for name, module in root.named_modules():
            found.setdefault(name.count(".") + bool(name), []).append(module)
        return found

    def _tree(self, module: nn.Module, name: str, depth: int) -> Iterator[str]:
        root = self._engine()
        assert root is not None
        whole, spent = self._spent[root.module], self._spent.get(module, _Spent())
        shares = [
            f"{_number(_parameters(module))} ({_share(_parameters(module), _parameters(root.module))})",
            f"{_number(spent.operations)} ({_share(spent.operations, whole.operations)})",
            f"{spent.seconds:.3g} s ({_share(spent.seconds, whole.seconds)})" if spent.calls else "not called",
        ]
        title = f"{name}: {type(module).__name__}" if name else type(module).__name__
        yield f"{'  ' * depth}{title}  {', '.join(shares)}"
        for child_name, child in module.named_children():
            yield from self._tree(child, child_name, depth + 1)


def _has_forward(module: nn.Module) -> bool:
    from zero_strategy.pipeline.module import PipelineModule

    return not isinstance(module, PipelineModule)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _number(value: float) -> str:
    for unit in ("", " K", " M", " G", " T"):
        if abs(value) < 1000:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g} P"
