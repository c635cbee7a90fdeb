"""The part of `ZeroAccelerator` that saves and loads: checkpoints of this package with Accelerate's states in them."""

from __future__ import annotations

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.writer import unlisted
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations import accelerate_states
from zero_strategy.integrations.accelerate_step import SteppingAccelerator

_KEY = "accelerate"
"""Of the Accelerator's own entry in a checkpoint's user metadata."""


class SavingAccelerator(SteppingAccelerator):
    """`save_state` and `load_state` with one directory for all that was prepared or registered."""

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Save everything that was prepared or registered; all ranks call it.

        The directory is a checkpoint of this package: of one model itself, of several one each in `model_0`,
        `model_1`... It is written in the background where `checkpoint.asynchronous` says so and no hook waits for it.

        Returns:
            The directory.

        Raises:
            ValueError: If no model is prepared, or the directory holds what is not of the checkpoint it would replace.
        """
        engines = [self.engine(model) for model in self._models]
        if not engines:
            raise ValueError("save_state saves prepared models, and none is: call accelerator.prepare(model) first")
        directory, stale = self._next_directory(output_dir)
        self._check_replaceable(engines, directory)
        token = engines[0].mesh.world_group.control.all_gather_objects(uuid.uuid4().hex)[0]
        shared, own = accelerate_states.capture(self)
        hooks: list[Callable[..., None]] = list(self._save_model_state_pre_hook.values())
        saves = []
        for number, engine in enumerate(engines):
            saves.append(
                engine.save(
                    directory if len(engines) == 1 else directory / f"model_{number}",
                    user={_KEY: {"step": self.step, "models": len(engines), "save": token}},
                    extra_files=shared if number == 0 else {},
                    own_files=own if number == 0 else {},
                    update_latest=False,  # Accelerate takes whatever lies in its folder for a checkpoint
                    asynchronous=self.zero_config.checkpoint.asynchronous and not hooks,
                )
            )
        for old in stale if self.is_main_process else ():
            saves[-1].then(partial(_remove, old))  # not before there is another
        for hook in hooks:  # they may write into the directory, which was replaced as a whole
            hook(self._models, [], str(directory))
        self.project_configuration.iteration += 1
        return str(directory)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load what `save_state` saved at any number of processes and stage, or what Accelerate's own saved.

        All ranks call it.

        Raises:
            ValueError: If there is no checkpoint, or it does not fit what is prepared; names what differs.
        """
        for engine in self._engines.values():
            engine.saver.wait()
        directory = self._saved_directory(input_dir)
        for hook in self._load_model_state_pre_hook.values():
            hook(list(self._models), str(directory))
        engines = [self.engine(model) for model in self._models]
        saves: list[tuple[Any, Any]] = []
        for number, engine in enumerate(engines):
            reader = engine.load(directory if len(engines) == 1 else directory / f"model_{number}", **options)
            ours = reader.manifest.user.get(_KEY, {}) if reader.has_manifest else {}
            saves.append((ours.get("save"), ours.get("models", len(engines))))
            if len(set(saves)) > 1 or saves[0][1] != len(engines):
                raise ValueError(
                    f"{directory} holds models of several saves, or {saves[-1][1]} models where {len(engines)} are "
                    "prepared: a save was interrupted between two models, or others were prepared; take an earlier one"
                )
            if number == 0 and ours:
                accelerate_states.restore(self, reader, load_kwargs)
                self.step = reader.manifest.user[_KEY]["step"]
                engine.load_random_state(reader)  # once more: restoring may have drawn
            elif number == 0:
                accelerate_states.restore_plain(self, directory, load_kwargs)

    def _check_replaceable(self, engines: list[ZeroEngine], directory: Path) -> None:
        """A save replaces its directory as a whole, with all that somebody else has put there."""
        places = [directory] if len(engines) == 1 else [directory / f"model_{n}" for n in range(len(engines))]
        foreign = [str(path) for place in places for path in unlisted(place)]
        if self._save_model_state_pre_hook:  # which write there
            foreign = [path for path in foreign if (Path(path) / MANIFEST_NAME).is_file()]
        found = engines[0].mesh.world_group.control.all_gather_objects(foreign)
        if any(found):
            raise ValueError(
                f"{directory} holds {sorted({path for paths in found for path in paths})[:5]}, which are not of the "
                "checkpoint there and would be removed with it; save to another directory"
            )

    def _next_directory(self, output_dir: str | os.PathLike[str] | None) -> tuple[Path, list[Path]]:
        """Where to save, and which checkpoints are too many then."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return Path(output_dir).expanduser(), []
        self.wait_for_saves()  # one that is on its way counts
        folder = Path(self.project_dir) / "checkpoints"
        directory = folder / f"checkpoint_{self.save_iteration}"
        if directory.exists():
            raise ValueError(
                f"{directory} exists already; set accelerator.project_configuration.iteration to where to go on"
            )
        self.wait_for_everyone()  # all have looked
        found = _numbered(folder)
        many = 0 if project.total_limit is None else max(0, len(found) + 1 - project.total_limit)
        return directory, found[:many]

    def _saved_directory(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            directory = Path(input_dir).expanduser()
            if not directory.is_dir():
                raise ValueError(f"{directory}: there is no such checkpoint directory")
            return directory
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        folder = Path(self.project_dir) / "checkpoints"
        found = _numbered(folder)
        if not found:
            raise ValueError(f"{folder}: there is no checkpoint")
        return found[-1]

    def wait_for_saves(self) -> None:
        """Return when the checkpoints that are being written are there.

        Raises:
            OSError, ValueError, RuntimeError: Why one is not.
        """
        for engine in self._engines.values():
            engine.saver.finish()

    def end_training(self) -> None:
        """Finish saves and trackers; all ranks leave together.

        Where Accelerate ends the process group now, engines end before it. Elsewhere (one process, or one of a
        notebook's) models can be used as before.
        """
        self.wait_for_saves()
        self.wait_for_everyone()
        if self.num_processes > 1 and not self.state.fork_launched:
            for engine in self._engines.values():
                engine.close()
        super().end_training()


def _remove(directory: Path) -> None:
    """A checkpoint too many is no reason to fail, and none to be silent."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        warnings.warn(f"{directory}: an old checkpoint could not be removed: {error}", stacklevel=2)


def _numbered(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint_\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))
