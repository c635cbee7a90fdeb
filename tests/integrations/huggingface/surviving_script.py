"""A script of transformers whose training goes on when a process dies: `python -m ... FOLDER CASE DEATHS`."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tests.integrations.huggingface.slots import Trained, model_of, result_of, rows, trainer_of
from tests.integrations.surviving import LIFE, die
from zero_strategy.integrations.transformers import WeightAveragingCallback

PLACE = "ZERO_STRATEGY_PLACE"
CASES: dict[str, dict[str, Any]] = {
    # Four steps in an epoch, the last one filled; losses of two steps in a log.
    "llama": {"kind": "llama", "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 2},
    # Ends inside of an epoch; evaluates and saves on the way.
    "gpt2": {"kind": "gpt2", "max_steps": 6, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 3},
}


class Dies(TrainerCallback, ExportableState):
    """Counts steps, and ends the process at some event of some step.

    Args:
        event: Name of a callback's method; "": none.
        step: The global step then.
    """

    def __init__(self, event: str = "", step: int = -1) -> None:
        self.counted, self.seen, self.begun = 0, 0, 0
        self._last = event, step
        self._waits_for: Path | None = None

    def wait_for(self, file: Path) -> None:
        """Begin no step after the third before a file is there, whose process then asks to come in."""
        self._waits_for = file

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._waits_for is None or state.global_step < 3:
            return
        while not self._waits_for.exists():
            time.sleep(0.1)
        if args.world_size == 1:
            time.sleep(1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun += 1
        self._die_at("on_train_begin", state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.counted, self.seen = self.counted + 1, self.seen + 1
        self._die_at("on_pre_optimizer_step", state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._die_at("on_save", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._die_at("on_epoch_end", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._die_at("on_train_end", state)

    def _die_at(self, event: str, state: Any) -> None:
        if self._last == (event, state.global_step):
            die()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"counted": self.counted}}


def optimizers_of(model: Any) -> tuple[Any, Any]:
    """A script's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)


def train(folder: str, case: str, survives: bool, callback: Dies, told: Path | None = None) -> dict[str, Any]:
    """Train; the callback may end this process. A file is made before.

    Returns:
        What is the same for all ranks and runs, the steps that the callback counted, and those that it saw.
    """
    more = dict(CASES[case])
    own: dict[str, Any] = {"callbacks": [callback], "eval_dataset": rows(9)}
    if case == "llama":
        own["callbacks"].append(WeightAveragingCallback(0.8))
    else:
        own["model"] = model_of(case)
        own["optimizers"] = optimizers_of(own["model"])
    zero = {"stage": 3 if case == "llama" else 2, "survive": survives}
    trainer = trainer_of(zero, folder, slots=12, own=own, dropout=0.1, per_device_train_batch_size=1, **more)
    model, before = trainer.model, list(trainer.callback_handler.callbacks)
    if case == "gpt2":
        trainer.evaluate()  # each process by itself, before the ranks meet
    if told is not None:
        told.touch()
    result: Trained = result_of(trainer, trainer.train().training_loss)
    assert trainer.model is model and trainer.callback_handler.callbacks == before
    trainer.save_model(f"{folder}/model")
    return {**asdict(result), "counted": callback.counted, "seen": callback.seen, "begun": callback.begun}


if __name__ == "__main__":
    folder, case, deaths = sys.argv[1:4]
    place, again, first = os.environ[PLACE], Path(folder, "again"), os.environ[LIFE] == "1"
    callback = Dies(*json.loads(deaths).get(place, ())) if first else Dies()
    if first and len(sys.argv) > 4:
        callback.wait_for(again)
    found = train(f"{folder}/trainer", case, True, callback, None if first else again)
    Path(folder, f"{place}.json").write_text(json.dumps(found))
