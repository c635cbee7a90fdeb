"""Optimizers and schedulers by the names that a DeepSpeed JSON gives them, with DeepSpeed's parameters and defaults."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from zero_strategy.compat.deepspeed.schedules import SCHEDULES
from zero_strategy.config.deepspeed.settings import Named
from zero_strategy.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedLion, FusedSGD

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
    _drop(params, "Adam", bias_correction=True, amsgrad=False, fp32_optimizer_states=True)
    if params.pop("torch_adam", False):
        return _call(torch.optim.AdamW if decoupled else torch.optim.Adam, parameters, params, "optimizer")  # type: ignore[no-any-return]
    return _call(FusedAdamW if decoupled else FusedAdam, parameters, params, "optimizer")  # type: ignore[no-any-return]


def _adamw(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    return _adam(parameters, params, decoupled=True)


def _lamb(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    """DeepSpeed bounds the trust ratio, which the paper does not."""
    bounds = {key: params.pop(key, default) for key, default in _LAMB_BOUNDS.items()}
    warnings.warn(
        f"optimizer.type 'Lamb': the trust ratio is not bounded here (DeepSpeed: {bounds['min_coeff']} to "
        f"{bounds['max_coeff']})",
        stacklevel=2,
    )
    _drop(params, "Lamb", bias_correction=True, eps_inside_sqrt=False, amsgrad=False)
    return _call(FusedLamb, parameters, {"eps": 1e-8, "weight_decay": 0.0, **params}, "optimizer")  # type: ignore[no-any-return]


def _lion(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    _drop(params, "Lion", fp32_optimizer_states=True)
    return _call(FusedLion, parameters, {"lr": 1e-3, **params}, "optimizer")  # type: ignore[no-any-return]


def _adagrad(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    _drop(params, "Adagrad", amsgrad=False, fp32_optimizer_states=True)
    return _call(FusedAdagrad, parameters, params, "optimizer")  # type: ignore[no-any-return]


def _sgd(parameters: Iterable[Any], params: dict[str, Any]) -> Optimizer:
    return _call(FusedSGD, parameters, params, "optimizer")  # type: ignore[no-any-return]


_OURS: Mapping[str, Callable[[Iterable[Any], dict[str, Any]], Optimizer]] = MappingProxyType(
    {"adam": _adam, "adamw": _adamw, "lamb": _lamb, "lion": _lion, "sgd": _sgd, "adagrad": _adagrad}
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
