"""Optimizer kernels against their references (same bits), float64 and torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, need_native, same_bits, spread
from zero_strategy import ops
from zero_strategy.ops import optimizers as o

Call = Callable[..., Any]


@dataclass
class Case:
    """One call: `states` tensors of optimizer state per segment."""

    native: Call
    reference: Call
    states: int
    row: Callable[[int], tuple[float, ...]]
    flags: tuple[bool, ...] = ()
    positive: bool = field(default=False)


def _adam_row(segment: int) -> tuple[float, ...]:
    return (1e-3 * (segment + 1), 0.9, 0.999, 1e-8, 0.1 * (segment % 2), 1 + 7 * segment, 0.25)


CASES = {
    "adam": Case(o._adam, o._adam_reference, 2, _adam_row, (False,), True),
    "adamw": Case(o._adam, o._adam_reference, 2, _adam_row, (True,), True),
    "lion": Case(o._lion, o._lion_reference, 1, lambda s: (1e-3, 0.9, 0.99, 0.1 * s, -0.5)),
    "adagrad": Case(
        o._adagrad, o._adagrad_reference, 1, lambda s: (0.1, 0.01 * s, 1e-10, 0.1 * s, 1 + s, 0.5), (), True
    ),
    "sgd": Case(o._sgd, o._sgd_reference, 0, lambda s: (0.1, 0.0, 0.0, 0.1 * s, 0, 0.5), (False,)),
    "momentum": Case(o._sgd, o._sgd_reference, 1, lambda s: (0.1, 0.9, 0.1, 0.1 * s, s % 2, 0.5), (False,)),
    "nesterov": Case(o._sgd, o._sgd_reference, 1, lambda s: (0.1, 0.9, 0.0, 0.1 * s, s % 2, 0.5), (True,)),
}


def run(call: Call, case: Case, tensors: list[list[Tensor]], copies: list[Tensor]) -> list[Tensor]:
    """All that a call leaves behind; the given tensors stay as they are."""
    params, grads, *states = tensors
    params, states = [p.clone() for p in params], [[s.clone() for s in state] for state in states]
    copies = [c.clone() for c in copies]
    hyper = torch.tensor([case.row(s) for s in range(len(params))], dtype=torch.float64)
    lists: list[Any] = [params, grads, *states]
    if case.native is o._sgd and not states:
        lists.append([])
    call(*lists, copies, hyper, *case.flags)
    return [*params, *copies, *(value for state in states for value in state)]


@pytest.mark.parametrize("name", CASES)
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 15, 16, 17, 1000, 1024, 1025, 33_000]), min_size=1, max_size=4),
    grad=st.sampled_from(FLOATS),
    state=st.sampled_from(FLOATS[:2]),
    copy=st.sampled_from((None, *FLOATS)),
    shift=st.integers(0, 3),
    wild=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_optimizer_ops_kernel_and_reference_give_the_same_bits(
    name: str, sizes: list[int], grad: torch.dtype, state: torch.dtype, copy: Any, shift: int, wild: bool, seed: int
) -> None:
    need_native()
    case = CASES[name]
    generator = torch.Generator().manual_seed(seed)

    def tensors(dtype: torch.dtype, positive: bool = False) -> list[Tensor]:
        made = [spread(generator, n + shift, dtype, wild=wild)[shift:] for n in sizes]  # `shift`: unaligned starts
        return [t.abs() for t in made] if positive else made

    lists = [tensors(torch.float32), tensors(grad)]
    lists += [tensors(state, case.positive and number == case.states - 1) for number in range(case.states)]
    copies = [] if copy is None else [torch.zeros(n, dtype=copy) for n in sizes]
    for ours, theirs in zip(
        run(case.native, case, lists, copies), run(case.reference, case, lists, copies), strict=True
    ):
        assert same_bits(ours, theirs)


def lamb_case(seed: int, state: torch.dtype = torch.float32) -> tuple[list[list[Tensor]], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 1000, 70_000]
    lists = [[spread(generator, n, dtype) for n in sizes] for dtype in (torch.float32, torch.bfloat16, state)]
    lists.append([spread(generator, n, state).abs() for n in sizes])
    return lists, torch.tensor([_adam_row(s) for s in range(3)], dtype=torch.float64)


def test_lamb_kernel_and_reference_agree() -> None:
    need_native()
    (params, grads, m, v), hyper = lamb_case(0)
    found = []
    for direction, apply in (
        (o._lamb_direction, o._lamb_apply),
        (o._lamb_direction_reference, o._lamb_apply_reference),
    ):
        p, first, second = ([t.clone() for t in tensors] for tensors in (params, m, v))
        copies = [torch.zeros(t.shape, dtype=torch.bfloat16) for t in p]
        sums = direction(p, grads, first, second, hyper)
        rates = torch.tensor([[0.01], [0.02], [0.03]], dtype=torch.float64)
        apply(p, first, second, copies, hyper, rates)
        found.append(([*p, *first, *second, *copies], sums))
    assert all(same_bits(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-13, atol=0)


def test_lamb_follows_the_paper_in_float64() -> None:
    need_native()
    generator = torch.Generator().manual_seed(3)
    p, g = torch.randn(500, generator=generator), torch.randn(500, generator=generator)
    m, v = torch.zeros(500), torch.zeros(500)
    wide = p.double()
    m64, v64 = torch.zeros(500, dtype=torch.float64), torch.zeros(500, dtype=torch.float64)
    for step in range(1, 6):
        hyper = torch.tensor([[0.01, 0.9, 0.999, 1e-6, 0.1, step, 1.0]], dtype=torch.float64)
        sums = ops.lamb_direction_([p], [g], [m], [v], hyper)
        ops.lamb_apply_([p], [m], [v], hyper, ops.lamb_rates(sums, hyper))
        m64, v64 = 0.9 * m64 + 0.1 * g.double(), 0.999 * v64 + 0.001 * g.double() ** 2
        u = m64 / (1 - 0.9**step) / ((v64 / (1 - 0.999**step)).sqrt() + 1e-6) + 0.1 * wide
        wide = wide - 0.01 * wide.norm() / u.norm() * u
    torch.testing.assert_close(p.double(), wide, rtol=1e-5, atol=1e-6)


def test_a_parameter_in_pieces_takes_the_same_lamb_step() -> None:
    need_native()
    (params, grads, m, v), hyper = lamb_case(1)
    p, g, first, second = params[2], grads[2], m[2], v[2]
    row = hyper[2:3]

    def step(cuts: list[int]) -> Tensor:
        pieces = [list(torch.tensor_split(t.clone(), cuts)) for t in (p, g, first, second)]
        table = row.repeat(len(cuts) + 1, 1)
        sums = ops.lamb_direction_(*pieces, table)
        whole = sums.sum(0, keepdim=True).expand_as(sums).contiguous()
        ops.lamb_apply_(pieces[0], pieces[2], pieces[3], table, ops.lamb_rates(whole, table))
        return torch.cat(pieces[0])

    torch.testing.assert_close(step([]), step([33_333, 50_000]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_hundred_steps_stay_within_rounding_of_torch(decoupled: bool) -> None:
    need_native()
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10_000, generator=generator)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    wide, theirs = start.double().requires_grad_(), start.clone().requires_grad_()
    optimizers = [kind([p], lr=1e-3, weight_decay=0.1) for p in (wide, theirs)]
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 101):
        gradient = torch.randn(10_000, generator=generator)
        wide.grad, theirs.grad = gradient.double(), gradient
        for optimizer in optimizers:
            optimizer.step()
        hyper = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.1, step, 1.0]], dtype=torch.float64)
        ops.adam_([p], [gradient], [m], [v], hyper, decoupled=decoupled)
    exact = wide.detach()
    error, their_error = ((x.double() - exact).abs().max() for x in (p, theirs.detach()))
    assert error <= 2 * their_error + 1e-9, (error, their_error)


@pytest.mark.parametrize("copy", FLOATS)
def test_copies_of_a_large_call_are_written_past_the_caches(copy: torch.dtype) -> None:
    """The same bits as in pieces, which are written as usual; places before and after stay as they are."""
    need_native()
    sizes = [(1 << 22) + 77, 1, 63, 64, 131]
    for shift in (0, 1, 5):
        generator = torch.Generator().manual_seed(shift)
        params, grads, m, v = ([torch.randn(n, generator=generator) for n in sizes] for _ in range(4))
        v = [t.abs() for t in v]
        wholes = [torch.full((n + 40,), 7.0, dtype=copy) for n in sizes]
        copies = [whole[shift : shift + n] for whole, n in zip(wholes, sizes, strict=True)]
        hyper = torch.tensor([_adam_row(s) for s in range(len(sizes))], dtype=torch.float64)
        ops.adam_(params, grads, m, v, hyper, decoupled=True, copies=copies)
        assert all(same_bits(c, p.to(copy)) for c, p in zip(copies, params, strict=True))
        assert all((w[:shift] == 7).all() and (w[shift + n :] == 7).all() for w, n in zip(wholes, sizes, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_segments_of_their_own(name: str) -> None:
    need_native()
    case, generator = CASES[name], torch.Generator().manual_seed(0)
    sizes = [1 + 7 * (number % 13) for number in range(1000)]
    lists = [[spread(generator, n, torch.float32).abs() for n in sizes] for _ in range(2 + case.states)]
    found, expected = (run(call, case, lists, []) for call in (case.native, case.reference))
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", [*CASES, "lamb"])
def test_optimizer_ops_pass_opcheck(name: str, native: bool) -> None:
    if native:
        need_native()
    space, lists = torch.ops.zero_strategy, [[torch.rand(33), torch.rand(5)] for _ in range(4)]
    copies = [torch.zeros(33, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16)]
    if name == "lamb":
        hyper = torch.tensor([_adam_row(0), _adam_row(1)], dtype=torch.float64)
        torch.library.opcheck(space.lamb_direction_.default, (*lists, hyper))
        rates = torch.ones(2, 1, dtype=torch.float64)
        torch.library.opcheck(space.lamb_apply_.default, (lists[0], *lists[2:], copies, hyper, rates))
        return
    case = CASES[name]
    hyper = torch.tensor([case.row(0), case.row(1)], dtype=torch.float64)
    op = {"adamw": "adam_", "momentum": "sgd_", "nesterov": "sgd_"}.get(name, f"{name}_")
    states: list[Any] = lists[2 : 2 + case.states] or [[]]
    torch.library.opcheck(getattr(space, op).default, (*lists[:2], *states, copies, hyper, *case.flags))


def adam_arguments() -> dict[str, Any]:
    lists = {name: [torch.ones(4), torch.ones(2, 3)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    return {**lists, "hyper": torch.tensor([_adam_row(0)] * 2, dtype=torch.float64), "decoupled": True}


def test_adam_compiles() -> None:
    def step(arguments: dict[str, Any]) -> Tensor:
        ops.adam_(**arguments)
        total: Tensor = arguments["params"][0] + 1
        return total

    eager, traced = adam_arguments(), adam_arguments()
    expected = step(eager)
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(traced), expected)
    assert torch.equal(eager["params"][1], traced["params"][1])


def _overlap(arguments: dict[str, Any]) -> None:
    memory = torch.ones(6)
    arguments["params"][0], arguments["exp_avgs"][0] = memory[:4], memory[2:]


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "dtype of a parameter": (lambda a: a["params"].__setitem__(0, torch.ones(4).double()), TypeError, r"params\[0\]"),
    "dtype of a moment": (lambda a: a["exp_avgs"].__setitem__(1, torch.ones(2, 3).half()), TypeError, r"exp_avgs\[1\]"),
    "size": (lambda a: a["grads"].__setitem__(1, torch.ones(5)), ValueError, r"grads\[1\] has 5 elements.*params\[1\]"),
    "length": (lambda a: a["exp_avg_sqs"].pop(), ValueError, "exp_avg_sqs has 1 tensors, but params has 2"),
    "strides": (lambda a: a["grads"].__setitem__(1, torch.ones(3, 2).t()), ValueError, r"grads\[1\].*contiguous"),
    "device": (lambda a: a["grads"].__setitem__(0, torch.ones(4, device="meta")), ValueError, r"grads\[0\] is on meta"),
    "overlap": (_overlap, ValueError, r"overlaps"),
    "same twice": (lambda a: a["params"].__setitem__(0, a["exp_avgs"][0]), ValueError, "overlaps"),
    "hyper dtype": (lambda a: a.__setitem__("hyper", a["hyper"].float()), TypeError, "hyper must be a float64"),
    "hyper shape": (lambda a: a.__setitem__("hyper", a["hyper"][:1]), ValueError, r"hyper.*\(2, 7\)"),
    "copies": (lambda a: a.__setitem__("copies", [torch.ones(4)]), ValueError, "copies has 1 tensors"),
    "no tensor": (lambda a: a["grads"].__setitem__(0, [1.0]), TypeError, r"grads\[0\] must be a tensor, not list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_touched(name: str) -> None:
    spoil, error, message = BAD[name]
    arguments = adam_arguments()
    params = [p.clone() for p in arguments["params"]]
    before = arguments["params"][1]
    spoil(arguments)
    with pytest.raises(error, match=message):
        ops.adam_(**arguments)
    assert torch.equal(before, params[1])
