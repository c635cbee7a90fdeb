"""The straggler detector's control port: HTTP on this host's loopback, for who has the token.

    curl -X POST -H "Authorization: Bearer TOKEN" http://127.0.0.1:65535/

Any user of the host can connect, so nobody costs more than this: one connection at a time, for two seconds and with a
head of 8 KiB at most; a few more wait in the kernel. The token is looked at first. Bodies are not kept.
"""

from __future__ import annotations

import hmac
import io
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

LOOPBACK = "127.0.0.1"
LEAST_TOKEN = 8
"""Characters."""
_SECONDS = 2.0
"""That a connection may last, from its first byte to its last one."""
_END_OF_HEAD = b"\r\n\r\n"
_MOST_HEAD_BYTES = 8192
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


def _handler(control: ControlPort, wanted: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "zero_strategy"
        sys_version = ""

        def setup(self) -> None:
            """Read the head, and no further."""
            super().setup()
            self._end = time.monotonic() + _SECONDS
            head = b""
            while _END_OF_HEAD not in head and (more := self._receive(_MOST_HEAD_BYTES - len(head))):
                head += more
            whole, end, _ = head.partition(_END_OF_HEAD)
            self.rfile.close()
            self.rfile = io.BufferedReader(io.BytesIO(whole + end if end else b""))  # nothing is answered with nothing

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
            while more := self._receive(min(left, 4096)):
                left -= len(more)

        def _receive(self, most: int) -> bytes:
            """Bytes that have come; none at the end, or when the time is over."""
            left = self._end - time.monotonic()
            if most <= 0 or left <= 0:
                return b""
            self.connection.settimeout(left)
            try:
                return bytes(self.connection.recv(most))
            except OSError:
                return b""

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: requests are not the training's business."""

    return Handler
