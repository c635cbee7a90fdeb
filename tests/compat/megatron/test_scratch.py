"""Scratch buffers, tensors handed on, tensors that are no views: what happens to memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zero_strategy.compat.megatron.tensors import (
    GlobalMemoryBuffer,
    MakeViewlessTensor,
    WrappedTensor,
    _kernel_make_viewless_tensor,
    assert_viewless_tensor,
    make_viewless_tensor,
    safely_set_viewless_tensor_data,
)


def test_a_pre_sized_buffer_keeps_its_pointer() -> None:
    scratch = GlobalMemoryBuffer()
    whole = scratch.get_tensor((4, 8), torch.float32, "a")
    assert whole.shape == (4, 8) and whole.is_contiguous() and not whole.requires_grad
    whole.fill_(3.0)
    for shape in ([2, 8], torch.Size((32,)), (2, 3, 4), (), (0, 5)):
        part = scratch.get_tensor(shape, torch.float32, "a")
        assert part.shape == torch.Size(shape) and bool((part == 3.0).all())
        assert part.numel() == 0 or part.data_ptr() == whole.data_ptr()
    assert scratch.nbytes == 4 * 32


def test_names_and_dtypes_have_memory_of_their_own_and_more_makes_it_grow() -> None:
    scratch = GlobalMemoryBuffer()
    made = [
        scratch.get_tensor((8,), torch.float32, "a"),
        scratch.get_tensor((8,), torch.float32, "b"),
        scratch.get_tensor((8,), torch.int64, "a"),
    ]
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 3
    assert scratch.nbytes == 32 + 32 + 64
    grown = scratch.get_tensor((16,), torch.float32, "a")
    assert grown.numel() == 16 and scratch.nbytes == 64 + 32 + 64
    old = weakref.ref(grown.untyped_storage())
    del grown, made
    scratch.clear()
    gc.collect()
    assert scratch.nbytes == 0 and old() is None
    with pytest.raises(ValueError, match=r"\[2, -1\] of scratch buffer 'a'"):
        scratch.get_tensor((2, -1), torch.float32, "a")


def test_mem_alloc_context_is_entered_exactly_when_memory_is_taken() -> None:
    inside, entered = False, 0

    @contextmanager
    def pool() -> Iterator[None]:
        nonlocal inside, entered
        inside, entered = True, entered + 1
        yield
        inside = False

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        """Allocations outside of the context."""

        outside = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "empty" in str(func) and not inside:
                Watching.outside += 1
            return func(*args, **(kwargs or {}))

    scratch = GlobalMemoryBuffer(device="cpu")
    with Watching():
        scratch.get_tensor((8,), torch.float32, "a", mem_alloc_context=pool)
        scratch.get_tensor((4,), torch.float32, "a", mem_alloc_context=pool)
        assert entered == 1
        scratch.get_tensor((9,), torch.float32, "a", pool)
    assert entered == 2 and Watching.outside == 0 and not inside


def test_what_was_unwrapped_dies_with_its_owner() -> None:
    tensor = torch.ones(3)
    seen, wrapped = weakref.ref(tensor), WrappedTensor(tensor)
    del tensor
    assert seen() is not None

    def callee(handed: WrappedTensor) -> bool:
        mine = handed.unwrap()
        assert mine.sum() == 3
        del mine
        return seen() is None  # while the caller still has the wrapper

    assert callee(wrapped)
    with pytest.raises(RuntimeError, match="unwrapped before"):
        wrapped.unwrap()


def test_a_viewless_tensor_shows_the_same_memory_without_a_base() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    view = base.t()[1:]
    for made in (_kernel_make_viewless_tensor(view, True), make_viewless_tensor(view, True, keep_graph=False)):
        assert made._base is None and made.is_leaf and made.requires_grad
        assert made.data_ptr() == view.data_ptr() and made.stride() == view.stride()
        assert torch.equal(made, view)
    assert not make_viewless_tensor(view, False, keep_graph=False).requires_grad
    whole = torch.ones(2)
    assert make_viewless_tensor(whole, True, True) is whole


@pytest.mark.parametrize("through", ["entry", "function"])
def test_gradients_pass_through_a_viewless_tensor(through: str) -> None:
    leaf = torch.arange(6.0, requires_grad=True)
    view = (leaf * 2).view(2, 3)
    entry = through == "entry"
    made = make_viewless_tensor(view, True, keep_graph=True) if entry else MakeViewlessTensor.apply(view, True)
    assert made._base is None and not made.is_leaf
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    (made * weight).sum().backward()
    assert torch.equal(leaf.grad, 2 * weight.flatten())  # type: ignore[arg-type]


def test_data_of_views_is_not_replaced() -> None:
    base = torch.ones(2, 3)
    view = base[0]
    assert assert_viewless_tensor(base) is base and assert_viewless_tensor("no tensor") == "no tensor"  # type: ignore[comparison-overlap]
    both = [base, torch.ones(1)]
    assert assert_viewless_tensor(both) is both
    with pytest.raises(AssertionError, match=r"shape \[3\] is a view of one of shape \[2, 3\].*\. in stage 2"):
        assert_viewless_tensor([base, view], extra_msg="in stage 2")
    with pytest.raises(AssertionError, match=r"by a tensor of shape \[1\]"):
        safely_set_viewless_tensor_data(view, torch.zeros(1))
    assert view.shape == (3,)

    output = torch.ones(4, requires_grad=True) * 2
    memory = weakref.ref(output.untyped_storage())
    safely_set_viewless_tensor_data(output, torch.zeros(1))
    gc.collect()
    assert memory() is None and output.grad_fn is not None and output.shape == (1,)
