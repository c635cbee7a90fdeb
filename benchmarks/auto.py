"""Chosen settings (`auto.enabled`): whether they fit where memory is scarce, and how near to the best they are.

    python -m benchmarks.auto cells --count 200     # random models, ranks, limits of memory: runs that end, refusals
    python -m benchmarks.auto grid --count 40       # candidates of a cell measured: the chosen one over the best

The grid leaves out what does all that another candidate does, and more: units computed again, blocks mapped, a drive.

A cell is a model (a GPT, or one of transformers), a number of ranks, rows of a step, a limit of each process's memory
(RLIMIT_DATA) and perhaps a drive. Its ranks are forked from this process, choose, and train some steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTSize, loss_fn
from zero_strategy import ZeroEngine
from zero_strategy.auto.decide import Decision, decide
from zero_strategy.auto.example import Example
from zero_strategy.config import load_config
from zero_strategy.integrations.transformers import divide_sequences, tiles_of
from zero_strategy.planning.held import resident
from zero_strategy.runtime.torch_private import FileStore

_SECONDS = 900
_MIB = 1 << 20
_AGAIN = 1.1
"""Times the least of a grid within which candidates are measured a second time."""


@dataclass(frozen=True)
class Cell:
    """A model, and where it is trained.

    Attributes:
        kind: "gpt", or a model type of transformers.
        width, depth, vocabulary: Of it.
        tokens: Of a row.
        batch: Rows of a step, over all ranks.
        ranks: How many.
        room: MiB that each process may take more than it has with the model; 0: no limit.
        drive: Whether there is one.
    """

    kind: str
    width: int
    depth: int
    vocabulary: int
    tokens: int
    batch: int
    ranks: int
    room: int
    drive: bool


def drawn(draw: random.Random, *, limited: bool) -> Cell:
    """A random cell."""
    kind = draw.choice(["gpt", "gpt", "llama", "gpt2", "bert"])
    width, depth = draw.choice([128, 256, 384, 512]), draw.randrange(4, 13)
    vocabulary, ranks = draw.choice([1024, 8192, 30522]), draw.choice([1, 2, 4])
    tokens, batch = draw.choice([32, 64, 128]), ranks * draw.choice([1, 2, 4, 6, 8])
    parameters = depth * 12 * width**2 + 2 * vocabulary * width
    state = 16 * parameters >> 20
    # From what hardly holds the state to what holds it three times, with stacks of threads and torch's tracing.
    room = 200 + int(state * draw.uniform(0.3, 3.0) / ranks**0.5) if limited else 0
    return Cell(kind, width, depth, vocabulary, tokens, batch, ranks, room, draw.random() < 0.4)


def model_of(cell: Cell) -> nn.Module:
    """The model of a cell."""
    torch.manual_seed(0)
    heads = cell.width // 64
    if cell.kind == "gpt":
        return GPT(GPTSize(cell.width, cell.depth, heads, cell.vocabulary), cell.tokens)
    import transformers

    shape: dict[str, Any] = {"vocab_size": cell.vocabulary}
    if cell.kind == "gpt2":
        shape |= {"n_embd": cell.width, "n_layer": cell.depth, "n_head": heads, "n_positions": cell.tokens}
    else:
        shape |= {"hidden_size": cell.width, "num_hidden_layers": cell.depth, "num_attention_heads": heads}
        shape |= {"intermediate_size": 4 * cell.width, "max_position_embeddings": cell.tokens}
    config = transformers.AutoConfig.for_model(cell.kind, **shape)
    make = transformers.AutoModelForMaskedLM if cell.kind == "bert" else transformers.AutoModelForCausalLM
    model: nn.Module = make.from_config(config)
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of tokens that are their own labels."""
    if isinstance(model, GPT):
        return loss_fn(model(batch), batch)
    found: Tensor = model(input_ids=batch, labels=batch).loss
    return found


def settings_of(cell: Cell, drive: str) -> dict[str, Any]:
    """Settings that a user would give."""
    found: dict[str, Any] = {"stage": "auto", "auto": {"enabled": True, "global_batch": cell.batch}}
    if cell.drive:
        found["offload"] = {"nvme_path": [drive], "probe_seconds": 0.0}
    return found


# ---- a rank ----


def used_bytes() -> int:
    """Memory of this process that a limit counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024


def limit(nbytes: int) -> None:
    """Let this process take so much memory at most."""
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.RLIM_INFINITY))


def steps_of(
    cell: Cell, model: nn.Module, config: Any, rows: int, accumulation: int, count: int, *, gather: bool = False
) -> tuple[float, bool]:  # fmt: skip
    """Seconds of a step, those that are guarded left out; whether memory ran short in them."""
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine.attach(optimizer)
    divide_sequences(engine)
    batch = torch.zeros(rows, cell.tokens, dtype=torch.long)
    times = []
    for _ in range(count):
        if dist.is_initialized():
            dist.barrier()
        begun = time.perf_counter()
        for micro in range(accumulation):
            with engine.no_sync() if micro < accumulation - 1 else nullcontext():
                loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
    short = engine.config.config.origin_of("activation_checkpointing.mode").startswith("memory")
    engine.close(gather=gather)
    return min(times[2:]), short


def choose(cell: Cell, model: nn.Module, drive: str, told: int = 10) -> Decision:
    """The decision for a cell."""
    example = Example(torch.zeros(1, cell.tokens, dtype=torch.long), loss_of)
    return decide(load_config(settings_of(cell, drive)), model, world_size=cell.ranks, example=example, told=told,
                  tiles=tiles_of(model))  # fmt: skip


def rank_of_cell(cell: Cell, drive: str, rank: int) -> dict[str, Any]:
    """Choose under the limit, and train."""
    model = model_of(cell)
    present = sum(parameter.nbytes for parameter in model.parameters())
    limit(used_bytes() + cell.room * _MIB)
    begun = time.perf_counter()
    try:
        found = choose(cell, model, drive)
    except ValueError as error:
        if "nothing fits" not in str(error):
            raise
        return {"refused": str(error)}
    choosing = time.perf_counter() - begun
    decided = resident()[0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    try:
        seconds, short = steps_of(cell, model, found.config, found.rows, found.accumulation, 4)
    except Exception as error:
        raise RuntimeError(f"chosen: {json.dumps(found.figures['candidates'][0])}") from error
    chosen = found.figures["candidates"][0]
    sums = [entry for entry in chosen["ledger"]["sums"] if entry["tier"] != "nvme"]
    planned = sum(entry["taken"] for entry in sums if entry["category"] != "snapshot")  # nothing is saved
    return {
        "settings": found.figures["settings"], "rows": found.rows, "accumulation": found.accumulation,
        "seconds": seconds, "predicted seconds": chosen["seconds"]["total"], "bytes": resident()[1] - decided + present,
        "parts": chosen["seconds"], "predicted bytes": planned + chosen["beside"],
        "activations": chosen["activations"], "choosing": choosing, "short": short,
    }  # fmt: skip


def rank_of_refused(cell: Cell, drive: str, rank: int) -> dict[str, Any]:
    """Train with what takes least, under the limit: whether a refusal was one too many."""
    model = model_of(cell)
    most = used_bytes() + cell.room * _MIB
    candidates = choose(cell, model, drive, 100_000).figures["candidates"]
    least = min(candidates, key=lambda each: each["needs"][0]["needed"])
    settings = {**least["settings"], "offload.nvme_path": [drive], "offload.probe_seconds": 0.0}
    limit(most)
    steps_of(cell, model, load_config(nested(settings)), least["rows"], least["accumulation"], 4)
    return {"settings": least["settings"], "rows": least["rows"], "accumulation": least["accumulation"]}


def rank_of_grid(cell: Cell, drive: str, rank: int, most: int) -> dict[str, Any]:
    """Choose, and measure the candidates, those that are predicted quickest first."""
    model = model_of(cell)
    found = choose(cell, model, drive, 100_000)
    chosen, *others = found.figures["candidates"]
    candidates = [chosen, *filter(may_be_quickest, others)][:most]

    def measured(each: dict[str, Any]) -> float:
        settings = {**each["settings"], "offload.nvme_path": [drive], "offload.probe_seconds": 0.0}
        count = max(4, min(12, round(2 / each["seconds"]["total"])))
        config = load_config(nested(settings))
        return steps_of(cell, model, config, each["rows"], each["accumulation"], count, gather=True)[0]

    measured(chosen)  # the first time everything is slower
    times = [measured(each) for each in candidates]
    # The least of many is least by chance, too: what is near to it is measured again, and so is the chosen one.
    limit = _AGAIN * _agreed(min(times))
    near = [_agreed(time) <= limit or number == 0 for number, time in enumerate(times)]
    for number in [number for number, is_near in enumerate(near) if is_near]:
        times[number] = min(times[number], measured(candidates[number]))
    told = [{**each, "measured": time} for each, time in zip(candidates, times, strict=True)]
    return {"measured": told, "of": len(others) + 1}


def _agreed(value: float) -> float:
    """Rank 0's, for all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)


def may_be_quickest(candidate: dict[str, Any]) -> bool:
    """True if no other candidate does a part of its work alone."""
    settings = candidate["settings"]
    more = settings["offload.optimizer"] != "none" or settings["offload.parameters"] != "none"
    return not more and settings["activation_checkpointing.mode"] == "none" and not settings["mmap_threshold"]


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted keys as a mapping of mappings."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        where = found
        for part in path:
            where = where.setdefault(part, {})
        where[name] = value
    return found


# ---- all ranks of a cell ----


def forked(cell: Cell, what: str, *arguments: Any) -> dict[str, Any]:
    """Rank 0's result; or how a rank has ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [_fork(cell, what, folder, rank, arguments) for rank in range(cell.ranks)]
        end, statuses = time.monotonic() + _SECONDS, dict[int, int]()
        while len(statuses) < len(children) and time.monotonic() < end:
            for rank, pid in enumerate(children):
                if rank not in statuses and (done := os.waitpid(pid, os.WNOHANG))[0]:
                    statuses[rank] = done[1]
            if any(statuses.values()):  # the others would wait for it
                break
            time.sleep(0.02)
        for rank, pid in enumerate(children):
            if rank not in statuses:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
        errors = [file.read_text() for file in sorted(folder.glob("*.error"))]
        if errors or len(statuses) < len(children) or any(statuses.values()):
            return {"error": errors[0] if errors else f"ended with {statuses}"}
        found: dict[str, Any] = json.loads((folder / "0.json").read_text())
        return found


def _fork(cell: Cell, what: str, folder: Path, rank: int, arguments: tuple[Any, ...]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        if cell.ranks > 1:
            store = FileStore(str(folder / "store"), cell.ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=cell.ranks)
        found = globals()[what](cell, str(folder / "drive"), rank, *arguments)
        (folder / f"{rank}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Random cells under a limit."""
    draw = random.Random(options.seed)
    for number in range(options.count):
        cell = drawn(draw, limited=True)
        if number < options.first:
            continue
        found = forked(cell, "rank_of_cell")
        if "refused" in found and options.refused:
            found["least"] = forked(cell, "rank_of_refused")
        yield {"number": number, "cell": asdict(cell), **found}


def grid(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Random cells without a limit, of which all candidates are measured."""
    draw = random.Random(options.seed)
    for number in range(options.count):
        cell = drawn(draw, limited=False)
        found = forked(cell, "rank_of_grid", options.most)
        if "measured" in found:
            times = [each["measured"] for each in found["measured"]]
            found["ratio"] = times[0] / min(times)
        yield {"number": number, "cell": asdict(cell), **found}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and medians of what was predicted over what was measured."""
    ended = [each for each in found if "seconds" in each]
    ratios = sorted(each["ratio"] for each in found if "ratio" in each)

    def off(what: str) -> float | None:
        shares = [abs(each[f"predicted {what}"] / each[what] - 1) for each in ended if each[what]]
        return statistics.median(shares) if shares else None

    return {
        "cells": len(found), "trained": len(ended), "refused": sum("refused" in each for each in found),
        "refused, and the least ends": [e["number"] for e in found if "settings" in e.get("least", {})],
        "memory ran short, and the run went on": [each["number"] for each in ended if each["short"]],
        "failed": [each["number"] for each in found if "error" in each],
        "bytes off by (median)": off("bytes"), "seconds off by (median)": off("seconds"),
        "seconds of choosing (median)": statistics.median(e["choosing"] for e in ended) if ended else None,
        "chosen / best (median)": statistics.median(ratios) if ratios else None,
        "chosen / best (95 %)": ratios[math.ceil(0.95 * len(ratios)) - 1] if ratios else None,
    }  # fmt: skip


def main() -> None:
    """A line of JSON for each cell, and a summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto", description=__doc__)
    parser.add_argument("what", choices=("cells", "grid"))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first cell")
    parser.add_argument("--most", type=int, default=100, help="of grid: candidates that are measured")
    parser.add_argument("--refused", action="store_true", help="of cells: try what is refused with what takes least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import transformers  # noqa: F401  (once, for all that are forked)

    found = []
    for each in (cells if options.what == "cells" else grid)(options):
        found.append(each)
        print(json.dumps(each), flush=True)
    print(json.dumps(summary(found), indent=2))


if __name__ == "__main__":
    main()
