"""Places of kept inputs, counted in bytes, in one process; what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.activation.nets import value
from zero_strategy.activation.functional import Checkpointer
from zero_strategy.activation.kept_inputs import ContiguousMemory, HostArena, LeavingMemory
from zero_strategy.activation.settings import CheckpointSettings, ModelParallel

ALONE = ModelParallel()
CPU = torch.device("cpu")
INPUT = 4 * 64 * 4
"""Bytes of an input of the tests."""


def runner(**options: Any) -> Checkpointer:
    return Checkpointer(CheckpointSettings(**options), ALONE)


def forward(run: Checkpointer, layers: int, *shape: int) -> Tensor:
    h = value(*(shape or (4, 64)))
    for _ in range(layers):
        h = run.checkpoint(torch.tanh, h)
    return h


def kept(run: Checkpointer) -> tuple[int, int]:
    """Bytes that graphs need, bytes that outlast them."""
    assert run.kept is not None
    return run.kept.kept_bytes, run.kept.reserved_bytes


class Queue:
    """A stream whose copies are over when the test says so."""

    over = False

    def record_event(self) -> Queue:
        return self

    def query(self) -> bool:
        return self.over


def arena_with_a_copy_under_way(queue: Queue) -> tuple[HostArena, LeavingMemory]:
    """Memory of 4096 bytes that has just been given back."""
    leaving = LeavingMemory(lambda: [queue])
    arena = HostArena(leaving)
    arena.free(arena.take(4096, CPU, ""))
    return arena, leaving


def test_host_memory_is_not_unmapped_under_a_copy() -> None:
    """Neither where a larger record takes its place nor where nobody keeps inputs any more."""
    for end in (lambda arena: arena.take(8192, CPU, ""), HostArena.close):
        queue = Queue()
        arena, leaving = arena_with_a_copy_under_way(queue)
        memory = weakref.ref(arena._free[False][0])
        end(arena)
        gc.collect()
        assert memory() is not None
        queue.over = True
        leaving.look()
        gc.collect()
        assert memory() is None


def test_the_contiguous_buffer_of_the_host_is_not_unmapped_under_a_copy() -> None:
    queue = Queue()
    leaving = LeavingMemory(lambda: [queue])
    kept = ContiguousMemory(1, True, leaving)
    lent = kept.take(4096, CPU, "a")
    memory = weakref.ref(kept._host)
    kept.free(lent)
    lent = kept.take(4096, CPU, "another")
    kept.close()  # while a graph has a record in it
    assert kept.reserved_bytes
    gc.collect()
    assert memory() is not None and len(leaving._waiting) == 1
    kept.free(lent)
    assert len(leaving._waiting) == 2 and not kept.reserved_bytes
    queue.over = True
    leaving.look()
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("on_host", [False, True])
def test_the_contiguous_buffer_is_num_checkpoints_inputs_and_nothing_else(on_host: bool) -> None:
    run = runner(
        partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3, checkpoint_in_cpu=on_host
    )
    for step in range(3):
        out = forward(run, 2)
        assert kept(run) == (2 * INPUT, 3 * INPUT)
        out = run.checkpoint(torch.tanh, out)
        assert kept(run) == (3 * INPUT, 3 * INPUT)
        assert run.kept is not None
        places = {record._memory.untyped_storage().data_ptr() for record in run.kept._records}
        assert len(places) == 1, step  # one buffer
        with pytest.raises(ValueError, match=r"num_checkpoints = 3 layers, and one more came; accepted: .*reset\(\)"):
            run.checkpoint(torch.tanh, out)
        out.sum().backward()
        del out
        assert kept(run) == (0, 3 * INPUT)


def test_inputs_in_the_contiguous_buffer_are_of_one_kind_at_a_time() -> None:
    run = runner(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    out = forward(run, 1)
    with pytest.raises(ValueError, match=r"contiguous_checkpointing .*float32 \[5, 64\].* after .*float32 \[4, 64\]"):
        forward(run, 1, 5, 64)
    out.sum().backward()
    del out
    forward(run, 2, 5, 64).sum().backward()  # a shorter or longer batch in the next step is fine
    assert kept(run) == (0, 2 * 5 * 64 * 4)


def test_reset_lets_forwards_follow_each_other_without_a_backward() -> None:
    run = runner(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    outs = []
    for _ in range(3):
        outs.append(forward(run, 2))
        run.reset()
        assert kept(run)[1] == 0
    forward(run, 2).sum().backward()
    x = value(4, 64)
    again = run.checkpoint(torch.tanh, x)
    run.reset()
    again.sum().backward()  # the graph still has what it needs
    plain = value(4, 64)
    torch.tanh(plain).sum().backward()
    assert x.grad is not None and plain.grad is not None and torch.equal(x.grad, plain.grad)


def test_inputs_on_the_host_are_fetched_one_layer_ahead_and_their_memory_is_used_again() -> None:
    run = runner(checkpoint_in_cpu=True)
    ahead: list[int] = []

    def layer(h: Tensor) -> Tensor:
        assert run.kept is not None
        ahead.append(sum(record._ahead is not None for record in run.kept._records))
        return torch.tanh(h)

    for step in range(2):
        h = value(4, 64)
        for _ in range(4):
            h = run.checkpoint(layer, h)
        assert kept(run)[0] == 4 * INPUT
        assert run.kept is not None and run.kept.prefetches == 3 * step
        ahead.clear()
        h.sum().backward()
        assert ahead == [1, 1, 1, 0]  # while a layer is computed again, the one before it is there already
        del h
        assert kept(run) == (0, 4 * 4096)  # whole pages, no powers of two, no more in the second step
    assert run.kept.prefetches == 6
    run.reset()
    assert kept(run) == (0, 0)


def test_host_memory_does_not_grow_with_the_number_of_different_sizes() -> None:
    run = runner(checkpoint_in_cpu=True)
    for length in (64, 2048, 512, 4096, 1024):
        forward(run, 3, 4, length).sum().backward()
    assert kept(run) == (0, 3 * 4 * 4096 * 4)


@pytest.mark.parametrize("on_host", [False, True])
def test_the_input_itself_is_gone_once_it_is_kept_elsewhere(on_host: bool) -> None:
    run = runner(checkpoint_in_cpu=on_host)
    memory = np.ones((4, 64), dtype=np.float32)
    alive = weakref.ref(memory)
    weight = torch.ones(64, requires_grad=True)
    x = torch.from_numpy(memory)
    out = run.checkpoint(lambda h: torch.tanh(h * weight), x)
    del x, memory
    assert (alive() is None) is on_host
    out.sum().backward()
    del out
    assert alive() is None


def test_parameters_integers_and_masks_stay_where_they_are() -> None:
    run = runner(checkpoint_in_cpu=True)
    weight = torch.nn.Parameter(torch.ones(64))
    mask, index = torch.ones(4, 64, dtype=torch.bool), torch.arange(4)
    out = run.checkpoint(lambda x, w, m, i: (torch.tanh(x * w) * m)[i], value(4, 64), weight, mask, index)
    assert kept(run)[0] == INPUT
    out.sum().backward()
    assert weight.grad is not None


def test_checkpoints_inside_of_others_keep_nothing() -> None:
    run = runner(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
    out = run.checkpoint(lambda h: run.checkpoint(torch.tanh, run.checkpoint(torch.tanh, h)), value(4, 64))
    assert kept(run) == (INPUT, INPUT)
    out.sum().backward()


def test_without_a_model_parallel_group_partitioning_is_a_group_of_one_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="partition_activations is on without a model-parallel group.*group of one"):
        run = Checkpointer(CheckpointSettings(partition_activations=True))
    assert run.kept is None  # whole inputs are where they are
    forward(run, 2).sum().backward()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "contiguous without num_checkpoints": (
        {"partition_activations": True, "contiguous_checkpointing": True},
        ValueError,
        "contiguous_checkpointing .* num_checkpoints .* is None; accepted: 1 or more",
    ),
    "contiguous without partitioning": (
        {"contiguous_checkpointing": True, "num_checkpoints": 2},
        ValueError,
        "contiguous_checkpointing .* partition_activations is False; accepted: True",
    ),
    "num_checkpoints": ({"num_checkpoints": 0}, ValueError, "num_checkpoints is 0; accepted: 1 or more"),
    "type of num_checkpoints": ({"num_checkpoints": 2.0}, TypeError, "num_checkpoints must be an integer or None"),
    "type of a switch": ({"profile": 1}, TypeError, "profile must be True or False, not 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_lack_something_are_refused_by_name(case: str) -> None:
    options, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        CheckpointSettings(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [False, True])
def test_on_a_gpu_inputs_are_on_the_host_and_gradients_are_the_same(contiguous: bool) -> None:
    options: dict[str, Any] = {"checkpoint_in_cpu": True}
    if contiguous:
        options |= {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 8}
    run = runner(**options)
    layers = [torch.nn.Linear(512, 512, device="cuda") for _ in range(8)]
    found = []
    for call in (lambda f, x: f(x), run.checkpoint, run.checkpoint):
        x = value(256, 512, grad=False).cuda().requires_grad_()
        torch.cuda.manual_seed(0)
        h = x
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for layer in layers:
            h = call(lambda h, layer=layer: torch.dropout(torch.tanh(layer(h)), 0.1, True), h)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        h.square().sum().backward()
        found.append((x.grad, held))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][0], found[2][0])
    assert found[1][1] <= 2 * h.nbytes < found[0][1]
