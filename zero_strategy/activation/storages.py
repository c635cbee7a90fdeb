"""Memory that tensors share, told apart for as long as it is of interest, without being held."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zero_strategy.runtime.torch_private import storage_key
from zero_strategy.sharding.model import ShardedModel

Storages = dict[StorageWeakRef, int]
"""Bytes of each. While a reference is there, no other memory gets the same key."""


def add_storage(found: Storages, tensor: Tensor, known: frozenset[int]) -> None:
    """Note the memory of a tensor that is kept, unless it is among `known`."""
    if is_plain(tensor) and storage_key(tensor.untyped_storage()) not in known:
        storage = tensor.untyped_storage()
        found[StorageWeakRef(storage)] = storage.nbytes()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of its own, so that its bytes can be counted and copied."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def model_storages(model: ShardedModel) -> frozenset[int]:
    """The memory of a model's parameters; a bucket has the same one until a numpy array shares it."""
    return storage_keys(bucket.flat for bucket in model.buckets)


def storage_keys(tensors: Iterable[Tensor]) -> frozenset[int]:
    """By what the memory of living tensors is known."""
    return frozenset(storage_key(tensor.untyped_storage()) for tensor in tensors)
