"""The static plan of reductions, known to every rank, the hooks that drive it, and one reduction under way.

Every rank knows the plan, so that no rank waits for a hook that did not fire.

The plan is pure bookkeeping: `Reduction` moves the tensors. Every reduction ends with one small message per rank
(`encode`), from which all ranks derive the same next plan (`learn`): the order in which buckets leave (rank 0's order
of completion), and which parameters to wait for before a bucket leaves early (those that some rank touched in each of
the last two reductions that could have touched them).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from operator import or_
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.shard_storage import PARAMETERS, MovedStates
from zero_strategy.offload.tier import Streams, streams_of
from zero_strategy.quantized.scales import QuantisedLayers
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.torch_private import uncompiled

_UNTOUCHED = 0x7FFF  # the largest int16, in which places are sent


@dataclass(frozen=True)
class Agreement:
    """Findings that the ranks agreed on.

    Attributes:
        touched: By bucket, the parameters that any rank touched.
        late: By bucket, whether any rank touched it again after it had left.
        same_gathers: Whether all ranks gathered the same units in the same order.
        flags: The bits that any rank raised.
        same_rules: Whether all ranks that said so would update parameters by the same rules.
    """

    touched: list[set[int]]
    late: list[bool]
    same_gathers: bool
    flags: int = 0
    same_rules: bool = True


class ReductionPlan:
    """Order and expectations of the buckets of one engine, the same on all ranks.

    Args:
        counts: Number of parameters of each bucket, in the first plan's order.

    Attributes:
        order: Bucket numbers in the order in which they leave.
        expected: By bucket, the parameters to wait for in this backward; empty: the bucket does not leave early.
        arrivals: Bucket numbers, one for each gradient that came, in order; a bucket is complete with its last.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.order = list(range(len(self.counts)))
        self.expected: list[set[int]] = [set() for _ in self.counts]
        self._trainable: list[set[int]] = [set() for _ in self.counts]
        # As if all had been touched twice: the first backward waits for every parameter.
        everything = [set(range(count)) for count in self.counts]
        self._history: list[deque[set[int]]] = [deque([all_, all_], maxlen=2) for all_ in everything]
        self.arrivals: list[int] = []

    def begin(self, trainable: Sequence[set[int]]) -> None:
        """Start a backward in which `trainable` parameters (by bucket, the same on all ranks) require a gradient."""
        self._trainable = list(trainable)
        self.arrivals.clear()
        # In both: an expected bucket without gradients is sent as zeros, in vain where two networks take turns.
        self.expected = [mine & history[0] & history[1] for mine, history in zip(trainable, self._history, strict=True)]

    def trains(self, number: int) -> bool:
        """True if any parameter of bucket `number` requires a gradient in this backward."""
        return bool(self._trainable[number])

    def expect_nothing(self) -> None:
        """Start a reduction outside of a backward: nothing has left early on any rank."""
        # So that `learn` leaves the history alone, which is of backwards.
        self._trainable = [set() for _ in self.counts]
        self.arrivals.clear()
        self.expected = [set() for _ in self.counts]

    def encode(
        self, touched: Sequence[set[int]], late: Sequence[bool], gathers: int, raised: int = 0, rules: int = 0
    ) -> Tensor:
        """This rank's message: uint8, of the same length on all ranks.

        Args:
            touched: By bucket, the parameters that this rank touched.
            late: By bucket, whether it touched it again after it had left.
            gathers: Checksum of the units that it gathered.
            raised: Bits that all shall learn of.
            rules: Hash of the rules by which it updates parameters, 30 bits; 0: not to be compared.
        """
        flags, offset = bytearray(sum(self.counts) + len(self.counts)), 0
        for count, mine, again in zip(self.counts, touched, late, strict=True):
            for index in mine:
                flags[offset + index] = 1
            flags[offset + count] = again
            offset += count + 1
        # 15 bits each: an int16 takes no more.
        numbers = [gathers & 0x7FFF, raised, rules & 0x7FFF, rules >> 15]
        last = dict(zip(self.arrivals, range(len(self.arrivals))))
        # Places beyond an int16 count as equally late.
        numbers.extend(
            min(last[number], _UNTOUCHED - 1) if number in last else _UNTOUCHED for number in range(len(self.counts))
        )
        return torch.frombuffer(flags + array("h", numbers).tobytes(), dtype=torch.uint8)

    def learn(self, messages: Tensor) -> Agreement:
        """Combine all ranks' messages and make the next plan of them.

        Args:
            messages: A row for each rank, in their order: a few operations for all of them, be they thousands.
        """
        length = sum(self.counts) + len(self.counts)
        union = messages[:, :length].amax(dim=0).tolist()
        # A copy: torch views bytes as int16 from even offsets only, and the length may be odd.
        tails = messages[:, length:].clone(memory_format=torch.contiguous_format).view(torch.int16)
        heads = tails[:, :4].tolist()
        touched, late, offset = [], [], 0
        for count in self.counts:
            touched.append(set(compress(range(count), union[offset : offset + count])))
            late.append(bool(union[offset + count]))
            offset += count + 1
        for number, mine in enumerate(self._trainable):
            if mine:  # a frozen bucket's absence says nothing of later backwards
                self._history[number].append(touched[number])
        # Rank 0's, since all must take the same; after a backward without gradients there it keeps the old order.
        positions = tails[0, 4:].tolist()
        if any(position != _UNTOUCHED for position in positions):
            self.order.sort(key=lambda number: positions[number])  # stable: untouched ones keep their order
        rules = {(head[2], head[3]) for head in heads} - {(0, 0)}  # zeros abstain
        flags = reduce(or_, (head[1] for head in heads))
        return Agreement(touched, late, len({head[0] for head in heads}) == 1, flags, len(rules) <= 1)


class SideStream:
    """A device's stream on which collectives wait for one another, so that what is computed waits for none of them."""

    def __init__(self) -> None:
        self._streams: Streams | None = None
        self._stream: Any = None

    def within(self, device: torch.device) -> AbstractContextManager[Any]:
        """Inside, what is queued comes after what is inside, and after what computes so far.

        Where all is done at once, as on the CPU, it is nothing.

        Memory needs no keeping: nothing but collectives and their waits is queued here, and who made them waits for
        the last one on the computing stream before memory goes.
        """
        self._streams = self._streams or streams_of(device)
        if self._streams is None:
            return nullcontext()
        if self._stream is None:
            self._stream = self._streams.new()
        # A shard group of one rank has no sum to wait for: what is sent is then what has just been computed.
        self._stream.wait_stream(self._streams.current())
        return self._streams.within(self._stream)


class Reduction:
    """Collectives under way: all of them begin at once, each after the one before it.

    Args:
        bucket: Whose gradients.
        work: The sum over the ranks that hold different slices, or, with `everywhere`, over all and for all of them.
        sent: The whole buffer; None if gradients are sent from where they lie.
        total: This rank's part of the sum: of `sent`, or memory of its own.
        side: The stream on which one waits for the other.
        divides: Whether the result is a mean; else who adds it up divides it.
        everywhere: `sent` will be the sum on all ranks.

    Attributes:
        sent, total: As above.
    """

    def __init__(
        self,
        bucket: ParameterBucket,
        work: PendingWork,
        sent: Tensor | None,
        total: Tensor,
        side: SideStream,
        *,
        divides: bool,
        everywhere: bool,
    ) -> None:
        self.sent, self.total, self._last = sent, total, work
        ranks, spreads = bucket.ranks, not bucket.placement.shard_optimizer and not everywhere
        copies = ranks.replicate.size > 1
        if copies or spreads:
            with side.within(total.device):
                if copies:
                    self._last = ranks.replicate.all_reduce(total, bucket.names, after=self._last)
                if spreads:
                    assert sent is not None
                    self._last = ranks.reduce.all_gather(sent, of=bucket.names, after=self._last)
        # Without replicas the sum was scaled as it arrived.
        self._scaled = (sent if spreads else total) if copies and divides else None
        self._factor = 1.0 / ranks.world_size

    @property
    def reads(self) -> list[Tensor]:
        """Memory that is in use until it is over."""
        return [] if self.sent is None else [self.sent]

    def wait(self) -> None:
        """Until it is over (on a GPU: until the current stream will see it)."""
        self._last.wait()
        if self._scaled is not None:
            self._scaled.mul_(self._factor)
            self._scaled = None


class HookedReducer(Protocol):
    """Calls of the hooks; see `GradientReducer`."""

    def before_forward(self, *, trains: bool = True) -> None: ...

    def before_gradient(self, hook: ParameterHook) -> None: ...

    def after_gradient(self, hook: ParameterHook, parameter: Tensor) -> None: ...


class Watcher(EphemeralHook):
    """A forward pre-hook of the root module: unfrozen parameters get master weights; an unfinished backward shows."""

    def __init__(self, reducer: HookedReducer, moved: MovedStates, quantised: QuantisedLayers) -> None:
        self.reducer, self.moved, self.quantised = reducer, moved, quantised

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look at the parameters before a forward that may be followed by a backward.

        Raises:
            RuntimeError: If they are on the host, or a quantised weight was replaced.
        """
        self.moved.check("a forward", (PARAMETERS,))
        self.quantised.check()
        if torch.is_grad_enabled():
            self.reducer.before_forward(trains=module.training)


class ParameterHook:
    """The two hooks of one parameter. They hold the reducer weakly: autograd's references are invisible to the GC.

    Attributes:
        number: Of the bucket.
        index: Of the parameter in it.
    """

    __slots__ = ("_reducer", "index", "number")

    def __init__(self, reducer: HookedReducer, number: int, index: int) -> None:
        self._reducer, self.number, self.index = ref(reducer), number, index

    def before(self, gradient: Tensor) -> None:
        """Runs before autograd adds to `p.grad`."""
        reducer = self._reducer()
        if reducer is not None:
            reducer.before_gradient(self)

    def after(self, parameter: Tensor) -> None:
        """Runs when autograd has added to `p.grad`."""
        reducer = self._reducer()
        if reducer is not None:
            reducer.after_gradient(self, parameter)
