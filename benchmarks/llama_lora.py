"""Fine-tuning a Llama with LoRA on one device: tokens per second, and the share of the device's peak.

    python -m benchmarks.llama_lora --shape 8b --length 4096 --device cuda --out lora.json

Weights are random, in bf16 (fp32 on the CPU), with adapters of rank 8 at all linear layers of the attention; one row of
`--length` tokens is a step: forward, backward, clipping, AdamW. Plain torch comes first and last, ours in between, each
by itself. A token costs 4 floating-point operations per parameter: forward, and the gradients of activations; those of
frozen weights are not computed. The peak is that of dense bf16 products (989 TFLOP/s for an H100, SXM).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, and not listed

from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64,
    },
}  # fmt: skip
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MAX_NORM = 1.0


def build(shape: str, length: int, device: torch.device, recompute: bool) -> Any:
    """The model with its adapters, on the device."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    options = SHAPES[shape] | {"attn_implementation": "sdpa"}
    config = LlamaConfig(**options, max_position_embeddings=length, use_cache=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=_TARGETS))
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def step_of(model: nn.Module, stage: int | None, device: torch.device, length: int) -> Callable[[], float]:
    """One training step; it returns the loss. Stage None: plain torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = None if stage is None else ZeroEngine(model, load_config(stage=stage), device=device)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if engine is not None:
        engine.attach(optimizer)
    vocabulary: int = model.config.vocab_size  # type: ignore[assignment,union-attr]
    rows = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1)).to(device)

    def step() -> float:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        if engine is None:
            nn.utils.clip_grad_norm_(trained, _MAX_NORM)
        else:
            engine.clip_grad_norm_(_MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def seconds_of(step: Callable[[], float], device: torch.device) -> float:
    """Wall time of a step, the device's work included; reading the loss waits for it."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def alone(stage: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """A contender by itself: two such models would not fit an 80 GB device."""
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = build(options.shape, options.length, device, options.recompute)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = step_of(model, stage, device, options.length)
    losses = [step() for _ in range(3)]
    seconds = [seconds_of(step, device) for _ in range(options.rounds)]
    tokens = options.length / statistics.median(seconds)
    return {
        "stage": stage,
        "parameters": parameters,
        "tokens_per_second": tokens,
        "tflops": 4 * parameters * tokens / 1e12,
        "share_of_peak": 4 * parameters * tokens / 1e12 / options.peak_tflops,
        "losses": losses,
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if gpu else None,
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print a line per stage, write JSON."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_lora", description=__doc__, formatter_class=raw)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--rounds", type=int, default=6, help="steps that count (default: %(default)s)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of transformers, in both")
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    backend = "cpu:gloo,cuda:nccl" if options.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    rows = []
    try:
        for stage in (None, *map(int, options.stages.split(",")), None):  # plain torch twice: how far it wanders
            rows.append(alone(stage, options))
            row, name = rows[-1], "plain torch" if stage is None else f"stage {stage}"
            peak = f", peak {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else ""
            print(
                f"{name:<12}{row['tokens_per_second']:>9,.0f} tokens/s{row['tflops']:>8.1f} TFLOP/s"
                f"{100 * row['share_of_peak']:>6.1f} % of {options.peak_tflops:g}{peak}   losses {row['losses']}",
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    finally:
        dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
