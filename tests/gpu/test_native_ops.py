"""The CUDA kernels against their references: the same bits, on any stream, at any alignment, without waiting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import many_tensors
from tests.ops.cuda_on_host import OPS
from tests.ops.native import FLOATS, same_bits, spread
from tests.ops.test_optimizer_ops import CASES, Case, lamb_case, run
from zero_strategy import ops
from zero_strategy.ops import multi_tensor as mt
from zero_strategy.ops import optimizers as o

pytestmark = pytest.mark.gpu
SIZES = [0, 1, 7, 8, 9, 1000, 8192, 8193, 70_001]


@pytest.fixture(autouse=True)
def native() -> None:
    """Build and load the CUDA kernels; a machine without nvcc has nothing to compare."""
    status = ops.ensure("cuda")
    if status.path is None:
        pytest.skip(f"no native ops: {status.reason}")


def made(seed: int, dtype: torch.dtype, *, wild: bool = False, shift: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [spread(generator, n + shift, dtype, wild=wild).cuda()[shift:] for n in SIZES]


def arguments(case: Case, grad: torch.dtype, state: torch.dtype, *, wild: bool = False) -> list[list[Tensor]]:
    lists = [made(0, torch.float32, wild=wild), made(1, grad, wild=wild, shift=3)]
    for number in range(case.states):
        values = made(2 + number, state, wild=wild)
        lists.append([v.abs() for v in values] if case.positive and number == case.states - 1 else values)
    return lists


def test_every_op_has_a_kernel() -> None:
    report = dict(ops.ops_report("cuda"))
    assert all(report[name] == "native" for name in OPS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("state", FLOATS[:2])
def test_optimizers_give_the_bits_of_their_references(
    name: str, wild: bool, grad: torch.dtype, state: torch.dtype
) -> None:
    """On the GPU, and on the CPU."""
    case = CASES[name]
    lists = arguments(case, grad, state, wild=wild)
    for copy in (None, *FLOATS):
        copies = [] if copy is None else [torch.zeros(n, dtype=copy, device="cuda") for n in SIZES]
        ours = run(case.native, case, lists, copies)
        theirs = run(case.reference, case, lists, copies)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
        on_host = run(case.reference, case, [[t.cpu() for t in part] for part in lists], [c.cpu() for c in copies])
        assert all(same_bits(a.cpu(), b) for a, b in zip(ours, on_host, strict=True))


@pytest.mark.parametrize("state", FLOATS[:2])
def test_lamb_gives_the_bits_of_its_reference(state: torch.dtype) -> None:
    (params, grads, m, v), hyper = lamb_case(0, state)
    found = []
    for direction, apply in (
        (o._lamb_direction, o._lamb_apply),
        (o._lamb_direction_reference, o._lamb_apply_reference),
    ):
        p, g, first, second = ([t.cuda() for t in tensors] for tensors in (params, grads, m, v))
        copies = [torch.zeros(t.shape, dtype=torch.bfloat16, device="cuda") for t in p]
        sums = direction(p, g, first, second, hyper)
        assert sums.device.type == "cpu"
        apply(p, first, second, copies, hyper, torch.tensor([[0.01], [0.02], [0.03]], dtype=torch.float64))
        found.append(([*p, *first, *second, *copies], sums))
    assert all(same_bits(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.5, math.inf])
def test_grad_stats(dtype: torch.dtype, order: float) -> None:
    tensors = made(0, dtype)
    sums, counts = ops.grad_stats(tensors, order)
    expected, expected_counts = mt._grad_stats_reference(tensors, order)
    assert sums.is_cuda and counts.is_cuda
    torch.testing.assert_close(sums, expected, rtol=1e-13 if order in (1, 2, math.inf) else 1e-12, atol=0)
    assert torch.equal(counts, expected_counts)
    for _ in range(3):
        assert torch.equal(ops.grad_stats(tensors, order)[0], sums)
    for place in (0, 7, 8192, 70_000):
        tensors[-1][place] = math.nan
    sums, counts = ops.grad_stats(tensors, order)
    assert counts.tolist() == [0] * (len(SIZES) - 1) + [4] and sums[-1].isnan() and sums[:-1].isfinite().all()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("wild", [False, True])
def test_copies_and_sums_give_the_bits_of_their_references(
    source: torch.dtype, target: torch.dtype, shift: int, wild: bool
) -> None:
    inputs, second = made(0, source, wild=wild, shift=shift), made(1, target)
    offsets = [sum(SIZES[:i]) + 3 * i for i in range(len(SIZES))]
    results: list[list[Any]] = []
    for scale, axpby, accumulate, flatten, unflatten in (
        (mt._scale, mt._axpby, mt._accumulate, mt._flatten, mt._unflatten),
        (
            mt._scale_reference,
            mt._axpby_reference,
            mt._accumulate_reference,
            mt._flatten_reference,
            mt._unflatten_reference,
        ),
    ):
        outputs = [[torch.zeros(n, dtype=target, device="cuda") for n in SIZES] for _ in range(3)]
        sums = [tensor.clone() for tensor in second]
        counts = [scale(inputs, outputs[0], 0.3), axpby(inputs, second, outputs[1], 0.3, -2.0)]
        assert all(count.is_cuda for count in counts)
        accumulate(sums, inputs, 0.7)
        flat = torch.ones(offsets[-1] + SIZES[-1] + 5, dtype=target, device="cuda")
        flatten(inputs, flat, offsets, 0.5, shift > 0)
        unflatten(flat, outputs[2], offsets)
        results.append([*counts, *(t for part in outputs for t in part), *sums, flat])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_gpu_ops_every_number_is_converted_as_torch_does() -> None:
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16).cuda()
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 22,), device="cuda").to(torch.int32)
    ties = half.view(torch.float16).float().view(torch.int32) + 0x1000
    for dtype in (torch.float16, torch.bfloat16):
        wide = torch.empty(65536, device="cuda")
        ops.scale_([half.view(dtype)], [wide])
        assert same_bits(wide, half.view(dtype).float())
        for values in (bits.view(torch.float32), ties.view(torch.float32)):
            narrow = torch.empty(len(values), dtype=dtype, device="cuda")
            ops.scale_([values], [narrow])
            assert same_bits(narrow, values.to(dtype))


@pytest.mark.parametrize("check", ["check_optimizer", "check_moves", "check_statistics", "check_quantized"])
def test_more_tensors_than_a_table_holds(check: str) -> None:
    getattr(many_tensors, check)("cuda")


def test_gpu_ops_results_may_replace_their_inputs() -> None:
    (x,), (y,) = ([made(seed, torch.float32)[-1]] for seed in (0, 1))
    expected = x * 2 + y * 3
    ops.axpby_([x], [y], [y], 2.0, 3.0)
    assert torch.equal(y, expected)


def adam_arguments() -> dict[str, Any]:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    lists = {name: [t.abs() for t in made(seed, torch.float32)] for seed, name in enumerate(names)}
    row = [1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 1.0]
    return {**lists, "hyper": torch.tensor([row] * len(SIZES), dtype=torch.float64), "decoupled": True}


def test_work_goes_to_the_current_stream_and_waits_for_nothing() -> None:
    """A graph records what is enqueued on its stream, and refuses whatever would wait for the device."""
    expected, captured = adam_arguments(), adam_arguments()
    ops.adam_(**expected)
    sums, _ = ops.grad_stats(expected["params"])
    before = [p.clone() for p in captured["params"]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.adam_(**captured)
        recorded, _ = ops.grad_stats(captured["params"])
        count = ops.scale_(captured["params"], [torch.empty_like(p) for p in captured["params"]], 2.0)
    assert all(torch.equal(a, b) for a, b in zip(captured["params"], before, strict=True))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured["params"], expected["params"], strict=True))
    assert torch.equal(recorded, sums) and int(count) == 0


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x = torch.ones(1000, device="cuda:1")
    assert ops.scale_([x], [x], 3.0).device == x.device and torch.cuda.current_device() == 0
    assert bool((x == 3).all())


def test_gpu_ops_more_elements_than_fit_into_32_bits() -> None:
    numel = 2**31 + 8199
    if torch.cuda.mem_get_info()[0] < 8 * numel:
        pytest.skip("needs 16 GiB of free memory")
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[-9:] = 2
    y = torch.empty_like(x)
    assert int(ops.scale_([x], [y], 3.0)) == 0
    assert bool((y[-9:] == 6).all()) and not bool(y[:-9].any())
    sums, counts = ops.grad_stats([y])
    assert sums.tolist() == [9 * 36] and counts.tolist() == [0]
