"""Optimizers with DeepSpeed's arguments, taken by the fused optimizers of this package, and by the names of a JSON.

`make_optimizer` and `make_scheduler` make what a DeepSpeed JSON names, with DeepSpeed's parameters and defaults.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from zero_strategy import optim
from zero_strategy.compat.deepspeed.schedules import SCHEDULES
from zero_strategy.config.deepspeed.settings import Named


class FusedAdam(optim.FusedAdam):
    """Adam, or AdamW with `adam_w_mode`; as `deepspeed.ops.adam.FusedAdam`.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: False leaves the moments as they are.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        adam_w_mode: Decay the weights apart from the gradient.
        weight_decay: Factor of the decay.
        amsgrad: False.
        set_grad_none: Accepted; `zero_grad` has torch's argument for it.

    Raises:
        ValueError: If `amsgrad` asks for what is not done.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check_adam(amsgrad)
        self._decoupled = adam_w_mode
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)


class DeepSpeedCPUAdam(optim.FusedAdam):
    """Adam, or AdamW with `adamw_mode`, wherever the parameters are; as `deepspeed.ops.adam.DeepSpeedCPUAdam`.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: False leaves the moments as they are.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the decay.
        amsgrad: False.
        adamw_mode: Decay the weights apart from the gradient.
        fp32_optimizer_states: Keep moments in float32; False: in bfloat16.

    Raises:
        ValueError: If `amsgrad` asks for what is not done.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check_adam(amsgrad)
        self._decoupled = adamw_mode
        form: dict[str, Any] = {"bias_correction": bias_correction}
        form["moment_dtype"] = "float32" if fp32_optimizer_states else "bfloat16"
        super().__init__(model_params, lr, betas, eps, weight_decay, **form)


def _check_adam(amsgrad: bool) -> None:
    if amsgrad:
        raise ValueError("amsgrad=True is not done here; use torch.optim.Adam(amsgrad=True)")


class DeepSpeedCPUAdagrad(optim.FusedAdagrad):
    """Adagrad wherever the parameters are; as `deepspeed.ops.adagrad.DeepSpeedCPUAdagrad`.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        eps: Added to the root of the sum.
        weight_decay: Factor of the decay.
        amsgrad: False.
        fp32_optimizer_states: True.

    Raises:
        ValueError: If `amsgrad` or `fp32_optimizer_states` asks for what is not done.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad=True is not done here; leave it out")
        if not fp32_optimizer_states:
            raise ValueError("fp32_optimizer_states=False is not done here: sums of squares are kept in float32")
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


class FusedLamb(optim.FusedLamb):
    """See `deepspeed.ops.lamb.FusedLamb`, but for the trust ratio, which is not bounded; a warning says so.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: False leaves the moments as they are.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        eps_inside_sqrt: False.
        weight_decay: Factor of the decay.
        max_grad_norm: 0; the engine clips.
        max_coeff: Accepted.
        min_coeff: Accepted.
        amsgrad: False.

    Raises:
        ValueError: If an option asks for what is not done; names it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm:
            raise ValueError(f"max_grad_norm={max_grad_norm} is not done here; set gradient_clipping in the config")
        for name, value in {"eps_inside_sqrt": eps_inside_sqrt, "amsgrad": amsgrad}.items():
            if value:
                raise ValueError(f"{name}={value} is not done here; leave it out")
        warnings.warn(
            f"FusedLamb: the trust ratio is not bounded here (DeepSpeed: {min_coeff} to {max_coeff})", stacklevel=2
        )
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)


class FusedLion(optim.FusedLion):
    """See `deepspeed.ops.lion.FusedLion`.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        betas: Factors of the update and of the moment.
        weight_decay: Factor of the decay.
        set_grad_none: Accepted; `zero_grad` has torch's argument for it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(optim.FusedLion):
    """Lion wherever the parameters are; as `deepspeed.ops.lion.DeepSpeedCPULion`.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        betas: Factors of the update and of the moment.
        weight_decay: Factor of the decay.
        fp32_optimizer_states: Keep the moment in float32; False: in bfloat16.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, betas, weight_decay, moment_dtype="float32" if fp32_optimizer_states else "bfloat16"
        )


# ---- by the names of a config ----

_REFUSED = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD", "Muon")
_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "lr_decay", "max_coeff", "min_coeff")
"""Arguments of optimizers that are numbers: torch only finds out while it steps, if at all."""
_LAMB_BOUNDS = {"max_coeff": 10.0, "min_coeff": 0.01}


def make_optimizer(named: Named, parameters: Iterable[Any]) -> Optimizer:
    """The optimizer of a config.

    Names are DeepSpeed's, in any case, with or without "Fused", "CPU" and "DeepSpeedCPU"; else those of `torch.optim`.

    Args:
        named: Name and arguments.
        parameters: Parameters or param groups.

    Raises:
        ValueError: If the name is not known (names the nearest), or an argument is not, or does what is not done here.
    """
    params = dict(named.params)
    if "max_grad_norm" in params:
        raise ValueError("optimizer.params.max_grad_norm is no parameter of an optimizer; set gradient_clipping")
    make = _OURS.get(_key(named.type))
    if make is not None:
        return make(parameters, params)
    if named.type in _REFUSED:
        raise ValueError(f"optimizer.type {named.type!r} is not done by this package; use one of {', '.join(_SHOWN)}")
    if named.type in _torch_names(torch.optim, Optimizer):
        return _call(getattr(torch.optim, named.type), parameters, params, "optimizer")  # type: ignore[no-any-return]
    raise ValueError(_unknown("optimizer", named.type, [*_SHOWN, *_torch_names(torch.optim, Optimizer)]))


def make_scheduler(named: Named, optimizer: Optimizer) -> Any:
    """The scheduler of a config: DeepSpeed's five names, or a class of `torch.optim.lr_scheduler`.

    Raises:
        ValueError: If the name is not known (names the nearest), or an argument is not.
    """
    kinds = torch.optim.lr_scheduler
    if named.type in SCHEDULES:
        return _call(SCHEDULES[named.type], optimizer, named.params, "scheduler")
    others = _torch_names(kinds, kinds.LRScheduler)
    if named.type in others:
        return _call(getattr(kinds, named.type), optimizer, named.params, "scheduler")
    raise ValueError(_unknown("scheduler", named.type, [*SCHEDULES, *others]))


def _adam(parameters: Iterable[Any], params: dict[str, Any], *, decoupled: bool = False) -> Optimizer:
    """DeepSpeed's "Adam" is AdamW unless `adam_w_mode` is false; its weight decay is 0 unless given, in both."""
    decoupled = bool(params.pop("adam_w_mode", True)) or decoupled
    params.setdefault("weight_decay", 0.0)
    _drop(params, "Adam", amsgrad=False, fp32_optimizer_states=True)
    _take_flag(params, "bias_correction", True)
    if params.pop("torch_adam", False):
        _drop(params, "Adam with torch_adam", bias_correction=True)
        return _call(torch.optim.AdamW if decoupled else torch.optim.Adam, parameters, params, "optimizer")  # type: ignore[no-any-return]
    return _call(optim.FusedAdamW if decoupled else optim.FusedAdam, parameters, params, "optimizer")  # type: ignore[no-any-return]


def _lamb(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    """DeepSpeed bounds the trust ratio, which the paper does not."""
    bounds = {key: params.pop(key, default) for key, default in _LAMB_BOUNDS.items()}
    warnings.warn(
        f"optimizer.type 'Lamb': the trust ratio is not bounded here (DeepSpeed: {bounds['min_coeff']} to "
        f"{bounds['max_coeff']})",
        stacklevel=2,
    )
    _drop(params, "Lamb", eps_inside_sqrt=False, amsgrad=False)
    _take_flag(params, "bias_correction", True)
    return _call(optim.FusedLamb, parameters, {"eps": 1e-8, "weight_decay": 0.0, **params}, "optimizer")  # type: ignore[no-any-return]


def _lion(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    _drop(params, "Lion", fp32_optimizer_states=True)
    return _call(optim.FusedLion, parameters, {"lr": 1e-3, **params}, "optimizer")  # type: ignore[no-any-return]


def _adagrad(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    _drop(params, "Adagrad", amsgrad=False, fp32_optimizer_states=True)
    return _call(optim.FusedAdagrad, parameters, params, "optimizer")  # type: ignore[no-any-return]


def _sgd(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    return _call(optim.FusedSGD, parameters, params, "optimizer")  # type: ignore[no-any-return]


_OURS: Mapping[str, Callable[[Iterable[Any], dict[str, Any]], Optimizer]] = MappingProxyType(
    {
        "adam": _adam,
        "adamw": partial(_adam, decoupled=True),
        "lamb": _lamb,
        "lion": _lion,
        "sgd": _sgd,
        "adagrad": _adagrad,
    }
)
_SHOWN = ("Adam", "AdamW", "Lamb", "Lion", "SGD", "Adagrad")


def _key(name: str) -> str:
    lower = name.lower()
    for prefix in ("deepspeedcpu", "cpu", "fused"):
        if lower.startswith(prefix):
            return lower[len(prefix) :]
    return lower


def _drop(params: dict[str, Any], name: str, **only: bool) -> None:
    """Take out options of which one value is done here.

    Raises:
        ValueError: If another value is asked for.
    """
    for key, value in only.items():
        if bool(params.pop(key, value)) != value:
            raise ValueError(f"optimizer.params.{key}={not value} of {name!r} is not done here; only {key}={value} is")


def _take_flag(params: dict[str, Any], key: str, default: bool) -> None:
    """Make a truth value of an option, which some files write as 0 or 1.

    Raises:
        TypeError: If it is something else.
    """
    value = params.get(key, default)
    if value not in (True, False):
        raise TypeError(f"optimizer.params.{key} is {value!r}; expected true or false")
    params[key] = bool(value)


def _call(cls: Callable[..., Any], first: Any, params: Mapping[str, Any], what: str) -> Any:
    known = list(inspect.signature(cls).parameters)[1:]
    for key, value in params.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known)}"
            raise ValueError(f"{what}.params.{key}: {getattr(cls, '__name__', cls)} has no such argument; {meant}")
        if isinstance(value, str) and key in _NUMBERS:
            raise TypeError(f"{what}.params.{key} is {value!r} (str); expected a number")
        if key == "betas" and not isinstance(value, (list, tuple)):
            raise TypeError(f"{what}.params.betas is {value!r}; expected two numbers")
    options = {key: tuple(value) if key == "betas" else value for key, value in params.items()}
    return cls(first, **options)


def _torch_names(module: Any, base: type) -> list[str]:
    """Classes of a module that derive from `base`."""
    found = vars(module).items()
    return [name for name, cls in found if isinstance(cls, type) and issubclass(cls, base) and cls is not base]


def _unknown(what: str, name: str, known: list[str]) -> str:
    lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    meant = f"did you mean {lower[near[0]]!r}?" if near else f"accepted: {', '.join(known)}"
    return f"{what}.type {name!r} is not known; {meant}"
