"""`deepspeed.checkpointing.checkpoint`: functions that are computed again in backward, under this process's options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_strategy.activation.process import PROCESS


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function now, and again in backward; see `Checkpointer.checkpoint`."""
    return PROCESS.checkpointer.checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same as `checkpoint`, which never is re-entrant here: frozen inputs, nesting and keywords are fine."""
    return PROCESS.checkpointer.checkpoint(function, *args, **kwargs)


class CheckpointFunction:
    """What old scripts call directly. No autograd function: hooks on saved tensors do the work.

    Random states, the tracker's included, are set for the recomputation and put back after it.
    """

    @staticmethod
    def apply(run_function: Callable[..., Any], *args: Any) -> Any:
        """`checkpoint(run_function, *args)`.

        Args:
            run_function: The function.
            *args: For it. An empty list before them is filled with the outputs, as scripts expect it that pass one.
        """
        outputs: list[Any] | None = None
        if args and isinstance(args[0], list) and not args[0]:
            outputs, args = args[0], args[1:]
        output = PROCESS.checkpointer.checkpoint(run_function, *args)
        if outputs is not None:
            outputs.extend(output if isinstance(output, tuple) else (output,))
        return output
