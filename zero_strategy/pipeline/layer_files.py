"""A pipeline's weights as DeepSpeed has them: one file for each layer, whatever the stages.

    layer_{layer:02d}[-model_{slice:02d}]-model_states.pt     the layer's state dict, under names local to it

Layers that can have no state have no file. Layers of one tie key have one each, with the same content, but for those
that run a function of their own on the tied module: they have none, unless all of their key do, whose first has one.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_strategy.pipeline.building import BuiltLayer, NamedLayer
from zero_strategy.pipeline.specs import TiedLayerSpec
from zero_strategy.pipeline.topology import ProcessTopology
from zero_strategy.runtime.regular_files import open_regular


def layer_path(directory: str | Path, layer: int, topology: ProcessTopology, rank: int) -> str:
    """The file of a layer on a rank."""
    place = topology.get_rank_repr(rank)
    middle = f"-{place}" if place else ""
    return os.path.join(directory, f"layer_{layer:02d}{middle}-model_states.pt")


def layer_paths(directory: str | Path, layer: int) -> list[str]:
    """The files of a layer that there are, one for each slice, in their order."""
    return sorted(glob.glob(os.path.join(glob.escape(str(directory)), f"layer_{layer:02d}-*model_states.pt")))


def layers_with_files(layers: Sequence[NamedLayer]) -> dict[str, int]:
    """For each tie key, the layer whose file has the tied module for those that have none."""
    chosen: dict[str, int] = {}
    borrowing: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer.given, TiedLayerSpec):
            places = chosen if layer.given.forward_fn is None else borrowing
            places.setdefault(layer.given.key, layer.index)
    return {**borrowing, **chosen}


def save_layers(
    layers: Sequence[BuiltLayer], paths: Sequence[str], tied_files: dict[str, int], engine: Any, exclude_frozen: bool
) -> None:
    """Write the files of some layers.

    Args:
        layers: The layers.
        paths: Of each.
        tied_files: What `layers_with_files` gave.
        engine: A DeepSpeed checkpoint engine (`makedirs`, `save(state_dict, path)`), or None.
        exclude_frozen: Leave parameters out that are not trained.
    """
    for layer, path in zip(layers, paths):
        state = layer.state(exclude_frozen)
        if state is None or (layer.borrows and tied_files[str(layer.tie_key)] != layer.index):
            continue
        state = {name: tensor.detach().clone() for name, tensor in state.items()}  # a view would bring its storage
        if engine is not None:
            engine.save(state_dict=state, path=path)
            continue
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            torch.save(state, temporary)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)


def load_layers(
    layers: Sequence[BuiltLayer],
    directory: str | Path,
    tied_files: dict[str, int],
    engine: Any,
    strict: bool,
    slices: tuple[int, int],
) -> None:
    """Read the files of some layers into them.

    Args:
        layers: The layers.
        directory: With the files.
        tied_files: What `layers_with_files` gave.
        engine: A DeepSpeed checkpoint engine (`load(path, map_location)`), or None.
        strict: Refuse missing and unexpected names.
        slices: This rank's slice, and how many there are.

    Raises:
        FileNotFoundError: If a layer's file is missing.
        ValueError: If there are files for another number of slices.
    """
    for layer, path in _files_to_read(layers, directory, tied_files, slices):
        if engine is not None:
            state: dict[str, Tensor] = engine.load(path, map_location="cpu")
        else:
            with open(open_regular(path), "rb") as file:
                state = torch.load(file, map_location="cpu", weights_only=True)
        layer.load_state(state, strict)


def _files_to_read(
    layers: Sequence[BuiltLayer], directory: str | Path, tied_files: dict[str, int], slices: tuple[int, int]
) -> Iterator[tuple[BuiltLayer, str]]:
    own, number = slices
    for layer in layers:
        if not layer.modules:
            continue
        index = tied_files[str(layer.tie_key)] if layer.borrows else layer.index
        found = layer_paths(directory, index)
        if not found:
            raise FileNotFoundError(
                f"{directory} has no layer_{index:02d}-*model_states.pt for layer {layer.index} ({layer.class_name}); "
                "was the checkpoint written by a model with the same layers?"
            )
        if len(found) != number:
            raise ValueError(
                f"layer {index} in {directory} has {len(found)} files, one for each tensor-parallel slice, but "
                f"{number} slices are loading; load it with as many"
            )
        yield layer, found[own]
