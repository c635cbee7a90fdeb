"""Distributed runs of torch's own wrappers, for a factory's model as it is: DistributedDataParallel and FSDP2.

`plain` is the control: gradients are averaged by one `all_reduce` each, and nothing else is distributed. A subclass may
wrap otherwise:

    class Mine(FSDP2Run):
        def wrap(self, module):
            for block in self.model.blocks:
                fully_shard(block)
            return fully_shard(module)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.comm.process_group import world_size
from zero_strategy.fsdp.layout import find_units
from zero_strategy.verify.subject import Subject, VerifySettings


class WithLoss(nn.Module):
    """The model and its loss as one module, so that a wrapper's forward is around all that the loss does.

    Args:
        model: The model.
        loss: Gives the loss of a batch.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        """The loss."""
        return cast(Tensor, self.loss(self.model, batch))


class AveragedRun:
    """Data parallelism by hand: every rank has the model, and gradients are averaged one by one.

    Args:
        subject: What is trained, in place.
        settings: How it trains.

    Attributes:
        model: The factory's model.
        forward: It and its loss, wrapped.
        optimizer: Its optimizer.

    Raises:
        ValueError: If the settings ask for master weights, which this has not.
    """

    has_masters = False

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        if settings.compute_dtype is not None and not self.has_masters:
            raise ValueError(
                f"{type(self).__name__} keeps no fp32 weights beside {settings.compute_dtype}: use autocast, or let "
                "the factory return a model of that dtype"
            )
        self.settings, self.model = settings, subject.model.to(settings.device)
        self.forward = self.wrap(WithLoss(self.model, subject.loss))
        self.optimizer = subject.optimizer(self.model)
        self._norm: Tensor | None = None

    def wrap(self, module: nn.Module) -> nn.Module:
        """Distribute model and loss."""
        return module

    def before_micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Context of a micro-batch: all but the last need not reduce."""
        return nullcontext()

    def backward(self, batches: Sequence[Any]) -> list[Tensor]:
        """Forward and backward of the micro-batches; returns their losses."""
        self.optimizer.zero_grad()
        losses = []
        for micro, batch in enumerate(batches):
            with self.before_micro_batch(micro == len(batches) - 1):
                with self.settings.forward_context():
                    loss = self.forward(batch)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.reduce()
        return losses

    @torch.no_grad()
    def reduce(self) -> None:
        """Average gradients; a rank that has none of a parameter that another one has adds zeros."""
        parameters = list(self.model.parameters())
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=self.settings.device)
        dist.all_reduce(has, dist.ReduceOp.MAX)
        for parameter in (p for p, some in zip(parameters, has.tolist(), strict=True) if some):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size()

    def clip(self, max_norm: float) -> Tensor:
        """Clip; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def update(self) -> None:
        """Clip and step."""
        if self.settings.clip_norm is not None:
            self._norm = self.clip(self.settings.clip_norm)
        self.optimizer.step()

    # ---- what can be seen of it ----

    def weights(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return dict(self.model.named_parameters())

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients by name."""
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def norm(self) -> Tensor | None:
        """The norm of the last clipping."""
        return self._norm

    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by name."""
        return {name: self.optimizer.state.get(parameter, {}) for name, parameter in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Buffers by name."""
        return dict(self.model.named_buffers())


class DDPRun(AveragedRun):
    """DistributedDataParallel, with `no_sync` for all micro-batches but the last.

    It looks for unused parameters, since models that have some are an error otherwise.
    """

    shares_buffers = True

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module in DistributedDataParallel."""
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)

    def before_micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """`no_sync` but for the last."""
        return nullcontext() if last else cast(Any, self.forward).no_sync()

    def reduce(self) -> None:
        """Backward has done it."""


class FSDP2Run(AveragedRun):
    """`fully_shard` on each repeated layer and on the whole, as FSDP2 is used; gradients are summed in float32.

    Args:
        subject: What is trained.
        settings: How; with a compute dtype layers compute in it, beside float32 weights.
        reshard_after_forward: Whether weights are released after forward.
    """

    has_masters = True

    def __init__(self, subject: Subject, settings: VerifySettings, reshard_after_forward: bool = True) -> None:
        self.reshards = reshard_after_forward
        super().__init__(subject, settings)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Divide the layers, then the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        settings: dict[str, Any] = {
            "mesh": init_device_mesh(self.settings.device.type, (world_size(),)),
            "reshard_after_forward": self.reshards,
        }
        if (dtype := self.settings.compute_dtype) is not None:
            # Batches stay as they are, for the loss as for the plain run's.
            settings["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for unit in find_units(self.model)[1:]:
            fully_shard(unit.module, **settings)
        return cast(nn.Module, fully_shard(module, **settings))

    def before_micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Gradients are summed on the ranks until the last."""
        cast(Any, self.forward).set_requires_gradient_sync(last)
        return nullcontext()

    def reduce(self) -> None:
        """Backward has done it."""
