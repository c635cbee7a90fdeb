"""What layers weigh: parameters, counted without memory, and time and bytes, measured on a sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.pipeline.partition import balanced_bounds
from zero_strategy.pipeline.seeding import LayerSeeds, random_state_kept
from zero_strategy.pipeline.specs import LayerSpec, TiedLayerSpec, layer_class_name, modules_of
from zero_strategy.runtime.torch_private import storage_key, tree_leaves, tree_map

_PLAIN = (int, float, str, bool, type(None), torch.dtype, type)


@dataclass(frozen=True)
class LayerProfile:
    """What one layer takes.

    Attributes:
        seconds: Forward and backward of a micro-batch.
        state_bytes: Parameters and buffers.
        activation_bytes: Kept from a micro-batch's forward until its backward, parameters left out.
    """

    seconds: float
    state_bytes: int = 0
    activation_bytes: int = 0


def count_parameters(layers: Sequence[Any]) -> list[int]:
    """Trainable elements of each layer; 0 for functions.

    What is not built yet is built on the meta device, where it takes no memory, and only once for equal specs; a class
    that cannot be built there is built for real and dropped again, one at a time.
    """
    known: dict[Any, int] = {}
    counts = []
    for layer in layers:
        if isinstance(layer, LayerSpec):
            key = _key(layer)
            if key not in known:
                known[key] = _trainable(_built_empty(layer))
            counts.append(known[key])
        else:
            counts.append(sum(_trainable(module) for module in modules_of(layer)))
    return counts


def profile_layers(
    layers: Sequence[Any], sample: Any, *, seeds: LayerSeeds | None = None, repeats: int = 3
) -> list[LayerProfile]:
    """Measure every layer on this process's device, one after the other; one that is not built yet is dropped again.

    Args:
        layers: All layers of the model.
        sample: What the first layer takes: tensors in any nesting.
        seeds: Random states in which layers are built.
        repeats: Measurements, whose median counts, after one that does not.

    Raises:
        RuntimeError: If a layer fails; names it.
    """
    seeds = seeds or LayerSeeds(0)
    found: list[LayerProfile] = []
    for index, layer in enumerate(layers):
        built = layer
        if isinstance(layer, LayerSpec):
            with seeds.layer(index):
                built = layer.build()
        modules, call = modules_of(built), built
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            call = partial(layer.forward_fn, built)
        try:
            profile, sample = _profile_one(modules, call, sample, repeats)
        except Exception as error:
            raise RuntimeError(f"profiling layer {index} ({layer_class_name(layer)}) failed: {error}") from error
        found.append(profile)
    return found


def profile_bounds(
    profiles: Sequence[LayerProfile],
    stages: int,
    *,
    stage_bytes: int | None = None,
    micro_batches: int | None = None,
) -> list[int]:
    """The division whose slowest stage is the fastest.

    Args:
        profiles: Of each layer.
        stages: Number of stages.
        stage_bytes: Most bytes of a stage: its parameters, gradients, and the activations of min(stages - stage,
            micro_batches) micro-batches, which 1F1B keeps. None: as many as it takes.
        micro_batches: Of a batch; None: many.

    Raises:
        ValueError: If there are fewer layers than stages, or no division keeps the limit.
    """
    sizes = []
    for stage in range(stages):
        kept = stages - stage if micro_batches is None else min(stages - stage, micro_batches)
        sizes.append([2 * profile.state_bytes + kept * profile.activation_bytes for profile in profiles])
    weights = [profile.seconds for profile in profiles]
    return balanced_bounds(weights, stages, bytes_of_stage=sizes, byte_limit=stage_bytes)


def _key(spec: LayerSpec) -> Any:
    def value(argument: Any) -> Any:
        return argument if isinstance(argument, _PLAIN) else id(argument)

    named = tuple((name, value(argument)) for name, argument in sorted(spec.module_kwargs.items()))
    return spec.typename, tuple(value(argument) for argument in spec.module_args), named


def _built_empty(spec: LayerSpec) -> nn.Module:
    with random_state_kept():
        try:
            with torch.device("meta"):
                return spec.build()
        except Exception:  # it reads a value, which nothing on the meta device has
            return spec.build()


def _trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _profile_one(modules: list[nn.Module], call: Any, sample: Any, repeats: int) -> tuple[LayerProfile, Any]:
    tensors: list[Tensor] = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    state = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    own = {storage_key(tensor.untyped_storage()) for tensor in tensors}
    seconds, kept, output = [], 0, None
    for attempt in range(repeats + 1):
        inputs = tree_map(_fresh, sample)
        _wait(inputs)
        begun = time.perf_counter()
        with torch.enable_grad(), random_state_kept(), _counting(own) as storages:
            output = call(inputs)
        _backward(output, tensors, inputs)
        _wait(output)
        if attempt:
            seconds.append(time.perf_counter() - begun)
        kept = sum(storages.values())
    return LayerProfile(median(seconds), state, kept), tree_map(_detached, output)


@contextmanager
def _counting(own: set[int]) -> Iterator[dict[int, int]]:
    """Bytes of the storages that are saved for the backward, those of parameters left out: {storage: bytes}."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage_key(storage) not in own:
            storages[storage_key(storage)] = storage.nbytes()
        return tensor.detach()  # else a result that is kept would hold itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def _backward(output: Any, tensors: list[Tensor], inputs: Any) -> None:
    roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    leaves = [leaf for leaf in [*tensors, *tree_leaves(inputs)] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _wait(values: Any) -> None:
    if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(values)):
        torch.cuda.synchronize()
