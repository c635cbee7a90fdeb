"""Training that goes on when ranks die (`survive`) under a `ZeroAccelerator`.

    def train(run):
        accelerator = ZeroAccelerator(zero_config={"stage": 3, "reproducible": 12, "survive": True})
        model, optimizer, loader, scheduler = accelerator.prepare(...)
        done = accelerator.restore(run, {"step": 0})["step"]
        for batch in accelerator.skip_first_batches(loader, done * accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                ...
            if accelerator.sync_gradients:
                done += 1
                accelerator.commit(run, {"step": done})

    survive(train)

Accelerate keeps for the whole process which rank it is, and how many there are. It forgets that whenever ranks have
formed anew, so that the next Accelerator finds the ones that are there.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from zero_strategy.engine import ZeroEngine
from zero_strategy.survive import Run, when_formed

_OWN, _GIVEN = "accelerate", "state"
"""Entries of a copy's state: the accelerator's, and the script's."""


def forget_ranks() -> None:
    """Let Accelerate look again for ranks and device, as transformers' TrainingArguments do."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


when_formed(forget_ranks)


def packed(value: Any) -> str:
    """A state dict as text. JSON would not do: schedules have integer keys."""
    written = io.BytesIO()
    torch.save(value, written)
    return base64.b64encode(written.getvalue()).decode()


def unpacked(text: str) -> Any:
    """A state dict that `packed` has made text of."""
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)


def restore_prepared(accelerator: Any, run: Run, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Load the newest copy into all that was prepared, where there is one. A collective.

    Args:
        accelerator: Whose.
        run: As the training function has got it.
        state: To begin with.

    Returns:
        What `commit_prepared` was given, or `state`.

    Raises:
        ValueError: If it has not prepared one model.
    """
    found = run.restore(_engine_of(accelerator, "restore"))
    if not found:
        return dict(state or {})
    own = found[_OWN]
    for scheduler, saved in zip(accelerator._schedulers, own["schedulers"], strict=True):
        scheduler.load_state_dict(unpacked(saved))
    accelerator.step = accelerator.slot_training.load(own["slots"], own["step"])
    return dict(found[_GIVEN])


def commit_prepared(accelerator: Any, run: Run, state: Mapping[str, Any]) -> None:
    """Copy all that was prepared at the end of a step, and look who is there. A collective.

    Args:
        accelerator: Whose.
        run: As the training function has got it.
        state: What the function needs to go on from here, JSON-able.

    Raises:
        ValueError: If it has not prepared one model.
        MembersChangedError: See `Run.commit`.
    """
    own = {
        "schedulers": [packed(scheduler.state_dict()) for scheduler in accelerator._schedulers],
        "step": accelerator.step,
        "slots": accelerator.slot_training.state(),
    }
    run.commit(_engine_of(accelerator, "commit"), {_OWN: own, _GIVEN: dict(state)})


def _engine_of(accelerator: Any, call: str) -> ZeroEngine:
    engines: list[ZeroEngine] = list(accelerator.engines.values())
    if len(engines) != 1:
        raise ValueError(
            f"accelerator.{call}(run, ...): copies in memory are of one model, and {len(engines)} are prepared"
        )
    return engines[0]
