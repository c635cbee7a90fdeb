"""Optimizer state of DeepSpeed's checkpoints: what is per element, what is a number, and what belongs to a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_strategy.checkpoint.interop.pickles import Record
from zero_strategy.checkpoint.manifest import Scalar
from zero_strategy.checkpoint.portable import PortableOptimizer, StoredTensor


@dataclass
class MasterState:
    """What the optimizer files of one model-parallel rank hold.

    Attributes:
        fp32: The optimizer's own copy of each weight by name; fp32, unless DeepSpeed was told to keep it lower.
        optimizer: State per element, numbers, hyper-parameters; without "master".
        loss_scaler: As it was pickled, or None.
    """

    fp32: dict[str, StoredTensor] = field(default_factory=dict)
    optimizer: PortableOptimizer = field(default_factory=PortableOptimizer)
    loss_scaler: Any = None

    def add_scalars(self, names: Sequence[str], scalars: Mapping[str, Any]) -> None:
        """Gives parameters the numbers of their flat buffer; steps as torch's optimizers keep them.

        Args:
            names: The parameters in the buffer.
            scalars: Numbers, and 0-d tensors.
        """
        plain: dict[str, Scalar] = {}
        for key, value in scalars.items():
            if isinstance(value, torch.Tensor):
                self.optimizer.scalar_dtypes[key] = str(value.dtype).removeprefix("torch.")
                value = value.item()
            elif key == "step" and isinstance(value, (int, float)):
                # DeepSpeed's own optimizers count in ints, torch's (and their fused forms) in fp32 tensors.
                self.optimizer.scalar_dtypes[key] = "float32"
                value = float(value)
            plain[key] = value
        if plain:
            for name in names:
                self.optimizer.scalars[name] = dict(plain)

    def add_kind(self, kind: str, tensor: StoredTensor) -> None:
        """Adds a parameter's state tensor."""
        self.optimizer.kinds.setdefault(kind, {})[tensor.spec.name] = tensor


def split_state(
    states: Sequence[Any], lengths: Sequence[int], where: str
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Divides one buffer's state into what has a value per element and what is one number.

    Args:
        states: The ranks' state of the buffer: key -> tensor or number.
        lengths: Elements of the ranks' fp32 buffers; state may be longer, by padding.
        where: Names the buffer in errors.

    Returns:
        (key -> the ranks' 1-D tensors, key -> number or 0-d tensor).

    Raises:
        ValueError: If the ranks differ in keys or numbers, or a value is neither; names the key.
    """
    tensors: dict[str, list[Any]] = {}
    scalars: dict[str, Any] = {}
    first = states[0]
    if not all(isinstance(state, dict) and state.keys() == first.keys() for state in states):
        raise ValueError(f"{where}: the ranks' optimizer states have different keys: files of different saves")
    for key in first:
        values = [state[key] for state in states]
        if all(isinstance(v, torch.Tensor) and v.dim() == 1 and v.numel() >= n for v, n in zip(values, lengths)):
            tensors[key] = values
        elif all(_is_number(value) for value in values):
            if len({_number(value) for value in values}) > 1:
                raise ValueError(
                    f"{where}: the ranks have different values of {key!r}: {[_number(v) for v in values][:8]}; "
                    "their files are of different saves"
                )
            scalars[key] = values[0]
        elif any(value is not None for value in values):
            raise ValueError(
                f"{where}: optimizer state {key!r} is {_described(values[0])}, neither one value per element nor a "
                "number; read the weights alone (optimizer=False)"
            )
    return tensors, scalars


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def hyper_parameters(group: Any, where: str) -> dict[str, Any]:
    """A param group's own settings: numbers, strings, lists of them; no parameters, no step count.

    Left out, too, is by which of torch's implementations a step was computed: the loading optimizer has its own choice.

    Raises:
        ValueError: If it is no param group.
    """
    if not isinstance(group, dict):
        raise ValueError(f"{where}: a param group is a {type(group).__name__}")
    left_out = {"params", "param_names", "step", *_IMPLEMENTATION}
    return {key: _plain(value) for key, value in group.items() if key not in left_out and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str) or _is_number(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return _number(value)


def loss_scaler_state(scaler: Any, skipped: int) -> dict[str, Any] | None:
    """DeepSpeed's loss scaler in our form (`LossScaler.state_dict()`), so that the scale grows at the same step.

    DeepSpeed counts iterations (`cur_iter`, the next one's number) and raises the scale in the iterations i with
    (i - last_overflow_iter - 1) a positive multiple of `scale_window`; we count good steps up to the interval. After an
    overflow it therefore waits one step longer, hence a count of -1.

    Args:
        scaler: Record of a `LossScaler` or `DynamicLossScaler`, or a dict with its attributes.
        skipped: Steps skipped so far.

    Returns:
        None where there is no scale.
    """
    state = scaler.state if isinstance(scaler, Record) else scaler
    if not isinstance(state, dict) or not isinstance(state.get("cur_scale"), (int, float)):
        return None
    scale, good = float(state["cur_scale"]), 0
    window = state.get("scale_window")
    if isinstance(window, int) and window > 0 and isinstance(state.get("cur_iter"), int):
        stable = state["cur_iter"] - int(state.get("last_overflow_iter", -1)) - 1
        good = (stable - 1) % window if stable > 0 else -1
    elif scale == 1.0:
        return None
    return {"scale": scale, "good_steps": good, "skipped": skipped}
