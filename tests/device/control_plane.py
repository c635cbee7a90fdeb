"""The control plane of one rank: its messages to other ranks and to the store, counted by event.

In a fake world the package's own code runs with nothing behind it: what comes from the others equals what this rank has
sent, and in the store every rank has done what this one has. Groups of gloo that connect by use are real. Among real
ranks the same calls are counted on their way.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.fake_ranks import Mirror
from tests.engine.nets import loss_of, net
from zero_strategy.checkpoint import CheckpointPlan, Manifest, SaveWriter, save_job
from zero_strategy.checkpoint.save_job import SavePlaces
from zero_strategy.comm import collectives
from zero_strategy.comm.gloo_address import _LATE
from zero_strategy.comm.transport import HostCollectives, Job, Run
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

Arrives = Literal["first", "last"]
"""When a rank comes to meetings: before all others, or behind them."""


@dataclass
class Sent:
    """Messages of one event.

    Attributes:
        store: Operations on the key-value store, by name; each is one message, and one answer. "read": a count, by
            adding nothing.
        messages: Messages from this rank to others.
        peers: Ranks of a group that it sends to or receives from.
        collectives: Of torch and of the tensors' transport, by kind and number of ranks.
        keys: Keys that one operation of the store has named, at most.
        operations: Of torch, on the host.
    """

    store: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    peers: set[int] = field(default_factory=set)
    collectives: Counter[tuple[str, int]] = field(default_factory=Counter)
    keys: int = 0
    operations: int = 0


class Tally(TorchDispatchMode):
    """Counts of messages by event."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[str, Sent] = {}
        self.now = Sent()

    @contextmanager
    def event(self, name: str) -> Iterator[None]:
        """Inside, messages belong to this event."""
        before, self.now = self.now, Sent()
        try:
            with self:
                yield
        finally:
            self.events[name], self.now = self.now, before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation."""
        self.now.operations += 1
        return func(*args, **(kwargs or {}))

    def asks(self, operation: str, *arguments: Any) -> None:
        """Note a message to the store."""
        self.now.store["read" if operation == "add" and not arguments[1] else operation] += 1
        self.now.keys = max(self.now.keys, len(arguments[0]) if isinstance(arguments[0], list) else 1)


class CountedStore:
    """A store whose operations are counted.

    Args:
        inner: The store.
        tally: Where.
    """

    def __init__(self, inner: Any, tally: Tally) -> None:
        self._inner, self._tally = inner, tally

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _OPERATIONS:
            return found

        def call(*arguments: Any) -> Any:
            self._tally.asks(name, *arguments)
            return found(*arguments)

        return call

    def clone(self) -> CountedStore:
        """A connection of its own, counted in the same place."""
        return CountedStore(self._inner.clone(), self._tally)


_OPERATIONS = frozenset(("set", "get", "add", "check", "wait", "delete_key", "compare_set"))
_OF_FIRST = {"placed": b"", "prepared": b"", "committed": b"", "judged": b"1", "judged/0": b"true"}
"""What rank 0 leaves in a save, by the end of the key."""


class MirrorOfAll(Mirror):
    """A store in which every rank has done what this one has, before it or behind it.

    Args:
        rank, world: This one, and how many there are.
        arrives: This rank, at meetings.
        tally: Counts its operations.
    """

    def __init__(self, rank: int, world: int, arrives: Arrives, tally: Tally) -> None:
        super().__init__(rank, world)
        self._arrives, self._tally = arrives, tally
        self._looked: set[str] = set()

    def set(self, key: str, value: Any) -> None:
        """See `Mirror`."""
        self._tally.asks("set", key)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """See `Mirror`."""
        self._tally.asks("get", key)
        if key in self.data:
            return self.data[key]
        if key.endswith("/answer"):
            return b'{"kind": "different", "text": ""}' if ".settings/" in key else b"{}"
        return self._of_first(key) or super().get(key)

    def add(self, key: str, amount: int) -> int:
        """See `Mirror`."""
        self._tally.asks("add", key, amount)
        found = super().add(key, amount)
        if key.endswith("/answered"):
            return amount  # one rank answers for all
        # The first one to come finds nobody but itself; whoever is last is told by the sum.
        return amount if self._arrives == "first" and key.endswith("/arrived") and amount else found

    def check(self, keys: list[str]) -> bool:
        """See `Mirror`. An answer is there at the second look."""
        self._tally.asks("check", keys)
        for key in keys:
            if key.endswith("/answer") and key not in self._looked:
                self._looked.add(key)
                return False
        return all(self._of_first(key) is not None or super(MirrorOfAll, self).check([key]) for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """See `Mirror`."""
        self._tally.asks("wait", keys)

    def deleteKey(self, key: str) -> bool:
        """See `Mirror`."""
        self._tally.asks("delete_key", key)
        return super().deleteKey(key)

    def clone(self) -> MirrorOfAll:
        """Another connection to the same store."""
        return self

    def _of_first(self, key: str) -> bytes | None:
        if self.rank == 0 or "/save/" not in key or not key.endswith(("/0", "/0/0")):
            return None
        return _OF_FIRST.get(key.split("/")[-2] if not key.endswith("/0/0") else key.split("/")[-3] + "/0")


class Arrived:
    """A message under way, which arrives when it is waited for."""

    def __init__(self, arrive: Callable[[], object] = lambda: None) -> None:
        self._arrive = arrive

    def wait(self) -> None:
        """See `torch.distributed.Work`."""
        self._arrive()


@contextmanager
def counted_messages(tally: Tally, *, answered: bool) -> Iterator[None]:
    """Inside, what goes through `torch.distributed` is counted.

    Args:
        tally: Where.
        answered: Nothing is sent: what comes equals what this rank has sent last under the same tag.
    """
    on_its_way: dict[int, torch.Tensor] = {}
    true = {name: getattr(dist, name) for name in ("isend", "irecv", *_COLLECTIVES)}

    def isend(tensor: torch.Tensor, *, group: Any, group_dst: int, tag: int) -> Any:
        tally.now.messages += 1
        tally.now.peers.add(group_dst)
        on_its_way[tag] = tensor
        return Arrived() if answered else true["isend"](tensor, group=group, group_dst=group_dst, tag=tag)

    def irecv(tensor: torch.Tensor, *, group: Any, group_src: int, tag: int) -> Any:
        tally.now.peers.add(group_src)
        if answered:
            return Arrived(lambda: tensor.copy_(on_its_way[tag]))
        return true["irecv"](tensor, group=group, group_src=group_src, tag=tag)

    def collective(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            group = options.get("group", arguments[0] if name == "barrier" and arguments else None)
            tally.now.collectives[name, dist.get_world_size(group)] += 1
            if not answered:
                return true[name](*arguments, **options)
            if name == "all_gather":
                for tensor in arguments[0]:
                    tensor.copy_(arguments[1])
            return Arrived()

        return call

    with ExitStack() as stack:
        for name, call in {"isend": isend, "irecv": irecv, **{name: collective(name) for name in _COLLECTIVES}}.items():
            stack.enter_context(patch.object(dist, name, call))
        yield


_COLLECTIVES = ("barrier", "broadcast", "all_gather", "all_reduce", "all_gather_object", "broadcast_object_list")


class DeviceAlike(HostCollectives):
    """Buckets go as by a device's library, one collective each; all else is the transport of the host as it is."""

    tally: Tally

    def start(self, run: Run) -> None:  # type: ignore[override]
        """At once."""
        run()

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """As a device: never."""
        return False

    def all_gather(self, flat: torch.Tensor) -> Job:
        """See `Collectives`."""

        def run() -> None:
            self.tally.now.collectives["all_gather", self.size] += 1
            slices = flat.view(self.size, -1)
            slices.copy_(slices[self.rank].clone().expand_as(slices))

        return Job(run)

    def reduce_scatter(self, flat: torch.Tensor, into: torch.Tensor | None, factor: float, order: Any = None) -> Job:
        """See `Collectives`."""

        def run() -> None:
            self.tally.now.collectives["reduce_scatter", self.size] += 1
            own = flat.view(self.size, -1)[self.rank]
            (own if into is None else into).copy_(own * (self.size * factor))

        return Job(run)

    def all_reduce(self, flat: torch.Tensor, factor: float) -> Job:
        """See `Collectives`."""

        def run() -> None:
            self.tally.now.collectives["all_reduce", self.size] += 1
            flat.mul_(self.size * factor)

        return Job(run)


class Unwritten(SaveWriter):
    """Writes nothing: a save is then what the ranks tell each other."""

    def prepare(self, plan: CheckpointPlan) -> None:
        """See `SaveWriter`."""
        self._plan = plan

    def write_all(self, pieces: Iterable[Any], **options: Any) -> None:
        """See `SaveWriter`."""

    def commit(
        self, manifest: Manifest, extra_files: Mapping[str, bytes] | None = None, *, update_latest: bool = True
    ) -> None:
        """See `SaveWriter`."""

    def abandon(self) -> None:
        """See `SaveWriter`."""

    def _put(self, path: str, content: bytes) -> None:
        pass

    def _manifest_there(self) -> Manifest | None:
        return None


WIDTH = 32
"""Of a model of which each of a dozen ranks has a part: one without any says so before every save."""


def train(tally: Tally, folder: Path, **settings: Any) -> None:
    """An engine from its making to its end: two steps, two saves, a barrier."""

    def writer(places: SavePlaces, place: Any, board: Any, token: str, *, known: bool) -> SaveWriter:
        places._sharing(place, board, token, known)  # once per folder
        return Unwritten(place.path, rank=board.rank, world_size=board.world_size, token=token)

    model = net(depth=3, width=WIDTH)
    with tally.event("build"):
        engine = ZeroEngine(model, load_config(units={"min_numel": 0}, **settings))
    for axis in engine.model.norm_groups:
        axis.numbers_on = torch.device("cpu")  # as `Mesh.warm_up` says on a GPU
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    for name in ("first step", "step"):
        with tally.event(name):
            loss_of(model(torch.ones(4, WIDTH))).backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    with patch.object(SavePlaces, "writer", writer):
        for name in ("first save", "save"):
            with tally.event(name):
                engine.save(folder / name).finish()
    for name in ("first barrier", "barrier"):
        with tally.event(name):
            engine.mesh.barrier.wait_for_all(name)
    with tally.event("close"):
        engine.close()


@contextmanager
def fake_control_plane(rank: int, world: int, arrives: Arrives) -> Iterator[Tally]:
    """Inside, this process is one of so many ranks on devices; yields the counts of what it sends."""
    tally, new_group = Tally(), dist.new_group

    def group_of(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        # Those that connect all ranks at once would wait for them.
        real = backend == "gloo" and os.environ.get(_LATE) == "1"
        return new_group(ranks, timeout=timeout, backend="gloo" if real else "fake", **options)

    counted = type("Counted", (DeviceAlike,), {"tally": tally})
    mirror = MirrorOfAll(rank, world, arrives, tally)
    dist.init_process_group("fake", store=mirror, rank=rank, world_size=world)
    try:
        with (
            patch.object(dist, "new_group", group_of),
            patch.object(collectives, "HostCollectives", counted),
            patch.object(save_job, "_is_there", lambda *asked: True),  # the mark that rank 0 has left in the folder
            counted_messages(tally, answered=True),
        ):
            yield tally
    finally:
        dist.destroy_process_group()


def sent_by(rank: int, world: int, folder: Path, arrives: Arrives = "last", **settings: Any) -> dict[str, Sent]:
    """Messages of one rank, by event."""
    with fake_control_plane(rank, world, arrives) as tally:
        train(tally, folder, **settings)
    return tally.events
