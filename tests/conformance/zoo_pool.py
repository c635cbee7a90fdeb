"""Runs many architectures in a pair of ranks that are forked from one process, which has imported everything.

A model that fails, hangs or ends its process costs its own pair alone: the rest goes on in a new one.

    python -m tests.conformance.zoo_pool OUTPUT.jsonl [KIND ...]
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_SECONDS = 300.0
"""Of one model, from one line of a rank's journal to the next."""
GRACE_SECONDS = 80.0
"""For the other rank after one failed: the engine's own limit has to pass."""

VERDICTS = ("equal", "not built", "plain fails", "refused", "BAD")
"""From the best to the worst."""


def one_rank(rank: int, port: int, kinds: Sequence[str], folder: Path) -> None:
    """A rank's whole life: each model, its result in the journal; ends after a failure, since groups may be off."""
    from tests.conformance import architectures, zoo

    os.setsid()
    log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    known = architectures.classes()
    for kind in kinds:
        journal(folder, rank, {"kind": kind, "verdict": "begin"})
        began = time.monotonic()
        found = zoo.compare(kind, known[kind], folder)
        found.facts["seconds"] = round(time.monotonic() - began, 1)
        journal(folder, rank, zoo.record(found))
        if found.facts.get("raised"):
            os._exit(3)
        for left in folder.glob(f"{kind}-*"):
            if rank == 0:
                shutil.rmtree(left, ignore_errors=True)
    os._exit(0)


def journal(folder: Path, rank: int, entry: dict[str, Any]) -> None:
    """Append a line that survives whatever comes."""
    with (folder / f"journal.{rank}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, default=str) + "\n")


def entries(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The lines of a rank."""
    path = folder / f"journal.{rank}"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork_pair(kinds: Sequence[str], folder: Path) -> list[int]:
    """Fork two ranks; their process ids."""
    port, found = free_port(), []
    for rank in range(2):
        if (child := os.fork()) == 0:
            try:
                one_rank(rank, port, kinds, folder)
            except BaseException as error:
                journal(folder, rank, {"kind": "", "verdict": "died", "words": f"{type(error).__name__}: {error}"})
            finally:
                os._exit(4)
        found.append(child)
    return found


class Pair:
    """Two ranks at work on some models, watched from their parent.

    Attributes:
        left: The models without a reported result.
    """

    def __init__(self, kinds: Sequence[str], folder: Path, report: Callable[[dict[str, Any]], None]) -> None:
        self.left, self._folder, self._report = list(kinds), folder, report
        self._codes: dict[int, int] = {}
        self._children = fork_pair(kinds, folder)

    def watch(self, until: float) -> None:
        """Wait until both ranks ended, stood still for too long, or one failed and the other did not follow.

        Args:
            until: Monotonic seconds at which the model that is under way is left as not reached.
        """
        moved, size, failed = time.monotonic(), -1, None
        while len(self._codes) < len(self._children):
            for child in set(self._children) - set(self._codes):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    self._codes[child] = os.waitstatus_to_exitcode(status)
            now, length = time.monotonic(), sum(path.stat().st_size for path in self._folder.glob("journal.*"))
            if length != size:
                moved, size = now, length
                self._report_ended(final=False)
            if any(self._codes.values()) and failed is None:
                failed = now
            if now - moved > LIMIT_SECONDS or (failed is not None and now - failed > GRACE_SECONDS):
                break
            if now > until:
                break
            time.sleep(0.05)
        for child in set(self._children) - set(self._codes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._report_ended(final=time.monotonic() <= until)

    def _report_ended(self, final: bool) -> None:
        """Report each model that both ranks ended; with `final`, also one that a rank began and did not end."""
        said = [entries(self._folder, rank) for rank in range(2)]
        for kind in list(self.left):
            begun = [rank for rank in said if any(entry["kind"] == kind for entry in rank)]
            ended = [entry for rank in said for entry in rank if entry["kind"] == kind and entry["verdict"] != "begin"]
            if begun and (final or len(ended) == 2):
                self.left.remove(kind)
                self._report(worse(kind, ended))


def worse(kind: str, ended: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of what the ranks say, of which some may not have ended."""
    if not ended:
        return {"kind": kind, "verdict": "BAD", "words": "its process ended or stood still", "worst": 0.0, "facts": {}}
    found = max(ended, key=lambda entry: VERDICTS.index(entry["verdict"]))
    if len(ended) < 2 and found["verdict"] == "equal":
        found = {**found, "verdict": "BAD", "words": "one rank ended or stood still"}
    return found


def run_all(kinds: Sequence[str], report: Callable[[dict[str, Any]], None], seconds: float = float("inf")) -> None:
    """Compare these model types, and report each as it ends; begins none after so many seconds."""
    import transformers.models.auto.modeling_auto  # noqa: F401  what ranks share

    from tests.conformance import architectures, zoo  # noqa: F401

    left, until = list(kinds), time.monotonic() + seconds
    while left and time.monotonic() < until:
        with tempfile.TemporaryDirectory() as name:
            pair = Pair(left, Path(name), report)
            pair.watch(until)
            if len(pair.left) == len(left) and time.monotonic() < until:
                raise RuntimeError(f"no rank began: {(Path(name) / 'log.0').read_text(encoding='utf-8')[-2000:]}")
            left = pair.left


def main() -> None:
    """Run the kinds of the command line, or all, and append each result to a file."""
    from tests.conformance import architectures

    output, *kinds = sys.argv[1:]

    def report(found: dict[str, Any]) -> None:
        with open(output, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    run_all(kinds or list(architectures.classes()), report)


if __name__ == "__main__":
    main()
