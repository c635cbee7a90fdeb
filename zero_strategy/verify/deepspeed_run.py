"""DeepSpeed as the distributed side of a verification, by its public API. Needs `deepspeed`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.process_group import world_rank, world_size
from zero_strategy.verify.ready_runs import WithLoss
from zero_strategy.verify.subject import Subject, VerifySettings


class DeepSpeedRun:
    """A factory's model in DeepSpeed's engine, with the factory's own optimizer.

    Args:
        subject: What is trained.
        settings: How.
        stage: The ZeRO stage, unless the config says it.
        config: DeepSpeed's settings; batch sizes, clipping and precision are those of the verification.

    Raises:
        ValueError: If the config says otherwise than the verification.
    """

    def __init__(
        self, subject: Subject, settings: VerifySettings, stage: int = 2, config: Mapping[str, Any] | None = None
    ) -> None:
        self.settings = settings
        self.config = config_of(settings, stage, {} if config is None else config)
        # A launcher sets these; DeepSpeed reads them while it is imported and made.
        os.environ.setdefault("LOCAL_RANK", str(world_rank()))
        if settings.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        self.deepspeed, self.model = deepspeed, subject.model.to(settings.device)
        self.optimizer = subject.optimizer(self.model)
        self.engine, *_ = deepspeed.initialize(
            model=WithLoss(self.model, subject.loss),
            optimizer=self.optimizer,
            config=self.config,
            dist_init_required=False,
        )

    def backward(self, batches: Sequence[Any]) -> list[Tensor]:
        """All micro-batches; the engine divides by their number, and reduces with the last."""
        losses = []
        for micro, batch in enumerate(batches):
            with self.settings.forward_context():
                loss = self.engine(batch)
            self.engine.backward(loss)
            if micro < len(batches) - 1:
                self.engine.step()  # counts the micro-batch
            losses.append(loss.detach().clone())
        return losses

    def update(self) -> None:
        """The engine clips and steps."""
        self.engine.step()

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights where there are some, else the parameters."""
        found = {}
        for name, parameter in self.model.named_parameters():
            with self.deepspeed.zero.GatheredParameters([parameter]):
                own = parameter.detach().clone()
            master = self.deepspeed.utils.safe_get_full_fp32_param(parameter)
            found[name] = own if master is None else master.reshape(own.shape)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Gradients that the engine shows."""
        found = {}
        for name, parameter in self.model.named_parameters():
            gradient = self.deepspeed.utils.safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is not None:
                found[name] = gradient
        return found

    def norm(self) -> float | None:
        """The norm by which the last step was clipped."""
        return None if self.settings.clip_norm is None else self.engine.get_global_grad_norm()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Moments that the engine shows."""
        keys, show = self._keys(), self.deepspeed.utils.safe_get_full_optimizer_state
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            values = {key: show(parameter, key) for key in keys} if parameter.requires_grad else {}
            found[name] = {key: value for key, value in values.items() if value is not None}
        return found

    def _keys(self) -> list[str]:
        """Keys of moments on any rank: all have to ask for the same, and a key that is nowhere is an error on some."""
        states = self.optimizer.state.values()
        own = {key for state in states for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
        every: list[set[str]] = [set() for _ in range(world_size())]
        dist.all_gather_object(every, own)
        return sorted(set().union(*every))


def config_of(settings: VerifySettings, stage: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON that DeepSpeed gets.

    Args:
        settings: The verification's.
        stage: The ZeRO stage, unless it is given.
        given: Further keys.

    Raises:
        ValueError: If a key of the verification's is given another value.
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.clip_norm or 0.0,
    }
    if settings.compute_dtype is torch.bfloat16:
        ours["bf16"] = {"enabled": True}
    for key in ("train_batch_size", "optimizer", "scheduler", "fp16", *ours):
        if key in given and given[key] != ours.get(key):
            raise ValueError(f"the config's {key} is {given[key]!r}: the verification says it, so leave it out")
    stages = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {**stages, "zero_force_ds_cpu_optimizer": False, **given, **ours}
