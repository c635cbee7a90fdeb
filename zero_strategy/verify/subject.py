"""The subject of a verification: model, optimizer, batches and loss from a factory, and how it trains.

A factory of the user's gives a model, how its optimizer is made, its batches and its loss.

def factory():                                              # the same at every call: every rank calls it
    model = MyModel()
    batches = [make_batch(index) for index in range(20)]
    return model, lambda m: torch.optim.AdamW(m.parameters()), batches, lambda m, batch: m(batch).loss

def factory():                                              # or a LightningModule and its batches
    return MyLightningModule(), DataLoader(...)
"""

from __future__ import annotations

import inspect
import math
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.config import ResolvedConfig
from zero_strategy.runtime.torch_private import tree_map

DEFAULT_TOLERANCE = 8.0
"""Where bits cannot be reproduced: this many times what re-ordered summation explains."""


@dataclass(frozen=True)
class VerifySettings:
    """The training that is compared.

    Attributes:
        steps: Optimizer steps.
        accumulation: Micro-batches per step and rank.
        clip_norm: Bound of the gradient norm, or None.
        compute_dtype: What parameters are computed with, None for their own; bf16 and fp16 have fp32 master weights,
            and fp16 the loss scale of the config.
        autocast: Dtype of autocast, or None; likewise.
        seed: Of the factory; rank r draws from seed + r afterwards.
        tolerance: How many times what re-ordered summation explains may differ. 0: bits must be equal. None: bits
            where the order of summation can be reproduced, else 8.
        device: Where to compute.

    Raises:
        ValueError: If a number makes no sense; names it.
    """

    steps: int = 5
    accumulation: int = 1
    clip_norm: float | None = None
    compute_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    seed: int = 0
    tolerance: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        for name in ("clip_norm", "tolerance"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}; accepted: 0 or more")

    @property
    def scales_loss(self) -> bool:
        """True if losses are scaled, and steps skipped that overflow."""
        return torch.float16 in (self.compute_dtype, self.autocast)

    def batches(self, ranks: int) -> int:
        """Number of batches that a run takes."""
        return self.steps * self.accumulation * ranks

    def number(self, step: int, micro: int, rank: int, ranks: int) -> int:
        """Number of the batch."""
        return (step * self.accumulation + micro) * ranks + rank

    def forward_context(self) -> AbstractContextManager[object]:
        """Context that forwards run in."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


def unreproducible(config: ResolvedConfig, settings: VerifySettings) -> str:
    """Why one process cannot repeat the order of summation, or "" where it can."""
    if settings.device.type != "cpu":
        return "sums on a GPU are in the order of its library"
    if config.config.precision.reduce_dtype != "float32" and config.world_size > 1:
        return f"gradients are summed over ranks in {config.config.precision.reduce_dtype}"
    scale = config.config.loss_scale
    factors = scale.initial, scale.growth_factor, scale.backoff_factor, scale.minimum
    if settings.scales_loss and any(math.frexp(factor)[0] != 0.5 for factor in factors):
        return "the loss scale is no power of two"
    return ""


Factory = Callable[[], Any] | str
"""A function without arguments, or where it is: "path.py:function" or "package.module:function"."""

_KEYS = ("model", "optimizer", "batches", "loss")
_ACCEPTED = (
    "return (model, optimizer, batches, loss), where optimizer(model) makes the optimizer and loss(model, batch) the "
    "loss; or a mapping with those keys; or (LightningModule, batches)"
)


@dataclass(frozen=True)
class Subject:
    """Subject of the training.

    Attributes:
        model: The module, built the same at every call of the factory.
        optimizer: Makes its optimizer, given the module.
        batches: Micro-batch a of rank r in step s is number (s x accumulation + a) x ranks + r; they start over at
            their end.
        loss: A scalar, given the module and a batch.
        scoped: The loss may use parameters outside of any module's forward, as a `training_step` does.
    """

    model: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    scoped: bool = False

    def batch(self, number: int, device: torch.device) -> Any:
        """A batch of its own, on the device: a loss may write to it."""
        chosen = self.batches[number % len(self.batches)]
        return tree_map(lambda x: x.to(device, copy=True) if isinstance(x, Tensor) else x, chosen)


def make_subject(factory: Factory, seed: int, wanted: int) -> Subject:
    """Call a factory under a seed.

    Args:
        factory: See `Factory`.
        seed: Of torch's and Python's generators while it runs.
        wanted: How many batches are taken at most.

    Raises:
        ValueError: If it cannot be found, or returns something else than asked for; says what.
    """
    return subject_of(call_factory(factory, seed), wanted)


def call_factory(factory: Factory, seed: int) -> Any:
    """Return value of a factory under a seed; a mapping with the right keys as a tuple.

    Raises:
        ValueError: If it cannot be found, or returned a mapping with other keys.
    """
    function = load_factory(factory) if isinstance(factory, str) else factory
    torch.manual_seed(seed)
    random.seed(seed)
    made = function()
    if isinstance(made, Mapping):
        if set(made) != set(_KEYS):
            raise ValueError(f"the factory returned a mapping with keys {sorted(map(str, made))}: {_ACCEPTED}")
        return tuple(made[key] for key in _KEYS)
    return made


def subject_of(made: Any, wanted: int) -> Subject:
    """The subject that a factory has returned, with so many batches at most.

    Raises:
        ValueError: If it has returned something else than asked for; says what.
    """
    if isinstance(made, Subject):
        return replace(made, batches=take_batches(made.batches, wanted))
    if isinstance(made, (tuple, list)) and len(made) == 2 and hasattr(made[0], "training_step"):
        if hasattr(made[0], "configure_model"):
            made[0].configure_model()  # where some build their layers
        made = (made[0], lightning_optimizer, made[1], _lightning_loss)
    if not isinstance(made, (tuple, list)) or len(made) != 4:
        raise ValueError(f"the factory returned {named(made)}: {_ACCEPTED}")
    model, optimizer, batches, loss = made
    if not isinstance(model, nn.Module):
        raise ValueError(f"the factory's model is {named(model)}, not a torch module: {_ACCEPTED}")
    for name, value in (("optimizer", optimizer), ("loss", loss)):
        if not callable(value) or isinstance(value, Optimizer):
            raise ValueError(f"the factory's {name} is {named(value)}, not a function: {_ACCEPTED}")
    return Subject(model, optimizer, take_batches(batches, wanted), loss, scoped=loss is _lightning_loss)


def take_batches(given: Any, wanted: int) -> list[Any]:
    """The first of them.

    Raises:
        ValueError: If there is none.
    """
    if not isinstance(given, Iterable) or isinstance(given, Tensor):
        raise ValueError(f"the factory's batches are {named(given)}: give a list of batches, or a DataLoader")
    found = list(islice(given, wanted))
    if not found:
        raise ValueError("the factory's batches are empty: give at least one")
    return found


def lightning_optimizer(module: nn.Module) -> Optimizer:
    """The one that a LightningModule configures.

    Raises:
        ValueError: If there are several, or it asks a Trainer.
    """
    try:
        made: Any = cast(Any, module).configure_optimizers()
    except RuntimeError as error:
        if "Trainer" not in str(error):
            raise
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers asks its Trainer, and here is none: let the factory return "
            "(model, optimizer, batches, loss), with an optimizer without schedules"
        ) from error
    if isinstance(made, Mapping):
        made = made["optimizer"]
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (list, tuple)):
        made = made[0]  # ([optimizers], [schedulers])
    if isinstance(made, (list, tuple)):
        if len(made) != 1:
            raise ValueError(f"configure_optimizers returned {len(made)} optimizers; verify trains with one")
        made = made[0]
    if isinstance(made, Mapping):
        made = made["optimizer"]
    return cast(Optimizer, made)


def _lightning_loss(module: nn.Module, batch: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*self.log.*")  # there is no Trainer, and nothing to log to
        made = cast(Any, module).training_step(batch, 0)
    return cast(Tensor, made["loss"] if isinstance(made, Mapping) else made)


def named(value: Any) -> str:
    """A value's kind, for messages."""
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{size}"


# ---------------------------------------------------------------------------------------------- finding factories


def load_factory(name: str, what: str = "factory") -> Callable[..., Any]:
    """A function by its place.

    Args:
        name: "path.py:function" or "package.module:function".
        what: What to call it in messages.

    Raises:
        ValueError: If there is none; says what was looked for.
    """
    place, attribute = check_place(name, what)
    try:
        module = _from_file(place) if place.endswith(".py") else _from_package(place)
    except Exception as error:
        told = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        line = f" ({place}, line {at})" if (at := _line_in(error, place)) else ""
        raise ValueError(f"{what} {name!r}: module {place!r} cannot be imported: {told}{line}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{what} {name!r}: {place!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{what} {name!r} is {named(found)}; name a function, or a class")
    return cast(Callable[..., Any], found)


def check_place(name: str, what: str = "factory") -> tuple[str, str]:
    """File or module, and what is to be found there; as far as that can be told without running any of it.

    Raises:
        ValueError: If it is no place, or a file that is not there.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not attribute or not place:
        raise ValueError(f"{what} {name!r}: write path.py:function or package.module:function")
    if place.endswith(".py") and not (file := Path(place).expanduser().resolve()).is_file():
        raise ValueError(f"{what} {name!r}: there is no file {os.fspath(file)}")
    if not place.endswith(".py") and not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(f"{what} {name!r}: {place!r} is neither a .py file nor the name of a module")
    return place, attribute


def _line_in(error: BaseException, place: str) -> int | None:
    """The last line of a file that an error went through."""
    file = os.fspath(Path(place).expanduser().resolve()) if place.endswith(".py") else ""
    lines = [number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return lines[-1] if lines else None


def _from_file(path: str) -> Any:
    file = Path(path).expanduser().resolve()
    if os.fspath(file.parent) not in sys.path:  # for what lies beside it, as `python path.py` has it
        sys.path.insert(0, os.fspath(file.parent))
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(file.stem)
    if module is None or getattr(module, "__file__", None) != os.fspath(file):
        module = module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)  # so that its classes can be found by their names
        spec.loader.exec_module(module)
    return module


def _from_package(place: str) -> Any:
    if os.getcwd() not in sys.path:  # as `python -m` has it
        sys.path.insert(0, os.getcwd())
    return import_module(place)


def place_of(factory: Callable[..., Any] | str) -> str:
    """Place at which another process finds a factory.

    Raises:
        ValueError: If it is not at the top of a module.
    """
    if isinstance(factory, str):
        return factory
    name, module = getattr(factory, "__qualname__", ""), getattr(factory, "__module__", "")
    if "<" in name or not name:
        raise ValueError(
            "the ranks import the factory by its name, so it has to be a function at the top of a module, not "
            f"{name or factory!r}; give that, or its place: 'path.py:function'"
        )
    if module == "__main__":
        return f"{inspect.getfile(factory)}:{name}"
    return f"{module}:{name}"
