"""Offloading: the step from files against the drive and Adam, and training steps against DeepSpeed's.

    python -m benchmarks.offload --folder DIR --suites step deepspeed-cpu deepspeed-nvme --out offload.json

    step            one process, bf16 weights with AdamW: what the slower of `fio` (the same bytes read and written, at
                    its best) and the update in memory takes, over what our optimizer step with its state in files takes
    deepspeed-cpu   two ranks, stage 3, fp32, a transformer: DeepSpeed's training step with optimizer and parameters in
                    host memory over ours. DeepSpeed must be installed (DS_BUILD_OPS=0 pip install deepspeed)
    deepspeed-nvme  the same with optimizer and parameters in files (DeepSpeed needs libaio). Of parameters DeepSpeed
                    keeps a billion elements in host memory by default (`max_in_cpu`), and gradients beside what it
                    writes of them; ours keep both in as many bytes (--resident-bytes)

Contenders take turns as A B B A; figures are medians of rounds with bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.file_io import KINDS, best_pattern, fio_seconds
from benchmarks.gpt import SIZES, build, loss_fn
from benchmarks.ratios import TURNS, bootstrap, round_ratio
from tests.launcher import RankPool
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

SUITES = ("step", "deepspeed-cpu", "deepspeed-nvme")
LAYER = 1024
LASTING = 2.0
"""Seconds of each turn of fio, reading and writing."""
MAX_IN_CPU = 4 * 10**9
"""Bytes of the parameters that DeepSpeed keeps in host memory by default."""
_STATE_BYTES = 12
"""Of an element in files: master weight and two moments."""


# ------------------------------------------------------------------------------------------------- the step alone


class StepAlone:
    """An optimizer step on gradients that are there."""

    def __init__(self, layers: int, offload: dict[str, Any]) -> None:
        module = nn.ModuleList([nn.Linear(LAYER, LAYER, bias=False) for _ in range(layers)])
        self.engine = ZeroEngine(module, load_config(stage=2, offload=offload), compute_dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        self.engine.attach(self.optimizer)
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for _ in range(2):
            self.optimizer.step()

    def seconds(self) -> float:
        start = time.perf_counter()
        self.optimizer.step()
        self.engine.offloaded.settle()
        return time.perf_counter() - start


def step_alone(folder: Path, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of fio, of the step in memory, and of the step from files."""
    nbytes = layers * LAYER * LAYER * _STATE_BYTES
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        target = place / "fio"
        with open(target, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        patterns = {kind: best_pattern(target, kind, nbytes, LASTING) for kind in KINDS}
        in_memory = StepAlone(layers, {})
        in_files = StepAlone(layers, {"optimizer": "nvme", "nvme_path": [str(place)]})

        def roof() -> float:
            drive = sum(fio_seconds(target, [(kind, patterns[kind]) for kind in KINDS], nbytes, LASTING))
            return max(drive, in_memory.seconds())

        samples = [[roof() if turn == "A" else in_files.seconds() for turn in TURNS] for _ in range(rounds)]
        adam = statistics.median(in_memory.seconds() for _ in range(3))
        return {
            "bytes": 2 * nbytes,
            "adam": adam,
            "roof": statistics.median(seconds for turns in samples for seconds in (turns[0], turns[3])),
            "ours": statistics.median(seconds for turns in samples for seconds in turns[1:3]),
            "ratio": asdict(bootstrap([round_ratio([[seconds] for seconds in turns]) for turns in samples])),
            "samples": samples,
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)


# ------------------------------------------------------------------------------------------------- against DeepSpeed


class Training:
    """A transformer that trains; `step` is what contenders differ in."""

    def __init__(self, size: str, rows: int, length: int) -> None:
        self.model, self.vocabulary = build(size, length), SIZES[size].vocabulary
        self.shape, self.taken = (rows, length + 1), 0

    def loss(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        self.taken += 1
        generator = torch.Generator().manual_seed(1000 * self.taken + dist.get_rank())
        rows = torch.randint(self.vocabulary, self.shape, generator=generator)
        return loss_fn(forward(rows[:, :-1]), rows[:, 1:])


class Ours(Training):
    def prepare(self, tier: str, folder: str, resident: int) -> None:
        paths = [folder] if tier == "nvme" else []
        offload = {"optimizer": tier, "parameters": tier, "nvme_path": paths, "resident_bytes": resident}
        self.engine = ZeroEngine(self.model, load_config(stage=3, offload=offload))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.engine.attach(self.optimizer)

    def step(self) -> float:
        loss = self.loss(self.model)
        loss.backward()
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class DeepSpeed(Training):
    def prepare(self, tier: str, folder: str, resident: int) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
        import deepspeed

        place = {"device": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
        pipelined = {"pipeline_read": True, "pipeline_write": True} if tier == "nvme" else {}
        config = {
            "train_micro_batch_size_per_gpu": self.shape[0],
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": place | pipelined,
                "offload_param": place,
            },
        }
        self.engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config, dist_init_required=False
        )

    def step(self) -> float:
        loss = self.loss(self.engine)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)


def against_deepspeed(
    tier: str, folder: str, size: str, rows: int, length: int, rounds: int, resident: int
) -> dict[str, Any]:
    """Seconds of the slowest rank for steps of each."""
    torch.set_num_threads(1)
    both: dict[str, Any] = {"A": DeepSpeed(size, rows, length), "B": Ours(size, rows, length)}
    losses: dict[str, list[float]] = {"A": [], "B": []}
    for turn, contender in both.items():
        contender.prepare(tier, folder, resident)
        losses[turn] += [contender.step() for _ in range(2)]

    def timed(turn: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        losses[turn].append(both[turn].step())
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    return {"samples": [[[timed(turn) for _ in range(2)] for turn in TURNS] for _ in range(rounds)], "losses": losses}


def compare(suite: str, options: argparse.Namespace) -> dict[str, Any]:
    tier = suite.partition("-")[2]
    place, pool = tempfile.mkdtemp(dir=options.folder), RankPool(2)
    try:
        arguments = (
            tier, place, options.model, options.rows, options.length, options.rounds, options.resident_bytes
        )  # fmt: skip
        found = pool.run(against_deepspeed, arguments, {}, timeout=3600)[0]
    finally:
        pool.close()
        shutil.rmtree(place, ignore_errors=True)
    samples = found["samples"]
    return {
        "ratio": asdict(bootstrap([round_ratio(blocks) for blocks in samples])),
        "deepspeed": statistics.median(s for blocks in samples for block in (blocks[0], blocks[3]) for s in block),
        "ours": statistics.median(s for blocks in samples for block in blocks[1:3] for s in block),
        "largest difference of losses": max(
            abs(a - b) for a, b in zip(found["losses"]["A"], found["losses"]["B"], strict=True)
        ),
        "samples": samples,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive to be measured")
    parser.add_argument("--suites", nargs="*", choices=SUITES, default=["step"])
    parser.add_argument("--layers", type=int, default=64, help="of the step alone, a million elements each")
    parser.add_argument("--model", choices=SIZES, default="transformer-small")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--resident-bytes", type=int, default=MAX_IN_CPU, help="of ours, per rank, in deepspeed-nvme")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"torch": torch.__version__, "machine": platform.processor(), "suites": {}}
    for suite in options.suites:
        if suite == "step":
            found = step_alone(options.folder, options.layers, options.rounds)
        else:
            found = compare(suite, options)
        report["suites"][suite] = found
        ratio = found["ratio"]
        print(f"{suite:<16}{ratio['median']:.3f}   {ratio['low']:.3f} - {ratio['high']:.3f}")
        for key, value in found.items():
            if isinstance(value, (int, float)):
                print(f"  {key:<32}{value:.4g}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
