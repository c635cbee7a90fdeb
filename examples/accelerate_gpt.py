"""Train the byte-level GPT in a loop under Hugging Face Accelerate, sharded by ZeRO.

``accelerate launch --config_file configs/accelerate/cpu2.yaml examples/accelerate_gpt.py --steps 60``

Every optimizer step accumulates the gradients of several micro-batches. The run saves a checkpoint at its end, and goes
on from one with ``--resume DIR``, under any other stage and number of processes.
"""

import argparse
import math
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpt_model import GPT, GPTConfig
from stdlib_data import RandomWindows, read_corpus
from zero_strategy import ZeroAccelerator


class Progress:
    """The number of optimizer steps taken; registered with the accelerator, it travels in each checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class LanguageModel(nn.Module):
    """The GPT with its loss as ``forward``, which is the call that a prepared model is made for."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)

    def forward(self, windows: Tensor) -> Tensor:
        return self.gpt.loss(windows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="of ZeRO")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per process and micro-batch")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), help="default: the launcher's")
    parser.add_argument("--save", type=Path, default=Path("outputs/accelerate"))
    parser.add_argument("--resume", type=Path)
    for name, size in (("block-size", 64), ("n-layer", 2), ("n-head", 4), ("d-model", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[float]:
    """Train and save; the loss of each step over all processes, in bits per byte."""
    args = parse(argv)
    accelerator = ZeroAccelerator(
        zero_config={"stage": args.stage},
        gradient_accumulation_steps=args.accumulate,
        mixed_precision=args.mixed_precision,
        step_scheduler_with_optimizer=False,  # the schedule counts optimizer steps, for any number of processes
    )
    set_seed(1234)
    model = LanguageModel(GPTConfig(args.block_size, args.n_layer, args.n_head, args.d_model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0))
    windows = RandomWindows(read_corpus().train, 2**20, args.block_size, seed=1234)
    loader = DataLoader(windows, args.batch_size)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(str(args.resume))
    micro_batches = args.steps * args.accumulate
    remaining = accelerator.skip_first_batches(loader, progress.steps * args.accumulate)

    losses: list[float] = []
    total = torch.zeros((), device=accelerator.device)
    for batch in islice(remaining, micro_batches):
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)  # divides by the number of micro-batches
            total += loss.detach() / args.accumulate
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
            progress.steps += 1
            losses.append(accelerator.reduce(total, reduction="mean").item() / math.log(2))
            accelerator.print(f"step {progress.steps:5}  {losses[-1]:.4f} bits per byte")
            total.zero_()

    accelerator.save_state(str(args.save))
    accelerator.wait_for_saves()  # it is written in the background
    accelerator.print(f"checkpoint: {args.save}")
    return losses


if __name__ == "__main__":
    main()
