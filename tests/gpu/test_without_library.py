"""A GPU without the native library: torch's own kernels, their bits and their number, and no waits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.ops.native import same_bits, spread
from zero_strategy import ops
from zero_strategy.ops import foreach, multi_tensor, optimizers
from zero_strategy.optim.exact_sum import rounded

pytestmark = pytest.mark.gpu
SIZES = (15, 0, 5_000_000, 1, 81, 3_000_001)
LOW = torch.bfloat16


def made(seed: int, dtype: torch.dtype = torch.float32, *, positive: bool = False) -> list[Tensor]:
    """On the host."""
    generator = torch.Generator().manual_seed(seed)
    found = [spread(generator, size, torch.float32) for size in SIZES]
    return [(each.abs() if positive else each).to(dtype) for each in found]


def table(row: list[float]) -> Tensor:
    return torch.tensor([row] * len(SIZES), dtype=torch.float64)


@contextmanager
def without_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_both(device: Callable[..., Any], reference: Callable[..., Any], lists: list[list[Tensor]], *rest: Any) -> None:
    """The device's bits are the host's."""
    there = [[tensor.cuda() for tensor in tensors] for tensors in lists]
    with without_waits():
        device(*there, *rest)
    here = copy.deepcopy(lists)
    reference(*here, *rest)
    for number, (mine, expected) in enumerate(zip(there, here, strict=True)):
        for a, b in zip(mine, expected, strict=True):
            assert same_bits(a.cpu(), b), f"list {number}, {int((a.cpu() != b).sum())} of {b.numel()} elements"


@pytest.mark.parametrize("gradients", [torch.float32, LOW])
@pytest.mark.parametrize("states", [torch.float32, LOW])
def test_steps_have_the_bits_of_the_references_on_the_host(gradients: torch.dtype, states: torch.dtype) -> None:
    first, second = made(2, states), made(3, states, positive=True)
    params, grads, low = made(0), made(1, gradients), made(4, LOW)
    on_both(foreach.lion, optimizers._lion_reference, [params, grads, first, low], table([1e-3, 0.9, 0.99, 0.1, 0.3]))
    rows = table([1e-3, 0.9, 0.1, 0.1, 0.0, 0.3])
    on_both(foreach.sgd, optimizers._sgd_reference, [params, grads, first, low], rows, True)
    rows = table([1e-3, 0.1, 1e-10, 0.1, 3, 0.3])
    on_both(foreach.adagrad, optimizers._adagrad_reference, [params, grads, second, low], rows)
    if states == LOW:
        rows = table([1e-3, 0.9, 0.99, 1e-8, 0.1, 3, 0.3])
        for decoupled in (True, False):
            lists = [params, grads, first, second, low]
            on_both(foreach.adam, optimizers._adam_reference, lists, rows, decoupled)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_gpu_without_library_adam_has_the_bits_of_torchs_fused_one(kind: type[torch.optim.Adam]) -> None:
    params, grads, first, second = ([t.cuda() for t in made(i, positive=i == 3)] for i in range(4))
    theirs = [torch.nn.Parameter(each.clone()) for each in params]
    optimizer = kind(theirs, lr=1e-3, weight_decay=0.1, fused=True)
    for parameter, gradient, moment, square in zip(theirs, grads, first, second, strict=True):
        parameter.grad = gradient.clone()
        state = {"step": torch.tensor(6.0).cuda(), "exp_avg": moment.clone(), "exp_avg_sq": square.clone()}
        optimizer.state[parameter] = state
    optimizer.step()
    with without_waits():
        foreach.adam(
            params, grads, first, second, [], table([1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 1.0]), kind is torch.optim.AdamW
        )
    assert all(same_bits(mine, parameter.detach()) for mine, parameter in zip(params, theirs, strict=True))


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_gpu_without_library_norms(order: float) -> None:
    tensors = [*made(0), *made(1, LOW)]
    expected, _ = multi_tensor._grad_stats_reference(tensors, order)
    there = [tensor.cuda() for tensor in tensors]
    sums, counts = foreach.stats_on_host(there, order)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0.0)
    assert not counts.any()
    there[2][5] = float("nan")
    there[-1][:3] = float("inf")
    _, counts = foreach.stats_on_host(there, order)
    assert counts.tolist() == [0, 0, 1, *[0] * (len(there) - 4), 3]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.5])
def test_exact_sums_of_a_gpu_are_those_of_the_cpu(order: float) -> None:
    tensors = [*made(0), *made(1, LOW), made(2)[2].double()]
    factors = [1.0 if index % 2 else 0.25 for index in range(len(tensors))]
    expected, _ = ops.exact_sums(tensors, order, factors)
    there = [tensor.cuda() for tensor in tensors]
    with without_waits():
        found, flags = ops.exact_sums_and_flags(there, order, factors)
    assert found.is_cuda and not flags.any()
    assert [rounded(row) for row in found.cpu()] == [rounded(row) for row in expected]
    there[2][5] = float("nan")
    digits, counts = ops.exact_sums_on_host(there, order, factors)
    assert counts.tolist() == [0, 0, 1, *[0] * (len(there) - 3)] and not rounded(digits[2]) < float("inf")


def kernels(call: Callable[[], object]) -> int:
    """Kernels that a call launches."""
    call()  # memory and modules are there from now on
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if "LaunchKernel" in event.key)


def test_kernels_are_no_more_than_torchs() -> None:
    """130 million elements in 60 parameters."""
    sizes = [*[2048 * 512] * 59, 2048 * 32_000]
    params, grads, first, second = ([torch.full((size,), 0.1).cuda() for size in sizes] for _ in range(4))
    theirs = [torch.nn.Parameter(each) for each in params]
    for parameter, gradient in zip(theirs, grads, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.AdamW(theirs, fused=True)
    rows = torch.tensor([[1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 1.0]] * len(sizes), dtype=torch.float64)
    norm = kernels(lambda: foreach.stats_on_host(grads, 2.0))
    step = kernels(lambda: foreach.adam(params, grads, first, second, [], rows, True))
    torch_norm = kernels(lambda: torch.nn.utils.get_total_norm(grads, foreach=True))
    torch_step = kernels(optimizer.step)
    assert torch_step > 2, "kernels are counted"
    assert norm <= 1.1 * torch_norm and step <= 1.1 * torch_step, (norm, torch_norm, step, torch_step)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    foreach.adam(params, grads, first, second, [], rows, True)
    foreach.stats_on_host(grads, 2.0)
    assert torch.cuda.max_memory_allocated() - held < 1 << 20
