"""Trainings in narrow surroundings, and on a disk that fails: the same weights, or an error that names the file."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.attack.rows import Attempt

_ROOT = Path(__file__).parents[2]
_SECONDS = 240


def _run(folder: Path, before: Callable[[], object] | None = None, **variables: str) -> tuple[str, str]:
    """("digest" or "error", text) of a small training; "died" if it said nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    environment: Mapping[str, str] = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)} | variables
    command = [sys.executable, "-m", "tests.attack.small_run", str(folder)]
    try:
        done = subprocess.run(
            command, env=environment, preexec_fn=before, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "hung", f"after {_SECONDS} s"
    last = (done.stdout.strip().splitlines() or [""])[-1]
    kind, _, text = last.partition(" ")
    return (kind, text) if kind in ("digest", "error") else ("died", f"{done.returncode}: {done.stderr[-300:]}")


def _limit(what: int, most: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(what, (most, most))


def narrow(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Few descriptors, a strict umask, no place to write but the run's own: the digest is that of a plain run."""
    _, expected = _run(folder / "plain")
    gone, locked = folder / "gone", folder / "locked"
    locked.mkdir()
    locked.chmod(0o555)

    tries: dict[str, tuple[Callable[[], object] | None, dict[str, str]]] = {
        "64 descriptors": (_limit(resource.RLIMIT_NOFILE, 64), {}),
        "umask 077": (lambda: os.umask(0o077), {}),
        "a read-only working directory": (lambda: os.chdir(locked), {}),
        "a deleted working directory": (None, {"WORKING_DIRECTORY_THAT_GOES": str(gone)}),
        "no TMPDIR": (None, {"TMPDIR": str(folder / "none")}),
        "no HOME": (None, {"HOME": str(folder / "none")}),
        "no locked memory": (_limit(resource.RLIMIT_MEMLOCK, 0), {}),
        "locale C": (None, {"LC_ALL": "C", "PYTHONUTF8": "0"}),
        "optimised": (None, {"PYTHONOPTIMIZE": "2"}),
    }
    for number, (name, (before, variables)) in enumerate(tries.items()):
        kind, text = _run(folder / f"run {number}", before, **variables)
        yield Attempt(name, "" if (kind, text) == ("digest", expected) else f"{kind} {text}")

    def short() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    place = folder / "short"
    yield _named("files of 20,000 bytes at most", *_run(place, short), place)


def _named(name: str, kind: str, text: str, place: Path, expected: str = "") -> Attempt:
    """Holds if it gave the right weights, or an error that names a file of the run."""
    if kind == "digest":
        return Attempt(name, "" if text == expected else "was not noticed")
    return Attempt(name, "" if kind == "error" and str(place) in text else f"{kind} {text}")


def failing_disk(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """One call of a kind fails, or writes half of its bytes.

    What is left behind: the checkpoint that could not be written does not count, and no half of it is read.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return
    library = folder / "io_faults.so"
    source = Path(__file__).with_name("io_faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    _, expected = _run(folder / "plain")
    cases = [
        (call, code)
        for call in ("write", "pwrite", "fsync", "ftruncate")
        for code in (errno.EIO, errno.ENOSPC, 0)
        if code or call in ("write", "pwrite")
    ]
    for number in range(rounds):
        for call, code in cases if rounds > 1 else draw.sample(cases, 3):
            place, at = folder / f"{call}-{code}-{number}", draw.randrange(1, 6)
            faults = {"FAULT_PATH": str(place), "FAULT_CALL": call, "FAULT_AT": str(at), "FAULT_ERRNO": str(code)}
            kind, text = _run(place, None, LD_PRELOAD=str(library), **faults)
            name = f"{errno.errorcode.get(code, 'half')} of {call} {at}"
            yield _named(name, kind, text, place, expected)
