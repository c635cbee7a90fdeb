"""Folders of published weights that others have changed, servers that send anything, and clients that do."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from tests.attack.rows import Attempt, harmless, outcome, refused
from tests.publish.test_publish import Training
from zero_strategy import subscribe
from zero_strategy.publish import server as serving
from zero_strategy.publish.folder import RECORD, parse_record, record_of

_LOUD = (ValueError, OSError)
_RANK = "rank-0.safetensors"


class _Published:
    """A folder with an anchor and two changes, and the sum of its last values."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.training = folder, Training(1)
        self.publisher = self.training.engine.publish(folder)
        for _ in range(2):
            self.update()
        self.anchor, self.change = folder / "anchor-00000000", folder / "delta-00000002"

    def update(self) -> None:
        self.training.step()
        self.publisher.update()

    def close(self) -> None:
        self.training.engine.close()

    def expected(self) -> str:
        return _sum_of(self.training.expected())


def _sum_of(tensors: Any) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _shown(place: Path | str, **options: Any) -> str:
    reader = subscribe(place, **options)
    reader.update()
    return _sum_of(reader.tensors)


def _reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record, whose sum is right again."""
    found = json.loads(path.read_text())
    found.pop("sha256")
    change(found)
    found["sha256"] = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(found))


def _replace(change: Path, content: bytes) -> None:
    """Other bytes for a rank's file, with their right SHA-256."""
    (change / _RANK).write_bytes(content)
    _reseal(change / RECORD, lambda record: record.update(files={_RANK: hashlib.sha256(content).hexdigest()}))


def _file(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def _holes(path: Path) -> None:
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 42)


_HEADERS: dict[str, bytes] = {
    "no bytes": b"",
    "a header longer than the file": (1 << 62).to_bytes(8, "little"),
    "a header of no JSON": _file(b"xx"),
    "a header of 100,000 levels": _file(b"[" * 100_000),
    "a header that is a list": _file([1]),
    "an entry that is a number": _file({"net.0.weight@0": 5}),
    "a key without a place": _file({"net.0.weight": {"data_offsets": [0, 0]}}),
    "a place before the tensor": _file({"net.0.weight@-3": {"data_offsets": [0, 56]}}, bytes(56)),
    "a place beyond the tensor": _file({"net.0.weight@999999999": {"data_offsets": [0, 56]}}, bytes(56)),
    "offsets that are text": _file({"net.0.weight@0": {"data_offsets": ["a", "b"]}}),
    "offsets beyond the file": _file({"net.0.weight@0": {"data_offsets": [0, 1 << 50]}}),
    "a name with an escape sequence": _file({"\x1b[31m@0": {"data_offsets": [0, 56]}}, bytes(56)),
    "2^62 elements": _file(
        {"net.0.weight@0": {"data_offsets": [0, 56]}}, bytes([1, 4]) + bytes(6) + (1 << 62).to_bytes(8, "little") * 6
    ),
}

_RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another number": lambda r: r.update(number=77),
    "a number of 300 bits": lambda r: r.update(number=1 << 300),
    "a file elsewhere": lambda r: r.update(files={"rank-0.safetensors/../../x": "0"}),
    "a file's name with a line break": lambda r: r.update(files={f"{_RANK}\n": "0"}),
    "files that are a list": lambda r: r.update(files=[_RANK]),
    "a digest that is a list": lambda r: r.update(digests=[[]]),
    "a digest that is null": lambda r: r.update(files={_RANK: None}),
    "a session that is a number": lambda r: r.update(session=1),
}

_SLICES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a slice before its tensor": lambda r: [each.__setitem__(1, -5) for each in r["slices"][0]],
    "slices of one": lambda r: r.update(slices=[[["a"]]]),
    "a slice of nothing": lambda r: r.update(slices=[[["none", 0, 5]]]),
    "slices that are numbers": lambda r: r.update(slices=[5]),
    "no slices and digests": lambda r: r.update(slices=[], digests=[]),
}


def forged(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Readers of a folder end with the values that the trainer has, or with an error that names the file."""
    made = _Published(folder / "whole")
    made.close()
    expected, number = made.expected(), 0

    def copy() -> tuple[Path, Path]:
        nonlocal number
        number += 1
        place = folder / f"v{number}"
        shutil.copytree(made.folder, place)
        return place / made.anchor.name, place / made.change.name

    for name, content in _HEADERS.items():
        _, change = copy()
        _replace(change, content)
        yield refused(f"a change with {name}", outcome(lambda: _shown(change.parent)), names=change.name)  # noqa: B023
    for name, edit in _RECORDS.items():
        _, change = copy()
        _reseal(change / RECORD, edit)
        yield refused(f"a record with {name}", outcome(lambda: _shown(change.parent)), names=change.name)  # noqa: B023
    for name, edit in _SLICES.items():
        anchor, _ = copy()
        _reseal(anchor / RECORD, edit)
        yield refused(f"an anchor with {name}", outcome(lambda: _shown(anchor.parent)), names=anchor.name)  # noqa: B023
    files = {"a rank's file": _RANK, "a change's record": RECORD, "an anchor's record": RECORD}
    damages = {"a pipe": _pipe, "a folder": _folder, "a file of holes": _holes}
    damages |= {"a link to zeros": lambda p: _link(p, "/dev/zero"), "a circle": lambda p: _link(p, p.name)}
    for what, file in files.items():
        for name, damage in damages.items():
            anchor, change = copy()
            place = (anchor if what.startswith("an anchor") else change) / file
            damage(place)
            found = outcome(lambda: _shown(place.parents[1]))  # noqa: B023
            last = file == RECORD and what.startswith("a change")  # without it that version does not count
            yield (
                Attempt(f"{name} for {what}", "")
                if last and found.error is None
                else harmless(f"{name} for {what}", found, expected, errors=_LOUD)
            )
    anchor, change = copy()
    shutil.copytree(anchor / "..", folder / "odd", symlinks=True)
    (anchor / "x/files").mkdir(parents=True)
    os.mkfifo(anchor / f"x/files/{RECORD}")
    yield refused("a pipe in the place of pieces", outcome(lambda: _shown(anchor.parent)), names=RECORD)
    for _ in range(10 * rounds):
        anchor, change = copy()
        files_there = [path for path in anchor.parent.rglob("*") if path.is_file() and path.name != ".publisher"]
        victim = draw.choice(files_there)
        data = bytearray(victim.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        victim.write_bytes(data)
        name = f"a flipped bit of {victim.relative_to(anchor.parent)}"
        yield harmless(name, outcome(lambda: _shown(anchor.parent)), expected, errors=_LOUD)  # noqa: B023


def lost(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """A change that is gone is named; numbers that have no room are not lost; two trainings do not mix."""
    made = _Published(folder / "v")
    reader = subscribe(made.folder)
    reader.update()
    made.update()
    shutil.move(made.folder / "delta-00000003", folder / "kept")
    found = outcome(lambda: reader.update())
    yield Attempt("the last change is gone", "" if found.value is False else f"gave {found}")
    made.update()
    yield refused("a change between is gone", outcome(lambda: reader.update()), names="delta-00000003")
    shutil.move(folder / "kept", made.folder / "delta-00000003")
    found = outcome(lambda: (reader.update(), _sum_of(reader.tensors)))
    yield harmless("it is there again", found, (True, made.expected()), errors=())
    other = Training(1)
    yield refused("another training", outcome(lambda: other.engine.publish(made.folder)), names="another training")
    made.publisher.close()
    yield refused("an update after the end", outcome(made.publisher.update), errors=(RuntimeError,))
    (made.folder / "anchor-99999999").mkdir()
    again = other.engine.publish(made.folder)
    late = subscribe(made.folder)
    found = outcome(lambda: (late.update(), late.version))
    yield harmless("after number 99999999", found, (True, again.version), errors=())
    (made.folder / "anchor-100000009").mkdir()
    yield refused("a version of another session", outcome(again.update), names="another one publishes")
    other.engine.close()
    made.close()


def targets(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Places that are none are refused, and nothing is made."""
    training = Training(1)
    here = Path.cwd()
    os.chdir(folder)
    try:
        for to in ("", " ", "s3://", "memory://", "file:", "http://x", "a\udc80b"):
            found = outcome(lambda: training.engine.publish(to))  # noqa: B023
            yield refused(f"publish({to!r})", found, errors=(ValueError, ImportError))
        for url, token in (
            ("", None), ("s3://", None), ("http://127.0.0.1", "x" * 20), ("http://127.0.0.1:99999", "x" * 20),
            ("http://127.0.0.1:80/a", "x" * 20), ("http://[::1", "x" * 20), ("http://127.0.0.1:1", "a\r\nb: c"),
            ("http://127.0.0.1:1", ""),
        ):  # fmt: skip
            yield refused(f"subscribe({url!r})", outcome(lambda: subscribe(url, token=token)))  # noqa: B023
        made = sorted(path.name for path in folder.iterdir())
        yield Attempt("nothing is made", f"{made}" if made else "")
    finally:
        os.chdir(here)
        training.engine.close()


class _Hostile(http.server.BaseHTTPRequestHandler):
    """Answers as its server's `mode` says."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        try:
            _ANSWERS[self.server.mode](self, self.path == "/")
        except OSError:
            self.close_connection = True

    def send(self, content: bytes, nbytes: int | None = None, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if nbytes is None else nbytes))
        self.end_headers()
        self.wfile.write(content)

    def drip(self, content: bytes) -> None:
        for byte in content * 60:
            if self.server.ended.wait(0.25):
                break
            self.wfile.write(bytes([byte]))
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written."""


class _HostileServer(http.server.ThreadingHTTPServer):
    """Says nothing of readers that leave in the middle of an answer."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is printed."""


def _listing(files: object) -> bytes:
    return json.dumps({"anchor-00000000": files}).encode()


def _endless(answer: _Hostile, part: bytes, most: int) -> None:
    for _ in range(most):
        answer.wfile.write(part)
    answer.close_connection = True


def _chunks(answer: _Hostile, root: bool) -> None:
    answer.send_response(200)
    answer.send_header("Transfer-Encoding", "chunked")
    answer.end_headers()
    _endless(answer, b"100000\r\n" + b"[" * (1 << 20) + b"\r\n", 200)


def _end_after(answer: _Hostile, content: bytes, nbytes: int) -> None:
    answer.send(content, nbytes)
    answer.close_connection = True


def _by_bytes(answer: _Hostile) -> None:
    answer.send(b"", 60)
    answer.drip(b"[")


def _files_of(files: object, then: Callable[[_Hostile], None]) -> Callable[[_Hostile, bool], None]:
    return lambda answer, root: answer.send(_listing(files)) if root else then(answer)


def _header_drip(answer: _Hostile, root: bool) -> None:
    answer.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    answer.drip(b"y")


_ANSWERS: dict[str, Callable[[_Hostile, bool], None]] = {
    "a list": lambda answer, root: answer.send(b"[1,2]"),
    "null": lambda answer, root: answer.send(b"null"),
    "numbers": lambda answer, root: answer.send(b'{"anchor-00000000":5}'),
    "sizes that are text": lambda answer, root: answer.send(_listing({"manifest.json": "1"})),
    "no JSON": lambda answer, root: answer.send(b"<html>"),
    "nothing": lambda answer, root: answer.send(b""),
    "200,000 levels": lambda answer, root: answer.send(b"[" * 200_000),
    "a redirection": lambda answer, root: answer.send(b"", status=302),
    "an error": lambda answer, root: answer.send(b"x", status=500),
    "an error without end": lambda answer, root: answer.send(b"x", 1 << 50, status=500),
    "a listing without end": _chunks,
    "a path upwards": _files_of({"../../../up": 1, "manifest.json": 1}, lambda answer: answer.send(b"x")),
    "a file with a file below": _files_of({"a": 1, "a/b": 1, "manifest.json": 1}, lambda answer: answer.send(b"x")),
    "a name of 300": _files_of({"a" * 300: 1, "manifest.json": 1}, lambda answer: answer.send(b"x")),
    "a name with an escape sequence": _files_of({"\x1b[31m": 1, "manifest.json": 1}, lambda answer: answer.send(b"x")),
    "a file of 2^50": _files_of({"manifest.json": 1 << 50}, lambda answer: answer.send(b"x", 1 << 50)),
    "a file longer than said": _files_of({"manifest.json": 1}, lambda answer: answer.send(b"x" * 9, 1 << 50)),
    "a file shorter than said": _files_of({"manifest.json": 9}, lambda answer: _end_after(answer, b"x", 9)),
    "a manifest of noise": _files_of({"manifest.json": 1, RECORD: 1}, lambda answer: answer.send(b"x")),
}
_SLOW: dict[str, Callable[[_Hostile, bool], None]] = {
    "a listing by bytes": lambda answer, root: _by_bytes(answer),
    "a file by bytes": _files_of({"manifest.json": 60}, lambda answer: _by_bytes(answer)),
    "a head by bytes": _header_drip,
}
_ANSWERS |= _SLOW


def hostile_servers(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """A reader ends in a documented error, in time, with bounded memory, and writes nothing outside of its copies."""
    server: Any = _HostileServer(("127.0.0.1", 0), _Hostile)
    server.daemon_threads, server.ended = True, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, token = f"http://127.0.0.1:{server.server_port}", "x" * 20
    (folder / "copies").mkdir()
    try:
        for name in _ANSWERS:
            server.mode = name
            reader = subscribe(url, token=token, mirror=folder / "copies")
            if name in _SLOW:
                began = time.monotonic()
                found = outcome(lambda: reader.wait(timeout=1.0))  # noqa: B023
                took = time.monotonic() - began
                late = f"wait(timeout=1) took {took:.1f} s" if took > 6 else ""
                yield Attempt(f"{name} (wait)", late or ("" if found.value is False else f"gave {found}"))
            else:
                errors = (ConnectionError, FileNotFoundError, ValueError, OSError)
                yield refused(name, outcome(reader.update), errors=errors)
        outside = [path.name for path in folder.rglob("up*")]
        yield Attempt("nothing outside", f"{outside}" if outside else "")
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


def hostile_clients(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """A server gives nothing without the token or outside of its folder, and little to connections that say little."""
    made = _Published(folder / "v")
    served = made.publisher.serve()
    assert served is not None
    host, port = served.url.removeprefix("http://").split(":")
    (folder / "secret").write_text("secret")
    for where in (made.anchor / "leak", made.folder / "leak", made.anchor / "up"):
        where.symlink_to(folder if where.name == "up" else folder / "secret")
    (made.folder / "anchor-00000009").symlink_to(folder)

    def ask(head: bytes, *, more: bool = False) -> bytes:
        with closing(socket.create_connection((host, int(port)), timeout=10)) as connection:
            connection.sendall(head)
            if not more:
                connection.shutdown(socket.SHUT_WR)
            found = b""
            while part := connection.recv(1 << 16):
                found += part
            return found

    def get(path: str, token: str) -> bytes:
        lines = f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        return ask(lines.encode("latin-1", "replace"))

    anchor = made.anchor.name
    for path in (
        f"/{anchor}/leak", "/leak", f"/{anchor}/up/secret", "/anchor-00000009/secret", "/../secret", "/.publisher",
        f"/{anchor}/../../secret", f"/{anchor}/%2e%2e/secret", f"/{anchor}//etc/passwd", f"//{anchor}/leak",
        f"/{anchor}/manifest.json/..", f"/{anchor}/" + "a" * 5000, f"/{anchor}/\0", f"/{anchor}",
    ):  # fmt: skip
        found = outcome(lambda: get(path, served.token))  # noqa: B023
        answer = found.value or b""
        wrong = f"was sent: {answer[:200]!r}" if b"secret" in answer.partition(b"\r\n\r\n")[2] else ""
        yield Attempt(
            f"GET {path[:60]}", wrong or ("" if b" 404 " in answer[:20] or not answer else f"{answer[:60]!r}")
        )
    listing = outcome(lambda: get("/", served.token)).value or b""
    yield Attempt("the listing has no links", "" if b"leak" not in listing and b"00000009" not in listing else "it has")
    for token in ("", served.token[:-1], served.token + "x", served.token.swapcase(), "\xff" * 20):
        answer = outcome(lambda: get("/", token)).value or b""  # noqa: B023
        wrong = "" if b" 401 " in answer[:20] and answer.endswith(b"\r\n\r\n") else f"{answer[:80]!r}"
        yield Attempt(f"a token of {len(token)} characters", wrong)
    for name, head in {
        "noise": bytes(100), "a line of 100,000": b"GET /" + b"a" * 100_000,
        "a head without end": b"GET / HTTP/1.1\r\nX: ",
        "POST": b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", "version 9.9": b"GET / HTTP/9.9\r\n\r\n",
    }.items():  # fmt: skip
        found = outcome(lambda: ask(head, more=name == "a head without end"))  # noqa: B023
        answer = found.value if isinstance(found.value, bytes) else b""
        fine = not isinstance(found.error, Exception) or isinstance(found.error, OSError)
        yield Attempt(name, "" if fine and b"anchor" not in answer else f"{found}")
    yield from _many(made, served, host, int(port))
    served.close()
    made.close()


def _many(made: _Published, served: Any, host: str, port: int) -> Iterator[Attempt]:
    """Connections that say nothing cost the training a few threads and descriptors, and a reader gets through."""
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(closing(socket.create_connection((host, port), timeout=10))).send(b"G")
        end = time.monotonic() + 10
        own = 100  # ends of the connections that are this process's
        while True:
            more = threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - descriptors - own
            fine = max(more) <= serving.MOST_WAITING + 4
            if fine or time.monotonic() > end:
                break
            time.sleep(0.05)
        yield Attempt("100 connections that say nothing", "" if fine else f"{more} more threads and descriptors")
        expected = made.expected()
        found = outcome(lambda: _shown(served.url, token=served.token))
        yield harmless("a reader beside them", found, expected, errors=())


def records(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """A record with characters changed is read as it was, or refused."""
    made = _Published(folder / "v")
    made.close()
    whole = (made.change / RECORD).read_bytes()
    expected = record_of(parse_record(whole, "whole"))
    for number in range(100 * rounds):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(content))
            content[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        found = outcome(lambda: record_of(parse_record(bytes(content), "changed")))  # noqa: B023
        yield harmless(f"record {number}", found, expected)
