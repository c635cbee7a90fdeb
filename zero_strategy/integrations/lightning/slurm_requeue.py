"""SLURM's requeueing of a Trainer's job at a signal: saved as Lightning does it, but at the end of a batch.

Lightning's own handler saves where the signal finds each rank, which may be between two collectives of a step that
other ranks have behind them: they would wait for each other without end. Here all ranks save after the same step; the
checkpoint is in the Trainer's `default_root_dir`, under the name that Lightning resumes from by itself.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_strategy.checkpoint.preemption import SignalWatch
from zero_strategy.checkpoint.storage import is_remote
from zero_strategy.comm.store import together

_CHECKPOINT = re.compile(r"hpc_ckpt_(\d+)\.ckpt")
_UNNAMED = "requeued.ckpt"
"""Name of the checkpoint until it is complete.

Lightning takes the digits of any name with "hpc_ckpt_" in it for a number, and so those of a killed save's directory.
"""


@dataclass
class SlurmRequeue:
    """Requeueing in the fits of a strategy.

    Attributes:
        number: Of the signal at which SLURM's job is saved and put back into the queue.
        strategy: The Trainer's.
    """

    number: int
    strategy: Any

    @classmethod
    def asked_by(cls, strategy: Any, originals: Mapping[int, Any]) -> SlurmRequeue | None:
        """Requeueing if Lightning would do it; None, too, if all signals are left to Lightning.

        Args:
            strategy: The Trainer's.
            originals: Handlers that were there before Lightning's, which sets none over one of the user's.
        """
        environment = strategy.cluster_environment
        if type(environment).__name__ != "SLURMEnvironment" or not environment.auto_requeue:
            return None
        number = int(environment.requeue_signal)
        taken = originals.get(environment.requeue_signal) not in (None, signal.SIG_DFL)
        return None if taken or not strategy.config.checkpoint.preemption_signals else cls(number, strategy)

    def is_due(self, watch: SignalWatch | None) -> bool:
        """True if some rank has got the signal. A collective."""
        asked = watch is not None and self.number in watch.seen
        if watch is not None:
            watch.seen.discard(self.number)
        return any(self.strategy.engine.mesh.world_group.control.all_gather_objects(asked))

    def save_and_requeue(self, trainer: Any) -> None:
        """Save, and let rank 0 put the job back. All ranks call it between two steps."""
        for logger in trainer.loggers:
            logger.finalize("finished")
        path = self._save(trainer, os.fspath(trainer.default_root_dir))
        if trainer.is_global_zero:
            _requeue(logging.getLogger(type(trainer).__module__.partition(".trainer")[0]), path)

    def _save(self, trainer: Any, root: str) -> str:
        engine = self.strategy.engine
        # A `CheckpointIO` of the user's may make no file of the name that it is given; an object store renames nothing.
        staged = not is_remote(root) and not self.strategy._whole_files
        path = os.path.join(root, _UNNAMED) if staged else trainer._checkpoint_connector.hpc_save_path(root)
        trainer.save_checkpoint(path)
        # SLURM ends the processes soon after the job is put back.
        self.strategy.finish_saves()
        if not staged:
            return str(path)
        named = os.path.join(root, f"hpc_ckpt_{1 + self.strategy.broadcast(_newest(root))}.ckpt")
        # One rank, or one of each host that has a folder of its own.
        names = engine.saver.places.removes(path, engine.mesh.world_group.rank)
        together(engine.mesh.world_group.control, lambda: os.rename(path, named) if names else None)
        return named


def _newest(folder: str) -> int:
    """Number of the newest such checkpoint, 0 without any."""
    numbers = (_CHECKPOINT.fullmatch(name) for name in os.listdir(folder))
    return max((int(found[1]) for found in numbers if found), default=0)


def _requeue(logger: logging.Logger, path: str) -> None:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        why = (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
    except OSError as error:  # in a container
        why = str(error)
    if why:
        logger.warning(f"Saved {path}, but SLURM's job {job} was not put back into the queue: {why}")
    else:
        logger.warning(f"Saved {path} and put SLURM's job {job} back into the queue; fit(ckpt_path=None) resumes it")
