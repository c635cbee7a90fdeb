"""Parameters, operations and time of a module's forwards, part by part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_strategy.diagnostics.work import Operations


@dataclass
class Spent:
    """In all forwards of one module, what is inside of it included.

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
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
