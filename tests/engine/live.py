"""Bytes of the tensors that a piece of code keeps alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def only_new() -> Iterator[None]:
    """Inside, `live_bytes` looks at objects made inside only, which is also much faster."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """Storages count once. What torch.compile leaves behind (fake tensors without memory) does not count."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        if type(candidate) in (Tensor, nn.Parameter) and candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
