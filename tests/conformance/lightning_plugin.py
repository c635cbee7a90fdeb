"""A pytest plugin: Lightning's own tests with a ZeroStrategy where they leave the strategy to the Trainer.

    ZERO_STAGE=3 python -m pytest -p tests.conformance.lightning_plugin -p tests.conformance.outcomes ...

Tests that name a strategy, an accelerator, or several devices keep it: they are about that one.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch
import lightning.pytorch.trainer
import lightning.pytorch.trainer.trainer
from lightning.pytorch.strategies import DDPStrategy

from tests.conformance import outcomes
from tests.conformance.foreign_tests import PLAIN
from zero_strategy import ZeroStrategy

Original = lightning.pytorch.Trainer


class Trainer(Original):
    """Lightning's Trainer under ZeRO: the one line that a user changes."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        alone = keywords.get("devices", "auto") in ("auto", 1, "1", -1)
        plain = keywords.get("accelerator", "auto") in ("auto", "cpu") and keywords.get("num_nodes", 1) == 1
        if not arguments and alone and plain and keywords.get("strategy", "auto") == "auto":
            stage = os.environ["ZERO_STAGE"]
            if stage == PLAIN:
                keywords["strategy"] = DDPStrategy(process_group_backend="gloo")
            else:
                outcomes.used()
                keywords["strategy"] = ZeroStrategy(stage=int(stage), timeout_seconds=60.0)
            keywords["devices"] = 1
            keywords.setdefault("accelerator", "cpu")
        super().__init__(*arguments, **keywords)


for module in (lightning.pytorch, lightning.pytorch.trainer, lightning.pytorch.trainer.trainer):
    module.Trainer = Trainer  # type: ignore[attr-defined, misc]
"""Before the tests are imported, which take the name from one of these."""
