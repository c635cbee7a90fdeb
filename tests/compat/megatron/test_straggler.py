"""The straggler detector: sections, figures by rank, one gather per report, a control port that keeps others out."""

from __future__ import annotations

import errno
import http.client
import logging
import math
import os
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launcher import Launcher
from zero_strategy.compat.megatron import diagnostics as straggler_singleton
from zero_strategy.compat.megatron import straggler
from zero_strategy.compat.megatron.straggler import (
    ControlPort,
    GpuFigures,
    StragglerData,
    StragglerDetector,
    ValueWithRank,
)

TOKEN = "a-token-of-the-test"


def test_figures_by_rank() -> None:
    nan = math.nan
    data = StragglerData.of([[2.0, 1.0, nan, 250.0, nan, 0.0, 5.0], [3.0, 1.0, nan, nan, nan, 0.0, 4.0]])
    assert (data.min_elapsed(), data.max_elapsed()) == ((2.0, 0, "ms"), (3.0, 1, "ms"))
    assert data.max_btime.rank == 0 and data.min_btime.rank == 0  # equal: the first
    assert data.min_temp == ValueWithRank(None, None, "C") == data.max_temp
    assert data.max_power() == data.min_power() == (250.0, 0, "W")
    assert data.min_clock() == (0.0, 0, "MHz")  # a probe that says 0 is not absent
    assert data.aflops == [ValueWithRank(4.0, 1, "TF/s"), ValueWithRank(5.0, 0, "TF/s")]
    lines = "\n".join(data.lines(1))
    assert "slowest: 4.00TF/s/1" in lines and "fastest: 5.00TF/s/0" in lines and "temp" not in lines
    assert StragglerData.of([[nan] * 7]).aflops is None


def test_watts_and_absent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, probe in {
        "power_draw": lambda: 245_678, "temperature": lambda: 61, "utilization": absent, "clock_rate": lambda: 1410
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, probe)
    assert GpuFigures.now() == GpuFigures(temp=61, power=246, util=None, clock=1410)


def test_options_of_configure() -> None:
    """`amp`: the timed part stands for all of an iteration; `prefill`: events in advance, where there are events."""
    found = {}
    for amp in (1.0, 4.0):
        detector = StragglerDetector()
        detector.configure(1, 0, amp=amp, prefill=3, enabled=True)
        for _ in range(5):  # more sections than events were made for
            with detector:
                time.sleep(0.002)
        assert detector.report(total_flops=6e12, log_interval=5) and detector.last is not None
        each, (rate,) = detector.last.max_elapsed.value, detector.last.aflops or ()
        assert each is not None and rate.value == pytest.approx(6.0 / 5 / (amp * each / 1e3), rel=1e-6)
        found[amp] = rate.value * each
        detector.close()
    assert found[1.0] == pytest.approx(4 * found[4.0])
    for name, value in (("prefill", -1), ("amp", 0.0)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            StragglerDetector().configure(1, 0, **{name: value})  # type: ignore[arg-type]


def test_a_figure_has_the_documented_fields() -> None:
    figure = ValueWithRank(2.5, 3, "ms")
    assert (figure._value, figure._rank, figure._unit) == figure() == (figure.value, figure.rank, figure.unit)


def test_sections_of_one_process() -> None:
    detector = StragglerDetector()
    assert not detector.configured and not detector.enabled
    assert detector.report(1.0, 1) is False
    detector.start()  # off: nothing happens
    detector.stop()
    assert detector.start == detector.null_method and detector.elapsed()[:2] == (0.0, 0.0)
    detector.configure(1, 0, enabled=True)
    assert detector.configured and detector.enabled and (detector.my_rank, detector.world_size) == (0, 1)
    assert detector.control_port is None
    with detector, pytest.raises(ZeroDivisionError):
        _ = 1 / 0
    with detector:
        time.sleep(0.02)
    with detector(bdata=True) as same:
        assert same is detector and detector.bdata
        time.sleep(0.01)
    assert not detector.bdata
    delta, batches, *gpu = detector.elapsed()
    assert delta >= 20 and batches >= 10
    if not torch.cuda.is_available():
        assert gpu == [None] * 4
    assert detector.elapsed()[:2] == (0.0, 0.0)  # it has reset
    detector.stop()  # without a start
    assert detector.report(total_flops=1e9) is False  # no iterations
    with detector:
        time.sleep(0.01)
    assert detector.report(total_flops=6e12, log_interval=2) is True
    assert detector.last is not None and detector.last.aflops is not None
    each = detector.last.max_elapsed.value
    assert each is not None and each >= 5
    assert detector.last.aflops[0].value == pytest.approx(3.0 / (each / 1000) / 3.0)  # amp 3: only forwards are timed
    with pytest.raises(ValueError, match="configured already, as rank 0 of 1"):
        detector.configure(2, 1)
    detector.close()
    for wrong, said in (((0, 0), "world is 0"), ((2, 2), "rank is 2; accepted: 0 to 1"), ((1, 0, 0), "mmcnt is 0")):
        with pytest.raises(ValueError, match=said):
            detector.configure(*wrong)


def test_the_singleton() -> None:
    one = straggler_singleton.__straggler__
    one.configure(1, 0, enabled=True)
    try:
        assert straggler_singleton.StragglerDetector() is one
        assert one.configured and one.enabled, "a second construction wipes nothing"
        assert StragglerDetector() is not one and isinstance(one, StragglerDetector)
    finally:
        one.close()


# ---------------------------------------------------------------------------------------------------- control port


def ask(port: int, method: str = "POST", path: str = "/", token: str | None = TOKEN) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    assert int(answer.headers["Content-Length"]) == len(body) and answer.version == 11
    connection.close()
    return answer.status, body


def test_the_control_port() -> None:
    with pytest.raises(ValueError, match="has 3 characters; give 8 or more"):
        ControlPort(0, "abc")
    control = ControlPort(0, TOKEN)
    try:
        assert control._server.server_address[0] == "127.0.0.1"
        assert ask(control.port, token=None)[0] == ask(control.port, token="another-token")[0] == 401
        assert ask(control.port, path="/favicon.ico")[0] == 404
        assert ask(control.port, "DELETE")[0] == 501
        assert control.take() == 0
        assert ask(control.port)[0] == 200 and control.take() == 1 and control.take() == 0
        assert ask(control.port, "GET")[0] == ask(control.port)[0] == 200 and control.take() == 2
        with socket.create_connection(("127.0.0.1", control.port), timeout=10) as raw:
            raw.sendall(b"nonsense\r\n\r\n")
            assert b"400" in raw.recv(1000)
        assert control.take() == 0
    finally:
        control.close()
    with pytest.raises(ConnectionRefusedError):
        ask(control.port)


LONG = b"x" * (1 << 16)
WITHOUT_END = [
    b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n" + LONG,
    b"POST / HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n" + LONG,
    b"GET /" + LONG,
    b"GET / HTTP/1.1\r\nA: " + LONG,
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 8192,
]


@pytest.mark.parametrize("begins", WITHOUT_END)
def test_who_sends_without_end_is_cut_off(begins: bytes) -> None:
    control = ControlPort(0, TOKEN)
    try:
        with socket.create_connection(("127.0.0.1", control.port), timeout=30) as raw:
            sent = 0
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                raw.sendall(begins)
                while sent < 1 << 26:  # far beyond what the kernel keeps for a connection
                    sent += raw.send(LONG)
        assert ask(control.port)[0] == 200 and control.take() == 1
    finally:
        control.close()


def test_many_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler, "_SECONDS", 0.2)
    control = ControlPort(0, TOKEN)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    silent = [socket.socket() for _ in range(50)]
    try:
        for one in silent:
            one.setblocking(False)
            assert one.connect_ex(("127.0.0.1", control.port)) in (0, errno.EINPROGRESS)
        time.sleep(0.05)
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) <= files + len(silent) + 1  # one connection is held
        silent[0].settimeout(30)
        assert silent[0].recv(1) == b""  # it is closed, though it says nothing
    finally:
        for one in silent:
            one.close()
        control.close()


def test_the_token_comes_first() -> None:
    control = ControlPort(0, TOKEN)
    try:
        for request in (("PUT", "/"), ("POST", "/elsewhere")):
            assert ask(control.port, *request, token=None)[0] == 401
        with socket.create_connection(("127.0.0.1", control.port), timeout=30) as raw:
            raw.sendall(f"POST / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n".encode())
            raw.sendall(b"Expect: 100-continue\r\n\r\n")
            assert b" 200 " in raw.recv(1000)  # the body is not waited for
        assert control.take() == 1
        for half in (b"", b"POST / HT", f"POST / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()):
            with socket.create_connection(("127.0.0.1", control.port), timeout=30) as raw:
                raw.sendall(half)
                raw.shutdown(socket.SHUT_WR)
                assert raw.recv(1000) == b""
        assert control.take() == 0
    finally:
        control.close()


def on_two_ranks() -> dict[str, Any]:
    rank, found = dist.get_rank(), dict[str, Any]()
    gathers = 0
    original = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return original(*args, **kwargs)

    dist.all_gather = counted
    try:
        detector = StragglerDetector()
        detector.configure(2, rank, mmcnt=5, port=0, token=TOKEN)
        found["off"] = detector.report(1e12, 1), detector.enabled
        for requests, key in ((1, "on"), (2, "still on"), (1, "off again")):
            for _ in range(requests if rank == 0 else 0):
                assert detector.control_port is not None and ask(detector.control_port)[0] == 200
            before = detector.enabled
            with detector:
                time.sleep(0.03 if rank else 0.001)
            with detector(bdata=True):
                pass
            found[key] = before, detector.report(1e12, 1), detector.enabled
        found["last"], found["gathers"] = detector.last, gathers
        detector.close()
    finally:
        dist.all_gather = original
    return found


def test_straggler_two_ranks(ranks: Launcher) -> None:
    first, second = ranks(2)(on_two_ranks)
    assert first == second
    assert first["off"] == (False, False)
    assert first["on"] == (False, False, True)  # toggled at the end of the report
    assert first["still on"] == (True, True, True)  # twice is not at all
    assert first["off again"] == (True, True, False)
    assert first["gathers"] == 4  # one per report
    last = first["last"]
    assert last.max_elapsed.rank == 1 and last.min_elapsed.rank == 0 and last.max_elapsed.value >= 30
    assert [value.rank for value in last.aflops] == [1, 0]


def test_rank_0_logs(caplog: pytest.LogCaptureFixture) -> None:
    detector = StragglerDetector()
    detector.configure(1, 0, enabled=True)
    with detector:
        pass
    with caplog.at_level(logging.INFO, logger="zero_strategy"):
        assert detector.report(1e9, 1)
    assert "straggler report: elapsed: least" in caplog.text and "slowest: " in caplog.text
