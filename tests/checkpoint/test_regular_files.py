"""A pipe that nobody writes to, a directory or a device in a file's place is refused by name, at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.checkpoint.kinds import KINDS, content, files_of, make, named
from zero_strategy.cli import main
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.config import load_config
from zero_strategy.runtime.regular_files import is_there, open_regular, read_regular, read_text, size_of


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Waiting for a pipe would take for ever: the signal ends the wait."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("waits for a file that is none")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(what: str, place: Path) -> None:
    if what == "a named pipe":
        os.mkfifo(place)
    elif what == "a directory":
        place.mkdir()
    elif what == "a character device":
        place.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as end:
            folder = os.open(place.parent, os.O_RDONLY)  # a socket's path has at most 108 bytes
            end.bind(f"/proc/self/fd/{folder}/{place.name}")
            os.close(folder)


ODD = ["a named pipe", "a directory", "a character device", "a socket"]


@pytest.mark.parametrize("what", ODD)
def test_each_function_refuses_it(tmp_path: Path, what: str) -> None:
    place = tmp_path / "x"
    put(what, place)
    for function in (size_of, is_there):
        with pytest.raises(ValueError, match=f"x: is {what}, not a regular file"):
            function(place)
    for function in (open_regular, read_regular, read_text):
        # A socket cannot even be opened.
        with pytest.raises((ValueError, OSError), match=r"is .*, not a regular file|No such device or address.*/x"):
            function(place)
    assert size_of(tmp_path / "nothing") is None and not is_there(place / "y")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\xff")
    assert read_regular(tmp_path / "x") == b"a\xff" and size_of(tmp_path / "x") == 2
    with pytest.raises(ValueError, match="x: is no text in UTF-8"):
        read_text(tmp_path / "x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["a named pipe", "a directory"])
@pytest.mark.filterwarnings("ignore:.*cannot be loaded.*taking")
def test_in_a_checkpoint(tmp_path: Path, kind: str, what: str) -> None:
    place = make(kind, tmp_path)
    want = content(named(kind, place))
    for file in files_of(place):
        aside = tmp_path / "aside"
        os.rename(file, aside)
        put(what, file)
        try:
            found = content(named(kind, place))
        except ValueError as error:
            assert str(file) in str(error) or (what == "a directory" and str(place) in str(error)), (file, error)
        else:
            assert found == want, f"{file} is {what}, and was left out without a word"
        for command in ("inspect", "verify") if what == "a named pipe" else ():
            assert main(["checkpoint", command, str(named(kind, place)), "--quiet", "--json"]) in (0, 1, 2)
        target = tmp_path / "new"
        assert main(["checkpoint", "convert", str(named(kind, place)), str(target), "--quiet", "--json"]) in (0, 2)
        shutil.rmtree(target, ignore_errors=True)
        file.rmdir() if what == "a directory" else file.unlink()
        os.rename(aside, file)
    assert content(named(kind, place)) == want


@pytest.mark.parametrize("kind", ["native", "pieces"])
def test_verifying_names_it(tmp_path: Path, kind: str) -> None:
    place = make(kind, tmp_path)
    for file in files_of(place):
        if file.name != "manifest.json":
            aside = file.read_bytes()
            file.unlink()
            put("a named pipe", file)
            (problem,) = verify(place).problems
            assert problem == f"{file}: is a named pipe, not a regular file"
            file.unlink()
            file.write_bytes(aside)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"step-1\0", b"", b"../c", b"/etc", b"x" * 5000, b".", b"\n"])
@pytest.mark.parametrize("name", ["latest", "latest_universal"])
def test_what_names_the_last_one_is_no_name(tmp_path: Path, name: str, text: bytes) -> None:
    make("native", tmp_path)
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=str(tmp_path)):
        content(tmp_path)
    for command in ("inspect", "verify", "prune"):
        options = ["--keep-last", "1"] if command == "prune" else []
        assert main(["checkpoint", command, str(tmp_path), *options]) == (0 if command == "prune" else 2)


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_configs(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / name
    for what in ("a named pipe", "a directory"):
        put(what, place)
        for command in ("explain", "convert"):
            assert main(["config", command, str(place)]) == 2
            assert f"{name}: is {what}, not a regular file" in capsys.readouterr().err
        with pytest.raises(ValueError, match=f"{name}: is {what}, not a regular file"):
            load_config(place)
        place.rmdir() if what == "a directory" else place.unlink()
    place.write_bytes(b"\xff")
    assert main(["config", "explain", str(place)]) == 2
    assert f"{name}: is no text in UTF-8" in capsys.readouterr().err


def test_a_list_of_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make("torch", tmp_path)
    for what in ("a named pipe", "a directory"):
        put(what, tmp_path / "names")
        arguments = ["checkpoint", "convert", str(place), str(tmp_path / "out"), "--names", str(tmp_path / "names")]
        assert main(arguments) == 2
        assert f"names: is {what}, not a regular file" in capsys.readouterr().err
        os.rename(tmp_path / "names", tmp_path / f"old {what}")
    for text in ("{", "[1]", '{"a": 1}', "[" * 100000):
        (tmp_path / "names").write_text(text)
        assert main(arguments) == 2
        assert str(tmp_path / "names") in capsys.readouterr().err
    (tmp_path / "names").write_text(json.dumps(["a"]))
    assert main(arguments) == 2
