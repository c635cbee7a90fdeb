"""Parameters that a loss uses outside of their module's forward while they are released (stage 3).

A hand-written penalty, `loss + 1e-4 * sum(p.pow(2).sum() for p in self.parameters())`, reads NaN for what is released,
and plain NaN is all that would be seen of it. So the part of a loss's graph that lies outside of every unit's forward
is looked through before its backward: a few dozen nodes, since it ends at the units' outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero_strategy.sharding.gatherer import UNIT_OUTPUT
from zero_strategy.sharding.model import ShardedModel


def check_outside_uses(loss: Tensor, model: ShardedModel) -> None:
    """Raise if `loss` depends on a released parameter other than through its unit's forward.

    Raises:
        RuntimeError: Naming the parameters and the way out.
    """
    if model.gatherer is None or loss.grad_fn is None or len(model.units) == 1:
        return
    found = []
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen or UNIT_OUTPUT in node.metadata:
            continue
        seen.add(node)
        place = model.place(node.variable) if hasattr(node, "variable") else None
        if place is not None and not place[0].gathered:
            found.append(place[0].names[place[1]])
        waiting += [following for following, _ in node.next_functions if following is not None]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise RuntimeError(
            f"the loss uses parameter(s) {', '.join(map(repr, sorted(found)[:3]))}{more} outside of their module's "
            "forward, where stage 3 has released them: they read as NaN. Compute that part of the loss inside `with "
            "zero_strategy.sharding.GatheredParameters(parameters):` (they then stay whole until its backward is "
            "over), or use stage 2, where parameters are whole."
        )
