"""The comparison of two checkpoints: names, shapes, dtypes, every element, and the records beside them.

names, shapes, dtypes, every element, and the records beside the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import FileKind
from zero_strategy.checkpoint.state_reader import StateReader

_BLOCK = 1 << 20
"""Elements that are compared at once."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tensor or record that differs.

    Attributes:
        where: "model", "optimizer 0 exp_avg", "optimizer 0 groups", "counters", ...
        name: The tensor's, or the record's.
        what: "only in A", "only in B", "shape", "dtype", "values" or "record".
        a, b: Both sides, as far as they are short.
        elements: How many elements differ, by their bits; 0 unless it is "values", or "dtype" with other values.
        numel: Of how many.
        max_abs: Largest absolute difference; infinite where one side is not finite.
        max_rel: Largest difference as part of the larger side.
    """

    where: str
    name: str
    what: str
    a: str = ""
    b: str = ""
    elements: int = 0
    numel: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


@dataclass
class Comparison:
    """All differences.

    Attributes:
        differences: In the order of A.
        tensors: How many tensors both have.
        equal: How many of these are equal, bit for bit.
    """

    differences: list[Difference] = field(default_factory=list)
    tensors: int = 0
    equal: int = 0


def bytes_to_compare(a: StateReader, b: StateReader, *, weights_only: bool = False) -> int:
    """Amount of progress that `compare` will report."""
    return sum(
        specs_a[name].nbytes + specs_b[name].nbytes
        for _, _, specs_a, specs_b in _pairs(a, b, weights_only)
        for name in specs_a.keys() & specs_b.keys()
    )


def compare(
    a: StateReader,
    b: StateReader,
    *,
    weights_only: bool = False,
    progress: Callable[[int], object] = lambda count: None,
) -> Comparison:
    """Compares two open checkpoints, in blocks.

    Args:
        a: One.
        b: The other.
        weights_only: Leave optimizers and counters out.
        progress: Is told of the bytes read.

    Raises:
        ValueError: If one is damaged.
    """
    found = Comparison()
    for where, kind, specs_a, specs_b in _pairs(a, b, weights_only):
        for name in [*specs_a, *(name for name in specs_b if name not in specs_a)]:
            mine, theirs = specs_a.get(name), specs_b.get(name)
            if mine is None or theirs is None:
                found.differences.append(Difference(where, name, "only in A" if theirs is None else "only in B"))
                continue
            found.tensors += 1
            difference = _compare_tensor(where, name, mine, theirs, a, b, kind, progress)
            if difference is None:
                found.equal += 1
            else:
                found.differences.append(difference)
    for where, mine, theirs in _records(a, b, weights_only):
        found.differences += _compare_records(where, mine, theirs)
    return found


def _pairs(
    a: StateReader, b: StateReader, weights_only: bool
) -> Iterator[tuple[str, FileKind, Mapping[str, TensorSpec], Mapping[str, TensorSpec]]]:
    yield "model", "model", a.weights, b.weights
    optimizers = [sorted(_optimizers(reader), key=lambda name: (len(name), name)) for reader in (a, b)]
    for name in [] if weights_only else dict.fromkeys([*optimizers[0], *optimizers[1]]):
        states = [
            reader.states(name) if name in known else {} for reader, known in zip((a, b), optimizers, strict=True)
        ]
        for kind in dict.fromkeys([*states[0], *states[1]]):
            yield f"optimizer {name} {kind}", (name, kind), states[0].get(kind, {}), states[1].get(kind, {})


def _optimizers(reader: StateReader) -> Mapping[str, Any]:
    return reader.manifest.optimizers if reader.has_manifest else {}


def _compare_tensor(
    where: str,
    name: str,
    mine: TensorSpec,
    theirs: TensorSpec,
    a: StateReader,
    b: StateReader,
    kind: FileKind,
    progress: Callable[[int], object],
) -> Difference | None:
    if mine.shape != theirs.shape:
        return Difference(where, name, "shape", str(list(mine.shape)), str(list(theirs.shape)))
    elements, max_abs, max_rel = 0, 0.0, 0.0
    for start in range(0, mine.numel, _BLOCK):
        stop = min(start + _BLOCK, mine.numel)
        x, y = a.read(name, start, stop, kind=kind), b.read(name, start, stop, kind=kind)
        progress(x.nbytes + y.nbytes)
        count, largest, relative = _compare_block(x, y)
        elements, max_abs, max_rel = elements + count, max(max_abs, largest), max(max_rel, relative)
    numbers = (elements, mine.numel, max_abs, max_rel)
    if mine.dtype != theirs.dtype:
        return Difference(where, name, "dtype", _short(mine.dtype), _short(theirs.dtype), *numbers)
    return Difference(where, name, "values", "", "", *numbers) if elements else None


def _compare_block(x: torch.Tensor, y: torch.Tensor) -> tuple[int, float, float]:
    """Elements that differ, the largest absolute and the largest relative difference."""
    count = x.numel()
    try:
        if x.dtype == y.dtype:
            if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                return 0, 0.0, 0.0
            differ = _differ(x, y)
            count = int(differ.sum())
            x, y = x[differ], y[differ]
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        wide_x, wide_y = x.to(wide), y.to(wide)
    except (RuntimeError, NotImplementedError):  # a packed dtype: its elements can only be told apart
        return count, math.inf, math.inf
    if x.dtype != y.dtype:
        differ = wide_x != wide_y
        wide_x, wide_y = wide_x[differ], wide_y[differ]
        if wide_x.numel() == 0:
            return 0, 0.0, 0.0
    gap = (wide_x - wide_y).abs()
    scale = torch.maximum(wide_x.abs(), wide_y.abs())
    relative = torch.where(gap == 0, torch.zeros_like(gap), gap / scale)
    return wide_x.numel(), _largest(gap), _largest(relative)


def _differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Positions of bits that differ."""
    if x.dtype == torch.complex128:
        return _differ(torch.view_as_real(x), torch.view_as_real(y)).any(-1)
    integer = _INTEGERS[x.dtype.itemsize]
    return x.view(integer) != y.view(integer)


def _largest(values: torch.Tensor) -> float:
    return float(torch.nan_to_num(values, nan=math.inf, posinf=math.inf).max())


def _records(a: StateReader, b: StateReader, weights_only: bool) -> Iterator[tuple[str, Any, Any]]:
    yield "ties", a.aliases, b.aliases
    if weights_only or not (a.has_manifest and b.has_manifest):
        return
    yield "counters", dict(a.manifest.counters), dict(b.manifest.counters)
    for name in dict.fromkeys([*a.manifest.optimizers, *b.manifest.optimizers]):
        records = [reader.manifest.optimizers.get(name) for reader in (a, b)]
        if records[0] is None or records[1] is None:
            there = [{} if record is None else {name: "there"} for record in records]
            yield "optimizers", there[0], there[1]
            continue
        groups = [{str(i): dict(group) for i, group in enumerate(record.param_groups)} for record in records if record]
        yield f"optimizer {name} groups", groups[0], groups[1]
        yield f"optimizer {name} numbers", dict(records[0].scalars), dict(records[1].scalars)


def _compare_records(where: str, a: Any, b: Any, name: str = "") -> list[Difference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in dict.fromkeys([*a, *b]):
            path = f"{name}.{key}" if name else str(key)
            if key not in a or key not in b:
                found.append(Difference(where, path, "only in A" if key in a else "only in B"))
            else:
                found += _compare_records(where, a[key], b[key], path)
        return found
    if type(a) is type(b) and (a == b or (a != a and b != b)):
        return []
    return [Difference(where, name, "record", _short(a), _short(b))]


def _short(value: Any) -> str:
    text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
