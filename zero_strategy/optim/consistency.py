"""The check that all ranks update their shards by the same rule: classes, groups, rates.

The rule of a rank is its optimizer classes, hyper-parameters, and steps taken.

Where optimizer state is sharded, each rank updates only its slice. A rank with another learning rate or another
optimizer class, or one that skips `step()`, would train on in silence. So a hash of what the next step would use, and
of what the last one used, travels in the message that ends every reduction of gradients; no message is added. Only
where hashes differ do ranks exchange the values themselves, and all of them raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.comm.collectives import Communicator
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

# The message has two numbers of 15 bits for it, see `ReductionPlan.encode`.
_HASH_MASK = 0x3FFFFFFF
_NAN = -0.5
"""Stands in for a NaN, whose hash differs from object to object."""


class OptimizerConsistency:
    """Compares the optimizers of all data-parallel ranks.

    Args:
        optimizers: The attached optimizers, in order; looked at anew in each call.
        control: The data-parallel ranks.
    """

    def __init__(self, optimizers: Sequence[ShardedOptimizer], control: Communicator) -> None:
        self._optimizers, self._control = optimizers, control
        self._used: dict[int, tuple[int, int]] = {}
        self._kinds: dict[type, int] = {}

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step that begins now, and remember by which hyper-parameters."""
        steps, _ = self._used.get(id(optimizer), (0, 0))
        # Hashed now: a value may be changed back before the next reduction compares.
        self._used[id(optimizer)] = (steps + 1, self._hash_of(optimizer))

    def forget(self) -> None:
        """Start anew, with other optimizers."""
        self._used.clear()

    def fingerprint(self) -> int:
        """Hash of hyper-parameters, now and in the last step, steps and changes of state; 30 bits, never 0."""
        for sharded in self._optimizers:
            # An assignment since the last step is a change, too, and counts in the digest.
            sharded.follow_assigned_state()
        found = tuple(
            (self._hash_of(sharded.optimizer), self._used.get(id(sharded.optimizer), (0, 0)), sharded.edits.digest)
            for sharded in self._optimizers
        )
        # 0 says that nothing is to be compared.
        return (hash(found) & _HASH_MASK) or 1

    def compare(self, compared: bool = True) -> None:
        """Exchange the values and raise an error that names those that differ. A collective.

        Args:
            compared: Whether this rank's values count; not where it follows others without a batch of its own.

        Raises:
            RuntimeError: Always, on all ranks; names values, param groups and ranks.
        """
        everyone = self._control.all_gather_objects(self._description() if compared else None)
        described = {rank: mine for rank, mine in enumerate(everyone) if mine is not None}
        raise RuntimeError(
            f"ranks update their parts of the parameters by different rules: {_differences(described)}. Every rank "
            "must build the same optimizers, set the same hyper-parameters, change optimizer.state alike and call "
            "step() as many times: let schedules follow numbers that are the same on all ranks (reduce a metric over "
            "the ranks first). A rank whose loss has no graph of the model (a constant) runs no backward, and is a "
            "step ahead of the others: give it a loss of the model's outputs, such as `0 * output.sum()`."
        )

    def _description(self) -> list[dict[str, str]]:
        """The compared values by their names in words, one mapping per optimizer."""
        found = []
        for sharded in self._optimizers:
            optimizer = sharded.optimizer
            steps, _ = self._used.get(id(optimizer), (0, 0))
            values = {"class": type(optimizer).__name__, "number of steps": str(steps)}
            values["changes of optimizer.state"] = str(sharded.edits)
            for number, group in enumerate(optimizer.param_groups):
                values[f"number of parameters of group {number}"] = str(len(group["params"]))
                for key, value in group.items():
                    if key != "params" and _number_of(value) is not None:
                        values[f"{key} of group {number}"] = str(value)
            found.append(values)
        return found

    def _hash_of(self, optimizer: Optimizer) -> int:
        kind = type(optimizer)
        if kind not in self._kinds:
            # Not Python's hash, which differs for strings from process to process.
            self._kinds[kind] = crc32(kind.__qualname__.encode())
        return hash((self._kinds[kind], tuple(_numbers_of(group) for group in optimizer.param_groups)))


def _differences(described: Mapping[int, list[dict[str, str]]]) -> str:
    counts = {rank: str(len(mine)) for rank, mine in described.items()}
    if len(set(counts.values())) > 1:
        return f"the number of optimizers is {_by_rank(counts)}"
    first = next(iter(described.values()))
    problems = []
    for number, optimizer in enumerate(first):
        which = optimizer["class"] + (f" (optimizer {number})" if len(first) > 1 else "")
        for key in dict.fromkeys(key for mine in described.values() for key in mine[number]):
            values = {rank: mine[number].get(key, "absent") for rank, mine in described.items()}
            if len(set(values.values())) > 1:
                problems.append(f"{which}: {key} is {_by_rank(values)}")
    return "; ".join(problems) or "hyper-parameters that were changed for the last step, and changed back since"


def _by_rank(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on rank(s) {where}" for value, where in ranks.items())


def _numbers_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Only numbers are hashed: Python's hash of a number is the same in every process, that of a string is not."""
    found: list[Any] = []
    for key, value in group.items():
        if key == "params":
            found.append(len(value))
        elif (number := _number_of(value)) is not None:
            found.append(number)
    return tuple(found)


def _number_of(value: Any) -> Any:
    """A hyper-parameter as a number or a tuple of numbers; None where it is no number that the host has."""
    if isinstance(value, (tuple, list)):
        numbers = tuple(map(_number_of, value))
        return None if None in numbers else numbers
    if isinstance(value, Tensor):
        # Of a tensor on a device the host would wait for the value.
        value = value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if not isinstance(value, (int, float, Real)):
        return None
    return value if value == value else _NAN
