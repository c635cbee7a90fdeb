"""An optimizer whose state went with its engine: its next step is refused, unless a state is loaded before."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer


class DroppedState:
    """Refuses the steps of a torch optimizer that would begin again from an empty state without a word.

    Args:
        optimizer: The optimizer; `load_state_dict` lifts the refusal.
        ended: A clause that says how its engine ended.
    """

    def __init__(self, optimizer: Optimizer, ended: str) -> None:
        self._ended = ended
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._refuse),
            optimizer.register_load_state_dict_post_hook(self._lift),
        ]

    def _refuse(self, optimizer: Optimizer, args: Any, kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(optimizer).__name__} updated the shards of an engine that has ended: {self._ended}. Its state went "
            "with the engine: make a new optimizer from the module's parameters() (of a transformers Trainer: "
            "trainer.optimizer = None), give it a state by load_state_dict, or end the engine by "
            "engine.close(gather=True, optimizers=True), which gives optimizers their whole state"
        )

    def _lift(self, optimizer: Optimizer) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
