"""Lines that somebody has asked for, such as `see_memory_usage`: to the log, or to stderr where no log is set up.

Python drops what is logged at INFO until a handler is there, so a plain script would see nothing of what it asked for.
Where logging is configured, by anyone and in any way, it alone decides, and no line comes twice.
"""

from __future__ import annotations

import logging
import sys

_PACKAGE = __name__.partition(".")[0]


def report(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a line at INFO; with no logging configured for the logger, print it to stderr.

    Args:
        logger: Of the module that has something to say.
        message: With places for values, as `logging` has them.
        values: For the message.
    """
    if _configured(logger):
        logger.info(message, *values)
    elif logger.manager.disable < logging.INFO:
        print(f"{_PACKAGE}: {message % values if values else message}", file=sys.stderr, flush=True)


def _configured(logger: logging.Logger) -> bool:
    """Whether somebody has given the logger, or one that it hands lines to, a handler; or a package's one a level."""
    current: logging.Logger | None = logger
    while current is not None and current.parent is not None:  # the root's level is never unset
        if current.level != logging.NOTSET:
            return True
        current = current.parent
    return logger.hasHandlers()
