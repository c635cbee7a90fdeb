"""Readers that do not see the folder: over TCP with a token; damage on the way, servers that go and come back."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.object_store import ObjectStore, register
from tests.launcher import Launcher
from tests.publish.test_publish import Training, assert_shown, flip
from zero_strategy import subscribe
from zero_strategy.publish.mirror import ServedVersions, _Connection
from zero_strategy.publish.server import VersionServer


def followed(folder: str) -> None:
    training = Training(3)
    published = training.engine.publish(folder, anchor_every=3)
    served = published.serve(token="a-token-of-ours-1234")
    rank = training.engine.mesh.rank
    assert (served is None) == (rank > 0)
    urls = training.engine.mesh.control.all_gather_objects(served.url if served else "")
    early = subscribe(urls[0], token="a-token-of-ours-1234")
    for number in range(8):
        assert early.update() and not early.update() and early.version == number
        assert_shown(early.tensors, training.expected())
        training.step()
        published.update()
    late = subscribe(urls[0], token="a-token-of-ours-1234")
    assert late.wait(timeout=5) and late.version == 8
    assert_shown(late.tensors, training.expected())
    training.engine.mesh.control.all_gather_objects(None)  # the server goes with its engine


def test_readers_over_tcp(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(followed, str(tmp_path))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Training, Any, VersionServer, Path]]:
    training = Training(2)
    published = training.engine.publish(tmp_path / "v", anchor_every=3)
    server = published.serve()
    assert server is not None
    yield training, published, server, tmp_path / "v"
    server.close()
    training.engine.close()


Served = tuple[Training, Any, VersionServer, Path]


def test_nothing_is_told_without_the_token(served: Served) -> None:
    _, _, server, folder = served
    with pytest.raises(PermissionError, match="refuses the token"):
        subscribe(server.url, token="some-other-token-of-16").update()
    with pytest.raises(ValueError, match="needs the token"):
        subscribe(server.url)
    host, port = server.url.removeprefix("http://").split(":")
    assert host == "127.0.0.1"
    secret = folder.parent / "secret"
    secret.write_text("x")
    (folder / "anchor-00000000" / "link").symlink_to(secret)
    for path, headers, status in (
        ("/", {}, 401),
        ("/anchor-00000000/manifest.json", {"Authorization": "Bearer "}, 401),
        ("/anchor-00000000/manifest.json", {"Authorization": f"Bearer {server.token}"}, 200),
        ("/anchor-00000000/../../secret", {"Authorization": f"Bearer {server.token}"}, 404),
        ("/anchor-00000000/%2e%2e/secret", {"Authorization": f"Bearer {server.token}"}, 404),
        ("/../secret", {"Authorization": f"Bearer {server.token}"}, 404),
        ("/anchor-00000000/none", {"Authorization": f"Bearer {server.token}"}, 404),
    ):
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert answer.status == status and (status == 200 or not answer.read()), path
        connection.close()
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("POST", "/", headers={"Authorization": f"Bearer {server.token}"})
    assert connection.getresponse().status == 501
    connection.close()


def test_tokens_and_addresses_that_cannot_be(served: Served) -> None:
    _, published, server, _ = served
    for token in ("short", "with a blank in it", "with-\u00fcmlaut-in-it"):
        with pytest.raises(ValueError, match="at least 16 characters"):
            published.serve(token=token)
    with pytest.raises(OSError, match=r"publishing on 127\.0\.0\.1"):
        published.serve(port=int(server.url.rpartition(":")[2]))
    for url in ("http://localhost", "http://localhost:1/x"):
        with pytest.raises(ValueError, match="expected http://host:port"):
            subscribe(url, token="x" * 20)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:"):
        subscribe(f"http://127.0.0.1:{port}", token="x" * 20).update()


def test_damage_is_fetched_again_or_named(served: Served) -> None:
    training, published, server, folder = served
    reader = subscribe(server.url, token=server.token)
    reader.update()
    training.step()
    published.update()
    path = folder / "delta-00000001"
    flip(path / "rank-0.safetensors")
    with pytest.raises(ValueError, match="delta-00000001"):
        reader.update()
    assert reader.version == 0
    flip(path / "rank-0.safetensors")
    assert reader.update() and reader.version == 1
    assert_shown(reader.tensors, training.expected())
    for _ in range(3):
        training.step()
        published.update()
    flip(folder / "anchor-00000003" / "model.safetensors")
    late = subscribe(server.url, token=server.token)
    assert late.update() and late.version == 4  # from the anchor before
    assert_shown(late.tensors, training.expected())


def test_a_server_that_comes_back(served: Served, tmp_path: Path) -> None:
    training, published, server, folder = served
    reader = subscribe(server.url, token=server.token, mirror=tmp_path)
    reader.update()
    port = int(server.url.rpartition(":")[2])
    server.close()
    training.step()
    published.update()
    with pytest.raises(ConnectionError, match=server.url):
        reader.update()
    assert reader.version == 0
    again = VersionServer(folder, port=port, token=server.token)
    assert reader.update() and reader.version == 1
    assert_shown(reader.tensors, training.expected())
    mirrors = list(tmp_path.glob("zero-weights-*"))
    assert len(mirrors) == 1 and not [each for each in mirrors[0].iterdir() if each.is_dir()]  # applied ones are gone
    again.close()
    del reader
    assert not mirrors[0].exists()


def test_all_files_come_over_one_connection(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, server, _ = served
    made, connect = [], _Connection.connect

    def counted(connection: _Connection) -> None:
        made.append(connection)
        connect(connection)

    monkeypatch.setattr(_Connection, "connect", counted)
    source = ServedVersions(server.url, server.token)
    files = [(version, *item) for version in source.names() for item in source.files(version).items()]
    for number, (version, name, nbytes) in enumerate(files):
        source.fetch(version, name, tmp_path / str(number), nbytes)
    assert len(files) > 2 and len(made) == 1


def test_a_server_that_goes_in_its_own_thread_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = VersionServer(tmp_path)
    ended, inner = threading.Event(), server._server

    def actions() -> None:  # in the serving thread, as a collection there would do it
        server.close()
        ended.set()

    monkeypatch.setattr(inner, "service_actions", actions)
    assert ended.wait(10)
    deadline = time.monotonic() + 10
    while inner.socket.fileno() >= 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert inner.socket.fileno() < 0


def in_a_store(root: str) -> None:
    register(Path(root))
    url = "bucket://models/run"
    training = Training(3)
    published = training.engine.publish(url, anchor_every=3, keep=1)
    reader = subscribe(url)
    for number in range(5):
        assert reader.update() and reader.version == number
        assert_shown(reader.tensors, training.expected())
        ObjectStore.requests.clear()
        assert not reader.update() and len(ObjectStore.requests) == 1  # a look is one request
        training.step()
        published.update()
    late = subscribe(url)
    assert late.update() and late.version == 5
    assert_shown(late.tensors, training.expected())
    assert sorted(each.name for each in (Path(root) / "models" / "run").iterdir()) == [
        "anchor-00000003", "delta-00000003", "delta-00000004", "delta-00000005",
    ]  # fmt: skip
    if training.engine.mesh.rank == 0:
        with pytest.raises(ValueError, match="subscribe to its URL"):
            published.serve()


def test_an_object_store(ranks: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBJECT_STORE_ROOT", str(tmp_path))
    for world in (1, 2):
        (tmp_path / str(world)).mkdir()
        ranks(world)(in_a_store, str(tmp_path / str(world)))
