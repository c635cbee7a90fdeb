"""Facts of a session of a run that its journal begins with, and the part of it that each rank has."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_strategy.diagnostics.journal_file import most_lines
from zero_strategy.diagnostics.run_files import facts_of
from zero_strategy.engine import ZeroEngine
from zero_strategy.runtime.regular_files import read_regular

_MOST_SCRIPT = 16 << 20


@dataclass(frozen=True)
class Line:
    """A unit, or neighbours that are folded together, with one digest.

    Attributes:
        units: Names of the modules; "" is the root.
        parameters: Names of their parameters.
    """

    units: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return " + ".join(unit or "the root" for unit in self.units)


@dataclass(frozen=True)
class Place:
    """Part of a run that one rank has.

    Attributes:
        rank: Among all ranks.
        row: Ranks of one row hold the whole state together; rows hold the same.
        slots: That it computes.
        pieces: First and one-past-last element of its part of each parameter, by name.
    """

    rank: int
    row: int
    slots: tuple[int, ...]
    pieces: Mapping[str, tuple[int, int]]


def lines_of(engine: ZeroEngine) -> list[Line]:
    """The root alone, then the units in order, as many in each line as have to be."""
    units = [(unit.name, [name for bucket in unit.buckets for name in bucket.names]) for unit in engine.model.units]
    root, others = units[0], units[1:]
    each = max(1, -(-len(others) // (most_lines(engine.slots.slots) - 1)))
    groups = [[root], *(others[first : first + each] for first in range(0, len(others), each))]
    return [Line(tuple(u for u, _ in group), tuple(n for _, names in group for n in names)) for group in groups]


def own_place(engine: ZeroEngine) -> Place:
    """The place of this rank."""
    mesh, model = engine.mesh, engine.model
    row = mesh.replicate.rank if model.placement.shard_optimizer else mesh.rank
    pieces = {
        bucket.names[piece.index]: (piece.start, piece.stop) for bucket in model.buckets for piece in bucket.pieces
    }
    return Place(mesh.world_group.rank, row, tuple(engine.slots.own), pieces)


def header_of(
    engine: ZeroEngine,
    place: Place,
    lines: list[Line],
    session: str,
    hyper: Mapping[str, Any],
    autocast: torch.dtype | None,
) -> dict[str, Any]:
    """Plain types; `place_in` and `lines_in` read two of them back."""
    facts, zero, model = facts_of(engine), engine.config.config, engine.model
    return {
        "session": session,
        "rank": place.rank,
        "row": place.row,
        "world": engine.mesh.world_group.world_size,
        "ranks": facts["ranks"],
        "stage": engine.stage,
        "slots": engine.slots.slots,
        "seed": engine.slots.seed,
        "own": list(place.slots),
        "pieces": {name: list(bounds) for name, bounds in place.pieces.items()},
        "lines": [{"units": list(line.units), "parameters": list(line.parameters)} for line in lines],
        "config": {key: plain(setting.value) for key, setting in zero.settings()},
        "compute_dtype": _name(model.compute_dtype),
        "autocast": _name(autocast),
        "optimizers": facts["optimizers"],
        "hyper": dict(hyper),
        "model": facts["model"],
        "device": facts["device"],
        "versions": facts["versions"],
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "script": _script(),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def place_in(header: Mapping[str, Any]) -> Place:
    """The place of a rank, of its header.

    Raises:
        KeyError, TypeError, ValueError: If it says none.
    """
    pieces = {str(name): (int(low), int(high)) for name, (low, high) in header["pieces"].items()}
    return Place(int(header["rank"]), int(header["row"]), tuple(map(int, header["own"])), pieces)


def lines_in(header: Mapping[str, Any]) -> list[Line]:
    """The lines of a header.

    Raises:
        KeyError, TypeError: If it has none.
    """
    return [Line(tuple(map(str, each["units"])), tuple(map(str, each["parameters"]))) for each in header["lines"]]


def plain_groups(engine: ZeroEngine) -> dict[str, Any]:
    """Hyper-parameters of all optimizers' groups, by "optimizer.group.name"; and the loss scale, if there is one."""
    found = {
        f"{number}.{place}.{key}": plain(value)
        for number, sharded in enumerate(engine.optimizers)
        for place, group in enumerate(sharded.optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    if engine.scaler is not None:
        found["loss_scale"] = float(engine.scaler.scale)
    return found


def plain(value: Any) -> Any:
    """Numbers, texts and lists of them as they are; tensors of one element as numbers; the text of anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _script() -> dict[str, Any]:
    """The place, the arguments and the SHA-256 of what Python runs."""
    path = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    digest = None
    with suppress(OSError, ValueError):
        digest = hashlib.sha256(read_regular(path, _MOST_SCRIPT)).hexdigest()
    return {"path": path, "arguments": sys.argv[1:], "sha256": digest}
