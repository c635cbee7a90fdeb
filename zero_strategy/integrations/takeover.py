"""A module that one Trainer, Accelerator or Fabric has trained goes over to another one.

Plain frameworks let any number of them train one module in turn. Here the module's engine ends when another one
prepares the module: its parameters become whole and plain (`ZeroEngine.close(gather=True)`), and a new engine shards
them. The earlier one's optimizers, and whatever else needs its engine, say so by an error then.

An engine that somebody is working with is not taken away, nor one that a script has made by itself: an error names the
way out. Both are events that all ranks see alike (a call has begun or ended), never the life of an object, which ends
at different times on different ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol
from weakref import ref

from torch import nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.ownership import owner_of


class Holder(Protocol):
    """An integration that trains with an engine."""

    @property
    def busy(self) -> str:
        """The call that works with its engines now, in words; "": none, another one may take a module over."""


def engines_over(module: nn.Module) -> list[ZeroEngine]:
    """The engines that shard parameters of a module, in the order of its parameters."""
    found: dict[int, ZeroEngine] = {}
    for parameter in module.parameters():
        model = owner_of(parameter)
        if isinstance(model, ShardedModel) and isinstance(model.engine, ZeroEngine):
            found.setdefault(id(model.engine), model.engine)
    return list(found.values())


def hold(engine: ZeroEngine, holder: Holder) -> None:
    """Let an engine be `holder`'s, unless another one is working with it."""
    if not _busy(engine):
        # The engine lives as long as its module, which a Trainer need not.
        engine.holder = ref(holder)


def take_over(module: nn.Module, by: str, *, own: Collection[ZeroEngine] = ()) -> None:
    """End the engines that shard parameters of a module, so that another one can. A collective if there are any.

    Args:
        module: The module.
        by: A clause that says who takes it, for later uses of the engines that end.
        own: Engines of the one who takes it, which stay.

    Raises:
        RuntimeError: If one of them is in use, or cannot give its module back; names the way out.
        ValueError: If one of them is among `own`, or a script's own.
    """
    found = engines_over(module)
    # All are looked at before the first is closed, which could not be given back to a holder who goes on with it.
    for engine in found:
        name, other = type(module).__name__, type(engine.module).__name__
        if any(engine is mine for mine in own):
            raise ValueError(
                f"this {name} shares parameters with the {other} that was prepared already: prepare one module that "
                "holds both, or end the engine of the other first: zero_strategy.engine_of(other).close(gather=True)"
            )
        if busy := _busy(engine):
            raise RuntimeError(
                f"this {name} is in use: {busy} is working with the engine of its {other}. Wait for its end, or use "
                "that one here too; where both train it in turn, each begins after the other has ended"
            )
        # A script that has closed its engine does not go on with it.
        if engine.holder is None and not engine.mesh.closed:
            raise ValueError(
                f"this {name} is sharded by an engine of the script itself (ZeroEngine, initialize), which may go on "
                f"with it: call zero_strategy.engine_of({name.lower()}).close(gather=True) first, on all ranks"
            )
    for engine in found:
        engine.close(gather=True, reason=by)


def _busy(engine: ZeroEngine) -> str:
    holder: Holder | None = None if engine.holder is None else engine.holder()
    return "" if holder is None else holder.busy
