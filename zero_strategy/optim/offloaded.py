"""Per-element optimizer state in a tier, and an optimizer's own code as an update rule.

Optimizers without an update rule here take their steps on parts, too.

    user's optimizer                 a stand-in for one call
    class, attributes        ---->   the same
    param groups             ---->   the same hyper-parameters; parameters are views of the parts
    state by parameter       ---->   the parts' own

Which states there are per element is learnt from two steps on a small tensor, with each group's hyper-parameters; where
the class makes its states in its constructor (torch's Adagrad did until 2.13), that tensor begins with such states.

States are made when the optimizer is attached, and are read and written by parameter.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy import ops
from zero_strategy.comm.store import together
from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector, VectorSpec
from zero_strategy.optim.fused import Combine, Segment, UpdateRule, rule_for
from zero_strategy.optim.muon import MOMENTUM, Directions, Matrix, MuonParts, Orthogonaliser, muon_groups
from zero_strategy.optim.optimizer_checks import is_elementwise, reason_against
from zero_strategy.optim.streamed import StreamedStep, Update

_TRIAL_NUMEL = 3


class OwnSteps(UpdateRule):
    """Steps of one optimizer, which must be elementwise (`elementwise.check_elementwise`).

    Args:
        optimizer: The optimizer.
        begins_with: `trial_state` of it, taken before its state was divided; None: of its state now.
    """

    def __init__(self, optimizer: Optimizer, begins_with: dict[str, Any] | None = None) -> None:
        self._optimizer = optimizer
        self._begins_with = trial_state(optimizer) if begins_with is None else begins_with
        self._vectors: dict[int, dict[str, tuple[torch.dtype, float]] | None] = {}

    def refuses(self, group: dict[str, Any]) -> str | None:
        """Graphs of the update, and steps recorded on a device, need all of a parameter at once."""
        chosen = [option for option in ("capturable", "differentiable") if group.get(option)]
        return f"{chosen[0]}={group[chosen[0]]!r}" if chosen else None

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """See `UpdateRule`; None if a state is neither a number nor one value per element."""
        if id(group) not in self._vectors:
            self._vectors[id(group)] = None if self.refuses(group) else self._try_out(group)
        return self._vectors[id(group)]

    def form(self, group: dict[str, Any]) -> dict[str, Any]:
        """The state that two steps with a group's options make for a few elements."""
        state: dict[str, Any] = {}
        try:
            self._try_steps(group, state)
        except Exception:
            if not self._begins_with:
                raise
            state = _copied(self._begins_with)  # it may need what its constructor makes
            self._try_steps(group, state)
        return state

    def _try_out(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        found = {}
        for key, value in self.form(group).items():
            if isinstance(value, Tensor) and value.shape == (_TRIAL_NUMEL,):
                found[key] = value.dtype, 0.0
            elif not (value is None or isinstance(value, (bool, int, float)) or _is_number(value)):
                return None
        return found

    def _try_steps(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        for _ in range(2):
            part = torch.ones(_TRIAL_NUMEL)
            self._step([Segment(_copied(group), part, torch.ones(_TRIAL_NUMEL), state, like=part)])

    def check_state(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Raise if a group's options were changed to some that need other states than there are.

        Raises:
            ValueError: Naming them.
        """
        missing = sorted((self.vectors(group) or {}).keys() - state.keys()) if state else []
        if missing:
            raise ValueError(
                f"{type(self._optimizer).__name__} has no state {missing} for a parameter that it has updated before: "
                "options that change what is kept cannot be changed between steps"
            )

    def update(self, segments: Sequence[Segment], scale: float = 1.0, combine: Combine | None = None) -> None:
        """Take one step; see `UpdateRule`."""
        with torch.no_grad():
            self._step([_scaled(segment, scale) for segment in segments])
            for segment in segments:
                if segment.copy is not None:
                    segment.copy.copy_(segment.param)

    def _step(self, segments: Sequence[Segment]) -> None:
        """Let the class's own code step on these; nobody's hooks are called."""
        groups: dict[int, dict[str, Any]] = {}
        stand_in = type(self._optimizer).__new__(type(self._optimizer))
        stand_in.__dict__.update(self._optimizer.__dict__)
        states: defaultdict[Any, Any] = defaultdict(dict)
        parts = []
        for segment in segments:
            part = nn.Parameter(segment.param, requires_grad=False)
            part.grad = segment.grad
            states[part] = segment.state
            groups.setdefault(id(segment.group), {**segment.group, "params": []})["params"].append(part)
            parts.append(part)
        stand_in.__dict__.update(
            state=states,
            param_groups=list(groups.values()),
            _optimizer_step_pre_hooks=OrderedDict(),
            _optimizer_step_post_hooks=OrderedDict(),
        )
        with torch.no_grad():
            inspect.unwrap(type(self._optimizer).step)(stand_in)
        for part, segment in zip(parts, segments, strict=True):
            if states[part] is not segment.state:
                segment.state.clear()
                segment.state.update(states[part])


def trial_state(optimizer: Optimizer) -> dict[str, Any]:
    """A state like those that the optimizer holds now, for a parameter of a few elements; {} if it holds none."""
    for parameter, state in optimizer.state.items():
        if state and parameter.dim() and parameter.numel():
            return {
                key: _trial_value(value, parameter.dtype)
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else copy.deepcopy(value)
                for key, value in state.items()
            }
    return {}


def _trial_value(value: Tensor, parameter_dtype: torch.dtype) -> Tensor:
    """A state of a few elements; in the dtype of the master weights where it had the parameter's."""
    dtype = torch.float32 if value.dtype == parameter_dtype else value.dtype
    return value.detach().flatten()[:1].to("cpu", dtype).expand(_TRIAL_NUMEL).clone()


def rule_for_parts(
    optimizer: Optimizer, asserted: Sequence[str], begins_with: dict[str, Any] | None = None
) -> UpdateRule | None:
    """Stepper of parts of parameters: a rule of ours, or its own code; None: nothing can.

    Args:
        optimizer: The optimizer.
        asserted: Class names that the user declares to be elementwise.
        begins_with: See `OwnSteps`.
    """
    if muon_groups(optimizer):
        return MuonParts()
    rule = rule_for(optimizer, any_implementation=True)  # torch's fused and foreach are the same algorithm
    return OwnSteps(optimizer, begins_with) if rule is None and is_elementwise(optimizer, asserted) else rule


def _scaled(segment: Segment, scale: float) -> Segment:
    """The segment with its gradient multiplied, in memory of its own, of the parameter's dtype."""
    gradient = segment.grad
    for factor in (segment.scale, scale):
        if factor != 1.0:
            gradient = gradient * factor
    if gradient is segment.grad:  # optimizers may change gradients in place
        gradient = gradient.clone()
    return Segment(segment.group, segment.param, gradient.to(segment.param.dtype), segment.state, like=segment.like)


def _without(vectors: dict[str, OffloadedVector], keys: Sequence[str]) -> dict[str, OffloadedVector]:
    return {key: vector for key, vector in vectors.items() if key not in keys}


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


class OffloadedStates:
    """The vectors of one optimizer, by bucket and key.

    Args:
        optimizer: The user's.
        rule: What takes its steps, if anything.
        model: The sharded model.
        store: Where the vectors go.

    Raises:
        ValueError: If its steps cannot be taken chunk by chunk; names the way out.
        OSError: If the tier has no room.
        RuntimeError: If it has none on another rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: UpdateRule | None,
        model: ShardedModel,
        store: ChunkStore,
    ) -> None:
        self._optimizer, self._model, self._store = optimizer, model, store
        self._vectors: dict[int, dict[str, OffloadedVector]] = {}
        self._number = store.new_number()
        self._rule = self._check(rule)
        self._step = StreamedStep(store)
        self._momenta = StreamedStep(store) if muon_groups(optimizer) else None
        ops.ensure("cpu")  # wherever the model is
        self.reserve()

    def _check(self, rule: UpdateRule | None) -> UpdateRule:
        name = type(self._optimizer).__name__
        if rule is None or any(rule.vectors(group) is None for group in self._optimizer.param_groups):
            raise ValueError(
                f"offload.optimizer takes steps on the host, a part of a parameter at a time, which {name} cannot: "
                f"{self._why_not(rule)}. Elementwise optimizers of torch.optim can, and your own that are named in "
                "elementwise_optimizers; with others use offload.optimizer: none"
            )
        for bucket, _ in self._trained():
            if bucket.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"offload.optimizer takes no {bucket.dtype} parameters ({bucket.names[0]!r})")
            if bucket.dtype != torch.float32 and not self._model.config.precision.master_weights:
                raise ValueError(
                    "offload.optimizer needs precision.master_weights=True for parameters of low precision"
                )
        return rule

    def _why_not(self, rule: UpdateRule | None) -> str:
        refused = (None if rule is None else rule.refuses(group) for group in self._optimizer.param_groups)
        options = next((each for each in refused if each is not None), None)
        return options or reason_against(self._optimizer) or "its update may need more than the element it changes"

    def _trained(self) -> Iterable[tuple[ParameterBucket, dict[str, Any]]]:
        """Bucket and group of every parameter that may have a gradient; the same on all ranks."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                place = self._model.place(parameter)
                if place is not None and parameter.requires_grad:
                    yield place[0], group

    def prepare(self, rule: UpdateRule | None) -> None:
        """Before a step: take in parameters that were frozen, new groups and changed options. A collective.

        Raises:
            ValueError, OSError, RuntimeError: As for making one.
        """
        self._rule = self._check(rule)
        self.reserve()

    def reserve(self) -> None:
        """Make the vectors that param groups need and have not yet, all together or none. A collective if there are.

        Raises:
            ValueError: If param groups want different states in one bucket.
            OSError: If the tier has no room.
        """
        wanted: dict[str, VectorSpec] = {}
        places: dict[str, tuple[int, str]] = {}
        for bucket, group in self._trained():
            known, numel = self._vectors.get(id(bucket), {}), bucket.owned.stop - bucket.owned.start
            for key, (dtype, fill) in (self._rule.vectors(group) or {}).items():
                name = f"{self._number}/{bucket.names[0]}/{key}"
                spec = VectorSpec(numel, dtype, fill, bucket.device)
                made = known.get(key)
                before: VectorSpec | OffloadedVector = wanted.get(name, spec) if made is None else made
                if (before.dtype, before.fill) != (dtype, fill):
                    raise ValueError(
                        f"param groups of {type(self._optimizer).__name__} keep {key} in "
                        f"{(before.dtype, before.fill)} and {(dtype, fill)} "
                        f"for parameters of the bucket of {bucket.names[0]!r}; with offload.optimizer they "
                        "must be alike"
                    )
                if made is None:
                    wanted[name], places[name] = spec, (id(bucket), key)
        made_now = together(self._model.mesh.control, lambda: self._store.add(wanted)) if wanted else {}
        for name, vector in made_now.items():
            identity, key = places[name]
            self._vectors.setdefault(identity, {})[key] = vector

    def place(self, bucket: ParameterBucket, cut: Piece, key: str, shape: torch.Size) -> OffloadedPart | None:
        """Place of a state of one piece; None if it is not kept in the tier."""
        vector = self._vectors.get(id(bucket), {}).get(key)
        return None if vector is None else vector.part(cut.offset if cut.numel else 0, shape)

    def step(
        self,
        updates: Sequence[Update],
        scale: float,
        matrices: Sequence[Matrix] = (),
        orthogonaliser: Orthogonaliser | None = None,
    ) -> None:
        """Take one step; see `StreamedStep.run`.

        Args:
            updates: All that it changes.
            scale: What gradients are multiplied by first.
            matrices: Those that are orthogonalised; the same on all ranks.
            orthogonaliser: Does that; None: the step is elementwise.
        """
        for update in updates:
            if isinstance(self._rule, OwnSteps):
                self._rule.check_state(update.group, update.state)
            for key, value in update.state.items():
                if is_per_element(value, update.piece.shape) and isinstance(value, Tensor):  # it was frozen until now
                    place = self.place(update.bucket, update.cut, key, update.piece.shape)
                    assert place is not None
                    place.write(value)
                    update.state[key] = place
        vectors = self._vectors
        if orthogonaliser is not None and self._momenta is not None:
            updates = self._orthogonal(updates, scale, matrices, orthogonaliser, self._momenta)
            vectors = {key: _without(each, [MOMENTUM]) for key, each in vectors.items()}
        self._step.run(self._rule, updates, vectors, scale)

    def _orthogonal(
        self,
        updates: Sequence[Update],
        scale: float,
        matrices: Sequence[Matrix],
        orthogonaliser: Orthogonaliser,
        momenta: StreamedStep,
    ) -> list[Update]:
        """The updates with orthogonal ones in the place of gradients, after a pass over momenta. A collective."""
        muon = {id(group) for group in muon_groups(self._optimizer)}
        of_matrices = [update for update in updates if id(update.group) in muon]
        vectors = {key: {k: v for k, v in each.items() if k == MOMENTUM} for key, each in self._vectors.items()}
        directions, found = Directions(), dict[int, Tensor]()
        momenta.run(directions, of_matrices, vectors, scale, weights=False)
        orthogonaliser.run(
            matrices,
            lambda matrix: directions.take(matrix.parameter, self._model.device),
            lambda matrix, values: found.update({id(matrix.parameter): values}),
        )
        return [
            replace(update, gradient=found.get(id(update.parameter), torch.empty(0)), factor=1.0, state={})
            if id(update.group) in muon
            else update
            for update in updates
        ]

    def reduction_begins(self) -> None:
        """A backward begins: read what the next step begins with beside it."""
        (self._momenta or self._step).read_ahead()

    def vectors(self) -> Iterator[tuple[ParameterBucket, OffloadedVector]]:
        """All vectors of the state, and whose they are."""
        for bucket in self._model.buckets:
            for vector in self._vectors.get(id(bucket), {}).values():
                yield bucket, vector

    def nbytes(self) -> int:
        """Bytes of all vectors, heads on the device with them."""
        return sum(vector.numel * vector.dtype.itemsize for _, vector in self.vectors())

    @property
    def staging_bytes(self) -> int:
        """Host memory that steps use."""
        return self._step.staging_bytes + (0 if self._momenta is None else self._momenta.staging_bytes)

    def close(self) -> None:
        """Give the room back; the states are lost."""
        self._step.close()
        if self._momenta is not None:
            self._momenta.close()
        self._store.remove([vector for vectors in self._vectors.values() for vector in vectors.values()])
        self._vectors.clear()


def as_tensor(value: Any) -> Any:
    """A state's values, read if they are in a tier."""
    return value.read() if isinstance(value, OffloadedPart) else value


def is_per_element(value: Any, shape: torch.Size) -> bool:
    """True if a state of a piece of `shape` has a value per element."""
    return isinstance(value, (Tensor, OffloadedPart)) and value.shape == shape and len(value.shape) > 0
