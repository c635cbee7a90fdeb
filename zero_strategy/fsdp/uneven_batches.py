"""Ranks with different numbers of batches (joined training with weight 0, shared evaluation) or of tokens (the mean).

In evaluation, ranks without a batch left take part in the gathers of those with one. Most steps gather the same units
in the same order as the step before, so that order is the plan of the next step, where all ranks have seen the same:
one message before a batch tells that, and one after it that nothing follows. Another gather than the plan's cannot be
told to ranks that wait in the plan's next one already. So the rank that needs it takes part in the rest of the plan
first, aside of its own values, and then tells of each further gather before it starts.

    for batch, weight in engine.join_batches(loader):
        (loss_fn(model(batch)) * weight).backward()
        optimizer.step(); optimizer.zero_grad()

A rank that has run out repeats its last batch with weight 0 until all have. It does what the others do (forwards,
backwards, steps, saves), so nothing else has to know of it. Before each batch ranks tell each other in one small
message whether they have one; the loop ends when none has.

What the gradient is, by `uneven_batches`:

- `join`: weights are 1, so it is the sum over ranks with a batch, divided by all, as under torch's `Join` by default.
- `join_active`: weights are ranks / ranks with a batch, so it is the mean over those that have one.
- `error`: the loop ends in a ValueError on all ranks.

Ranks that divide layers among them (tensor parallelism) count as one, and must have the same batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from copy import copy
from enum import IntEnum
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.mesh import Mesh
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.runtime.torch_private import tree_map

_STEP_OVER, _NOTHING = -1, -2
"""What ranks tell each other in place of a unit's number while some have no batch: the step is over; no step here."""


class SharedEvaluation:
    """Evaluation steps that all ranks take part in."""

    def __init__(self, model: ShardedModel, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        self._plan: list[int] = []
        """What the last step had: numbers of units that were gathered, and, above them, agreements."""
        self._step: _UnevenStep | None = None

    @contextmanager
    def shared_step(self) -> Iterator[None]:
        """One evaluation step of this rank; ranks without a batch left take part through `drain()` (stage 3)."""
        unsharder = self._model.unsharder
        if self._model.experts.layers:
            self._check_batches(has_one=True)
        if unsharder is None or self._mesh.world_size == 1:
            yield
            return
        # Positive with a batch, negative without one (`drain`).
        everyone = self.exchange(1 + self._digest())
        if min(everyone) > 0:
            self._plan = unsharder.launched = []  # nobody follows: gathers are only noted, as the next step's plan
            try:
                yield
            finally:
                unsharder.launched = None
            return
        unsharder.release_idle()  # as in `drain`: nothing is gathered on any rank
        step = self._step = _UnevenStep(self._model, self, self._agreed(everyone))
        unsharder.announce_to(step.come_to)
        try:
            yield
        finally:
            self._step = None
            unsharder.announce_to(None)
            unsharder.release_idle()
            # Also after an exception: ranks without a batch go through the plan to its end before they listen.
            step.follow_plan()
            self.exchange(_STEP_OVER)
            self._plan = step.done

    def drain(self) -> None:
        """Take part in the other ranks' evaluation steps until no rank has a batch left (stage 3)."""
        unsharder = self._model.unsharder
        if self._model.experts.layers:
            self._check_batches(has_one=False)
        if unsharder is None or self._mesh.world_size == 1:
            return
        # A unit that is whole here takes part in no gather, and the others would wait.
        unsharder.release_idle()
        while max(everyone := self.exchange(-1 - self._digest())) > 0:
            step = _UnevenStep(self._model, self, self._agreed(everyone))
            step.follow_plan()
            done = list(step.plan)
            # The largest is that of ranks with a batch: theirs is a unit, an agreement or `_STEP_OVER`.
            while (number := max(self.exchange(_NOTHING))) >= 0:
                done.append(min(number, step.above))
                if number < step.above:  # else ranks with a batch agree on something
                    unsharder.units[number].gather()
                    unsharder.units[number].release()
            self._plan = done

    def agree(self, value: int) -> int:
        """The least value of all ranks that have a batch in this step, where these must gather alike (stage 3).

        Args:
            value: This rank's; not negative.
        """
        unsharder = self._model.unsharder
        if unsharder is None or self._mesh.world_size == 1:
            return value
        above = len(unsharder.units)
        if self._step is not None:
            self._step.come_to_agreement()
        elif unsharder.launched is not None:
            unsharder.launched.append(above)
        # Above the numbers of units, so that nobody takes it for a gather.
        return min(other for other in self.exchange(above + value) if other != _NOTHING) - above

    def _check_batches(self, *, has_one: bool) -> None:
        """Raise on all ranks if some have a batch and others have none, as tokens travel to experts of all ranks.

        Raises:
            ValueError: Naming the ranks and the way out.
        """
        without = [rank for rank, number in enumerate(self.exchange(int(has_one))) if not number]
        if without and len(without) < self._mesh.world_size:
            raise ValueError(
                f"evaluation with divided experts (mesh.expert) needs as many batches on every rank, and ranks "
                f"{without} have run out before the others: let the sampler pad "
                "(drop_last=False of a DistributedSampler), or leave out what is over (drop_last=True)"
            )

    def exchange(self, number: int) -> list[int]:
        """A number of every rank."""
        # Read at once: it comes with every gather, and there may be thousands of ranks.
        everyone = self._mesh.control.all_gather_small(torch.tensor([number], dtype=torch.int32))
        found: list[int] = torch.cat(everyone).tolist()
        return found

    def _digest(self) -> int:
        # 30 bits, so that what is made of it with either sign fits an int32.
        return crc32(array("q", self._plan).tobytes()) & 0x3FFFFFFF

    def _agreed(self, everyone: list[int]) -> list[int]:
        """The plan, if it is that of all ranks."""
        # 1 + digest or -1 - digest: equal but for the sign.
        return self._plan if len({abs(one) for one in everyone}) == 1 else []


class _UnevenStep:
    """A step in which some ranks have no batch.

    Args:
        model: What is evaluated.
        evaluation: The ranks.
        plan: What those without a batch do by themselves.

    Attributes:
        plan: See the argument.
        done: What this rank has come to.
        above: The number of an agreement, which is no unit.
    """

    def __init__(self, model: ShardedModel, evaluation: SharedEvaluation, plan: list[int]) -> None:
        self._model, self._evaluation, self.plan = model, evaluation, plan
        self.done: list[int] = []
        self.above = len(model.units)
        self._at = 0

    def come_to(self, number: int) -> None:
        """A gather is about to start on this rank, which has a batch."""
        if self._is_next(number):
            return
        everyone = self._evaluation.exchange(number)
        if len({other for other in everyone if other != _NOTHING}) > 1:
            names = {
                rank: "the end of the step" if other == _STEP_OVER else repr(self._model.units[other].name)
                for rank, other in enumerate(everyone)
                if other != _NOTHING
            }
            raise RuntimeError(
                f"ranks evaluate different parts of the model, which stage 3 cannot serve while it is sharded: {names}"
            )

    def come_to_agreement(self) -> None:
        """An exchange among ranks with a batch is about to start, in which the others take part."""
        self._is_next(self.above)

    def follow_plan(self) -> None:
        """Take part in what is left of the plan, as ranks without a batch do."""
        while self._at < len(self.plan):
            number, self._at = self.plan[self._at], self._at + 1
            if number == self.above:
                self._evaluation.exchange(_NOTHING)
            else:
                for bucket in self._model.units[number].buckets:
                    bucket.gather_for_others()

    def _is_next(self, number: int) -> bool:
        """True if the others come to this by themselves; else they have done the rest of the plan."""
        self.done.append(number)
        if self.plan[self._at : self._at + 1] == [number]:
            self._at += 1
            return True
        self.follow_plan()
        return False


WAYS_OUT = (
    "give all ranks as many (drop what is left over, repeat samples, or end the loop earlier), or set uneven_batches: "
    "join (ranks without a batch count with weight 0 in the mean over all ranks) or uneven_batches: join_active (the "
    "mean over the ranks that have a batch)"
)
"""What to do about ranks with different numbers of batches, for messages."""


class JoinedBatches:
    """Pairs of a batch and the weight of its loss, as many on all ranks; can be iterated over again and again.

    Args:
        loader: This rank's batches.
        mesh: The ranks.
        policy: The setting `uneven_batches`.
    """

    def __init__(self, loader: Iterable[Any], mesh: Mesh, policy: str) -> None:
        self._loader, self._mesh, self._policy = loader, mesh, policy
        # Here, for `len()` may be called by one rank alone.
        length = length_of(loader)
        told = mesh.world_group.control.all_gather_small(torch.tensor([-1 if length is None else length]))
        self._lengths = [int(one) for one in told]

    def __len__(self) -> int:
        """Batches of a pass: the most that any rank has.

        Raises:
            TypeError: If the loader of some rank has no length; names the ranks.
        """
        without = [rank for rank, length in enumerate(self._lengths) if length < 0]
        if without:
            raise TypeError(f"the data loaders of rank(s) {without} have no length")
        return max(self._lengths)

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        return joined(self._loader, self._mesh, self._policy)


def length_of(loader: Any) -> int | None:
    """Number of batches that a loader gives, if it knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class _State(IntEnum):
    """Message of a rank before a batch."""

    HAS = 0
    OUT = 1
    EMPTY = 2
    """Out, without a batch that could be repeated."""
    FAILED = 3


_END = object()


class OwnBatches:
    """Batches that a rank's loader gives in one pass.

    Args:
        loader: The loader.
        spare: Gives a batch to repeat where the pass has none; None: there is nothing to ask.
        ended: The pass was over before, so that only a batch to repeat is wanted.

    Attributes:
        given: Batches so far.
        state: What to tell the others.
        error: What the loader raised.
    """

    def __init__(self, loader: Iterable[Any], spare: Callable[[], Any] | None = None, *, ended: bool = False) -> None:
        self.given, self.state = 0, _State.OUT if ended else _State.HAS
        self.error: Exception | None = None
        self._spare, self._last, self._batches = spare, _END, iter(())
        try:
            # An error waits for the first message, which tells all ranks; raised here it would leave them waiting.
            self._batches = iter(loader)
        except Exception as error:
            self.state, self.error = _State.FAILED, error

    @property
    def ended(self) -> bool:
        """True if the rank has run out."""
        return self.state is not _State.HAS

    def advance(self) -> Any:
        """The next batch, or the last one again."""
        if self.state is _State.FAILED:
            return None
        try:
            if self.state is _State.HAS:
                batch = next(self._batches, _END)
                if batch is not _END:
                    self.given, self._last = self.given + 1, _own_containers(batch)
                    return batch
                self.state = _State.OUT
            if self._last is _END and self._spare is not None:
                self._last = self._spare()
        except StopIteration:
            pass  # of `spare`
        except Exception as error:
            self.state, self.error = _State.FAILED, error
            return None
        if self._last is _END:
            self.state = _State.EMPTY
            return None
        return _own_containers(self._last)


def _own_containers(batch: Any) -> Any:
    """Put tensors into other lists and dicts: a step may take things out of those that it is given."""
    return tree_map(lambda leaf: copy(leaf) if isinstance(leaf, MutableMapping) else leaf, batch)


def joined(loader: Iterable[Any], mesh: Mesh, policy: str) -> Iterator[tuple[Any, float]]:
    """One pass over this rank's batches with their weights, repeated ones included. All ranks go through it together.

    Raises:
        ValueError: On all ranks, if some run out before others and the policy is `error`, or one has no batch at all
            to repeat, or ranks that divide layers have different numbers; names ranks and numbers.
        RuntimeError: On all ranks but the one whose loader raised, where it is what that raised.
    """
    return joined_pass(OwnBatches(loader), mesh, policy)


def joined_pass(own: OwnBatches, mesh: Mesh, policy: str) -> Iterator[tuple[Any, float]]:
    """Join batches of a pass that has begun; see `joined`."""
    while True:
        batch = own.advance()
        mine = torch.tensor([own.state, mesh.rank, own.given])
        everyone = [tuple(int(value) for value in told) for told in mesh.world_group.control.all_gather_small(mine)]
        states = [_State(state) for state, _, _ in everyone]
        if _State.FAILED in states:
            _raise_failure(own, mesh)
        if _State.HAS not in states:
            return
        having = {copy_number for state, copy_number, _ in everyone if state == _State.HAS}
        given = [number for _, _, number in everyone]
        _check(states, [copy_number for _, copy_number, _ in everyone], having, given, policy)
        if own.state is not _State.HAS:
            yield batch, 0.0
        elif policy == "join_active":
            yield batch, mesh.world_size / len(having)
        else:
            yield batch, 1.0


def _raise_failure(own: OwnBatches, mesh: Mesh) -> None:
    error = own.error
    said = mesh.world_group.control.all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None)
    raise RuntimeError(f"the data loader of another rank has failed after {own.given} batches of this one ({failed})")


def _check(states: list[_State], copies: list[int], having: set[int], given: list[int], policy: str) -> None:
    """Raise unless the ranks can go on together; some have a batch."""
    short = [rank for rank, state in enumerate(states) if state is not _State.HAS]
    numbers = ", ".join(f"rank {rank} after {given[rank]}" for rank in short)
    if apart := [rank for rank in short if copies[rank] in having]:
        raise ValueError(
            f"rank(s) {apart} have run out of batches ({numbers}), and ranks that divide the same layers have not: "
            "those must be given the same batches, by a sampler over the data-parallel ranks"
        )
    if short and policy == "error":
        raise ValueError(f"ranks have run out of batches while others go on: {numbers}; {WAYS_OUT}")
    if empty := [rank for rank in short if states[rank] is _State.EMPTY]:
        raise ValueError(
            f"the data loader(s) of rank(s) {empty} give no batch at all, and others have some: a rank takes part in a "
            "step with a batch of its own, and these have none that they could repeat with weight 0; give every rank "
            "at least one"
        )


def token_mean(control: Communicator, total: Tensor, count: Tensor | int) -> Tensor:
    """The loss of this rank, so that the mean over ranks is that over all their tokens; see `ZeroEngine.token_mean`."""
    counts = control.all_gather_small(torch.tensor([int(count)]), "tokens that count")
    if not (everyone := int(torch.stack(counts).sum())):
        raise ValueError("token_mean: no token of any rank counts; leave such batches out")
    # Times the ranks, by which the mean over them divides.
    return total * (len(counts) / everyone)
