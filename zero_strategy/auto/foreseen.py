"""A micro-batch foreseen: its forward and backward run on tensors without memory, and every byte is counted.

torch's fake tensors have shapes, dtypes, devices and sizes of memory, and run through any module and through autograd.
What lives at each moment is known from when memory is made and let go of. The same run counts operations, and a roof
of the machine (`roof.py`) makes time of them.

A module whose forward looks at values (`if x.sum() > 0`, `.item()`) cannot be foreseen; its error says where.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zero_strategy.activation.budget import Profile, StepProfile
from zero_strategy.activation.offload import storage_keys
from zero_strategy.activation.products import selective_contexts
from zero_strategy.activation.units import Replay, without_caches
from zero_strategy.auto.timeline import Levels, Timeline
from zero_strategy.fsdp.unshard import tensors_in
from zero_strategy.runtime.host_heap import LARGEST, MAPPED
from zero_strategy.runtime.torch_private import TorchDispatchMode, fake_tensors, packet_of, schema_of, tree_map

T = TypeVar("T")

_ADD = torch.ops.aten.add.Tensor

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a module for a batch."""


class LeftBehindError(RuntimeError):
    """Tensors without memory were left in a cache or an object outside of modules, where training would meet them."""


class UnforeseenError(ValueError):
    """The model looks at values, or does what tensors without memory cannot do."""


@dataclass(frozen=True)
class Work:
    """Operations of one kind: with the same number of floating-point operations, and the same bytes.

    Attributes:
        flops: Of one of them.
        nbytes: That one reads and writes.
        count: How many.
    """

    flops: int
    nbytes: int
    count: int


@dataclass(frozen=True)
class Foreseen:
    """Memory and work of a micro-batch, beside parameters and their gradients.

    Attributes:
        peak: Bytes at most.
        kept: Bytes at the end of the forward.
        work: Operations of forward and backward.
        with_gradients: Bytes at most, with gradients that autograd has not yet handed over.
        last: Bytes of activations when the first large gradient of the root unit is handed over.
        after_units: Bytes beyond the present ones that are still to come, after each forward of a unit, in order.
        made: Bytes of all blocks that are made, of those that `mmap_threshold` would map.
        always_mapped: The same, of those that glibc maps in any case.
    """

    peak: int
    kept: int
    work: tuple[Work, ...] = field(repr=False)
    with_gradients: int = 0
    last: int = 0
    after_units: tuple[int, ...] = ()
    made: int = 0
    always_mapped: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(each.flops * each.count for each in self.work)


class MicroBatch(NamedTuple):
    """A micro-batch, and how it is run.

    Attributes:
        module: On any device.
        batch: Any nesting of tensors, of which shapes, dtypes and devices count.
        loss: See `Loss`.
        units: Names of modules of which none is inside of another.
        dtype: That floating-point parameters, buffers and inputs take; None: their own.
        autocast: Dtype of autocast around the loss; None: there is none.
        trains: Modules are in training mode, whatever they are in now.
        around: Context of the run, in which the module may be another.
    """

    module: nn.Module
    batch: Any
    loss: Loss
    units: Sequence[str] = ()
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    trains: bool = True
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def foresee(given: MicroBatch, *, mode: str = "none", again: Sequence[str] | None = None) -> Foreseen:
    """Run a micro-batch without memory; the module, its buffers and random states stay as they are.

    Args:
        given: What is run.
        mode: "none", "selective" or "full", of activation checkpointing.
        again: Names of the units that are computed again, if the mode is not "none"; default: all.

    Raises:
        UnforeseenError: If the run fails; says why.
        LeftBehindError: If the model keeps tensors of the run where they cannot be taken out.
    """
    names = given.units if again is None else again
    known = weakref.WeakKeyDictionary[Any, int]()
    live = _Live(known)

    def run(fake: Any) -> int:
        wrap = partial(partial, _checkpointed, mode)
        with _replaced(given.module, names if mode != "none" else (), wrap):
            return _run(fake, live, known, given, backward=True)

    return _foreseen(live, _without_memory(given.module, known, run))


def profile_units(given: MicroBatch) -> Profile | None:
    """Bytes and operations of the forwards of units, as budgets look at them (`activation.budget`), without memory.

    Raises:
        UnforeseenError, LeftBehindError: See `foresee`.
    """
    known = weakref.WeakKeyDictionary[Any, int]()
    found: list[StepProfile] = []

    def run(fake: Any) -> None:
        def begun(tensors: Mapping[str, Tensor]) -> None:
            found.append(StepProfile(storage_keys(tensors.values())))

        numbers = {name: number for number, name in enumerate(given.units)}

        def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            return partial(_measured, found, numbers[name], name, given.module.get_submodule(name), forward)

        with _replaced(given.module, given.units, wrap):
            _run(fake, _Live(known), known, given, backward=False, begun=begun)

    _without_memory(given.module, known, run)
    return found[0].result()


def _without_memory(module: nn.Module, known: Any, run: Callable[[Any], T]) -> T:
    """The result of a run.

    Args:
        module: For errors.
        known: Storages of the run, which are gone afterwards.
        run: Takes the mode of tensors without memory.
    """
    fake = fake_tensors()
    try:
        result = run(fake)
    except Exception as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise UnforeseenError(f"{type(module).__name__} cannot be run on tensors without memory: {said}") from error
    finally:
        # A tensor that is left somewhere must not turn real ones that it meets into its like.
        fake.allow_non_fake_inputs = False
    del fake, run
    if len(known):
        gc.collect()
    if len(known):
        raise LeftBehindError(
            f"{type(module).__name__} keeps tensors in a cache or an object outside of its modules (such as "
            f"functools.lru_cache), and so {len(known)} of a run without memory, which training would meet: leave the "
            "example out, or pin the settings"
        )
    return result


def _foreseen(live: _Live, inputs: int) -> Foreseen:
    """The figures of a run.

    Args:
        live: After it.
        inputs: Bytes of the batch.
    """
    found: Levels = live.timeline.levels()
    return Foreseen(
        found.peak + inputs,
        live.kept,
        live.work(),
        with_gradients=found.with_gradients + inputs,
        last=found.at_gradient + inputs,
        after_units=tuple(found.with_gradients - level for level in found.at_marks),
        made=sum(size * count for size, count in found.made.items() if size >= MAPPED),
        always_mapped=sum(size * count for size, count in found.made.items() if size > LARGEST),
    )


def _run(
    fake: Any,
    live: _Live,
    known: Any,
    given: MicroBatch,
    *,
    backward: bool,
    begun: Callable[[Mapping[str, Tensor]], None] = lambda tensors: None,
) -> int:
    """Run forward, and backward if it is asked for; the bytes of the batch."""
    module, dtype = given.module, given.dtype
    with states_kept(), _modes_kept(module, given.trains), _attributes_kept(module), given.around():
        tensors = {name: _faked(fake, tensor, known, dtype) for name, tensor in _named_tensors(module)}
        begun(tensors)
        batch = tree_map(lambda x: _faked(fake, x, known, dtype) if isinstance(x, Tensor) else x, given.batch)
        in_units = tuple(f"module.{name}." for name in given.units)
        gradients = [
            tensor.register_post_accumulate_grad_hook(partial(live.drop_gradient, not name.startswith(in_units)))
            for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values()
            if tensor.requires_grad
        ]
        kind = next((tensor.device.type for tensor in tensors.values()), "cpu")
        casts = contextlib.nullcontext() if given.autocast is None else torch.autocast(kind, given.autocast)
        with _watched([module.get_submodule(name) for name in given.units], live.mark), fake, live, casts:
            torch.func.functional_call(_Step(module, given.loss, live, backward), tensors, (batch,))
        del gradients
        return sum(leaf.untyped_storage().nbytes() for leaf in tensors_in(batch))


class _Step(nn.Module):
    """Forward and backward in one, since units that are computed again have their other tensors only meanwhile."""

    def __init__(self, module: nn.Module, loss: Loss, live: _Live, backward: bool) -> None:
        super().__init__()
        self.module, self._loss, self._live, self._backward = module, loss, live, backward

    def forward(self, batch: Any) -> None:
        result = self._loss(self.module, batch)
        self._live.kept = self._live.now
        if self._backward:
            result.backward()


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from (*module.named_parameters(prefix="module"), *module.named_buffers(prefix="module"))


def _faked(fake: Any, tensor: Tensor, known: Any, dtype: torch.dtype | None) -> Tensor:
    if tensor.is_meta:  # a model that was built without memory computes on some device
        with fake:
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    else:
        found = fake.from_tensor(tensor)
    with fake, torch.no_grad():
        if dtype is not None and tensor.is_floating_point():
            found = found.to(dtype)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            found = found.detach().requires_grad_()
    known[found.untyped_storage()] = 0
    return found


class _Live(TorchDispatchMode):
    """Counts bytes that live and operations, of tensors without memory.

    Args:
        known: Storages that do not count.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Any) -> None:
        super().__init__()
        self._known = known
        self.timeline = Timeline()
        self._numbers = 0
        self._work: dict[tuple[int, int], int] = {}
        self.now = self.kept = 0

    def drop_gradient(self, is_of_root: bool, parameter: Tensor) -> None:
        """Let go of a parameter's gradient; what it took is a matter of the plan."""
        assert parameter.grad is not None
        self.timeline.hand_over(self._number(parameter.grad), parameter.nbytes if is_of_root else 0)
        parameter.grad = None

    def mark(self, *_: Any) -> None:
        """Note the moment after a unit's forward."""
        self.timeline.mark()

    def work(self) -> tuple[Work, ...]:
        """Operations so far."""
        return tuple(Work(flops, nbytes, count) for (flops, nbytes), count in self._work.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = list(tensors_in(result))
        for tensor in made:
            self._note(tensor)
        if func is _ADD and isinstance(args[1], Tensor) and args[0].shape == args[1].shape == result.shape:
            self.timeline.sum(self._number(result), self._number(args[0]))
        if not getattr(func, "is_view", False):
            nbytes = sum(each.numel() * each.itemsize for each in (*tensors_in((args, kwargs)), *made))
            key = _flops(func, args, kwargs, result), nbytes
            self._work[key] = self._work.get(key, 0) + 1
        return result

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._numbers += 1
        number, nbytes = self._numbers, storage.nbytes()
        self._known[storage] = number
        self._change(number, nbytes)
        weakref.finalize(storage, self._change, number, -nbytes).atexit = False

    def _number(self, tensor: Tensor) -> int:
        return int(self._known.get(tensor.untyped_storage(), 0))

    def _change(self, number: int, nbytes: int) -> None:
        self.timeline.change(number, nbytes)
        self.now += nbytes


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula: Any = flop_registry.get(packet_of(func))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    # torch's table lacks the fused attention of the CPU, among others; its backward is two and a half forwards.
    name = str(schema_of(func))
    if name.startswith("aten::_scaled_dot_product"):
        return int(sdpa_flop_count(*(each.shape for each in args[:3])) * (2.5 if "backward" in name else 1))
    return 0


@contextlib.contextmanager
def states_kept() -> Iterator[None]:
    """Inside, random states and the autocast cache may change; they are as before afterwards."""
    python, cached = random.getstate(), torch.is_autocast_cache_enabled()
    numpy: Any = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            with torch.enable_grad():
                yield
    finally:
        random.setstate(python)
        if drawn is not None:
            numpy.random.set_state(drawn)
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def _modes_kept(module: nn.Module, trains: bool) -> Iterator[None]:
    """Inside, modules are in training mode, if they are to be."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        if trains:
            module.train()
        yield
    finally:
        for each, mode in modes:
            each.training = mode


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Inside, modules may keep tensors, such as a mask that they make once; afterwards they have what they had."""
    kept = []
    for each in module.modules():
        own = vars(each)
        containers = [(value, copy.copy(value)) for value in own.values() if isinstance(value, (list, dict, set))]
        kept.append((own, dict(own), containers))
    try:
        yield
    finally:
        for own, values, containers in kept:
            own.clear()
            own.update(values)
            for container, content in containers:
                container.clear()
                if isinstance(container, list):
                    container.extend(content)
                else:
                    container.update(content)


@contextlib.contextmanager
def _watched(units: Sequence[nn.Module], call: Callable[..., None]) -> Iterator[None]:
    """Inside, each forward of a unit ends with a call."""
    hooks = [unit.register_forward_hook(call) for unit in units]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _replaced(
    module: nn.Module, names: Sequence[str], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, units have other forwards: what `wrap` makes of a name and its forward."""
    units = [module.get_submodule(name) for name in names]
    own = [vars(unit).get("forward") for unit in units]
    for name, unit in zip(names, units, strict=True):
        object.__setattr__(unit, "forward", wrap(name, unit.forward))
    try:
        yield
    finally:
        for unit, forward in zip(units, own, strict=True):
            if forward is None:
                object.__delattr__(unit, "forward")
            else:
                object.__setattr__(unit, "forward", forward)


def _checkpointed(mode: str, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = without_caches(name, args, kwargs)
    contexts: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs)


def _measured(
    profiles: list[StepProfile],
    number: int,
    name: str,
    unit: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    args, kwargs = without_caches(name, args, kwargs)
    replay = Replay(forward, args, kwargs)
    inputs = replay.take_tensors()
    over = profiles[0].measure(number, unit, lambda: replay.again(inputs), inputs)
    result = replay(*inputs)
    over(result)
    return result
