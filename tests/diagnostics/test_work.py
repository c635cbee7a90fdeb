"""Tokens and operations, against torch's own counter around a forward and a backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.models import CLASSES, IMAGE, build, loss_fn, make_batch
from zero_strategy.diagnostics.step_clock import FlopMeter, amount, peak_operations


def test_products_and_convolutions_count_as_torch_counts_them() -> None:
    model, batch = build("convnet"), make_batch("convnet", 1, 4)
    meter = FlopMeter(model)
    with meter.count(batch.inputs):
        loss_fn(model, batch)
    with FlopCounterMode(display=False) as counter:
        loss_fn(model, batch).backward()
    assert meter.operations(batch.inputs) == counter.get_total_flops() > 0


def test_attention_takes_two_products_forward_and_four_backward() -> None:
    query = torch.randn(2, 3, 8, 4, requires_grad=True)
    meter = FlopMeter(nn.Identity())
    with meter.count(query):
        nn.functional.scaled_dot_product_attention(query, query, query)
    assert meter.operations(query) == 3 * (2 * 2 * 2 * 3 * 8 * 8 * 4)


def test_what_is_frozen_or_computed_again_counts_as_little_as_it_should() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    layers[0].requires_grad_(False)
    inputs = torch.randn(4, 8)
    meter = FlopMeter(layers)
    with meter.count(inputs):
        hidden = layers[0](inputs)
        hidden = checkpoint(layers[1], hidden, use_reentrant=False)
        layers[2](hidden).sum().backward()
    product = 2 * 4 * 8 * 8
    assert meter.operations(inputs) == product * (1 + 2 + 3)  # the second needs no gradient of its input


def test_shapes_are_counted_once_and_others_by_their_size() -> None:
    layer, meter = nn.Linear(4, 4), FlopMeter(nn.Identity())
    for _ in range(2):
        with meter.count(torch.ones(2, 4)):
            layer(torch.ones(2, 4))
    assert meter.operations(torch.ones(2, 4)) == 2 * (2 * 2 * 4 * 4)  # forward, and the weight's gradient
    assert meter.operations(torch.ones(6, 4)) == 3 * (2 * (2 * 2 * 4 * 4))
    assert FlopMeter(layer).operations(torch.ones(2, 4)) is None


def test_a_compiled_module_is_left_to_its_compiler() -> None:
    layer = nn.Linear(4, 4)
    layer.compile(backend="eager")
    meter = FlopMeter(layer)
    with meter.count(torch.ones(2, 4)):
        nn.functional.linear(torch.ones(2, 4), layer.weight)
    assert meter.operations(torch.ones(2, 4)) is None


def test_tokens_and_samples_are_those_of_the_tensors() -> None:
    assert amount({"mask": torch.ones(3, 7, dtype=torch.bool), "ids": torch.zeros(3, 7, dtype=torch.long)}) == (21, 3)
    assert amount((torch.zeros(5, *IMAGE), torch.zeros(5, dtype=torch.long) + CLASSES)) == (None, 5)
    assert amount(None) == (None, None)


@pytest.mark.parametrize("measure", [False, True])
def test_what_a_processor_can_do_is_known_if_it_is_measured(measure: bool) -> None:
    found = peak_operations(torch.device("cpu"), torch.float32, measure=measure)
    assert found is None if not measure else (found is not None and 1e8 < found < 1e15)
