"""The sharded side of `verify`: one rank's training by the engine, and what can be seen of it after each phase.

Reading is what any user could do between two calls: gradients before clipping and after the step (in between a factor
may wait for the step to take it along, and reading would carry it out), states and parameters after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.activation.seeds import RandomState
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.install import install_diagnostics
from zero_strategy.diagnostics.verify_settings import VerifySettings
from zero_strategy.diagnostics.verify_subject import Subject
from zero_strategy.diagnostics.verify_twin import Tensors, flat_state
from zero_strategy.distributed import Communicator
from zero_strategy.distributed.world import group_takes_gpu
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import LossScaler
from zero_strategy.optim.full_state import safe_get_full_fp32_param, safe_get_full_grad


class ShardedRun:
    """One rank's training. A subclass may train otherwise, to be compared like this one.

    Args:
        subject: What is trained, in place.
        config: The engine's settings.
        settings: How it trains.

    Attributes:
        engine: The engine.
        optimizer: The attached optimizer.
        rank: This rank.
        ranks: How many there are.
        taken: Whether the step at hand is taken: in fp16 an overflow is a reason not to.
    """

    def __init__(self, subject: Subject, config: ResolvedConfig, settings: VerifySettings) -> None:
        self.subject, self.config, self.settings = subject, config, settings
        self.model, self.taken = subject.model, True
        self.engine, self.optimizer = self.build()
        if settings.scales_loss and self.engine.scaler is None:  # autocast is the faces' business, and so is its scaler
            self.engine.scaler = LossScaler(config.config.loss_scale)
        self.rank, self.ranks = self.engine.mesh.rank, self.engine.mesh.world_size
        self.seed()

    def build(self) -> tuple[ZeroEngine, Optimizer]:
        """Make the engine and its optimizer."""
        settings = self.settings
        engine = ZeroEngine(self.model, self.config, compute_dtype=settings.compute_dtype, device=settings.device)
        install_diagnostics(engine)
        optimizer = self.subject.optimizer(self.model)
        engine.attach(optimizer)
        return engine, optimizer

    @property
    def control(self) -> Communicator:
        """All ranks that train."""
        return self.engine.mesh.control

    # ---- the training ----

    def seed(self) -> None:
        """Let this rank draw random numbers of its own."""
        RandomState.seeded(self.settings.seed + self.rank).restore()

    def train(self, step: int) -> Tensors:
        """Forward and backward of a step; returns the loss of each micro-batch."""
        losses: Tensors = {}
        for micro in range(self.settings.accumulation):
            last = micro == self.settings.accumulation - 1
            with nullcontext() if last else self.engine.no_sync():
                losses[f"loss of micro-batch {micro}"] = self.micro_batch(step, micro)
        return losses

    def seen_in_training(self) -> list[tuple[str, Callable[[], Tensors]]]:
        """Further phases that `train` has gone through, and what can be seen of them."""
        return []

    def micro_batch(self, step: int, micro: int) -> Tensor:
        """Forward and backward of one micro-batch; returns its loss."""
        number = self.settings.number(step, micro, self.rank, self.ranks)
        batch = self.subject.batch(number, self.settings.device)
        with self.engine.forward_scope() if self.subject.scoped else nullcontext():
            with self.settings.forward_context():
                loss = self.subject.loss(self.model, batch)
        self.engine.scale_loss(loss / self.settings.accumulation).backward()
        return loss.detach().clone()

    def unscale(self) -> Tensors:
        """Undo the loss scale; returns what it was, and whether the step will be taken."""
        assert self.engine.scaler is not None
        scale = self.engine.scaler.scale
        self.taken = self.engine.unscale_gradients(self.optimizer)
        return {"step taken": torch.tensor(self.taken), "loss scale": torch.tensor(scale)}

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients; returns their norm before."""
        return self.engine.clip_grad_norm_(max_norm)

    def update(self) -> None:
        """The optimizer's step, and what follows from it for the loss scale."""
        self.optimizer.step()
        if self.engine.scaler is not None:
            self.engine.scaler.update(finite=self.taken)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    # ---- what can be seen of it ----

    def gradients(self) -> Tensors:
        """The whole mean gradient of every parameter, None where there is none. A collective."""
        found: Tensors = {}
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.is_floating_point() else None
            found[name] = None if gradient is None else gradient.clone()
        return found

    def state(self) -> Tensors:
        """The whole state of the optimizer. A collective."""
        return flat_state(self.engine.full_optimizer_state(self.optimizer))

    def masters(self) -> Tensors:
        """The whole master weights, where they are copies of their own. A collective."""
        found: Tensors = {}
        for name, parameter in self.model.named_parameters():
            place = self.engine.model.place(parameter)
            assert place is not None
            if place[0].has_master:
                found[name] = safe_get_full_fp32_param(parameter)
        return found

    def parameters(self) -> Tensors:
        """This rank's copy of every parameter, under all its names, whole. A collective."""
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        return {name: value for name, value in self.engine.full_state_dict(names).items() if name in set(names)}

    def buffers(self) -> Tensors:
        """This rank's own buffers."""
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def owner(self, name: str, element: int) -> int | None:
        """The rank that owns an element of a parameter, if one alone does.

        Args:
            name: Of the parameter, or "state of parameter".
            element: Counted in the flattened parameter.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        place = self.engine.model.place(parameters[name]) if name in parameters else None
        if place is None or not place[0].placement.shard_optimizer or self.ranks == 1:
            return None
        bucket, index = place
        return (bucket.layout.segments[index].offset + element) // bucket.layout.slice_numel

    def title(self, rank: int) -> str:
        """What a rank is called."""
        return f"rank {rank}"


def place_to_train(ranks: int) -> torch.device:
    """Where ranks of this host compute: on a GPU each if there are enough and their group takes it, else on the CPU."""
    if group_takes_gpu() and torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
