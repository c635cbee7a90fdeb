"""Begins what an engine's settings ask to be recorded.

The engine knows nothing of diagnostics. The integrations and `initialize` call this; so does a loop of one's own:

    engine = ZeroEngine(module, {"stage": 3, "diagnostics": {"run_dir": "runs/today"}})
    install_diagnostics(engine)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_strategy.engine import ZeroEngine

if TYPE_CHECKING:
    from zero_strategy.diagnostics.monitor import Monitor
    from zero_strategy.diagnostics.recorder import StepRecorder


@dataclass(frozen=True)
class Installed:
    """What observes an engine.

    Attributes:
        recorder: Of where time and memory of each step go (`diagnostics.run_dir`), or None.
        monitor: Writes what a DeepSpeed JSON asks to be written (tensorboard, ...), or None.
    """

    recorder: StepRecorder | None = None
    monitor: Monitor | None = None


def install_diagnostics(engine: ZeroEngine) -> Installed:
    """Begin what an engine's settings ask to be recorded; nothing is loaded where they ask for nothing.

    Raises:
        ValueError: If somebody observes the engine already, or a section cannot be carried out for such an engine.
        OSError: If a directory cannot be written to.
    """
    settings = engine.config.config
    recorder: StepRecorder | None = None
    monitor: Monitor | None = None
    if settings.diagnostics.run_dir:
        from zero_strategy.diagnostics.recorder import record

        recorder = record(engine)
    if settings.deepspeed is not None and settings.deepspeed.observers:
        from zero_strategy.diagnostics.monitor import Monitor

        monitor = Monitor(engine, settings.deepspeed)
    engine.note_diagnostics(*([] if monitor is None else [monitor.close]))
    return Installed(recorder, monitor)
