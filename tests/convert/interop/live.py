"""Compares an imported state with what was in the live engine, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from zero_strategy.convert.portable import PortableState, loaded

IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""How torch computes a step; no setting of the training."""


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and bits; NaNs of the same bits are the same."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*bits)


def compare(
    state: PortableState, live: dict[str, Any], *, missing: frozenset[str] = frozenset(), ordered: bool = True
) -> None:
    """Every weight, master, moment, number and hyper-parameter; nothing besides, in the model's order.

    Args:
        state: What was read.
        live: What `scripts/deepspeed_live.py` gathered, plain data.
        missing: Weights that the checkpoint was told to leave out.
        ordered: Weights come in the order of the state dict (our own files have wider elements first).
    """
    weights = {**live["weights"]}
    assert {**state.weights, **state.aliases}.keys() == weights.keys() - missing
    if ordered:
        assert list(state.weights) == [name for name in weights if name in state.weights]
    for name, expected in weights.items():
        if name not in missing:
            value = loaded(state.weights[state.aliases.get(name, name)])
            assert same(value, expected), name
    (optimizer,) = state.optimizers
    masters = {name: t for name, t in live["fp32"].items() if t.dtype != weights[name].dtype}
    assert optimizer.kinds.get("master", {}).keys() == masters.keys()
    for name, expected in masters.items():
        assert same(loaded(optimizer.kinds["master"][name]), expected), name
    _compare_states(state, live)
    _compare_rest(state, live)


def _compare_states(state: PortableState, live: dict[str, Any]) -> None:
    (optimizer,) = state.optimizers
    tensors: dict[str, set[str]] = {}
    for name, values in live["states"].items():
        numbers = optimizer.scalars.get(name, {})
        assert numbers == {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}, name
        for kind, expected in values.items():
            if isinstance(expected, torch.Tensor):
                tensors.setdefault(kind, set()).add(name)
                assert same(loaded(optimizer.kinds[kind][name]), expected), (kind, name)
    assert {kind: set(names) for kind, names in optimizer.kinds.items() if kind != "master"} == tensors
    order = {name: place for place, name in enumerate(state.weights)}
    for names in optimizer.kinds.values():
        assert list(names) == sorted(names, key=order.__getitem__)


def _compare_rest(state: PortableState, live: dict[str, Any]) -> None:
    (optimizer,) = state.optimizers
    assert len(optimizer.param_groups) == len(live["groups"])
    for group, expected in zip(optimizer.param_groups, live["groups"], strict=True):
        assert sorted(group["params"]) == sorted(expected["params"])
        if len(group) > 1:  # an elastic checkpoint has no hyper-parameters
            for key in expected.keys() - {"params", "step", *IMPLEMENTATION}:
                assert group[key] == expected[key], key
    assert state.counters == live["counters"]
    assert state.lr_scheduler == live["lr_scheduler"]
    assert (state.loss_scaler or {}).get("scale") == live["loss_scale"]
    assert state.client_state.keys() == live["client_state"].keys()
    for key, value in live["client_state"].items():
        mine = state.client_state[key]
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
