"""The ways to take an optimizer's step: what each has to answer, and the frame of those that step on pieces.

An optimizer has one method for as long as it is attached, the first of `sharded_optimizer.METHODS` that takes it. The
public step hooks of `torch.optim.Optimizer` call `begin` before torch's own `step()`, and `end` after it:

    begin    gradients are reduced; the param groups list pieces; the method's own code updates them, or
    step()   torch's code does, on the pieces that `begin` gave a gradient
    end      the param groups list the module's parameters again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector
from zero_strategy.optim.own_steps import state_after_steps, trial_state
from zero_strategy.optim.pieces import Pieces, Row
from zero_strategy.optim.power_sums import Shard
from zero_strategy.optim.state_book import StateBook
from zero_strategy.optim.streamed import Update
from zero_strategy.runtime.torch_private import without_grad


class SteppedOptimizer(Protocol):
    """The optimizer whose steps a method takes; see `sharded_optimizer.ShardedOptimizer`.

    Attributes:
        optimizer: The user's object.
        model: The sharded model.
        pieces: Of its parameters.
        book: Its state.
        skip_next: The step changes nothing.
        stopped_by: The exception, in words, that ended the last update of values half-way.
    """

    optimizer: Optimizer
    model: ShardedModel
    pieces: Pieces
    book: StateBook
    skip_next: bool
    stopped_by: str

    def settle(self) -> None:
        """Reduce gradients, and agree on whether the step is to be taken."""

    def hide_state(self) -> dict[Tensor, dict[str, Any]]:
        """Let the optimizer's code have state by piece, and the user none; gives that mapping, still empty."""

    def show_state(self) -> None:
        """Let the user have state by parameter."""

    def take_state_back(self) -> None:
        """Keep what the optimizer's code has left as state by piece, and let the user have it by parameter."""

    def follow_assigned_state(self) -> None:
        """Take over what the user has assigned to `optimizer.state`."""

    def coded(self, parameter: nn.Parameter) -> bool:
        """True if the states of a parameter have 8 bits."""

    def show_new_values(self) -> None:
        """Carry the pieces' new values to the module's parameters."""

    def record_before(self, buckets: Sequence[ParameterBucket]) -> None:
        """Let recorders look at values that are about to change."""

    def record_after(self) -> None:
        """Let them look at what has changed since."""


class StepMethod(ABC):
    """One way to take one optimizer's steps.

    Args:
        sharded: The optimizer.

    Attributes:
        joint_state: All state is under the first parameter.
        opaque_state: Why single values of `optimizer.state` cannot be shown; "": they can.
        changed: Buckets that the step under way changes.
        changed_parameters: Their parameters that have a gradient.
        copied: The step writes low-precision parameters along with their master weights.
        evaluating: The step evaluates a closure just now, before it has changed anything.
        running: `begin` has begun to change things, and `end` has not been reached.
    """

    joint_state: ClassVar[bool] = False
    opaque_state: str = ""
    running: bool = False
    evaluating: bool = False
    copied: bool = False

    def __init__(self, sharded: SteppedOptimizer) -> None:
        self.sharded, self.optimizer, self.model = sharded, sharded.optimizer, sharded.model
        self.changed: list[ParameterBucket] = []
        self.changed_parameters: list[nn.Parameter] = []
        # Taken now: a moment later the state is divided, and has no whole value to take a sample from.
        self.begins_with = trial_state(sharded.optimizer)

    @classmethod
    @abstractmethod
    def takes(cls, optimizer: Optimizer, model: ShardedModel) -> bool:
        """True if it is the method for an optimizer that no method before it in `METHODS` takes."""

    @abstractmethod
    def begin(self, args: Any, kwargs: Any) -> Any:
        """Before torch's `step()`.

        Returns:
            The arguments that torch's step gets, where they are others; else None.
        """

    @abstractmethod
    def end(self) -> None:
        """After torch's `step()`, or after one that raised: the groups and the state are the user's again."""

    def check_groups(self) -> None:  # noqa: B027 (most have nothing to look at)
        """Raise if the groups hold a parameter that this method cannot step on.

        Raises:
            ValueError: Naming it.
        """

    # ---- state ----

    def sample_state(self, group: dict[str, Any]) -> dict[str, Any]:
        """The state that steps make for a few elements of a param group."""
        return state_after_steps(self.optimizer, self.begins_with, group)

    def split_state(self, states: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """State in the optimizer's own form, by parameter."""
        return states

    def join_state(self, states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The inverse, by the parameters' ids."""
        return states

    def flat_state(self, values: dict[str, Any]) -> dict[str, Any]:
        """One parameter's state with nothing nested in it."""
        return values

    # ---- state in a tier ----

    def offloaded_place(self, bucket: ParameterBucket, cut: Piece, key: str, shape: torch.Size) -> OffloadedPart | None:
        """The place in a tier of one state of a piece; None: it is in memory."""
        return None

    def offloaded_vectors(self) -> Iterable[tuple[ParameterBucket, OffloadedVector]]:
        """All vectors of state in a tier, and whose they are."""
        return ()

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that steps have taken for what passes through."""
        return 0

    def reduction_begins(self) -> None:  # noqa: B027
        """A backward begins that will reduce gradients."""

    def close(self) -> None:  # noqa: B027
        """Take no more steps; state in a tier is lost."""


class PieceStep(StepMethod):
    """A step on this rank's pieces: the frame that all elementwise and whole-matrix optimizers share.

    Attributes:
        updates: Of the step under way: those that this package's code carries out; others are torch's.
        records_itself: `take` tells the model's recorders what it changes.
        by_hand: Groups whose updates are `updates`, by id; None: all.
    """

    records_itself = False

    def __init__(self, sharded: SteppedOptimizer) -> None:
        super().__init__(sharded)
        self.updates: list[Update] = []
        self.by_hand: set[int] | None = set()

    @abstractmethod
    def prepare(self) -> None:
        """Before the groups list pieces: decide who takes this step, and take note of what it needs."""

    @abstractmethod
    def take(self, scale: float) -> None:
        """Carry out `updates`, with gradients multiplied by `scale`. Called on all ranks, also with no update."""

    def begin(self, args: Any, kwargs: Any) -> Any:
        """See `StepMethod`: what is left for torch's code has its gradient, the rest is updated."""
        given = run_closure_first(args, kwargs)
        self._begin(kwargs.get("grad_scale", 1.0))
        return given

    @without_grad  # once, not in each of the many calls below
    def _begin(self, scale: float) -> None:
        sharded = self.sharded
        # First, as long as `optimizer.state` is the user's: `hide_state` puts torch's own mapping in its place.
        sharded.follow_assigned_state()
        # All that may refuse the step comes before the groups list pieces: an error leaves groups and values alone.
        sharded.settle()
        self.prepare()
        self._list_pieces()
        # Pieces are listed all the same, without gradients: torch's `step()` runs in any case, and finds nothing to do.
        if sharded.skip_next:
            return
        # Recorders copy former values, which `take` overwrites; a rule that goes bucket by bucket tells them itself.
        if not self.records_itself:
            sharded.record_before(self.changed)
        # Waits for the gather of the step before, which may still be sending the values that `take` changes.
        self.model.invalidate_unsharded(self.changed, recorded=True)
        try:
            self.take(scale)
        except Exception as error:
            # Some values may have changed and others not; the watchdog tells waiting ranks the cause by these words.
            sharded.stopped_by = f"{type(error).__name__}: {error}"
            raise

    def _list_pieces(self) -> None:
        """Let the groups list pieces, and find out what the step changes, and by which gradients."""
        sharded, groups = self.sharded, self.optimizer.param_groups
        rows, entries, skips = sharded.pieces.rows(), sharded.book.entries, sharded.skip_next
        self.updates, self.changed_parameters = [], []
        changed: dict[int, ParameterBucket] = {}
        gradients: dict[int, dict[int, tuple[Shard, float]]] = {}
        # Both before the first group changes: `end` then puts all groups back, also after an error half-way.
        sharded.pieces.full, self.running = [group["params"] for group in groups], True
        states = sharded.hide_state()
        states.update(sharded.book.by_piece)
        for group, of_group in zip(groups, rows, strict=True):
            by_hand = self.by_hand is None or id(group) in self.by_hand
            for row in of_group:
                bucket, piece = row.bucket, row.piece
                # Ranks agree on `live`: each publishes the same buckets afterwards, also one that has no piece of them.
                if row.index in row.gradients.live:
                    self.changed_parameters.append(row.parameter)
                    changed[id(bucket)] = bucket
                    if not skips:
                        entry = entries.get(id(row.parameter)) or sharded.book.begin(row.parameter)
                        if piece is None:
                            entry.steps += 1
                if piece is None or row.cut is None or skips:
                    continue
                # Once per bucket, whose gradients are split by one call of torch.
                if id(bucket) not in gradients:
                    gradients[id(bucket)] = self.gradients_of(row)
                found = gradients[id(bucket)].get(row.index)
                if found is None:
                    continue
                gradient, factor = found
                if by_hand:
                    state = states.setdefault(piece, {})
                    self.updates.append(Update(group, row, piece, row.cut, gradient, factor, state))
                else:
                    assert isinstance(gradient, Tensor), "what is in tiers is updated by a rule"
                    # Torch refuses a gradient whose dtype or shape is not that of its parameter.
                    piece.grad = gradient.to(piece.dtype).view(piece.shape)
            group["params"] = [row.piece for row in of_group if row.piece is not None]
        self.changed = list(changed.values())

    def gradients_of(self, row: Row) -> dict[int, tuple[Shard, float]]:
        """Flat gradients of the row's bucket, by index, and what an update has to multiply them by."""
        return {index: (gradient, 1.0) for index, gradient in row.gradients.owned_gradients().items()}

    def end(self) -> None:
        """See `StepMethod`."""
        self.updates = []  # they hold the gradients
        pieces, self.running = self.sharded.pieces, False
        assert pieces.full is not None
        for group, full in zip(self.optimizer.param_groups, pieces.full, strict=False):
            # A group may list the module's parameters yet, after an exception while pieces were put in: their `p.grad`
            # is the user's.
            for piece in group["params"] if group["params"] is not full else ():
                # The piece stays: a later step that is skipped would use the gradient, and its memory could not go.
                piece.grad = None
            group["params"] = full
        pieces.full = None
        self.sharded.take_state_back()


def run_closure_first(args: Any, kwargs: Any) -> Any:
    """Evaluate a closure before gradients are exchanged for pieces; elementwise optimizers do so first anyway.

    Returns:
        Arguments for torch's step, with a closure that gives the loss; None if there is no closure.
    """
    closure = closure_in(args, kwargs)
    if closure is None:
        return None
    with torch.enable_grad():  # As torch's own steps do, whatever mode the caller is in
        loss = closure()
    return with_closure(args, kwargs, lambda: loss)


def closure_in(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The closure among the arguments of `Optimizer.step`, the optimizer itself first."""
    found: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> Any:
    """The arguments with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
