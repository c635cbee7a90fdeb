"""An optimizer's own code as an update rule, on parts of parameters.

    user's optimizer                 a stand-in for one call
    class, attributes        ---->   the same
    param groups             ---->   the same hyper-parameters; parameters are views of the parts
    state by parameter       ---->   the parts' own

Which states there are per element is learnt from two steps on a small tensor, with each group's hyper-parameters; where
the class makes its states in its constructor (torch's Adagrad did until 2.13), that tensor begins with such states.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.optim.fused import Combine, Segment, UpdateRule
from zero_strategy.optim.muon import MOMENTUM, MuonAdamW, muon_groups

# Elements of a trial; states with a value per element are told from others by this length.
_TRIAL_NUMEL = 3


class OwnSteps(UpdateRule):
    """Steps of one optimizer, which must be elementwise (`optimizer_checks.check_elementwise`).

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
        # Not by its constructor, whose arguments nobody has kept.
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
            # Unwrapping below leaves out the hooks around `step`, not those around a `super().step()` within.
            _optimizer_step_pre_hooks=OrderedDict(),
            _optimizer_step_post_hooks=OrderedDict(),
        )
        with torch.no_grad():
            inspect.unwrap(type(self._optimizer).step)(stand_in)
        for part, segment in zip(parts, segments, strict=True):
            # The class may have put a dict of its own in the place of the given one.
            if states[part] is not segment.state:
                segment.state.clear()
                segment.state.update(states[part])


def state_after_steps(optimizer: Optimizer, begins_with: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The state that steps of an optimizer make for a few elements of a param group.

    Args:
        optimizer: The optimizer.
        begins_with: See `OwnSteps`.
        group: One of its param groups.
    """
    if any(group is each for each in muon_groups(optimizer)):
        # Not tried: Muon refuses all but matrices.
        return {MOMENTUM: torch.zeros(1)}
    return OwnSteps(optimizer.adamw if isinstance(optimizer, MuonAdamW) else optimizer, begins_with).form(group)


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


def _scaled(segment: Segment, scale: float) -> Segment:
    """The segment with its gradient multiplied, in memory of its own, of the parameter's dtype."""
    gradient = segment.grad
    # One after the other: a product of both could round otherwise.
    for factor in (segment.scale, scale):
        if factor != 1.0:
            gradient = gradient * factor
    if gradient is segment.grad:  # optimizers may change gradients in place
        gradient = gradient.clone()
    return Segment(segment.group, segment.param, gradient.to(segment.param.dtype), segment.state, like=segment.like)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    # A trial may write to these tensors: options are the user's, and the sample of a state serves again.
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
