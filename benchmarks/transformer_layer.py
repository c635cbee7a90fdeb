"""The transformer layer and the loss over a vocabulary, against plain torch: time, bytes kept, peak memory.

    python -m benchmarks.transformer_layer --hidden 256 --length 128 --rounds 8
    python -m benchmarks.transformer_layer --device cuda --dtype bf16 --hidden 1024 --length 512 --batch 16

The two take turns as A B B A in one process. Ratios of time are plain torch's over ours: above 1 we are faster; ratios
of bytes are ours over plain torch's. Suites, each a forward and a backward:

    layer       no option, against the layer in plain torch, dropout in both
    options     normalize_invertible, gelu_checkpoint and attn_dropout_checkpoint, against the same
    stochastic  stochastic_mode, against the same with scaled_dot_product_attention
    compiled    no option, against torch.compile of the plain layer (left out unless asked for)
    loss        linear_cross_entropy, against logits and cross_entropy
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.op_cases import Step
from benchmarks.ops import DTYPES, seconds_of
from benchmarks.ratios import TURNS, bootstrap, round_ratio
from zero_strategy import ops
from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer
from zero_strategy.sequence.tiling import linear_cross_entropy

SUMMARY = "The transformer layer and the loss over a vocabulary, against plain torch."
SAVING = {"normalize_invertible": True, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}
SUITES = ("layer", "options", "stochastic", "compiled", "loss")


@dataclass(frozen=True)
class Sizes:
    """Of what is measured.

    Attributes:
        batch: Sequences.
        length: Tokens of each.
        hidden: Width.
        heads: Attention heads.
        dropout: Of attention probabilities and of outputs.
        vocabulary: Classes of the loss.
        device: "cpu" or "cuda".
        dtype: Of weights and inputs.
    """

    batch: int
    length: int
    hidden: int
    heads: int
    dropout: float
    vocabulary: int
    device: str
    dtype: torch.dtype


class PlainLayer(nn.Module):
    """The pre-norm layer as it is written in plain torch; `fused`: attention by scaled_dot_product_attention."""

    def __init__(self, sizes: Sizes, fused: bool = False) -> None:
        super().__init__()
        width = sizes.hidden
        self.heads, self.p, self.fused = sizes.heads, sizes.dropout, fused
        self.norm, self.attention_norm = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.out(self.attend(self.qkv(self.norm(x)))), self.p)
        out: Tensor = x + F.dropout(self.down(F.gelu(self.up(self.attention_norm(x)))), self.p)
        return out

    def attend(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            output = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        else:
            scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
            output = F.dropout(scores.softmax(-1), self.p) @ v
        return output.transpose(1, 2).flatten(2)


def our_layer(sizes: Sizes, options: dict[str, Any]) -> TransformerLayer:
    config = TransformerConfig(
        hidden_size=sizes.hidden, heads=sizes.heads, attn_dropout_ratio=sizes.dropout,
        hidden_dropout_ratio=sizes.dropout, num_hidden_layers=24, **options,
    )  # fmt: skip
    return TransformerLayer(config).to(sizes.device, sizes.dtype)


def layer_step(layer: Callable[[Tensor], Tensor], sizes: Sizes) -> tuple[Step, Callable[[], Tensor]]:
    """A forward and a backward; and the forward alone."""
    shape = (sizes.batch, sizes.length, sizes.hidden)
    x = torch.randn(shape, device=sizes.device, dtype=sizes.dtype).requires_grad_()
    gradient = torch.randn_like(x)

    def forward() -> Tensor:
        return layer(x)

    def step() -> None:
        forward().backward(gradient)

    return step, forward


def loss_steps(sizes: Sizes) -> tuple[Step, Step]:
    """Plain torch's, and ours."""
    generator = torch.Generator().manual_seed(0)
    tokens = sizes.batch * sizes.length
    made = (torch.randn(rows, sizes.hidden, generator=generator) for rows in (tokens, sizes.vocabulary))
    hidden, weight = (tensor.to(sizes.device, sizes.dtype).requires_grad_() for tensor in made)
    target = torch.randint(sizes.vocabulary, (tokens,), generator=generator).to(sizes.device)

    def plain() -> None:
        torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), target), (hidden, weight))

    def ours() -> None:
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))

    return plain, ours


def kept_bytes(forward: Callable[[], Tensor], module: nn.Module) -> int:
    """Of all storages that a forward saves for backward, parameters left out; each counts once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def peak_bytes(step: Step, device: str) -> int:
    """The most that is allocated during a step, beside what there was before, as torch's allocators count it."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    changes = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    return peak


def contenders(suite: str, sizes: Sizes) -> tuple[Step, Step, dict[str, int]]:
    """Plain torch's step, ours, and bytes that were measured of both."""
    if suite == "loss":
        steps = loss_steps(sizes)
        return *steps, dict(zip(("peak_plain", "peak_ours"), (peak_bytes(step, sizes.device) for step in steps)))
    options: dict[str, Any] = {"options": SAVING, "stochastic": {"stochastic_mode": True}}.get(suite, {})
    mine = our_layer(sizes, options)
    plain = PlainLayer(sizes, fused=suite == "stochastic").to(sizes.device, sizes.dtype)
    (plain_step, plain_forward), (step, forward) = layer_step(plain, sizes), layer_step(mine, sizes)
    if suite == "compiled":
        plain_step, _ = layer_step(torch.compile(plain), sizes)
    kept = {"kept_plain": kept_bytes(plain_forward, plain), "kept_ours": kept_bytes(forward, mine)}
    return plain_step, step, kept


def measure(suite: str, sizes: Sizes, rounds: int, block_steps: int) -> dict[str, Any]:
    plain, ours, memory = contenders(suite, sizes)
    steps = {"A": plain, "B": ours}
    for step in steps.values():
        seconds_of(step, sizes.device, 3)
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    ratios = []
    for _ in range(rounds):
        blocks = []
        for turn in TURNS:
            blocks.append(seconds_of(steps[turn], sizes.device, block_steps))
            seconds[turn] += blocks[-1]
        ratios.append(round_ratio(blocks))
    return {
        "suite": suite,
        "ratio": asdict(bootstrap(ratios)),
        "seconds_plain": statistics.median(seconds["A"]),
        "seconds_ours": statistics.median(seconds["B"]),
        **memory,
    }


def show(results: Sequence[dict[str, Any]]) -> str:
    """The table."""
    lines = [f"{'suite':<12}{'time':>8}{'95 % interval':>18}{'plain':>11}{'ours':>11}{'bytes':>9}  of"]
    for entry in results:
        ratio = entry["ratio"]
        kind = "peak" if "peak_ours" in entry else "kept"
        share = entry[f"{kind}_ours"] / entry[f"{kind}_plain"]
        lines.append(
            f"{entry['suite']:<12}{ratio['median']:>8.3f}{ratio['low']:>10.3f} - {ratio['high']:.3f}"
            f"{entry['seconds_plain'] * 1e3:>9.1f}ms{entry['seconds_ours'] * 1e3:>9.1f}ms{share:>9.3f}  {kind}, plain "
            f"{entry[f'{kind}_plain'] / 1e6:.1f} MB"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformer_layer", description=SUMMARY)
    parser.add_argument("--suites", nargs="*", choices=SUITES, default=[name for name in SUITES if name != "compiled"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=0, help="default: of 64")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="of A B B A")
    parser.add_argument("--block-steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sizes = Sizes(
        options.batch, options.length, options.hidden, options.heads or max(1, options.hidden // 64), options.dropout,
        options.vocabulary, options.device, DTYPES[options.dtype],
    )  # fmt: skip
    print(sizes)
    print(ops.ensure(options.device))
    results = [measure(suite, sizes, options.rounds, options.block_steps) for suite in options.suites]
    print(show(results))
    if options.out:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        options.out.write_text(json.dumps({"options": str(options), "machine": machine, "suites": results}, indent=1))
    return results


if __name__ == "__main__":
    main()
