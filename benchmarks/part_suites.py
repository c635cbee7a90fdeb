"""The suites that have command lines of their own, driven with options of the benchmark command.

What they print goes to standard error: standard output is for the table.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint, disk_speed, file_io, offload, optimizer_step, pipeline
from benchmarks.ratios import Ratio
from benchmarks.suite import Options, Row, Suite, row_of, rows_of

_NO_FIO = "fio is not installed: apt install fio"


def _quietly(main: Callable[[Sequence[str]], Any], *arguments: object) -> Any:
    with contextlib.redirect_stdout(sys.stderr):
        return main([str(each) for each in arguments])


@contextlib.contextmanager
def _folder(options: Options) -> Iterator[Path]:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        yield Path(name)


def _fio(options: Options) -> bool:
    if shutil.which("fio") is None:
        options.skip(_NO_FIO)
        return False
    return True


# ------------------------------------------------------------------------------------------------------- optimizer


def optimizer(options: Options) -> list[Row]:
    """The step of the optimizer alone, in one process."""
    peers = {"roof": "roof", "copy": "roof", "torch": "torch", "whole": "torch"}
    if options.wants("deepspeed"):
        peers |= {"deepspeed": "deepspeed", "whole-deepspeed": "deepspeed"}
    if options.quick:
        peers = {name: peer for name, peer in peers.items() if peer != "roof"}  # it is compiled
    numel, threads = 100_000 if options.quick else 100_000_000, torch.get_num_threads()

    def against(name: str) -> list[Row]:
        found = _quietly(optimizer_step.main, "--suites", name, "--numel", numel, "--rounds", options.rounds)[0]
        ratio, seconds = Ratio(**found["ratio"]), (found["seconds_ours"], found["seconds_other"])
        return [row_of("optimizer", f"step alone, {name}, {numel / 1e6:g}M", peers[name], ratio, *seconds, "s")]

    try:
        return rows_of("optimizer", options, list(peers), str, against)
    finally:
        torch.set_num_threads(threads)


# --------------------------------------------------------------------------------------------------- offload, NVMe


def _offload(suite: str, options: Options, name: str) -> list[Row]:
    size = ("transformer-tiny", 1, 16) if options.quick else ("transformer-small", 1, 64)
    with _folder(options) as place:
        found = _quietly(
            offload.main, "--folder", place, "--suites", name, "--rounds", options.rounds, "--model", size[0],
            "--rows", size[1], "--length", size[2], "--layers", 2 if options.quick else 64,
        )["suites"][name]  # fmt: skip
    ratio, ours = Ratio(**found["ratio"]), found["ours"]
    if name == "step":
        what, peer, theirs = "optimizer step from files", "fio, or the step in memory", found["roof"]
    else:
        what, peer, theirs = f"step, zero3, {name.partition('-')[2]}, 2 ranks", "deepspeed3", found["deepspeed"]
    return [row_of(suite, what, peer, ratio, ours, theirs, "s", details=found)]


def host_memory(options: Options) -> list[Row]:
    """Training steps with state in host memory."""
    names = ["deepspeed-cpu"] if options.wants("deepspeed") else []
    return rows_of("offload", options, names, str, partial(_offload, "offload", options))


def nvme(options: Options) -> list[Row]:
    """Training steps with state in files, the optimizer's step against the drive, and file I/O against fio."""
    names = (["deepspeed-nvme"] if options.wants("deepspeed") else []) + (["step", "file I/O"] if _fio(options) else [])

    def against(name: str) -> list[Row]:
        return _file_io(options) if name == "file I/O" else _offload("nvme", options, name)

    return rows_of("nvme", options, names, str, against)


def _file_io(options: Options) -> list[Row]:
    with _folder(options) as place:
        found = _quietly(
            file_io.main, "--folder", place, "--mib", 64 if options.quick else 1024, "--rounds", options.rounds,
            "--seconds", 0.1 if options.quick else 1.5,
        )["suites"]  # fmt: skip
    return [
        row_of("nvme", what, "fio", Ratio(**one["ratio"]), one["ours"], one["fio"], "bytes/s", details=one)
        for what, one in found.items()
    ]


# ------------------------------------------------------------------------------------------------------ checkpoint


def checkpoints(options: Options) -> list[Row]:
    """Saves and loads against DeepSpeed's and torch's; saves against the disk."""
    names = ["dcp"] if options.wants("dcp") else []
    names += ["deepspeed"] if options.wants("deepspeed") else []
    names += [] if options.quick else ["disk"]
    return rows_of("checkpoint", options, names, str, partial(_checkpoint, options))


def _checkpoint(options: Options, name: str) -> list[Row]:
    model = "transformer-tiny" if options.quick else "transformer-large"
    with _folder(options) as place:
        found = _quietly(
            checkpoint.main, "--folder", place, "--suites", name, "--rounds", options.rounds, "--model", model
        )["suites"][name]  # fmt: skip
    return _checkpoint_rows(name, found)


def _checkpoint_rows(name: str, found: dict[str, Any]) -> list[Row]:
    samples, rows = found["samples"], []
    for what, ratio in found["figures"].items():
        if name == "disk":
            keys, unit, said = ("save", "disk"), "bytes/s", f"save, the disk by {disk_speed.tool()}"
        else:
            key = what.partition(",")[0]
            keys, unit, said = (f"B {key}", f"A {key}"), "s", key
        ours, theirs = (statistics.median(samples[key]) for key in keys)
        rows.append(row_of("checkpoint", said, name, Ratio(**ratio), ours, theirs, unit, details=samples))
    return rows


# -------------------------------------------------------------------------------------------------------- pipeline


def pipelines(options: Options) -> list[Row]:
    """Batches of schedules against torch.distributed.pipelining's."""
    if not options.wants("pipelining"):
        return []
    cases = [(name, ranks) for ranks in options.ranks if ranks > 1 for name in pipeline.PEERS]
    return rows_of(
        "pipeline", options, cases, lambda case: f"{case[0]}, {case[1]} ranks", partial(_pipeline, options)
    )  # fmt: skip


def _pipeline(options: Options, case: tuple[str, int]) -> list[Row]:
    name, ranks = case
    found = _quietly(
        pipeline.main, "--suites", "torch", "--schedules", name, "--ranks", ranks, "--rounds", options.rounds,
        "--milliseconds", 4 if options.quick else 80,
    )["torch"][0]  # fmt: skip
    ratio = Ratio(**found["ratio"])
    ours, theirs = found["seconds_ours"], found["seconds_torch"]
    return [row_of("pipeline", f"{name}, {ranks} ranks", "pipelining", ratio, ours, theirs, "s", details=found)]


SUITES = (
    Suite("optimizer", "an optimizer step by itself: torch's, DeepSpeed's, and the roof of the memory", optimizer),
    Suite("offload", "training steps with state in host memory", host_memory),
    Suite("nvme", "training steps with state in files; the step and file I/O against the drive", nvme),
    Suite("checkpoint", "saving and loading", checkpoints),
    Suite("pipeline", "pipeline schedules with layers that sleep", pipelines),
)
