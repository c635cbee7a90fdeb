"""Running averages of the weights (EMA, SWA), kept on the shards.

    optimizer.step()             every rank updates the slices that it owns
    average.update()             and blends them into its slices of the average: nothing is sent
    with average.applied():      the slices change places, and the parameters are gathered as after any step
        validate()
                                 then they change back, bit by bit

An average takes 4 bytes for each element that a rank owns: 4P/N at stages 1 to 3. It is float32 whatever the weights
are (float64 beside float64), is blended from master weights where there are some, and lies in their tier. The
arithmetic is that of `torch.optim.swa_utils.AveragedModel`: the first update copies, each later one calls a function
of the average, the weights and the number of updates so far, a few hundred thousand elements at a time, so that they
stay in the cache.

Frozen parameters are their own average. Buffers are averaged (or copied, as `buffers` says) on every rank.

Sources: Polyak and Juditsky 1992 (averaging), Izmailov et al. 2018, arXiv:1803.05407 (SWA); bias correction as in Adam,
Kingma and Ba 2015, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_strategy import ops
from zero_strategy.comm.store import together
from zero_strategy.fsdp.dtensor import local_values
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.shard_storage import MASTERS, PARAMETERS, InMemory, ShardStorage

_AT_ONCE = 1 << 18
"""Elements that are blended at once."""
_TRIED = 24

Blend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The new average, of the average, the weights (both flat, of one shape and dtype), and how often it was updated so far
(0-d int64): the `avg_fn` of torch's `AveragedModel`. Of each element alone."""


@dataclass(frozen=True)
class ExponentialBlend:
    """Exponential moving average: `decay * average + (1 - decay) * weights`.

    Args:
        decay: At least 0 and less than 1.
        warmup: After n updates take min(decay, (1 + n) / (10 + n)): early averages follow the weights.
        bias_correction: All updates so far in their exact proportions, as if the average had begun with zeros and were
            divided by 1 - decay ** n.

    Raises:
        ValueError: For a decay out of range, or both ways to begin.
    """

    decay: float = 0.999
    warmup: bool = False
    bias_correction: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, not {self.decay}")
        if self.warmup and self.bias_correction:
            raise ValueError("warmup and bias_correction are two ways to begin an average: give one of them")

    def decay_after(self, updates: int) -> float:
        """The decay of the next update, after this many (at least 1)."""
        if self.warmup:
            return min(self.decay, (1 + updates) / (10 + updates))
        if self.bias_correction:
            return self.decay * (1 - self.decay**updates) / (1 - self.decay ** (updates + 1))
        return self.decay

    def __call__(self, average: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
        decay = self.decay_after(int(updates)) if self.warmup or self.bias_correction else self.decay
        return decay * average + (1 - decay) * weights


def equal_blend(average: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
    """The mean of all updates, as `AveragedModel` and SWA take it."""
    return average + (weights - average) / (updates + 1)


def chosen_blend(decay: float | None, blend: Blend | None, *, warmup: bool, bias_correction: bool) -> Blend:
    """The rule of an average, as `ZeroEngine.average_weights` is asked for it.

    Raises:
        ValueError: If a rule of the user's, or a plain mean, is to have what belongs to an exponential average.
    """
    if (blend is not None or decay is None) and (warmup or bias_correction):
        raise ValueError("warmup and bias_correction belong to an exponential average: give a decay, and no blend")
    if blend is not None:
        return blend
    return equal_blend if decay is None else ExponentialBlend(decay, warmup, bias_correction)


def check_blend(blend: Blend) -> None:
    """Raise if a function is not elementwise: it is tried on random numbers, whole and in two parts.

    Raises:
        TypeError: Naming it.
    """
    random = torch.Generator().manual_seed(0)
    average, weights = (torch.randn(_TRIED, generator=random) for _ in range(2))
    updates, half = torch.tensor(3), _TRIED // 3
    whole = blend(average.clone(), weights.clone(), updates)
    parts = [blend(average[cut].clone(), weights[cut].clone(), updates) for cut in (slice(half), slice(half, None))]
    if whole.shape != average.shape or not torch.equal(whole, torch.cat(parts)):
        name = getattr(blend, "__qualname__", type(blend).__name__)
        raise TypeError(
            f"{name} does not average each element by itself: on a part of a tensor it gives other values than on the "
            "whole, and each rank has a part"
        )


class WeightAverage:
    """An average of a sharded model's weights; `ZeroEngine.average_weights` makes one.

    Args:
        model: The sharded model.
        publish_copies: Called when the parameters have changed.
        blend: See `Blend`.
        every_n_steps: Optimizer steps from one update to the next; 0: only `update()` updates it.
        start_step: Steps that are taken before the first update.
        buffers: Average the module's buffers, too; False: copy them at each update; None: the average has none.
        device: Where it lies, for state that is in memory; None: beside the weights.

    Attributes:
        updates: How often it was updated.
        shown: The module has the average's values now, and the average the module's.

    Raises:
        OSError: On all ranks, if a tier has no room.
        TypeError: If `blend` is not elementwise.
        ValueError: If a number is negative.
    """

    def __init__(
        self,
        model: ShardedModel,
        publish_copies: Callable[[], None],
        blend: Blend,
        *,
        every_n_steps: int = 1,
        start_step: int = 0,
        buffers: bool | None = True,
        device: torch.device | None = None,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("start_step", start_step)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        check_blend(blend)
        self._model, self._publish_copies, self._blend = model, publish_copies, blend
        self._every, self._start, self._averages_buffers = every_n_steps, start_step, buffers
        self._device = device
        self.updates, self.shown = 0, False
        self._kept: dict[int, Tensor] = {}
        self._model.moved.check("an average of the weights")
        # The average begins with the weights as they are, with what user code has written to them.
        model.follow_edits()
        together(model.mesh.control, self._make)
        self._buffers: dict[str, Tensor] = {name: _own(buffer) for name, buffer in self._named_buffers()}
        self._kept_buffers: dict[str, Tensor] = {}

    def _make(self) -> None:
        for bucket in self._model.buckets:
            if _is_trained(bucket):
                bucket.make_average(self._device)

    def _named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if self._averages_buffers is None else self._model.module.named_buffers()

    def _averaged(self) -> Iterator[tuple[ParameterBucket, ShardStorage]]:
        for bucket in self._model.buckets:
            if bucket.average is not None and bucket.average.numel:
                yield bucket, bucket.average

    # ---- the step ----

    def before_step(self) -> None:
        """Before an optimizer's step: parameters that are no longer frozen are averaged from their last values on.

        Raises:
            RuntimeError: If the module has the average's values.
        """
        self.check_not_shown("an optimizer's step")
        if any(bucket.average is None and _is_trained(bucket) for bucket in self._model.buckets):
            together(self._model.mesh.control, self._make)

    def after_step(self, taken: int) -> None:
        """After all optimizers' steps: update, if it is this step's turn.

        Args:
            taken: Steps so far, this one included.
        """
        if self._every and taken > self._start and (taken - 1 - self._start) % self._every == 0:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Blend the present weights in; the first time the average becomes these. Nothing is sent.

        Raises:
            RuntimeError: If the module has the average's values, or the states are on the host.
        """
        self.check_not_shown("an update of the average")
        self._model.moved.check("an update of the average", (MASTERS, PARAMETERS))
        self._model.follow_edits()
        count = torch.tensor(self.updates)
        fused = self._fused()
        if fused:
            decay = self._blend.decay_after(self.updates) if isinstance(self._blend, ExponentialBlend) else 0.0
            averages, weights = [average.values for _, average in fused], [bucket.master.values for bucket, _ in fused]
            ops.axpby_(averages, weights, averages, decay, 1 - decay)
        done = {id(bucket) for bucket, _ in fused}
        for bucket, average in self._averaged():
            for start, stop in _ranges(bucket.master) if id(bucket) not in done else ():
                self._blend_range(bucket.master, average, start, stop, count)
        for name, buffer in self._named_buffers():
            self._blend_buffer(name, buffer, count)
        self.updates += 1

    def _fused(self) -> list[tuple[ParameterBucket, ShardStorage]]:
        """Buckets whose averages a fused op updates in one pass: exponential ones of float32, in memory."""
        if not self.updates or not isinstance(self._blend, ExponentialBlend):  # The first update copies
            return []
        found = []
        for bucket, average in self._averaged():
            kept, weights = average.tensor, bucket.master.tensor
            if kept is None or weights is None or kept.device != weights.device:
                continue
            if kept.dtype == weights.dtype == torch.float32 and ops.ensure(kept.device.type).path is not None:
                found.append((bucket, average))
        return found

    def _blend_range(self, master: ShardStorage, average: ShardStorage, start: int, stop: int, count: Tensor) -> None:
        old = average.read(start, stop)
        weights = master.read(start, stop).to(device=old.device, dtype=old.dtype)
        average.write(start, self._blend(old, weights, count.to(old.device)) if self.updates else weights)

    def _blend_buffer(self, name: str, buffer: Tensor, count: Tensor) -> None:
        average = self._buffers.get(name)
        if average is None or average.shape != buffer.shape:
            self._buffers[name] = _own(buffer)
            return
        values = buffer.detach().to(average.dtype)
        if self.updates and self._averages_buffers and values.numel():
            dtype = torch.promote_types(average.dtype, torch.float32)  # whole numbers are cut off below, as by torch
            values = self._blend(average.to(dtype), values.to(dtype), count.to(average.device))
        average.copy_(values)

    def restart(self) -> None:
        """Begin anew: the average becomes the present weights, and the next update copies."""
        self.updates = 0
        self.update()
        self.updates = 0

    # ---- the average in place of the weights ----

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Let the module have the average's values in the block, and its own again after it. A collective.

        Evaluate in it, gather or save weights (`engine.full_state_dict()`, `engine.save_pretrained(...)`), or let
        `torch.optim.swa_utils.update_bn(loader, module)` set the statistics of BatchNorm layers, which are then the
        average's.
        """
        self.swap()
        try:
            yield self._model.module
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Let the average and the weights change places; see `applied`. A collective."""
        self._model.moved.check("a use of the average", (MASTERS, PARAMETERS))
        if not self.shown:
            self._model.follow_edits()
        changed = [bucket for bucket, _ in self._averaged()]
        self._model.invalidate_unsharded(changed)
        for bucket, average in self._averaged():
            self._swap_bucket(bucket, average)
        self._publish(changed)
        for name, buffer in self._named_buffers():
            self._swap_buffer(name, buffer)
        self.shown = not self.shown

    def _publish(self, changed: list[ParameterBucket]) -> None:
        # All gathers are begun before one is waited for.
        for work in [bucket.publish() for bucket in changed]:
            work.wait()
        torch.autograd.graph.increment_version([p for bucket in changed for p in bucket.parameters])
        for bucket in changed:
            # Once versions have moved: user code's writes are told by these, and this is none.
            bucket.writes.note()
        self._model.forget_unsharded(changed)
        self._publish_copies()

    def _swap_bucket(self, bucket: ParameterBucket, average: ShardStorage) -> None:
        master, exact = bucket.master, bucket.master.dtype == average.dtype
        if not exact:  # low precision without master weights: the average stays, and the weights are kept beside it
            if self.shown:
                master.write(0, self._kept.pop(id(bucket)))
                return
            self._kept[id(bucket)] = master.read(0, master.numel).clone()
        for start, stop in _ranges(master):
            # Cloned: a read of what is in memory is a view, to which the next line writes.
            weights, values = master.read(start, stop).clone(), average.read(start, stop)
            master.write(start, values.to(weights.device))
            if exact:
                average.write(start, weights.to(values.device))

    def _swap_buffer(self, name: str, buffer: Tensor) -> None:
        average = self._buffers.get(name)
        if average is None or average.shape != buffer.shape:
            return
        if self.shown:
            if not torch.equal(average.to(buffer.dtype), buffer):  # set anew meanwhile
                average.copy_(buffer)
            buffer.copy_(self._kept_buffers.pop(name))
        else:
            self._kept_buffers[name] = buffer.clone()
            buffer.copy_(average)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Let the weights become the average's values, for good. A collective."""
        self.check_not_shown("copying the average")
        self.swap()
        self._kept.clear()
        self._kept_buffers.clear()
        for bucket, average in self._averaged():
            # The exchange has left the former weights in the average, which goes on from the new ones.
            for start, stop in _ranges(bucket.master) if bucket.master.dtype == average.dtype else ():
                average.write(start, bucket.master.read(start, stop))
        self.shown = False

    def check_not_shown(self, call: str) -> None:
        """Raise if the module has the average's values.

        Raises:
            RuntimeError: Naming what was called, and the way out.
        """
        if self.shown:
            raise RuntimeError(
                f"{call} while the module has the values of the average: leave `with average.applied():` first"
            )

    # ---- checkpoints ----

    def facts(self) -> dict[str, int]:
        """Record of it in a checkpoint's manifest."""
        return {"updates": self.updates}

    def held_buffers(self) -> dict[str, Tensor]:
        """The averages of buffers, where they lie."""
        return dict(self._buffers)

    @torch.no_grad()
    def load(self, facts: Mapping[str, int], buffers: Mapping[str, Tensor]) -> None:
        """Take in what `facts` and `buffers` gave; the loader reads parameters' averages into their buckets."""
        self.updates = int(facts["updates"])
        for name, buffer in self._named_buffers():
            average, stored = _own(buffer), buffers.get(name)
            self._buffers[name] = (
                average.copy_(stored) if stored is not None and stored.shape == buffer.shape else average
            )

    @torch.no_grad()
    def set_values(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Take in whole tensors, each rank its own parts; what is not there becomes the module's present values.

        Args:
            state: Parameters and buffers by name, on any device, the same on all ranks.
            updates: How often the average was updated.
        """
        self.restart()
        self.updates = updates
        for bucket, average in self._averaged():
            for index, name in enumerate(bucket.names):
                piece = bucket.piece_of.get(index)
                if piece is not None and name in state:
                    mine = local_values(bucket.parts[index], bucket.parameters[index], state[name].detach())
                    average.write(piece.offset, mine.reshape(-1)[piece.start : piece.stop])
        for name, values in self._buffers.items():
            if name in state:
                values.copy_(state[name])

    def close(self) -> None:
        """Give it up; the weights are the module's own.

        Raises:
            RuntimeError: If the module has the average's values.
        """
        self.check_not_shown("giving up the average")
        for bucket in self._model.buckets:
            bucket.drop_average()
        self._buffers.clear()


def _is_trained(bucket: ParameterBucket) -> bool:
    return any(parameter.requires_grad for parameter in bucket.parameters)


def _own(buffer: Tensor) -> Tensor:
    """A copy that holds an average: low precision becomes float32."""
    values = buffer.detach()
    dtype = torch.promote_types(values.dtype, torch.float32) if values.is_floating_point() else values.dtype
    return values.to(dtype, copy=True)


def _ranges(storage: ShardStorage) -> Iterator[tuple[int, int]]:
    """Ranges that are worked on at once: chunks of a tier, a part of the cache's size in memory."""
    for start, stop in storage.chunks:
        step = _AT_ONCE if isinstance(storage, InMemory) else stop - start
        for low in range(start, stop, max(step, 1)):
            yield low, min(low + step, stop)
