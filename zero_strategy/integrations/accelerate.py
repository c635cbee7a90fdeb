"""ZeRO for scripts written for Hugging Face Accelerate: a subclass in place of `Accelerator`, started as before.

    from zero_strategy.integrations.accelerate import ZeroAccelerator
    accelerator = ZeroAccelerator(zero_config={"stage": 3})      # or ZERO_STRATEGY_CONFIG=config.yaml
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The model that `prepare` returns is the user's own, sharded in place; there is no wrapper. Accelerate's distributed type
stays MULTI_GPU or MULTI_CPU, so all that it does beside sharding (loaders, gathering, trackers) is its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from zero_strategy.config import LATER_KEYS, Fact, check_owned, load_config
from zero_strategy.integrations.accelerate_launch import (
    check_processes,
    check_single_owner,
    check_uneven_batches,
    configured,
    needs_cpu,
)
from zero_strategy.integrations.accelerate_saving import SavingAccelerator
from zero_strategy.integrations.accelerate_scaler import AgreedGradScaler, loss_scale_rule
from zero_strategy.integrations.tensor_mesh import refuse_tensor
from zero_strategy.integrations.verifying import verify_settings

if TYPE_CHECKING:
    from typing_extensions import Self

    from zero_strategy.verify.compare import VerifyReport

__all__ = ["ZeroAccelerator"]


class ZeroAccelerator(SavingAccelerator):
    """Accelerate's `Accelerator` with ZeRO sharding.

    Example:
        accelerator = ZeroAccelerator(zero_config={"stage": 3}, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()

    Args:
        zero_config: Anything `load_config` takes; default: the file that `ZERO_STRATEGY_CONFIG` names, else stage 3.
        **keywords: Everything that `Accelerator` takes, but other ways of sharding.

    Attributes:
        zero_config: The settings.

    Raises:
        ValueError: If the launch or an argument asks for DeepSpeed, FSDP, Megatron or a parallelism config as well, or
            each of several processes would train alone; names what to change.
    """

    def __init__(self, *arguments: Any, zero_config: Any = None, **keywords: Any) -> None:
        check_single_owner(keywords, os.environ)
        if needs_cpu(os.environ) and len(arguments) < 5:  # `cpu` is the fifth
            keywords.setdefault("cpu", True)
        super().__init__(*arguments, **keywords)
        self._set_up(zero_config)

    @classmethod
    def adopt(
        cls, accelerator: Accelerator, zero_config: Any = None, facts: Mapping[str, Fact] | None = None
    ) -> Self:
        """Ours in the place of an Accelerator that somebody else has made and that has prepared nothing yet.

        Args:
            accelerator: Theirs.
            zero_config: As for making one.
            facts: What its owner decides, to be held against a DeepSpeed JSON.

        Raises:
            ValueError: As making one; or if it has prepared something.
        """
        check_single_owner(_other_sharding(accelerator), os.environ)
        if accelerator._models or accelerator._optimizers:
            raise ValueError("this Accelerator has prepared models or optimizers already, which cannot be undone")
        adopted = cls.__new__(cls)
        adopted.__dict__.update(accelerator.__dict__)
        adopted._set_up(zero_config, facts)
        return adopted

    def verify(self, factory: Any, **keywords: Any) -> VerifyReport:
        """Prove on a model of yours that these settings train it as one plain process does. All processes call it.

        Args:
            factory: Makes the model, its optimizer, batches and loss; see `diagnostics.verify_subject`.
            **keywords: As for `diagnostics.verify.verify`; accumulation and autocast are this accelerator's.

        Returns:
            What was compared, and the first tensor that differs.
        """
        keywords.setdefault("accumulation", self.gradient_accumulation_steps)
        if self.mixed_precision != "no":
            keywords.setdefault("autocast", {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision))
        if self.num_processes == 1:
            keywords.setdefault("ranks", 1)
        return verify_settings(self.zero_config, factory, keywords)

    def _set_up(self, zero_config: Any, facts: Mapping[str, Fact] | None = None) -> None:
        check_processes(self.num_processes, os.environ)
        self.zero_config = load_config(configured(zero_config))
        refuse_tensor(self.zero_config, type(self).__name__, "ZeroStrategy, zero_strategy.initialize, or a ZeroEngine")
        check_uneven_batches(self.zero_config, type(self).__name__)
        if self.zero_config.checkpoint.format != "directory":
            raise ValueError(
                f"checkpoint.format={self.zero_config.checkpoint.format!r} is for Lightning's Trainer and Fabric. "
                "save_state writes directories, and save_model whole weights: remove that setting"
            )
        self._engines = {}
        self._for_training = {}
        self._unattached = []
        self._told_factor = False
        self._followers = None
        self._norm_settings, self._norm_logs = None, {}
        steps, precision = self.gradient_accumulation_steps, self.mixed_precision
        self._facts = dict(facts) if facts else {
            "gradient_accumulation_steps": Fact(steps, f"ZeroAccelerator(gradient_accumulation_steps={steps})"),
            "training_precision": Fact(precision, f"ZeroAccelerator(mixed_precision={precision!r})"),
        }
        check_owned(self.zero_config, self._facts, later=LATER_KEYS)
        if precision == "fp16":
            self.native_amp = True  # on the CPU, too, where Accelerate's would compute in fp32 without a word
            rule = loss_scale_rule(self.zero_config, self.scaler_handler)
            self.scaler = AgreedGradScaler(rule, self._engine_of_optimizer, self.device.type, self._together)


def _other_sharding(accelerator: Accelerator) -> dict[str, Any]:
    """What an Accelerator was made with that shards, by the names of its arguments."""
    names = ("parallelism_config", "deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    return {name: getattr(accelerator.state, name, None) for name in names}
