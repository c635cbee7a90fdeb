"""The partition of layers into stages, by measured or counted weights.

Partitions are pure functions from weights to bounds.

Bounds [0, 3, 7] mean two stages: layers 0 to 2, and 3 to 6.

A balanced division has the least possible largest stage. That leaves a choice, above all where many layers weigh
nothing; the rules, in this order: the least sum of squares of the stages' weights (as even as can be), then the least
sum of squares of their numbers of layers, then the longer stages first. Weights are compared exactly, floats too, so
that all ranks, and all machines, find the same.

A layer's weight is its parameters, counted without memory, or time and bytes, measured on a sample.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from math import isfinite, lcm
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zero_strategy.comm.process_group import from_first_rank, world_rank
from zero_strategy.pipeline.building import (
    LayerSeeds,
    LayerSpec,
    NamedLayer,
    TiedLayerSpec,
    layer_class_name,
    modules_of,
    random_state_kept,
)
from zero_strategy.pipeline.model_chunk import Entrance
from zero_strategy.runtime.compute_device import gpus_of, synchronize
from zero_strategy.runtime.torch_private import storage_key, tree_flatten, tree_leaves, tree_map, tree_unflatten

Weight = int | float


def uniform_bounds(layers: int, stages: int) -> list[int]:
    """Stages of equal length; the first ones are one longer where that does not come out even.

    Args:
        layers: Number of layers.
        stages: Number of stages.

    Returns:
        stages + 1 bounds.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    _check_counts(layers, stages)
    length, longer = divmod(layers, stages)
    return [stage * length + min(stage, longer) for stage in range(stages + 1)]


def balanced_bounds(
    weights: Sequence[Weight],
    stages: int,
    *,
    bytes_of_stage: Sequence[Sequence[int]] | None = None,
    byte_limit: int | None = None,
) -> list[int]:
    """The division whose largest stage is the smallest; see above for the choice among several.

    Args:
        weights: Of each layer: a number that is not negative.
        stages: Number of stages.
        bytes_of_stage: [stage][layer]: what a layer takes where it is on that stage.
        byte_limit: Most bytes of a stage.

    Returns:
        stages + 1 bounds.

    Raises:
        ValueError: If there are fewer layers than stages, a weight is negative or no number, or no division keeps the
            limit.
    """
    _check_counts(len(weights), stages)
    values = _exact(weights)
    if byte_limit is None or bytes_of_stage is None:
        fits = _Fits([[0] * len(weights)] * stages, 0)
    else:
        fits = _Fits(bytes_of_stage, byte_limit)
    least = _least_maximum(values, stages, fits)
    if least is None:
        assert bytes_of_stage is not None
        raise ValueError(_no_room(bytes_of_stage, byte_limit, stages))
    return _most_even(values, stages, least, fits)


def type_weights(names: Sequence[str], pattern: str) -> list[int]:
    """1 for each layer whose class name contains a match of a regular expression, in any case of letters; else 0.

    Args:
        names: The layers' class names.
        pattern: The expression.

    Raises:
        ValueError: If the expression is none, or nothing matches; names the classes there are.
    """
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"partition_method 'type:{pattern}' is no regular expression: {error}") from None
    weights = [int(compiled.search(name) is not None) for name in names]
    if not any(weights):
        known = ", ".join(dict.fromkeys(names))
        raise ValueError(f"partition_method 'type:{pattern}' matches no layer; classes of the layers: {known}")
    return weights


def checked_bounds(bounds: Sequence[int], layers: int, stages: int) -> list[int]:
    """Bounds that were given.

    Raises:
        ValueError: If they are not stages + 1 increasing integers from 0 to the number of layers.
    """
    _check_counts(layers, stages)
    found = list(bounds)
    right = len(found) == stages + 1 and all(type(bound) is int for bound in found)  # True is no bound
    if not right or found[0] != 0 or found[-1] != layers or any(a >= b for a, b in pairwise(found)):
        raise ValueError(
            f"partition_method {found}: for {stages} stages of {layers} layers bounds are {stages + 1} increasing "
            f"integers, the first 0 and the last {layers}, such as {uniform_bounds(layers, stages)}"
        )
    return found


class _Fits:
    """True if layers i to j - 1 may be a stage, by their bytes there."""

    def __init__(self, bytes_of_stage: Sequence[Sequence[int]], limit: int) -> None:
        self._sums = [[0, *accumulate(sizes)] for sizes in bytes_of_stage]
        self._limit = limit

    def __call__(self, stage: int, start: int, stop: int) -> bool:
        return self._sums[stage][stop] - self._sums[stage][start] <= self._limit


def _least_maximum(values: Sequence[int], stages: int, fits: _Fits) -> int | None:
    """The least that the largest stage can weigh, by dynamic programming over suffixes; None: nothing fits."""
    layers, sums = len(values), [0, *accumulate(values)]
    best: list[int | None] = [None] * layers + [0]  # for the stages after the one that is looked at
    for stage in reversed(range(stages)):
        now: list[int | None] = [None] * (layers + 1)
        for start in range(layers - 1, -1, -1):
            for stop in range(start + 1, layers + 1):
                if not fits(stage, start, stop):  # nor does a longer one
                    break
                rest, weight = best[stop], sums[stop] - sums[start]
                least = now[start]
                if least is not None and weight > least:
                    break  # longer stages only weigh more
                if rest is not None and (least is None or max(weight, rest) < least):
                    now[start] = max(weight, rest)
        best = now
    return best[0]


def _most_even(values: Sequence[int], stages: int, largest: int, fits: _Fits) -> list[int]:
    """The chosen division among those whose stages weigh at most `largest`."""
    layers, sums = len(values), [0, *accumulate(values)]
    # After the last stage there is nothing but the end of the layers.
    costs: list[list[tuple[int, int] | None]] = [[None] * layers + [(0, 0)]]
    nexts: list[list[int]] = []
    for stage in reversed(range(stages)):
        cost: list[tuple[int, int] | None] = [None] * (layers + 1)
        follow = [0] * (layers + 1)
        for start in range(layers):
            for stop in range(start + 1, layers + 1):
                weight = sums[stop] - sums[start]
                if weight > largest or not fits(stage, start, stop):
                    break
                rest, least = costs[-1][stop], cost[start]
                if rest is None:
                    continue
                # Sums over stages, so that the best end of a division is the best behind any beginning.
                found = (weight * weight + rest[0], (stop - start) ** 2 + rest[1])
                if least is None or found <= least:  # the last of equal ones is the longest stage
                    cost[start], follow[start] = found, stop
        costs.append(cost)
        nexts.append(follow)
    bounds = [0]
    for follow in reversed(nexts):
        bounds.append(follow[bounds[-1]])
    return bounds


def _exact(weights: Sequence[Weight]) -> list[int]:
    """Integers in the same proportions; floats are fractions of powers of two, so there are some."""
    for layer, weight in enumerate(weights):
        if not isinstance(weight, (int, float)) or not isfinite(weight) or weight < 0:
            raise ValueError(f"layer {layer} has the weight {weight!r}; accepted: finite numbers from 0 on")
    fractions = [Fraction(weight) for weight in weights]
    # Sums of floats would depend on their order, and equal stages would differ by a rounding.
    scale = lcm(*(value.denominator for value in fractions))
    return [int(value * scale) for value in fractions]


def _check_counts(layers: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"a pipeline has at least one stage, not {stages}")
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot be divided into {stages} stages of at least one layer; use at most {layers} "
            "stages (ranks x chunks), or split a layer into several"
        )


def _no_room(bytes_of_stage: Sequence[Sequence[int]], limit: int | None, stages: int) -> str:
    # "about": by the first stage's bytes, where most micro-batches are held at once.
    least = _least_maximum(list(bytes_of_stage[0]), stages, _Fits([[0] * len(bytes_of_stage[0])] * stages, 0))
    return (
        f"no division into {stages} stages keeps each within {limit} bytes: the largest needs about {least}; use more "
        "stages, smaller micro-batches or activation checkpointing"
    )


_PLAIN = (int, float, str, bool, type(None), torch.dtype, type)


@dataclass(frozen=True)
class LayerProfile:
    """Cost of one layer.

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
            # Building draws initial weights: from the layer's seed, and the script's generators are put back.
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
        # Other objects may have an == that is no bool, as tensors have; the spec keeps them, so no id comes twice.
        return argument if isinstance(argument, _PLAIN) else id(argument)

    named = tuple((name, value(argument)) for name, argument in sorted(spec.module_kwargs.items()))
    return spec.typename, tuple(value(argument) for argument in spec.module_args), named


def _built_empty(spec: LayerSpec) -> nn.Module:
    # A layer draws initial weights, and a script's next draw must not depend on what was counted.
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
    # The first attempt makes what is made at a first use (kernels, buffers), and does not count.
    for attempt in range(repeats + 1):
        inputs, edges = _entered(sample)
        _wait(inputs)  # or the copies would be measured, too
        begun = time.perf_counter()
        # Whoever makes the module may be in no_grad; each attempt draws the same numbers, as for dropout.
        with torch.enable_grad(), random_state_kept(), _counting(own) as storages:
            output = call(inputs)
        _backward(output, tensors, edges)
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
        # Parameters are there once, whatever the number of micro-batches in flight: they are counted as state.
        if storage_key(storage) not in own:
            storages[storage_key(storage)] = storage.nbytes()
        return tensor.detach()  # else a result that is kept would hold itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def _backward(output: Any, tensors: list[Tensor], inputs: Sequence[GradientEdge]) -> None:
    roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    ends: list[Any] = [*(tensor for tensor in tensors if tensor.requires_grad), *inputs]
    if roots and ends:
        # Not backward(), which would leave gradients at the parameters.
        torch.autograd.grad(roots, ends, [torch.ones_like(root) for root in roots], allow_unused=True)


def _entered(sample: Any) -> tuple[Any, list[GradientEdge]]:
    """Copies of a layer's inputs, with a graph that begins at them as in a stage, and where their gradients arrive."""
    leaves, structure = tree_flatten(tree_map(_copied, sample))
    wanting = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not wanting:
        return tree_unflatten(leaves, structure), []
    # No leaves of autograd: a layer may write to what the layer before has made.
    with torch.enable_grad():
        entered = Entrance.apply(torch.empty((), requires_grad=True), *(leaves[i] for i in wanting))
    for i, tensor in zip(wanting, entered):
        leaves[i] = tensor
    # Noted before the layer runs, which gives a tensor that it changes in place another edge.
    return tree_unflatten(leaves, structure), [get_gradient_edge(tensor) for tensor in entered]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    # Cut from its graph, so that the next layer's backward is measured alone.
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _wait(values: Any) -> None:
    for device in gpus_of(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
        synchronize(device)


T = TypeVar("T")


def divide(
    layers: Sequence[NamedLayer],
    stages: int,
    method: str | Sequence[int],
    *,
    profile: Sequence[LayerProfile] | None,
    sample: Any,
    stage_bytes: int | None,
    seeds: LayerSeeds,
    together: bool,
) -> list[int]:
    """Bounds of the stages. A collective if the layers are measured.

    Args:
        layers: All of the model.
        stages: Number of global stages.
        method: See `PipelineModule`.
        profile: What layers take, for "profile".
        sample: An input to measure it with.
        stage_bytes: Most bytes of a stage, for "profile".
        seeds: Random states in which layers are built to be measured.
        together: Whether ranks divide the model together, so that they must agree.

    Raises:
        ValueError: If the method is unknown, or does not fit the layers.
    """
    if not isinstance(method, str):
        return checked_bounds(method, len(layers), stages)
    given = [layer.given for layer in layers]
    name = method.lower()
    if name == "uniform":
        return uniform_bounds(len(layers), stages)
    if name == "parameters":
        return balanced_bounds(count_parameters(given), stages)
    if name.startswith("type:"):
        pattern = method[len("type:") :]
        return balanced_bounds(type_weights([layer.class_name for layer in layers], pattern), stages)
    if name != "profile":
        raise ValueError(
            f"partition_method {method!r} is unknown; there are 'uniform', 'parameters', 'type:REGEX', 'profile', and "
            "bounds such as [0, 3, 7]"
        )
    if profile is None:
        if sample is None:
            raise ValueError(
                "partition_method 'profile' needs profile=[LayerProfile(...), ...], one for each layer, or "
                "profile_sample=, an input of the first layer to measure them with"
            )
        profile = _measured(lambda: profile_layers(given, sample, seeds=seeds), together)
    if len(profile) != len(layers):
        raise ValueError(f"profile has {len(profile)} entries for {len(layers)} layers; it needs one for each")
    return profile_bounds(profile, stages, stage_bytes=stage_bytes)


def _measured(measure: Callable[[], T], together: bool) -> T:
    """Measurements of the first rank, on all ranks: each by itself would find another division."""
    if not together:
        return measure()
    found: tuple[T | None, str] = (None, "")
    error: Exception | None = None
    if world_rank() == 0:
        try:
            found = measure(), ""
        except Exception as caught:
            error, found = caught, (None, str(caught))
    # After a failure, too: the other ranks wait for this.
    value, text = from_first_rank(found)
    if error is not None:
        raise error
    if value is None:
        raise RuntimeError(f"on the first rank: {text}")
    return value
