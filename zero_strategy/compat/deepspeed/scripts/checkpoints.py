"""Checkpoints of a script's engine: with its counters, its scheduler and what the script saves besides."""

from __future__ import annotations

import os
import uuid
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zero_strategy.checkpoint.agreement import catalog_of
from zero_strategy.checkpoint.disk import beside, remove, sync
from zero_strategy.comm.barrier import together
from zero_strategy.compat.deepspeed.scripts.data import SchedulerOwner
from zero_strategy.compat.deepspeed.scripts.settings import ScriptSettings
from zero_strategy.engine import ZeroEngine

COUNTERS_KEY = "zero_strategy.script"
"""The key of the engine's counters in a checkpoint's client state."""
_COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class ScriptCheckpoints:
    """The part of `ScriptEngine` that saves and loads."""

    zero: ZeroEngine
    settings: ScriptSettings
    lr_scheduler: Any
    micro_steps: int
    global_steps: int
    _scheduled: SchedulerOwner

    @abstractmethod
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the checkpoint `save_dir/tag` (default tag: `global_step{n}`); all ranks call it.

        The scheduler's state and the counters go with it; see `ZeroEngine.save_checkpoint`. Frozen parameters that are
        excluded are named with a digest, and must be in the model that loads it (`checkpoint.frozen: reference`).

        Returns:
            True, when it is there.
        """
        counters = {name: getattr(self, name) for name in _COUNTERS}
        state = {**(client_state or {}), COUNTERS_KEY: counters}
        tag = f"global_step{self.global_steps}" if tag is None else tag
        frozen: Literal["reference"] | None = "reference" if exclude_frozen_parameters else None
        self.zero.save_checkpoint(
            save_dir, tag, state, save_latest, lr_scheduler=self.lr_scheduler, frozen=frozen
        ).wait()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load `load_dir/tag`, or what `latest` names; all ranks call it; see `ZeroEngine.load_checkpoint`.

        Returns:
            (path, client state); (None, {}) with a warning where there is none.
        """
        path, state = self.zero.load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            lr_scheduler=self.lr_scheduler,
        )
        counters = state.pop(COUNTERS_KEY, None)
        self._scheduled.forget()
        if path is not None and load_optimizer_states:
            self._take_counters(counters)
        return path, state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the module's whole state dict, in the dtype that it computes in, as a file of torch; all ranks call it.

        Args:
            save_dir: A folder, which is made where it does not exist.
            save_filename: Of the file.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True, when it is there.

        Raises:
            OSError: If rank 0 cannot write it; on all ranks.
        """
        state = self.zero.full_state_dict()
        dtype = self.settings.compute_dtype
        frozen = catalog_of(self.zero).frozen if exclude_frozen_parameters else frozenset[str]()
        kept = {
            name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
            for name, value in state.items()
            if name not in frozen
        }
        world_group, place = self.zero.mesh.world_group, Path(save_dir, save_filename)
        together(world_group.control, lambda: _write_torch_file(kept, place) if world_group.rank == 0 else None)
        return True

    save_fp16_model = save_16bit_model

    def _take_counters(self, counters: Mapping[str, int] | None) -> None:
        if counters is None:  # of DeepSpeed, or of a `ZeroEngine` in a loop
            steps = self.zero.steps
            counters = {
                "global_steps": steps.taken,
                "skipped_steps": steps.skipped,
                "global_samples": steps.taken * (self.settings.batch.train_batch_size or 0),
                "micro_steps": steps.taken * self.gradient_accumulation_steps(),
            }
        for name in _COUNTERS:
            setattr(self, name, int(counters[name]))
        # A checkpoint holds no partial gradients, and the number of micro-batches per step may be another one now.
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()


def _write_torch_file(tensors: Mapping[str, Tensor], place: Path) -> None:
    """The file appears whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(place, uuid.uuid4().hex[:12], "tmp")
    try:
        torch.save(dict(tensors), temporary)
        sync(temporary)
        os.replace(temporary, place)
    finally:
        remove(temporary)
