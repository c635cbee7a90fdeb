"""How the Trainer's strategy saves and loads.

By default a checkpoint is a directory that all ranks write at once (see `zero_strategy.checkpoint`). It is one whole
file in Lightning's own format, gathered on rank 0 and written by a `CheckpointIO`, where

- the user passed a `CheckpointIO` plugin, whose business files are; or
- a user's hook changed the weights or the optimizer state in the checkpoint dict: what it made is what is saved.

Both kinds load at any stage and world size, and so do checkpoints of plain DDP.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.checkpoint_dict import (
    LIGHTNING_FILE,
    StoredWeights,
    check_local,
    describe,
    is_directory_checkpoint,
    pack,
    read_checkpoint,
)
from zero_strategy.integrations.on_demand import StateOnDemand, untouched, whole

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class TrainerCheckpoints(_Base):
    """The saving and loading half of `TrainerStrategy`."""

    engine: ZeroEngine | None
    load_weights_only: bool | None
    _whole_files: bool

    def _alone(self) -> bool:
        raise NotImplementedError

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read into shards, and shards exist after `setup`."""
        return True

    @property
    def checkpoint_io(self) -> Any:
        """Reads and writes checkpoints that are one file, and removes checkpoints of either kind."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io, self._whole_files = io, io is not None

    # ---- saving ----

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict, made when it is looked into; all ranks must then look."""
        module, engine = self.lightning_module, self.engine
        assert module is not None
        if engine is None or engine.module is not module:
            state: dict[str, Any] = module.state_dict()
            return state
        return StateOnDemand(engine.full_state_dict)  # type: ignore[return-value]

    def _optimizer_state(self, optimizer: Optimizer) -> Any:
        engine = self.engine
        if engine is None or not any(sharded.optimizer is optimizer for sharded in engine.optimizers):
            return optimizer.state_dict()
        return StateOnDemand(lambda: engine.optimizer_state_dict(optimizer), nested=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save; all ranks call it.

        Raises:
            ValueError: For a remote path, or for `storage_options` without a `CheckpointIO` to use them.
        """
        if self._alone():
            _warn(f"no checkpoint was saved to {filepath}: this rank failed, but not all ranks did")
            return
        if self.engine is not None:  # names the ranks that do not come, where a broadcast would wait for them
            self.engine.mesh.rendezvous.meet("Trainer.save_checkpoint()")
        path = str(self.broadcast(os.fspath(filepath)))
        rest = dict(checkpoint)
        weights, states = rest.pop("state_dict"), rest.pop("optimizer_states", None)
        engine_writes = self.engine is not None and untouched(weights) and all(map(untouched, states or []))
        if self._whole_files or not engine_writes:
            if not self._whole_files:
                _warn(
                    f"{path}: a hook changed the weights or the optimizer state to be saved, so they are gathered on "
                    "rank 0 and saved as one whole file"
                )
            super().save_checkpoint(whole(checkpoint), path, storage_options)
            return
        check_local(path, storage_options)
        assert self.engine is not None
        self.engine.save_checkpoint(
            path,
            user=describe(rest),
            extra_files={LIGHTNING_FILE: pack(rest, self.engine.module)} if self.is_global_zero else {},
            optimizers=states is not None,
            update_latest=False,  # ModelCheckpoint has its own `last`
        )

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint of either kind."""
        super().remove_checkpoint(filepath)

    # ---- loading ----

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint dict; weights and optimizer states of a directory are read later, in parts."""
        if weights_only is None:
            weights_only = self.load_weights_only
        if is_directory_checkpoint(checkpoint_path):
            return read_checkpoint(checkpoint_path, weights_only, verify=self.config.checkpoint.verify)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the live shards."""
        weights = checkpoint["state_dict"]
        if untouched(weights) and isinstance(weights.source, StoredWeights) and self.engine is not None:
            weights.source.load_into(self.engine, strict)
            return
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(whole(weights), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states into the live shards."""
        states, engine = checkpoint["optimizer_states"], self.engine
        assert engine is not None
        readers = [getattr(state, "source", None) for state in states]
        if readers and isinstance(readers[0], CheckpointReader):
            engine.load_optimizers(readers[0])
            weights = checkpoint.get("state_dict")
            if not untouched(weights):  # master weights came along: those of the user's hook are the ones to keep
                self.load_model_state_dict(checkpoint)
        for optimizer, state in zip(self.optimizers, states, strict=False):
            if not untouched(state) and any(sharded.optimizer is optimizer for sharded in engine.optimizers):
                engine.load_optimizer_state_dict(optimizer, whole(state))


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
