"""linear_cross_entropy is cross_entropy of logits, without logits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.transformer_layer import peak_bytes
from zero_strategy.sequence.tiling import linear_cross_entropy

TOKENS, WIDTH, CLASSES = (3, 7), 8, 29
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def inputs(dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*TOKENS, WIDTH), (CLASSES, WIDTH), *([(CLASSES,)] if bias else [])]
    target = torch.randint(CLASSES, TOKENS, generator=generator)
    target[0, 2] = target[2, 6] = -100
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes], target


def exact(leaves: list[Tensor], target: Tensor, reduction: str, smoothing: float, z_loss: float) -> Tensor:
    logits = F.linear(*leaves)
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), label_smoothing=smoothing, reduction="none")
    counted = target.flatten() != -100
    losses = losses + z_loss * logits.flatten(0, -2).logsumexp(-1).square() * counted
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def near(a: Tensor, b: Tensor, error: float) -> bool:
    return float((a.double() - b.double()).norm() / b.double().norm()) <= error


@pytest.mark.parametrize("dtype", ERROR)
def test_loss_and_gradients_are_those_of_logits(dtype: torch.dtype) -> None:
    options = product(("mean", "sum", "none"), (0.0, 0.1, 1.0), (0.0, 0.01), (False, True), (1, 4, 100, None))
    for reduction, smoothing, z_loss, bias, chunk in options:
        leaves, target = inputs(dtype, bias)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = exact(wide, target, reduction, smoothing, z_loss)
        found = linear_cross_entropy(
            leaves[0], leaves[1], target, *leaves[2:], reduction=reduction, label_smoothing=smoothing, z_loss=z_loss,
            chunk_size=chunk,
        )  # fmt: skip
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert near(found.detach(), expected.detach(), ERROR[dtype])
        upstream = torch.linspace(0.5, 2.0, found.numel()).view(found.shape)
        ours = torch.autograd.grad(found, leaves, upstream)
        theirs = torch.autograd.grad(expected, wide, upstream.double())
        for leaf, a, b in zip(leaves, ours, theirs, strict=True):
            assert a.dtype == leaf.dtype and a.shape == leaf.shape and near(a, b, ERROR[dtype])


def test_peak_memory_at_a_vocabulary_of_32k_is_a_quarter() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=generator).requires_grad_() for rows in (1024, 32_000))
    target = torch.randint(32_000, (1024,), generator=generator)
    results: dict[str, Any] = {}

    def plain() -> None:
        loss = F.cross_entropy(F.linear(hidden, weight), target)
        results["plain"] = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def ours() -> None:
        loss = linear_cross_entropy(hidden, weight, target)
        results["ours"] = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    peaks = [peak_bytes(step, "cpu") for step in (ours, plain)]
    assert peaks[1] >= 2 * 1024 * 32_000 * 4  # what is measured is what torch takes
    assert peaks[0] <= 0.25 * peaks[1], peaks
    for a, b in zip(results["ours"], results["plain"], strict=True):
        assert near(a, b, 1e-6)


def test_only_what_is_asked_for_is_computed() -> None:
    leaves, target = inputs(torch.float32, bias=True)
    hidden, weight, bias = leaves
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target, bias).requires_grad
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, bias), leaves)
    for reduction in ("mean", "none"):
        for place, leaf in enumerate(leaves):
            given = [each if each is leaf else each.detach() for each in leaves]
            loss = linear_cross_entropy(given[0], given[1], target, given[2], reduction=reduction)
            (gradient,) = torch.autograd.grad(loss.sum() / (1 if reduction == "mean" else 19), leaf)
            assert near(gradient, whole[place], 1e-6)


def test_a_loss_scale_reaches_half_precision_before_anything_is_lost() -> None:
    """A mean over many tokens has gradients below float16's smallest number."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(rows, 8, generator=generator).half().requires_grad_() for rows in (4096, 50)]
    target = torch.randint(50, (4096,), generator=generator)
    scale = 2.0**14
    ours = torch.autograd.grad(linear_cross_entropy(leaves[0], leaves[1], target) * scale, leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    theirs = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target) * scale, wide)
    assert all(near(a, b, 2e-3) for a, b in zip(ours, theirs, strict=True))


def test_backward_twice_and_without_targets() -> None:
    leaves, target = inputs(torch.float32, bias=False)
    loss = linear_cross_entropy(leaves[0], leaves[1], target)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(*both) for both in zip(first, torch.autograd.grad(loss, leaves), strict=True))
    nothing = linear_cross_entropy(leaves[0], leaves[1], torch.full(TOKENS, -100))
    assert nothing.isnan()  # as torch's
    assert all(not gradient.any() for gradient in torch.autograd.grad(nothing, leaves))
    assert float(linear_cross_entropy(leaves[0][:0], leaves[1], target[:0], reduction="sum").detach()) == 0


def test_vocabulary_loss_second_derivative_is_refused() -> None:
    leaves, target = inputs(torch.float32, bias=False)
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(*leaves, target, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
            torch.autograd.grad(loss, leaves, create_graph=True)


def test_another_ignore_index() -> None:
    leaves, target = inputs(torch.float32, bias=False)
    target = target.where(target != -100, 3)
    loss = linear_cross_entropy(leaves[0], leaves[1], target, ignore_index=3)
    expected = F.cross_entropy(F.linear(*leaves).flatten(0, 1), target.flatten(), ignore_index=3)
    assert near(loss.detach(), expected.detach(), 1e-6)


def test_vocabulary_loss_compiling_breaks_no_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    leaves, target = inputs(torch.float32, bias=True)
    for reduction in ("mean", "none"):
        results = []
        for function in (linear_cross_entropy, compiled):
            loss = function(leaves[0], leaves[1], target, leaves[2], reduction=reduction, chunk_size=8).sum()
            results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        assert all(near(a, b, 1e-6) for a, b in zip(*results, strict=True))


def test_wrong_arguments_are_named() -> None:
    (hidden, weight), target = inputs(torch.float32, bias=False)
    for error, message, arguments, options in (
        (ValueError, "weight must have shape", (hidden, weight.t(), target), {}),
        (TypeError, "weight is torch.bfloat16, but hidden is torch.float32", (hidden, weight.bfloat16(), target), {}),
        (ValueError, r"target has shape \(3,\); accepted: hidden's, \(3, 7\)", (hidden, weight, target[:, 0]), {}),
        (TypeError, "target is torch.float32; accepted: torch.int64", (hidden, weight, target.float()), {}),
        (ValueError, r"bias has shape \(8,\); accepted: \(29,\)", (hidden, weight, target, weight[0]), {}),
        (ValueError, "reduction is 'max'; accepted: 'mean', 'sum'", (hidden, weight, target), {"reduction": "max"}),
        (ValueError, "label_smoothing is 2; accepted: 0 to 1", (hidden, weight, target), {"label_smoothing": 2}),
        (ValueError, "chunk_size is 0; accepted: 1", (hidden, weight, target), {"chunk_size": 0}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            linear_cross_entropy(*arguments, **options)
