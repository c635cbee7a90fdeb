"""`Init`: models that are never whole on any rank, whose own constructors decide every value.

Constructors run on real memory. When a module's constructor is over, each rank keeps its slice of the module's
parameters, of rank 0's values. A parameter that somebody uses later, such as a parent that writes into a child, or
`apply`, is unsharded first (`sharded_parameter`), and sharded again when parameters of another module are used and
nobody holds a view of it.

What ranks do together follows from the model's code alone, never from when garbage is collected: parameters that wait
to be sharded are held here, and whether one can be (nobody holds a view) is agreed upon before. All ranks run the same
constructors in the same order; ranks that do not are told so by the message that precedes each exchange.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import own_group
from zero_strategy.comm.store import next_number, own_store
from zero_strategy.config import WatchdogConfig, ZeroConfig
from zero_strategy.fsdp.ownership import owner_of
from zero_strategy.fsdp.released import ShardedParameter, Slice
from zero_strategy.runtime.torch_private import children_of, is_used_elsewhere, parameters_of
from zero_strategy.watchdog.peers import own_card
from zero_strategy.watchdog.watchdog import Watchdog

_BATCH = 48
"""Parameters that one message agrees upon: a bit of an int64 each."""
_SHARD, _UNSHARD = 1, 2
_DOING = {_SHARD: "keeps slices of", _UNSHARD: "unshards"}


class Init:
    """Build a model of which each rank keeps its slices alone, with the values that the model's own code gives it.

    All ranks build the same model inside the block. Every constructor runs as without it; when one is over, the
    parameters of its module are divided among the ranks (rank 0's values count, as everywhere). A rank holds its
    slices, and the module that is being built. Buffers stay whole. Whoever uses a parameter before an engine has the
    model, gets it whole for the time: all ranks must do so.

    Parameters on the meta device are left there: the engine gives them values by `reset_parameters`, or from a
    checkpoint. On one rank, and in a `PipelineModule`, which builds the layers of a rank's stage, the block changes
    nothing.

    Args:
        enabled: Do nothing if False.

    Raises:
        ValueError: On entry, if this is one of several ranks, and they have no process group yet.
        RuntimeError: If ranks build different models, or use different parameters; names them.

    Example:
        ```python
        with sharding.Init():
            model = Model()
        engine = ZeroEngine(model, load_config(stage=3))
        ```
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._construction: Construction | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        if not self._enabled:
            return
        # Going on would build the whole model on every rank, which is what the block is there to avoid.
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"sharding.Init() on {os.environ['WORLD_SIZE']} ranks (WORLD_SIZE) needs their process group: call "
                "zero_strategy.init_distributed() before, or build the model in configure_model()"
            )
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._construction = Construction(_connect())
        self._hooks = [
            register_module_parameter_registration_hook(cast(Any, self._construction.parameter_registered)),
            register_module_module_registration_hook(cast(Any, self._construction.module_registered)),
        ]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        construction, self._construction, self._hooks = self._construction, None, []
        # Not after an exception: `finish` is a collective, to which the other ranks may not come.
        if construction is not None and kind is None:
            construction.finish()


@dataclass
class _Whole:
    """A parameter that waits to be sharded."""

    parameter: nn.Parameter
    number: int
    owner: nn.Module | None
    text: str
    tries: int = 0
    again: int = field(default=0)


class Construction:
    """The parameters of what is built inside an `Init`, until engines take them.

    Args:
        ranks: All ranks, on the host; they shard every parameter among themselves.

    Attributes:
        number: Of this one, equal on all ranks.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.number = next_number("constructions")
        self._ranks = ranks
        self._whole: dict[int, _Whole] = {}
        self._numbers, self._events = 0, 0
        self._pinned: Counter[int] = Counter()  # by id: scopes lie in one another
        _constructions.add(self)

    # ---- what happens ----

    def parameter_registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """A hook: remember the parameter; modules whose constructors are over are complete."""
        building = _first_arguments()
        # Ranks build different layers there, so that what they exchange would not match.
        if any(_built_apart(each) for each in building.values()):
            return
        self.shard_complete(building=building.keys())
        if parameter is not None:
            self._note(parameter, module, name)

    def module_registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """A hook: a module that is given to another one is complete."""
        building = _first_arguments()
        if module is None or any(_built_apart(each) for each in building.values()):
            return
        # `copy.deepcopy` registers no parameters: those of copies are known from here only.
        pending = [module]
        while pending:
            each = pending.pop()
            if not _built_apart(each):
                for key, parameter in parameters_of(each).items():
                    if parameter is not None:
                        self._note(parameter, each, key)
                pending += [child for child in children_of(each).values() if child is not None]
        self.shard_complete(building=building.keys())

    def _note(self, parameter: nn.Parameter, owner: nn.Module | None, name: str) -> None:
        if isinstance(parameter, ShardedParameter):
            parameter.slice.owner = parameter.slice.owner or owner  # copies have none at first
        elif id(parameter) in self._whole:
            self._whole[id(parameter)].owner = self._whole[id(parameter)].owner or owner
        elif _can_be_sharded(parameter):
            self._numbers += 1
            text = f"{type(owner).__name__}.{name}, shape {tuple(parameter.shape)}"
            self._whole[id(parameter)] = _Whole(parameter, self._numbers, owner, text)

    def use(self, parameters: list[nn.Parameter], overwritten: nn.Parameter | None = None, *, stays: bool) -> None:
        """Make parameters whole that somebody uses; shard others again that were used before them.

        Args:
            parameters: All that are used at once.
            overwritten: One of them, all of whose values are about to be replaced.
            stays: They are not to be sharded again.
        """
        used = [p for p in parameters if isinstance(p, ShardedParameter) and p.slice.construction is self]
        # Their modules count as busy: else weight and bias of one module would be sharded and gathered in turns.
        owners = {id(p.slice.owner) for p in used if p.slice.owner is not None}
        # First, so that no more is whole at once than the modules in use.
        self.shard_complete(building=_first_arguments().keys() | owners, but=[*map(id, parameters)])
        for parameter in used:
            if isinstance(parameter, ShardedParameter):  # it may be there twice
                found = parameter.slice
                self._unshard(parameter, fetch=parameter is not overwritten)
                if not stays:
                    self._whole[id(parameter)] = _Whole(parameter, found.number, found.owner, found.text)

    def finish(self) -> None:
        """All constructors are over."""
        for whole in self._whole.values():
            # Also those that were put off: what held a view may be gone with the constructors.
            whole.again = 0
        self.shard_complete(building=frozenset())

    def copied(self, parameter: ShardedParameter) -> nn.Parameter:
        """A sharded parameter with the same values."""
        found = parameter.slice
        self._numbers += 1
        copy = nn.Parameter(_placeholder(found), parameter.requires_grad)
        copy.__class__ = ShardedParameter
        cast(ShardedParameter, copy).slice = Slice(
            self, self._numbers, found.values.clone(), found.shape, found.strides, found.text, None
        )
        return copy

    def undo(self, parameter: nn.Parameter, before: Slice) -> None:
        """A parameter was to be overwritten, and was not."""
        del self._whole[id(parameter)]
        # The memory made for the new values holds nothing; the slice still has the old ones.
        _hand_in(parameter, before)

    def pin(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Keep parameters whole until they are unpinned; those of this construction."""
        mine = [p for p in parameters if self.holds(p)]
        if used := [p for p in mine if isinstance(p, ShardedParameter)]:
            self.use(cast("list[nn.Parameter]", used), stays=False)
        self._pinned.update(map(id, mine))
        return mine

    def unpin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let parameters be sharded again."""
        self._pinned -= Counter(map(id, parameters))  # which drops those that are down to none

    def spread(self, parameters: Iterable[nn.Parameter], source: int) -> None:
        """The values of rank `source` count from now on; all ranks call it."""
        # Rank 0's count anyway: sharding begins with a broadcast from there.
        for parameter in parameters if source != 0 else ():
            values = parameter.detach().cpu().contiguous()
            self._ranks.broadcast(values, source, "a parameter under construction")
            with torch.no_grad():
                parameter.copy_(values)

    def holds(self, parameter: nn.Parameter) -> bool:
        """True if it is of this construction."""
        if isinstance(parameter, ShardedParameter):
            return parameter.slice.construction is self
        return id(parameter) in self._whole

    def take(self, parameters: Iterable[nn.Parameter], *, values: bool) -> None:
        """An engine takes parameters: they are plain ones, and no concern of this construction any more.

        Args:
            parameters: Any.
            values: They keep their values; else these are arbitrary, and take no memory.
        """
        for parameter in parameters:
            self._whole.pop(id(parameter), None)
            if isinstance(parameter, ShardedParameter) and parameter.slice.construction is self:
                if values:
                    self._unshard(parameter, fetch=True)
                else:
                    _hand_out(parameter, _placeholder(parameter.slice))

    # ---- what ranks do together ----

    def shard_complete(self, *, building: Iterable[int], but: Iterable[int] = ()) -> None:
        """Shard what is whole of modules whose constructors are over.

        Args:
            building: Identities of modules at which code is at work.
            but: Identities of parameters that are used just now.
        """
        # Counted alike on all ranks: they have to ask for what was put off at the same event.
        self._events += 1
        busy, used = set(building), {*but, *self._pinned}
        ready = []
        for key, whole in list(self._whole.items()):
            if not _can_be_sharded(whole.parameter):
                del self._whole[key]  # moved to the meta device, taken by an engine, or divided by other means
            elif key not in used and id(whole.owner) not in busy and whole.again <= self._events:
                ready.append(whole)
        for start in range(0, len(ready), _BATCH):
            self._shard(ready[start : start + _BATCH])

    def _shard(self, batch: list[_Whole]) -> None:
        free = sum(1 << place for place, whole in enumerate(batch) if not _is_viewed(whole.parameter))
        # 2: the reference held here, and the argument of the call.
        dropped = sum(1 << place for place, whole in enumerate(batch) if sys.getrefcount(whole.parameter) == 2)
        # Both may differ by rank, since references end whenever garbage is collected: only what all ranks say counts.
        free, dropped = self._agree(_SHARD, batch, free, dropped)
        for place, whole in enumerate(batch):
            if dropped >> place & 1:  # a replaced one: nobody but this object has it
                del self._whole[id(whole.parameter)]
            elif free >> place & 1:
                del self._whole[id(whole.parameter)]
                self._divide(whole)
            else:  # somebody holds a view of it: ask less and less often
                whole.tries += 1
                whole.again = self._events + (1 << whole.tries)

    @torch.no_grad()
    def _divide(self, whole: _Whole) -> None:
        parameter, ranks = whole.parameter, self._ranks
        shape, strides = tuple(parameter.shape), parameter.stride()
        flat = parameter.data.reshape(-1).cpu()  # the ranks' group is one of the host
        ranks.broadcast(flat, 0, whole.text)
        part = -(-flat.numel() // ranks.size)
        values = torch.zeros(part, dtype=parameter.dtype, device=parameter.device)
        own = flat[ranks.rank * part : (ranks.rank + 1) * part]
        values[: own.numel()].copy_(own)
        _hand_in(parameter, Slice(self, whole.number, values, shape, strides, whole.text, whole.owner))

    @torch.no_grad()
    def _unshard(self, parameter: ShardedParameter, *, fetch: bool) -> None:
        found = parameter.slice
        numel = parameter.numel()
        like = found.values
        whole = torch.empty_strided(found.shape, found.strides, dtype=like.dtype, device=like.device)
        if fetch:
            # Before values move: ranks that use other parameters get an error, not each other's values.
            self._agree(_UNSHARD, [_Whole(parameter, found.number, found.owner, found.text)], 0, 0)
            flat = torch.empty(like.numel() * self._ranks.size, dtype=like.dtype)
            flat[self._ranks.rank * like.numel() :][: like.numel()].copy_(like)
            self._ranks.all_gather(flat.view(torch.uint8), of=found.text).wait()
            whole.copy_(flat[:numel].view(found.shape))
        _hand_out(parameter, whole)

    def _agree(self, kind: int, batch: list[_Whole], free: int, dropped: int) -> tuple[int, int]:
        """Tell all ranks what is done next, and take as free, and as dropped, what all of them say is.

        Raises:
            RuntimeError: If ranks do different things; names the parameters of this one and the ranks.
        """
        words = ",".join(f"{w.number}:{tuple(w.parameter.shape)}:{w.parameter.dtype}" for w in batch)
        mine = [kind, batch[0].number, len(batch), zlib.crc32(words.encode()), free, dropped]
        everyone = [found.tolist() for found in self._ranks.all_gather_small(torch.tensor(mine), batch[0].text)]
        if others := [rank for rank, found in enumerate(everyone) if found[:4] != mine[:4]]:
            rank, theirs = others[0], everyone[others[0]]
            raise RuntimeError(
                f"under sharding.Init(), rank {self._ranks.rank} {_DOING[kind]} {len(batch)} parameter(s) from number "
                f"{batch[0].number} on ({batch[0].text}), but rank {rank} {_DOING.get(theirs[0], 'does')} {theirs[2]} "
                f"from number {theirs[1]} on. All ranks must build the same model, and whoever uses a parameter before "
                "an engine has it must do so on every rank (not under `if rank == 0`), or inside of "
                "GatheredParameters(parameter, modifier_rank=0)"
            )
        for found in everyone:
            free, dropped = free & found[4], dropped & found[5]
        return free, dropped


_constructions: WeakSet[Construction] = WeakSet()
"""Those that parameters are left of."""


def constructions_of(parameters: Iterable[nn.Parameter]) -> list[Construction]:
    """The constructions of parameters that no engine has yet, in the order in which they were begun."""
    parameters = list(parameters)
    found = [construction for construction in _constructions if any(map(construction.holds, parameters))]
    # A set has no order of its own, and ranks have to gather in the same one.
    return sorted(found, key=lambda construction: construction.number)


def _connect() -> Communicator:
    """All ranks on the host, watched. A collective."""
    settings, size = WatchdogConfig(), dist.get_world_size()
    group = own_group([list(range(size))], timeout=timedelta(seconds=ZeroConfig().timeout_seconds), backend="gloo")
    ranks = Communicator(group, CommunicationCounters(), owns=True)
    watchdog = Watchdog(
        ranks.rank, ranks.all_gather_objects(own_card()), partial(own_store, size), f"init{next_number('inits')}",
        wait_seconds=settings.wait_seconds, silence_seconds=settings.silence_seconds,
        unheard_seconds=settings.unheard_seconds,
    )  # fmt: skip
    ranks.guarded(watchdog, "construction")
    return ranks


def _first_arguments() -> dict[int, Any]:
    """The objects whose methods are under way in this thread: first arguments on its stack, by identity."""
    found: dict[int, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module):
                found[id(first)] = first
        frame = frame.f_back
    return found


def _built_apart(module: nn.Module) -> bool:
    """True if ranks build different parts of it."""
    return bool(getattr(type(module), "built_apart", False))


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    return (
        type(parameter) is nn.Parameter
        and not parameter.is_meta
        and parameter.layout == torch.strided
        and parameter.numel() > 0
        and type(parameter.data) is Tensor
        and torch.ops.aten.is_non_overlapping_and_dense(parameter)
        and not getattr(parameter, "tensor_model_parallel", False)  # Megatron's mark: each rank has its own part
        and owner_of(parameter) is None
    )


def _is_viewed(parameter: nn.Parameter) -> bool:
    """True if something else than the parameter needs its memory: a view, a graph, a gradient."""
    return is_used_elsewhere(parameter) or parameter.grad is not None


def _placeholder(found: Slice) -> Tensor:
    """One NaN (or zero) of the parameter's shape: nobody should ever see it."""
    value = float("nan") if found.values.dtype.is_floating_point else 0
    return torch.full((), value, dtype=found.values.dtype, device=found.values.device).expand(found.shape)


def _hand_in(parameter: nn.Parameter, values: Slice) -> None:
    # Before the class changes: of a sharded parameter an assignment of `data` counts as a use.
    parameter.data = _placeholder(values)
    parameter.__class__ = ShardedParameter
    cast(ShardedParameter, parameter).slice = values


def _hand_out(parameter: ShardedParameter, whole: Tensor) -> None:
    del parameter.slice
    # Before `data` is assigned, which would count as a use of a sharded parameter.
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.data = whole
