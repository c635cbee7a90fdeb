"""Settings of a DeepSpeed JSON: batch arithmetic, optimizers and schedules by name, what scripts read.

samples per step = samples per rank and micro-batch x micro-batches per step x ranks
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_strategy.config.deepspeed.classify import AUTO, KeyReport
from zero_strategy.config.deepspeed.keys import REJECTED
from zero_strategy.config.section import PYTHON, Setting, from_origin, wrong_type

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSettings:
    """Batch sizes of a config, in samples; of the three numbers, two give the third.

    None: ``"auto"``, or not there.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is less than 1.
    """

    train_batch_size: int | None = None
    """Samples of one optimizer step, all ranks together."""
    train_micro_batch_size_per_gpu: int | None = None
    """Samples that one rank takes in one forward pass."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(wrong_type(name, value, "int", None))
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; accepted: 1 or more")

    def resolve(self, world_size: int) -> BatchSettings:
        """Derives what is left open, all three.

        Any two numbers give the third. Of one alone, accumulation counts as 1; accumulation alone says too little.

        Args:
            world_size: Number of data-parallel ranks.

        Raises:
            ValueError: If the numbers disagree, do not divide, or are too few; the arithmetic is spelled out.
        """
        if self.train_batch_size is None and self.train_micro_batch_size_per_gpu is None:
            raise ValueError(
                f"neither {TRAIN} nor {MICRO} is a number; give one of them, with {ACCUMULATION} if that is not 1"
            )
        return self.derive(world_size)

    def derive(self, world_size: int) -> BatchSettings:
        """Like `resolve`; where only accumulation is known, or nothing, the sizes stay unknown.

        Raises:
            ValueError: If the numbers disagree or do not divide; the arithmetic is spelled out.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; accepted: 1 or more")
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if total is None:
            steps = steps or 1
            whole = None if micro is None else micro * steps * world_size
            return replace(self, train_batch_size=whole, gradient_accumulation_steps=steps)
        if micro is None:
            steps = steps or 1
            micro = _share(total, ACCUMULATION, steps, MICRO, world_size)
        elif steps is None:
            steps = _share(total, MICRO, micro, ACCUMULATION, world_size)
        elif total != micro * steps * world_size:
            raise ValueError(
                f"{TRAIN} is {total}, but {MICRO} {micro} x {ACCUMULATION} {steps} x {world_size} ranks = "
                f"{micro * steps * world_size}; leave out one of the three"
            )
        return BatchSettings(total, micro, steps)


_NAMES = (TRAIN, MICRO, ACCUMULATION)


def _share(total: int, name: str, value: int, wanted: str, world_size: int) -> int:
    share, rest = divmod(total, value * world_size)
    if rest:
        raise ValueError(
            f"{TRAIN} {total} / ({name} {value} x {world_size} ranks) = {total / (value * world_size):g}, "
            f"which is no whole number of {wanted}; use a multiple of {value * world_size}"
        )
    return share


_FLAGS = "foreach maximize capturable differentiable"
_ADAM = f"lr betas eps weight_decay amsgrad fused {_FLAGS}"
# Names that DeepSpeed's own optimizers take and torch's do not; None: every value is done or translated here.
_OF_DEEPSPEED = {"bias_correction": None, "adam_w_mode": None, "torch_adam": None, "fp32_optimizer_states": True}
_CORRECTING = ("Adam", "AdamW", "Lamb")

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
    "Muon": "its groups need the model; construct zero_strategy.optim.MuonAdamW in your code",
    "LBFGS": "its step takes a closure, which train_batch() and step() have none of; use AdamW, or the Trainer",
    "SparseAdam": "gradients here are dense; use AdamW",
    "Adafactor": "it needs whole matrices; construct it in your code, with the setting matrix_parameters: ['*']",
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
    corrected = params.get("bias_correction", True)
    if corrected not in (True, False):
        raise TypeError(wrong_type(f"{path}.params.bias_correction", corrected, "bool", origin))
    if not corrected and (kind not in _CORRECTING or params.get("torch_adam", False)):
        switch = "torch_adam: true asks for torch's Adam" if kind in _CORRECTING else f"{kind} corrects no bias"
        raise Refusal(f"bias_correction: {corrected!r} has no meaning there: {switch}; leave one out")
    if kind == "Adam" and params.get("adam_w_mode", True):
        kind = "AdamW"
    kept = {key: value for key, value in params.items() if key not in _OF_DEEPSPEED}
    return Named(kind, kept if corrected else {**kept, "bias_correction": False}, origin)


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


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Contents of a DeepSpeed config. Made by `read_deepspeed` and `inspect_deepspeed`."""

    origin: str
    """Where it was read from, such as ``user: ds_config.json``."""
    zero: Mapping[str, Setting]
    """Our settings by their full key, with the JSON's key as origin; what is not here has our default."""
    batch: BatchSettings
    """Batch sizes."""
    gradient_clipping: Setting
    """Largest gradient norm; 0.0 does not clip, None is ``"auto"``."""
    precision: Setting
    """``fp32``, ``fp16`` or ``bf16``; None is ``"auto"``."""
    optimizer: Named | None
    """The optimizer, if the config has one."""
    scheduler: Named | None
    """The learning rate schedule, if the config has one."""
    drop_last: bool
    """Whether the data loader leaves out an incomplete last batch."""
    activations: Mapping[str, Any]
    """The section `activation_checkpointing`, by its keys; what is null is left out."""
    pipeline: Mapping[str, Any]
    """The section `pipeline`, likewise."""
    observers: Mapping[str, Mapping[str, Any]]
    """The sections tensorboard, wandb, csv_monitor, comms_logger and flops_profiler that are on, with defaults."""
    found: tuple[KeyReport, ...]
    """What became of every key, in the order of the file."""
    autocast: Setting | None
    """``bf16`` or ``fp16``, which forwards cast to by `torch_autocast`; None: the section is off."""
    owned: Mapping[str, Setting]
    """What the file sets (not ``"auto"``) and a framework may own, by DeepSpeed's key; ``precision`` for fp16, bf16."""

    def reports_origin(self, section: str) -> str:
        """The place of a section, in brackets, for messages."""
        return from_origin(f"{self.origin}: {section}")

    def rejected(self) -> list[KeyReport]:
        """The keys that ask for what is not here."""
        return [report for report in self.found if report.classification == REJECTED]
