"""Serving a folder of versions over TCP, to readers that do not see it: HTTP/1.1, read only, with a token.

    served = published.serve("0.0.0.0", 7700)              # on the first rank; loopback unless told otherwise
    weights = zero_strategy.subscribe(served.url, token=served.token)

    GET /                       {"anchor-00000012": {"model.safetensors": bytes, ...}, ...} of finished versions
    GET /anchor-00000012/...    a file

What every rank has coded is sent as it is: nothing is gathered. Requests without the token get 401 and nothing else.
The traffic is not encrypted; across networks that others read, tunnel it (ssh -L, a TLS proxy).
"""

from __future__ import annotations

import hmac
import http.server
import json
import secrets
import shutil
import socket
import threading
import weakref
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from zero_strategy.publish.folder import FILE, NAME, VersionFolder, last_file
from zero_strategy.runtime.regular_files import open_regular

_SILENT_SECONDS = 60
"""After which a connection on which nothing is asked is closed."""


class VersionServer:
    """Serves a folder from threads of this process until `close`, or until nothing refers to it.

    Args:
        directory: The folder.
        host: Address to listen on.
        port: Its port; 0: any free one.
        token: Text that requests must have; None: a random one.

    Attributes:
        url: For `subscribe`.
        token: Likewise.

    Raises:
        OSError: If the address cannot be listened on.
        ValueError: If the token has fewer than 16 characters, or some that are not printable ASCII.
    """

    def __init__(self, directory: Path, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.token = secrets.token_urlsafe(24) if token is None else token
        if len(self.token) < 16 or not all("!" <= each <= "~" for each in self.token):
            raise ValueError("the token must have at least 16 characters, printable ASCII without spaces")
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise OSError(error.errno, f"publishing on {host}:{port}: {error.strerror or error}") from None
        self._server.folder, self._server.token = VersionFolder(directory), self.token
        self.url = f"http://{host}:{self._server.server_address[1]}"
        thread = threading.Thread(target=self._server.serve_forever, name="zero-serve", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, self._server)

    def close(self) -> None:
        """Listen no more."""
        self._end()


def _stop(server: _Server) -> None:
    server.shutdown()
    server.server_close()
    for connection in list(server.connections):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    folder: VersionFolder
    token: str

    def __init__(self, *args: Any) -> None:
        self.connections: set[Any] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answer a request."""
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            self._refuse(HTTPStatus.UNAUTHORIZED)
            return
        if self.path == "/":
            content = json.dumps(_finished(self.server.folder)).encode()
            self._begin(len(content))
            self.wfile.write(content)
            return
        version, _, file = self.path[1:].partition("/")
        if NAME.fullmatch(version) and FILE.fullmatch(file):
            self._send(self.server.folder.directory / version / file)
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _send(self, path: Path) -> None:
        try:
            file = open(open_regular(path), "rb")  # noqa: SIM115
        except (OSError, ValueError):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with file:
            self._begin(file.seek(0, 2))
            file.seek(0)
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _begin(self, nbytes: int) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is written for a request."""


def _finished(folder: VersionFolder) -> dict[str, dict[str, int]]:
    """Files and their bytes of all finished versions."""
    found: dict[str, dict[str, int]] = {}
    for _, _, path in folder.found():
        try:
            paths = {each.relative_to(path).as_posix(): each for each in path.rglob("*") if each.is_file()}
            files = {name: each.stat().st_size for name, each in paths.items() if FILE.fullmatch(name)}
        except FileNotFoundError:
            continue  # pruned just now
        if last_file(path.name) in files:
            found[path.name] = files
    return found
