"""Differences between two checkpoints, as they are found: one for each tensor, number, text or name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.reader import StateReader
from zero_strategy.cli.diff_tensors import Places, Tally
from zero_strategy.runtime.shown import brief

STEP = "global_steps"
"""Counter of optimizer steps."""
MODEL = "model"
"""Place of weights and buffers."""


@dataclass(frozen=True)
class Difference:
    """One tensor or record that differs.

    Attributes:
        where: "model", "optimizer 0 exp_avg", "optimizer 0 groups", "counters", "random state of rank 0", ...
        name: The tensor's, or the record's.
        what: "only in A", "only in B", "shape", "dtype", "values" or "record".
        a, b: Both sides, as far as they are short.
        elements: How many elements differ, by their bits; 0 unless it is "values", or "dtype" with other values. Of a
            "record" that is the first of several entries of a list: of how many.
        numel: Of how many.
        max_abs: Largest absolute difference; infinite where one side is not finite.
        max_rel: Largest difference as part of the larger side.
        places: Where, of "values" and of "dtype" with other values.
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
    places: Places | None = None


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        path: Its directory, file or URL.
        step: Optimizer steps taken, if it says so.
        world_size, stage: Ranks and stage that saved it; None for other formats and plain weights.
        pieces: True if ranks wrote files of their own.
        trained: Names of the parameters of its optimizers.
    """

    path: str
    step: int | None = None
    world_size: int | None = None
    stage: int | None = None
    pieces: bool = False
    trained: frozenset[str] = frozenset()

    @classmethod
    def of(cls, reader: StateReader) -> Side:
        """Facts about an open checkpoint."""
        if not reader.has_manifest:
            return cls(str(reader.directory))
        manifest = reader.manifest
        groups = [group.get("params") for each in manifest.optimizers.values() for group in each.param_groups]
        # Whoever wrote the manifest may have put anything there.
        names = {name for group in groups if isinstance(group, list) for name in group if isinstance(name, str)}
        facts = (str(reader.directory), step_of(manifest.counters))
        if not is_native(reader):
            return cls(*facts, trained=frozenset(names))
        return cls(*facts, manifest.world_size, manifest.stage, manifest.pieces is not None, frozenset(names))


@dataclass
class Comparison:
    """All differences of two checkpoints.

    Attributes:
        a, b: The two.
        differences: Tensors in the order of A, then records.
        tensors: How many tensors both have.
        filled: How many of these have elements.
        equal: How many of these are equal, bit for bit or by the tolerance.
        near: How many of the equal ones are so by the tolerance alone.
        totals: Place -> how many tensors both have there.
        layout: Sentences on what differs and is no difference: who saved, in which files.
    """

    a: Side = field(default_factory=lambda: Side("A"))
    b: Side = field(default_factory=lambda: Side("B"))
    differences: list[Difference] = field(default_factory=list)
    tensors: int = 0
    filled: int = 0
    equal: int = 0
    near: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    layout: list[str] = field(default_factory=list)

    @property
    def of_tensors(self) -> list[Difference]:
        """Differences of values, shapes, dtypes and names of tensors."""
        return [each for each in self.differences if each.where in self.totals]

    @property
    def of_records(self) -> list[Difference]:
        """All other differences."""
        return [each for each in self.differences if each.where not in self.totals]


def is_native(reader: StateReader) -> bool:
    """True for a checkpoint of ours; those of other formats have a manifest without checksums."""
    return reader.has_manifest and bool(reader.manifest.checksums.files)


def step_of(counters: Mapping[str, Any]) -> int | None:
    """The optimizer steps that counters tell of."""
    step = counters.get(STEP)
    return step if type(step) is int else None


def tensor_difference(
    where: str, name: str, mine: TensorSpec, theirs: TensorSpec, tally: Tally | None
) -> Difference | None:
    """The difference of two tensors.

    Args:
        where: Place of both.
        name: Their name.
        mine: A's.
        theirs: B's.
        tally: Of their elements; None if shapes differ.

    Returns:
        None if they are equal.
    """
    if tally is None:
        return Difference(where, name, "shape", str(list(mine.shape)), str(list(theirs.shape)))
    numbers = (tally.elements, mine.numel, tally.max_abs, tally.max_rel, tally.places())
    if mine.dtype != theirs.dtype:
        return Difference(where, name, "dtype", short(mine.dtype), short(theirs.dtype), *numbers)
    return Difference(where, name, "values", "", "", *numbers) if tally.elements else None


def short(value: object) -> str:
    """A value of any kind on one short line."""
    text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else brief(value)
    return text if len(text) <= 100 else text[:97] + "..."
