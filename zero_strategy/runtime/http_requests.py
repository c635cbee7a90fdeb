"""HTTP requests of anybody: a handler that gives a request's head so many bytes and seconds, and no more.

The standard handler waits for each byte anew, so that a client that sends one in a while keeps a thread and a
descriptor of the training for ever.
"""

from __future__ import annotations

import io
import time
from http.server import BaseHTTPRequestHandler

_END_OF_HEAD = b"\r\n\r\n"


class BoundedHandler(BaseHTTPRequestHandler):
    """Reads the head of each request under a bound, and nothing behind it.

    Attributes:
        head_seconds: From the beginning of a connection, or the first byte of a later request, to the head's end.
        idle_seconds: That a connection may be silent between requests.
        most_head_bytes: Of a head.
        head_end: When the head that is read has to have ended, by `time.monotonic`.
    """

    protocol_version = "HTTP/1.1"
    server_version = "zero_strategy"
    sys_version = ""
    head_seconds = 2.0
    idle_seconds = 0.0
    most_head_bytes = 8192
    head_end = 0.0

    def setup(self) -> None:
        """Read by `handle_one_request` alone."""
        super().setup()
        self.rfile.close()
        self._requests = 0

    def handle_one_request(self) -> None:
        """Read a head, and answer if it is whole; else, the connection ends without a word."""
        head, more = self._read_head()
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self._requests += 1
        super().handle_one_request()
        if more:  # a body, or a request that did not wait for the answer to this one
            self.close_connection = True

    def _read_head(self) -> tuple[bytes, bool]:
        """A whole head or nothing, and whether there was more behind it."""
        self.head_end = time.monotonic() + (self.idle_seconds if self._requests else self.head_seconds)
        head = b""
        while _END_OF_HEAD not in head and (more := self.receive(self.most_head_bytes - len(head))):
            if self._requests and not head:
                self.head_end = time.monotonic() + self.head_seconds
            head += more
        whole, end, rest = head.partition(_END_OF_HEAD)
        if self.timeout is not None:
            self.connection.settimeout(self.timeout)  # for the answer
        return (whole + end if end else b""), bool(rest)

    def receive(self, most: int) -> bytes:
        """Bytes that have come; none at the end, or when the head's time is over."""
        left = self.head_end - time.monotonic()
        if most <= 0 or left <= 0:
            return b""
        self.connection.settimeout(left)
        try:
            return bytes(self.connection.recv(most))
        except OSError:
            return b""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests are not the training's business."""
