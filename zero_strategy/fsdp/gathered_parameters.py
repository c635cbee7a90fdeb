"""`GatheredParameters`: full parameters in a scope that all ranks enter, and whose writes count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_strategy.fsdp.init import Construction, constructions_of
from zero_strategy.fsdp.model import ShardedModel, sharded_model_of
from zero_strategy.fsdp.released import EditWatch
from zero_strategy.quantized.wrapped import HoldsParameters, inner_tensors

if TYPE_CHECKING:
    from zero_strategy.fsdp.param_bucket import ParameterBucket


class GatheredParameters:
    """Hold sharded parameters whole inside a `with` block; every rank must enter and leave it.

    Args:
        params: One parameter, or any iterable of them. Parameters that no engine shards are left alone.
        modifier_rank: The rank whose changes are kept, broadcast and sharded again at the end. With None, changes to
            parameters that stage 3 releases are an error, since they would be lost. At lower stages, with
            `reshard_after_backward` off after a forward, and where one rank has all, they count: all ranks make the
            same.
        enabled: Do nothing if False.

    Raises:
        BarrierError: If a rank does not enter in time (stage 3).
        RuntimeError: At the end, on all ranks, if a rank has changed parameters without `modifier_rank` (stage 3);
            names them. In a forward with gradients: on that rank, which ends the others through the watchdog, and only
            for changes that torch counts (not those through `p.data`).

    What is computed in a forward (a module's, Lightning's `training_step`, `engine.forward_scope()`) with gradients
    enabled may need the values again in backward, and in another one: the parameters then stay whole until an
    optimizer's step changes them.

    The name and arguments are DeepSpeed's `zero.GatheredParameters`.
    """

    def __init__(
        self, params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None, enabled: bool = True
    ) -> None:
        given: list[Any] = [params] if isinstance(params, nn.Parameter | HoldsParameters) else list(params)
        parts = (inner_tensors(each).values() if isinstance(each, HoldsParameters) else (each,) for each in given)
        self._parameters: list[nn.Parameter] = [parameter for each in parts for parameter in each]
        self._modifier_rank, self._enabled = modifier_rank, enabled
        self._scopes = ExitStack()
        self._pinned: list[tuple[Construction, list[nn.Parameter]]] = []

    def __enter__(self) -> None:
        if not self._enabled:
            return
        for construction in constructions_of(self._parameters):
            self._pinned.append((construction, construction.pin(self._parameters)))
        try:
            self._enter_models()
        except BaseException:
            self._unpin()  # nobody calls `__exit__`
            raise

    def _enter_models(self) -> None:
        models = {id(model): model for model in map(sharded_model_of, self._parameters) if model is not None}
        # If a later model refuses, what was entered for earlier ones is left again.
        with ExitStack() as entered:
            for model in models.values():
                if self._modifier_rank is not None and not 0 <= self._modifier_rank < model.mesh.world_size:
                    raise ValueError(
                        f"modifier_rank {self._modifier_rank} is not a rank of this mesh of {model.mesh.world_size}"
                    )
                if self._modifier_rank is not None:
                    self._check_experts(model)
                    model.moved.check("GatheredParameters(modifier_rank=...)")
                if model.placement.shard_parameters:
                    # Before the gather, in which the others would wait for a rank that does not enter.
                    model.mesh.barrier.wait_for_all("entering sharding.GatheredParameters")
                # The root comes first, and its forward is around all others.
                in_forward = model.unsharder is not None and model.unsharder.units[0].depth > 0
                used = in_forward and torch.is_grad_enabled() and self._modifier_rank is None
                buckets = entered.enter_context(model.gathered(self._parameters, until_step=used))
                if self._modifier_rank is None:
                    entered.enter_context(_no_edits(model, buckets, in_forward=used))
                else:
                    entered.enter_context(_edited(buckets, self._modifier_rank))
            self._scopes = entered.pop_all()

    def _check_experts(self, model: ShardedModel) -> None:
        """Raise if one rank is to write parameters of which each rank has other experts."""
        wanted = {id(parameter) for parameter in self._parameters if parameter in model.experts}
        if wanted:
            names = [name for name, parameter in model.names() if id(parameter) in wanted]
            raise ValueError(
                f"modifier_rank {self._modifier_rank} would write {names[:3]}, of which it has its own experts alone "
                "(mesh.expert): write before the engine is made, or give all ranks the whole values by "
                "zero_strategy.sharding.safe_set_full_fp32_param(parameter, values)"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pinned = self._unpin()
        try:
            # Not after an exception: other ranks may not come to the broadcast.
            for construction, parameters in pinned if kind is None else ():
                construction.spread(parameters, self._modifier_rank or 0)
        except BaseException as failure:
            self._scopes.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._scopes.__exit__(kind, error, trace)

    def _unpin(self) -> list[tuple[Construction, list[nn.Parameter]]]:
        pinned, self._pinned = self._pinned, []
        for construction, parameters in pinned:
            construction.unpin(parameters)
        return pinned


@contextmanager
def _edited(buckets: Sequence[ParameterBucket], rank: int) -> Iterator[None]:
    """Make the values that `rank` writes to them the parameters."""
    for bucket in buckets:
        # Scopes inside of this one do not take its writes for lost ones.
        bucket.editors += 1
    try:
        yield
        for bucket in buckets:
            bucket.adopt(rank)
    except BaseException:
        _drop_edits(buckets)
        raise
    finally:
        for bucket in buckets:
            bucket.editors -= 1


def _drop_edits(buckets: Iterable[ParameterBucket]) -> None:
    """Let what was written to gathered values be lost with them."""
    for bucket in buckets:
        # Where parameters are whole there are no other values to go back to.
        if bucket.placement.shard_parameters:
            # Else the release would carry this rank's writes into its slice.
            bucket.writes.note()


@contextmanager
def _no_edits(model: ShardedModel, buckets: Sequence[ParameterBucket], *, in_forward: bool) -> Iterator[None]:
    """Raise on all ranks if a rank writes to them and the writes would be lost.

    In a forward nothing is exchanged, and no values are looked at: it is part of every step.
    """
    released = model.placement.shard_parameters
    # Whole parameters without master weights are what optimizers update: a write to them needs no notice.
    watches = [
        EditWatch(bucket, hashed=not in_forward)
        for bucket in buckets
        if not bucket.editors and (released or bucket.has_master)
    ]
    for watch in watches:
        watch.bucket.watches.append(watch)
    try:
        yield
        mine = [name for watch in watches for name in watch.lost()]
    finally:
        for watch in watches:
            watch.bucket.watches.remove(watch)
    # Nothing is lost there: `lost` has counted what torch did not, so that master weights follow.
    if not released:
        return
    control = model.mesh.control
    if in_forward:
        if mine:
            _drop_edits(buckets)
            raise RuntimeError(_lost_message({control.rank: mine}))
    # Numbers first, of fixed size: names are exchanged only if somebody has written.
    elif any(int(count) for count in control.all_gather_small(torch.tensor([len(mine)]), "writes that would be lost")):
        everyone = control.all_gather_objects(mine)
        for bucket in buckets:
            bucket.refresh()  # what somebody else holds whole has its values again
        raise RuntimeError(_lost_message({rank: names for rank, names in enumerate(everyone) if names}))


def _lost_message(written: Mapping[int, Sequence[str]]) -> str:
    names = list(dict.fromkeys(name for mine in written.values() for name in mine))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"parameter(s) {', '.join(map(repr, names[:3]))}{more} were written to inside of GatheredParameters on rank(s) "
        f"{list(written)}, without modifier_rank: stage 3 would drop what was written; nothing has changed. Say whose "
        "values count, `GatheredParameters(params, modifier_rank=0)`: that rank's are taken on all ranks."
    )
