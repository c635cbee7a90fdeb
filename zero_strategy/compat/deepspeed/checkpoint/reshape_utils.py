"""`deepspeed.checkpoint`'s generic merging of nested state: tensors are joined along dimension 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zero_strategy.convert.merge_ranks import parts

__all__ = ["merge_state", "partition_data"]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Join two states of the same structure.

    Args:
        state_a: Nested dicts, lists and tuples.
        state_b: The same structure; keys that only one of them has are kept.
        key_list: Where in the whole this is, for errors.

    Returns:
        Tensors of both, one after the other; of everything else `state_a`'s.

    Raises:
        ValueError: Naming the place, if the types or the lengths of lists differ.
    """
    where = ".".join(key_list) or "the state"
    if type(state_a) is not type(state_b):
        raise ValueError(f"{where} is a {type(state_a).__name__} and a {type(state_b).__name__}; cannot be merged")
    if isinstance(state_a, dict):
        keys = [*state_b, *(key for key in state_a if key not in state_b)]
        made = {
            key: merge_state(state_a[key], state_b[key], [*key_list, str(key)])
            if key in state_a and key in state_b
            else (state_b if key in state_b else state_a)[key]
            for key in keys
        }
        return type(state_a)(made)
    if isinstance(state_a, (list, tuple)):
        if len(state_a) != len(state_b):
            raise ValueError(f"{where} has {len(state_a)} and {len(state_b)} entries; cannot be merged")
        return type(state_a)(merge_state(a, b, [*key_list, str(i)]) for i, (a, b) in enumerate(zip(state_a, state_b)))
    if isinstance(state_a, torch.Tensor):
        return torch.cat([state_a, state_b], 0)
    return state_a


def partition_data(data_list: list[Any], num_partitions: int) -> list[list[Any]]:
    """Cut a list into equal parts.

    Raises:
        ValueError: If the parts would not be equal.
    """
    return parts(data_list, num_partitions)
