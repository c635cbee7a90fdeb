"""Checks of optimizers: elementwise updates, whole matrices, and one optimizer for each parameter.

An optimizer is elementwise if the update of an element needs that element alone. Of torch's classes that is known; any
other is tried once on a small matrix, whole and in pieces.

One of whole matrices (`matrix_optimizers`) may hold those alone that lie on one rank.

Each trainable parameter is in one optimizer at least, and in exactly one where states are offloaded.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.fused import FusedLamb, FusedOptimizer

ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of `torch.optim`; per-tensor state of theirs is scalar and the same in every piece."""

_REASONS = {
    "Adafactor": "it factors the second moment over rows and columns and needs whole matrices",
    "LBFGS": "a step of its own evaluates the loss several times and couples all elements",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it updates rows of sparse gradients, and gradients are dense once they are reduced",
    "LAMB": "its trust ratio needs the norm of each full parameter",
    "Lamb": "its trust ratio needs the norm of each full parameter",
    "LARS": "its trust ratio needs the norm of each full parameter",
    "Shampoo": "it preconditions whole matrices",
}


def check_order_of_sums(optimizer: Optimizer) -> None:
    """Raise if an optimizer sums over elements in an order that follows from their division (`reproducible.slots`).

    Raises:
        ValueError: Naming it and the way out.
    """
    if isinstance(optimizer, (FusedLamb, torch.optim.LBFGS)):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} adds up norms or products over all elements, part by part of each rank, and with "
            "reproducible.slots bits may not depend on the parts: use an elementwise optimizer (AdamW, SGD, Lion, ...) "
            "or Muon"
        )


def is_elementwise(optimizer: Optimizer, asserted: Sequence[str] = ()) -> bool:
    """True if an optimizer of torch or of the user updates every element by itself."""
    try:
        check_elementwise(optimizer, asserted)
    except TypeError:
        return False
    return not isinstance(optimizer, FusedOptimizer)


def reason_against(optimizer: Optimizer) -> str | None:
    """Why the steps of an optimizer need more than elements; None if nothing is known or found."""
    known = _REASONS.get(type(optimizer).__name__.removeprefix("Fused"))
    return known or (None if isinstance(optimizer, FusedOptimizer) else why_not_elementwise(optimizer))


def check_elementwise(optimizer: Optimizer, asserted: Sequence[str] = (), *, whole: bool = False) -> None:
    """Raise unless the optimizer may update pieces of parameters.

    Args:
        optimizer: The optimizer.
        asserted: Class names that the user declares to be elementwise.
        whole: Every rank holds full parameters (stage 0), so that any optimizer serves that steps once per gradient.

    Raises:
        TypeError: Naming the class, the reason, and the way out.
    """
    if isinstance(optimizer, FusedOptimizer):
        return  # LAMB's norms are added up over pieces
    # Before declared names count: nobody's word makes blocks of pieces the blocks of the whole.
    if not whole and (few := _in_blocks(optimizer)):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer {name} cannot run on pieces of parameters: {few}, and the blocks of a piece are others than "
            "those of the whole parameter, so that a run would depend on the number of ranks, and its state could not "
            "be saved. torch.optim.AdamW, Adam or SGD with the setting optimizer: {state_bits: 8} has states of 8 bits "
            f"that no number of ranks changes. Or with matrix_optimizers=[{name!r}] and matrix_parameters=['*'] each "
            "parameter lies whole on one rank; or use stage 0, where every rank holds all of them."
        )
    for cls in type(optimizer).__mro__:
        if cls.__name__ in asserted:
            return
        if cls.__module__.startswith("torch.optim") and cls.__name__ in ELEMENTWISE:
            # Unwrapped: torch puts a profiling wrapper around `step` of whichever class is made first.
            if inspect.unwrap(type(optimizer).step) is inspect.unwrap(getattr(cls, "step")):  # noqa: B009
                return
            # A subclass with a step of its own is tried as any other class is.
            break
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            f"optimizer {name} cannot run here: {_REASONS['SparseAdam']}, at every stage. Use torch.optim.Adagrad or "
            "SGD without momentum, which leave rows without a gradient as they are and so give the same, or "
            "torch.optim.AdamW, whose moments of such rows decay; sparse=True of the embedding saves nothing then"
        )
    if whole and not isinstance(optimizer, torch.optim.LBFGS):
        return
    reason = _REASONS.get(name) or why_not_elementwise(optimizer)
    if reason is None:
        return
    supported = ", ".join(f"torch.optim.{known}" for known in ELEMENTWISE if hasattr(torch.optim, known))
    raise TypeError(
        f"optimizer {name} cannot run on sharded parameters: {reason}. Use one of {supported}; if {name} updates every "
        f"element from that element's own gradient and state alone, say so with elementwise_optimizers=[{name!r}]; if "
        f"it needs whole matrices, with matrix_optimizers=[{name!r}]; or use stage 0, where every rank holds full "
        "parameters."
    )


def _in_blocks(optimizer: Optimizer) -> str:
    """States of few bits that share a scale in blocks, as bitsandbytes and torchao say it, in words; "": it has none.

    A trial does not tell: they keep 32 bits for small parameters, for those of other sizes than blocks (torchao) and
    for those that were excepted by their place among the parameters (bitsandbytes, by transformers for embeddings).
    """
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    if isinstance(bits, int) and bits < 16:
        return f"its state is of {bits} bits, with a scale for each block of elements"
    size = getattr(optimizer, "block_size", None)
    if isinstance(size, int) and size > 1 and type(optimizer).__module__.startswith("torchao."):
        return f"its state is of few bits, with a scale for each block of {size} elements"
    return ""


_RATES = ("lr", "initial_lr")
_SHAPE, _CUT, _STEPS = (132, 130), 8587, 8
"""A matrix, the element before which it is cut, and how often it is updated.

Large enough for classes that factor matrices from 128 rows and columns on, as Adafactors do.
"""
_TOLERANCE = 1e-4
"""Of the largest change: kernels round differently in the bodies and the tails of tensors."""
_LEAST_RATE = 0.01
"""Learning rate of a trial at least: after a scheduler's warm-up has begun, the group's own may be zero."""


def why_not_elementwise(optimizer: Optimizer, *, vectors: bool = False) -> str | None:
    """Try an optimizer on a small matrix, with the options of each of its groups; None if nothing speaks against it.

    With `vectors` it is tried on a vector, and with the options of groups that are not marked as elementwise.

    It updates a matrix, and the two pieces of the same numbers that two ranks would hold, each in an optimizer of its
    own. Copies do so: the user's parameters, states and attributes stay as they are, and so do random numbers.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    if vectors:
        groups = [each for each in groups if each.get("use_muon", True) and not each.get("elementwise")]
    kind = "vector" if vectors else "matrix"
    differ = [sorted((k, repr(v)) for k, v in group.items() if k not in ("params", *_RATES)) for group in groups]
    # Groups that differ in rates alone are tried once.
    distinct = dict(zip(map(repr, differ), groups, strict=True))
    devices = [parameter.device for group in groups for parameter in group["params"]]
    device = next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
    cpu = device.type == "cpu"
    forked = torch.random.fork_rng(devices=[] if cpu else [device], device_type="cuda" if cpu else device.type)
    with forked, torch.no_grad():
        for group in distinct.values():
            try:
                reason = _try_group(optimizer, group, device, kind)
            except Exception as error:
                text = str(error).partition("\n")[0]
                return f"trying it on a small {kind} failed ({type(error).__name__}: {text})"
            if reason is not None:
                return reason
    return None


def _try_group(optimizer: Optimizer, group: dict[str, Any], device: torch.device, kind: str) -> str | None:
    numel = _SHAPE[0] * _SHAPE[1]
    shape = _SHAPE if kind == "matrix" else (numel,)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator)
    # Of very different sizes, so that whatever is shared between elements shows.
    sizes = torch.logspace(-3, 1, numel)[torch.randperm(numel, generator=generator)]
    gradients = [torch.randn(numel, generator=generator) * sizes for _ in range(_STEPS)]
    whole, again = (_tried(optimizer, group, values, gradients, shape, device, seed) for seed in (1, 2))
    if not torch.equal(whole, again):
        return "it draws random numbers, and each rank would draw others"
    pieces = [
        _tried(optimizer, group, values[cut], [gradient[cut] for gradient in gradients], None, device, 1)
        for cut in (slice(None, _CUT), slice(_CUT, None))
    ]
    changed = float((whole - values).abs().max())
    if not changed > _TOLERANCE:
        return f"it was tried on a small {kind}, and {_STEPS} steps changed no element by more than {_TOLERANCE:g}"
    apart = (torch.cat(pieces) - whole).abs()
    # Each step rounds at the size of the values, however little it changes them: the bound allows for both.
    worst, rounding = int(apart.argmax()), 4 * torch.finfo(torch.float32).eps * float(whole.abs().max())
    if bool(torch.isfinite(apart).all()) and float(apart[worst]) <= _TOLERANCE * changed + rounding:
        return None
    return (
        f"it was tried on a {kind} of {list(shape)}, and after {_STEPS} steps element {worst} is "
        f"{float(whole[worst]):.4g}, in pieces {float(torch.cat(pieces)[worst]):.4g}"
    )


def _tried(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Tensor,
    gradients: Sequence[Tensor],
    shape: tuple[int, ...] | None,
    device: torch.device,
    seed: int,
) -> Tensor:
    """Values after some steps of a copy of the optimizer, flat, on the CPU."""
    part = nn.Parameter(values.clone().view(shape or (-1,)).to(device))
    held = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    made: Any = type(optimizer).__new__(type(optimizer))
    # Attributes that refer to the optimizer or its parameters refer to the copy and its one parameter then.
    memo: dict[int, Any] = {id(optimizer): made} | {id(parameter): part for parameter in held}
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            made.__dict__[key] = OrderedDict()
        elif key not in ("state", "param_groups", "step"):  # schedulers replace `step` by a function of the object's
            made.__dict__[key] = copy.deepcopy(value, memo)
    options = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
    for key in _RATES:
        if isinstance(rate := options.get(key), (int, float, Tensor)) and rate < _LEAST_RATE:
            options[key] = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, Tensor) else _LEAST_RATE
    made.__dict__ |= {"param_groups": [{**options, "params": [part]}], "state": defaultdict(dict)}
    for parameter in group["params"]:
        if parameter.dim() and (begun := optimizer.state.get(parameter)):  # by its constructor, or by earlier steps
            made.state[part] = {key: _like(part, value, parameter) for key, value in begun.items()}
            break
    torch.manual_seed(seed)
    for gradient in gradients:
        part.grad = gradient.clone().view(part.shape).to(device)
        inspect.unwrap(type(optimizer).step)(made)
    return part.detach().flatten().cpu()


def _like(part: Tensor, value: Any, parameter: Tensor) -> Any:
    """A state for `part` like that of a parameter; per-element ones begin with one value."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != parameter.shape:
        return copy.deepcopy(value)
    dtype = part.dtype if value.is_floating_point() else value.dtype
    return torch.full_like(part, value.detach().flatten()[0].item() if value.numel() else 0.0, dtype=dtype)


Named = Iterable[tuple[str, nn.Parameter]]


def is_matrix_optimizer(optimizer: Optimizer, declared: Sequence[str]) -> bool:
    """True if an optimizer's class, or a base of it, is declared to need whole matrices."""
    return any(cls.__name__ in declared for cls in type(optimizer).__mro__)


def check_matrices(optimizer: Optimizer, model: ShardedModel, *, whole: bool) -> None:
    """Raise if an optimizer of matrices holds one that no rank can have whole.

    Param groups with `elementwise=True` or `use_muon=False` (of classes that step on other parameters as AdamW does)
    are left out. Whether vectors may be divided is tried; see `why_not_elementwise`.

    Args:
        optimizer: The optimizer.
        model: The sharded model.
        whole: Each must lie on one rank; else slices of it may lie on several.

    Raises:
        ValueError: Naming the parameter, why it is divided, and the way out.
    """
    kind, reason = type(optimizer).__name__, None
    for group in optimizer.param_groups:
        if group.get("elementwise") or not group.get("use_muon", True):
            continue
        for parameter in group["params"]:
            place = model.place(parameter)
            assert place is not None
            bucket, index = place
            name = bucket.names[index]
            of_experts = parameter in model.experts and parameter.dim() == 3 and not whole
            if bucket.parts[index].dim is not None and not of_experts:
                by = "mesh.expert" if parameter in model.experts else "tensor parallelism"
                raise ValueError(
                    f"{kind} needs whole matrices, and {by} divides {name!r}: train it with an elementwise optimizer "
                    "such as AdamW"
                )
            if not (whole and model.placement.shard_optimizer) or bucket.whole or not parameter.requires_grad:
                continue
            if parameter.dim() == 1 and parameter.numel() > 1 and bucket.ranks.shard_size > 1:
                # Tried once for all vectors of the optimizer.
                if reason is None:
                    reason = why_not_elementwise(optimizer, vectors=True) or ""
                if reason:
                    raise ValueError(
                        f"{kind} needs whole vectors, and {name!r} {tuple(parameter.shape)} is divided among ranks: "
                        f"{reason}. Let matrix_parameters hold a pattern of its name ('*' for all), or mark its param "
                        "group with elementwise=True if each element is updated by itself there"
                    )
            if parameter.dim() > 1:
                raise ValueError(
                    f"{kind} needs whole matrices, and {name!r} {tuple(parameter.shape)} is divided among ranks: let "
                    f"matrix_parameters hold a pattern of its name, beside those of the others "
                    f"({model.config.matrix_parameters or 'all matrices of units below the root'}), or train it with "
                    "an elementwise optimizer such as AdamW, as is usual for embeddings and heads"
                )


def check_twice(optimizers: Sequence[Optimizer], named: Named) -> None:
    """Raise if a parameter is in two optimizers, whose states would be of one name in a tier.

    Raises:
        ValueError: Naming the parameters and the optimizers.
    """
    holders: dict[int, list[str]] = {}
    for optimizer in optimizers:
        for parameter in {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
            holders.setdefault(parameter, []).append(type(optimizer).__name__)
    twice = [name for name, p in named if len(holders.get(id(p), [])) > 1]
    if twice:
        names = next(" and ".join(names) for names in holders.values() if len(names) > 1)
        raise ValueError(
            f"parameter(s) {twice[:5]} are in two optimizers ({names}), and offloaded state is of one: give each "
            "parameter to one of them, or leave offload.optimizer at 'none'"
        )


def check_all_held(optimizers: Sequence[Optimizer], named: Named) -> None:
    """Raise if a trainable parameter is in no optimizer.

    Raises:
        ValueError: Naming the parameters and the way out.
    """
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in named if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameter(s) are in no optimizer, e.g. {missing[:5]}: add them to one, or "
            "freeze them with requires_grad_(False)"
        )
