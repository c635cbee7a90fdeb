"""States of 8 bits against 32: time of a step, bytes, and the loss of a small training, of bitsandbytes' AdamW8bit too.

python -m benchmarks.state_bits --numel 16000000 --rounds 8 --steps 300 --out state_bits.json

time     of FusedAdamW(state_bits=8) over FusedAdamW, which take turns as A B B A; from float32 gradients, and with
         bf16 parameters (gradients and the copy in bf16)
bytes    of states per parameter
loss     means of the last 20 losses over those of 32 bits: ours, and bitsandbytes' where it is installed
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.ratios import TURNS, bootstrap, round_ratio
from zero_strategy.optim import FusedAdamW

SUMMARY = "States of 8 bits against 32: time of a step, bytes, and the loss of a small training."
_LAST = 20


def stepper(numel: int, dtype: torch.dtype, bits: int) -> FusedAdamW:
    """An optimizer over eight tensors with gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(numel // 8, generator=generator).to(dtype)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn(numel // 8, generator=generator).to(dtype)
    return FusedAdamW(parameters, state_bits=bits)


def step_ratio(numel: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time with 8 bits over that with 32."""
    contenders = {"A": stepper(numel, dtype, 8), "B": stepper(numel, dtype, 32)}
    for optimizer in contenders.values():
        optimizer.step()
    found, seconds = [], dict[str, list[float]](A=[], B=[])
    for _ in range(rounds):
        blocks = []
        for turn in TURNS:
            block = [timed(contenders[turn].step) for _ in range(3)]
            seconds[turn] += block
            blocks.append(block)
        found.append(round_ratio(blocks))
    nanoseconds = {turn: 1e9 * statistics.median(each) / numel for turn, each in seconds.items()}
    ratio = bootstrap(found)
    return {
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "ns per parameter, 8 bits": nanoseconds["A"],
        "ns per parameter, 32 bits": nanoseconds["B"],
    }


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def state_bytes(bits: int) -> float:
    """Bytes of states per parameter of float32."""
    optimizer = stepper(1 << 20, torch.float32, bits)
    optimizer.step()
    found = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return float(sum(value.nbytes for value in found) / (1 << 20))


def losses(make: Callable[[Iterable[Tensor]], Optimizer], steps: int, seed: int) -> list[float]:
    """Of a small training: a student of three layers, and a teacher."""
    torch.manual_seed(seed)
    student = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16))
    optimizer, generator, found = make(student.parameters()), torch.Generator().manual_seed(seed), list[float]()
    for _ in range(steps):
        x = torch.randn(128, 64, generator=generator)
        loss = (student(x) - teacher(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def loss_ratios(steps: int) -> dict[str, float]:
    """Means of last losses over those of 32 bits, in the mean over three seeds."""
    makers: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
        "8 bits": lambda p: FusedAdamW(p, lr=1e-3, state_bits=8)
    }
    if find_spec("bitsandbytes") is not None:
        theirs = import_module("bitsandbytes").optim.AdamW8bit
        makers["bitsandbytes AdamW8bit"] = lambda p: theirs(p, lr=1e-3, weight_decay=0.01)
    found: dict[str, list[float]] = {name: [] for name in makers}
    for seed in range(3):
        full = statistics.mean(losses(lambda p: FusedAdamW(p, lr=1e-3), steps, seed)[-_LAST:])
        for name, make in makers.items():
            found[name].append(statistics.mean(losses(make, steps, seed)[-_LAST:]) / full)
    return {name: statistics.mean(each) for name, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_bits", description=SUMMARY)
    parser.add_argument("--numel", type=int, default=16_000_000, help="parameters of a timed step")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of A B B A")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="of the training")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = {
        "time, float32": step_ratio(options.numel, options.rounds, torch.float32),
        "time, bfloat16": step_ratio(options.numel, options.rounds, torch.bfloat16),
        "bytes of states per parameter": {str(bits): state_bytes(bits) for bits in (8, 32)},
        "loss over that of 32 bits": loss_ratios(options.steps),
    }
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
