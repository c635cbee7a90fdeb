"""State dicts of Megatron-LM's transformer, joined from tensor-parallel ranks or divided among them.

The layer names say how: attention's and the feed-forward's output projections are divided by rows (dimension 1), their
input projections, embeddings and the output layer by columns (dimension 0), everything else is held whole by all ranks.
The fused query-key-value weight depends on the checkpoint's version. With np heads per rank of size hn, its rows are

    version 0      3 * np * hn     all queries, all keys, all values
    version 1.0    np * hn * 3     per head, interleaved
    version 2.0    np * 3 * hn     per head, one after the other

so that heads of neighbouring ranks are neighbours from version 1.0 on, and in version 0 only inside each third.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from zero_strategy.checkpoint.interop.megatron_rules import Kind, Rule, SubparamShape, merge, split

VERSIONS = (0, 1.0, 2.0)
_ROWS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
_COLUMNS = ("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "word_embeddings.weight", "final_linear.weight")
_FUSED = "attention.query_key_value"
REQUIRED = (*_ROWS, _FUSED, "mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias")
"""Parts of names that a Megatron transformer's state dict has."""


def rule_of(name: str, version: float) -> Rule:
    """How a tensor of a Megatron transformer is divided.

    Args:
        name: Its name; a part of it decides.
        version: The checkpoint's version.

    Raises:
        ValueError: If the version is not one of `VERSIONS`.
    """
    if version not in VERSIONS:
        raise ValueError(f"Megatron checkpoint version {version} is not known; known are {VERSIONS}")
    if any(part in name for part in _ROWS):
        return Rule("row")
    if _FUSED in name:
        return Rule("sub_params", SubparamShape((), (3, -1), 0)) if version == 0 else Rule("column")
    kind: Kind = "column" if any(part in name for part in _COLUMNS) else "replicated"
    return Rule(kind)


def merge_states(states: Sequence[Mapping[str, torch.Tensor]], version: float) -> OrderedDict[str, torch.Tensor]:
    """Joins the state dicts of neighbouring tensor-parallel ranks.

    What is held whole is taken from the first; copies are not compared, for position counters and the like differ.

    Raises:
        ValueError: If a tensor is missing from one, or shards do not fit, by name.
    """
    if not states:
        raise ValueError("there are no state dicts to merge")
    for rank, state in enumerate(states):
        if differing := sorted(states[0].keys() ^ state.keys()):
            raise ValueError(f"the state dicts of tensor ranks 0 and {rank} do not have the same names: {differing}")
    merged: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, value in states[0].items():
        rule = rule_of(name, version)
        whole = rule.kind == "replicated" or not isinstance(value, torch.Tensor)
        merged[name] = value if whole else merge(name, [state[name] for state in states], rule)
    return merged


def split_state(
    state: Mapping[str, torch.Tensor], version: float, degree: int, rank: int
) -> OrderedDict[str, torch.Tensor]:
    """One of `degree` equal tensor-parallel shards of a state dict; views where possible.

    Raises:
        ValueError: If a tensor cannot be divided so, by name.
    """
    if not 0 <= rank < degree:
        raise ValueError(f"shard {rank} is not one of {degree}")
    divided: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, value in state.items():
        rule = rule_of(name, version)
        whole = rule.kind == "replicated" or not isinstance(value, torch.Tensor)
        divided[name] = value if whole else split(name, value, rule, degree)[rank]
    return divided


def missing_names(state: Mapping[str, object]) -> list[str]:
    """Parts of names that a Megatron transformer has and this state dict lacks."""
    return [part for part in REQUIRED if not any(part in name for name in state)]
