"""Processes that train together, as torchft's lighthouse knows them.

Each process beats to the lighthouse from a thread of its own, in native code. A quorum is asked for when ranks are
formed and at the end of each step: the lighthouse answers all who are alive at once, with the same list. One that has
died is left out when its beats have stayed away; one that is new waits there until the others ask.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from typing import Any

from zero_strategy.runtime.torch_private import TCPStore
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.survive.layout import UNKNOWN, Layout
from zero_strategy.watchdog.peers import ProcessCard, condition, own_card

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable of torchft: the lighthouse's address, such as http://head:29510."""
PLACE = "ZERO_STRATEGY_PLACE"
"""Environment variable: this process's place, a number that the one who takes it over has as well."""
ADDRESS = "ZERO_STRATEGY_ADDRESS"
"""Environment variable: the address under which other hosts reach this one."""

HEARTBEAT_SECONDS = 0.05
_CONNECT_SECONDS = 10.0
_ABSENT_SECONDS = 30.0
"""That a lighthouse may be away: it is started again, maybe on another host."""
_QUORUM_SECONDS = 600.0
"""Longest wait for others who are alive and do not come; the lighthouse gives them up before."""
_LOOK_SECONDS = 1.0
"""Between two questions whether a lighthouse that does not answer yet is there."""
_REACH_SECONDS = timedelta(seconds=2)
"""In which it says that it is."""


@dataclass(frozen=True)
class Member:
    """A process that takes part.

    Attributes:
        name: Its place, and a name of this life of it.
        card: Identity of the process on its host.
        address: Of its host.
        port: Of its key-value store.
        memory: Folder of the run's copies there.
        asked: How often it has asked for a quorum.
        layout: Of the training, as far as it knows it.
        waited: Seconds for which it had waited for those who were launched with it, when it asked.
    """

    name: str
    card: ProcessCard
    address: str
    port: int
    memory: str
    asked: int
    layout: Layout = UNKNOWN
    waited: float = 0.0

    @property
    def place(self) -> int:
        """Number among those that were launched."""
        return int(self.name.partition(":")[0])

    @property
    def host(self) -> str:
        """A name of its host; processes of one see the same copies."""
        return f"{self.card.host} {self.memory}"

    @property
    def is_gone(self) -> bool:
        """True if its process is known to have ended."""
        return condition(self.card) == "gone"


@dataclass(frozen=True)
class World:
    """Members of one formation; their order is that of the ranks.

    Attributes:
        number: Of the quorum: another one has other members.
        rank: This process's.
        members: By rank.
        step: That the one who has come furthest has come to.
    """

    number: int
    rank: int
    members: Sequence[Member]
    step: int = 0

    @property
    def names(self) -> list[str]:
        """Members, by name."""
        return [each.name for each in self.members]

    @property
    def key(self) -> str:
        """A name of this answer of the lighthouse: the same members may form anew, where they failed to."""
        text = " ".join(f"{each.name}.{each.asked}" for each in self.members)
        return f"{self.number}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def layout(self) -> Layout:
        """The training's, as those know it who have begun it."""
        return max(each.layout for each in self.members)

    @property
    def waited(self) -> float:
        """Seconds for which one of them has waited for others: the same for all who have this answer."""
        return max((each.waited for each in self.members), default=0.0)

    @property
    def begun(self) -> bool:
        """True if somebody knows the training."""
        return self.step > 0 or self.layout.parts > 0

    def fitting(self) -> World:
        """The first members, as many as fit the layout, maybe none; the others wait until there are more, or fewer."""
        return replace(self, members=self.members[: self.layout.fitting(self.size)])

    @property
    def waits(self) -> bool:
        """True if this process is not among the members."""
        return self.rank >= self.size

    @property
    def me(self) -> Member:
        """This process."""
        return self.members[self.rank]

    @property
    def local_rank(self) -> int:
        """Number of this rank on its host."""
        return sum(each.host == self.me.host for each in self.members[: self.rank])

    def hosts(self) -> list[list[int]]:
        """Ranks of each host, in the order of their first ones."""
        found: dict[str, list[int]] = {}
        for rank, each in enumerate(self.members):
            found.setdefault(each.host, []).append(rank)
        return list(found.values())

    def gone(self) -> list[int]:
        """Ranks whose processes are known to have ended."""
        return [rank for rank, each in enumerate(self.members) if each.is_gone]


class Membership:
    """This process among those that train together.

    Args:
        lighthouse: Its address.
        place: This process's number.
        address: Under which the others reach this host.
        memory: Folder of the run's copies.
        absent_seconds: That the lighthouse may be away, or out of reach.

    Raises:
        ImportError: If torchft is not installed.
        ValueError: If the lighthouse cannot be reached.
    """

    def __init__(
        self, lighthouse: str, place: int, address: str, memory: str, *, absent_seconds: float = _ABSENT_SECONDS
    ) -> None:
        coordination = _coordination()
        # Ranks follow from the places, whose numbers have to sort as names.
        self.name = f"{place:06d}:{uuid.uuid4().hex[:8]}"
        # Every process has a store, and the first member's is used: whoever dies, the next formation has one.
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._card, self._address, self._memory, self._asked = own_card(), address, memory, 0
        self._lighthouse, self._absent_seconds = lighthouse, absent_seconds
        self._worker = BackgroundWorker("zero-quorum")
        seconds = timedelta(seconds=_CONNECT_SECONDS)
        try:
            self._client = coordination.LighthouseClient(lighthouse, seconds)
            self._beats = coordination.ManagerServer(
                replica_id=self.name, lighthouse_addr=lighthouse, hostname="127.0.0.1", bind="127.0.0.1:0",
                store_addr=f"{address}:{self.store.port}", world_size=1,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_SECONDS), connect_timeout=seconds, quorum_retries=0,
            )  # fmt: skip
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            raise ValueError(f"{LIGHTHOUSE} is {lighthouse!r}, and no lighthouse answers there: {error}") from error

    def quorum(self, step: int, layout: Layout = UNKNOWN, waited: float = 0.0) -> World:
        """Everybody who is alive and asks. All members ask, or are given up by the lighthouse.

        Args:
            step: See `ask`.
            layout: See `ask`.
            waited: See `Member`.

        Raises:
            RuntimeError, TimeoutError: See `answer`.
        """
        return self.answer(self.ask(step, layout, waited))

    def ask(self, step: int, layout: Layout = UNKNOWN, waited: float = 0.0) -> Future[World]:
        """Begin to ask who is there; `answer` waits for it.

        Args:
            step: That this process has come to; for the lighthouse's page.
            layout: See `Member`.
            waited: See `Member`.
        """
        asked: Future[World] = Future()

        def ask() -> None:
            try:
                world = self._quorum(step, layout, waited)
            except BaseException as error:
                asked.set_exception(error)
            else:
                asked.set_result(world)

        # A daemon's: a process that ends does not wait for an answer.
        self._worker.submit(ask)
        return asked

    def answer(self, asked: Future[World]) -> World:
        """The answer to a question.

        It comes when all have asked, which may take long; so the lighthouse is asked meanwhile whether it is there. Its
        client would wait for a minute and more on a connection that is cut.

        Raises:
            RuntimeError, TimeoutError: If the lighthouse does not answer, or cannot be reached.
        """
        reached = time.monotonic()
        while not futures.wait([asked], _LOOK_SECONDS).done:
            if self._reaches_lighthouse():
                reached = time.monotonic()
            elif (seconds := time.monotonic() - reached) > self._absent_seconds:
                raise RuntimeError(
                    f"the lighthouse at {self._lighthouse} has not answered for {seconds:.0f} s: it has ended, or this "
                    "host is cut off from it. The others may go on without this process"
                )
        return asked.result()

    def _reaches_lighthouse(self) -> bool:
        with suppress(RuntimeError, TimeoutError, ConnectionError):
            self._client.heartbeat(self.name, _REACH_SECONDS)
            return True
        return False

    def _quorum(self, step: int, layout: Layout, waited: float) -> World:
        self._asked += 1
        own = json.dumps([*self._card, self._address, self._memory, self._asked, astuple(layout), waited])
        found = self._found(own, step)
        members = [_member(each) for each in sorted(found.participants, key=lambda each: each.replica_id)]
        rank = next(rank for rank, each in enumerate(members) if each.name == self.name)
        return World(found.quorum_id, rank, members, max(each.step for each in found.participants))

    def _found(self, own: str, step: int) -> Any:
        """The lighthouse's answer; it may be started again meanwhile."""
        end = 0.0
        while True:
            begun = time.monotonic()
            try:
                return self._client.quorum(
                    self.name, timedelta(seconds=_QUORUM_SECONDS), address=own, store_address=str(self.store.port),
                    step=step, world_size=1, shrink_only=False,
                )  # fmt: skip
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                now = time.monotonic()
                if not end or self._absent_seconds < now - begun < _QUORUM_SECONDS:  # it was there until now
                    end = now + self._absent_seconds
                if now > end or now - begun >= _QUORUM_SECONDS:
                    raise RuntimeError(f"the lighthouse at {self._lighthouse} has not answered: {error}") from error
                time.sleep(HEARTBEAT_SECONDS)

    def first_quorum(self, ranks: int, seconds: float, layout: Layout = UNKNOWN, world: World | None = None) -> World:
        """The members at the start, when so many are there, the time is over, or others train already.

        Processes start at different times, and each one more would begin anew what the first ones have begun.

        Args:
            ranks: How many were launched.
            seconds: Longest wait for them.
            layout: See `Member`.
            world: An answer that this process has already, as it has formed with others, and one has died.
        """
        since = time.monotonic()
        # All of a quorum see the same one, and come to the same end: a clock of its own would let one of them go alone.
        while world is None or not (world.size >= ranks or world.begun or world.waited > seconds):
            if world is not None:
                time.sleep(HEARTBEAT_SECONDS)
            world = self.quorum(0, layout, time.monotonic() - since)
        return world

    def close(self) -> None:
        """Beat no more: the others do not wait for this process."""
        self._beats.shutdown()


def _member(found: Any) -> Member:
    host, pid, started, address, memory, asked, layout, waited = json.loads(found.address)
    card = ProcessCard(host, pid, started)
    return Member(found.replica_id, card, address, int(found.store_address), memory, asked, Layout(*layout), waited)


def _coordination() -> Any:
    try:
        from torchft import coordination
    except ImportError as error:
        raise ImportError(
            "training that survives deaths asks torchft's lighthouse who is there: pip install 'zero-strategy[survive]'"
        ) from error
    return coordination
