"""Train the byte-level GPT on a cluster, in a loop of one's own: started anew, it goes on from its last checkpoint.

``torchrun --nnodes 1:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/cluster_gpt.py
--folder /shared/run``

Also under srun, and as one process. The number of ranks may change from start to start: a step is always the same
``--batch-size`` windows, divided among the ranks there are. ``examples/cluster/`` has scripts and manifests for it.
"""

import argparse
import json
import math
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpt_model import GPT, GPTConfig
from stdlib_data import RandomWindows, read_corpus
from zero_strategy.comm.process_group import init_distributed
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

LOSSES = "losses.jsonl"
"""In the folder: a line for every step, in nats; a step that was repeated after a restart has two."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints and losses; all hosts see it")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--replicate", type=int, default=1, help="copies of the sharded state, such as one per host")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps, of all starts together")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="losses are exchanged so often")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of a step, of all ranks together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="bf16 weights with fp32 master weights")
    parser.add_argument("--text", type=Path, help="folder of *.py files (default: the standard library)")
    parser.add_argument("--timeout-seconds", type=float, default=600.0, help="for which a silent rank is waited for")
    for name, size in (("block-size", 128), ("n-layer", 4), ("n-head", 6), ("d-model", 192)):
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(argv)


def device_here() -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def rows_of(batch_size: int, rank: int, ranks: int) -> range:
    """The windows of a step that are this rank's.

    Raises:
        ValueError: If they cannot be divided evenly, so that the mean over ranks would not be that over windows.
    """
    if batch_size % ranks:
        raise ValueError(f"--batch-size {batch_size} is no multiple of the {ranks} ranks; take one that always is")
    own = batch_size // ranks
    return range(rank * own, (rank + 1) * own)


def main(argv: list[str] | None = None) -> float:
    """Train from the last checkpoint on, and save; the last step's mean loss (NaN if nothing was left to do)."""
    args = parse(argv)
    init_distributed(timeout=timedelta(seconds=args.timeout_seconds))
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), device_here()
    rows = rows_of(args.batch_size, rank, ranks)
    torch.manual_seed(1234)
    model = GPT(GPTConfig(args.block_size, args.n_layer, args.n_head, args.d_model))
    windows = RandomWindows(read_corpus(args.text).train, args.steps * args.batch_size, args.block_size, seed=1234)
    config = load_config(
        stage=args.stage,
        mesh={"replicate": args.replicate},
        checkpoint={"keep_last": 2, "timeout_seconds": args.timeout_seconds},
        timeout_seconds=args.timeout_seconds,
        barrier_seconds=min(args.timeout_seconds, 60.0),
    )
    mean = math.nan
    losses: list[torch.Tensor] = []
    with ZeroEngine(model, config, compute_dtype=torch.bfloat16 if args.bf16 else None, device=device) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        engine.attach(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 40, 1.0))
        _, state = engine.load_checkpoint(args.folder, lr_scheduler=schedule)
        first = int(state.get("step", 0))
        if rank == 0:
            print(f"{ranks} ranks go on after step {first}", flush=True)
        step = first

        def save() -> None:
            engine.save_checkpoint(args.folder, client_state={"step": step}, lr_scheduler=schedule)

        # SIGTERM to any rank: all save and leave with exit code 143. SIGUSR1: they save and go on.
        with engine.save_on_signal(args.folder, save=save, at_call=True) as boundary:
            for number in range(first, args.steps):
                batch = torch.stack([windows[number * args.batch_size + row] for row in rows]).to(device)
                loss = model.loss(batch)
                loss.backward()
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step = number + 1
                losses.append(loss.detach())
                if step % args.log_every == 0 or step == args.steps:
                    mean = report(losses, step, args.folder)
                    losses.clear()
                if step % args.save_every == 0 or step == args.steps:
                    save()
                boundary()
    return mean


def report(losses: list[torch.Tensor], step: int, folder: Path) -> float:
    """Means over ranks of the last steps' losses, which rank 0 writes down; prints and returns that of `step`."""
    total, ranks = torch.stack(losses).double(), dist.get_world_size()
    dist.all_reduce(total)
    means: list[float] = (total / ranks).tolist()
    if dist.get_rank() == 0:
        print(f"step {step:5}  {means[-1] / math.log(2):.4f} bits per byte", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOSSES, "a") as file:
            for number, mean in enumerate(means, step - len(means) + 1):
                file.write(json.dumps({"step": number, "loss": mean, "ranks": ranks}) + "\n")
    return means[-1]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
