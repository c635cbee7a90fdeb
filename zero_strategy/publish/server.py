"""Serving a folder of versions over TCP, to readers that do not see it: HTTP/1.1, read only, with a token.

    served = published.serve("0.0.0.0", 7700)              # on the first rank; loopback unless told otherwise
    weights = zero_strategy.subscribe(served.url, token=served.token)

    GET /                       {"anchor-00000012": {"model.safetensors": bytes, ...}, ...} of finished versions
    GET /anchor-00000012/...    a file; with "Range: bytes=N-" its end

What every rank has coded is sent as it is: nothing is gathered. Requests without the token get 401 and nothing else.
Links are not followed: what lies outside of the folder is not served, whoever makes a link to it.

Anybody who reaches the port can connect, so nobody costs the training more than this: connections that have not shown
the token are few, and a new one ends the oldest of them; each has some seconds for a head of 8 KiB at most. Those with
the token are bounded, too.

The traffic is not encrypted; across networks that others read, tunnel it (ssh -L, a TLS proxy).
"""

from __future__ import annotations

import hmac
import http.server
import json
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import weakref
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from zero_strategy.publish.folder import VersionFolder, is_file_path, last_file, parse_name
from zero_strategy.runtime.http_requests import BoundedHandler
from zero_strategy.runtime.regular_files import open_below

_SILENT_SECONDS = 60
"""After which a connection is closed on which nothing is asked, or of which nothing is taken."""
_HEAD_SECONDS = 5.0
MOST_WAITING = 16
"""Connections that have not shown the token."""
MOST_READERS = 512
"""Connections that have."""
_MOST_DEPTH = 8
"""Folders in each other below a version's."""


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
            # Nothing is answered before the thread begins: connections wait in the listening socket.
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise OSError(error.errno, f"publishing on {host}:{port}: {error.strerror or error}") from None
        self._server.folder, self._server.token = VersionFolder(directory), self.token
        self.url = f"http://{host}:{self._server.server_address[1]}"
        # A daemon: a training that is over does not wait for its readers.
        thread = threading.Thread(target=self._server.serve_forever, name="zero-serve", daemon=True)
        thread.start()
        # It refers to the server alone, so that this object can go, and the port with it.
        self._end = weakref.finalize(self, _stop, self._server, thread)

    def close(self) -> None:
        """Listen no more."""
        self._end()


def _stop(server: _Server, thread: threading.Thread) -> None:
    # A collection may find this object gone in the very thread that serves, which cannot wait for its own end.
    if threading.current_thread() is thread:
        threading.Thread(target=_stop, args=(server, thread), name="zero-serve-end", daemon=True).start()
        return
    # No more are accepted before those that are open are ended: none is missed.
    server.shutdown()
    server.server_close()
    for connection in server.connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    folder: VersionFolder
    token: str

    def __init__(self, *args: Any) -> None:
        # Before the base listens; the thread that accepts and those of connections use the sets.
        self._lock = threading.Lock()
        self._waiting: dict[Any, None] = {}  # the oldest first
        self._readers: set[Any] = set()
        super().__init__(*args)

    @property
    def connections(self) -> list[Any]:
        """All that are open."""
        with self._lock:
            return [*self._waiting, *self._readers]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._waiting[request] = None
            # The oldest: who has a token shows it at once.
            oldest = next(iter(self._waiting)) if len(self._waiting) > MOST_WAITING else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it
        super().process_request(request, client_address)

    def admit(self, request: Any) -> bool:
        """Note that a connection has shown the token; False if there are too many such ones."""
        with self._lock:
            # Also of one that is refused: it no longer counts among those without a token.
            self._waiting.pop(request, None)
            if request not in self._readers and len(self._readers) >= MOST_READERS:
                return False
            self._readers.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._waiting.pop(request, None)
            self._readers.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of who goes away before the answer; anything else is a defect, and printed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BoundedHandler):
    timeout = _SILENT_SECONDS
    head_seconds = _HEAD_SECONDS
    idle_seconds = float(_SILENT_SECONDS)
    server: _Server

    def do_GET(self) -> None:
        """Answer a request."""
        given = self.headers.get("Authorization", "")
        # In constant time: a wrong token tells nothing of the right one. Headers come decoded as Latin-1.
        if not hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {self.server.token}".encode()):
            self._refuse(HTTPStatus.UNAUTHORIZED)
            return
        # Behind the token: nobody without one takes a reader's place.
        if not self.server.admit(self.request):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        if self.path == "/":
            content = json.dumps(_finished(self.server.folder)).encode()
            self._begin(len(content))
            self.wfile.write(content)
            return
        version, _, file = self.path[1:].partition("/")
        if parse_name(version) and is_file_path(file):
            self._send(f"{version}/{file}")
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _send(self, path: str) -> None:
        try:
            file = open(open_below(self.server.folder.directory, path), "rb")  # noqa: SIM115
        except (OSError, ValueError):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with file:
            size = file.seek(0, 2)
            asked = re.fullmatch(r"bytes=(\d{1,18})-", self.headers.get("Range", ""), re.ASCII)
            # Past the end the whole is sent: what the reader has is no beginning of this file.
            start = int(asked[1]) if asked and int(asked[1]) < size else 0
            file.seek(start)
            self._begin(size - start, f"bytes {start}-{size - 1}/{size}" if start else "")
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _begin(self, nbytes: int, part: str = "") -> None:
        self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
        self.send_header("Content-Length", str(nbytes))
        if part:
            self.send_header("Content-Range", part)
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        # Who was refused begins anew, and is counted anew.
        self.close_connection = True


def _finished(folder: VersionFolder) -> dict[str, dict[str, int]]:
    """Files and their bytes of all finished versions, without links and what they lead to."""
    found: dict[str, dict[str, int]] = {}
    for _, _, path in folder.found():
        try:
            files = {} if path.is_symlink() else {name: size for name, size in _files(path) if is_file_path(name)}
        except OSError:
            continue  # pruned just now
        if last_file(path.name) in files:
            found[path.name] = files
    return found


def _files(directory: Path, prefix: str = "", depth: int = 0) -> list[tuple[str, int]]:
    """(path, bytes) of the regular files below a directory."""
    found: list[tuple[str, int]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                found.append((prefix + entry.name, entry.stat(follow_symlinks=False).st_size))
            elif entry.is_dir(follow_symlinks=False) and depth < _MOST_DEPTH:
                found += _files(directory / entry.name, f"{prefix}{entry.name}/", depth + 1)
    return found
