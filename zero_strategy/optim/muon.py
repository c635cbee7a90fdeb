"""Muon: the parameters it trains, its arithmetic, and `MuonAdamW`.

    split = split_matrices(model)
    print(split)
    optimizer = MuonAdamW(split, muon={"lr": 0.02}, adamw={"lr": 3e-4})      # one optimizer, for Trainers
    muon = torch.optim.Muon(split.matrices, lr=0.02)                         # or two
    adamw = torch.optim.AdamW(split.others, lr=3e-4)

Steps on slices of matrices are taken by `optim.muon_step`. For other classes of `matrix_optimizers` each matrix lies in
one rank's slice (`fsdp.layout.pack`).

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable
for LLM Training", 2025 (`adjust_lr_fn="match_rms_adamw"`).
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.config import UnitsConfig
from zero_strategy.fsdp.layout import find_units
from zero_strategy.fsdp.model import ShardedModel
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


def split_matrices(
    module: nn.Module, patterns: Sequence[str] = (), *, units: UnitsConfig | None = None, stacks: bool = False
) -> MatrixSplit:
    """Divide the trained parameters of a module as is usual for Muon.

    Args:
        module: The module.
        patterns: Shell-style patterns of the names of matrices, those of the setting `matrix_parameters`. Default:
            all of two dimensions in repeated members of containers (of whatever size), or in the units that `units`
            names; that leaves embeddings, heads, norms and biases out.
        units: The setting `units`, where it names classes or patterns.
        stacks: Also parameters of three dimensions, each entry of which along the first is a matrix of its own, such as
            the experts of a layer. `MuonAdamW` takes them; torch's Muon does not.

    Raises:
        ValueError: If there is none, or a pattern matches no trained parameter of two dimensions (or three).
    """
    dimensions = (2, 3) if stacks else (2,)
    chosen = units or UnitsConfig()
    owners = {
        name: spec.name
        for spec in find_units(module, classes=chosen.classes, patterns=chosen.patterns)
        for name, _ in spec.parameters
    }
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) and parameter.dim() in dimensions for name, parameter in trained.items()):
            raise ValueError(f"pattern {pattern!r} matches no trained matrix; names are {list(trained)[:5]} ...")

    def is_matrix(name: str, parameter: nn.Parameter) -> bool:
        if parameter.dim() not in dimensions:
            return False
        return any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else owners[name] != ""

    matrices = {name: parameter for name, parameter in trained.items() if is_matrix(name, parameter)}
    if not matrices:
        raise ValueError(
            "no trained matrix is in a repeated member of a container (ModuleList, Sequential, ModuleDict). Give "
            f"patterns of the names of matrices; names are {list(trained)[:5]} ..."
        )
    return MatrixSplit(matrices, {name: each for name, each in trained.items() if name not in matrices})


MOMENTUM = "momentum_buffer"
"""The state's key, torch's."""


def newton_schulz(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The matrix with its singular values brought near to one, by the iteration of torch's Muon.

    Args:
        matrix: (rows, columns), in the dtype of the iteration; its memory is used.
        group: Has `ns_coefficients` (a, b, c), `ns_steps` and `eps`.
    """
    a, b, c = group["ns_coefficients"]
    # Rows are the shorter side, which makes the smaller product; calls are those of torch's Muon, for its bits.
    x = _wide(matrix).div_(matrix.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def newton_schulz_all(matrices: Sequence[tuple[Tensor, dict[str, Any]]], *, singly: bool = False) -> list[Tensor]:
    """Iterate on several matrices, each with its param group; those of like shapes and groups are one batch.

    Small products are faster in batches, but for float32 on the CPU, where the library's single ones are.

    Args:
        matrices: Pairs of (rows, columns) and its group.
        singly: No batches: a library may round a product otherwise where more of them are calculated together.
    """
    alike: dict[Any, list[int]] = {}
    for position, (matrix, group) in enumerate(matrices):
        single = singly or (matrix.device.type == "cpu" and matrix.dtype == torch.float32)
        alike.setdefault(position if single else (matrix.shape, id(group)), []).append(position)
    found: list[Tensor] = [torch.empty(0)] * len(matrices)
    for positions in alike.values():
        batch, group = [matrices[position][0] for position in positions], matrices[positions[0]][1]
        updates = [newton_schulz(batch[0], group)] if len(batch) == 1 else _in_a_batch(batch, group)
        for position, update in zip(positions, updates, strict=True):
            found[position] = update
    return found


def _in_a_batch(matrices: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    a, b, c = group["ns_coefficients"]
    x = torch.stack([_wide(matrix).div_(matrix.norm().clamp(min=group["eps"])) for matrix in matrices])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return list((x.mT if matrices[0].size(0) > matrices[0].size(1) else x).unbind())


def _wide(matrix: Tensor) -> Tensor:
    return matrix.T if matrix.size(0) > matrix.size(1) else matrix


def newton_schulz_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """Dtype in which a param group's iteration runs."""
    dtype: torch.dtype = getattr(torch, group.get("ns_dtype", "bfloat16"))
    return dtype


def direction(gradient: Tensor, momentum: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Update the momentum; returns what Newton-Schulz takes, in memory of its own. Of all elements or some."""
    momentum.lerp_(gradient, 1 - group["momentum"])
    found = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    # Without Nesterov it is the momentum itself, in whose memory Newton-Schulz must not work.
    return found.to(newton_schulz_dtype(group), copy=not group["nesterov"])


def change(parameter: Tensor, update: Tensor, group: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Change weights by an orthogonal update, all elements or some of a matrix of this shape."""
    lr = float(group["lr"])
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(update, alpha=-_adjusted(lr, group["adjust_lr_fn"], shape))


def _adjusted(lr: float, function: str | None, shape: Sequence[int]) -> float:
    rows, columns = shape[-2:]
    if function is None or function == "original":
        return lr * math.sqrt(max(1, rows / columns))
    # 0.2 brings the root mean square of updates to that of AdamW's, after Liu et al.
    return lr * (0.2 * math.sqrt(max(rows, columns)))


class MuonAdamW(Optimizer):
    """Muon for hidden matrices and AdamW, in torch's own code, for all else: one optimizer of two param groups.

    Args:
        split: The parameters, see `split_matrices`.
        muon: Options of `torch.optim.Muon`.
        adamw: Options of `torch.optim.AdamW`.
        ns_dtype: Of Newton-Schulz: "bfloat16" as in torch, or "float32", with three more digits and a quarter or less
            of the speed.

    Raises:
        ValueError: If an option is none of theirs, or one of the two would have no parameters.
    """

    def __init__(
        self,
        split: MatrixSplit,
        *,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        ns_dtype: str = "bfloat16",
    ) -> None:
        for what, parameters in (("matrices", split.matrices), ("other parameters", split.others)):
            if not parameters:
                raise ValueError(f"there are no {what}: take one of torch.optim.Muon and torch.optim.AdamW alone")
        if ns_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"ns_dtype must be 'bfloat16' or 'float32', not {ns_dtype!r}")
        self._adamw = torch.optim.AdamW(split.others, **(adamw or {}))
        # Made for its options alone, which its constructor checks.
        options = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))], **(muon or {})).param_groups[0]
        groups = [
            {**options, "params": split.matrices, "use_muon": True, "ns_dtype": ns_dtype},
            {**self._adamw.param_groups[0]},
        ]
        groups[1]["use_muon"] = False
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in muon_groups(self):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if MOMENTUM not in state:
                        state[MOMENTUM] = torch.zeros_like(parameter.grad)
                    found = direction(parameter.grad, state[MOMENTUM], group)
                    for matrix, each in zip(_matrices(parameter), _matrices(found), strict=True):
                        change(matrix, newton_schulz(each, group), group, matrix.shape)
        adamw = self.adamw
        # One state for both, so that a state dict has AdamW's moments, too.
        adamw.state = self.state
        adamw.step()
        return loss

    @property
    def adamw(self) -> Optimizer:
        """AdamW of the present groups of other parameters."""
        # At each use: `load_state_dict` puts other groups in the place of these.
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        return self._adamw


def _matrices(parameter: Tensor) -> Sequence[Tensor]:
    """The matrices of a stack, as views; a matrix itself."""
    return parameter.unbind() if parameter.dim() == 3 else [parameter]


def muon_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The param groups that take Muon's steps; none if the class is another, or has a step of its own."""
    if isinstance(optimizer, MuonAdamW):
        return [group for group in optimizer.param_groups if group["use_muon"]]
    if inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Muon.step):
        return optimizer.param_groups
    return []


def tell_shared_buckets(optimizers: Sequence[Optimizer], model: ShardedModel) -> None:
    """Warn if Muon and another optimizer step on parts of the same buckets: full parameters are sent after each step.

    Released ones (stage 3) are sent in the next forward, once.
    """
    if not model.placement.shard_optimizer or model.placement.shard_parameters or not any(map(muon_groups, optimizers)):
        return
    holders: dict[int, set[int]] = {}
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.requires_grad and (place := model.place(parameter)) is not None:
                holders.setdefault(id(place[0]), set()).add(id(optimizer))
    if any(len(several) > 1 for several in holders.values()) and model.mesh.world_group.rank == 0:
        warnings.warn(
            "Muon and another optimizer step on parameters that share buckets, so full parameters are sent twice in "
            "every step: use zero_strategy.optim.MuonAdamW, one optimizer for both, or give matrices buckets of their "
            "own by matrix_parameters=[patterns of their names]",
            stacklevel=2,
        )
