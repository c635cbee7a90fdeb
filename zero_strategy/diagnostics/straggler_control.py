"""The control port of a straggler detector: HTTP on this host's loopback, for who has the token.

    curl -X POST -H "Authorization: Bearer TOKEN" http://127.0.0.1:65535/
"""

from __future__ import annotations

import hmac
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK = "127.0.0.1"
LEAST_TOKEN = 8
"""Characters."""


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
        self._server = ThreadingHTTPServer((LOOPBACK, port), _handler(self, f"Bearer {token}"))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="straggler control")
        self._thread.start()

    def count(self) -> None:
        """One more request."""
        with self._lock:
            self._requests += 1

    def take(self) -> int:
        """How many requests there were since the last call."""
        with self._lock:
            requests, self._requests = self._requests, 0
        return requests

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(control: ControlPort, wanted: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "zero_strategy"
        sys_version = ""
        timeout = 10.0  # a connection that says nothing holds a thread for so long

        def do_POST(self) -> None:
            """Toggle."""
            self._toggle()

        def do_GET(self) -> None:
            """Toggle, as curl asks without any option."""
            self._toggle()

        def _toggle(self) -> None:
            self.rfile.read(min(int(self.headers.get("Content-Length") or 0), 65536))
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), wanted.encode()):
                self._answer(401, "give the token as 'Authorization: Bearer TOKEN'\n")
            elif self.path != "/":
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
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: requests are not the training's business."""

    return Handler
