"""Connections to a store of another host that break soon when that host cannot be reached any more.

torch waits for the answer to each message to a store without a bound of its own. A process that has ended closes its
connections, and such a wait ends; a host that is off, or a link that is cut, says nothing. So the kernel is asked to
break the connection when nothing of what was sent is acknowledged for some seconds, and to ask by itself where nothing
is sent. It is the other host's kernel that answers, however busy its processes are: no load is mistaken for a cut.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent import futures
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zero_strategy.runtime.torch_private import TCPStore, socket_of, tcp_store_of
from zero_strategy.runtime.worker import BackgroundWorker

_PROBE_SECONDS = 1
"""Of silence on a connection, after which the kernel asks the other one's; also between two such questions."""

T = TypeVar("T")


def connect(address: str, port: int, seconds: float) -> TCPStore:
    """Connect to a store that is there.

    Args:
        address: Of its host.
        port: Its.
        seconds: In which it connects, and for which its host may be out of reach later; also its time-out, as torch
            has it, for keys that are waited for.

    Raises:
        DistNetworkError: If it does not connect in time.
    """
    limit = timedelta(seconds=seconds)
    store = _made(lambda: TCPStore(address, port, is_master=False, timeout=limit), seconds, f"{address}:{port}")
    _bound(store, round(seconds * 1000))
    return store


def second_connection(store: Any) -> Any:
    """Connect once more to the store of a connection, with the same bound, if that has one.

    Args:
        store: Any that can be cloned.

    Raises:
        AttributeError, NotImplementedError, RuntimeError: If it cannot be, or does not connect.
    """
    plain = tcp_store_of(store)
    if plain is None or not (milliseconds := _bound_of(plain)):
        return store.clone()
    made: Any = _made(store.clone, milliseconds / 1000, f"{plain.host}:{plain.port}")
    if (plain := tcp_store_of(made)) is not None:
        _bound(plain, milliseconds)
    return made


def _made(make: Callable[[], T], seconds: float, where: str) -> T:
    """Make a connection, in a thread that is left behind if it takes too long.

    torch bounds the time in which it connects, but then waits for a first answer, before anyone can bound that.
    """
    made: list[T] = []
    worker = BackgroundWorker("zero-store-connect")
    asked = worker.submit(lambda: made.append(make()))
    if not futures.wait([asked], 2 * seconds).done:
        raise dist.DistNetworkError(f"the store at {where} has not answered for {2 * seconds:g} s")
    asked.result()
    return made[0]


def _bound(store: TCPStore, milliseconds: int) -> None:
    """Let a connection break when its other host has been out of reach for so long."""
    if (number := _own_socket(store)) is None:
        return
    with closing(number):
        number.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        number.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        number.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        number.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _bound_of(store: TCPStore) -> int:
    """Milliseconds; 0: there is no bound."""
    if (number := _own_socket(store)) is None:
        return 0
    with closing(number):
        return number.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def _own_socket(store: TCPStore) -> socket.socket | None:
    """The connection, by a number of its own that the caller closes; None where there are no such bounds."""
    number = socket_of(store) if sys.platform == "linux" else None
    return None if number is None else socket.socket(fileno=os.dup(number))
