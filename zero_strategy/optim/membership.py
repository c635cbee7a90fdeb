"""Which optimizer holds which parameter: each trainable one is in one at least, in tiers in one alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

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
