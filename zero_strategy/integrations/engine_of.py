"""One spelling of "the engine of this": a module, a Trainer of Lightning or transformers, an Accelerator, a Fabric."""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.takeover import engines_over


def engine_of(what: Any) -> ZeroEngine:
    """The living engine of a module, of a Trainer (Lightning's, transformers'), an Accelerator, a Fabric, a strategy.

        zero_strategy.engine_of(trainer).save("/shared/run")

    Where there are several engines (an Accelerator or a Fabric that has prepared several models), give the model.

    Args:
        what: A prepared module, with or without a framework's wrapper, or part of one; or what prepared it.

    Raises:
        ValueError: If there is none (yet), or there are several; says what to give or to call.
    """
    found = _engines(what)
    kind = type(what).__name__
    if not found:
        raise ValueError(
            f"{kind} has no engine: a module gets one by accelerator.prepare, fabric.setup, trainer.fit or "
            "trainer.train, and loses it by close(gather=True)"
        )
    if len(found) > 1:
        names = ", ".join(type(engine.module).__name__ for engine in found)
        raise ValueError(f"{kind} has {len(found)} engines, of {names}: give the model to engine_of instead")
    return found[0]


def _engines(what: Any) -> list[ZeroEngine]:
    """Engines by the first of the places where the frameworks' objects have them."""
    if isinstance(what, ZeroEngine):
        return [] if what.ended else [what]
    if isinstance(what, nn.Module):
        return engines_over(what)
    for name in ("zero_engine", "engine"):  # of a transformers Trainer; of a strategy, or a script's engine
        if isinstance(found := getattr(what, name, None), ZeroEngine):
            return [] if found.ended else [found]
    several = getattr(what, "engines", None)  # of an Accelerator; of Fabric's strategy
    if several is not None:
        engines = several.values() if hasattr(several, "values") else several
        return [engine for engine in engines if isinstance(engine, ZeroEngine) and not engine.ended]
    strategy = getattr(what, "strategy", None)  # of Lightning's Trainer and Fabric
    return [] if strategy is None else _engines(strategy)
