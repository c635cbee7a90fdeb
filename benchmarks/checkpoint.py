"""Checkpoints of 67M parameters on two ranks: against the disk, against DeepSpeed's and torch's, and in the background.

    python -m benchmarks.checkpoint --folder DIR --suites disk dcp deepspeed checksums background --out checkpoint.json

Float32 with AdamW, stage 3, on the CPU. Times are those of the slowest rank between two barriers; contenders take turns
as A B B A, and figures are medians of rounds with bootstrap intervals.

    disk        bytes of a checkpoint over the time of `save`, over what `fio` writes per second in the same directory
    dcp         time of torch.distributed.checkpoint (FSDP2) over ours: `save` as it is, `save` until all is durable
                (files and directories flushed), `load`
    deepspeed   the same for DeepSpeed stage 3, where it is installed (DS_BUILD_OPS=0 pip install deepspeed)
    checksums   time of a save over that of one whose checksums cost nothing, less one
    background  of a save in the background: the time that training waits for it, over that of copying this rank's
                bytes, and over a save in the foreground; a step that begins while it goes on over one in peace; its
                time over that of a save in the foreground; and `slower`, how much slower training runs while it goes
                on, which is the same as the second where it outlasts a step: its time over its time less what those
                steps took longer
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import disk_speed
from benchmarks.checkpoint_contenders import CONTENDERS, Contender, Ours
from benchmarks.gpt import SIZES
from benchmarks.ratios import TURNS, Ratio, bootstrap
from tests.launcher import RankPool

SUMMARY = "Checkpoints on two ranks: against the disk, DeepSpeed's, torch's, and in the background."
Samples = dict[str, list[float]]
"""Figure -> one value per round; or seconds of each turn."""


@dataclass(frozen=True)
class Plan:
    """Options of the measurement.

    Attributes:
        folder: For the checkpoints.
        model: One of `benchmarks.gpt.SIZES`.
        length: Tokens of the row in a step.
        rounds: Of A B B A.
        cold: Loads find nothing in the page cache; else all of it.
    """

    folder: str
    model: str
    length: int
    rounds: int
    cold: bool


# -------------------------------------------------------------------------------------------------- on every rank


def timed(action: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    action()
    return slowest(time.perf_counter() - start)


def slowest(seconds: float) -> float:
    held = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return held.item()


def clear(directory: Path) -> None:
    """Removes a checkpoint, and waits for the disk to be idle."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        os.sync()
    dist.barrier()


def flush(directory: Path) -> None:
    """Flushes all files, divided among the ranks, and the directories: what makes any checkpoint durable."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    mine = files[dist.get_rank() :: dist.get_world_size()]
    folders = [directory.parent, directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for path in [*mine, *(folders if dist.get_rank() == 0 else [])]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    dist.barrier()


def set_cache(directory: Path, cold: bool) -> None:
    """All of a checkpoint out of the page cache, or all of it in."""
    if dist.get_rank() == 0:
        os.sync()
        for path in filter(Path.is_file, directory.rglob("*")):
            with open(path, "rb", buffering=0) as file:
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(8 << 20):
                        pass
    dist.barrier()


def checkpoint_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def against_disk(plan: Plan) -> Samples:
    """Bytes per second of ours (A) and of the disk (B)."""
    ours, place, samples = Ours(plan.model, plan.length), Path(plan.folder, "c"), _empty("save", "disk")
    ours.save(place)
    nbytes = checkpoint_bytes(place)
    best = [disk_speed.best_pattern(Path(plan.folder), nbytes) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(best)
    assert best[0] is not None
    for _ in range(plan.rounds):
        for turn in TURNS:
            clear(place)
            if turn == "A":
                samples["save"].append(nbytes / timed(lambda: ours.save(place)))
            elif dist.get_rank() == 0:
                samples["disk"].append(disk_speed.write_speed(Path(plan.folder), nbytes, best[0]))
    samples["pattern"] = [best[0].block, best[0].depth]
    samples["bytes"] = [nbytes]
    return samples


def against_peer(plan: Plan, peer: str) -> Samples:
    """Seconds of save, of save until durable, and of load."""
    both: dict[str, Contender] = {"A": CONTENDERS[peer](plan.model, plan.length), "B": Ours(plan.model, plan.length)}
    places = {turn: Path(plan.folder, f"c-{turn}") for turn in both}
    samples = _empty(*(f"{turn} {what}" for turn in both for what in ("save", "durable", "load")))
    for turn, contender in both.items():  # what is slow the first time is not counted
        contender.save(places[turn])
        contender.load(places[turn])
    for _ in range(plan.rounds):
        for turn in TURNS:
            contender, place = both[turn], places[turn]
            clear(place)
            saving = timed(lambda contender=contender, place=place: contender.save(place))  # type: ignore[misc]
            flushing = timed(lambda place=place: flush(place))  # type: ignore[misc]
            samples[f"{turn} save"].append(saving)
            samples[f"{turn} durable"].append(saving + flushing)
        for turn in TURNS:
            contender, place = both[turn], places[turn]
            set_cache(place, plan.cold)
            loading = timed(lambda contender=contender, place=place: contender.load(place))  # type: ignore[misc]
            samples[f"{turn} load"].append(loading)
    for turn, place in places.items():
        samples[f"{turn} bytes"] = [checkpoint_bytes(place)]
        clear(place)
    return samples


class _Free:
    """A checksum that costs nothing."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 16


@contextlib.contextmanager
def free_checksums() -> Iterator[None]:
    with mock.patch("xxhash.xxh3_64", _Free), mock.patch("xxhash.xxh3_64_hexdigest", lambda data: "0" * 16):
        yield


def with_and_without_checksums(plan: Plan) -> Samples:
    """Seconds of a save with (A) and without (B)."""
    ours, place, samples = Ours(plan.model, plan.length), Path(plan.folder, "c"), _empty("with", "without")
    ours.save(place)
    for _ in range(plan.rounds):
        for turn in TURNS:
            clear(place)
            with contextlib.nullcontext() if turn == "A" else free_checksums():
                samples["with" if turn == "A" else "without"].append(timed(lambda: ours.save(place)))
    clear(place)
    return samples


def in_background(plan: Plan) -> Samples:
    """Seconds of saves in the foreground, of copies, of starting and finishing saves in the background, of steps."""
    ours, place = Ours(plan.model, plan.length), Path(plan.folder, "c")
    samples = _empty("save", "copy", "wait", "flush", "step", "busy step", "busy steps", "busy")
    sources = list(ours.own_tensors())
    buffers = [torch.zeros_like(source) for source in sources]
    ours.start_saving(place).wait()

    def in_peace() -> float:
        """Before and after a save alike."""
        samples["step"] += [timed(ours.step) for _ in range(2)]
        return timed(lambda: torch._foreach_copy_(buffers, sources))

    for _ in range(2 * plan.rounds):
        clear(place)
        samples["save"].append(timed(lambda: ours.save(place)))
        clear(place)
        copy = in_peace()
        handles, ended = list[Any](), list[float]()
        dist.barrier()
        start = time.perf_counter()
        samples["wait"].append(timed(lambda handles=handles: handles.append(ours.start_saving(place))))  # type: ignore[misc]
        finisher = threading.Thread(target=note_end, args=(handles[0], ended))
        finisher.start()
        taken = list[float]()
        while not taken or slowest(float(not ended)) > 0:  # all ranks take the same steps
            taken.append(timed(ours.step))
        finisher.join()
        samples["flush"].append(slowest(ended[0] - start))
        samples["busy step"] += taken
        samples["busy steps"].append(len(taken))
        samples["busy"].append(sum(taken))
        samples["copy"].append((copy + in_peace()) / 2)
    clear(place)
    return samples


def note_end(handle: Any, ended: list[float]) -> None:
    handle.wait()
    ended.append(time.perf_counter())


def _empty(*names: str) -> Samples:
    return {name: [] for name in names}


SUITES: dict[str, Callable[[Plan], Samples]] = {
    "disk": against_disk,
    "dcp": lambda plan: against_peer(plan, "dcp"),
    "deepspeed": lambda plan: against_peer(plan, "deepspeed"),
    "checksums": with_and_without_checksums,
    "background": in_background,
}


def run_suite(suite: str, plan: Plan) -> Samples:
    torch.set_num_threads(1)
    return SUITES[suite](plan)


# --------------------------------------------------------------------------------------------------- the figures


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Of two lists of turns, two a round: median and interval of the rounds' ratios."""
    pairs = zip(over[::2], over[1::2], under[::2], under[1::2], strict=True)
    return asdict(bootstrap([(a + b) / (c + d) for a, b, c, d in pairs]))


def ratio_of_medians(over: Sequence[float], under: Sequence[float], draws: int = 10_000) -> dict[str, float]:
    """For times of a few hundredths of a second, some of which something else interrupted: those do not count.

    The interval is that of the turns' bootstrap.
    """
    turns, generator = list(zip(over, under, strict=True)), random.Random(0)

    def of(chosen: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in chosen) / statistics.median(b for _, b in chosen)

    drawn = sorted(of(generator.choices(turns, k=len(turns))) for _ in range(draws))
    return asdict(Ratio(of(turns), drawn[round(0.025 * (draws - 1))], drawn[round(0.975 * (draws - 1))]))


def _busy_rounds(samples: Samples) -> Iterator[tuple[float, float, tuple[float, float]]]:
    """Of each round: a step while saving, one in peace, and (seconds of flushing, seconds that steps took longer)."""
    steps, flushes = samples["step"], samples["flush"]
    for number in range(len(flushes) // 2):
        turns = slice(2 * number, 2 * number + 2)
        busy, count = sum(samples["busy"][turns]), sum(samples["busy steps"][turns])
        step, flush = statistics.mean(steps[8 * number : 8 * number + 8]), sum(flushes[turns])
        yield busy / count, step, (flush, busy - count * step)


def figures(suite: str, samples: Samples) -> dict[str, dict[str, float]]:
    """The ratios of a suite, by name."""
    if suite == "disk":
        return {"save / disk": ratio(samples["save"], samples["disk"])}
    if suite == "checksums":
        found = ratio(samples["with"], samples["without"])
        return {"cost / save": {key: value - 1 for key, value in found.items()}}
    if suite == "background":
        return {
            "wait / copy": ratio_of_medians(samples["wait"], samples["copy"]),
            "wait / save": ratio_of_medians(samples["wait"], samples["save"]),
            "flush / save": ratio_of_medians(samples["flush"], samples["save"]),
            "busy step / step": asdict(bootstrap([busy / step for busy, step, _ in _busy_rounds(samples)])),
            "slower": asdict(bootstrap([flush / (flush - more) for _, _, (flush, more) in _busy_rounds(samples)])),
        }
    return {
        f"{what}, peer / ours": ratio(samples[f"A {what}"], samples[f"B {what}"])
        for what in ("save", "durable", "load")
    }


def show(suite: str, samples: Samples) -> str:
    lines = [suite]
    for name, found in figures(suite, samples).items():
        lines.append(f"  {name:<24}{found['median']:>8.3f}   {found['low']:.3f} - {found['high']:.3f}")
    for name, values in samples.items():
        lines.append(f"  median of {name:<20}{statistics.median(values):.4g}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=SUMMARY)
    parser.add_argument("--suites", nargs="*", choices=SUITES, default=["disk", "dcp", "checksums", "background"])
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints, on the disk to be measured")
    parser.add_argument("--model", choices=SIZES, default="transformer-large")
    parser.add_argument("--length", type=int, default=64, help="tokens of a training step")
    parser.add_argument("--rounds", type=int, default=5, help="of A B B A")
    parser.add_argument("--cold", action="store_true", help="loads find nothing in the page cache")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(str(options.folder.absolute()), options.model, options.length, options.rounds, options.cold)
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "disk measured by": disk_speed.tool(),
    }
    report: dict[str, Any] = {"plan": asdict(plan), "environment": machine, "suites": {}}
    for suite in options.suites:
        pool = RankPool(2)  # of its own, for peers keep process groups
        samples = pool.run(run_suite, (suite, plan), timeout=1800)[0]
        pool.close()
        report["suites"][suite] = {"figures": figures(suite, samples), "samples": samples}
        print(show(suite, samples), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
