"""Full weights and optimizer states of an engine, on the hosts of its ranks; all ranks call these together.

One unit at a time is whole on the device.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zero_strategy.checkpoint.agreement import state_dict_entries
from zero_strategy.checkpoint.module_state import full_entries
from zero_strategy.fsdp.dtensor import held_by
from zero_strategy.optim import ShardedOptimizer
from zero_strategy.optim.full_state import full_states

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState


def full_state_dict(engine: TrainState, names: Collection[str] | None, *, keep: bool) -> dict[str, Any]:
    """Full parameters and persistent buffers; see `ZeroEngine.full_state_dict`."""
    # A rank that does not come is named here; the gathers would wait for the process group's time-out.
    engine.mesh.barrier.wait_for_all("full_state_dict()")
    entries = {n: t for n, t in state_dict_entries(engine.module, tied=True) if names is None or n in names}
    wanted, copies = {id(tensor) for tensor in entries.values()}, dict[int, Tensor]()
    for unit in engine.model.units:
        chosen = [p for bucket in unit.buckets for p in bucket.parameters if id(p) in wanted]
        # On ranks that keep nothing, too: a gather takes all of them.
        with engine.model.gathered(chosen):
            whole = {id(p): engine.model.whole_of(p) for p in chosen}
            if keep:
                # A copy on the CPU as well: the unit's memory is another one's afterwards.
                copies.update({key: tensor.to("cpu", copy=True) for key, tensor in whole.items()})
    # Before ranks that keep nothing leave: modules with entries of their own are gathered for it.
    extra = full_entries(engine)
    if not keep:
        return {}
    full = {
        name: copies[id(tensor)] if id(tensor) in copies else held_by(tensor).detach().to("cpu", copy=True)
        for name, tensor in entries.items()
    }
    return {**full, **{name: value for name, value in extra.items() if names is None or name in names}}


def optimizer_state_dict(engine: TrainState, sharded: ShardedOptimizer, *, keep: bool) -> dict[str, Any]:
    """An optimizer's full state in the form of its own `state_dict()`; see `ZeroEngine.optimizer_state_dict`."""
    engine.mesh.barrier.wait_for_all("optimizer_state_dict()")
    states: dict[int, dict[str, Any]] = {}
    for parameter, values in full_states(engine.model, sharded):
        if keep:
            states[id(parameter)] = values
    if not keep:
        return {}
    with sharded.whole_state(states):
        return sharded.optimizer.state_dict()


def full_optimizer_state(engine: TrainState, sharded: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """An optimizer's full state by names of parameters; see `ZeroEngine.full_optimizer_state`."""
    names = {id(parameter): name for name, parameter in engine.model.names()}
    engine.mesh.barrier.wait_for_all("full_optimizer_state()")
    return {names[id(parameter)]: values for parameter, values in full_states(engine.model, sharded)}
