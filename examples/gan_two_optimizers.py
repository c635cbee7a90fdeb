"""Train a small GAN under Lightning: two optimizers, stepped by hand, each on its own half of one sharded module.

``python examples/gan_two_optimizers.py --strategy zero3 --devices 2 --steps 300``

The generator learns to turn noise into points on a ring. The figure of merit is the mean distance of what it makes
from the ring. Goes on from a checkpoint with ``--resume FILE``, under any other strategy and number of devices.
"""

import argparse
import math
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy  # noqa: F401 - makes "zero1", "zero2" and "zero3" known to Lightning

NOISE = 8
RADIUS = 2.0


def ring(count: int, seed: int) -> Tensor:
    """Points near a circle."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = RADIUS + 0.05 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def perceptron(n_in: int, width: int, n_out: int) -> nn.Sequential:
    """Two hidden layers."""
    hidden = [nn.Linear(n_in, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()]
    return nn.Sequential(*hidden, nn.Linear(width, n_out))


class GAN(LightningModule):
    """A generator and a discriminator with the non-saturating loss."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.automatic_optimization = False
        self.generator = perceptron(NOISE, width, 2)
        self.discriminator = perceptron(2, width, 1)
        self.distances: list[float] = []

    def setup(self, stage: str) -> None:
        """Let each rank draw noise of its own; the weights are there already, and equal."""
        torch.manual_seed(torch.initial_seed() + self.global_rank)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0]
        for_generator, for_discriminator = self.optimizers()  # type: ignore[attr-defined]
        noise = torch.randn(len(real), NOISE, device=self.device)

        self.toggle_optimizer(for_discriminator)  # the generator's parameters need no gradients in here
        fake = self.generator(noise).detach()
        loss = softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake)).mean()
        self.manual_backward(loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)

        self.toggle_optimizer(for_generator)
        fake = self.generator(noise)
        self.manual_backward(softplus(-self.discriminator(fake)).mean())
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        distance = (fake.detach().norm(dim=1) - RADIUS).abs().mean()
        self.log_dict({"discriminator_loss": loss.detach(), "distance": distance}, prog_bar=True)
        self.distances.append(float(distance))

    def configure_optimizers(self) -> list[Adam]:
        parts = (self.generator, self.discriminator)
        return [Adam(part.parameters(), lr=self.lr, betas=(0.5, 0.99)) for part in parts]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3", help="zero1, zero2, zero3, or any other of Lightning's")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300, help="batches, those before --resume included")
    parser.add_argument("--batch-size", type=int, default=128, help="points per rank")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save", type=Path, default=Path("outputs/gan/last.ckpt"))
    parser.add_argument("--resume", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[float]:
    """Train and save; this rank's distance from the ring in each step."""
    args = parse(argv)
    seed_everything(1234)
    trainer = Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=2 * args.steps,  # Lightning counts the steps of every optimizer
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(ring(2**14, seed=1)), args.batch_size, shuffle=True, drop_last=True)
    module = GAN(args.width, args.lr)
    trainer.fit(module, loader, ckpt_path=args.resume)
    trainer.save_checkpoint(args.save, weights_only=False)
    if trainer.is_global_zero and module.distances:
        first, last = module.distances[0], module.distances[-1]
        print(f"distance from the ring: {first:.3f} at first, {last:.3f} in the end; checkpoint: {args.save}")
    return module.distances


if __name__ == "__main__":
    main()
