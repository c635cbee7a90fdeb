"""Log lines that would otherwise come once per rank: from one rank, or once per pipeline stage."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from zero_strategy.distributed.group_ranks import get_pg_rank
from zero_strategy.distributed.world import world_rank, world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """`logger.log(*args, **kwargs)` on one rank; without a process group on this one, whichever it is.

    Args:
        logger: Whose.
        args: The level, the message, and what is put into it.
        rank: The global rank that writes.
        kwargs: Of `Logger.log`.
    """
    if _listens(logger, args) and (not _distributed() or world_rank() == rank):
        logger.log(*args, **kwargs)


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    *args: Any,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> None:
    """`logger.log(*args, **kwargs)` on the ranks that are first in both groups: one per pipeline stage.

    Args:
        logger: Whose.
        args: The level, the message, and what is put into it.
        tp_group: Tensor-parallel ranks of this one; None: none but itself.
        dp_cp_group: Data- and context-parallel ranks of this one; None: none but itself.
        kwargs: Of `Logger.log`.
    """
    if _listens(logger, args) and get_pg_rank(tp_group) == 0 and get_pg_rank(dp_cp_group) == 0:
        logger.log(*args, **kwargs)


def _listens(logger: logging.Logger, arguments: tuple[Any, ...]) -> bool:
    """Whether the level is wanted; asked first, as it costs least. What is no level the logger refuses itself."""
    return not arguments or not isinstance(arguments[0], int) or logger.isEnabledFor(arguments[0])


def _distributed() -> bool:
    from zero_strategy.distributed.groups import has_process_group

    return has_process_group() and world_size() > 1
