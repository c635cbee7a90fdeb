"""Our file I/O against `fio` at its best, past the page cache, in files of one size in the same directory.

    python -m benchmarks.file_io --folder DIR --rounds 8 --out file_io.json

Both have a file that is preallocated and written once; then they take turns as A B B A, each moving all of its bytes
again and again for some seconds. Ours goes with the block size and depth that `probe` chooses. fio gets the fastest of
libaio, io_uring (with registered buffers or without) and psync at several block sizes and depths, for reading and for
writing. Its time is what it reports, without its start; ours is that of passes over the chunks of a vector of the NVMe
tier, whose bytes nobody looks at. Figures are bytes per second of ours over fio's, medians of rounds with bootstrap
intervals: above 1 we are faster.

    sequential   chunks of 16 MiB
    bucket       chunks of 64 MiB
    update       each bucket is read and written; against the time in which fio reads and then writes as many bytes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ratios import TURNS, Ratio, bootstrap, round_ratio
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import Chunk, ChunkSlots, VectorSpec
from zero_strategy.offload.file_io import Kind
from zero_strategy.offload.stores import probe
from zero_strategy.offload.tier import NvmeTier

SEQUENTIAL_BYTES, BUCKET_BYTES, BUFFERS = 16 << 20, 64 << 20, 4
SUITES = ("sequential read", "sequential write", "bucket read", "bucket write", "update")
_KEY = "values"
KINDS: tuple[Kind, ...] = ("read", "write")


@dataclass(frozen=True)
class Pattern:
    """Settings of fio.

    Attributes:
        engine: "libaio", "io_uring", "io_uring fixed" (registered buffers) or "psync".
        block: Bytes of each call.
        depth: How many are under way at once.
    """

    engine: str
    block: int
    depth: int


def patterns() -> list[Pattern]:
    engines = ("libaio", "io_uring", "io_uring fixed")
    blocks, depths = (256 << 10, 1 << 20, 4 << 20), (4, 16, 32)
    deep = [Pattern(engine, block, depth) for engine in engines for block in blocks for depth in depths]
    return [*deep, *(Pattern("psync", mib << 20, 1) for mib in (1, 4, 16))]


def fio_seconds(path: Path, jobs: Sequence[tuple[Kind, Pattern]], nbytes: int, lasting: float) -> list[float]:
    """Time of all bytes of an existing file take, in their order, again and again for so many seconds per job.

    The jobs run one after the other in one fio, which leaves out what costs it speed: changing its buffers between
    writes, and the times of single blocks.
    """
    command = ["fio", "--output-format=json"]
    for number, (kind, pattern) in enumerate(jobs):
        options = {
            "name": f"job{number}",
            "filename": str(path),
            "rw": kind,
            "direct": 1,
            "ioengine": pattern.engine.split()[0],
            "bs": pattern.block,
            "iodepth": pattern.depth,
            "size": nbytes,
            "time_based": 1,
            "runtime": f"{round(lasting * 1e3)}ms",
            "scramble_buffers": 0,
            "gtod_reduce": 1,
            "overwrite": 1,
            "fallocate": "none",
            "invalidate": 0,
            "thread": 1,
            "stonewall": 1,
        }
        if pattern.engine.endswith("fixed"):
            options |= {"fixedbufs": 1, "registerfiles": 1}
        command += [f"--{key}={value}" for key, value in options.items()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    results = [job[kind] for job, (kind, _) in zip(found, jobs, strict=True)]
    return [nbytes * max(result["runtime"], 1) / 1e3 / result["io_bytes"] for result in results]


def best_pattern(path: Path, kind: Kind, nbytes: int, lasting: float) -> Pattern:
    """The fastest, by the median of three, of the four that were the fastest at a first glance."""
    every = patterns()
    once = fio_seconds(path, [(kind, one) for one in every], nbytes, lasting / 5)
    best = sorted(every, key=lambda one: once[every.index(one)])[:4]
    again = [fio_seconds(path, [(kind, one) for one in best], nbytes, lasting / 2) for _ in range(3)]
    medians = [statistics.median(seconds) for seconds in zip(*again, strict=True)]
    return best[medians.index(min(medians))]


class Ours:
    """Passes over vectors in files."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.speed = probe(folder)
        chosen = self.speed.chosen
        self._tier = NvmeTier([str(folder)], block_bytes=chosen.block_bytes, depth=chosen.depth)
        self._vectors = {
            size: ChunkStore(self._tier, step).take(size, VectorSpec(nbytes, torch.uint8))
            for size, step in (("sequential", SEQUENTIAL_BYTES), ("bucket", BUCKET_BYTES))
        }
        self._slots = {size: ChunkSlots(BUFFERS) for size in self._vectors}
        for size in self._vectors:
            self._pass(size, "write", lambda _, held: held[_KEY].random_(0, 256))

    def _pass(self, size: str, what: str, work: Callable[[Chunk, dict[str, torch.Tensor]], object]) -> None:
        vector, key = self._vectors[size], frozenset([_KEY])
        unread, unchanged = key if what == "write" else frozenset[str](), key if what == "read" else frozenset[str]()
        chunks = [
            Chunk(number, *place, {_KEY: vector}, unread, unchanged) for number, place in enumerate(vector.chunks)
        ]
        self._slots[size].run(chunks, work)

    def seconds(self, size: str, what: str, lasting: float) -> float:
        """Time of a pass; passes are made for so many seconds, and at least one."""
        begin, made = time.perf_counter(), 0
        while not made or time.perf_counter() - begin < lasting:
            self._pass(size, what, lambda *_: None)
            made += 1
        return (time.perf_counter() - begin) / made

    def close(self) -> None:
        self._tier.close()


def rounds_of(fio: Callable[[], float], ours: Callable[[], float], rounds: int) -> list[list[float]]:
    """Seconds of the turns of each round: A is fio, B ours."""
    return [[fio() if turn == "A" else ours() for turn in TURNS] for _ in range(rounds)]


def figure(samples: Sequence[Sequence[float]]) -> Ratio:
    """Speed of ours over fio's."""
    return bootstrap([round_ratio([[seconds] for seconds in turns]) for turns in samples])


def measure(folder: Path, nbytes: int, rounds: int, lasting: float, suites: Sequence[str]) -> dict[str, Any]:
    ours, path = Ours(folder, nbytes), folder / "fio"
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        fio_seconds(path, [("write", Pattern("psync", 4 << 20, 1))], nbytes, lasting)
        best = {kind: best_pattern(path, kind, nbytes, lasting) for kind in KINDS}
        report: dict[str, Any] = {
            "ours": str(ours.speed),
            "fio": {kind: asdict(pattern) for kind, pattern in best.items()},
            "suites": {},
        }

        def fio(*kinds: Kind) -> float:
            return sum(fio_seconds(path, [(kind, best[kind]) for kind in kinds], nbytes, lasting))

        def passes(size: str, what: str) -> float:
            return ours.seconds(size, what, lasting)

        for suite in suites:
            size, what = ("bucket", "update") if suite == "update" else suite.split()
            kinds = KINDS if suite == "update" else tuple(kind for kind in KINDS if kind == what)
            samples = rounds_of(partial(fio, *kinds), partial(passes, size, what), rounds)
            moved = nbytes * len(kinds)
            report["suites"][suite] = {
                "ratio": asdict(figure(samples)),
                "fio": moved / statistics.median(seconds for turns in samples for seconds in (turns[0], turns[3])),
                "ours": moved / statistics.median(seconds for turns in samples for seconds in turns[1:3]),
                "samples": samples,
            }
            print(show(suite, report["suites"][suite]), flush=True)
        return report
    finally:
        path.unlink(missing_ok=True)
        ours.close()


def show(suite: str, found: dict[str, Any]) -> str:
    ratio = found["ratio"]
    return (
        f"{suite:<17} ours / fio {ratio['median']:.3f} ({ratio['low']:.3f} - {ratio['high']:.3f})   "
        f"fio {found['fio'] / 1e9:.2f} GB/s, ours {found['ours'] / 1e9:.2f} GB/s"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Our file I/O against fio at its best, on the same file.")
    parser.add_argument("--folder", type=Path, required=True, help="on the drive to be measured")
    parser.add_argument("--mib", type=int, default=1024, help="of the file")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn")
    parser.add_argument("--rounds", type=int, default=8, help="of A B B A")
    parser.add_argument("--suites", nargs="*", choices=SUITES, default=SUITES)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    if shutil.which("fio") is None:
        parser.error("fio is not installed")
    options.folder.mkdir(parents=True, exist_ok=True)
    report = measure(options.folder, options.mib << 20, options.rounds, options.seconds, options.suites)
    report["environment"] = {"cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()}
    print(f"ours: {report['ours']}\nfio: {report['fio']}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
