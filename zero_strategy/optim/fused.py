"""Fused optimizers: one pass over memory per step, for any script; and `DummyOptim`.

`DummyOptim`.

    from zero_strategy.optim import FusedAdamW
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)

They have the arguments and states of their `torch.optim` namesakes, and take each other's `state_dict()`. A bfloat16 or
float16 parameter has a float32 master weight in its state (`master`), and takes its new value in the same pass. The
kernels are built when the first optimizer is made (`zero_strategy.ops`); without a compiler plain torch computes the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy import ops
from zero_strategy.optim.update_rules import (
    AdagradRule,
    AdamRule,
    LambRule,
    LionRule,
    Segment,
    SGDRule,
    UpdateRule,
    in_memory_order,
)


class DummyOptim:
    """Shows parameters as one group, and keeps and steps nothing.

    For code that walks `param_groups`: an engine itself needs no optimizer, and trains without one if it is None.

    Args:
        params: The parameters.

    Attributes:
        param_groups: One group: `{"params": params}`.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        chosen = params if isinstance(params, list) else list(params)  # a generator is to be read more than once
        self.param_groups: list[dict[str, Any]] = [{"params": chosen}]


_LOW = (torch.bfloat16, torch.float16)
_NOT_OURS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of torch's optimizers that a state dict for them must have."""


class FusedOptimizer(Optimizer):
    """Common base of the fused optimizers.

    Args:
        params: Parameters or param groups; float32, bfloat16 or float16, dense.
        defaults: Hyper-parameters.

    Raises:
        TypeError: If a parameter has another dtype.
        ValueError: If a hyper-parameter is out of range.
    """

    update_rule: UpdateRule = UpdateRule()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, **_NOT_OURS})
        for device in {parameter.device.type for group in self.param_groups for parameter in group["params"]}:
            ops.ensure(device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters and options are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_range(group)
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype not in (torch.float32, *_LOW):
                raise TypeError(
                    f"parameter {index} of group {len(self.param_groups) - 1} is {parameter.dtype}: fused optimizers "
                    "take float32, bfloat16 and float16"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the model again and returns the loss.
            grad_scale: What gradients are multiplied by in the same pass: 1 / loss scale, a clipping coefficient.

        Returns:
            The closure's result, or None.

        Raises:
            TypeError: If grad_scale is no number.
            ValueError: If a group has an option that is not supported.
            RuntimeError: If a gradient is sparse.
        """
        if not isinstance(grad_scale, (int, float)):
            raise TypeError(f"grad_scale must be a number, not {type(grad_scale).__name__}; of a tensor take float()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        segments, written = [], []
        for group in self.param_groups:
            refused = self.update_rule.refuses(group)
            if refused:
                raise ValueError(f"{type(self).__name__} does not support {refused}; use the torch.optim class")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    segments.append(self._segment(group, parameter))
                    written.append(parameter)
        self.update_rule.update(segments, grad_scale)
        if written:
            torch.autograd.graph.increment_version(written)  # a backward through the old values is an error
        return loss

    def _segment(self, group: dict[str, Any], parameter: Tensor) -> Segment:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError(f"{type(self).__name__} takes dense gradients; use SparseAdam, or sparse=False")
        state = self.state[parameter]
        if parameter.dtype not in _LOW:
            return Segment(group, in_memory_order(parameter), _ordered_as(parameter, gradient), state, parameter)
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True, memory_format=torch.preserve_format)
        return Segment(
            group,
            in_memory_order(state["master"]),
            _ordered_as(parameter, gradient),
            state,
            like=parameter,
            copy=in_memory_order(parameter),
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state; the float32 state of low-precision parameters stays float32, which torch would round."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            if parameter.dtype in _LOW and number in state_dict["state"]:
                for key, value in state_dict["state"][number].items():
                    if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                        wide = value.to(parameter.device, torch.promote_types(value.dtype, torch.bfloat16), copy=True)
                        self.state[parameter][key] = wide
        for group in self.param_groups:
            for option, value in _NOT_OURS.items():
                group[option] = value


class FusedAdam(FusedOptimizer):
    """Adam (Kingma and Ba 2015); `weight_decay` is added to the gradient.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the decay.
        maximize: Ascend.
        moment_dtype: "float32", or "bfloat16" to halve the moments' memory (rounded to nearest each step).
    """

    update_rule = AdamRule()
    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        form = {"amsgrad": False, "decoupled_weight_decay": self._decoupled, "moment_dtype": moment_dtype}
        super().__init__(params, {**options, **form})


class FusedAdamW(FusedAdam):
    """AdamW (Loshchilov and Hutter 2019): decay apart from the gradient; 0.01 by default, as in torch."""

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, moment_dtype=moment_dtype)


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023)."""

    update_rule = LionRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize, "moment_dtype": moment_dtype})


class FusedAdagrad(FusedOptimizer):
    """Adagrad (Duchi et al. 2011); as `torch.optim.Adagrad`, but its state is made in the first step."""

    update_rule = AdagradRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "initial_accumulator_value": initial_accumulator_value})


class FusedSGD(FusedOptimizer):
    """SGD with momentum and Nesterov's form; as `torch.optim.SGD`."""

    update_rule = SGDRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov=True needs a momentum and dampening=0")
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**options, "nesterov": nesterov, "maximize": maximize})


class FusedLamb(FusedOptimizer):
    """LAMB (You et al. 2020), with bias correction; the trust ratio is |p| / |update|, or 1 where either is 0."""

    update_rule = LambRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize, "moment_dtype": moment_dtype})


def _ordered_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient's elements in the order of the parameter's memory."""
    if gradient.stride() != parameter.stride() and not (parameter.is_contiguous() and gradient.is_contiguous()):
        gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return in_memory_order(gradient)


def _check_range(group: dict[str, Any]) -> None:
    bounds: dict[str, tuple[float, float]] = {"momentum": (0.0, 1.0)}
    for name in ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "momentum"):
        low, high = bounds.get(name, (0.0, float("inf")))
        if name in group and not low <= float(group[name]) <= high:
            raise ValueError(f"{name} must be at least 0{' and at most 1' if high == 1 else ''}, not {group[name]}")
    for index, beta in enumerate(group.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] must be in [0, 1), not {beta}")
    if group.get("moment_dtype", "float32") not in ("float32", "bfloat16"):
        raise ValueError(f"moment_dtype must be 'float32' or 'bfloat16', not {group['moment_dtype']!r}")
