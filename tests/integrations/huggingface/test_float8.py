"""The Trainer under `accelerate launch --mixed_precision fp8`, which no argument of its own asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.float8 import kinds
from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.training import Trained, difference, history, trainer_of, whole
from tests.launcher import Launcher


def in_float8(stage: int | None, folder: str) -> tuple[Trained, set[str], str]:
    """A training, the layers in float8, and the precision."""
    with pytest.MonkeyPatch.context() as patch, fresh_state():
        patch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        if stage is None:  # with it, Accelerate's own gives layers weights that no optimizer has
            patch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "false")
        # Rounding to float8 shows a difference in the last bit: no clipping, whose norm is summed in another order,
        # and steps of which both products are exact, so that no compiler's fused multiplication shows.
        steps = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 2**-4}
        arguments = {"max_grad_norm": 0.0, "num_train_epochs": 1, "max_steps": 4, **steps}
        trainer = trainer_of(stage, "llama", Path(folder), **arguments)
        trainer.train()
        return (history(trainer), whole(trainer)), kinds(trainer.model), trainer.accelerator.mixed_precision


def test_the_trainer_in_float8(ranks: Launcher, tmp_path: Path) -> None:
    (logged, weights), layers, _ = ranks(2, timeout=120)(in_float8, None, str(tmp_path / "plain"))[0]
    assert len(layers) == 13 and "lm_head" not in layers, "all but the first and the last one"
    for stage in (1, 3):
        (ours, state), converted, precision = ranks(2, timeout=120)(in_float8, stage, str(tmp_path / str(stage)))[0]
        assert converted == layers and precision == "fp8"
        assert difference(logged, ours) < 1e-6
        assert max(float((state[key] - weights[key]).abs().max()) for key in weights) < 1e-7
