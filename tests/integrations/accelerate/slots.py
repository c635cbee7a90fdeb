"""A training in slots by a `ZeroAccelerator`: the samples, model and steps of `tests.reproducible.training`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from tests.integrations.accelerate.training import fresh_state
from tests.reproducible.samples import Masked, Samples, collate
from tests.reproducible.training import ROWS, SEED, build, digest_of
from zero_strategy.integrations.accelerate import ZeroAccelerator


@dataclass
class Trained:
    """Results of a training; equal on all ranks, and at any number of them.

    Attributes:
        digest: Of weights and states.
        losses: Means over the slots of a step.
        norms: Of gradients, by step.
        rates: Learning rates, by step.
    """

    digest: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def accelerator_of(slots: int, zero: dict[str, Any], **keywords: Any) -> ZeroAccelerator:
    return ZeroAccelerator(zero_config={**zero, "reproducible": {"slots": slots, "seed": SEED}}, **keywords)


@dataclass
class Script:
    """Objects of a script."""

    accelerator: ZeroAccelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    noisy: bool

    @classmethod
    def of(cls, slots: int, zero: dict[str, Any], steps: int = 3, shuffle: bool = False, **keywords: Any) -> Script:
        """Shuffled: of a number of samples that fills no whole step, changed at random, with a schedule and noise."""
        accelerator, model = accelerator_of(slots, zero, **keywords), build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data: Any = Samples(slots, steps)
        loader: Any = DataLoader(data, batch_size=ROWS)
        if shuffle:
            data = Masked(Subset(data, range(3, len(data))))
            loader = DataLoader(data, batch_size=ROWS, shuffle=True, collate_fn=collate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if shuffle else 1.0)
        return cls(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler), shuffle)

    def run(self, into: Trained, batches: Any = None, stop_after: int = 1 << 30) -> None:
        """An epoch, or what is left of it, or some steps of it."""
        accelerator, engine, own, done = self.accelerator, self.accelerator.engine(self.model), [], 0
        for tokens in self.loader if batches is None else batches:
            with accelerator.accumulate(self.model):
                weight = torch.rand(()) + 0.5 if self.noisy else 1.0  # drawn before the forward
                loss = self.model(tokens) * weight
                accelerator.backward(loss)
                own.append(loss.detach())
                if accelerator.sync_gradients:
                    into.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                into.losses.append(float(engine.slots.mean(own)))
                into.rates.append(float(self.scheduler.get_last_lr()[0]))
                own, done = [], done + 1
                if done == stop_after:
                    return

    def finish(self, into: Trained) -> Trained:
        into.digest = digest_of(self.accelerator.engine(self.model))
        return into


def train_slots(slots: int, zero: list[dict[str, Any]], epochs: int = 1, **keywords: Any) -> list[Trained]:
    """One training for each config."""
    torch.set_num_threads(1)
    found = []
    for config in zero:
        with fresh_state():
            script, into = Script.of(slots, config, **keywords), Trained()
            for _ in range(epochs):
                script.run(into)
            found.append(script.finish(into))
    return found


def train_and_save(slots: int, zero: dict[str, Any], folder: str, then: list[int], first: int) -> Trained:
    """Some steps of two epochs of three: from the beginning or a checkpoint on, each part saved.

    Args:
        slots: Of a step.
        zero: The config.
        folder: Of checkpoints, by number of steps.
        then: Steps at which to save; the last one ends.
        first: Steps that were taken before.
    """
    torch.set_num_threads(1)
    with fresh_state():
        script, into, steps_per_epoch = Script.of(slots, zero, shuffle=True), Trained(), 3
        accelerator, done = script.accelerator, first
        if first:
            accelerator.load_state(f"{folder}/{first}")
        for until in then:
            while done < until:
                epoch, inside = divmod(done, steps_per_epoch)
                script.loader.set_epoch(epoch)
                batches, wanted = script.loader, min(until, (epoch + 1) * steps_per_epoch) - done
                if inside:
                    skipped = inside * accelerator.gradient_accumulation_steps
                    batches = accelerator.skip_first_batches(batches, skipped)
                script.run(into, batches, wanted)
                done += wanted
            accelerator.save_state(f"{folder}/{until}")
            accelerator.wait_for_saves()
        return script.finish(into)
