"""Selective checkpoints: a unit's matrix products, convolutions and attention are kept, the rest is computed again.

    forward        `_Keeping` sees every operator below autograd and keeps the results of products
    its end        `KeptProducts.settle`: a result stays kept if nothing else can reach its memory
    recomputation  `_Giving` hands out what is kept in place of computing it; everything else is computed

A kept result must be the one that was computed, bit by bit. So a result is given up, and computed again like any other,
as soon as one of these events shows that its memory has been written to, or could be from now on:

- an operator writes to its memory, whichever tensor it is given for that. Version counters do not see this: the gates
  of a GRU cell are `unsafe_chunk`s of a product that `add_` and `sigmoid_` change, and each has a counter of its own.
  Nor do they see `.data`;
- an operator gives its memory out without saying so in its schema (`unsafe_chunk`, `unsafe_split`);
- its version counter has moved when the forward ends: a compiled part of the unit writes to what it is given, and its
  kernels are not seen here;
- somebody else holds its memory when the forward ends: it is an output of the unit, is in an attribute, or numpy has
  it. What follows the unit may then write to it, unseen from here.

Products of compiled parts are never kept, since the compiler puts other results where theirs were.

Of what is kept nobody else knows, so nothing can change it until backward. Not seen is a write during the forward
through a raw address whose holder is gone when the forward ends, as by numpy or ctypes; no schema tells of it.

An operator that draws random numbers is computed again even if it is a product (attention with dropout inside): a kept
result would leave the generator behind, and what follows would draw other numbers than in forward.

Inside of `torch.compile` the compiler decides by the same policy, in graphs without changes in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from zero_strategy.runtime.torch_private import (
    TorchDispatchMode,
    detached_with_version,
    inner_tensors,
    is_called_by_compiled_code,
    schema_of,
    storage_holders,
    storage_key,
    tree_leaves,
    tree_map_only,
    version_of,
)

KEPT_OPS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_addmm_activation",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::convolution",
        "aten::mkldnn_convolution",
        "mkldnn::_linear_pointwise",
        "mkldnn::_convolution_pointwise",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "flex_attention",
    }
)
"""Names of ops, in all overloads that write to none of their arguments."""
KEPT_NAMESPACES = ("_c10d_functional", "c10d_functional")
"""A collective is not sent twice."""
_READING = ("flex_attention", "inductor_compiled_code")
"""Ops without a schema that write to no tensor, or move its version counter."""


class _OpFacts(NamedTuple):
    """Facts of an op that are the same in every call.

    Attributes:
        product: Results may be kept.
        writes: Places and names of the arguments that it writes to; None: it may write to all.
        shows_memory: Its schema tells which results lie in the memory of its arguments.
    """

    product: bool
    writes: tuple[tuple[int, str], ...] | None
    shows_memory: bool


@cache
def _facts(op: Any) -> _OpFacts:
    schema = schema_of(op)
    name = str(op) if schema is None else schema.name  # an op of higher order has no schema
    if schema is None:
        return _OpFacts(name in KEPT_OPS, () if name in _READING else None, name in _READING)
    places = enumerate(schema.arguments)
    writes = tuple((place, one.name) for place, one in places if one.alias_info is not None and one.alias_info.is_write)
    collective = op.namespace in KEPT_NAMESPACES  # its wait gives the tensor that it is given, by the same counter
    declared = any(one.alias_info is not None for one in schema.returns)
    return _OpFacts((name in KEPT_OPS or collective) and not writes, writes, declared or collective)


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call takes numbers from a random generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    # Attention has the tag whether it drops or not, and draws only if it drops.
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True


class _Memory(NamedTuple):
    """One piece of the memory of a kept result.

    Attributes:
        tensor: In that memory; nobody else's, but it shares the version counter of what the op gave.
        version: Of the counter when the op was over.
    """

    tensor: Tensor
    version: int

    @property
    def key(self) -> int:
        """Tells memories apart as long as they live."""
        return storage_key(self.tensor.untyped_storage())


_Call = tuple[Any, int]
"""An op, and how many calls of it came before in the forward."""


class KeptProducts:
    """Results that one forward of a unit keeps until it is computed again.

    Attributes:
        calls: Calls of each product in the forward, kept or not.
    """

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()
        self._results: dict[_Call, Any] = {}
        self._memories: dict[_Call, list[_Memory]] = {}
        self._users: dict[int, list[_Call]] = {}
        """Calls whose results lie in a memory, by its key; they keep it alive, so no other memory takes the key."""

    def keep(self, op: Any, result: Any) -> None:
        """Keep the result of a product's next call, if it is tensors whose memory can be told."""
        call = op, self.calls[op]
        own = tree_map_only(Tensor, detached_with_version, result)
        memories: list[_Memory] = []
        for tensor in _tensors_in(own):
            # A sparse tensor has no storage whose writers and holders could be watched.
            if tensor.layout != torch.strided:
                return
            memories.append(_Memory(tensor, version_of(tensor)))
        self._results[call], self._memories[call] = own, memories
        for memory in memories:
            self._users.setdefault(memory.key, []).append(call)

    def give_up(self, value: Any) -> None:
        """Keep nothing that lies in the memory of the tensors in `value`."""
        if not self._users:
            return
        for tensor in _tensors_in(value):
            if tensor.layout == torch.strided:
                for call in self._users.pop(storage_key(tensor.untyped_storage()), ()):
                    self._drop(call)

    def settle(self) -> None:
        """The forward is over: keep only what nothing has changed or can change."""
        for key, calls in list(self._users.items()):
            # A call may have been given up by another of its memories already.
            here = [memory for call in calls for memory in self._memories.get(call, ()) if memory.key == key]
            # The object for the storage that the count itself needs is one holder.
            if (here and storage_holders(here[0].tensor) > len(here) + 1) or any(map(_has_moved, here)):
                for call in calls:
                    self._drop(call)
        # They would hold a result beyond the recomputation that takes it.
        self._memories.clear()
        self._users.clear()

    def _drop(self, call: _Call) -> None:
        self._results.pop(call, None)
        self._memories.pop(call, None)

    def take(self, op: Any, number: int) -> tuple[Any] | None:
        """The result of call `number` of a product, which is kept no longer; None: it is to be computed.

        Raises:
            RuntimeError: If the forward had fewer calls.
        """
        if number >= self.calls[op]:
            raise RuntimeError(
                f"a unit under activation_checkpointing.mode: selective called {op} {self.calls[op]} times in its "
                "forward and more often when it was computed again; it must do the same both times"
            )
        call = op, number
        return (self._results.pop(call),) if call in self._results else None


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own in arguments or results: those inside of tensors that are made of others."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield from inner_tensors(leaf)


def _has_moved(memory: _Memory) -> bool:
    return version_of(memory.tensor) != memory.version


class _Keeping(TorchDispatchMode):
    """Runs the ops of a forward."""

    # torch refuses `flex_attention` in a mode that does not say this.
    supports_higher_order_operators = True

    def __init__(self, products: KeptProducts) -> None:
        super().__init__()
        self._products = products

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside of a unit stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, products, facts = kwargs or {}, self._products, _facts(func)
        result = func(*args, **kwargs)
        # Before `keep`, or a product would give up its own result.
        if facts.writes is None:
            products.give_up((args, kwargs))
        for place, name in facts.writes or ():
            products.give_up(args[place] if place < len(args) else kwargs.get(name))
        if not facts.shows_memory:
            products.give_up(result)
        if facts.product and not is_called_by_compiled_code():
            if not _draws(func, args, kwargs):
                products.keep(func, result)
            # The recomputation finds results by these numbers, so calls of which nothing is kept count, too.
            products.calls[func] += 1
        return result

    def __exit__(self, *error: Any) -> Any:
        self._products.settle()
        return super().__exit__(*error)


class _Giving(TorchDispatchMode):
    """Runs the ops of a recomputation."""

    # As for the forward: `flex_attention`.
    supports_higher_order_operators = True

    def __init__(self, products: KeptProducts) -> None:
        super().__init__()
        self._products = products
        self._calls: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside of a unit stays compiled."""
        return True

    def __enter__(self) -> Any:
        self._calls.clear()  # a second backward through the same graph computes again what the first one took
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _facts(func).product and not is_called_by_compiled_code():
            number = self._calls[func]
            self._calls[func] += 1
            if (kept := self._products.take(func, number)) is not None:
                return kept[0]
        return func(*args, **(kwargs or {}))


def keep_products(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy, as torch's compiler asks for it."""
    kept = _facts(op).product and not _draws(op, args, kwargs)
    # The compiler may keep more where that is cheaper, which MUST_RECOMPUTE would forbid.
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Context of a selective checkpoint's forward, and of its recomputations."""
    if torch.compiler.is_compiling():  # its graphs have no changes in place; it knows contexts of torch's own only
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(keep_products)
        return contexts
    products = KeptProducts()
    return _Keeping(products), _Giving(products)
