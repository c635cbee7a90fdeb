"""Train the byte-level GPT in a loop of one's own under Fabric, sharded by ZeRO.

``python examples/fabric_gpt.py --strategy zero3 --devices 2 --steps 100``

Saves a checkpoint at the end, and goes on from it with ``--resume DIR``, under any other stage and number of ranks.
"""

import argparse
import math
from itertools import islice
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader

import zero_strategy  # noqa: F401 - makes "zero1", "zero2" and "zero3" known to Fabric
from gpt_lightning import decay_groups
from gpt_model import GPT, GPTConfig
from stdlib_data import RandomWindows, read_corpus

MICRO_BATCHES = 2
"""Micro-batches per optimizer step."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3", help="zero1, zero2, zero3, or any other of Fabric's")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank and micro-batch")
    parser.add_argument("--save", type=Path, default=Path("outputs/fabric"))
    parser.add_argument("--resume", type=Path)
    for name, size in (("block-size", 128), ("n-layer", 4), ("n-head", 6), ("d-model", 192)):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> float:
    """Train and save; the last step's loss over all ranks, in bits per byte."""
    args = parse(argv)
    fabric = Fabric(
        accelerator=args.accelerator, devices=args.devices, strategy=args.strategy, precision=args.precision
    )
    fabric.launch()  # starts this script once more for every further rank
    seed_everything(1234)
    with fabric.init_module():
        model = GPT(GPTConfig(args.block_size, args.n_layer, args.n_head, args.d_model))
    optimizer = torch.optim.AdamW(decay_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.95))
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("loss")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 40, 1.0))

    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if args.resume:
        fabric.load(args.resume, state)
    first, last = int(state["step"]), int(state["step"]) + args.steps
    windows = RandomWindows(read_corpus().train, 2**20, args.block_size, seed=1234)
    loader = fabric.setup_dataloaders(DataLoader(windows, args.batch_size))
    batches = islice(loader, first * MICRO_BATCHES, None)

    bits = math.nan
    for step in range(first, last):
        total = torch.zeros((), device=fabric.device)
        for part in range(MICRO_BATCHES):
            with fabric.no_backward_sync(model, enabled=part < MICRO_BATCHES - 1):
                loss = model.loss(next(batches)) / MICRO_BATCHES
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = fabric.all_reduce(total)
        assert isinstance(mean, torch.Tensor)
        bits = mean.item() / math.log(2)
        fabric.print(f"step {step + 1:5}  {bits:.4f} bits per byte")

    state["step"] = last
    fabric.save(args.save, state)
    fabric.print(f"checkpoint: {args.save}")
    return bits


if __name__ == "__main__":
    main()
