"""`torch.optim.LBFGS` on sharded parameters: torch's own code, on vectors of which each rank holds its slices.

L-BFGS (Nocedal, Math. Comp. 35, 1980) couples all elements by dot products, largest magnitudes and one sum, and is
elementwise in all else. So each rank gives torch's `step` its own pieces, with gradients of a tensor class whose `dot`,
`max` and `sum` are over all ranks. History and direction are divided like Adam's moments: (2 history_size + 2) x 4P / N
bytes.

Between steps each piece's state has its own part of every vector, so checkpoints and any number of ranks treat them as
any elementwise state. `joined` and `divided` translate from and to torch's form, which keeps flat vectors over all
parameters under the first one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from zero_strategy.comm.collectives import Communicator
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.step_method import StepMethod, SteppedOptimizer, closure_in, with_closure
from zero_strategy.runtime.nested_state import flattened, nested

_VECTORS = ("d", "prev_flat_grad")
_HISTORY = ("old_dirs", "old_stps")
_SCRATCH = "al"
"""Coefficients that each iteration writes before it reads them."""


class _Vector(Tensor):
    """This rank's slices of a vector; reductions are over all ranks."""

    ranks: ClassVar[Communicator]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # A rank may hold no element, and torch refuses the maximum of nothing.
        if func is Tensor.max and args[0].numel() == 0:
            found: Any = args[0].new_full((), -torch.inf)
        else:
            found = super().__torch_function__(func, tuple(types), args, kwargs or {})
        if func not in (Tensor.dot, Tensor.max, Tensor.sum):
            return found
        assert len(args) == (2 if func is Tensor.dot else 1) and not kwargs, "a reduction over all elements"
        # In float64 and in the order of ranks: all get the same number, and so take the same branches.
        parts = torch.stack(cls.ranks.all_gather_small(torch.tensor([found.item()], dtype=torch.float64)))
        whole = parts.max() if func is Tensor.max else parts.sum()
        # A plain tensor: the number is known to all ranks, and what torch does with it sends nothing.
        return torch.tensor(whole.item(), dtype=found.dtype, device=found.device)


class DistributedLBFGS:
    """Runs an LBFGS's `step` on pieces.

    Args:
        optimizer: The user's optimizer.
        ranks: Those among whom vectors are divided; None: each holds them whole.
        everyone: All ranks that see different data.
    """

    def __init__(self, optimizer: LBFGS, ranks: Communicator | None, everyone: Communicator) -> None:
        self._optimizer: Any = optimizer  # two private attributes of torch's class are used
        self._ranks, self._everyone = ranks, everyone
        # A class for each optimizer: `__torch_function__` finds the ranks by nothing but its class.
        self._type: type[Tensor] = Tensor if ranks is None else type("_Vector", (_Vector,), {"ranks": ranks})
        self._whole: list[nn.Parameter] | None = None
        self._pieces: list[nn.Parameter] = []

    def begin(self, pieces: Sequence[nn.Parameter], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """Let the optimizer's code step on `pieces` until `end`; takes their states, if any. A collective."""
        optimizer = self._optimizer
        self._pieces = list(pieces) or [nn.Parameter(torch.empty(0))]  # torch's code needs one
        mine = [piece for piece in pieces if piece in states]
        known: dict[str, Any] = {}
        if self._ranks is not None:  # a rank without pieces has no state, and has to decide as the others do
            first = nested(flattened(states[mine[0]])) if mine else {}
            numbers = {key: value for key, value in first.items() if key not in (*_VECTORS, *_HISTORY)}
            known = next(filter(None, self._ranks.all_gather_objects(numbers)), {})
        # Not before all have answered: joining takes the states apart, and an error would lose them.
        state = joined([states.pop(piece) for piece in mine])
        if self._ranks is not None:
            if known and not state:
                none = torch.empty(0)
                state = {key: none for key in _VECTORS} | {key: [none] * len(known["ro"]) for key in _HISTORY}
            state |= known
        for key in _VECTORS:
            if key in state:
                state[key] = state[key].as_subclass(self._type)
        for key in _HISTORY:
            if key in state:
                state[key] = [each.as_subclass(self._type) for each in state[key]]
        self._whole = optimizer._params
        # Torch keeps the number of elements from its first step on, and pieces have another.
        optimizer._params, optimizer._numel_cache = self._pieces, None
        optimizer.state[self._pieces[0]] = state

    def take_gradients(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Gradients of the pieces, flat; those that are missing are zero, as torch has it."""
        for piece in self._pieces:
            gradient = gradients.get(piece)
            values = torch.zeros_like(piece) if gradient is None else gradient.to(piece.dtype).view(piece.shape)
            piece.grad = values.detach().as_subclass(self._type)

    def mean_loss(self, loss: Any) -> Tensor:
        """The mean of all ranks' losses, so that all search the same line. A collective.

        Raises:
            TypeError: If `loss` is no number.
        """
        if not isinstance(loss, (Tensor, float, int)):
            raise TypeError(
                f"the closure of LBFGS.step(closure) returned {type(loss).__name__}; it has to return the loss"
            )
        dtype = loss.dtype if isinstance(loss, Tensor) else torch.float64
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        parts = self._everyone.all_gather_small(torch.tensor([value], dtype=torch.float64))
        device = loss.device if isinstance(loss, Tensor) else None
        return torch.tensor((torch.stack(parts).sum() / len(parts)).item(), dtype=dtype, device=device)

    def end(self) -> dict[Tensor, Any]:
        """Give the module's parameters back to the optimizer; returns the states by piece."""
        assert self._whole is not None
        optimizer, self._whole, whole = self._optimizer, None, self._whole
        state = {key: _plain(value) for key, value in optimizer.state.pop(self._pieces[0], {}).items()}
        optimizer._params, optimizer._numel_cache = whole, None
        for piece in self._pieces:
            piece.grad = None
        return dict(zip(self._pieces, divided(state, [piece.shape for piece in self._pieces]), strict=True))


def _plain(value: Any) -> Any:
    """A value of torch's state without our tensor class, and numbers as such: a parameter's shape may be () as well."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.item()
    held = value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(*held)


def divided(state: Mapping[str, Any], shapes: Sequence[torch.Size]) -> list[dict[str, Any]]:
    """Torch's state, as each parameter's own: views of its range of every vector, and all of the numbers."""
    found: list[dict[str, Any]] = []
    start = 0
    for shape in shapes:
        stop = start + shape.numel()
        own: dict[str, Any] = {}
        for key, value in state.items():
            if key in _VECTORS and isinstance(value, Tensor):
                own[key] = value[start:stop].view(shape)
            elif key in _HISTORY and value is not None:
                own[key] = [each[start:stop].view(shape) for each in value]
            elif key != _SCRATCH:
                own[key] = _plain(value)
        found.append(flattened(own))
        start = stop
    return found


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inverse of `divided`: torch's state over all parameters, in their order; {} of none.

    It takes the vectors out of `states` one by one, so that no more than one is held twice.
    """
    if not states:
        return {}
    parts = [flattened(state) for state in states]
    found = dict(parts[0])
    for state in states:
        if isinstance(state, dict):
            # The loop below can then let each vector go as soon as it is joined.
            state.clear()
    for key in found:
        if key in _VECTORS or key.rpartition(".")[0] in _HISTORY:
            found[key] = torch.cat([part.pop(key).reshape(-1) for part in parts])
    return nested(found)


def is_state(values: Mapping[str, Any]) -> bool:
    """True for a parameter's state of LBFGS, in torch's form or ours."""
    return {"func_evals", "n_iter", "old_dirs", "prev_flat_grad"} <= values.keys()


class LbfgsStep(StepMethod):
    """The step of `torch.optim.LBFGS`, which evaluates its closure several times.

    Args:
        sharded: The optimizer.

    Raises:
        ValueError: If the model is divided in a way that its vectors cannot be.
    """

    joint_state = True
    opaque_state = "since LBFGS keeps vectors over all parameters, divided among the ranks"

    def __init__(self, sharded: SteppedOptimizer) -> None:
        super().__init__(sharded)
        _check_division(self.model)
        mesh, divides = self.model.mesh, self.model.placement.shard_optimizer
        assert isinstance(self.optimizer, LBFGS)
        self._lbfgs = DistributedLBFGS(self.optimizer, mesh.shard_control if divides else None, mesh.control)

    @classmethod
    def takes(cls, optimizer: Optimizer, model: ShardedModel) -> bool:
        """True for torch's class; a subclass may have a step of its own."""
        return isinstance(optimizer, LBFGS) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(LBFGS.step)

    def begin(self, args: Any, kwargs: Any) -> Any:
        """See `StepMethod`: torch's step gets a closure that shows new values to the parameters before it runs."""
        sharded, pieces = self.sharded, self.sharded.pieces
        closure = closure_in(args, kwargs)
        if closure is None:
            raise ValueError(
                "LBFGS.step() evaluates the loss several times: call optimizer.step(closure) with a function that "
                "zeroes the gradients, computes the loss, runs its backward and returns it (float32 or bf16: fp16's "
                "loss scaling calls step() without one)"
            )
        sharded.follow_assigned_state()
        # While groups and state are still the user's, to whom the closure belongs; its gradients decide about the step.
        first = self._evaluate(closure)
        sharded.settle()
        parameters = list(pieces.parameters())
        places = {id(bucket): bucket for bucket, _ in map(pieces.bucket_and_index, parameters) if bucket.trainable}
        self.changed, self.changed_parameters = list(places.values()), parameters
        own = [piece for parameter in parameters if (piece := pieces.of(parameter)) is not None]
        sharded.hide_state()
        self._lbfgs.begin(own, sharded.book.by_piece)
        # Not before `begin` has put the pieces in, as `end` takes them out.
        self.running = True
        if sharded.skip_next:
            self._lbfgs.take_gradients({})  # torch's step ends where all are zero
        else:
            sharded.record_before(self.changed)
            self._hand_gradients()
        known = [first]

        def evaluate() -> Tensor:
            # Torch's step evaluates before it changes anything: that has been done.
            if known:
                return known.pop()
            sharded.show_new_values()
            loss = self._evaluate(closure)
            self._hand_gradients()
            return loss

        return with_closure(args, kwargs, evaluate)

    def _evaluate(self, closure: Callable[[], Any]) -> Tensor:
        """The mean of all ranks' losses; their gradients are reduced. A collective."""
        self.evaluating = True
        try:
            with torch.enable_grad():
                loss = closure()
            self.model.reducer.settle()
        finally:
            self.evaluating = False
        return self._lbfgs.mean_loss(loss)

    def _hand_gradients(self) -> None:
        pieces, found = self.sharded.pieces, dict[Tensor, Tensor]()
        owned = {id(bucket): self.model.gradient_of(bucket).owned_gradients() for bucket in self.changed}
        for parameter in self.changed_parameters:
            (bucket, index), piece = pieces.bucket_and_index(parameter), pieces.of(parameter)
            gradient = owned.get(id(bucket), {}).get(index)
            if piece is not None and gradient is not None:
                assert isinstance(gradient, Tensor), "gradients in tiers are refused"
                found[piece] = gradient
        self._lbfgs.take_gradients(found)
        # Torch's code moves the pieces next.
        self.model.invalidate_unsharded(self.changed, recorded=True)

    def end(self) -> None:
        """See `StepMethod`."""
        self.running = False
        self.sharded.book.by_piece = self._lbfgs.end()
        self.sharded.show_state()

    def split_state(self, states: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """See `StepMethod`; torch has it under the first parameter."""
        if not states:
            return states
        parameters = list(self.sharded.pieces.parameters())
        parts = divided(next(iter(states.values())), [parameter.shape for parameter in parameters])
        return dict(zip(parameters, parts, strict=True))

    def join_state(self, states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """See `StepMethod`."""
        if not states:
            return states
        first, *_ = parameters = list(self.sharded.pieces.parameters())
        return {id(first): joined([states[id(parameter)] for parameter in parameters])}

    def flat_state(self, values: dict[str, Any]) -> dict[str, Any]:
        """See `StepMethod`; history is a list of vectors."""
        return flattened(values)


def _check_division(model: ShardedModel) -> None:
    mesh, divided_by = model.mesh, None
    if model.optimizer_store is not None:
        divided_by = f"offload.optimizer={model.config.offload.optimizer!r}: set it to 'none'"
    elif mesh.tensor.size > 1:
        divided_by = "tensor parallelism: leave mesh.tensor at 1"
    elif model.experts.layers and not model.placement.shard_optimizer:
        divided_by = "divided experts at stage 0: use a stage from 1 to 3"
    elif mesh.world_group.world_size != mesh.world_size:
        divided_by = "pipeline parallelism: use one stage"
    if divided_by is not None:
        raise ValueError(f"optimizer LBFGS couples all elements, and cannot run with {divided_by}, or use AdamW")
