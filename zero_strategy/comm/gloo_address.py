"""The address under which this process waits for the other ranks in gloo, and the error when they cannot connect.

gloo takes, in this order: the address of the interface that GLOO_SOCKET_IFNAME names; the address that this host's own
name leads to, if this host has it; the loopback address. The last two reach no other host where names do not resolve.
NCCL's groups do not connect by gloo, but control messages and checkpoints do, on GPUs too.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: the IPv4 address of an interface."""
_OF_CONNECTING = ("connectFullMesh", "Unable to find address", "Unable to find interface")
"""Parts of gloo's messages about connections. Its errors are RuntimeErrors like any other."""


_LATE = "TORCH_GLOO_LAZY_INIT"


@contextmanager
def connecting_late(asked: bool) -> Iterator[None]:
    """Inside, a group of gloo connects two ranks when the first message goes between them, if that is asked for.

    Otherwise it connects each rank to each other one at once: N sockets for each group on every rank. Those that send
    in log2(N) rounds need 2 log2(N). What the environment says already stays.
    """
    if not asked or _LATE in os.environ:
        yield
        return
    # torch asks the environment each time that it makes a group, and has no argument for it.
    os.environ[_LATE] = "1"
    try:
        yield
    finally:
        del os.environ[_LATE]


@contextmanager
def connecting_by_gloo(*, only: bool = False) -> Iterator[None]:
    """Make gloo's error about connections name the address that this rank took and the variable to set.

    Args:
        only: Nothing but connections can fail inside.

    Raises:
        RuntimeError: In place of gloo's own, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        if not only and not any(part in str(error) for part in _OF_CONNECTING):
            raise
        raise RuntimeError(f"{_advice()} (gloo: {error})") from error


def _advice() -> str:
    there = ", ".join(f"{name} ({address})" for name, address in interfaces().items()) or "none"
    if names := os.environ.get(VARIABLE):
        took = [name for name in names.split(",") if name in interfaces()]
        if not took:
            return f"{VARIABLE} is {names!r}, and this host has no such interface with an address; it has: {there}"
        where = f"{interfaces()[took[0]]}, of the interface that {VARIABLE}={names} names"
    else:
        name = socket.gethostname()
        where = f"{name_address(name)}, that of this host's name {name!r}"
        if name_address(name) is None:
            where = f"127.0.0.1, because this host's name {name!r} leads to no address of its own"
    return (
        f"the ranks cannot connect by gloo: this one waits at {where}. If other hosts cannot reach that address, set "
        f"{VARIABLE} on every host to the interface that they reach it by; here there are: {there}. Otherwise look "
        "for the error of another rank"
    )


def interfaces() -> dict[str, str]:
    """IPv4 address of each network interface of this host that has one, by name."""
    found = dict[str, str]()
    # The call wants a socket of the family, any one; nothing is sent by it.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            # A name has 16 bytes with the zero at its end (IFNAMSIZ); behind it come 4 bytes of family and port, then
            # the address.
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has none
                found[name] = socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24])
    return found


def name_address(name: str) -> str | None:
    """The first address of a host's name that this host can wait at; None without one."""
    with suppress(OSError):  # the name does not resolve
        for family, kind, protocol, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as waiting:
                # Only an address of this very host can be bound.
                waiting.bind(address)
                return str(address[0])
    return None
