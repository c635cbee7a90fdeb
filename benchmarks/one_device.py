"""Training steps of one process on one device: against plain torch, and with state in host memory against others'.

    python -m benchmarks.one_device --device cuda --model transformer-1b --rows 16 --length 1024 \\
        --pairs zero0:plain,zero1:plain,zero0-low:plain-low,zero3-offload:fsdp2-offload --out one_device.json

    plain               torch alone with AdamW(fused=True) and clip_grad_norm_; in bf16 fp32 weights under autocast
    plain-low           the same in bf16 with bf16 weights and state, without master weights
    zero0 ... zero3     ours; in bf16 with fp32 master weights, gradients and state
    zero0-low ...       the same without master weights, gradients and state in bf16
    zero2-optimizer     ours at any stage, the optimizer's state in host memory
    zero3-offload       ours, the optimizer's state and the parameters in host memory
    zero3-nvme          ours, both in files in --folder
    fsdp2-offload       fully_shard of every block and the root with CPUOffloadPolicy, AdamW(fused=True) on the CPU
    deepspeed3-offload  DeepSpeed's stage 3 with its AdamW, offload_optimizer and offload_param on cpu

A pair takes turns as A B B A; the ratio is the second's time over the first's: above 1 the first is faster. Before that
each trains by itself, for the bytes it takes on a GPU at the peak and for the losses, whose largest difference is told.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, and not listed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.gpt import GPT, SIZES, build, loss_fn
from benchmarks.ratios import TURNS, bootstrap, round_ratio
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

PAIRS = "zero0:plain,zero1:plain,zero0-low:plain-low,zero2:zero2-optimizer,zero3-offload:fsdp2-offload"
_ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
_MAX_NORM = 1.0


@dataclass(frozen=True)
class Work:
    """Model that all train."""

    model: str
    rows: int
    length: int
    precision: str
    device: torch.device
    folder: Path | None = None
    """For state in files; zero3-nvme needs it."""

    @property
    def low(self) -> bool:
        return self.precision == "bf16"

    def build(self) -> GPT:
        with self.device:  # a billion random numbers take seconds on the CPU
            return build(self.model, self.length)

    def data(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(SIZES[self.model].vocabulary, (self.rows, self.length + 1), generator=generator)
        return rows.to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Trained:
    """One contender: what differs between them of a step."""

    forward: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], None]
    """Backward, clipping, the optimizer's step, no gradients."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    steps: int = 0

    def step(self, work: Work) -> Tensor:
        rows = work.data(self.steps)
        self.steps += 1
        with self.context():
            loss = loss_fn(self.forward(rows[:, :-1]).float(), rows[:, 1:])
        self.finish(loss)
        return loss.detach()

    def seconds(self, work: Work) -> float:
        work.synchronize()
        start = time.perf_counter()
        self.step(work)
        work.synchronize()
        return time.perf_counter() - start


def make(name: str, work: Work) -> Trained:
    """Build a contender.

    Raises:
        ValueError: If there is none of this name.
    """
    kind, _, option = name.partition("-")
    if option == "low" and not work.low:
        raise ValueError(f"{name} is for --precision bf16")
    if kind == "plain" and option in ("", "low"):
        return _plain(work, low=option == "low")
    if kind in ("zero0", "zero1", "zero2", "zero3") and option in ("", "low", "optimizer", "offload", "nvme"):
        return _ours(work, int(kind[-1]), option)
    if name == "fsdp2-offload":
        return _fsdp2(work)
    if name == "deepspeed3-offload":
        return _deepspeed(work)
    raise ValueError(f"{name!r} is no contender; see --help")


def _finish(clip: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    def finish(loss: Tensor) -> None:
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()

    return finish


def _plain(work: Work, low: bool) -> Trained:
    model = work.build().to(work.device, torch.bfloat16 if low else None)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_ADAMW)
    finish = _finish(lambda: nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM), optimizer)
    if not work.low or low:
        return Trained(model, finish)
    return Trained(model, finish, lambda: torch.autocast(work.device.type, torch.bfloat16))


def _ours(work: Work, stage: int, option: str) -> Trained:
    both, place = ("optimizer", "parameters"), "nvme" if option == "nvme" else "cpu"
    moved = {"optimizer": both[:1], "offload": both, "nvme": both}.get(option, ())
    offload: dict[str, Any] = dict.fromkeys(moved, place)
    if option == "nvme":
        offload["nvme_path"] = [str(work.folder)]
    low = {"gradient_dtype": "parameter", "reduce_dtype": "gradient", "master_weights": False}
    config = load_config(stage=stage, offload=offload, precision=low if work.low and option == "low" else {})
    model = work.build()
    engine = ZeroEngine(model, config, compute_dtype=torch.bfloat16 if work.low else None, device=work.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_ADAMW)
    engine.attach(optimizer)
    return Trained(model, _finish(lambda: engine.clip_grad_norm_(_MAX_NORM), optimizer))


def _fsdp2(work: Work) -> Trained:
    model = work.build()
    offload = CPUOffloadPolicy(pin_memory=work.device.type == "cuda")
    settings: dict[str, Any] = {"mesh": init_device_mesh(work.device.type, (1,)), "offload_policy": offload}
    if work.low:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_ADAMW)
    return Trained(model, _finish(lambda: nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM), optimizer))


def _deepspeed(work: Work) -> Trained:
    os.environ |= {"DS_ACCELERATOR": work.device.type, "LOCAL_RANK": "0"}
    import deepspeed

    place = {"device": "cpu", "pin_memory": work.device.type == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": work.rows,
        "gradient_clipping": _MAX_NORM,
        "bf16": {"enabled": work.low},
        "optimizer": {"type": "AdamW", "params": _ADAMW},
        "zero_optimization": {"stage": 3, "offload_optimizer": place, "offload_param": place},
    }
    model = work.build()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )

    def finish(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Trained(engine, finish)


def alone(name: str, work: Work, steps: int) -> dict[str, Any]:
    """A contender by itself: its losses, and on a GPU the bytes that it takes at the peak."""
    gc.collect()
    gpu = work.device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(work.device)
    before = torch.cuda.memory_allocated(work.device) if gpu else 0
    contender = make(name, work)
    losses = [float(contender.step(work)) for _ in range(steps)]
    return {"losses": losses, "peak": torch.cuda.max_memory_allocated(work.device) - before if gpu else None}


def compare(first: str, second: str, work: Work, rounds: int, warmup: int) -> dict[str, Any]:
    """Both by themselves, then in turns."""
    single = {name: alone(name, work, warmup + 1) for name in (first, second)}
    gc.collect()
    both = {"A": make(first, work), "B": make(second, work)}
    for _ in range(warmup):
        for contender in both.values():
            contender.seconds(work)
    samples = [[both[turn].seconds(work) for turn in TURNS] for _ in range(rounds)]
    pairs = zip(single[first]["losses"], single[second]["losses"], strict=True)
    return {
        "first": first,
        "second": second,
        "ratio": asdict(bootstrap([1 / round_ratio([[seconds] for seconds in turns]) for turns in samples])),
        "seconds_first": statistics.median(seconds for turns in samples for seconds in (turns[0], turns[3])),
        "seconds_second": statistics.median(seconds for turns in samples for seconds in turns[1:3]),
        "peak_first": single[first]["peak"],
        "peak_second": single[second]["peak"],
        "largest difference of losses": max(abs(a - b) for a, b in pairs),
        "samples": samples,
    }


def show(found: dict[str, Any]) -> str:
    ratio, pair = found["ratio"], f"{found['second']} / {found['first']}"
    text = f"{pair:<34}{ratio['median']:.3f}   {ratio['low']:.3f} - {ratio['high']:.3f}"
    text += f"   {found['seconds_second']:.4f} s, {found['seconds_first']:.4f} s"
    if found["peak_first"]:
        text += f"   peak {found['peak_second'] / 2**30:.2f} GiB, {found['peak_first'] / 2**30:.2f} GiB"
    return text + f"   losses within {found['largest difference of losses']:.2g}"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print a line for each pair, write JSON."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_device", description=__doc__, formatter_class=raw)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", default=PAIRS, help="first:second,... (default: %(default)s)")
    parser.add_argument("--model", choices=SIZES, default="transformer-small")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for files, of zero3-nvme; default: a temporary directory")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device(options.device)
        shape = (options.model, options.rows, options.length, options.precision)
        return _measure(Work(*shape, device, options.folder or Path(folder)), options)


def _measure(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    gpu = work.device.type == "cuda"
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(work.device) if gpu else platform.processor(),
        "work": asdict(work) | {"device": options.device, "folder": str(work.folder)},
        "pairs": [],
    }
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        for pair in options.pairs.split(","):
            first, _, second = pair.partition(":")
            report["pairs"].append(compare(first, second, work, options.rounds, options.warmup))
            print(show(report["pairs"][-1]), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1))
    finally:
        dist.destroy_process_group()
    return report


if __name__ == "__main__":
    main()
