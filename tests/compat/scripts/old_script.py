"""A script as people wrote them for DeepSpeed 0.3: it knows `deepspeed` by what it was given under that name."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES, WIDTH, SEED = 96, 6, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Gives the loss itself, as the models of such scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float(), y)


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Net()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(SEED)
    return TensorDataset(
        torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )


def parse(deepspeed: Any, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save")
    parser.add_argument("--resume")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args(argv)


def main(deepspeed: Any, argv: list[str]) -> dict[str, Any]:
    """Train for `--steps` micro-batches; what there is to see of the run."""
    args = parse(deepspeed, argv)
    model = net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data()
    )
    start = 0
    if args.resume:
        path, client_state = engine.load_checkpoint(args.resume)
        assert path is not None
        start = client_state["micro_step"]
    losses, rates = [], []
    for step, (x, y) in enumerate(loader):
        if not start <= step < start + args.steps:
            continue
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates.append(engine.get_lr()[0])
    if args.save:
        engine.save_checkpoint(args.save, client_state={"micro_step": start + args.steps})
    return {
        "losses": losses,
        "rates": rates,
        "norm": engine.get_global_grad_norm(),
        "steps": (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps),
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__,
        "engine": engine,
    }


if __name__ == "__main__":  # under a launcher
    import sys

    import zero_strategy.compat.deepspeed

    torch.set_num_threads(1)
    result = main(zero_strategy.compat.deepspeed, sys.argv[1:])
    if torch.distributed.get_rank() == 0:
        print("result:", [round(loss, 6) for loss in result["losses"]])
    torch.distributed.destroy_process_group()
