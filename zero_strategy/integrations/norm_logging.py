"""A callback of the Trainer that logs norms of every parameter's gradient and update."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zero_strategy.diagnostics.norms import NormLog, NormSettings
from zero_strategy.engine import ZeroEngine

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class NormLogging(_Base):
    """Logs `zero/gradient_norm/PARAMETER` and `zero/update_norm/PARAMETER` to the Trainer's loggers.

    Gradients are those of a step, of all micro-batches and ranks, unscaled, before clipping.

    Args:
        every_n_steps: Optimizer steps from one that is measured to the next; default: the Trainer's
            `log_every_n_steps`.
        gradients: Log the norms of gradients: a pass over them.
        updates: Log by how much each parameter moves: a copy of what each rank owns, and a pass over it.

    Raises:
        ValueError: If there is nothing to log, or the number of steps is less than 1.
    """

    def __init__(self, every_n_steps: int | None = None, *, gradients: bool = True, updates: bool = False) -> None:
        super().__init__()
        self._every, self._settings = every_n_steps, NormSettings(
            1 if every_n_steps is None else every_n_steps, gradients, updates
        )
        self._log: NormLog | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin.

        Raises:
            ValueError: If the Trainer's strategy is none of these.
        """
        engine = getattr(trainer.strategy, "engine", None)
        if not isinstance(engine, ZeroEngine):
            raise ValueError(
                f"{type(self).__name__} reads sharded gradients, and the strategy is "
                f'{type(trainer.strategy).__name__}: take Trainer(strategy="zero3"), or '
                "lightning.pytorch.utilities.grad_norm for gradients of plain torch"
            )
        every = max(1, trainer.log_every_n_steps) if self._every is None else self._every
        self._log = NormLog(engine, replace(self._settings, every_n_steps=every))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure, if it is the step's turn."""
        assert self._log is not None
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._log.before_step(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what was measured."""
        assert self._log is not None
        if found := self._log.after_step():
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(found, step=self._step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let go of the engine."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Likewise."""
        self._end()

    def _end(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
