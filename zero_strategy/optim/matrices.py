"""Optimizers of whole matrices, such as Muon: which parameters they train, and whether each lies on one rank.

    split = split_matrices(model)
    print(split)
    optimizer = MuonAdamW(split, muon={"lr": 0.02}, adamw={"lr": 3e-4})      # one optimizer, for Trainers
    muon = torch.optim.Muon(split.matrices, lr=0.02)                         # or two
    adamw = torch.optim.AdamW(split.others, lr=3e-4)

Muon runs on slices of matrices (`optim.muon`). For other classes `fsdp.packing` lets each matrix lie in one rank's
slice, its owner's, if `matrix_optimizers` names the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.optim import Optimizer

from zero_strategy.config import UnitsConfig
from zero_strategy.fsdp.layout import find_units
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.optimizer_checks import why_not_elementwise
from zero_strategy.runtime.terminal import table


@dataclass(frozen=True)
class MatrixSplit:
    """The trained parameters of a module, by the kind of optimizer.

    Attributes:
        named_matrices: Those of a matrix optimizer, by name.
        named_others: All others: embeddings, heads, norms, biases.
    """

    named_matrices: dict[str, nn.Parameter]
    named_others: dict[str, nn.Parameter]

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Parameters of the matrix optimizer."""
        return list(self.named_matrices.values())

    @property
    def others(self) -> list[nn.Parameter]:
        """Parameters of the other optimizer."""
        return list(self.named_others.values())

    def __str__(self) -> str:
        rows = [
            [name, str(tuple(parameter.shape)), f"{parameter.numel():,}", kind]
            for kind, named in (("matrix", self.named_matrices), ("other", self.named_others))
            for name, parameter in named.items()
        ]
        return table(rows, ["parameter", "shape", "elements", "optimizer"], right=(2,))


def split_matrices(module: nn.Module, patterns: Sequence[str] = (), *, units: UnitsConfig | None = None) -> MatrixSplit:
    """Divide the trained parameters of a module as is usual for Muon.

    Args:
        module: The module.
        patterns: Shell-style patterns of the names of matrices, those of the setting `matrix_parameters`. Default:
            all of two dimensions in repeated members of containers (of whatever size), or in the units that `units`
            names; that leaves embeddings, heads, norms and biases out.
        units: The setting `units`, where it names classes or patterns.

    Raises:
        ValueError: If there is none, or a pattern matches no trained parameter of two dimensions.
    """
    chosen = units or UnitsConfig()
    owners = {
        name: spec.name
        for spec in find_units(module, classes=chosen.classes, patterns=chosen.patterns)
        for name, _ in spec.parameters
    }
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) and parameter.dim() == 2 for name, parameter in trained.items()):
            raise ValueError(f"pattern {pattern!r} matches no trained matrix; names are {list(trained)[:5]} ...")

    def is_matrix(name: str, parameter: nn.Parameter) -> bool:
        if parameter.dim() != 2:
            return False
        return any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else owners[name] != ""

    matrices = {name: parameter for name, parameter in trained.items() if is_matrix(name, parameter)}
    if not matrices:
        raise ValueError(
            "no trained matrix is in a repeated member of a container (ModuleList, Sequential, ModuleDict). Give "
            f"patterns of the names of matrices; names are {list(trained)[:5]} ..."
        )
    return MatrixSplit(matrices, {name: each for name, each in trained.items() if name not in matrices})


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
            if bucket.parts[index].dim is not None:
                raise ValueError(
                    f"{kind} needs whole matrices, and tensor parallelism divides {name!r}: train it with an "
                    "elementwise optimizer such as AdamW"
                )
            if not (whole and model.placement.shard_optimizer) or bucket.whole or not parameter.requires_grad:
                continue
            if parameter.dim() == 1 and parameter.numel() > 1 and model.mesh.shard_size > 1:
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
