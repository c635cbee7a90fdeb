"""Weights of layers: counted, and measured on a sample."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher, RankError
from tests.pipeline.layers import WIDTH, WORDS, Wide, double, logits, tied_specs, words
from zero_strategy.pipeline.building import LayerSpec, ModelLayer, TiedLayerSpec
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.partition import LayerProfile, count_parameters, profile_bounds, profile_layers


class Slow(nn.Linear):
    """A linear layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def test_parameters_are_counted_by_layer() -> None:
    layers = [
        LayerSpec(nn.Linear, 3, 4),
        LayerSpec(nn.Linear, 3, 4, bias=False),
        LayerSpec(nn.Linear, 3, 4),
        double,
        nn.Linear(2, 2),
        ModelLayer({"a": nn.Linear(1, 1), "b": nn.Linear(2, 1)}),
        LayerSpec(nn.Sequential, nn.Linear(1, 5), nn.Linear(5, 1)),
    ]
    assert count_parameters(layers) == [16, 12, 16, 0, 6, 2 + 3, 10 + 6]


def test_time_and_bytes_are_measured() -> None:
    layers = [LayerSpec(Slow, 0.0), LayerSpec(Slow, 0.02), nn.Tanh(), double]
    x = torch.randn(5, WIDTH)
    state = torch.get_rng_state()
    found = profile_layers(layers, x)
    assert torch.equal(state, torch.get_rng_state())
    assert found[1].seconds >= 0.02 > found[0].seconds > 0
    assert [profile.state_bytes for profile in found] == [4 * WIDTH * (WIDTH + 1)] * 2 + [0, 0]
    sample = 4 * 5 * WIDTH
    assert [profile.activation_bytes for profile in found] == [sample, sample, sample, 0]  # inputs; a tanh's output


def test_layers_that_take_no_tensor_with_gradient_are_measured_too() -> None:
    first = TiedLayerSpec("e", nn.Embedding, WORDS, WIDTH)
    found = profile_layers([first, TiedLayerSpec("e", nn.Embedding, WORDS, WIDTH, forward_fn=logits)], words())
    assert [profile.state_bytes for profile in found] == [4 * WORDS * WIDTH] * 2
    assert found[0].activation_bytes == 8 * 12 and all(profile.seconds > 0 for profile in found)


def test_layers_that_write_to_their_inputs_are_measured_too() -> None:
    x = torch.randn(5, WIDTH)
    found = profile_layers([nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)], x)
    assert [profile.activation_bytes for profile in found] == [4 * 5 * WIDTH] * 3  # inputs; a ReLU's output


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"profiling layer 1 \(Wide\) failed"):
        profile_layers([nn.Linear(2, 3), LayerSpec(Wide, WIDTH, 2)], torch.ones(1, 2))


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    profiles = [LayerProfile(seconds, 100, 10) for seconds in (0.1, 0.1, 0.1, 0.1, 0.5, 0.1)]
    assert profile_bounds(profiles, 2) == [0, 4, 6]
    # Stage 0 keeps two micro-batches: four layers take 4 x (200 + 20) bytes there.
    assert profile_bounds(profiles, 2, stage_bytes=880) == [0, 4, 6]
    assert profile_bounds(profiles, 2, stage_bytes=879) == [0, 3, 6]
    assert profile_bounds(profiles, 2, stage_bytes=840, micro_batches=1) == [0, 4, 6]
    with pytest.raises(ValueError, match="no division into 2 stages keeps each within 659 bytes"):
        profile_bounds(profiles, 2, stage_bytes=659)


def test_a_module_is_divided_by_what_was_measured() -> None:
    profiles = [LayerProfile(seconds) for seconds in (1.0, 1.0, 1.0, 5.0, 1.0)]
    part = PipelineModule(tied_specs(), 2, partition_method="profile", profile=[*profiles, LayerProfile(0.5)], rank=0)
    assert part.parts == [0, 3, 6]
    layers = [LayerSpec(Slow, seconds) for seconds in (0.01, 0.01, 0.05, 0.0)]
    sample = torch.ones(1, WIDTH)
    part = PipelineModule(layers, 2, partition_method="profile", profile_sample=sample, rank=1)
    assert part.parts == [0, 2, 4]
    with pytest.raises(ValueError, match="profile has 5 entries for 6 layers"):
        PipelineModule(tied_specs(), 2, partition_method="profile", profile=profiles, rank=0)
    with pytest.raises(ValueError, match=r"needs profile=.* or profile_sample="):
        PipelineModule(tied_specs(), 2, partition_method="profile", rank=0)


def measured(fails: bool) -> list[int]:
    """The first rank measures; the other ranks' layers would say something else."""
    slow = torch.distributed.get_rank() * 3
    layers: list[Any] = [LayerSpec(Slow, 0.06 if index == slow else 0.002) for index in range(4)]
    sample = torch.ones(1, WIDTH + fails)
    return PipelineModule(layers, 2, partition_method="profile", profile_sample=sample).parts


def test_ranks_agree_on_what_one_has_measured(ranks: Launcher) -> None:
    assert ranks(2)(measured, False) == [[0, 1, 4]] * 2
    with pytest.raises(RankError, match=r"profiling layer 0 \(Slow\) failed") as caught:
        ranks(2)(measured, True)
    assert all(failure.kind == "raised" for failure in caught.value.failures.values())
