"""Messages of an engine, step by step and summed up, from its counters: `comms_logger` of a DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine

_logs: WeakSet[MessageLog] = WeakSet()
"""The one table of the process: `deepspeed.comm.log_summary()` names no engine."""


class MessageLog:
    """Of one engine and rank.

    Args:
        engine: The engine.
        kinds: Such as "all_gather"; None: all.
        verbose: Print a line after each step, on rank 0.
    """

    def __init__(self, engine: ZeroEngine, kinds: Collection[str] | None, *, verbose: bool) -> None:
        self._counters, self._rank = engine.counters, engine.mesh.team.rank
        self._kinds, self._verbose = kinds, verbose
        self._before: dict[str, tuple[int, int]] = {}
        _logs.add(self)

    def step_over(self, step: int) -> None:
        """Print what was sent since the last step, if that is asked for."""
        if not self._verbose:
            return
        now = self._sent()
        if self._rank == 0:
            parts = []
            for kind, (calls, nbytes) in now.items():
                calls_before, bytes_before = self._before.get(kind, (0, 0))
                if calls > calls_before:
                    parts.append(f"{kind} {calls - calls_before} x, {_size(nbytes - bytes_before)}")
            print(f"comms_logger: step {step}: {'; '.join(parts) or 'nothing sent'}", flush=True)
        self._before = now

    def summary(self) -> str:
        """A table of all kinds: messages, bytes that this rank sent, bytes of a message."""
        rows = [("message", "calls", "sent", "per call")]
        for kind, (calls, nbytes) in sorted(self._sent().items()):
            rows.append((kind, str(calls), _size(nbytes), _size(nbytes / calls) if calls else "-"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"comms_logger: sent by rank {self._rank}", *lines])

    def _sent(self) -> dict[str, tuple[int, int]]:
        counters = self._counters
        return {
            kind: (calls, counters.bytes[kind])
            for kind, calls in counters.calls.items()
            if self._kinds is None or kind in self._kinds
        }


def log_summary(show_straggler: bool = False) -> None:
    """Print on rank 0 what the engines with `comms_logger` have sent.

    Args:
        show_straggler: False: counters know no times; `zero-strategy report` of a `diagnostics.run_dir` compares ranks.

    Raises:
        ValueError: If it is True.
    """
    if show_straggler:
        raise ValueError(
            "log_summary(show_straggler=True) is not done here: set diagnostics.run_dir and read zero-strategy report"
        )
    for log in list(_logs):
        if log._rank == 0:
            print(log.summary(), flush=True)


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
