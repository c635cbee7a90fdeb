"""Objects of ranks that a command has started, exchanged under a key that they alone know.

Their process group's connections listen on the loopback, where another user of the host may connect. So what comes over
them is unpickled only where a MAC (HMAC-SHA256, RFC 2104) shows that one of these ranks has sent it. The key comes with
the environment, which other users cannot read.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEY_VARIABLE = "ZERO_STRATEGY_LOCAL_RANKS_KEY"
_MAC_BYTES = 32


def new_key() -> str:
    """A key for the environment of ranks that are about to start."""
    return secrets.token_hex(32)


def all_gather_objects(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's picklable `value`, in rank order.

    Raises:
        RuntimeError: If the ranks share a key and a message was not sent by one of them.
    """
    size = dist.get_world_size(group)
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=group)
        return values
    messages = _gather_bytes(_seal(pickle.dumps(value), key), group, size, device)
    for rank, message in enumerate(messages):
        if not hmac.compare_digest(message, _seal(message[_MAC_BYTES:], key)):
            raise RuntimeError(
                f"a message in the name of rank {rank} does not come from it: another process of this host has written "
                "to the ranks' connections; nothing of it was read"
            )
    return [pickle.loads(message[_MAC_BYTES:]) for message in messages]


def _seal(data: bytes, key: str) -> bytes:
    return hmac.digest(key.encode(), data, "sha256") + data


def _gather_bytes(message: bytes, group: dist.ProcessGroup, size: int, device: torch.device) -> list[bytes]:
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(message)], device=device), group=group)
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    everyone: list[Tensor] = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(everyone, padded, group=group)
    return [bytes(tensor[:count].cpu().numpy()) for tensor, count in zip(everyone, counts)]
