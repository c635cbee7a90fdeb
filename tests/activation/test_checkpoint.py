"""Gradients with and without checkpoints, bit by bit, for all options and kinds of arguments, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.activation.nets import OPTIONS, WIDTH, Block, Run, blocks, direct, tracker, value
from zero_strategy.activation.functional import Checkpointer
from zero_strategy.activation.rng import CudaRNGStatesTracker
from zero_strategy.activation.settings import ModelParallel

Result = list[Any]
ALONE = ModelParallel()


def gradients(*owners: nn.Module | Tensor) -> Result:
    found: Result = []
    for owner in owners:
        tensors = [owner] if isinstance(owner, Tensor) else list(owner.parameters())
        found += [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]
    return found


def stack(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layers = value(3, WIDTH), blocks(4, states)
    h = x
    for layer in layers:
        h = run(layer, h)
    h.square().sum().backward()
    return [h.detach(), *gradients(x, layers)]


def first_input_without_grad(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layers = value(3, WIDTH, grad=False), blocks(2, states)
    h = run(layers[1], run(layers[0], x))
    h.square().sum().backward()
    return [h.detach(), *gradients(layers)]


def frozen_with_adapters(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layers = value(3, WIDTH, grad=False), blocks(3, states, adapter=True)
    for parameter in layers[1].parameters():
        parameter.requires_grad_(False)  # one in the middle is frozen as a whole
    h = x
    for layer in layers:
        h = run(layer, h)
    h.square().sum().backward()
    return [h.detach(), *gradients(layers)]


def nothing_to_differentiate(run: Run, states: CudaRNGStatesTracker) -> Result:
    layer = blocks(1, states)[0].requires_grad_(False)
    out = run(layer, value(3, WIDTH, grad=False))
    return [out, out.requires_grad]


def kinds_of_arguments(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, scale, layer = value(3, WIDTH), value(WIDTH, seed=1), blocks(1, states)[0]
    mask = value(3, WIDTH, seed=2, grad=False) > 0
    table, index = nn.Parameter(value(5, WIDTH, seed=3, grad=False)), torch.tensor([4, 0, 4])
    seen = []

    def function(
        pair: tuple[Tensor, None], number: int, *rest: Any, how: dict[str, Any], word: str = ""
    ) -> dict[str, Any]:
        seen.append((number, rest, word, how["deep"][1]))
        h = layer(pair[0], mask, scale=how["deep"][0]) + table[index]
        return {"h": (h, h.sum()), "mask": mask, "none": pair[1], "number": number}

    out = run(function, (x * 1.0, None), 3, None, "text", how={"deep": [scale * 2, "x"]}, word="w")
    (out["h"][0] * out["h"][1]).sum().backward()
    assert set(seen) == {(3, (None, "text"), "w", "x")}
    return [out["h"][0].detach(), out["none"], out["number"], out["mask"], *gradients(x, scale, layer, table)]


def several_outputs(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layer = value(3, WIDTH), blocks(1, states)[0]
    first, second, third = run(lambda h: (layer(h), h.detach(), h * 2), x)
    (first * third).sum().backward()
    return [first.detach(), second, second.requires_grad, *gradients(x, layer)]


def nested(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layers = value(3, WIDTH), blocks(4, states)

    def half(h: Tensor, one: nn.Module, two: nn.Module) -> Any:
        return run(two, run(one, h))

    h = run(half, run(half, x, layers[0], layers[1]), layers[2], layers[3])
    h.square().sum().backward()
    return [h.detach(), *gradients(x, layers)]


def inside_torch_s_own(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layers = value(3, WIDTH), blocks(2)
    if run is direct:
        h = layers[1](layers[0](x))
    else:
        h = torch_checkpoint(lambda h: run(layers[1], run(layers[0], h)), x, use_reentrant=False)
    h.square().sum().backward()
    return [h.detach(), *gradients(x, layers)]


def in_place_on_its_input(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layer = value(3, WIDTH), blocks(1, states)[0]
    kept = run is not direct and run.__self__.kept is not None  # type: ignore[attr-defined]
    out = run(lambda h: layer(h.mul_(2.0) if kept or run is direct else h * 2.0), x * 1.0)
    out.square().sum().backward()
    return [out.detach(), *gradients(x, layer)]


def backward_twice(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layer = value(3, WIDTH), blocks(1, states)[0]
    out = run(layer, run(layer, x))
    out.square().sum().backward(retain_graph=True)
    out.sum().backward()
    return [out.detach(), *gradients(x, layer)]


def gradients_of_inputs_alone(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layer = value(3, WIDTH), blocks(1, states)[0]
    out = run(layer, run(layer, x))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x])]


def layouts(run: Run, states: CudaRNGStatesTracker) -> Result:
    """Transposed, sliced, expanded, channels last, the same one twice; 0-d and empty ones."""
    x, row, conv = value(WIDTH, 5), value(WIDTH, seed=1), nn.Conv2d(3, 3, 3)
    image = value(2, 3, 6, 6, seed=2).to(memory_format=torch.channels_last)
    found: Result = []
    with torch.no_grad():
        conv.weight.fill_(0.1)
        conv.bias.zero_()  # type: ignore[union-attr]

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor) -> Tensor:
        found.append((a.stride(), d.stride()))
        total = torch.tanh(a @ c.T).sum() + torch.tanh(b).square().sum() + (a * e).sum()
        return torch.dropout(total * f + g.sum() + conv(d).square().sum(), 0.1, True)

    a = (x * 1.0).t()
    out = run(function, a, (x * 2.0)[:, 1:4], row.expand(5, WIDTH), image * 1.0, a, x.sum(), x[:0])
    out.backward()
    assert len(set(found)) == 1
    return [out.detach(), *gradients(x, row, conv)]


def autocast(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layers = value(3, WIDTH), blocks(2, states)
    with torch.autocast("cpu", torch.bfloat16):
        h = run(layers[1], run(layers[0], x))
    h.float().square().sum().backward()
    return [h.detach(), *gradients(x, layers)]


def bfloat16(run: Run, states: CudaRNGStatesTracker) -> Result:
    x, layers = value(3, WIDTH).detach().bfloat16().requires_grad_(), blocks(2, states).bfloat16()
    h = run(layers[1], run(layers[0], x))
    h.square().sum().backward()
    return [h.detach(), *gradients(x, layers)]


CASES: list[Callable[[Run, CudaRNGStatesTracker], Result]] = [
    stack,
    first_input_without_grad,
    frozen_with_adapters,
    nothing_to_differentiate,
    kinds_of_arguments,
    several_outputs,
    nested,
    inside_torch_s_own,
    in_place_on_its_input,
    backward_twice,
    gradients_of_inputs_alone,
    layouts,
    autocast,
    bfloat16,
]


def played(case: Callable[[Run, CudaRNGStatesTracker], Result], run: Run, states: CudaRNGStatesTracker) -> Result:
    """Results, and the random states afterwards."""
    torch.manual_seed(1)
    return [*case(run, states), torch.get_rng_state(), *states.snapshot().values()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bits_are_those_without_checkpoints(case: Callable[[Run, CudaRNGStatesTracker], Result]) -> None:
    wanted = played(case, direct, tracker())
    for name, settings in OPTIONS.items():
        states = tracker()
        runner = Checkpointer(settings, ALONE, lambda: states)  # noqa: B023
        for _ in range(2):  # the second time in the memory of the first
            states.reset()
            states.add("model-parallel-rng", 5)
            found = played(case, runner.checkpoint, states)
            assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted), name
            assert runner.kept is None or runner.kept.kept_bytes == 0, name  # nothing is left behind


def test_compiled_blocks_and_a_compiled_model_around() -> None:
    """`torch.compile` of what is checkpointed, and of code that checkpoints (with a graph break where it must)."""

    def run(checkpoint: Run, compiled: bool, around: bool) -> Result:
        x, layers = value(3, WIDTH), blocks(2, p=0.0)  # compiled dropout draws other numbers than eager
        functions = [torch.compile(layer, backend=counting) if compiled else layer for layer in layers]

        def model(h: Tensor) -> Tensor:
            for function in functions:
                h = checkpoint(function, h)
            return h

        out = (torch.compile(model, backend="aot_eager") if around else model)(x)
        out.square().sum().backward()
        return [out.detach(), *gradients(x, layers)]

    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    wanted = run(direct, False, False)
    for name in ("none", "cpu", "contiguous on the cpu"):
        for compiled, around in ((True, False), (False, True)):
            found = run(Checkpointer(OPTIONS[name], ALONE).checkpoint, compiled, around)
            for a, b in zip(found, wanted, strict=True):
                assert torch.allclose(a, b, rtol=1e-6, atol=1e-6), (name, compiled, around)
            assert graphs or around, name  # what was compiled ran compiled
            graphs.clear()
            torch._dynamo.reset()


def test_without_gradients_nothing_is_kept() -> None:
    for settings in OPTIONS.values():
        runner = Checkpointer(settings, ALONE)
        layer = Block()
        with torch.no_grad():
            outs = [runner.checkpoint(layer, value(3, WIDTH)) for _ in range(6)]  # more than `num_checkpoints`
        assert not any(out.requires_grad for out in outs)
        assert runner.kept is None or runner.kept.reserved_bytes == 0


def test_an_input_that_was_modified_is_noticed_where_it_was_not_copied() -> None:
    x = value(3, WIDTH) * 1.0
    index = torch.tensor([0, 1])
    out = Checkpointer(OPTIONS["cpu"], ALONE).checkpoint(lambda h, rows: h[rows].tanh(), x, index)
    index.zero_()
    with pytest.raises(RuntimeError, match=r"shape \(2,\), was modified in place.*a copy"):
        out.sum().backward()
    x = value(3, WIDTH) * 1.0
    out = Checkpointer(OPTIONS["none"]).checkpoint(torch.tanh, x)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="checkpoint takes a function, not Tensor"):
        Checkpointer().checkpoint(torch.ones(1))  # type: ignore[arg-type]


def test_an_exception_in_the_function_leaves_nothing_behind() -> None:
    runner = Checkpointer(OPTIONS["contiguous"], ALONE)

    def fails(h: Tensor) -> Tensor:
        raise MemoryError

    for _ in range(9):
        with pytest.raises(MemoryError):
            runner.checkpoint(fails, value(3, WIDTH))
    assert runner.kept is not None and runner.kept.kept_bytes == 0
    runner.checkpoint(torch.tanh, value(3, WIDTH)).sum().backward()


def test_a_saved_tensor_may_be_looked_at_outside_of_a_backward() -> None:
    for settings in OPTIONS.values():
        out = Checkpointer(settings, ALONE).checkpoint(torch.tanh, value(3, WIDTH))
        assert torch.equal(out.grad_fn._saved_result, out)
        out.sum().backward()


def test_profile_counts_each_forward_and_backward_and_logs_them(caplog: pytest.LogCaptureFixture) -> None:
    runner = Checkpointer(OPTIONS["profile"], ALONE)
    caplog.set_level("INFO", "zero_strategy.activation.settings")
    layers = blocks(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for grad in (True, False):
            runner.checkpoint(layers[1], runner.checkpoint(layers[0], value(3, WIDTH, grad=grad))).sum().backward()
    timings = runner.timings
    assert (timings.forwards, timings.backwards) == (4, 4) and len(caplog.messages) == 8
    assert timings.forward_seconds > 0 and timings.backward_seconds > 0
    assert list(timings.as_metrics().values()) == [4, timings.forward_seconds, 4, timings.backward_seconds]
    timings.reset()
    assert timings.as_metrics() == dict.fromkeys(timings.as_metrics(), 0)
