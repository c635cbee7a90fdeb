"""Optimizers and learning rate schedules of a DeepSpeed config, checked by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..rules import from_origin, wrong_type
from ..section import PYTHON
from .classify import AUTO

_FLAGS = "foreach maximize capturable differentiable"
_ADAM = f"lr betas eps weight_decay amsgrad fused {_FLAGS}"
# Names that DeepSpeed's own optimizers take and torch's do not; all have one accepted meaning here.
_OF_DEEPSPEED = {"bias_correction": True, "adam_w_mode": None, "torch_adam": None, "fp32_optimizer_states": True}

_OPTIMIZERS = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": f"lr lr_decay weight_decay initial_accumulator_value eps fused {_FLAGS}",
    "Lamb": "lr betas eps weight_decay max_coeff min_coeff",
    "Lion": "lr betas weight_decay",
    "SGD": f"lr momentum dampening weight_decay nesterov fused {_FLAGS}",
    "Adadelta": f"lr rho eps weight_decay {_FLAGS}",
    "Adamax": f"lr betas eps weight_decay {_FLAGS}",
    "ASGD": f"lr lambd alpha t0 weight_decay {_FLAGS}",
    "NAdam": f"lr betas eps weight_decay momentum_decay decoupled_weight_decay {_FLAGS}",
    "RAdam": f"lr betas eps weight_decay decoupled_weight_decay {_FLAGS}",
    "RMSprop": f"lr alpha eps weight_decay momentum centered {_FLAGS}",
    "Rprop": f"lr etas step_sizes {_FLAGS}",
}
_WITH_CLASSES = ("adam", "adamw", "adagrad", "lamb", "lion", "sgd")
_ONE_BIT = "1-bit optimizers compress what ranks exchange and change the weights; use AdamW or Lamb"
_MU = "mu-parametrisation scales learning rates per layer; give parameter groups with their own lr to AdamW or SGD"
_REFUSED = {
    "OneBitAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
    "ZeroOneAdam": _ONE_BIT,
    "MuAdam": _MU,
    "MuAdamW": _MU,
    "MuSGD": _MU,
    "Muon": "it orthogonalises whole matrices, which slices do not hold; use AdamW",
    "LBFGS": "it evaluates the loss several times per step and couples all elements; use AdamW",
    "SparseAdam": "gradients here are dense; use AdamW",
    "Adafactor": "it needs whole matrices; use AdamW, or construct it in your code at stage 0",
}

WARMUP_TYPES = ("log", "linear")
"""Ways up of a warmup."""
OTHER_WARMUPS = "DeepSpeed takes any other name for 'log'; set 'log' for what it does"
"""Behind an error: there it is a line in the log, and a run with another schedule than was asked for."""
_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
_SCHEDULERS = {
    "LRRangeTest": (
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
        "last_batch_iteration"
    ),
    "OneCycle": (
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
        "last_batch_iteration"
    ),
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": f"total_num_steps {_WARMUP}",
    "WarmupCosineLR": (
        "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"
    ),
}

_AUTO_PARAMS = frozenset(
    {"lr", "betas", "eps", "weight_decay", "total_num_steps"}
    | {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "warmup_min_ratio"}
)


@dataclass(frozen=True)
class Named:
    """An optimizer or a scheduler: its name and its parameters."""

    type: str
    """The name: one of `torch.optim` (or Lamb, Lion), or of DeepSpeed's schedules."""
    params: Mapping[str, Any]
    """Arguments by name; ``"auto"`` where the framework decides."""
    origin: str = PYTHON
    """Where it was set."""


class Refusal(ValueError):
    """A name that is known and not supported; the message is the reason."""


def read_optimizer(
    name: str, params: Mapping[str, Any], path: str, origin: str, clipping: float | None = None
) -> Named:
    """Checks an optimizer by its name; DeepSpeed's own names are accepted in any case of letters.

    Its classes' names are accepted as well: `FusedAdam`, `CPUAdam`, `DeepSpeedCPUAdam` are `Adam`.

    DeepSpeed's ``Adam`` decouples weight decay unless ``adam_w_mode`` is false: it comes back as ``AdamW``.

    Args:
        name: As it is spelled.
        params: Arguments.
        path: Of the section.
        origin: Where it was set.
        clipping: The config's `gradient_clipping`, if it has one: an equal `max_grad_norm` says nothing new.

    Raises:
        Refusal: If it is known and not supported.
        TypeError: If a parameter's name is no string.
        ValueError: If the name or that of a parameter is unknown, or a parameter is ``"auto"`` that nobody decides.
    """
    kind = _name("optimizer", short_name(name), {**_OPTIMIZERS, **_REFUSED}, path, origin)
    if kind in _REFUSED:
        raise Refusal(_REFUSED[kind])
    known = _OPTIMIZERS[kind].split()
    if kind in ("Adam", "AdamW", "Adagrad", "Lamb", "Lion"):
        known += _OF_DEEPSPEED
    if "max_grad_norm" in params:
        if clipping is None or isinstance(params["max_grad_norm"], bool) or params["max_grad_norm"] != clipping:
            raise Refusal("params.max_grad_norm clips in DeepSpeed's old fp16 optimizers only; use gradient_clipping")
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
    _check_params(kind, params, known, path, origin)
    for extra, only in _OF_DEEPSPEED.items():
        if only is not None and params.get(extra, only) != only:
            raise Refusal(f"{extra}: {params[extra]!r} is not supported; leave it out")
    if kind == "Adam" and params.get("adam_w_mode", True):
        kind = "AdamW"
    return Named(kind, {key: value for key, value in params.items() if key not in _OF_DEEPSPEED}, origin)


def short_name(name: str) -> str:
    """An optimizer's name without what DeepSpeed's classes have in front: ``DeepSpeedCPUAdam`` is ``Adam``."""
    front = next((front for front in ("deepspeedcpu", "fused", "cpu") if name.lower().startswith(front)), "")
    short = name[len(front) :]
    return short if short.lower() in _WITH_CLASSES else name


def read_scheduler(name: str, params: Mapping[str, Any], path: str, origin: str) -> Named:
    """Checks a schedule by its name. Errors as in `read_optimizer`."""
    kind = _name("scheduler", name, _SCHEDULERS, path, origin)
    _check_params(kind, params, _SCHEDULERS[kind].split(), path, origin)
    way_up = params.get("warmup_type", AUTO)
    if way_up not in (*WARMUP_TYPES, AUTO):
        raise ValueError(
            f"{path}.params.warmup_type is {way_up!r}{from_origin(origin)}; accepted: "
            f"{', '.join(map(repr, WARMUP_TYPES))}. {OTHER_WARMUPS}"
        )
    return Named(kind, dict(params), origin)


def _name(what: str, name: str, known: Mapping[str, Any], path: str, origin: str) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[near[0]]!r}?" if near else f"known: {', '.join(known)}"
    raise ValueError(
        f"{path}.type is {name!r}{from_origin(origin)}, which is no {what} that is known by name; {hint} "
        "Others are constructed in your code"
    )


def _check_params(kind: str, params: Mapping[str, Any], known: list[str], path: str, origin: str) -> None:
    for name, value in params.items():
        if not isinstance(name, str):
            raise TypeError(wrong_type(f"a key of '{path}.params'", name, "str", origin))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"{kind} has: {', '.join(known)}"
            raise ValueError(f"unknown key '{path}.params.{name}'{from_origin(origin)} of {kind}; {hint}")
        if value == AUTO and name not in _AUTO_PARAMS:
            raise ValueError(
                f"{path}.params.{name} is 'auto'{from_origin(origin)}, but no framework decides it; give a value, or "
                "leave the key out"
            )
