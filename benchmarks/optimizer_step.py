"""Time of an optimizer step on one process: ours, torch's and DeepSpeed's, and the roof of the memory.

    python -m benchmarks.optimizer_step --numel 100000000 --threads 2 --out optimizer.json

Suites, each a pair of contenders that take turns as A B B A in one process, on tensors of their own:

    roof    the bytes of AdamW (28 per parameter) over its time, against a loop that reads four float32 streams and
            writes three (the figure is the roof's time over ours: 1 is the roof)
    copy    the same with the bf16 copy-out, 30 bytes per parameter
    torch   time of torch.optim.AdamW(fused=True) over ours: above 1 we are faster
    deepspeed   time of DeepSpeedCPUAdam over ours, where deepspeed is installed (pip install deepspeed)
    whole   the whole step from bf16 gradients, fp32 master weights and a loss scale: unscale, norm, finite check, clip,
            AdamW, bf16 copy-out; torch's (or DeepSpeed's) AdamW with clip_grad_norm_ and copy_ over ours
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ratios import TURNS, bootstrap, round_ratio
from zero_strategy import ops
from zero_strategy.optim import FusedAdamW

SUMMARY = "Time of an optimizer step on one process: ours, torch's and DeepSpeed's, and the roof of the memory."
Step = Callable[[], Any]
_SCALE = 1.0 / 1024
_MAX_NORM = 1.0


def tensors(numel: int, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """`count` tensors of together `numel` elements."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel // count, generator=generator).to(dtype) for _ in range(count)]


def parameters(numel: int, count: int) -> list[nn.Parameter]:
    made = [nn.Parameter(tensor) for tensor in tensors(numel, count)]
    for parameter, gradient in zip(made, tensors(numel, count), strict=True):
        parameter.grad = gradient
    return made


def roof(numel: int, count: int) -> Step:
    """The loop of roof.cpp over four lists of tensors."""
    if not hasattr(torch.ops.zero_strategy_roof, "pass_"):
        from torch.utils import cpp_extension

        cpp_extension.load(
            "zero_strategy_roof",
            [str(Path(__file__).parent / "roof.cpp")],
            extra_cflags=["-O3", "-march=native", "-DTORCH_TARGET_VERSION=0x020b000000000000"],
            build_directory=tempfile.mkdtemp(prefix="roof-"),
            is_python_module=False,
        )
    lists = [tensors(numel, count) for _ in range(4)]

    def step() -> None:
        for each in zip(*lists, strict=True):
            torch.ops.zero_strategy_roof.pass_(*each)

    return step


def ours(numel: int, count: int) -> Step:
    return FusedAdamW(parameters(numel, count)).step


def ours_with_copy(numel: int, count: int) -> Step:
    """fp32 gradients and master weights, bf16 parameters: 30 bytes per parameter."""
    params, grads, m, v = (tensors(numel, count) for _ in range(4))
    v = [tensor.abs_() for tensor in v]
    copies = tensors(numel, count, torch.bfloat16)
    hyper = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.01, 10, 1.0]] * count, dtype=torch.float64)
    return lambda: ops.adam_(params, grads, m, v, hyper, decoupled=True, copies=copies)


def torchs(numel: int, count: int) -> Step:
    return torch.optim.AdamW(parameters(numel, count), fused=True).step


def deepspeeds(numel: int, count: int) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    step: Step = DeepSpeedCPUAdam(parameters(numel, count), adamw_mode=True).step
    return step


def our_whole_step(numel: int, count: int) -> Step:
    params = [nn.Parameter(tensor) for tensor in tensors(numel, count, torch.bfloat16)]
    grads = tensors(numel, count, torch.bfloat16)
    for parameter, gradient in zip(params, grads, strict=True):
        parameter.grad = gradient
    optimizer = FusedAdamW(params)

    def step() -> None:
        sums, nonfinite = ops.grad_stats(grads)
        if not int(nonfinite.sum()):
            norm = float(sums.sum().sqrt()) * _SCALE
            optimizer.step(grad_scale=_SCALE * min(1.0, _MAX_NORM / (norm + 1e-6)))

    return step


def peers_whole_step(numel: int, count: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Step:
    """As a training script writes it: gradients to fp32, unscale, clip, look, step, copy the weights out."""
    low = tensors(numel, count, torch.bfloat16)
    low_grads = tensors(numel, count, torch.bfloat16)
    master = [nn.Parameter(tensor.float()) for tensor in low]
    weights = [parameter.detach() for parameter in master]
    grads = [torch.zeros_like(tensor) for tensor in weights]
    for parameter, gradient in zip(master, grads, strict=True):
        parameter.grad = gradient
    optimizer = make(master)

    def step() -> None:
        torch._foreach_copy_(grads, low_grads)
        torch._foreach_mul_(grads, _SCALE)
        norm = nn.utils.clip_grad_norm_(master, _MAX_NORM)
        if bool(torch.isfinite(norm)):
            optimizer.step()
            torch._foreach_copy_(low, weights)

    return step


def torchs_whole_step(numel: int, count: int) -> Step:
    return peers_whole_step(numel, count, lambda params: torch.optim.AdamW(params, fused=True))


def deepspeeds_whole_step(numel: int, count: int) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return peers_whole_step(numel, count, lambda params: DeepSpeedCPUAdam(params, adamw_mode=True))


SUITES: dict[str, tuple[Callable[[int, int], Step], Callable[[int, int], Step], float]] = {
    "roof": (roof, ours, 1.0),
    "copy": (roof, ours_with_copy, 30 / 28),
    "torch": (torchs, ours, 1.0),
    "deepspeed": (deepspeeds, ours, 1.0),
    "whole": (torchs_whole_step, our_whole_step, 1.0),
    "whole-deepspeed": (deepspeeds_whole_step, our_whole_step, 1.0),
}
"""Other, ours, and the bytes of ours over those of the other."""


def measure(suite: str, numel: int, count: int, rounds: int, steps: int) -> dict[str, Any]:
    other, mine, bytes_ratio = SUITES[suite]
    contenders = {"A": other(numel, count), "B": mine(numel, count)}
    for contender in contenders.values():
        for _ in range(3):
            contender()
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    ratios = []
    for _ in range(rounds):
        blocks = []
        for turn in TURNS:
            block = []
            for _ in range(steps):
                start = time.perf_counter()
                contenders[turn]()
                block.append(time.perf_counter() - start)
            blocks.append(block)
            seconds[turn] += block
        ratios.append(round_ratio(blocks) * bytes_ratio)
    return {
        "suite": suite,
        "ratio": asdict(bootstrap(ratios)),
        "seconds_other": statistics.median(seconds["A"]),
        "seconds_ours": statistics.median(seconds["B"]),
    }


def show(results: Sequence[dict[str, Any]], numel: int) -> str:
    """The table; a ratio above 1 means that ours is faster (roof, copy: 1 is the roof)."""
    lines = [f"{'suite':<16}{'ratio':>8}{'95 % interval':>18}{'other':>11}{'ours':>11}{'ours, ns per parameter':>25}"]
    for entry in results:
        ratio = entry["ratio"]
        interval = f"{ratio['low']:.3f} - {ratio['high']:.3f}"
        lines.append(
            f"{entry['suite']:<16}{ratio['median']:>8.3f}{interval:>18}{entry['seconds_other'] * 1e3:>9.1f}ms"
            f"{entry['seconds_ours'] * 1e3:>9.1f}ms{entry['seconds_ours'] / numel * 1e9:>25.3f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_step", description=SUMMARY)
    parser.add_argument("--suites", nargs="*", choices=SUITES, default=["roof", "copy", "torch", "whole"])
    parser.add_argument("--numel", type=int, default=100_000_000, help="parameters")
    parser.add_argument("--tensors", type=int, default=1, help="number of tensors that hold them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="of A B B A")
    parser.add_argument("--block-steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(f"{options.numel / 1e6:g} M parameters in {options.tensors} tensor(s), {options.threads} threads")
    print(ops.ensure("cpu"))
    results = [
        measure(suite, options.numel, options.tensors, options.rounds, options.block_steps) for suite in options.suites
    ]
    print(show(results, options.numel))
    if options.out:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        options.out.write_text(json.dumps({"options": str(options), "machine": machine, "suites": results}, indent=1))
    return results


if __name__ == "__main__":
    main()
