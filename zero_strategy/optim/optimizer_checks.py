"""Checks of optimizers: elementwise updates, and one optimizer for each parameter.

An optimizer is elementwise if the update of an element needs that element alone.

Each trainable parameter is in one optimizer at least, and in exactly one where states are offloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from zero_strategy.optim.fused import FusedOptimizer

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
    "LBFGS": "it evaluates the loss several times per step and couples all elements",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it updates rows of sparse gradients; gradients here are dense",
    "LAMB": "its trust ratio needs the norm of each full parameter",
    "Lamb": "its trust ratio needs the norm of each full parameter",
    "LARS": "its trust ratio needs the norm of each full parameter",
    "Shampoo": "it preconditions whole matrices",
}


def is_elementwise(optimizer: Optimizer, asserted: Sequence[str] = ()) -> bool:
    """True if an optimizer of torch or of the user updates every element by itself."""
    try:
        check_elementwise(optimizer, asserted)
    except TypeError:
        return False
    return not isinstance(optimizer, FusedOptimizer)


def reason_against(optimizer: Optimizer) -> str | None:
    """Why the steps of a known optimizer need more than elements; None if nothing is known."""
    return _REASONS.get(type(optimizer).__name__.removeprefix("Fused"))


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
    for cls in type(optimizer).__mro__:
        if cls.__name__ in asserted:
            return
        if cls.__module__.startswith("torch.optim") and cls.__name__ in ELEMENTWISE:
            # Unwrapped: torch puts a profiling wrapper around `step` of whichever class is made first.
            if inspect.unwrap(type(optimizer).step) is inspect.unwrap(getattr(cls, "step")):  # noqa: B009
                return
            break
    name = type(optimizer).__name__
    if whole and not isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        return
    reason = _REASONS.get(name, "its update may need more than the element it changes")
    supported = ", ".join(f"torch.optim.{known}" for known in ELEMENTWISE if hasattr(torch.optim, known))
    raise TypeError(
        f"optimizer {name} cannot run on sharded parameters: {reason}. Use one of {supported}; if {name} updates every "
        f"element from that element's own gradient and state alone, say so with elementwise_optimizers=[{name!r}], or "
        "use stage 0, where every rank holds full parameters."
    )


Named = Iterable[tuple[str, nn.Parameter]]


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
