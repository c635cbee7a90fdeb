"""Counter of the elements that any contender sends, where torch dispatches collectives (`c10d` and functional ones).

A collective counts for what this rank sends by the algorithm that sends the fewest elements to every rank, so that
peers with other algorithms and backends can be compared: of n elements that all ranks hold afterwards, n (N - 1)/N in
an all-gather, as many in a reduce-scatter, twice as many in an all-reduce. What is dispatched by other threads than the
one that computes is not seen: our engine's own counters are read instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 16
"""Elements up to which a collective is taken for a control message: norms, flags, sizes."""


def kind_of(op: str) -> str:
    """The kind of a collective by the name of its op; "": it is none that carries values."""
    plain = op.replace("_", "")
    for name, kind in (
        ("reducescatter", "reduce_scatter"),
        ("allreduce", "all_reduce"),
        ("allgather", "all_gather"),
        ("alltoall", "all_to_all"),
        ("broadcast", "broadcast"),
        ("scatter", "broadcast"),
        ("gather", "broadcast"),
        ("reduce", "broadcast"),
        ("isend", "send"),
        ("send", "send"),
    ):
        if plain.startswith(name):
            return kind
    return ""


def sent(kind: str, elements: int, world: int) -> float:
    """Elements that each rank sends, in the mean, of a collective of so many elements in all."""
    if kind == "send":
        return elements
    share = elements * (world - 1) / world
    return 2 * share if kind == "all_reduce" else share


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives while it is entered.

    Args:
        world: Number of ranks.

    Attributes:
        elements: Elements sent by kind; those of small collectives as "control".
        calls: Number of collectives by kind.
    """

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world
        self.elements: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, _, name = getattr(func, "_schema", func).name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and (kind := kind_of(name)):
            self._count(kind, name, (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, name: str, given: Any) -> None:
        # Of a gather the whole is the largest operand; the functional ones make it: there it is the world's share.
        elements = _largest(given)
        if name.startswith("all_gather_into_tensor") and not name.endswith("_out"):
            elements *= self.world
        counted = kind if elements > SMALL else "control"
        self.calls[counted] += 1
        self.elements[counted] += round(sent(kind, elements, self.world))

    @property
    def elements_sent(self) -> int:
        """Elements sent, control messages left out."""
        return sum(count for kind, count in self.elements.items() if kind != "control")


def _largest(given: Any) -> int:
    """Elements of the largest operand; a list of tensors is one."""
    if isinstance(given, Tensor):
        return given.numel()
    if isinstance(given, Mapping):
        return _largest(list(given.values()))
    if isinstance(given, (list, tuple)):
        if given and all(isinstance(one, Tensor) for one in given):
            return sum(one.numel() for one in given)
        return max(map(_largest, _inner(given)), default=0)
    return 0


def _inner(given: Iterable[Any]) -> Iterable[Any]:
    return (one for one in given if isinstance(one, (Tensor, Mapping, list, tuple)))


def elements_of_a_step(step: Any, world: int) -> CollectiveCounter:
    """Counts while `step()` runs."""
    counter = CollectiveCounter(world)
    with counter, torch.autograd.set_multithreading_enabled(False):
        step()
    return counter
