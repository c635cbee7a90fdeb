"""Callbacks of Lightning that a strategy must know: those that cannot work on shards, and those that unfreeze."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero_strategy.runtime.torch_private import AnyBatchNorm

_NAMESPACES = ("lightning.", "pytorch_lightning.")

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
            if cls.__name__ in _REFUSED and cls.__module__.startswith(_NAMESPACES):
                raise ValueError(
                    f"callback {type(callback).__name__} does not work at ZeRO stage {stage}: "
                    f"{_REFUSED[cls.__name__]}. Remove it and average saved checkpoints after "
                    "training, or use ZeroStrategy(stage=0) or strategy='ddp', "
                    "where every rank keeps the whole model."
                )


def restore_param_groups(trainer: Any, module: Any) -> None:
    """Let finetuning callbacks whose state was restored make their param groups again, and train what they trained.

    Lightning's `BaseFinetuning` does the first in `on_fit_start`, which comes before states of callbacks where a
    checkpoint is restored after `setup`. It freezes all anew in a run that resumes and leaves the second out, so that
    a backbone that had been unfrozen would stay as it is from there on.
    """
    for callback in trainer.callbacks:
        base: Any = next((cls for cls in type(callback).__mro__ if _is_finetuning(cls)), None)
        if base is None or not callback._restarting:
            continue
        known = _held(trainer)
        base.on_fit_start(callback, trainer, module)  # of the base alone: a subclass's own has run
        added = _held(trainer) - known
        for child in module.modules():
            own = [parameter for parameter in child.parameters(recurse=False) if id(parameter) in added]
            for parameter in own:
                parameter.requires_grad_(True)
            if own and isinstance(child, AnyBatchNorm):
                child.track_running_stats = True


def _is_finetuning(cls: type) -> bool:
    return cls.__name__ == "BaseFinetuning" and cls.__module__.startswith(_NAMESPACES)


def _held(trainer: Any) -> set[int]:
    return {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
