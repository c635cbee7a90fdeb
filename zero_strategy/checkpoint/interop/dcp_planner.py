"""Saves tensors that are not in memory by torch.distributed.checkpoint, one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from zero_strategy.checkpoint.portable import Progress, StoredTensor, loaded


class LazyPlanner(DefaultSavePlanner):  # type: ignore[misc, unused-ignore]
    """Plans with placeholders of the right dtype and shape, and loads a tensor when it is to be written.

    Args:
        progress: Is told of the bytes written.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__(dedup_save_to_lowest_rank=False, enable_plan_caching=False)
        self._progress = progress
        self._stored: dict[int, tuple[torch.Tensor, StoredTensor]] = {}

    def placeholders(self, value: Any) -> Any:
        """The same nested state, with a placeholder that takes no memory for each stored tensor."""
        if isinstance(value, StoredTensor):
            tensor = torch.empty((), dtype=value.spec.dtype).expand(value.spec.shape)
            self._stored[id(tensor)] = (tensor, value)
            return tensor
        if isinstance(value, dict):
            return {key: self.placeholders(item) for key, item in value.items()}
        return value

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object to write, loaded."""
        found = super().lookup_object(index)
        if id(found) not in self._stored:
            return found
        tensor = loaded(self._stored[id(found)][1])
        if self._progress is not None:
            self._progress(tensor.nbytes)
        return tensor
