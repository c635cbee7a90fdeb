"""DeepSpeed's ZeRO as a contender of the step benchmark. Needs `deepspeed`, and is imported when it is chosen.

With the torch optimizer that the others have, so that all run the same update (DeepSpeed's own fused one on the CPU is
compared in `optimizer_step`), and with the defaults of its config otherwise. Gradients are reduced in what the others
reduce in.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import Contender, Workload
from benchmarks.gpt import loss_fn


def config_of(workload: Workload, stage: int) -> dict[str, Any]:
    """The JSON that DeepSpeed takes."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": workload.clip_norm or 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if workload.precision == "bf16":
        reduced = "fp32" if workload.reduce == "float32" else "bf16"
        config |= {"bf16": {"enabled": True}, "communication_data_type": reduced}
    return config


@dataclass
class DeepSpeedContender(Contender):
    """Clips, steps and zeroes gradients in its own engine."""

    deepspeed: Any = None

    @classmethod
    def make(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload, stage: int
    ) -> DeepSpeedContender:
        """On every rank, in a process group that is there."""
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
        import deepspeed

        engine, wrapped, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config_of(workload, stage), dist_init_required=False
        )
        return cls(engine, wrapped, lambda max_norm: None, contextlib.nullcontext, deepspeed=engine)

    def step(self, workload: Workload) -> float:
        total = 0.0
        for inputs, targets in workload.data(self.steps):
            loss = loss_fn(self.deepspeed(inputs).float(), targets)
            self.deepspeed.backward(loss)  # divides by the number of micro-batches
            self.deepspeed.step()
            total += loss.item() / workload.accumulation
        self.steps += 1
        return total
