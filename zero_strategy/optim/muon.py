"""Muon: the parameters it trains, `MuonAdamW`, and steps of it and of `torch.optim.Muon` on slices of matrices.

    split = split_matrices(model)
    print(split)
    optimizer = MuonAdamW(split, muon={"lr": 0.02}, adamw={"lr": 3e-4})      # one optimizer, for Trainers
    muon = torch.optim.Muon(split.matrices, lr=0.02)                         # or two
    adamw = torch.optim.AdamW(split.others, lr=3e-4)

For other classes of `matrix_optimizers` each matrix lies in one rank's slice (`fsdp.layout.pack`). Of Muon:

Momentum, weight decay and the change of weights are elementwise, and stay in each rank's slices. Newton-Schulz needs a
whole matrix; each has an owner, to whom the other ranks send what they hold of the direction.

    rank 0   [ q | k | first part of v ]   --- part of v --->   owner of v: Newton-Schulz
    rank 1   [ rest of v | o ]             <-- its update ---   ... of q, k and o where they lie

Directions and updates travel in the dtype of Newton-Schulz, bfloat16, which it rounds them to anyway; so the bits are
those of one process. Owners are those who hold most of a matrix, unless that would give them more than their share of
the arithmetic. It goes in rounds of some matrices per owner: directions of the next round arrive, and updates of the
last one leave, beside the arithmetic.

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

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.config import UnitsConfig
from zero_strategy.fsdp.layout import find_units
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.fused import AdamRule, Combine, Segment, UpdateRule
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


MOMENTUM = "momentum_buffer"
"""The state's key, torch's."""
_SHARE = 1.1
"""Arithmetic of an owner over the mean of all, up to which it may be whoever holds most of a matrix."""
_ROUND_NUMEL = 1 << 22
"""Elements of an owner's matrices in a round, unless a single one has more."""


def newton_schulz(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The matrix with its singular values brought near to one, by the iteration of torch's Muon.

    Args:
        matrix: (rows, columns), in the dtype of the iteration; its memory is used.
        group: Has `ns_coefficients` (a, b, c), `ns_steps` and `eps`.
    """
    a, b, c = group["ns_coefficients"]
    x = _wide(matrix).div_(matrix.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def newton_schulz_all(matrices: Sequence[tuple[Tensor, dict[str, Any]]]) -> list[Tensor]:
    """The same of several, each with its param group; those of like shapes and groups as one batch.

    Small products are faster in batches, but for float32 on the CPU, where the library's single ones are.
    """
    alike: dict[Any, list[int]] = {}
    for position, (matrix, group) in enumerate(matrices):
        single = matrix.device.type == "cpu" and matrix.dtype == torch.float32
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
    return found.to(newton_schulz_dtype(group), copy=not group["nesterov"])


def change(parameter: Tensor, update: Tensor, group: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Change weights by an orthogonal update, all elements or some of a matrix of this shape."""
    lr = float(group["lr"])
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(update, alpha=-_adjusted(lr, group["adjust_lr_fn"], shape))


def _adjusted(lr: float, function: str | None, shape: Sequence[int]) -> float:
    rows, columns = shape[:2]
    if function is None or function == "original":
        return lr * math.sqrt(max(1, rows / columns))
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
        matrices = torch.optim.Muon(split.matrices, **(muon or {})).param_groups[0]
        groups = [{**matrices, "use_muon": True, "ns_dtype": ns_dtype}, {**self._adamw.param_groups[0]}]
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
                    change(parameter, newton_schulz(found, group), group, parameter.shape)
        adamw = self.adamw
        adamw.state = self.state
        adamw.step()
        return loss

    @property
    def adamw(self) -> Optimizer:
        """AdamW of the present groups of other parameters."""
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        return self._adamw


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


@dataclass(frozen=True)
class Matrix:
    """A matrix with a gradient.

    Attributes:
        parameter: The module's.
        group: Its param group.
        shape: Rows and columns.
        held: Elements that each rank holds, which follow each other in the order of ranks.
    """

    parameter: nn.Parameter
    group: dict[str, Any]
    shape: tuple[int, int]
    held: tuple[int, ...]

    @property
    def cost(self) -> int:
        """Multiplications of a step of Newton-Schulz."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)


def owners(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    """The rank that orthogonalises each matrix.

    Costly ones are placed first: with the rank that holds most, if that leaves it within `_SHARE` of the mean cost,
    else with the rank that has least to do.
    """
    found, loads = [0] * len(matrices), [0] * ranks
    most = _SHARE * sum(matrix.cost for matrix in matrices) / ranks
    for position in sorted(range(len(matrices)), key=lambda position: (-matrices[position].cost, position)):
        matrix = matrices[position]
        by_held = sorted(range(ranks), key=lambda rank: (-matrix.held[rank], loads[rank], rank))
        fitting = (rank for rank in by_held if matrix.held[rank] and loads[rank] + matrix.cost <= most)
        owner = next(fitting, loads.index(min(loads)))
        found[position] = owner
        loads[owner] += matrix.cost
    return found


def rounds(matrices: Sequence[Matrix], owned_by: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions of the matrices in each round, the costliest of every owner first.

    Rounds are of about `_ROUND_NUMEL` elements per owner, or of one matrix if it has more. All owners have like shares
    of their arithmetic in a round, since each waits there for what the others send.
    """
    sizes = [math.prod(matrix.shape) for matrix in matrices]
    elements, loads, done = [0] * ranks, [0] * ranks, [0] * ranks
    for matrix, numel, owner in zip(matrices, sizes, owned_by, strict=True):
        elements[owner] += numel
        loads[owner] += matrix.cost
    count = -(-max(elements) // max(_ROUND_NUMEL, *sizes)) if matrices else 0
    found: list[list[int]] = [[] for _ in range(count)]
    for position in sorted(range(len(matrices)), key=lambda position: (-matrices[position].cost, position)):
        owner, cost = owned_by[position], matrices[position].cost
        found[min(count - 1, (done[owner] + cost // 2) * count // max(loads))].append(position)
        done[owner] += cost
    return [one for one in found if one]


Take = Callable[[Matrix], Tensor]
"""Gives this rank's part of a matrix's direction, flat."""
Give = Callable[[Matrix, Tensor], None]
"""Takes this rank's part of its update, flat."""


@dataclass
class _Round:
    """A round under way.

    Attributes:
        matrices: Those in it, with their owners.
        own: This rank's parts of the directions.
        arriving: From each rank, parts of the matrices that this rank owns, or of updates of what it holds.
        most: Elements of the largest message of either way.
        work: What is to be waited for.
    """

    matrices: list[tuple[Matrix, int]]
    own: list[Tensor]
    arriving: list[Tensor]
    most: int
    work: PendingWork


class Orthogonaliser:
    """Newton-Schulz on matrices whose parts lie on ranks of one model."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        divided = model.placement.shard_optimizer
        self._group = model.mesh.gather
        self._rank, self._ranks = (self._group.rank, self._group.size) if divided else (0, 1)
        self._held: dict[int, list[tuple[int, ...]]] = {}
        self._planned: tuple[tuple[int, ...], list[list[tuple[int, int]]]] | None = None

    def matrices(self, groups: Sequence[dict[str, Any]], parameters: Sequence[Sequence[nn.Parameter]]) -> list[Matrix]:
        """Those of param groups that have a gradient; the same on all ranks.

        Args:
            groups: Hyper-parameters.
            parameters: The module's, of each group.
        """
        found = []
        for group, whole in zip(groups, parameters, strict=True):
            for parameter in whole:
                place = self._model.place(parameter)
                assert place is not None
                bucket, index = place
                if index in self._model.gradient_of(bucket).live and parameter.numel():
                    rows, columns = bucket.layout.segments[index].shape
                    found.append(Matrix(parameter, group, (rows, columns), self._held_of(bucket)[index]))
        return found

    def _held_of(self, bucket: Any) -> list[tuple[int, ...]]:
        """Elements of each parameter of a bucket on each rank."""
        if id(bucket) not in self._held:
            layout = bucket.layout
            bounds = (
                [layout.slice_bounds(rank) for rank in range(self._ranks)] if self._ranks > 1 else [(0, layout.numel)]
            )
            found = [[0] * self._ranks for _ in layout.segments]
            for rank, bound in enumerate(bounds):
                for piece in layout.pieces(*bound):
                    found[piece.index][rank] = piece.numel
            self._held[id(bucket)] = list(map(tuple, found))
        return self._held[id(bucket)]

    def owned(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """Those that this rank orthogonalises."""
        plan = self._plan(matrices)
        return [matrices[position] for one in plan for position, owner in one if owner == self._rank]

    def run(self, matrices: Sequence[Matrix], take: Take, give: Give) -> None:
        """Orthogonalise all of them. A collective.

        Args:
            matrices: The same on all ranks.
            take: Called once for each matrix of which this rank holds a part, round by round.
            give: Likewise, later.
        """
        begun: _Round | None = None
        leaving: _Round | None = None
        for places in [*self._plan(matrices), []]:
            one = [(matrices[position], owner) for position, owner in places]
            before, begun = begun, self._begin(one, take) if one else None
            if before is not None:
                before.work.wait()
                last, leaving = leaving, self._orthogonalise(before)
                if last is not None:
                    self._end(last, give)
        if leaving is not None:
            self._end(leaving, give)

    def _plan(self, matrices: Sequence[Matrix]) -> list[list[tuple[int, int]]]:
        """Rounds of positions of matrices with their owners."""
        key = tuple(id(matrix.parameter) for matrix in matrices)
        if self._planned is None or self._planned[0] != key:
            owned_by = owners(matrices, self._ranks)
            found = rounds(matrices, owned_by, self._ranks)
            self._planned = key, [[(position, owned_by[position]) for position in one] for one in found]
        return self._planned[1]

    def _begin(self, one: list[tuple[Matrix, int]], take: Take) -> _Round:
        """Let parts of directions travel to the owners."""
        rank, ranks = self._rank, range(self._ranks)
        own = [take(matrix) if matrix.held[rank] else torch.empty(0) for matrix, _ in one]
        like = next((each for each in own if each.numel()), torch.empty(0, device=self._model.device))
        dtype = newton_schulz_dtype(one[0][0].group)
        nothing = like.new_empty(0, dtype=dtype)
        outgoing = [
            _joined([part for part, (_, owner) in zip(own, one, strict=True) if owner == other != rank], nothing)
            for other in ranks
        ]
        mine = [matrix for matrix, owner in one if owner == rank]
        arriving = [nothing.new_empty(sum(matrix.held[other] for matrix in mine) * (other != rank)) for other in ranks]
        sums = {(owner, other): 0 for owner in ranks for other in ranks}
        for matrix, owner in one:
            for other in ranks:
                sums[owner, other] += matrix.held[other] * (owner != other)
        most = max(sums.values())
        work = self._group.all_to_all(outgoing, arriving, most, "directions of matrices")
        return _Round(one, own, arriving, most, work)

    def _orthogonalise(self, one: _Round) -> _Round:
        """Orthogonalise what this rank owns, and let the updates travel to who holds the matrices."""
        rank, ranks = self._rank, range(self._ranks)
        at, back = [0] * self._ranks, list[list[Tensor]]([] for _ in ranks)
        wholes = []
        for (matrix, owner), part in zip(one.matrices, one.own, strict=True):
            if owner != rank:
                continue
            parts = []
            for other, numel in enumerate(matrix.held):
                if numel and other != rank:
                    parts.append(one.arriving[other][at[other] : at[other] + numel])
                    at[other] += numel
                elif numel:
                    parts.append(part)
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            wholes.append((whole.view(matrix.shape), matrix.group))
        updates, own = iter(newton_schulz_all(wholes)), []
        for (matrix, owner), part in zip(one.matrices, one.own, strict=True):
            if owner != rank:
                own.append(part[:0])
                continue
            for other, values in enumerate(next(updates).reshape(-1).split_with_sizes(list(matrix.held))):
                if other == rank:
                    own.append(values)
                else:
                    back[other].append(values)
        nothing = one.arriving[rank].new_empty(0)
        outgoing = [_joined(parts, nothing) for parts in back]
        arriving = [
            nothing.new_empty(sum(matrix.held[rank] for matrix, owner in one.matrices if owner == other != rank))
            for other in ranks
        ]
        work = self._group.all_to_all(outgoing, arriving, one.most, "updates of matrices")
        return _Round(one.matrices, own, arriving, one.most, work)

    def _end(self, one: _Round, give: Give) -> None:
        """Give the updates of what this rank holds."""
        one.work.wait()
        at = [0] * self._ranks
        for (matrix, owner), own in zip(one.matrices, one.own, strict=True):
            numel = matrix.held[self._rank]
            if not numel:
                continue
            if owner == self._rank:
                give(matrix, own)
                continue
            give(matrix, one.arriving[owner][at[owner] : at[owner] + numel])
            at[owner] += numel


def _joined(parts: Sequence[Tensor], nothing: Tensor) -> Tensor:
    filled = [part for part in parts if part.numel()]
    return torch.cat(filled) if filled else nothing


class Directions(UpdateRule):
    """The first half of a step chunk by chunk: momentum, and the directions of the elements, kept by parameter."""

    def __init__(self) -> None:
        self._found: dict[int, list[Tensor]] = {}

    def update(self, segments: Sequence[Segment], scale: float = 1.0, combine: Combine | None = None) -> None:
        """See `UpdateRule`."""
        for segment in segments:
            gradient, factor = segment.grad.to(torch.float32), segment.scale * scale
            gradient = gradient if factor == 1.0 else gradient * factor
            if MOMENTUM not in segment.state:
                segment.state[MOMENTUM] = torch.zeros_like(gradient)
            found = direction(gradient, segment.state[MOMENTUM], segment.group)
            self._found.setdefault(id(segment.owner), []).append(found)

    def take(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """The direction of a parameter's elements, once."""
        return torch.cat([part.to(device) for part in self._found.pop(id(parameter))])


class MuonParts(UpdateRule):
    """The second half for Muon's param groups, with updates in the place of gradients; AdamW for all others."""

    _others = AdamRule()

    def refuses(self, group: dict[str, Any]) -> str | None:
        """See `UpdateRule`."""
        return None if _is_muon(group) else self._others.refuses(group)

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """See `UpdateRule`."""
        if _is_muon(group):
            return {MOMENTUM: (torch.float32, 0.0)}
        return None if self._others.refuses(group) else self._others.vectors(group)

    def update(self, segments: Sequence[Segment], scale: float = 1.0, combine: Combine | None = None) -> None:
        """See `UpdateRule`."""
        for segment in segments:
            if _is_muon(segment.group):
                assert segment.owner is not None
                change(segment.param, segment.grad, segment.group, segment.owner.shape)
                if segment.copy is not None:
                    segment.copy.copy_(segment.param)
        others = [segment for segment in segments if not _is_muon(segment.group)]
        if others:
            self._others.update(others, scale, combine)


def _is_muon(group: Mapping[str, Any]) -> bool:
    return bool(group.get("use_muon", "ns_steps" in group))
