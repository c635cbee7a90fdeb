"""Weight gradients that were put off, against autograd's. With several ranks: `tests/compat/megatron`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.comm.pretended import pretend
from zero_strategy.compat.megatron.gradients import (
    drain_embedding_wgrad_compute,
    prepare_input_tensors_for_wgrad_compute,
)

CONFIG = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=True)


def embedding(main: torch.dtype = torch.float32) -> nn.Parameter:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 4))
    weight.main_grad = torch.full((7, 4), 0.5, dtype=main)  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize("micro_batches", [0, 1, 2, 5])
def test_put_off_gradients_are_autograd_s(micro_batches: int) -> None:
    weight = embedding()
    inputs = [torch.randn(3, 2, 4) for _ in range(micro_batches)]
    gradients = [torch.randn(2, 3, 7).transpose(0, 1) for _ in range(micro_batches)]  # not contiguous
    for one, gradient in zip(inputs, gradients, strict=True):
        nn.functional.linear(one, weight).backward(gradient)
    wanted = 0.5 + (torch.zeros(7, 4) if weight.grad is None else weight.grad)
    drain_embedding_wgrad_compute(CONFIG, inputs, gradients, weight, None)
    torch.testing.assert_close(weight.main_grad, wanted)  # type: ignore[attr-defined]
    assert inputs == [] and gradients == []


def test_low_precision_is_accumulated_in_the_main_gradient_s() -> None:
    weight = embedding()
    inputs, gradients = [torch.randn(5, 4).bfloat16()] * 3, [torch.randn(5, 7).bfloat16()] * 3
    wanted = 0.5 + 3 * gradients[0].float().t() @ inputs[0].float()
    drain_embedding_wgrad_compute(CONFIG, inputs, gradients, weight, None)
    torch.testing.assert_close(weight.main_grad, wanted)  # type: ignore[attr-defined]


def test_tensors_for_the_product_are_contiguous_matrices() -> None:
    gradient, one = torch.randn(2, 3, 7).transpose(0, 1), torch.randn(3, 2, 4)
    left, right = prepare_input_tensors_for_wgrad_compute(gradient, one)
    assert left.is_contiguous() and right.is_contiguous()
    assert torch.equal(left, gradient.flatten(0, 1)) and torch.equal(right, one.flatten(0, 1))
    flat = prepare_input_tensors_for_wgrad_compute(left, right)
    assert flat[0].data_ptr() == left.data_ptr() and flat[1].data_ptr() == right.data_ptr()  # no copies
    with pytest.raises(ValueError, match=r"shape \[3, 7\] has 3 rows, but the input of shape \[3, 2, 4\] has 6"):
        prepare_input_tensors_for_wgrad_compute(torch.zeros(3, 7), one)


def test_what_cannot_be_drained_is_refused_before_anything_is_done() -> None:
    weight, inputs, gradients = embedding(), [torch.zeros(2, 4)], [torch.zeros(2, 7)]
    off = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=False)
    with pytest.raises(ValueError, match="gradient_accumulation_fusion=False"):
        drain_embedding_wgrad_compute(off, inputs, gradients, weight, None)
    with pytest.raises(ValueError, match="1 inputs in embedding_activation_buffer, but 2 gradients"):
        drain_embedding_wgrad_compute(CONFIG, inputs, gradients * 2, weight, None)
    with pytest.raises(ValueError, match=r"shape \[7, 4\] needs a main_grad of that shape; it has none"):
        drain_embedding_wgrad_compute(CONFIG, inputs, gradients, nn.Parameter(torch.zeros(7, 4)), None)
    assert len(inputs) == len(gradients) == 1
    with pretend(0, 2):  # ranks that do not share a sequence have nothing to gather
        drain_embedding_wgrad_compute(CONFIG, inputs, gradients, weight, torch.distributed.group.WORLD)
