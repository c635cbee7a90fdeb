"""Which layers a stage has, by any of the methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zero_strategy.distributed.groups import from_first_rank
from zero_strategy.distributed.world import world_rank
from zero_strategy.pipeline.building import NamedLayer
from zero_strategy.pipeline.layer_weights import LayerProfile, count_parameters, profile_bounds, profile_layers
from zero_strategy.pipeline.partition import balanced_bounds, checked_bounds, type_weights, uniform_bounds
from zero_strategy.pipeline.seeding import LayerSeeds

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
    """What the first rank measures, on all ranks: each by itself would find another division."""
    if not together:
        return measure()
    found: tuple[T | None, str] = (None, "")
    error: Exception | None = None
    if world_rank() == 0:
        try:
            found = measure(), ""
        except Exception as caught:
            error, found = caught, (None, str(caught))
    value, text = from_first_rank(found)
    if error is not None:
        raise error
    if value is None:
        raise RuntimeError(f"on the first rank: {text}")
    return value
