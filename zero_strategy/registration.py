"""Strategy names such as "zero3" in Lightning's registries, whatever is imported first.

Lightning looks a name up in a registry of its own when a Trainer (or Fabric) is made, and offers no entry point for
strategies. So the names are entered when `zero_strategy` is imported, if Lightning is there already, and else by an
import hook at the moment when Lightning's registry module has been imported. Lightning itself is never imported here,
and a registry entry is a function: the strategy's module is imported when a name is used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in zero_strategy/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader, MetaPathFinder
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any
else:
    Loader = MetaPathFinder = object

NAMES = ("zero1", "zero2", "zero3", "zero_auto", "zero2_offload", "zero3_offload", "zero3_nvme")
"""Presets of `zero_strategy.config`, one strategy each."""

PIPELINE = "pipeline"
"""The same for pipelines, for Trainers only."""

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
"""Suffix of a strategy name -> how processes are started, as Lightning's own names for DDP have it."""

REGISTRIES = {
    "lightning.pytorch.strategies": ("lightning.pytorch", "StrategyRegistry"),
    "pytorch_lightning.strategies": ("pytorch_lightning", "StrategyRegistry"),
    "lightning.fabric.strategies": ("lightning.fabric", "STRATEGY_REGISTRY"),
    "lightning_fabric.strategies": ("lightning_fabric", "STRATEGY_REGISTRY"),
}
"""Module that holds a registry -> (namespace, name of the registry in the module)."""


def install() -> None:
    """Register now with what is imported already, and with the rest as soon as it is. Safe to call again."""
    for name in REGISTRIES:
        module = sys.modules.get(name)
        if module is not None:
            register(module)
    if not any(isinstance(finder, RegistrationFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegistrationFinder())


def register(module: ModuleType) -> None:
    """Enter our names into the registry of one of Lightning's modules (a key of `REGISTRIES`)."""
    from functools import partial

    namespace, attribute = REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)
    if registry is None:  # still being imported, or a version of Lightning that moved it
        return
    owner = "Fabric" if "fabric" in namespace else "Trainer"
    for name in NAMES:
        for suffix, start_method in START_METHODS.items():
            registry.register(
                name + suffix,
                partial(_make, namespace, owner),
                description=f"zero_strategy, preset {name!r}, with `start_method` {start_method!r}",
                override=True,
                preset=name,
                registered=name + suffix,
                start_method=start_method,
            )

    for suffix, start_method in START_METHODS.items() if owner == "Trainer" else ():
        registry.register(
            PIPELINE + suffix,
            partial(_make_pipeline, namespace),
            description=f"zero_strategy, pipeline stages, with `start_method` {start_method!r}",
            override=True,
            start_method=start_method,
        )


def _make_pipeline(namespace: str, *, start_method: str) -> Any:
    """Entry of the registry for `Trainer(strategy="pipeline")`."""
    from zero_strategy.integrations.lightning.namespaces import pipeline_strategy_class

    return pipeline_strategy_class(namespace)(start_method=start_method)


def _make(namespace: str, owner: str, *, preset: str, registered: str, start_method: str) -> Any:
    """Entry of the registry for `Trainer(strategy=registered)`."""
    from zero_strategy.config import Layer, load_layers
    from zero_strategy.config import preset as settings_of
    from zero_strategy.integrations.lightning.namespaces import strategy_class

    config = load_layers([Layer(settings_of(preset), f'{owner}(strategy="{registered}")')])
    return strategy_class(namespace)(config, start_method=start_method)


class RegistrationFinder(MetaPathFinder):
    """Lets the other finders find Lightning's registry modules, and registers when they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that another finder gives, with a loader that registers at its end; None for other modules."""
        if fullname not in REGISTRIES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(Loader):
    """Loads as the loader that it stands in for, then registers and leaves no trace of itself on the module."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See the other loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See the other loader; our names are registered."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
