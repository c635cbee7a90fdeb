"""Functional checkpointing, `deepspeed.checkpointing`: configure, checkpoint, the tracker of random states.

torch's non-reentrant checkpoint does the recomputation; it saves the inputs through whatever hooks on saved tensors
are in force, and only the inputs, so that hooks around it decide where they are kept.

The only thing of this package that is global, since `configure`, `checkpoint` and `get_cuda_rng_tracker` of that API
are. Everything behind them works without it: `Checkpointer`, `CudaRNGStatesTracker`.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_strategy.activation.kept_inputs import KeptInputs, KeptRecord
from zero_strategy.activation.rng import CudaRNGStatesTracker, InferenceRNGStatesTracker, seed_model_parallel
from zero_strategy.activation.settings import (
    CheckpointSettings,
    CheckpointTimings,
    InBackward,
    ModelParallel,
    Stopwatch,
    of_section,
    read_settings,
)
from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.runtime.torch_private import (
    TreeSpec,
    in_backward,
    tree_flatten,
    tree_unflatten,
    uncompiled,
    version_of,
    when_backward_ends,
)


class Checkpointer:
    """Checkpoints functions under one set of options.

    Args:
        settings: The options.
        place: Of this process in its model-parallel group.
        tracker: Whose states are those of the forward while it is computed again; asked at each forward.

    Attributes:
        settings: The options.
        place: Of this process in its model-parallel group.
        timings: What `profile` has measured.
        counters: What gathering parts sent.
        kept: The inputs that are kept elsewhere than where they were; None: no option asks for it.
    """

    def __init__(
        self,
        settings: CheckpointSettings | None = None,
        place: ModelParallel | None = None,
        tracker: Callable[[], CudaRNGStatesTracker | None] = lambda: None,
    ) -> None:
        self.settings, self.place = settings or CheckpointSettings(), place or ModelParallel()
        self.timings, self.counters = CheckpointTimings(), CommunicationCounters()
        self._tracker, self._running, self._in_backward = tracker, _Running(), InBackward()
        if self.settings.partition_activations and place is None:
            warnings.warn(
                "partition_activations is on without a model-parallel group: this process is a group of one, so it "
                "keeps whole inputs; configure(mpu_=...) tells the group",
                stacklevel=3,
            )
        whole = self.place.size == 1 and not self.settings.contiguous_checkpointing
        self.kept: KeptInputs | None = None
        # A whole input on its device is what torch keeps by itself.
        if self.settings.stores and not (whole and not self.settings.checkpoint_in_cpu):
            self.kept = KeptInputs(self.settings, self.place.communicator(self.counters))

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function now, and again in backward instead of keeping what it computed.

        The random state of the second call, the tracker's states included, is that of the first. Checkpoints inside of
        the function are computed again with it, and keep their inputs as torch does.

        Args:
            function: Anything that can be called. It must do the same when it is called again.
            *args: For it: tensors, None and other values, in any nesting of tuples, lists and dicts. With
                `partition_activations` the ranks of a model-parallel group give the same tensors.
            **kwargs: Likewise.

        Returns:
            What it returns.

        Raises:
            TypeError: If `function` cannot be called.
            ValueError: If the contiguous buffer has no room for the inputs.
        """
        if not callable(function):
            raise TypeError(f"checkpoint takes a function, not {type(function).__name__}")
        tracker = self._tracker()
        tracked = tracker if tracker is not None and tracker.is_initialized() else None
        plain = self.kept is None and tracked is None and not (self.settings.synchronize or self.settings.profile)
        if not plain:
            return self._special(function, args, kwargs, tracked)
        if not kwargs and all(arg is None or isinstance(arg, (Tensor, bool, int, float, str)) for arg in args):
            return torch_checkpoint(function, *args, use_reentrant=False)
        leaves, tree = tree_flatten((args, kwargs))  # torch saves, and lets go of, tensors that it is given one by one
        return torch_checkpoint(partial(_call, function, tree), *leaves, use_reentrant=False)

    def reset(self) -> None:
        """Let go of buffers for kept inputs, for forwards without a backward; what a graph needs stays with it."""
        if self.kept is not None:
            self.kept.reset()

    @uncompiled
    def _special(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tracker: CudaRNGStatesTracker | None,
    ) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        watch = self._watch()
        # Before the function, which may write to an input: a hook would then be on what comes of that.
        if watch is not None and torch.is_grad_enabled():
            _Gate(watch, leaves)
        run = _Run(function, tree, tracker, self._running, watch)
        with self._keeping(leaves):
            return torch_checkpoint(run, *leaves, use_reentrant=False)

    def _watch(self) -> Stopwatch | None:
        if not (self.settings.synchronize or self.settings.profile) or self._running.depth:
            return None
        return Stopwatch(self.timings if self.settings.profile else None, self._in_backward)

    def _keeping(self, leaves: Sequence[Any]) -> AbstractContextManager[Any]:
        """Hooks that put what torch saves, the inputs, into a record."""
        # A checkpoint inside of another one is part of what is computed again, and keeps nothing across the step.
        if self.kept is None or not torch.is_grad_enabled() or self._running.depth:
            return nullcontext()
        chosen = [leaf for leaf in leaves if self.kept.takes(leaf)]
        # A record lies on one device.
        chosen = [leaf for leaf in chosen if leaf.device == chosen[0].device]
        if not chosen:
            return nullcontext()
        packing = _Packing(self.kept.keep(chosen), chosen)
        return torch.autograd.graph.saved_tensors_hooks(packing.pack, _Packing.unpack)


class _Running(threading.local):
    """Number of checkpoints that this thread is inside of, in forward or while computing again."""

    depth = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class _Run:
    """The function, given a flat list of arguments; the first call is the forward."""

    def __init__(
        self,
        function: Callable[..., Any],
        tree: TreeSpec,
        tracker: CudaRNGStatesTracker | None,
        running: _Running,
        watch: Stopwatch | None,
    ) -> None:
        self._function, self._tree, self._running, self._watch = function, tree, running, watch
        self._tracker = tracker
        # Before the forward, which moves them on.
        self._states = {} if tracker is None else tracker.snapshot()
        self._first = True

    def __call__(self, *leaves: Any) -> Any:
        if not self._first:
            return self._again(*leaves)
        self._first = False
        if self._watch is not None:
            self._watch.forward_begins()
        with self._running.inside():
            output = _call(self._function, self._tree, *leaves)
        if self._watch is not None:
            self._watch.forward_ends()
        return output

    def _again(self, *leaves: Any) -> Any:
        if self._watch is not None:
            self._watch.backward_begins()
            if in_backward():  # not where somebody only looks at a saved tensor
                # An input that gets no gradient, or is a leaf, does not tell the end.
                when_backward_ends(self._watch.backward_ends)
        # torch restores the generators alone, not the states that wait in the tracker.
        rewound = nullcontext() if self._tracker is None else self._tracker.rewound(self._states)
        with rewound, self._running.inside():
            return _call(self._function, self._tree, *leaves)


class _Gate:
    """Sees the gradients of the inputs, which are there when the checkpoint's backward is over.

    By hooks on the tensors: views of them would change the order in which gradients are added up. Where an input is
    used elsewhere, too, its gradient comes late; then the next checkpoint's beginning is the end of this one.
    """

    def __init__(self, watch: Stopwatch, leaves: Sequence[Any]) -> None:
        # Hooks on leaves, such as parameters, would stay with them.
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        self._watch, self._inputs, self._missing = watch, len(inputs), len(inputs)
        for tensor in inputs:
            tensor.register_hook(self._passed)

    def _passed(self, gradient: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._missing = self._inputs  # another backward through the same graph may follow
            self._watch.backward_ends()


class _Packing:
    """Tells which of the tensors that torch saves are in a record.

    By where they lie, since torch hands over aliases of its own and, in some versions, a tensor of its own as well.
    """

    def __init__(self, record: KeptRecord, tensors: Sequence[Tensor]) -> None:
        self._record = record
        # Plain values: the tensors themselves would be what is to be freed.
        self._waiting = [(_place(tensor), number) for number, tensor in enumerate(tensors)]

    def pack(self, tensor: Tensor) -> _Kept | _Alias:
        """Object to save instead of a tensor."""
        place = _place(tensor)
        for position, (other, number) in enumerate(self._waiting):
            if place == other:
                # A tensor that is given twice has two places in the record.
                del self._waiting[position]
                return _Kept(self._record, number)
        return _Alias(tensor)

    @staticmethod
    def unpack(saved: _Kept | _Alias) -> Tensor:
        """The tensor."""
        return saved.tensor()


class _Kept:
    def __init__(self, record: KeptRecord, number: int) -> None:
        self._record, self._number = record, number

    def tensor(self) -> Tensor:
        return self._record.fetch(self._number)


class _Alias:
    """A tensor that stays where it is; what torch would notice without hooks is noticed."""

    def __init__(self, tensor: Tensor) -> None:
        # A parameter as itself, since its data may be another tensor by then (stage 3).
        self._tensor, self._version = tensor if tensor.is_leaf else tensor.detach(), version_of(tensor)

    def tensor(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                f"an input of a checkpoint, of shape {tuple(self._tensor.shape)}, was modified in place before it was "
                "needed for the recomputation; give the checkpoint a copy"
            )
        return self._tensor


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _call(function: Callable[..., Any], tree: TreeSpec, *leaves: Any) -> Any:
    args, kwargs = tree_unflatten(list(leaves), tree)
    return function(*args, **kwargs)


class ProcessState:
    """One process's.

    Attributes:
        tracker: The tracker, once somebody asked for it.
        configured: Whether options were set.
        by_script: Whether the script did so itself, which an engine's config then does not change.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Back to the beginning."""
        self.tracker: CudaRNGStatesTracker | None = None
        self.configured = self.by_script = False
        self._checkpointer: Checkpointer | None = None
        self._place: ModelParallel | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """The one that `checkpoint` uses; without options before `configure`."""
        if self._checkpointer is None:
            # Asked at each call, as the tracker may be made, or made anew, later.
            self._checkpointer = Checkpointer(tracker=lambda: self.tracker)
        return self._checkpointer

    @property
    def place(self) -> ModelParallel:
        """This process in its model-parallel group."""
        return ModelParallel.of(None) if self._place is None else self._place

    def configure(self, settings: CheckpointSettings, place: ModelParallel | None, *, by_script: bool) -> None:
        """Take new options; what earlier ones keep for a graph stays with that graph."""
        self._checkpointer = Checkpointer(settings, place, lambda: self.tracker)
        self._place, self.configured, self.by_script = place, True, by_script


PROCESS = ProcessState()


def configure(
    mpu_: Any,
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what `checkpoint` does in this process; see `CheckpointSettings` for the options.

    Args:
        mpu_: The model-parallel unit (see `ModelParallel.of`), or None: every process is a group of one.
        deepspeed_config: A DeepSpeed JSON (path or mapping), of which the section `activation_checkpointing` counts.
        partition_activations: Wins over the JSON, as the following ones do, unless it is None.
        contiguous_checkpointing: `contiguous_memory_optimization` in the JSON.
        num_checkpoints: `number_checkpoints` in the JSON.
        checkpoint_in_cpu: `cpu_checkpointing` in the JSON.
        synchronize: `synchronize_checkpoint_boundary` in the JSON.
        profile: The same in the JSON; `timings()` has the results.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If a value is of another type, or the unit lacks a method.
        ValueError: If an option lacks what it needs; names the option and the accepted values.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    settings = read_settings(deepspeed_config, given)
    PROCESS.configure(settings, None if mpu_ is None else ModelParallel.of(mpu_), by_script=True)


def configure_from(section: Mapping[str, Any]) -> None:
    """Set the options of an engine's config, unless the script has said them by `configure`.

    Args:
        section: `activation_checkpointing` of a DeepSpeed JSON. One that asks for nothing changes nothing.

    Raises:
        ValueError: If an option lacks what it needs.
    """
    settings = CheckpointSettings(**of_section(section))
    if settings != CheckpointSettings() and not PROCESS.by_script:
        PROCESS.configure(settings, None, by_script=False)


def is_configured() -> bool:
    """True if the options were set, by `configure` or by an engine's config."""
    return PROCESS.configured


def reset() -> None:
    """Let go of the buffers of kept inputs: for evaluations of several forwards without a backward."""
    PROCESS.checkpointer.reset()


def timings() -> CheckpointTimings:
    """Measurements of `profile` since `configure`."""
    return PROCESS.checkpointer.timings


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Make this process's tracker, unless there is one.

    Args:
        use_te_rng_tracker: What Transformer Engine's tracker is there for, states that CUDA graphs can capture, is done
            by this package's own: the same as `use_cudagraphable_rng`.
        inference_rng_tracker: One that accepts all calls and draws nothing of its own.
        use_cudagraphable_rng: States that CUDA graphs can capture; without effect on the CPU.
        force_reset: Make a new one, without states, also if there is one.
    """
    kind = InferenceRNGStatesTracker if inference_rng_tracker else CudaRNGStatesTracker
    # Made in any case: whether it is graph-safe depends on the device, too.
    made = kind(graph_safe=use_te_rng_tracker or use_cudagraphable_rng)
    old = PROCESS.tracker
    if old is None or force_reset:
        PROCESS.tracker = made
    elif (use_te_rng_tracker or inference_rng_tracker or use_cudagraphable_rng) and (
        type(old) is not kind or old.graph_safe != made.graph_safe
    ):
        warnings.warn(
            "initialize_rng_tracker: there is a tracker of another kind already, which stays in use; pass "
            "force_reset=True for a new one",
            stacklevel=2,
        )


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """This process's tracker; one of the asked-for kind is made if there is none."""
    if PROCESS.tracker is None:
        initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    assert PROCESS.tracker is not None
    return PROCESS.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's default state and the tracker's, in place of `torch.cuda.manual_seed`; see `rng.py`.

    To be called on all ranks with one seed, after `configure(mpu_)`, which says where this process is.

    Raises:
        TypeError: If the seed is no integer.
    """
    seed_model_parallel(get_cuda_rng_tracker(), seed, PROCESS.place)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function now, and again in backward; see `Checkpointer.checkpoint`."""
    return PROCESS.checkpointer.checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """See `checkpoint`, which never is re-entrant here: frozen inputs, nesting and keywords are fine."""
    return PROCESS.checkpointer.checkpoint(function, *args, **kwargs)


class CheckpointFunction:
    """Class that old scripts call directly. No autograd function: hooks on saved tensors do the work.

    Random states, the tracker's included, are set for the recomputation and put back after it.
    """

    @staticmethod
    def apply(run_function: Callable[..., Any], *args: Any) -> Any:
        """`checkpoint(run_function, *args)`.

        Args:
            run_function: The function.
            *args: For it. An empty list before them is filled with the outputs, as scripts expect it that pass one.
        """
        outputs: list[Any] | None = None
        if args and isinstance(args[0], list) and not args[0]:
            outputs, args = args[0], args[1:]
        output = PROCESS.checkpointer.checkpoint(run_function, *args)
        if outputs is not None:
            outputs.extend(output if isinstance(output, tuple) else (output,))
        return output
