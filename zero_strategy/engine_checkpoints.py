"""What an engine does with checkpoints; all ranks of its team take part.

The work is in `saving/` and `loading.py`; these are the engine's methods for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from zero_strategy import loading
from zero_strategy.checkpoint import StateReader
from zero_strategy.checkpoint.open_any import open_any
from zero_strategy.config import ResolvedConfig
from zero_strategy.distributed import Mesh
from zero_strategy.optim import ShardedOptimizer
from zero_strategy.saving import PendingSave, Saver, pretrained, random_state, tagged
from zero_strategy.saving.preemption import save_on_signal
from zero_strategy.saving.step_watch import StepWatch

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


class EngineCheckpoints:
    """The part of `ZeroEngine` that saves and loads."""

    config: ResolvedConfig
    mesh: Mesh
    saver: Saver
    steps: StepWatch
    optimizers: list[ShardedOptimizer]

    @property
    def _engine(self) -> ZeroEngine:
        return cast("ZeroEngine", self)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        user: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        own_files: Mapping[str, bytes] | None = None,
        optimizers: bool = True,
        update_latest: bool = True,
        asynchronous: bool = False,
        weights_dtype: torch.dtype | None = None,
        frozen: Literal["store", "reference"] | None = None,
    ) -> PendingSave:
        """Write a checkpoint directory; all ranks call it, each writes its own part in place.

        Args:
            directory: The checkpoint; replaced atomically if it exists. `latest` beside it names it afterwards.
            user: JSON-able values for the manifest.
            extra_files: Further small files, {relative path: bytes}; rank 0's are written.
            own_files: Small files of this rank alone, under paths that no other rank uses.
            optimizers: Write optimizer state and master weights too.
            update_latest: Let `latest` beside the directory name it.
            asynchronous: Return as soon as this rank's bytes are copied; they are written in the background.
            weights_dtype: Save floating-point weights in this dtype; only without optimizers.
            frozen: In place of the config's `checkpoint.frozen`.

        Returns:
            The save; its `wait()` returns when the checkpoint is there.

        Raises:
            RendezvousError: If a rank does not call it in time, or with another directory.
            OSError, ValueError: On all ranks if one fails; an earlier checkpoint stays as it was. Of a save in the
                background: at the next optimizer step, the next save, `wait()`, or at exit.
        """
        with self.mesh.observed.span("save", os.fspath(directory)):
            return self.saver.save(
                directory,
                user=user or {},
                extra_files=extra_files or {},
                own_files=own_files or {},
                counters=self.steps.counters(),
                optimizers=optimizers,
                update_latest=update_latest,
                asynchronous=asynchronous,
                weights_dtype=weights_dtype,
                frozen=frozen,
            )

    def save_pretrained(self, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Write weights and config for Hugging Face's `from_pretrained`; see `saving.pretrained.save_pretrained`."""
        pretrained.save_pretrained(self._engine, directory, dtype=dtype)

    def load(
        self, directory: str | os.PathLike[str], *, strict: bool = True, optimizers: bool = True
    ) -> StateReader:
        """Load a checkpoint written at any world size and stage; all ranks call it.

        Args:
            directory: The checkpoint, or the folder with `latest`.
            strict: Missing and unexpected names are errors.
            optimizers: Resume: load optimizer state, master weights, counters and the random state too.

        Returns:
            The reader, for the manifest and extra files.

        Raises:
            ValueError: Listing every tensor that does not fit.
        """
        reader = self.load_weights(directory, strict=strict)
        if optimizers and self.optimizers and reader.has_manifest:
            self._load_optimizers(reader)
            self.steps.load_counters(reader.manifest.counters)
            self.load_random_state(reader)
        return reader

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *,
        lr_scheduler: Any = None,
        asynchronous: bool = False,
        frozen: Literal["store", "reference"] | None = None,
    ) -> PendingSave:
        """Write the checkpoint `save_dir/tag`; see `saving.tagged.save_checkpoint`."""
        return tagged.save_checkpoint(
            self._engine,
            save_dir,
            tag,
            client_state or {},
            save_latest,
            lr_scheduler=lr_scheduler,
            asynchronous=asynchronous,
            frozen=frozen,
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        *,
        lr_scheduler: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load `load_dir/tag`; returns its path and the client state; see `saving.tagged.load_checkpoint`."""
        return tagged.load_checkpoint(
            self._engine,
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            lr_scheduler=lr_scheduler,
        )

    def load_random_state(self, reader: StateReader) -> None:
        """Give this rank its random state back, where the config says so; see `saving.random_state`."""
        if self.config.config.checkpoint.random_state:
            random_state.load(reader, self.mesh.team.rank, self.mesh.team.world_size)

    def load_weights(
        self, source: str | os.PathLike[str] | StateReader, *, strict: bool = True
    ) -> StateReader:
        """Load weights and buffers only, each rank reading its own slices; also from a Hugging Face directory."""
        self.saver.wait()
        reader = self._reader(source)
        with self.mesh.observed.span("load"):
            loading.load_weights(self._engine, reader, strict=strict)
        return reader

    def _reader(self, source: str | os.PathLike[str] | StateReader) -> StateReader:
        if isinstance(source, StateReader):
            return source
        self.mesh.team.rendezvous.meet("loading a checkpoint")
        verify = self.config.config.checkpoint.verify
        return loading.open_together(self._engine, lambda: open_any(source, verify=verify))

    def load_optimizers(self, source: str | os.PathLike[str] | StateReader) -> None:
        """Load optimizer state, master weights and the loss scale only."""
        self._load_optimizers(self._reader(source))

    def _load_optimizers(self, reader: StateReader) -> None:
        with self.mesh.observed.span("load"):
            loading.load_optimizers(self._engine, reader)

    def save_on_signal(
        self, directory: str | os.PathLike[str], **options: Any
    ) -> AbstractContextManager[Callable[[], None]]:
        """In the block a signal to any rank lets all ranks save; see `saving.preemption.save_on_signal`."""
        return save_on_signal(self._engine, directory, **options)
