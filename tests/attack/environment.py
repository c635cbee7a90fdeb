"""Trainings in narrow surroundings, and on a disk that fails: the same weights, or an error that names the file."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.attack.forked import Forked, Job, not_allowed
from tests.attack.rows import Attempt, harmless, outcome
from zero_strategy import subscribe
from zero_strategy.cli.checkpoint_checks import verify

_ROOT = Path(__file__).parents[2]
_SECONDS = 600


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
    none, locked = str(folder / "none"), folder / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    begun: dict[str, tuple[Callable[[], object] | None, dict[str, str]]] = {  # as Python itself begins
        "64 descriptors": (_limit(resource.RLIMIT_NOFILE, 64), {}),
        "no TMPDIR": (None, {"TMPDIR": none}),
        "no HOME": (None, {"HOME": none}),
        "locale C": (None, {"LC_ALL": "C", "PYTHONUTF8": "0"}),
        "optimised": (None, {"PYTHONOPTIMIZE": "2"}),
    }
    for number, (name, (before, variables)) in enumerate(begun.items()):
        kind, text = _run(folder / f"run {number}", before, **variables)
        yield Attempt(name, "" if (kind, text) == ("digest", expected) else f"{kind} {text}")
    forks: dict[str, dict[str, Any]] = {
        "umask 077": {"umask": 0o077},
        "a read-only working directory": {"directory": str(locked)},
        "a deleted working directory": {"directory": str(folder / "gone")},
        "no locked memory": {"limits": [(resource.RLIMIT_MEMLOCK, 0)]},
    }
    with Forked() as forked:
        for number, (name, options) in enumerate(forks.items()):
            kind, text = forked.said(Job(str(folder / f"fork {number}"), **options))
            yield Attempt(name, "" if (kind, text) == ("digest", expected) else f"{kind} {text}")
        place = folder / "short"
        job = Job(str(place), limits=[(resource.RLIMIT_FSIZE, 20_000)])
        yield _named("files of 20,000 bytes at most", *forked.said(job), place)


def _named(name: str, kind: str, text: str, place: Path, expected: str = "") -> Attempt:
    """Holds if it gave the right weights, or an error that names a file of the run."""
    if kind == "digest":
        return Attempt(name, "" if text == expected else "was not noticed")
    return Attempt(name, "" if kind == "error" and str(place) in text else f"{kind} {text}")


_CALLS = ("write", "pwrite", "fsync", "ftruncate", "rename")


def failing_disk(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """One call of a kind fails, or writes half of its bytes, while a training saves twice and publishes.

    What is left behind: the checkpoint that could not be written does not count, and no half of it is read.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return
    library = folder / "io_faults.so"
    source = Path(__file__).with_name("io_faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    with Forked(LD_PRELOAD=str(library)) as forked:
        _, expected = forked.said(Job(str(folder / "plain")))
        cases = [(call, code) for call in _CALLS for code in (errno.EIO, errno.ENOSPC)]
        cases += [("write", 0), ("pwrite", 0), ("rename", errno.EXDEV), ("rename", errno.EACCES)]
        for number in range(rounds):
            for call, code in cases if rounds > 1 else draw.sample(cases, 3):
                place, at = folder / f"{call}-{code}-{number}", draw.randrange(1, 6)
                faults = {"FAULT_PATH": str(place), "FAULT_CALL": call, "FAULT_AT": str(at), "FAULT_ERRNO": str(code)}
                name = f"{errno.errorcode.get(code, 'half')} of {call} {at}"
                yield _named(name, *forked.said(Job(str(place), variables=faults)), place, expected)
                yield _left(name, place)
        # Each rename of a training in turn: those of versions, of both checkpoints, and of the file `latest`.
        for at in range(1, _RENAMES + 1) if rounds > 1 else draw.sample(range(1, _RENAMES + 1), 2):
            code = draw.choice((errno.EIO, errno.ENOSPC, errno.EXDEV))
            place = folder / f"rename {at}"
            faults = {"FAULT_PATH": str(place), "FAULT_CALL": "rename", "FAULT_AT": str(at), "FAULT_ERRNO": str(code)}
            name = f"{errno.errorcode[code]} of rename {at} of all"
            yield _named(name, *forked.said(Job(str(place), variables=faults)), place, expected)
            yield _left(name, place)


_RENAMES = 12
"""Of a training, or a few more."""


def _left(name: str, place: Path) -> Attempt:
    """Holds if the checkpoint there is whole, or none, and a reader of the published folder has a version, or none."""

    def look() -> str:
        problems: tuple[str, ...] = ()
        if (place / "saved").exists():
            problems = verify(place / "saved").problems
        reader = subscribe(place / "published")
        reader.update()
        return " ".join(problems)

    return harmless(f"{name}: what is left", outcome(look), "", errors=(FileNotFoundError,))


def full_disks(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """No room in /dev/shm, or for memory that ranks share: the same weights. None for files: an error names one."""
    if not_allowed():  # by this user: what remains is a limit on the size of files
        tries: dict[str, dict[str, Any]] = {}
    else:
        tries = {
            "/dev/shm is full": {"disks": [("/dev/shm", 1 << 16)], "full": ["/dev/shm"]},
            "no /dev/shm to write to": {"disks": [("/dev/shm", 1 << 12)], "full": ["/dev/shm"]},
        }
    tries["no memory that ranks share"] = {"limits": [(resource.RLIMIT_FSIZE, 2_000_000)]}
    with Forked() as forked:
        for ranks in (1, 2):
            _, expected = forked.said(Job(str(folder / f"plain {ranks}"), ranks=ranks))
            for number, (name, options) in enumerate(tries.items()):
                place = str(folder / f"{number} of {ranks}")
                kind, text = forked.said(Job(place, ranks=ranks, **options))
                wrong = "" if (kind, text) == ("digest", expected) else f"{kind} {text}"
                yield Attempt(f"{name}, {ranks} ranks", wrong)
        if not not_allowed():
            for nbytes in (1 << 16, *(draw.randrange(1 << 16, 1 << 18) for _ in range(2 * rounds))):
                place_of = folder / f"small {nbytes}"
                place_of.mkdir()
                job = Job(str(place_of), disks=[(str(place_of), nbytes)])
                yield _named(f"a disk of {nbytes} bytes", *forked.said(job), place_of)
