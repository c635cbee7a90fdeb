"""Building a LightningModule from a checkpoint directory, without a Trainer and without sharding."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch

from zero_strategy.integrations.checkpoint_dict import is_directory_checkpoint, read_checkpoint, whole

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object

T = TypeVar("T")


class _OfClasses(classmethod):  # type: ignore[type-arg]
    """A classmethod that instances have, too, and that fails when it is called on one, as Lightning's own does."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        method = super().__get__(instance, owner)
        if instance is None:
            return method

        @functools.wraps(method)
        def refuse(*arguments: Any, **keywords: Any) -> Any:
            name = f"{type(instance).__name__}.{method.__name__}"
            raise TypeError(f"{name}() makes a new object: call it on the class, not on an instance")

        return refuse


class LoadsFromDirectory(_Base):
    """A base class that lets `MyModule.load_from_checkpoint(path)` take a checkpoint directory as well as a file.

    Example:
        >>> class MyModule(zero_strategy.LoadsFromDirectory, LightningModule): ...
        >>> model = MyModule.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    """

    @_OfClasses  # type: ignore[arg-type]
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *arguments: Any, weights_only: bool | None = None, **keywords: Any
    ) -> Any:
        """As Lightning's; see `zero_strategy.load_from_checkpoint`."""
        load = functools.partial(super().load_from_checkpoint, weights_only=weights_only)
        if not isinstance(checkpoint_path, (str, os.PathLike)) or not is_directory_checkpoint(checkpoint_path):
            return load(checkpoint_path, *arguments, **keywords)
        with open_checkpoint(checkpoint_path, weights_only=weights_only) as file:
            return load(file, *arguments, **keywords)


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
