"""Callbacks of Lightning that cannot work on sharded parameters are refused before they do anything."""

from __future__ import annotations

from collections.abc import Iterable

_REFUSED = {
    "StochasticWeightAveraging": "it averages module parameters in place, behind the optimizer's shards",
    "WeightAveraging": "it copies the whole module before it is sharded, and swaps parameters in place",
}


def refuse_averaging(callbacks: Iterable[object], stage: int) -> None:
    """Raise if a callback copies or swaps whole parameters, which stages 1 to 3 do not keep.

    Raises:
        ValueError: Naming the callback, the stage and the way out.
    """
    if stage == 0:
        return
    for callback in callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _REFUSED and cls.__module__.startswith(("lightning.", "pytorch_lightning.")):
                raise ValueError(
                    f"callback {type(callback).__name__} does not work at ZeRO stage {stage}: "
                    f"{_REFUSED[cls.__name__]}. Remove it and average saved checkpoints after "
                    "training, or use ZeroStrategy(stage=0) or strategy='ddp', "
                    "where every rank keeps the whole model."
                )
