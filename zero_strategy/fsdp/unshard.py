"""Unsharding at stage 3: parameters are gathered before use, prefetched, and resharded after it.

A unit is gathered when its forward begins, released when it ends, gathered again when the gradient of its output
arrives in backward, and released when the gradients of its inputs are done. Parameters of the root unit are gathered
by whichever module owns them and stay until backward ends. Without `reshard_after_backward` buckets that a forward with
gradients has gathered are kept: they stay whole until an optimizer steps on them. The order of gathers seen last time
is a hint for fetching the next unit early; it is never relied on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zero_strategy.fsdp.float8_gather import GatheredFloat8, WeightScales
from zero_strategy.fsdp.gathered_codes import GatheredCodes
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.unit import Unit
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.module_hooks import (
    InertHook as InertHook,  # modules pickled by earlier versions name it here
)
from zero_strategy.runtime.torch_private import (
    children_of,
    in_backward,
    in_transform,
    is_compiling,
    is_tracing,
    tree_flatten,
    tree_unflatten,
    uncompiled,
    when_backward_ends,
)

_OUTSIDE, _IN_BACKWARD = -1, -2
"""Stand among the calls of a unit for uses outside of its forward, which graphs may hold, and those in a backward."""
_SCALARS = frozenset(map(id, (bool, int, float, str, NoneType)))
"""Ids of types without anything inside."""
_NO_TENSORS = _SCALARS | frozenset(map(id, (dict, OrderedDict)))
"""Ids of the types that most attributes of modules have, none of which is a tensor's."""
_PLAIN_MODULES = "torch.nn.modules."
"""Classes from here leave no results in attributes; only other code could, by attributes that it adds."""
_TRACE_PER_UNIT = 16
"""Bound of what is remembered of the order of uses."""


class LayerTurns(Protocol):
    """The order of layers that ranks may skip, as the unsharder asks for it; see `skipped_layers.SkippedLayers`."""

    def before_forward(self, unit: Unit) -> None: ...

    def before_other(self, unit: Unit) -> None: ...

    def before_backward(self, unit: Unit, call: int) -> None: ...

    def ends(self, unit: Unit, call: int) -> bool: ...

    def finish(self) -> Iterator[Unit]: ...

    def reset(self) -> None: ...


class Unsharder:
    """Gathers and releases units through forward hooks and gradient hooks.

    Args:
        units: All units, the root first.
        prefetch: How many units to fetch ahead.
        reshard_after_forward: Release between forward and backward (else only after backward).
        reshard_after_backward: Release after backward (else only when an optimizer steps on them).
        unit_done: Called with a unit's buckets when its backward is over.

    Attributes:
        trace: Units in the order in which they were used since the last `start_trace`.
        checksum: Tells the sequence of gathers so far, announced ones left out.
        skipped: Where ranks may skip different layers: what gathers them in one order on all ranks.
        launched: Takes the number of every unit whose gather starts; None: nobody asks.
        scales: Of weights that are gathered in float8; None: there are none.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        prefetch: int,
        reshard_after_forward: bool,
        reshard_after_backward: bool = True,
        *,
        unit_done: Callable[[Sequence[ParameterBucket]], None],
    ) -> None:
        self.units, self.prefetch, self.reshard_after_forward = list(units), prefetch, reshard_after_forward
        self.reshard_after_backward = reshard_after_backward
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._unit_of = {id(bucket): unit for unit in self.units for bucket in unit.buckets}
        self.trace: list[Unit] = []
        self.checksum = 0
        self._in_backward: dict[Unit, None] = {}
        self._unit_done = unit_done
        self._announce: Callable[[int], None] | None = None
        self._hints: dict[bool, list[Unit]] = {True: [], False: []}
        self._grad_trace = True
        self._next_call = self._replays = 0
        self._backward_queued = self._creates_graph = False
        self._depth = 0
        self._grad_began = False
        self._borrowed: list[Unit] = []
        self.skipped: LayerTurns | None = None
        self.launched: list[int] | None = None
        self.scales: WeightScales | None = None
        self._handles: list[Any] = []
        for unit in self.units:
            self._hook(unit)

    def _hook(self, unit: Unit) -> None:
        for codes in (bucket.codes for bucket in unit.buckets if bucket.codes is not None):
            codes.on_demand = partial(self._use_codes, unit, codes)
            if isinstance(codes, GatheredFloat8):
                self.scales = codes.scales
            codes.read_on_demand = partial(self.use_on_demand, [unit])
            unit.has_codes = unit.in_codes = True
        before, after = _ForwardHook(self, unit, enter=True), _ForwardHook(self, unit, enter=False)
        modules = [unit.module]
        if unit is self.units[0]:  # its modules are also called one by one, not only through the root's forward
            modules += owners(unit, unit.module)
        for module in modules:
            # First of all, so that other hooks find parameters whole; and at the end also of a forward that raises, or
            # its uses would never be over.
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def unhook(self) -> None:
        """Let go of the modules, and of the buckets: compiled code that calls a hook still finds nothing to gather."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for unit in self.units:
            unit.buckets = []
        self.forget_order()
        self._unit_of.clear()

    # ---- forward ----

    def enter(self, unit: Unit, *, other_code: bool = False) -> None:
        """A forward that uses `unit` begins.

        Args:
            unit: The unit.
            other_code: Code runs in it that looks at the parameters' classes and memory: what `torch.compile` has
                made calls it, or it is given tensors whose classes are asked before the parameters'.
        """
        if unit is self.units[0] and not unit.depth:
            self.start_trace()
        if not self._depth:
            # As the outermost forward began: a `no_grad` inside of it says nothing of the backward.
            self._grad_began = torch.is_grad_enabled()
            # Whether or not this rank has seen a write. A recomputation has the values that its forward had, and what
            # ranks alone do that have a batch is none of the others'.
            if self.scales is not None and self._announce is None and not in_backward():
                self.scales.forget()
        self._depth += 1
        unit.depth += 1
        if unit.depth == 1:
            # Before the unit's own gather, as on ranks that use what this one has passed over.
            if self.skipped is not None:
                self.skipped.before_forward(unit)
            unit.wants_values = unit.has_codes and (other_code or unit.is_compiled)
            unit.forget_asked()
            # The root's forward may begin before autocast does.
            self.use(unit, in_codes=unit.casts(ahead=unit is self.units[0]) and not in_transform())
            if in_transform():  # whose graphs do not show when a unit's backward begins
                self._hold(unit)
        if unit.has_codes and (unit is not self.units[0] or unit.depth > 1):  # or a module of the root's
            unit.look()

    def leave(self, unit: Unit, *, backward_follows: bool) -> None:
        """A forward that used `unit` ends."""
        unit.depth = max(0, unit.depth - 1)
        self._depth = max(0, self._depth - 1)
        if not self._depth and self._borrowed:
            self._return_borrowed()
        if self._replays and unit.awaited:  # the backward of this unit comes when that of the one around it goes on
            return
        keeps = unit is self.units[0] or not self.reshard_after_forward or self._is_next(unit)
        if not (backward_follows and keeps):
            unit.release()
        elif not unit.depth and unit is not self.units[0]:
            unit.hide()  # who reads it from here on holds it for more than its own backward

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Inside, a unit is computed again in backward: units inside of it stay whole for theirs."""
        self._replays += 1
        try:
            yield
        finally:
            self._replays -= 1

    def _is_next(self, unit: Unit) -> bool:
        """True if `unit` was the next to be gathered last time, as the last unit of a forward is in backward."""
        position, hints = len(self.trace), self._hints[self._grad_trace]
        return hints[position - 1 : position + 1] == [unit, unit]

    def use(self, unit: Unit, *, in_codes: bool = False) -> None:
        """Gather `unit`, or its weights as layers cast them, and start on those that followed it last time."""
        if unit.buckets:
            if is_tracing():
                raise RuntimeError(
                    f"torch.jit.trace over unit {unit.name or 'root'!r} of a stage-3 model: the trace would keep "
                    "released parameters, without values. Trace a plain module with engine.full_state_dict()'s values."
                )
            # Ranks without a batch of their own take part in gathers of values.
            unit.in_codes = in_codes and self._announce is None
            # Before `gather`, which would begin it without counting it or telling others.
            self._launch(unit)
            unit.gather_for_use()
            if not self.reshard_after_backward and torch.is_grad_enabled() and self._announce is None:
                unit.keep()  # not where ranks that only follow hold nothing
            if len(self.trace) >= _TRACE_PER_UNIT * len(self.units):  # nobody calls the root, which would begin anew
                self.start_trace()
            self.trace.append(unit)
            position, hints = len(self.trace), self._hints[self._grad_trace]
            if hints[position - 1 : position] == [unit]:
                self.fetch_ahead(hints[position : position + self.prefetch])

    def _launch(self, unit: Unit) -> None:
        if not unit.under_way:
            number = self._numbers[unit]
            if self._announce is None:
                self._count(number)
            else:
                self._announce(number)
            if self.launched is not None:
                self.launched.append(number)
            unit.start_use()

    def _count(self, number: int) -> None:
        # With 1 added, so that unit 0 counts where the sum is 0.
        self.checksum = (self.checksum * 31 + number + 1) % 32749

    def fetch_ahead(self, units: Iterable[Unit]) -> None:
        """Start on units that will be used soon, on all ranks alike."""
        for unit in units:
            # By what all ranks know alike. Who uses it has it in the form that it needs.
            if not unit.depth and not unit.calls:
                unit.in_codes = unit.casts(ahead=True) and self._announce is None
            self._launch(unit)

    def start_trace(self) -> None:
        """Forget the order of gathers so far as the present one and keep it as the hint for the next."""
        if self.trace and self.skipped is None:  # it is that of this rank alone
            self._hints[self._grad_trace] = self.trace
        self.trace, self._grad_trace = [], torch.is_grad_enabled()

    def forget_order(self) -> None:
        """Fetch nothing ahead before the order of uses is seen again: ranks may have seen different ones."""
        self.trace, self._hints = [], {True: [], False: []}

    # ---- uses outside of the unit's own forward ----

    def use_on_demand(self, units: Sequence[Unit]) -> bool:
        """Gather units whose parameters are read by other code than their module's forward, and keep them.

        They stay until a step changes them, since graphs may hold what was read, and several backwards may come; in a
        forward that began without gradients, until it ends. All ranks run the same code in a forward or a backward; the
        flight recorder names a rank that does not.

        Returns:
            False outside of both, where nothing is gathered.
        """
        backward = in_backward()
        if not self._depth and not backward:
            if not all(unit.hidden for unit in units):
                return False
            # Perhaps one rank alone reads what is there until the backward that follows.
            for unit in units:
                unit.show()
            return True
        for unit in units:
            self._hold(unit)
            if self.skipped is not None:
                self.skipped.before_other(unit)
            self.use(unit)
        # Perhaps nothing else in this backward asks for its end, at which what is held is released.
        if backward:
            self._queue_end()
        return True

    def _use_codes(self, unit: Unit, codes: GatheredCodes) -> None:
        """Gather codes that a graph needs and no forward or backward of their unit has gathered; keep them for it."""
        if self._announce is not None:
            raise RuntimeError(
                f"backward through unit {unit.name or 'root'!r}, whose weights its forward had as layers cast "
                "them, in a step for which some ranks have no batch: these take part in gathers of values alone. Set "
                "communication.parameters to 'values', or give all ranks the same number of batches"
            )
        if in_backward():
            self._queue_end()
            unit.calls.add(_IN_BACKWARD)
        elif self._depth:
            self._hold(unit)
        else:
            raise RuntimeError(
                f"a weight of unit {unit.name or 'root'!r} is released (stage 3), and read outside of a forward and a "
                "backward by way of what autograd has saved. Read the parameter inside `with "
                "zero_strategy.sharding.GatheredParameters(parameters):` on all ranks"
            )
        self._count(self._numbers[unit])
        codes.start_unshard()
        codes.finish_unshard()

    def _hold(self, unit: Unit) -> None:
        """Keep a unit whole for backwards that may follow, or to the end of a forward after which there is none."""
        if self._grad_began or torch.is_grad_enabled() or in_backward():
            self.hold_until_step(unit)
        else:
            unit.depth += 1
            self._borrowed.append(unit)

    def _return_borrowed(self) -> None:
        borrowed, self._borrowed = self._borrowed, []
        # Who reads on demand may write, on all ranks alike, and a backward of an earlier forward may follow.
        if self.scales is not None and self._announce is None and any(unit.has_codes for unit in borrowed):
            self.scales.forget()
        for unit in borrowed:
            unit.depth = max(0, unit.depth - 1)
            unit.release()

    # ---- backward ----

    def new_call(self) -> int:
        """A number for one forward of a unit, by which its backward is known."""
        self._next_call += 1
        return self._next_call

    def before_backward(self, unit: Unit, call: int, *, of_values: bool = False) -> None:
        """The gradient of an output of forward `call` has arrived.

        Args:
            unit: The unit.
            call: See `new_call`.
            of_values: Its graph may hold values of weights that are gathered as codes elsewhere. Codes that it holds
                beside them are gathered when they are computed with.
        """
        # First: it clears the list that this unit enters below.
        self._queue_end()
        self._creates_graph |= torch.is_grad_enabled()
        # Once for all outputs of a forward.
        if call not in unit.calls:
            unit.calls.add(call)
            self._in_backward[unit] = None
            if self.skipped is not None:
                self.skipped.before_backward(unit, call)
            # Another backward that has begun, or a reader, holds all of it; in the other form perhaps.
            if len(unit.calls) == 1 or (of_values and not unit.gathered):
                self.use(unit, in_codes=unit.has_codes and not of_values)

    def after_backward(self, unit: Unit, call: int) -> None:
        """The gradients of the inputs of forward `call` are done."""
        if torch.is_grad_enabled():  # create_graph: second derivatives will need the unit again
            return
        unit.calls.discard(call)
        unit.awaited.discard(call)
        unit.release()
        # Gradients of a unit that was used several times are complete after the last of its backwards.
        if not unit.awaited and not (self.skipped is not None and self.skipped.ends(unit, call)):
            self._queue_end()
            self._in_backward.pop(unit, None)
            self._unit_done(unit.buckets)

    def backward_of_layer_over(self, unit: Unit, first: int, last: int) -> None:
        """The backward of the calls between these has passed a layer that ranks may skip, on all ranks."""
        unit.calls -= {call for call in unit.calls if first < call < last}
        unit.awaited -= {call for call in unit.awaited if first < call < last}
        self._in_backward.pop(unit, None)
        unit.release()

    def reduce_unit(self, unit: Unit) -> None:
        """Reduce a unit's gradients, which are complete in this backward on all ranks."""
        self._unit_done(unit.buckets)

    def unfinished(self) -> Iterator[Unit]:
        """Units, the root apart, whose end in the last backward no input showed, in the order in which they began.

        Before the next one is asked for, the gradients of the one before it are sent: gathers may follow.
        """
        if self.skipped is not None:
            yield from self.skipped.finish()
        yield from (unit for unit in self._in_backward if unit is not self.units[0])

    def _queue_end(self) -> None:
        if not self._backward_queued:
            self._backward_queued = True
            # Not when a backward ends: the reducer asks for unfinished units after that.
            self._in_backward.clear()
            when_backward_ends(self._backward_over)

    def _backward_over(self) -> None:
        self._backward_queued = False
        if self.skipped is not None:
            for unit in self.skipped.finish():
                self._unit_done(unit.buckets)
        if self._creates_graph:  # its units stay until the backward of second derivatives, or the step
            self._creates_graph = False
        else:
            self.release_unused()

    def hold_until_step(self, unit: Unit) -> None:
        """Code outside of the unit's forward has computed with its parameters: keep them until a step changes them.

        Nothing shows when the last backward through such a graph is over: there may be another one, or other losses.
        """
        unit.calls.add(_OUTSIDE)

    def follow_edits(self) -> None:
        """Carry what was written to kept parameters over to the own slices."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.follow_edits()

    def invalidate_unsharded(self, buckets: Iterable[ParameterBucket]) -> None:
        """Values are about to change: what was written to kept ones counts, and they are kept no longer.

        What a forward or a user holds stays whole; it is kept again when it has the new values (`refresh`).
        """
        for bucket in buckets:
            unit = self._unit_of[id(bucket)]
            if bucket.pending:
                bucket.finish_unshard()  # what is sent of it may be what is about to change
            if bucket.codes is not None:
                bucket.codes.invalidate()
            for watch in bucket.watches:
                watch.invalidate_unsharded()
            if bucket.kept:
                bucket.follow_edits()
                bucket.kept, bucket.kept_again = False, bool(unit.depth or unit.pinned)
            unit.calls.discard(_OUTSIDE)  # a backward through values of before would be an error
            unit.release()

    def announce_to(self, call: Callable[[int], None] | None) -> None:
        """Call this with the number of every unit whose gather is about to start, while ranks without data of their own
        take part in this rank's gathers; None: there are none.
        """
        self._announce = call

    def release_idle(self) -> None:
        """Release all that nobody uses, also what is kept."""
        self.invalidate_unsharded(bucket for unit in self.units for bucket in unit.buckets)
        self._forget_again()
        self.release_unused()

    def _forget_again(self) -> None:
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.kept_again = False

    def release_unused(self) -> None:
        """No backward is under way, or gathered values are stale: release all that no forward and no reader uses."""
        # Autograd makes no call at the end of a backward that raised: the next one has to ask anew.
        self._backward_queued = self._creates_graph = False
        for unit in self.units:
            unit.calls &= {_OUTSIDE}
            unit.awaited.clear()
            unit.release()

    def forget_frozen(self) -> None:
        """A step is over: keep units that no step changes no longer for graphs of before it."""
        for unit in self.units:
            if not any(bucket.trainable for bucket in unit.buckets):
                unit.calls.discard(_OUTSIDE)

    def reset(self) -> None:
        """Return to the resting state after an exception tore a forward or a backward apart.

        What is kept stays, as it does on ranks without an exception.
        """
        self._depth = 0
        self._borrowed.clear()
        if self.skipped is not None:
            self.skipped.reset()
        for unit in self.units:
            unit.depth = unit.pinned = 0
            unit.open_calls.clear()
            unit.calls.clear()
        self._forget_again()
        self.release_unused()


class _InputGate:
    """Views of a unit's inputs; when the gradients have passed through all of them, the unit's own backward is over.

    Views, not a custom autograd function, so that the unit may work in place on its input as it could without us. An
    input that gets no gradient, or is overwritten, leaves the gate open until the end of backward.

    As `_OutputHook`, it holds nothing of the engine.
    """

    def __init__(self, unsharder: Unsharder, unit: Unit, call: int, inputs: int) -> None:
        self._unsharder, self._unit, self._call = ref(unsharder), ref(unit), call
        self._inputs = self._missing = inputs

    def view(self, tensor: Tensor) -> Tensor:
        """The unit's own view of an input."""
        view = tensor.view_as(tensor)
        assert view.grad_fn is not None
        view.grad_fn.register_hook(self._passed)
        return view

    def _passed(self, gradients: Any, of_outputs: Any) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._missing = self._inputs  # another backward through the same graph may follow
            if (unsharder := self._unsharder()) is not None and (unit := self._unit()) is not None:
                unsharder.after_backward(unit, self._call)


class _OutputHook:
    """The gradient of an output of one forward has arrived.

    It holds the unsharder weakly: the garbage collector does not see what a graph holds, and a graph that the module
    holds in turn (a loss in an attribute, a forward without a backward) would keep the engine for ever.
    """

    def __init__(self, unsharder: Unsharder, unit: Unit, call: int, of_values: bool) -> None:
        self._unsharder, self._unit, self._call, self._of_values = ref(unsharder), ref(unit), call, of_values

    def __call__(self, gradient: Tensor) -> None:
        """See `Unsharder.before_backward`.

        Raises:
            RuntimeError: If the module is gone, whose parameters this backward needs.
        """
        unsharder, unit = self._unsharder(), self._unit()
        if unsharder is None or unit is None:
            raise RuntimeError(
                "backward through a module that is gone, and whose parameters stage 3 has released: keep the module "
                "until backward is over"
            )
        unsharder.before_backward(unit, self._call, of_values=self._of_values)


class _Look:
    """The modules of a unit, as they were found.

    Args:
        parts: Each module, the ids of its children, and the number of its attributes if that tells enough, else -1.

    Attributes:
        open: Modules whose attributes may have results.
    """

    def __init__(self, parts: list[tuple[ref[nn.Module], list[int], int]]) -> None:
        self._parts = parts
        self.open = [known for known, _, size in parts if size < 0]

    def still_holds(self, module: nn.Module) -> bool:
        """True if the unit of `module` has the same modules, and those without results the same attributes."""
        for known, ids, size in self._parts:
            part = known()
            if part is None or 0 <= size != len(part.__dict__):
                return False
            children = children_of(part)
            # Most have none on either side.
            if (children or ids) and list(map(id, children.values())) != ids:
                return False
        return self._parts[0][0]() is module


class _ForwardHook(EphemeralHook):
    """Forward pre-hook (`enter`) or post-hook of one unit.

    A copy of the module (deepcopy) gets inert hooks when its parameters were whole, else the copy is refused by name.
    """

    def __init__(self, unsharder: Unsharder, unit: Unit, *, enter: bool) -> None:
        self.unsharder, self.unit, self.is_enter = unsharder, unit, enter
        self._left: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sizes: dict[type, int] = {}
        """Numbers of attributes of modules without results among them."""
        self._looks: dict[int, _Look] = {}
        """The last look at each module that has this hook, by id: the root's has several."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        return self._run(is_compiling(), module, args, kwargs, *output)

    @uncompiled
    def _run(self, compiled: bool, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        if self.is_enter:
            return self._before(module, args, kwargs, compiled)
        return self._after(module, output[0])

    def _before(self, module: nn.Module, args: Any, kwargs: Any, compiled: bool) -> Any:
        other_code = compiled or (self.unit.has_codes and any(map(_has_own_code, (*args, *kwargs.values()))))
        self.unsharder.enter(self.unit, other_code=other_code)
        if not torch.is_grad_enabled():
            return None
        call = self.unsharder.new_call()
        # Before the returns below: `_after` takes it off however this ends.
        self.unit.open_calls.append(call)
        if self.unit is self.unsharder.units[0]:
            return None  # the root stays until backward ends
        # Taking a tree apart takes long, and nearly all arguments are tensors or scalars.
        leaves, tree = [*args, *kwargs.values()], None
        if not all(isinstance(leaf, Tensor) or id(type(leaf)) in _SCALARS for leaf in leaves):
            leaves, tree = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return None
        # What is one tensor stays one: modules look (`query is key`).
        inputs = {id(leaves[place]): leaves[place] for place in places}
        gate = _InputGate(self.unsharder, self.unit, call, len(inputs))
        views = {key: gate.view(tensor) for key, tensor in inputs.items()}
        for place in places:
            leaves[place] = views[id(leaves[place])]
        if tree is not None:
            return tree_unflatten(leaves, tree)
        return tuple(leaves[: len(args)]), dict(zip(kwargs, leaves[len(args) :], strict=True))

    def _after(self, module: nn.Module, output: Any) -> None:
        backward_follows = False
        if self.unit.has_codes and self.unit.depth == 1 and self.unit is not self.unsharder.units[0]:
            self.unit.check_asked(tensors_in(output))
        if torch.is_grad_enabled() and self.unit.open_calls:
            call = self.unit.open_calls.pop()
            again = in_backward()  # a recomputation, whose graph may not be used
            for tensor in (*tensors_in(output), *self._left_in(module)):
                if tensor.requires_grad:
                    tensor.register_hook(_OutputHook(self.unsharder, self.unit, call, self.unit.has_values))
                    backward_follows = True
            if backward_follows and not again:
                self.unit.awaited.add(call)
        is_root = self.unit is self.unsharder.units[0]
        self.unsharder.leave(self.unit, backward_follows=backward_follows or (is_root and torch.is_grad_enabled()))

    def _left_in(self, module: nn.Module) -> Iterator[Tensor]:
        """Results that this forward left in attributes of the unit's modules, such as auxiliary losses."""
        look = self._looks.get(id(module))
        if look is None or not look.still_holds(module):
            look = self._looks[id(module)] = self._look_through(module)
        for known in look.open:
            if (part := known()) is None:
                continue
            for value in part.__dict__.values():
                if id(type(value)) in _NO_TENSORS:  # nearly all: this runs in every forward
                    continue
                # A result of an earlier forward that is still there has its hook.
                if isinstance(value, Tensor) and value.grad_fn is not None and value not in self._left:
                    self._left[value] = True
                    yield value

    def _look_through(self, module: nn.Module) -> _Look:
        modules, seen = [module], {id(module)}
        parts: list[tuple[ref[nn.Module], list[int], int]] = []
        for part in modules:
            children = list(children_of(part).values())
            for child in children:
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
            attributes, kind = part.__dict__, type(part)
            if kind not in self._sizes and kind.__module__.startswith(_PLAIN_MODULES):
                if not any(isinstance(value, Tensor) for value in attributes.values()):
                    self._sizes[kind] = len(attributes)
            is_plain = self._sizes.get(kind) == len(attributes)
            parts.append((ref(part), list(map(id, children)), len(attributes) if is_plain else -1))
        return _Look(parts)

    def check_copy(self, call: str) -> None:
        """Raise while the unit's parameters are released: a copy would have none."""
        if not self.unit.gathered:
            raise RuntimeError(released_message(call, self.unit.name))


def _has_own_code(value: Any) -> bool:
    """True for tensors such as nested ones, whose functions do not ask the classes of other arguments."""
    return isinstance(value, Tensor) and (type(value) not in (Tensor, nn.Parameter) or value.is_nested)


# The depth is bounded since objects may refer to each other in a ring.
def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in any nesting of containers, and of objects with attributes, such as dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and isinstance(attributes := getattr(leaf, "__dict__", None), dict):
            yield from tensors_in([held for held in attributes.values() if held is not leaf], depth - 1)


def released_message(call: str, unit: str) -> str:
    """The error for an operation that needs full parameters while they are released."""
    return (
        f"{call} of a sharded module: the parameters of unit {unit or 'root'!r} are released (stage 3) and would be "
        "copied as NaN. Use engine.full_state_dict(), or wrap the call in "
        "`with sharding.GatheredParameters(module.parameters()):`."
    )


def owners(unit: Unit, root: nn.Module) -> list[nn.Module]:
    """Modules of `root`, the unit's own left out, that have a parameter of `unit` themselves, not only in a child."""
    owned = {id(parameter) for bucket in unit.buckets for parameter in bucket.parameters}
    return [
        module
        for module in root.modules()
        if module is not unit.module and any(id(parameter) in owned for parameter in module.parameters(recurse=False))
    ]
