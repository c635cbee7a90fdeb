"""A progress bar that knows how long a run is that counts optimizer steps."""

from lightning.pytorch.callbacks import TQDMProgressBar


class StepsProgressBar(TQDMProgressBar):
    """Lightning's bar takes ``max_steps`` for micro-batches; with accumulation it ends too early."""

    @property
    def total_train_batches(self) -> int | float:
        """The micro-batches of this run, or of its epoch if that is shorter."""
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        remaining = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, remaining)
