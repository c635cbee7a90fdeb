"""Megatron's straggler detector: time of chosen sections on every rank, gathered once per report.

    detector = StragglerDetector()
    detector.configure(world=2, rank=rank, enabled=True)
    for step, batch in enumerate(loader):
        with detector(bdata=True):
            batch = next(batches)                  # host time only
        with detector:
            loss = model(batch)                    # CUDA events on a GPU, else the wall clock
        if step % 100 == 99:
            detector.report(total_flops=flops, log_interval=100)     # all ranks

A report has the least and the greatest of each figure over the ranks, and whose they are.

Its control port is HTTP on this host's loopback, for those who have the token:

    curl -X POST -H "Authorization: Bearer TOKEN" http://127.0.0.1:65535/

Any user of the host can connect, so nobody costs more than this: one connection at a time, for two seconds and with a
head of 8 KiB at most; a few more wait in the kernel. The token is looked at first. Bodies are not kept.
"""

from __future__ import annotations

import hmac
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import HTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.comm.store import all_gather_row
from zero_strategy.runtime.http_requests import BoundedHandler
from zero_strategy.runtime.terminal import report

if TYPE_CHECKING:
    from typing_extensions import Self


FIGURES = {
    "elapsed": "ms",
    "btime": "ms",
    "temp": "C",
    "power": "W",
    "util": "%",
    "clock": "MHz",
}
"""Name and unit: time per iteration, time for its batch, and of the GPU temperature, power, utilisation, clock."""


@dataclass(frozen=True)
class ValueWithRank:
    """A figure and the rank that it is of.

    Attributes:
        value: None where no rank has such a probe.
        rank: None likewise.
        unit: Of the value.
    """

    value: float | None
    rank: int | None
    unit: str = ""

    @property
    def _value(self) -> float | None:
        """Megatron's name of `value`."""
        return self.value

    @property
    def _rank(self) -> int | None:
        """Megatron's name of `rank`."""
        return self.rank

    @property
    def _unit(self) -> str:
        """Megatron's name of `unit`."""
        return self.unit

    def __lt__(self, other: ValueWithRank) -> bool:
        """True if the value is smaller; one that is not known is neither smaller nor greater."""
        return self.value is not None and other.value is not None and self.value < other.value

    def __gt__(self, other: ValueWithRank) -> bool:
        """True if the value is greater."""
        return other < self

    def __call__(self) -> tuple[float | None, int | None, str]:
        """The three."""
        return self.value, self.rank, self.unit

    def __str__(self) -> str:
        return "not known" if self.value is None else f"{self.value:.2f}{self.unit}/{self.rank}"


@dataclass(frozen=True)
class StragglerData:
    """The least and the greatest of each figure; see `FIGURES` for names and units.

    Attributes:
        aflops: Every rank's estimated TFLOP/s, the slowest first; None where no FLOPs were told.
    """

    min_elapsed: ValueWithRank
    max_elapsed: ValueWithRank
    min_btime: ValueWithRank
    max_btime: ValueWithRank
    min_temp: ValueWithRank
    max_temp: ValueWithRank
    min_power: ValueWithRank
    max_power: ValueWithRank
    min_util: ValueWithRank
    max_util: ValueWithRank
    min_clock: ValueWithRank
    max_clock: ValueWithRank
    aflops: list[ValueWithRank] | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> StragglerData:
        """A report from each rank's figures in their order, then its TFLOP/s; NaN where there is none."""
        found: dict[str, Any] = {}
        for column, (name, unit) in enumerate(FIGURES.items()):
            known = [(row[column], rank) for rank, row in enumerate(rows) if not math.isnan(row[column])]
            if not known:
                found[f"min_{name}"] = found[f"max_{name}"] = ValueWithRank(None, None, unit)
                continue
            least, greatest = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
            found[f"min_{name}"] = ValueWithRank(least[0], least[1], unit)
            found[f"max_{name}"] = ValueWithRank(greatest[0], greatest[1], unit)
        flops = sorted((row[len(FIGURES)], rank) for rank, row in enumerate(rows) if not math.isnan(row[len(FIGURES)]))
        return cls(**found, aflops=[ValueWithRank(value, rank, "TF/s") for value, rank in flops] or None)

    def lines(self, count: int) -> list[str]:
        """For people.

        Args:
            count: How many of the slowest and of the fastest ranks are listed.
        """
        said = []
        for name in FIGURES:
            least, greatest = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least.value is not None:
                said.append(f"{name}: least {least}, greatest {greatest} (value/rank)")
        if self.aflops:
            said.append(f"slowest: {', '.join(map(str, self.aflops[:count]))}")
            said.append(f"fastest: {', '.join(map(str, self.aflops[: -count - 1 : -1]))}")
        return said


@dataclass(frozen=True)
class GpuFigures:
    """Figures of this process's GPU now; None for what its driver does not tell, and without a GPU."""

    temp: int | None = None
    power: int | None = None
    util: int | None = None
    clock: int | None = None

    @classmethod
    def now(cls) -> GpuFigures:
        """Ask the driver."""
        if not torch.cuda.is_available():
            return cls()
        milliwatts = _asked(torch.cuda.power_draw)
        return cls(
            temp=_asked(torch.cuda.temperature),
            power=None if milliwatts is None else round(milliwatts / 1000),
            util=_asked(torch.cuda.utilization),
            clock=_asked(torch.cuda.clock_rate),
        )


def _asked(probe: Callable[[], int]) -> int | None:
    try:
        return int(probe())
    except Exception:  # no library to ask with, a driver that does not tell, a device that is shared
        return None


_log = logging.getLogger(__name__)


class StragglerDetector:
    """Times sections of one rank and compares ranks. Does nothing until it is configured and enabled.

    Attributes:
        start: Begins a section; does nothing while collection is off.
        stop: Ends it; likewise.
        bdata: Whether sections are of getting a batch: host time only.
        last: What the last report found, on every rank.
    """

    def __init__(self) -> None:
        self.start: Callable[[], None] = self.null_method
        self.stop: Callable[[], None] = self.null_method
        self.bdata = False
        self.last: StragglerData | None = None
        self._configured, self._off = False, True
        self._world, self._rank, self._mmcnt, self._amp = 1, 0, 1, 3.0
        self._controlled = False
        self._control: ControlPort | None = None
        self._spare: list[Any] = []
        self._open: list[tuple[bool, Any]] = []
        self._events: list[tuple[Any, Any]] = []
        self._spans: dict[bool, float] = {False: 0.0, True: 0.0}

    def configure(
        self,
        world: int,
        rank: int,
        mmcnt: int = 1,
        amp: float = 3.0,
        port: int = 65535,
        prefill: int = 1024,
        enabled: bool = False,
        *,
        token: str | None = None,
    ) -> None:
        """Say who this is; alike on all ranks, once.

        Args:
            world: Number of ranks.
            rank: This one.
            mmcnt: How many of the slowest and fastest ranks are listed.
            amp: By what the timed part of an iteration is to be multiplied to stand for all of it: 3 if only forwards
                are timed.
            port: Of the control port on rank 0's loopback; 0 for any that is free.
            prefill: CUDA events that are made in advance.
            enabled: Collect from the start.
            token: What requests to the control port have to show; without one there is no port.

        Raises:
            ValueError: If a number makes no sense, or it was configured already.
            OSError: If the port is taken.
        """
        if self._configured:
            raise ValueError(f"the straggler detector is configured already, as rank {self._rank} of {self._world}")
        for name, value, least in (("world", world, 1), ("mmcnt", mmcnt, 1), ("prefill", prefill, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}; accepted: {least} or more")
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank}; accepted: 0 to {world - 1}, as world is {world}")
        if not amp > 0:
            raise ValueError(f"amp is {amp}; accepted: more than 0")
        self._world, self._rank, self._mmcnt, self._amp = world, rank, min(mmcnt, world), amp
        self._controlled = token is not None
        if token is not None and rank == 0:
            self._control = ControlPort(port, token)
        if torch.cuda.is_available():
            self._spare = [self._new_event() for _ in range(2 * prefill)]
        self._configured = True
        self._set_off(not enabled)

    def close(self) -> None:
        """Collect no more, close the control port; it may be configured anew."""
        if self._control is not None:
            self._control.close()
            self._control = None
        self._set_off(True)
        self.reset()
        self._configured = self._controlled = False
        self._spare.clear()

    # ---- sections ----

    def __call__(self, bdata: bool = False) -> Self:
        """Say of what kind the section is that a `with` begins."""
        self.bdata = bdata
        return self

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.bdata = False

    def start_method(self) -> None:
        """Begin a section."""
        on_device = torch.cuda.is_available() and not self.bdata
        mark: Any = self._spare.pop() if on_device and self._spare else self._new_event() if on_device else None
        if mark is None:
            mark = time.perf_counter()
        else:
            mark.record()
        self._open.append((self.bdata, mark))

    def stop_method(self) -> None:
        """End the section that began last; one that began while collection was off does not count."""
        if not self._open:
            return
        bdata, mark = self._open.pop()
        if isinstance(mark, float):
            self._spans[bdata] += 1000.0 * (time.perf_counter() - mark)
            return
        end = self._spare.pop() if self._spare else self._new_event()
        end.record()
        self._events.append((mark, end))

    def null_method(self) -> None:
        """Methods in place of `start` and `stop` while collection is off."""

    @staticmethod
    def _new_event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    def reset(self) -> None:
        """Forget all sections."""
        for pair in self._events:
            self._spare.extend(pair)
        self._events.clear()
        self._open.clear()
        self._spans = {False: 0.0, True: 0.0}

    def elapsed(self) -> tuple[float, float, int | None, int | None, int | None, int | None]:
        """All since the last `reset`, which follows.

        Returns:
            Milliseconds in sections, milliseconds in sections of getting a batch, and the GPU's temperature (C),
            power (W), utilisation (%) and clock (MHz) now, None where they are not known.
        """
        if self._events:
            self._events[-1][1].synchronize()
        delta = self._spans[False] + sum(begin.elapsed_time(end) for begin, end in self._events)
        batches, gpu = self._spans[True], GpuFigures.now()
        self.reset()
        return delta, batches, gpu.temp, gpu.power, gpu.util, gpu.clock

    # ---- reports ----

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Compare the ranks since the last report; all ranks call it, rank 0 logs. At its end collection may toggle.

        Args:
            total_flops: Of all ranks together since then; 0: not known.
            log_interval: Iterations since then.

        Returns:
            Whether there was something to report: not while collection is off, and not without iterations.
        """
        if not self._configured or (self._off and not self._controlled):
            return False
        counts = not self._off and log_interval > 0
        row = [math.nan] * 7
        if counts:
            delta, batches, *gpu = self.elapsed()
            each = delta / log_interval
            flops = self._tera(total_flops / log_interval, each)
            row = [each, batches / log_interval, *(math.nan if value is None else float(value) for value in gpu), flops]
        toggles = 0 if self._control is None else self._control.take()
        rows = all_gather_row([*row, float(toggles)])
        if len(rows) != self._world:
            raise RuntimeError(f"the straggler detector was configured for {self._world} ranks, there are {len(rows)}")
        if counts:
            self.last = StragglerData.of(rows)
            if self._rank == 0:
                report(_log, "straggler report: %s", "; ".join(self.last.lines(self._mmcnt)))
        if int(rows[0][-1]) % 2:
            self._set_off(not self._off)
        return counts

    def _tera(self, flops: float, milliseconds: float) -> float:
        """This rank's TFLOP/s, by its share of an iteration's."""
        if not flops or not milliseconds:
            return math.nan
        return flops / self._world / (milliseconds * 1e9) / self._amp

    def _min_max(
        self,
        ptime: float,
        btime: float,
        temp: float | None,
        power: float | None,
        util: float | None,
        clock: float | None,
        flops: float | None,
    ) -> StragglerData | None:
        """Gather figures of all ranks; None while collection is off."""
        if self._off:
            return None
        row = (ptime, btime, temp, power, util, clock, flops)
        return StragglerData.of(all_gather_row([math.nan if value is None else float(value) for value in row]))

    def _set_off(self, off: bool) -> None:
        self._off = off
        self.start = self.null_method if off else self.start_method
        self.stop = self.null_method if off else self.stop_method
        if off:
            self.reset()

    # ---- what it is ----

    @property
    def enabled(self) -> bool:
        """True if it collects."""
        return not self._off

    @property
    def configured(self) -> bool:
        """True if `configure` was called."""
        return self._configured

    @property
    def my_rank(self) -> int:
        """The rank it was configured as."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks it was configured for."""
        return self._world

    @property
    def control_port(self) -> int | None:
        """The port that rank 0 listens on, None where there is none."""
        return None if self._control is None else self._control.port


LOOPBACK = "127.0.0.1"
LEAST_TOKEN = 8
"""Characters."""
_SECONDS = 2.0
"""That a connection may last, from its first byte to its last one."""
_MOST_BODY_BYTES = 65536
"""That are read and dropped: a connection that is closed with unread bytes would take the answer along."""


class ControlPort:
    """Counts the requests to toggle, each once.

    Args:
        port: The TCP port, 0 for any that is free.
        token: What a request has to show.

    Attributes:
        port: The port that is listened on.

    Raises:
        ValueError: If the token is too short to keep anybody out.
        OSError: If the port is taken.
    """

    def __init__(self, port: int, token: str) -> None:
        if len(token) < LEAST_TOKEN:
            raise ValueError(f"the control port's token has {len(token)} characters; give {LEAST_TOKEN} or more")
        self._lock, self._requests = threading.Lock(), 0
        self._server = _Server((LOOPBACK, port), _handler(self, f"Bearer {token}".encode()))
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="straggler control")
        self._thread.start()

    def count(self) -> None:
        """One more request."""
        with self._lock:
            self._requests += 1

    def take(self) -> int:
        """Number of requests since the last call."""
        with self._lock:
            requests, self._requests = self._requests, 0
        return requests

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of who goes away before the answer; anything else is a defect, and printed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _handler(control: ControlPort, wanted: bytes) -> type[BoundedHandler]:
    class Handler(BoundedHandler):
        head_seconds = _SECONDS

        def parse_request(self) -> bool:
            """True if it is a request of who has the token."""
            if not super().parse_request():
                return False
            given = self.headers.get("Authorization", "")
            if hmac.compare_digest(given.encode("latin-1", "replace"), wanted):
                return True
            self._answer(401, "give the token as 'Authorization: Bearer TOKEN'\n")
            return False

        def handle_expect_100(self) -> bool:
            """Ask for no body: the answer follows at once."""
            return True

        def do_POST(self) -> None:
            """Toggle."""
            self._toggle()

        def do_GET(self) -> None:
            """Toggle, as curl asks without any option."""
            self._toggle()

        def _toggle(self) -> None:
            if self.path != "/":
                self._answer(404, "there is only /\n")
            else:
                control.count()
                self._answer(200, "collection will be toggled at the end of the next report\n")

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def finish(self) -> None:
            """Send what there is, and read on for a little while."""
            super().finish()
            try:
                self.connection.shutdown(socket.SHUT_WR)
            except OSError:  # it is closed already
                return
            left = _MOST_BODY_BYTES
            while more := self.receive(min(left, 4096)):
                left -= len(more)

    return Handler
