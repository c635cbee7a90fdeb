"""The layout: units of a model, ZeRO stages as a table, parameters that share a bucket, the elements of each rank.

A stage is a row of a table, read by one implementation.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

Pure arithmetic: no tensors are allocated and no processes are needed.

    bucket (numel = world_size x slice_numel)
    |<------ rank 0 ------>|<------ rank 1 ------>|
    [ w0 .. ][gap][ b0 ][gap][ w1 ........ ][ pad ]
     ^ every parameter starts on an `align` boundary, so does every rank's slice

Elements keep their row-major order, so a rank's part of a parameter is one contiguous range of that parameter.

The rules are pure functions, for the engine and for the planner.

Parameters that stay whole (`pack`) each lie inside of one rank's slice. Optimizers such as Shampoo need whole matrices
(Muon has `optim.orthogonaliser` for the part that does). A matrix that lies in one slice has an owner: the
reduce-scatter brings it the whole reduced gradient, its state is on that rank alone, and the all-gather carries what it
updates, as of any other slice. No message is added; what is paid is padding, for slices are equally long and matrices
are not.

    rank 0                     rank 1
    [ gate ......... ][ q ]    [ up ........... ][ k ][ gap ]

Matrices are assigned to slices largest first, each to the slice with the least in it (longest processing time first,
Graham 1969: at most 4/3 of the best). Ranks take turns from unit to unit, so that those with the fuller slice of one
unit have the emptier one of the next. Other parameters of a unit have a bucket of their own: each optimizer publishes
its buckets after its step, and no bucket is published twice.

Units are module subtrees whose parameters are unsharded and reduced together.

A unit is named by the user (class or name pattern) or found: the large enough members of containers (`ModuleList`,
`Sequential`, `ModuleDict`) whose class repeats there, or that hold no such repetition themselves. Everything else
belongs to the root unit. A parameter used by two units belongs to their closest common ancestor that is a unit. Marks
of leaf modules (`set_z3_leaf_modules`) are set before the engine is made, and are attributes of the modules, so that
copies have them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zero_strategy.config import PrecisionConfig
from zero_strategy.fsdp.state_bits import lies_apart_by_bits
from zero_strategy.quantized.scales import keeps_dtype

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig

Reduction = Literal["per_step", "per_micro_batch"]


@dataclass(frozen=True)
class Placement:
    """The parts of the model state that are divided among the ranks of the shard axis.

    Attributes:
        stage: The ZeRO stage this row is named after.
        shard_parameters: Parameters are released and gathered around their use.
        shard_gradients: Only the owned slice of a gradient is kept, also of those of earlier micro-batches.
        shard_optimizer: Each rank updates its own slice only.
        in_place: Released parameters keep their memory, and the own slice is its place in there.
    """

    stage: int
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    in_place: bool = False

    @property
    def reduction(self) -> Reduction:
        """The time of reductions, unless the config says otherwise.

        Ranks that keep full gradients can wait for the last micro-batch; ranks that keep a slice cannot.
        """
        return "per_micro_batch" if self.shard_gradients else "per_step"


PLACEMENTS: dict[int, Placement] = {
    0: Placement(0, shard_parameters=False, shard_gradients=False, shard_optimizer=False),
    1: Placement(1, shard_parameters=False, shard_gradients=False, shard_optimizer=True),
    2: Placement(2, shard_parameters=False, shard_gradients=True, shard_optimizer=True),
    3: Placement(3, shard_parameters=True, shard_gradients=True, shard_optimizer=True),
}


def placement_for(config: ZeroConfig, shards: int, tier: str | None = None) -> Placement:
    """The row of the stage; where full parameters stay until an optimizer steps on them, memory for them does, too.

    A slice that is the whole bucket has nowhere else to be, either: nothing is copied at its gathers.

    Args:
        config: Resolved or not.
        shards: Ranks that divide the model state.
        tier: Of own slices; None: what the config says. They have their place in full parameters with "none" alone.
    """
    row = PLACEMENTS[config.stage]
    stays = row.shard_parameters and (shards == 1 or not config.reshard_after_backward)
    return replace(row, in_place=stays and (tier or config.offload.parameters) == "none")


# Torch's CPU kernels treat the end of a tensor in blocks of up to so many bytes: aligned pieces keep the bits.
ALIGN_BYTES = 128
"""Every parameter and every slice starts on this boundary: a cache line pair, and two AVX-512 vectors."""
PieceCuts = tuple[list[int], list[tuple[int, int]]]
"""Lengths that a range is cut into, those of gaps too; and (index of a parameter, number of its length)."""


@dataclass(frozen=True)
class Segment:
    """One parameter inside a bucket.

    Attributes:
        name: The parameter's name in the module (its first name when it is tied).
        shape: Its logical shape.
        offset: Index of its first element in the bucket.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d parameter, 0 for a zero-size one."""
        return math.prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """Index one past its last element in the bucket."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The contiguous part of one parameter that one rank owns.

    Attributes:
        index: Position of the parameter in the bucket's segments.
        start: First owned element, counted in the flattened parameter.
        stop: One past the last owned element, counted in the flattened parameter.
        offset: The first owned element, counted from the start of the rank's owned range.
    """

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of owned elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """Segments of one bucket and its equal division among `world_size` ranks.

    Attributes:
        segments: The parameters, in order.
        numel: Padded number of elements, a multiple of `world_size * align`.
        align: Alignment in elements.
        world_size: Number of slices.
    """

    segments: tuple[Segment, ...]
    numel: int
    align: int
    world_size: int

    @property
    def slice_numel(self) -> int:
        """Elements per rank."""
        return self.numel // self.world_size

    @cached_property
    def places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(offset, shape) of each parameter: equal where views of one buffer serve two buckets."""
        return tuple((segment.offset, segment.shape) for segment in self.segments)

    @cached_property
    def _lengths(self) -> list[int]:
        """Lengths of the parameters, each with that of the gap before it first, and of the gap at the end."""
        end, lengths = 0, list[int]()
        for segment in self.segments:
            lengths += [segment.offset - end, segment.numel]
            end = segment.stop
        return [*lengths, self.numel - end]

    def views(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of a flat buffer of `numel` elements: of each parameter in its shape, and of the gaps between them."""
        # One split for all of them, in place of a slice for each: host time per parameter.
        parts = flat.split_with_sizes(self._lengths)
        shaped = [
            part if segment.shape == part.shape else part.view(segment.shape)
            for segment, part in zip(self.segments, parts[1::2], strict=True)
        ]
        return shaped, [part for part, length in zip(parts[::2], self._lengths[::2], strict=True) if length]

    def slice_bounds(self, rank: int) -> tuple[int, int]:
        """First and one-past-last bucket element of `rank`'s slice."""
        assert 0 <= rank < self.world_size
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The parts of parameters inside bucket elements [start, stop), in order.

        A zero-size parameter is given, as an empty piece, to the one range that holds its offset
        (to the first range when the bucket is empty).
        """
        found = []
        for index, segment in enumerate(self.segments):
            if segment.numel == 0:
                # No range begins at the end of the bucket: what lies there belongs to the last one.
                last = start < stop == self.numel and segment.offset == stop
                if start <= segment.offset < stop or last or (self.numel == 0 and start == 0):
                    found.append(Piece(index, 0, 0, min(segment.offset, stop) - start))
                continue
            low, high = max(start, segment.offset), min(stop, segment.stop)
            if low < high:
                found.append(Piece(index, low - segment.offset, high - segment.offset, low - start))
        return tuple(found)


def build_layout(
    named_shapes: Sequence[tuple[str, tuple[int, ...]]],
    itemsize: int,
    world_size: int,
    replicas: int = 1,
    *,
    whole: bool = False,
    turn: int = 0,
    block: int = 1,
) -> BucketLayout:
    """Lay parameters of one dtype out in one bucket.

    Args:
        named_shapes: (name, shape) of each parameter, in the order they take in the bucket.
        itemsize: Bytes per element of the parameters' dtype. Buffers of wider dtypes (fp32 gradients of bf16
            parameters) use the same element offsets and so are aligned as well.
        world_size: Number of equal slices.
        replicas: Ranks that hold the same slice; each slice divides evenly among them as well.
        whole: Each parameter lies inside of one slice; segments are then in the order of their elements.
        turn: See `layout.pack`.
        block: Elements that are not to be divided: parameters and slices begin at multiples of it (a power of 2).

    Raises:
        ValueError: If a name occurs twice.
    """
    if len({name for name, _ in named_shapes}) != len(named_shapes):
        raise ValueError(f"a parameter name occurs twice in one bucket: {[name for name, _ in named_shapes]}")
    align = max(1, ALIGN_BYTES // itemsize, block)
    # A single slice holds all parameters whole as they come.
    if whole and world_size > 1:
        sizes = [round_up(math.prod(shape), align) for _, shape in named_shapes]
        placed, length = pack(sizes, world_size, align * replicas, turn)
        packed = tuple(Segment(named_shapes[p][0], tuple(named_shapes[p][1]), offset) for p, offset in placed)
        return BucketLayout(packed, length * world_size, align, world_size)
    offset, segments = 0, []
    for name, shape in named_shapes:
        segments.append(Segment(name, tuple(shape), offset))
        offset += round_up(segments[-1].numel, align)
    return BucketLayout(tuple(segments), round_up(offset, align * world_size * replicas), align, world_size)


def cuts(pieces: Sequence[Piece], numel: int) -> PieceCuts:
    """Sizes for `torch.split`, which cuts a rank's owned elements into its pieces.

    Args:
        pieces: All of the range, in order.
        numel: Its elements.

    Returns:
        Lengths, those of gaps too; and (index of a parameter, number of its length).
    """
    sizes: list[int] = []
    places: list[tuple[int, int]] = []
    end = 0
    for piece in pieces:
        places.append((piece.index, len(sizes) + 1))
        sizes += [piece.offset - end, piece.numel]
        end = piece.offset + piece.numel
    return [*sizes, numel - end], places


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


LOW_PRECISION = (torch.bfloat16, torch.float16)
"""What master weights are kept for."""


class _Grouped(Protocol):
    """The key by which parameters share a bucket."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def requires_grad(self) -> bool: ...


P = TypeVar("P", bound=_Grouped)
K = TypeVar("K", bound=Hashable)


def group_parameters(
    parameters: Iterable[tuple[str, P]],
    compute_dtype: torch.dtype | None,
    device: torch.device | None = None,
    *,
    everything: bool = False,
    apart: Callable[[str, P], K],
    kept: Callable[[P], bool] = keeps_dtype,
) -> list[tuple[torch.dtype, K, Sequence[tuple[str, P]]]]:
    """Divide the parameters of one unit into buckets.

    Args:
        parameters: (name, parameter), in registration order.
        compute_dtype: Dtype that floating-point parameters take, or None to keep theirs.
        device: Where those on the meta device become real.
        everything: All are moved there.
        apart: A kind of each; those of different kinds share no bucket.
        kept: Says which keep their dtype.

    Returns:
        By bucket, in the order of first parameters: the dtype that its parameters take, their kind, and they.
    """
    keys: dict[tuple[torch.dtype, K, torch.dtype, torch.device, bool], list[tuple[str, P]]] = {}
    for name, parameter in parameters:
        target = parameter.dtype
        if compute_dtype is not None and parameter.dtype.is_floating_point and not kept(parameter):
            target = compute_dtype
        moves = device is not None and (everything or parameter.device.type == "meta")
        place = device if device is not None and moves else parameter.device
        # Also by the dtype that they have: a bucket takes the present values over in one buffer of it.
        key = (target, apart(name, parameter), parameter.dtype, place, parameter.requires_grad)
        keys.setdefault(key, []).append((name, parameter))
    return [(dtype, kind, named) for (dtype, kind, *_), named in keys.items()]


def gradient_dtypes(dtype: torch.dtype, precision: PrecisionConfig) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which gradients of parameters of `dtype` are accumulated, and the one in which ranks sum them."""
    wide = torch.float32 if dtype in LOW_PRECISION else dtype
    accumulated = wide if precision.gradient_dtype == "float32" else dtype
    return accumulated, wide if precision.reduce_dtype == "float32" else accumulated


def wants_master(dtype: torch.dtype, precision: PrecisionConfig) -> bool:
    """True if trainable parameters of `dtype` have an fp32 copy for the optimizer."""
    return precision.master_weights and dtype in LOW_PRECISION


_MARK = "_gathered_as_one"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of some classes: their parameters are fetched and released together.

    Args:
        model: Where to look, itself included.
        leaf_module_classes: Classes, or their names, qualified or not.
        raise_if_not_found: No module of them is an error.

    Returns:
        The modules that were marked.

    Raises:
        TypeError: If a class is neither a module's nor a name.
        ValueError: If there is none.
    """
    found = _of(leaf_module_classes, model)
    return _mark(model, found, True, f"classes {list(leaf_module_classes)}", raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their names in `model`."""
    found = [module for name, module in model.named_modules() if name in module_names]
    return _mark(model, found, True, f"names {list(module_names)}", raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules whose names end with one of some suffixes."""
    found = [module for name, module in model.named_modules() if name.endswith(tuple(module_name_suffixes))]
    return _mark(model, found, True, f"suffixes {list(module_name_suffixes)}", raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark from all modules of some classes; arguments as of `set_z3_leaf_modules`."""
    found = _of(leaf_module_classes, model)
    return _mark(model, found, False, f"classes {list(leaf_module_classes)}", raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take the mark from it."""
    _mark(model, [model], flag, "", False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """True if a module is marked."""
    return bool(model.__dict__.get(_MARK, False))


def joined_units(root: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of units, in the order of `named_modules`; a marked module takes the place of those inside it."""
    found = set(units)
    marked = [name for name, module in root.named_modules() if z3_leaf_module(module)]
    for leaf in marked:
        inside = {unit for unit in found if unit.startswith(f"{leaf}." if leaf else "")}
        if inside:
            # The root is a unit in any case, without being named.
            found = (found - inside) | ({leaf} if leaf else set())
    return [name for name, _ in root.named_modules() if name in found] if marked else list(units)


def _of(classes: Sequence[type[nn.Module] | str], model: nn.Module) -> list[nn.Module]:
    for wanted in classes:
        if not isinstance(wanted, str) and not (isinstance(wanted, type) and issubclass(wanted, nn.Module)):
            raise TypeError(f"leaf_module_classes takes classes of modules, or their names, not {wanted!r}")
    return [
        module
        for module in model.modules()
        if any(_name_matches(type(module), w) if isinstance(w, str) else isinstance(module, w) for w in classes)
    ]


def _name_matches(cls: type, wanted: str) -> bool:
    return wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _mark(model: nn.Module, found: list[nn.Module], flag: bool, what: str, needed: bool) -> list[nn.Module]:
    if not found and needed:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"no module of {type(model).__name__} has the {what}; classes in this model: {known}")
    for module in found:
        module.__dict__[_MARK] = flag
    return found


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class UnitSpec:
    """A unit before any memory is allocated for it.

    Attributes:
        name: Name of the module in the root ("" for the root itself).
        module: The module whose forward brackets the use of the parameters.
        parameters: First name and object of every parameter that belongs to this unit, in registration order.
    """

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def find_units(
    root: nn.Module, *, classes: Sequence[str] = (), patterns: Sequence[str] = (), min_numel: int = 0
) -> list[UnitSpec]:
    """Divide the parameters of `root` into units.

    Args:
        root: The module to divide.
        classes: Class names whose instances are units. With `patterns` empty and `classes` empty, units are found.
        patterns: Shell-style patterns; a module whose name matches one is a unit.
        min_numel: A candidate with fewer elements stays with its parent (found units only).

    Returns:
        The root unit first, then the others in the order of `named_modules`; units without parameters are left out
        (the root is always there).

    Raises:
        ValueError: If a class or a pattern matches no module.
    """
    names = _named_units(root, classes, patterns) if classes or patterns else _repeated_units(root, min_numel)
    specs = {name: UnitSpec(name, root.get_submodule(name)) for name in ("", *joined_units(root, names))}
    for owner, name, parameter in _first_uses(root, specs):
        specs[owner].parameters.append((name, parameter))
    return [spec for name, spec in specs.items() if spec.parameters or name == ""]


def aliases(root: nn.Module) -> dict[str, str]:
    """Further names of tied parameters: {alias: first name}, in registration order."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            found[name] = kept
    return found


def _named_units(root: nn.Module, classes: Sequence[str], patterns: Sequence[str]) -> list[str]:
    modules = [(name, module) for name, module in root.named_modules() if name]
    names = [
        name
        for name, module in modules
        if type(module).__name__ in classes or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    for wanted in classes:
        if not any(type(module).__name__ == wanted for _, module in modules):
            known = sorted({type(module).__name__ for _, module in modules})
            raise ValueError(f"units.classes: no module is a {wanted!r}; classes in this model: {known}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            known = [name for name, _ in modules[:5]]
            raise ValueError(f"units.patterns: no module name matches {pattern!r}; names in this model: {known} ...")
    return names


def _repeated_units(root: nn.Module, min_numel: int) -> list[str]:
    """Members of containers: those whose class repeats, and those that are large and hold no repetition inside."""

    def visit(prefix: str, module: nn.Module) -> list[str]:
        children = list(module.named_children())
        classes = Counter(type(child) for _, child in children)
        is_container = isinstance(module, _CONTAINERS) and len(children) > 1
        found: list[str] = []
        for child_name, child in children:
            name = f"{prefix}{child_name}"
            member = is_container and (classes[type(child)] > 1 or not isinstance(child, _CONTAINERS))
            member = member and not isinstance(child, (nn.ModuleList, nn.ModuleDict))  # they have no forward
            # At least 1: without parameters there is nothing to gather.
            large = sum(parameter.numel() for parameter in child.parameters()) >= max(1, min_numel)
            inner = [] if member and large and classes[type(child)] > 1 else visit(f"{name}.", child)
            found += inner or ([name] if member and large else [])
        return found

    return visit("", root)


def _first_uses(root: nn.Module, units: Iterable[str]) -> list[tuple[str, str, nn.Parameter]]:
    """(unit, first name, parameter) of every distinct parameter, in registration order."""
    names = list(units)
    uses: dict[int, list[str]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(_closest(name, names))
        first.setdefault(id(parameter), (name, parameter))
    return [(_common(uses[key], names), name, parameter) for key, (name, parameter) in first.items()]


def _closest(name: str, units: Sequence[str]) -> str:
    """The innermost unit that holds the parameter or module `name`."""
    return max((unit for unit in units if unit == "" or name == unit or name.startswith(f"{unit}.")), key=len)


def _common(owners: Sequence[str], units: Sequence[str]) -> str:
    """The innermost unit that holds all of `owners`."""
    holding = [
        unit for unit in units if unit == "" or all(owner == unit or owner.startswith(f"{unit}.") for owner in owners)
    ]
    return max(holding, key=len)


def lies_apart(config: ZeroConfig, unit: str, name: str, shape: Sequence[int], trainable: bool) -> bool:
    """True if a parameter is to share no bucket but with its like: a trained matrix that the settings ask for.

    So is one whose optimizer states have 8 bits, where they are in a tier.

    With `matrix_optimizers`, patterns choose parameters of any dimensions, such as vectors of which norms are taken.

    Args:
        config: Its `matrix_optimizers` and `matrix_parameters` say whether there are any, the latter which.
        unit: Name of the parameter's unit, "" for the root.
        name: Of the parameter.
        shape: Of it, in one piece.
        trainable: Whether it is trained.
    """
    patterns = config.matrix_parameters
    if trainable and lies_apart_by_bits(config, name, math.prod(shape)):
        return True
    # At stage 0 every rank owns all elements, and so whole matrices; no optimizer steps on frozen ones.
    if not (config.matrix_optimizers or patterns) or config.stage == 0 or not trainable:
        return False
    if len(shape) != 2 and not (patterns and config.matrix_optimizers and len(shape)):
        return False
    # By default the root's are left out: embeddings and heads are there.
    return any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else unit != ""


def pack(sizes: Sequence[int], slices: int, step: int, turn: int) -> tuple[list[tuple[int, int]], int]:
    """Places of parameters in a bucket of equal slices, none of which is divided.

    Args:
        sizes: Elements of each, rounded up to the alignment.
        slices: Their number.
        step: Slices are multiples of it.
        turn: By how many ranks the slices are turned.

    Returns:
        (position in `sizes`, first element) in the order of the elements, and the elements of a slice.
    """
    bins: list[list[int]] = [[] for _ in range(slices)]
    loads = [0] * slices
    for position in sorted(range(len(sizes)), key=lambda position: (-sizes[position], position)):
        least = loads.index(min(loads))
        bins[least].append(position)
        loads[least] += sizes[position]
    # As long as the fullest: collectives divide a bucket into equal slices.
    length = -(-max(loads) // step) * step
    placed = []
    for rank in range(slices):
        at = rank * length
        # Without turns the same ranks would have the fullest slices of all units.
        for position in sorted(bins[(rank - turn) % slices]):
            placed.append((position, at))
            at += sizes[position]
    return placed, length
