"""Lightning comes under four import names, each with classes of its own that do not recognise one another's.

| namespace           | what                                      | its strategy is defined in                       |
| ------------------- | ----------------------------------------- | ------------------------------------------------ |
| `lightning.pytorch` | the Trainer of the `lightning` package    | `zero_strategy.integrations.lightning`           |
| `pytorch_lightning` | the Trainer of the package of that name   | `zero_strategy.integrations.pytorch_lightning`   |
| `lightning.fabric`  | Fabric of the `lightning` package         | `zero_strategy.integrations.fabric`              |
| `lightning_fabric`  | Fabric of the package of that name        | `zero_strategy.integrations.lightning_fabric`    |
"""

from __future__ import annotations

import inspect
import sys
from abc import ABCMeta
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

MODULES = {
    "lightning.pytorch": "zero_strategy.integrations.lightning",
    "pytorch_lightning": "zero_strategy.integrations.pytorch_lightning",
    "lightning.fabric": "zero_strategy.integrations.fabric",
    "lightning_fabric": "zero_strategy.integrations.lightning_fabric",
}
_TRAINERS = ("lightning.pytorch", "pytorch_lightning")


def strategy_class(namespace: str) -> type[Any]:
    """The `ZeroStrategy` for one of Lightning's import names; imports that framework.

    Args:
        namespace: `lightning.pytorch`, `pytorch_lightning`, `lightning.fabric` or `lightning_fabric`.

    Raises:
        ValueError: If there is no such namespace.
        ImportError: If the framework is not installed.
    """
    if namespace not in MODULES:
        raise ValueError(f"unknown namespace {namespace!r}; accepted: {', '.join(map(repr, MODULES))}")
    found: type[Any] = import_module(MODULES[namespace]).ZeroStrategy
    return found


def pipeline_strategy_class(namespace: str) -> type[Any]:
    """The `PipelineStrategy` for one of the Trainer's import names; imports that framework.

    Args:
        namespace: `lightning.pytorch` or `pytorch_lightning`.

    Raises:
        ValueError: If there is none for it.
        ImportError: If the framework is not installed.
    """
    if namespace not in _TRAINERS:
        raise ValueError(f"no PipelineStrategy for {namespace!r}; accepted: {', '.join(map(repr, _TRAINERS))}")
    found: type[Any] = import_module(MODULES[namespace]).PipelineStrategy
    return found


def default_trainer_namespace() -> str:
    """Kind of Trainer that `zero_strategy.ZeroStrategy` is for.

    The one that is imported; of both the one that the code uses which asks; else the one that is installed.

    Raises:
        ImportError: If neither is installed.
    """
    imported = [name for name in _TRAINERS if name in sys.modules]
    if len(imported) == 1:
        return imported[0]
    used = _used_by_the_caller() if imported else None
    if used is not None:
        return used
    for name in _TRAINERS:
        if find_spec(name.partition(".")[0]) is not None:
            return name
    raise ImportError(
        "zero_strategy.ZeroStrategy needs PyTorch Lightning: pip install lightning (or pytorch-lightning)"
    )


class OfTheTrainerInUse(ABCMeta):
    """Makes a strategy for the Trainer of the code that asks for one, whichever of them its class was imported for.

    `from zero_strategy import ZeroStrategy` may come before the first import of Lightning. Subclasses of a user's are
    made as they are.
    """

    if not TYPE_CHECKING:  # a signature of its own would hide that of the class

        @property
        def __signature__(cls) -> inspect.Signature:
            """Arguments of the constructor."""
            taken = inspect.signature(cls.__init__)
            return taken.replace(parameters=list(taken.parameters.values())[1:], return_annotation=cls)

        def __call__(cls, *arguments, **keywords):
            """A new strategy."""
            made = cls
            if cls.__module__ in (MODULES[name] for name in _TRAINERS):
                used = _used_by_the_caller()
                if used is not None and MODULES[used] != cls.__module__:
                    made = getattr(import_module(MODULES[used]), cls.__name__, cls)
            return super(OfTheTrainerInUse, made).__call__(*arguments, **keywords)


def _used_by_the_caller() -> str | None:
    """The Trainer's namespace that the nearest code outside of this package has something of; None if both, or none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Names of the package are imported when they are asked for, by frames of importlib.
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("zero_strategy", "importlib"):
            known = [*frame.f_locals.values(), *frame.f_globals.values()]
            used = {name for value in known for name in _namespaces_of(value)}
            if used:
                return used.pop() if len(used) == 1 else None
        frame = frame.f_back
    return None


def _namespaces_of(value: object) -> set[str]:
    """The Trainers' namespaces that a module is of, or a class or one of its bases."""
    if isinstance(value, ModuleType):
        places = [str(value.__dict__.get("__name__", ""))]
    elif isinstance(value, type) and not value.__module__.startswith("zero_strategy."):  # which is what is asked for
        places = [str(vars(base).get("__module__", "")) for base in value.__mro__]
    else:
        return set()
    return {name for place in places for name in _TRAINERS if _is_of(place, name)}


def _is_of(place: str, namespace: str) -> bool:
    # `import lightning as L` has no other name for its Trainer
    return place == namespace or place.startswith(namespace + ".") or (place, namespace) == ("lightning", _TRAINERS[0])
