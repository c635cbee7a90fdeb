"""Layers of a stage, divided among tensor-parallel ranks after they are built: by the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import nn

from zero_strategy.pipeline.building import BuiltLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parallelize = Callable[[nn.Module, str, "DeviceMesh"], object]
"""Divides a layer in place: takes its module, its name in the whole model, and the ranks to divide it among."""


def parallelize_layers(layers: Iterable[BuiltLayer], parallelize: Parallelize, mesh: DeviceMesh) -> None:
    """Call `parallelize` for every module of a rank's layers, once for a module that several of them share.

    Raises:
        ValueError: If layers shared a parameter and do no longer; names both of its names.
    """
    layers = list(layers)
    shared = _names_by_parameter(layers)
    seen: set[int] = set()
    for layer in layers:
        for name, module in layer.modules.items():
            if id(module) not in seen:
                seen.add(id(module))
                parallelize(module, name, mesh)
    now = dict(_named(layers))
    for names in shared.values():
        apart = [name for name in names if now.get(name) is not now.get(names[0])]
        if apart:
            raise ValueError(
                f"parameters {names[0]!r} and {apart[0]!r} were one, and parallelize made two of them: tie them by a "
                "TiedLayerSpec, whose module is divided once"
            )


def _named(layers: Iterable[BuiltLayer]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{name}.{local}", parameter)
        for layer in layers
        for name, module in layer.modules.items()
        for local, parameter in module.named_parameters(remove_duplicate=False)
    ]


def _names_by_parameter(layers: Iterable[BuiltLayer]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in _named(layers):
        found.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in found.items() if len(set(names)) > 1}
