"""Building a LightningModule from a checkpoint directory, without a Trainer and without sharding."""

from __future__ import annotations

import os
import tempfile
from typing import IO, Any, TypeVar

import torch

from zero_strategy.integrations.checkpoint_dict import is_directory_checkpoint, read_checkpoint
from zero_strategy.integrations.on_demand import whole

T = TypeVar("T")


def load_from_checkpoint(
    cls: type[T], path: str | os.PathLike[str], *, weights_only: bool | None = None, **kwargs: Any
) -> T:
    """`cls.load_from_checkpoint(path, **kwargs)` for a checkpoint directory, or for an ordinary checkpoint file.

    Args:
        cls: A LightningModule or LightningDataModule class.
        path: The checkpoint.
        weights_only: False allows checkpoints whose hyper-parameters or callback states are arbitrary pickled objects.
        **kwargs: What the class's own `load_from_checkpoint` takes: `map_location`, `strict`, hyper-parameters, ...

    Returns:
        The module, not sharded, in eval or train mode as Lightning leaves it.

    Example:
        >>> model = zero_strategy.load_from_checkpoint(GPTModule, "checkpoints/last.ckpt")
    """
    load: Any = cls.load_from_checkpoint  # type: ignore[attr-defined]
    if not is_directory_checkpoint(path):
        return load(path, weights_only=weights_only, **kwargs)  # type: ignore[no-any-return]
    with open_checkpoint(path, weights_only=weights_only) as file:
        return load(file, weights_only=weights_only, **kwargs)  # type: ignore[no-any-return]


def open_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, optimizers: bool = False
) -> IO[bytes]:
    """A checkpoint directory as one open file, such as `torch.load` and `load_from_checkpoint` take.

    The file is a temporary one without a name: it takes as much disk as the model, and goes when it is closed.

    Args:
        path: The checkpoint directory.
        weights_only: See `load_from_checkpoint`.
        optimizers: Include the optimizers' states.

    Example:
        >>> with zero_strategy.open_checkpoint("last.ckpt") as file:
        ...     model = GPTModule.load_from_checkpoint(file)
    """
    checkpoint = read_checkpoint(path, weights_only)
    if not optimizers:
        checkpoint.pop("optimizer_states", None)
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    torch.save(whole(checkpoint), file)
    file.seek(0)
    return file
