"""The gradient reducer: each bucket is reduced as soon as the plan allows, at the latest when backward ends.

Reductions start as soon as the plan allows, and never later than the end of backward.

Where parameters are whole (stages 0 to 2), buckets leave in the plan's order, each as soon as the parameters that the
plan waits for have their gradients. Where they are gathered (stage 3), the buckets of a unit leave when the backward of
the unit is over: gathers and reductions then interleave alike on all ranks, whatever each rank touched. A unit whose
inputs need no gradient shows no end; its buckets leave with the end of the whole backward.

When its backward ends every rank sends what is left of the expected buckets, absent gradients as zeros, so that nobody
waits for a branch that another rank did not take. Then ranks exchange which parameters they touched, and what anybody
touched besides is reduced by everybody. A parameter that nobody touched keeps its gradient None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.mesh import Mesh
from zero_strategy.fsdp.backward import Backward
from zero_strategy.fsdp.buffers import SharedBuffers
from zero_strategy.fsdp.dtensor import local_values
from zero_strategy.fsdp.grad_accumulation import BufferReuse
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.reduction_plan import Agreement, ParameterHook, ReductionPlan
from zero_strategy.fsdp.released import trained
from zero_strategy.fsdp.unshard import Unsharder
from zero_strategy.quantized.scales import keeps_dtype
from zero_strategy.reproducible.slots import SlotCount
from zero_strategy.runtime.torch_private import in_backward, when_backward_ends


def _no_flags() -> int:
    return 0


def undivided() -> int:
    """A divisor that leaves gradients as they are."""
    return 1


def _nothing() -> None:
    pass


def _same_rules(compared: bool) -> None:
    pass


@dataclass(frozen=True)
class StepAgreement:
    """Contents of the message that ends a reduction, besides which parameters have gradients.

    Attributes:
        own_flags: Gives the bits that all ranks shall learn of; `take_flags` gives those of all.
        rules: Gives a hash of the rules by which this rank updates parameters; see `ReductionPlan.encode`.
        rules_differ: Called on all ranks where such hashes differ, with whether this rank's was compared; raises.
    """

    own_flags: Callable[[], int] = _no_flags
    rules: Callable[[], int] = _no_flags
    rules_differ: Callable[[bool], None] = _same_rules


class GradientReducer:
    """Collects gradients through hooks on parameters and reduces them bucket by bucket.

    Args:
        buckets: Gradient buckets in the order in which they are expected to be complete.
        mesh: The data-parallel ranks.
        per_step: Reduce at the last backward of a step only (`no_sync` marks the others).
        unsharder: What gathers the parameters, None where they are whole. The sequence of its gathers is compared
            between ranks.
        reuse: Where the buckets have buffers from that live in a backward only.
        agreement: What else ranks tell each other at the end of a reduction.
        step_unfinished: Whether an optimizer's step began and did not end.
        check_states: Called with the name of what begins; raises if states that it needs are on the host.
        reduction_begins: Called when a backward begins that will reduce gradients.
        divisor: Asked when a backward begins: by what its gradients are to be divided.
        buffers: Those of the module, which ranks keep equal; None: each has its own.
        slots: The slot at hand, where a step is a number of slots; it says which backward ends a step.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        mesh: Mesh,
        per_step: bool,
        unsharder: Unsharder | None = None,
        *,
        reuse: BufferReuse,
        agreement: StepAgreement,
        step_unfinished: Callable[[], bool],
        check_states: Callable[[str], None],
        reduction_begins: Callable[[], None],
        divisor: Callable[[], int] = undivided,
        buffers: SharedBuffers | None = None,
        slots: SlotCount | None = None,
    ) -> None:
        self.slots = slots
        self._slot_begins: Callable[[], object] = _nothing
        self._slot_ends: Callable[[], object] = _nothing
        self._backwards_left: int | None = None  # of the slot at hand; None: nobody has said, and there is one
        self.buckets, self.mesh, self.per_step = list(buckets), mesh, per_step
        self._buffers = buffers
        self._reuse = reuse
        self.plan = ReductionPlan([len(bucket.bucket.parameters) for bucket in self.buckets])
        self._unsharder = unsharder
        self._agreement, self._step_unfinished, self._check_states = agreement, step_unfinished, check_states
        self._reduction_begins = reduction_begins
        self._announce: Callable[[str, Any], None] | None = None
        self._agreed_flags = 0
        self.reductions = 0
        """How many have ended, on all ranks alike."""
        self._divisor = divisor
        self._sync = True
        self._joined = self._paused = False
        self._began = False
        self._within: set[int] | None = None
        self._backward = Backward(len(self.buckets))
        """The one that runs, or the last one."""
        self._numbers = {id(bucket.bucket): number for number, bucket in enumerate(self.buckets)}
        self._hooks: list[Any] = []
        self._unreduced = False
        self._hook()
        self.make_masters()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank where the placement can (`per_step` reduction).

        Under `per_micro_batch` reduction nothing changes: gradients are summed into the owned slice as always.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def joined(self, *, anyway: bool = False) -> Iterator[None]:
        """One backward, in however many calls of autograd: it ends with the block.

        `anyway`: Also where no gradient comes in it, as on other ranks some may.
        """
        assert not self._joined
        self._joined, self._began = True, False
        try:
            yield
            if anyway and not self._began:
                self._begin()
                self._backward.running = False
            self._joined = False
            if self._began:
                self._finish_backward()
        finally:
            self._joined = self._began = False

    @contextmanager
    def within(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Only these get gradients from backwards inside, as all ranks know: no other bucket is expected to leave."""
        before, self._within = self._within, {id(parameter) for parameter in parameters}
        try:
            yield
        finally:
            self._within = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards inside give no gradients to parameters: their end, and that of a unit's, is no reason to reduce.

        Where they do after all (re-entrant checkpoints, which cannot be cut) they are reduced, and refused in slots.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _hook(self) -> None:
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.bucket.parameters):
                trainable = parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen one takes hooks too, and keeps them when it is unfrozen
                hook = ParameterHook(self, number, index)
                self._hooks.append(parameter.register_hook(hook.before))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook.after))
                parameter.requires_grad_(trainable)

    def make_masters(self) -> None:
        """Keep master weights, where they are due, of what requires a gradient now (it may have been unfrozen)."""
        for bucket in self.buckets:
            parameters = bucket.bucket
            if parameters.keeps_master and not parameters.has_master:
                if any(parameter.requires_grad for parameter in parameters.parameters):
                    parameters.make_master()

    def follow_slots(self, begins: Callable[[], object], ends: Callable[[], object]) -> None:
        """Call these when a forward begins that trains, and when the backward of a slot is over."""
        self._slot_begins, self._slot_ends = begins, ends

    def unhook(self) -> None:
        """Let go of the parameters and the buckets."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # Before the buckets go: it drops what an interrupted backward has left in them.
        self.reset()
        self._reuse.close()
        self.buckets, self._numbers = [], {}
        self.plan, self._backward = ReductionPlan([]), Backward(0)

    def before_forward(self, *, trains: bool = True) -> None:
        """Look for unfrozen parameters, gradients that were removed, and a backward that an exception tore apart.

        `trains`: The forward is one of a micro-batch, as far as can be told.
        """
        # A forward inside of a backward is a checkpoint's recomputation: nothing is torn apart.
        if self._backward.running and not in_backward():
            warnings.warn("an earlier backward did not finish: gradients since the last step are dropped", stacklevel=2)
            self.reset()
        # Removed gradients go now, before activations need the memory; in a backward hooks empty slots, too.
        if not self._backward.running:
            for bucket in self.buckets:
                bucket.sync_removed()
            if trains:
                self._slot_begins()
        self.make_masters()

    # ---- during backward ----

    def before_gradient(self, hook: ParameterHook) -> None:
        """Autograd is about to add to `p.grad`: the handle makes room, so that autograd hands its tensor over."""
        # Few calls: this and the next run for every parameter in every backward.
        if not self._backward.running:
            self.begin_backward()
        backward, number, index = self._backward, hook.number, hook.index
        bucket = self.buckets[number]
        if number not in backward.begun:
            bucket.bucket.make_master()
            backward.begin(number, bucket)
        if index in bucket.filled:  # in the first backward of a step it is empty
            bucket.bucket.parameters[index].grad = None
            backward.awaited.add(hook)

    def after_gradient(self, hook: ParameterHook, parameter: Tensor) -> None:
        """The parameter's gradient of this backward is in `p.grad`."""
        backward, number, index = self._backward, hook.number, hook.index
        bucket = self.buckets[number]
        if backward.awaited:
            backward.awaited.discard(hook)
        gradient = parameter.grad
        if gradient is None:
            if keeps_dtype(parameter):
                raise ValueError(
                    f"{bucket.bucket.names[index]} requires a gradient since the engine was made, and is quantised: "
                    "its layer gives none. Freeze it again (requires_grad_(False)) and train an adapter"
                )
            # A function of the user's has none for it: nothing is added, and what was there stays.
            if index in bucket.live:
                bucket.show(index)
            return
        if backward.divide_by != 1:
            gradient = gradient / backward.divide_by  # not in place: other parameters' may be the same tensor
        reduces = self._reduces
        if self.slots is not None and self._paused:
            raise RuntimeError(
                f"the gradient of parameter {bucket.bucket.names[index]!r} comes in the input half of a backward, as "
                "with re-entrant checkpoints: with reproducible.slots each slot's come in the weight half. Use "
                "torch.utils.checkpoint with use_reentrant=False, or a schedule with whole backwards (1f1b)"
            )
        if self.slots is not None and number in backward.left and index in backward.seen[number]:
            raise RuntimeError(
                f"the gradient of parameter {bucket.bucket.names[index]!r} comes in two parts in one backward, as with "
                "re-entrant checkpoints that share it: with reproducible.slots the order of their sum would depend on "
                "the ranks. Use torch.utils.checkpoint with use_reentrant=False, or activation_checkpointing"
            )
        if not reduces:
            # Its sums wait for a later backward, from here on in a buffer that stays.
            bucket.keep_whole()
        bucket.accumulate(index, gradient)
        parameter.grad = bucket.handle(index)
        bucket.filled.add(index)
        backward.seen[number].add(index)
        self.plan.arrivals.append(number)
        # Stage 3 waits for the end of the unit: gathers and reductions interleave alike on all ranks.
        if reduces and self._unsharder is None:
            self._launch_full()

    def unit_done(self, buckets: Sequence[ParameterBucket]) -> None:
        """The backward of a unit with these parameters is over, on every rank at the same point of its gathers."""
        if self._paused:
            return
        if not self._backward.running:
            # Other ranks reduce this unit now, also if no gradient has come on this one.
            self.begin_backward()
        if self._reduces:
            self._launch_unit(buckets)

    def _launch_unit(self, buckets: Sequence[ParameterBucket]) -> None:
        numbers = [self._numbers[id(bucket)] for bucket in buckets if id(bucket) in self._numbers]
        for number in sorted(numbers):
            if number not in self._backward.left and self.plan.trains(number):
                self._launch(number)

    def take_flags(self, further: Iterable[Communicator] = ()) -> int:
        """The flags that ranks have agreed upon since the last call; see `StepAgreement.own_flags`.

        Args:
            further: Groups of ranks that train other parts of the model, whose flags count too. Then a collective.
        """
        flags, self._agreed_flags = self._agreed_flags, 0
        for group in further:
            for other in group.all_gather_small(torch.tensor([flags], dtype=torch.int32)):
                flags |= int(other)
        return flags

    def announce_to(self, call: Callable[[str, Any], None] | None) -> None:
        """Call this before whatever ranks without data of their own must `follow`; None: there are no such ranks."""
        self._announce = call

    def begin_backward(self) -> None:
        """Ask autograd for a call at the end of the backward that is running.

        Raises:
            RuntimeError: If an optimizer's step raised before it was over, so that `zero_grad` missed the parameters.
        """
        self._begin()
        when_backward_ends(self._end_backward)

    def _begin(self) -> None:
        if self._step_unfinished():
            raise RuntimeError("the last optimizer step ended with an exception: call engine.reset() before going on")
        self._check_states("a backward")
        if self._announce is not None:
            # Before a bucket begins: that takes in what the user did to `p.grad`, which followers have to do as well.
            self._announce("backward", self.shown())
        divide_by, continues = self._divisor(), self._joined and self._began
        if self.slots is not None:
            divide_by = 1  # the mean is taken of the whole sum
            if not continues:
                self._begin_slot(self.slots)
        if not continues:
            self._backward = Backward(len(self.buckets))
        # At once: what is interrupted from here on is a backward that did not end.
        self._backward.divide_by, self._backward.running = divide_by, True
        if not continues:
            self._reuse.open()
            self._expect_gradients()
        self._began = True

    def _begin_slot(self, slots: SlotCount) -> None:
        if self._backwards_left == 0:
            raise RuntimeError("a micro-batch has more backwards than micro_batch(backwards=...) says")
        held = (bucket.live or bucket.unreduced for bucket in self.buckets)
        slots.begin(dropped=not any(held))

    def begin_slots(self) -> None:
        """All micro-batches of a step are about to run, mixed; each backward is inside of `SlotCount.at`.

        Raises:
            RuntimeError: If the step has them already.
        """
        assert self.slots is not None
        self.before_forward(trains=False)
        self._begin_slot(self.slots)

    def _expect_gradients(self) -> None:
        """A backward begins: the plan says which gradients are expected; if they are reduced, others are told."""
        self.plan.begin([trained(bucket.bucket.parameters, self._within) for bucket in self.buckets])
        if self._reduces:
            self._reduction_begins()

    @property
    def in_backward(self) -> bool:
        """A backward goes on, or was interrupted."""
        return self._backward.running

    @property
    def _reduces(self) -> bool:
        if self.slots is not None:  # whatever `no_sync` says
            return self._backwards_left in (None, 1) and (self.slots.is_last or not self.per_step)
        return self._sync or not self.per_step

    def _launch_full(self) -> None:
        order, expected, backward = self.plan.order, self.plan.expected, self._backward
        while backward.next < len(order):
            number = order[backward.next]
            wanted, seen = expected[number], backward.seen[number]
            if len(seen) < len(wanted) or not wanted <= seen:  # a comparison of sets for each gradient takes long
                return
            if wanted:  # else it leaves when ranks have agreed, if anybody touched it
                self._launch(number)
            backward.next += 1

    def _launch(self, number: int) -> None:
        if self._announce is not None:
            self._announce("launch", number)
        self._start(number)

    def _start(self, number: int) -> None:
        bucket = self.buckets[number]
        self._backward.begin(number, bucket)  # a rank that did not touch it notices `zero_grad` here
        self._backward.leave(number, bucket)

    def _end_backward(self) -> None:
        self._backward.running = False
        for hook in self._backward.awaited:  # torch.autograd.grad computes gradients and leaves `p.grad` alone
            self.buckets[hook.number].resume(hook.index)
        if self._paused and not any(self._backward.seen):
            self._reuse.close()
        elif not self._joined:
            self._finish_backward()
            self.mesh.observed.mark("backward over")

    def _finish_backward(self) -> None:
        if self._reduces:
            self.reduce()
        else:
            self._unreduced = True
            self._reuse.close()
            for number in self._backward.begun:
                self.buckets[number].own.copy_waiting()
        if self.slots is not None:
            self._end_slot(self.slots)

    def _end_slot(self, slots: SlotCount) -> None:
        """A backward of a slot is over."""
        if self._backwards_left is not None:
            self._backwards_left -= 1
            if self._backwards_left:
                return
        for bucket in self.buckets:
            bucket.wait_for_slots()
        slots.end()
        self._slot_ends()

    @contextmanager
    def backwards_of_slot(self, count: int) -> Iterator[None]:
        """A micro-batch of so many backwards.

        Raises:
            RuntimeError: If there were others.
        """
        self._backwards_left = count
        try:
            yield
            if self._backwards_left:
                raise RuntimeError(
                    f"micro_batch(backwards={count}) had {count - self._backwards_left}; say how many there are, since "
                    "gradients leave with the last of them"
                )
        finally:
            self._backwards_left = None

    def notice_dropped(self) -> None:
        """Without gradients of its micro-batches so far a step in slots begins anew."""
        if self.slots is None or self.slots.mixed:
            return
        if self.slots.micro and not self._backward.running:
            for bucket in self.buckets:
                bucket.sync_removed()
            if not any(bucket.live or bucket.unreduced for bucket in self.buckets):
                self.slots.micro = 0

    # ---- the end of a backward, or of a step ----

    def reduce(self, *, outside: bool = False) -> None:
        """Reduce every bucket that any rank touched since its last reduction. A collective.

        Args:
            outside: No backward has just ended.

        Raises:
            RuntimeError: If ranks gathered different units, so that values may be wrong (stage 3), or would update
                their parts of the parameters by different rules.
        """
        with self._inconsistent_after_errors():
            if self._unsharder is None:
                for number in self.plan.order[self._backward.next :]:  # others may have sent them early, in this order
                    if self.plan.expected[number]:
                        self._launch(number)
            else:
                for unit in self._unsharder.unfinished():  # on another rank an input may have shown its end
                    self._launch_unit(unit.buckets)
            self._begin_accumulated()
            if self._announce is not None:
                self._announce("agree", outside)
            agreed = self._agree(compares=True)
        self._reuse.close()
        # Last: a rank that raised earlier would leave the others in their reductions.
        self._check(agreed, compares=True)

    @contextmanager
    def _inconsistent_after_errors(self) -> Iterator[None]:
        """Drop all sums by `reset` if some buckets took theirs and others did not, as those of half a backward."""
        try:
            yield
        except BaseException:
            # The next step is refused, and `reset` drops what there is, as after an exception inside of a backward.
            self._backward.running = True
            raise

    def _begin_accumulated(self) -> None:
        """Begin the reduction of buckets with local sums of earlier micro-batches, which `no_sync` did not reduce."""
        for number, bucket in enumerate(self.buckets):
            if bucket.unreduced:
                self._backward.begin(number, bucket)

    def shown(self) -> list[list[bool | Tensor | None]]:
        """Changes by the user to every `p.grad`, by bucket; see `GradientViews.changes`."""
        return [bucket.shown.changes() for bucket in self.buckets]

    def follow_shown(self, shown: Sequence[Sequence[bool | Tensor | None]]) -> None:
        """Do what another rank's `shown()` says."""
        for bucket, theirs in zip(self.buckets, shown, strict=True):
            bucket.shown.follow(theirs)

    def follow(self, what: str, value: Any) -> None:
        """Take part in what a rank with data announces, without data. A collective, as there."""
        if what == "backward":
            self._backward = Backward(len(self.buckets))
            self._expect_gradients()
            self.follow_shown(value)
        elif what == "launch":
            self._start(value)
        else:
            assert what == "agree"
            if value:
                # As in `settle` of the rank with data: no bucket has left early.
                self.plan.expect_nothing()
                self._backward.left.clear()
            with self._inconsistent_after_errors():
                self._begin_accumulated()
                agreed = self._agree(compares=False)
            self._check(agreed, compares=False)

    def _agree(self, *, compares: bool) -> Agreement:
        """Ends the reduction. `compares`: this rank knows by which rules the next step updates parameters."""
        backward = self._backward
        # What a bucket sent when it left is no local sum any more: `seen` still has it.
        touched = [
            bucket.unreduced | bucket.late.keys() | (backward.seen[number] if number in backward.left else set())
            for number, bucket in enumerate(self.buckets)
        ]
        late = [
            number in backward.left and bool(bucket.late or bucket.unreduced)
            for number, bucket in enumerate(self.buckets)
        ]
        rules = self._agreement.rules() if compares else 0
        message = self.plan.encode(touched, late, self._sequence(), self._agreement.own_flags(), rules)
        # A copy, for `learn` sorts the plan's own for the next backward.
        order = list(self.plan.order)
        length = message.numel()
        if self._buffers is not None:  # as DDP, not between the micro-batches of one step
            message = torch.cat([message, self._buffers.changes(shares=self._sync and compares)])
        messages = torch.stack(self.mesh.control.all_gather_small(message, "the parameters that have gradients"))
        agreed = self.plan.learn(messages[:, :length])
        # All ranks know now what is missing, and launch it in one order.
        for number in order:
            if agreed.late[number] or (agreed.touched[number] and number not in backward.left):
                backward.leave_again(number, self.buckets[number])
        self._agreed_flags |= agreed.flags
        self.reductions += 1
        self._unreduced = False
        backward.agreed()
        for number, indices in enumerate(agreed.touched):
            bucket = self.buckets[number]
            bucket.finish()
            bucket.end_slot()
            bucket.hold(indices, shown=backward.seen[number])
        if self._buffers is not None:
            self._buffers.share(messages[:, length:])
        return agreed

    def _check(self, agreed: Agreement, *, compares: bool) -> None:
        _check_gathers(agreed.same_gathers)
        if not agreed.same_rules:
            self._agreement.rules_differ(compares)

    def _sequence(self) -> int:
        """Tells what this rank gathered and sent so far, in order: the same on all ranks, or values are wrong."""
        # 15 bits, as the message has int16s; hashes of integers, unlike those of strings, are equal in all processes.
        return hash((self._unsharder.checksum, *self._backward.left)) & 0x7FFF if self._unsharder is not None else 0

    def reset(self) -> None:
        """Forget a backward that an exception tore apart, and all that was summed with it since the last step.

        After an exception outside of backward gradients stay as they are.
        """
        if self._backward.running:
            self.drop()

    def drop(self) -> None:
        """Forget all gradients, those that `no_sync` kept back and the factors of a clip that wait with them too."""
        for bucket in self.buckets:
            bucket.clear()
        self._reuse.close()
        self._backward, self._unreduced = Backward(len(self.buckets)), False

    def settle(self) -> None:
        """Before gradients are used: reduce what `no_sync` kept back, follow what the user did to `p` and `p.grad`.

        Raises:
            RuntimeError: If the last backward did not finish.
        """
        self.check_whole()
        if self.slots is not None and any(bucket.slots and not bucket.slots.empty for bucket in self.buckets):
            self.slots.check_complete("gradients are asked for")
        for bucket in self.buckets:
            bucket.finish()
            bucket.sync_handles()
            bucket.bucket.follow_edits()
        if self._unreduced:
            self._check_states("a reduction of gradients")
            self.plan.expect_nothing()
            self._backward.left.clear()
            self.reduce(outside=True)

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to this rank's gradient outside of a backward, as one more micro-batch would; `settle` reduces it.

        Args:
            parameter: A trainable one of the buckets.
            gradient: Of its shape, whole or a `DTensor`; any floating-point dtype. Where ranks hold some experts each,
                of this rank's, then the mean over those that hold others is taken to be the same, or of all experts.

        Raises:
            RuntimeError: If the last backward did not finish.
            ValueError: If the parameter is none of them, is frozen, or has another shape.
        """
        places = ((b, i) for b in self.buckets for i, known in enumerate(b.bucket.parameters) if known is parameter)
        if (place := next(places, None)) is None or not parameter.requires_grad:
            raise ValueError("add_gradient takes a trainable parameter of the engine's module")
        bucket, index = place
        part = bucket.bucket.parts[index]
        if gradient.shape not in (parameter.shape, part.shape):
            raise ValueError(f"a gradient of shape {tuple(gradient.shape)} for a parameter of {tuple(parameter.shape)}")
        self.check_whole()
        if bucket.bucket.ranks.neighbours > 1:
            gradient = _of_own_experts(gradient, bucket.bucket, index)
        bucket.bucket.make_master()
        # As in a backward: it notices `zero_grad`, and keeps earlier reduced sums apart.
        bucket.begin()
        bucket.accumulate(index, local_values(part, parameter, gradient), lent=True)
        bucket.show(index)
        self._unreduced = True

    def check_whole(self) -> None:
        """Before parameters or gradients are used or saved.

        Raises:
            RuntimeError: If the last backward did not finish.
        """
        # In a backward it is running by right, as where a hook adds a gradient.
        if self._backward.running and not in_backward():
            raise RuntimeError("the last backward ended with an exception: call engine.reset() before the next step")


def _check_gathers(same: bool) -> None:
    if not same:
        raise RuntimeError(
            "ranks ran different modules in this step, or in a different order, so that stage 3 gathered one unit "
            "on one rank while another rank sent a different one: losses and gradients may be wrong. Every rank "
            "must run the same units in the same order. Where ranks skip different layers of a list (LayerDrop), set "
            "units.may_skip: true; use stage 2 for models whose branches differ by rank otherwise."
        )


def _of_own_experts(gradient: Tensor, bucket: ParameterBucket, index: int) -> Tensor:
    """The sum, over ranks that hold different experts, of gradients of this rank's experts. A collective of them.

    Args:
        gradient: Of all experts, or of those that this rank holds, which then counts for the others as well.
        bucket: Has the parameter.
        index: Of the parameter.
    """
    part, others = bucket.parts[index], bucket.ranks.parts
    if gradient.shape == part.local_shape:
        return gradient * others.size
    flat = gradient.detach().reshape(-1).clone()
    others.reduce_scatter(flat, bucket.names[index]).wait()
    return flat.view(others.size, -1)[others.rank].view(part.local_shape)
