"""Fused optimizers, one pass over memory per step, their update rules for torch's classes, and `DummyOptim`.

    from zero_strategy.optim import FusedAdamW
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)

They have the arguments and states of their `torch.optim` namesakes, and take each other's `state_dict()`. A bfloat16 or
float16 parameter has a float32 master weight in its state (`master`), and takes its new value in the same pass. The
kernels are built when the first optimizer is made (`zero_strategy.ops`); without a compiler plain torch computes the
same bits.

An update rule turns param groups and states into calls of the fused ops, one for each device and step.

A rule serves its own optimizer class and, in the engine, the `torch.optim` class with the same algorithm; states have
torch's names, so that either takes the other's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy import ops
from zero_strategy.fsdp.state_bits import is_coded
from zero_strategy.optim.coded_state import codes_key, fresh, in_form, is_coded_key, scale_key
from zero_strategy.runtime.torch_private import foreach_add_

Combine = Callable[[Sequence["Segment"], Tensor], Tensor]
"""Adds up (segments, k) float64 sums over the pieces of the same parameter, on this rank and others."""


@dataclass
class Segment:
    """Update of one parameter, or of a piece of one, in one step; tensors are contiguous and of one size.

    Attributes:
        group: The param group's hyper-parameters.
        param: float32, updated in place.
        grad: float32, bfloat16 or float16.
        state: The optimizer's state of it; filled in the first step.
        copy: Low-precision parameter that takes the new value, or None.
        scale: What the gradient is multiplied by first.
        owner: The parameter of which this is a piece, or None.
        like: Has the shape and strides that the state's tensors take.
        coded: States that can have 8 bits have them; a piece then begins at a block of its parameter.
    """

    group: dict[str, Any]
    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    like: Tensor
    copy: Tensor | None = None
    scale: float = 1.0
    owner: Tensor | None = None
    coded: bool = False


class UpdateRule:
    """One algorithm. Without state of its own.

    Attributes:
        elementwise: Its update of some parameters may be taken apart from that of others.
        coded_states: Per-element states that can have 8 bits (`optim.coded_state`).
    """

    elementwise: ClassVar[bool] = True
    coded_states: ClassVar[tuple[str, ...]] = ()
    _codes_keys: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._codes_keys = tuple(map(codes_key, cls.coded_states))

    def refuses(self, group: dict[str, Any]) -> str | None:
        """Why a group's options are beyond this rule, or None."""
        for option in ("amsgrad", "capturable", "differentiable", "centered"):
            if group.get(option):
                return f"{option}={group[option]!r}"
        return None

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """Per-element states that it keeps: key -> dtype, first value. None: it needs all of a parameter at once."""
        raise TypeError(f"{type(self).__name__} has no states")

    def update(self, segments: Sequence[Segment], scale: float = 1.0, combine: Combine | None = None) -> None:
        """Take one step.

        Args:
            segments: All that the step changes.
            scale: What gradients are multiplied by first.
            combine: For rules with per-parameter norms: how pieces of one parameter are added up.
        """
        for segment in segments:
            self._settle_form(segment)
        for part in _uniform(segments):
            self._update(part, scale, combine)

    def _settle_form(self, segment: Segment) -> None:
        """Bring a state that was loaded with other bits into the form that it is to have."""
        state = segment.state
        others = self.coded_states if segment.coded else self._codes_keys
        if not state.keys().isdisjoint(others):
            formed = in_form(state, self.coded_states, coded=segment.coded)
            state.clear()
            state.update(formed)

    def coded_vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]]:
        """`vectors` of a parameter whose states have 8 bits; scales are no such vectors."""
        known = self.vectors(group) or {}
        return {
            codes_key(key) if key in self.coded_states else key: (torch.uint8, 0.0)
            if key in self.coded_states
            else form
            for key, form in known.items()
        }

    def _update(self, segments: Sequence[Segment], scale: float, combine: Combine | None) -> None:
        raise TypeError(f"{type(self).__name__} has no update")


def _uniform(segments: Iterable[Segment]) -> Iterable[list[Segment]]:
    """Lists that one call can take: one device, with or without copies, one form of the algorithm."""
    lists: dict[Any, list[Segment]] = {}
    forms: dict[int, tuple[Any, ...]] = {}
    for segment in segments:
        group = segment.group
        if (form := forms.get(id(group))) is None:
            flags = (group.get("decoupled_weight_decay"), group.get("nesterov"), bool(group.get("momentum")))
            form = forms[id(group)] = flags
        lists.setdefault((segment.param.device, segment.copy is None, segment.coded, form), []).append(segment)
    return lists.values()


def _sign(segment: Segment, scale: float) -> float:
    return segment.scale * (-scale if segment.group.get("maximize") else scale)


def _copies(segments: Sequence[Segment]) -> list[Tensor]:
    return [segment.copy for segment in segments if segment.copy is not None]


def _check_new(segment: Segment, missing: str) -> None:
    """Raise if a parameter has state already, though not all of it: torch's classes would, too.

    Raises:
        KeyError: Naming what is missing.
    """
    if known := segment.state.keys() - {"master"}:
        raise KeyError(
            f"the state of a parameter has no {missing!r}, and has {sorted(known)}: set all values, or none ({{}})"
        )


def _states(segments: Sequence[Segment], key: str) -> list[Tensor]:
    """One state of every segment, its elements in the order of the parameter's."""
    found = []
    for segment in segments:
        value: Tensor = segment.state[key]
        if value.dim() == 1 and value.is_contiguous() and segment.like.is_contiguous():
            found.append(value)  # a flat piece, as in most steps
            continue
        if value.stride() != segment.like.stride():  # loaded from a parameter of another memory format
            value = segment.state[key] = torch.empty_like(segment.like, dtype=value.dtype).copy_(value)
        found.append(in_memory_order(value))
    return found


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as the ops take it: itself if contiguous, else all its elements in the order of memory.

    Raises:
        ValueError: If it has gaps or overlaps.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # The stride of a dimension of size one says nothing: torch may give it any number.
        if size != 1 and stride != expected:
            break
        expected *= size
    if expected != tensor.numel():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense")
    return tensor.as_strided((tensor.numel(),), (1,))


def _count(segments: Sequence[Segment]) -> list[float]:
    """Adds one to every step count, and returns them."""
    steps = [segment.state["step"] for segment in segments]
    if not all(step.is_cpu for step in steps):
        steps = _brought_to_host(segments)
    foreach_add_(steps, 1)
    found: list[float] = torch.stack(steps).tolist()
    return found


def _brought_to_host(segments: Sequence[Segment]) -> list[Tensor]:
    """Step counts as the ops take them, from now on: torch's `fused` and `capturable` keep them on the device.

    A state dict of theirs may come among fresh ones. One copy for all of a device, in the first step after it alone.
    """
    away: dict[torch.device, list[Segment]] = {}
    for segment in segments:
        if not segment.state["step"].is_cpu:
            away.setdefault(segment.state["step"].device, []).append(segment)
    for those in away.values():
        for segment, step in zip(those, torch.stack([each.state["step"] for each in those]).cpu(), strict=True):
            segment.state["step"] = step.clone()
    return [segment.state["step"] for segment in segments]


def _table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _moment_dtype(group: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, group.get("moment_dtype", "float32"))
    return dtype


def _moment(segment: Segment) -> Tensor:
    return torch.zeros_like(segment.like, dtype=_moment_dtype(segment.group))


def _begin(segment: Segment, key: str) -> None:
    """Make a state of zeros."""
    if segment.coded:
        segment.state[codes_key(key)], segment.state[scale_key(key)] = fresh(segment.like)
    else:
        segment.state[key] = _moment(segment)


def _kept_as(segment: Segment, key: str) -> str:
    """The key under which a state of a segment is."""
    return codes_key(key) if segment.coded else key


def _codes(segments: Sequence[Segment], key: str) -> tuple[list[Tensor], list[Tensor]]:
    """Codes and scales of one state of every segment."""
    states = [segment.state for segment in segments]
    return [state[codes_key(key)] for state in states], [state[scale_key(key)] for state in states]


class AdamRule(UpdateRule):
    """Adam, or AdamW where the group says `decoupled_weight_decay`."""

    coded_states = ("exp_avg", "exp_avg_sq")

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """Two moments."""
        return {key: (_moment_dtype(group), 0.0) for key in ("exp_avg", "exp_avg_sq")}

    def _update(self, segments: Sequence[Segment], scale: float, combine: Combine | None) -> None:
        for segment in segments:
            if _kept_as(segment, "exp_avg") not in segment.state:
                _check_new(segment, "exp_avg")
                # On the host and in float32, as torch's classes keep it, so that either takes the other's state.
                segment.state["step"] = torch.tensor(0.0)
                _begin(segment, "exp_avg")
                _begin(segment, "exp_avg_sq")
        params, grads = [segment.param for segment in segments], [segment.grad for segment in segments]
        hyper, copies = _table(adam_rows(segments, scale)), _copies(segments)
        decoupled = bool(segments[0].group.get("decoupled_weight_decay"))
        # Without a check: segments fit by construction, and kernels refuse what would touch other memory.
        if segments[0].coded:
            moments, squares = _codes(segments, "exp_avg"), _codes(segments, "exp_avg_sq")
            ops.adam8_(params, grads, moments, squares, hyper, decoupled=decoupled, copies=copies, check=False)
            return
        firsts, seconds = _states(segments, "exp_avg"), _states(segments, "exp_avg_sq")
        ops.adam_(params, grads, firsts, seconds, hyper, decoupled=decoupled, copies=copies, check=False)


def adam_rows(segments: Sequence[Segment], scale: float) -> list[list[float]]:
    """Rows of `ops.optimizers.ADAM_COLUMNS`, with the step counted on.

    Groups whose `bias_correction` is false give infinity as the step: beta^infinity is 0, so that both corrections are
    exactly 1 in every implementation of the formula, and the kernels need no switch.
    """
    rows = []
    known: dict[int, tuple[list[float], float]] = {}
    for segment, step in zip(segments, _count(segments), strict=True):
        group = segment.group
        if (row := known.get(id(group))) is None:
            numbers = [float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]]
            row = known[id(group)] = numbers, -scale if group.get("maximize") else scale
        number = step if group.get("bias_correction", True) else math.inf
        rows.append([*row[0], number, segment.scale * row[1]])
    return rows


class LionRule(UpdateRule):
    """Lion."""

    coded_states = ("exp_avg",)

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """One moment."""
        return {"exp_avg": (_moment_dtype(group), 0.0)}

    def _update(self, segments: Sequence[Segment], scale: float, combine: Combine | None) -> None:
        for segment in segments:
            if _kept_as(segment, "exp_avg") not in segment.state:
                _check_new(segment, "exp_avg")
                _begin(segment, "exp_avg")
        rows = [[float(s.group["lr"]), *s.group["betas"], s.group["weight_decay"], _sign(s, scale)] for s in segments]
        params, grads = [segment.param for segment in segments], [segment.grad for segment in segments]
        hyper, copies = _table(rows), _copies(segments)
        if segments[0].coded:
            ops.lion8_(params, grads, _codes(segments, "exp_avg"), hyper, copies=copies, check=False)
        else:
            ops.lion_(params, grads, _states(segments, "exp_avg"), hyper, copies=copies, check=False)


class AdagradRule(UpdateRule):
    """Adagrad."""

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """The sum of squares."""
        return {"sum": (_moment_dtype(group), group.get("initial_accumulator_value", 0.0))}

    def _update(self, segments: Sequence[Segment], scale: float, combine: Combine | None) -> None:
        for segment in segments:
            if "sum" not in segment.state:
                _check_new(segment, "sum")
                segment.state["step"] = torch.tensor(0.0)
                start = segment.group.get("initial_accumulator_value", 0.0)
                segment.state["sum"] = _moment(segment).fill_(start)
        rows = [
            [float(s.group["lr"]), s.group["lr_decay"], s.group["eps"], s.group["weight_decay"], step, _sign(s, scale)]
            for s, step in zip(segments, _count(segments), strict=True)
        ]
        ops.adagrad_(
            [segment.param for segment in segments],
            [segment.grad for segment in segments],
            _states(segments, "sum"),
            _table(rows),
            copies=_copies(segments),
            check=False,
        )


class SGDRule(UpdateRule):
    """SGD, with momentum where the group has it."""

    coded_states = ("momentum_buffer",)

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """The momentum, if any."""
        return {"momentum_buffer": (_moment_dtype(group), 0.0)} if group["momentum"] else {}

    def _update(self, segments: Sequence[Segment], scale: float, combine: Combine | None) -> None:
        moving = bool(segments[0].group["momentum"])
        rows = []
        for segment in segments:
            group = segment.group
            # The first momentum is the gradient itself, undamped, as torch has it; files of older torch may say None.
            begins = moving and segment.state.get(_kept_as(segment, "momentum_buffer")) is None
            if begins:
                segment.state.pop("momentum_buffer", None)
                _begin(segment, "momentum_buffer")
            momentum, dampening, decay = group["momentum"], group["dampening"], group["weight_decay"]
            rows.append([float(group["lr"]), momentum, dampening, decay, float(begins), _sign(segment, scale)])
        params, grads = [segment.param for segment in segments], [segment.grad for segment in segments]
        hyper, copies, nesterov = _table(rows), _copies(segments), bool(segments[0].group["nesterov"])
        if moving and segments[0].coded:
            buffers = _codes(segments, "momentum_buffer")
            ops.sgd8_(params, grads, buffers, hyper, nesterov=nesterov, copies=copies, check=False)
            return
        states = _states(segments, "momentum_buffer") if moving else []
        ops.sgd_(params, grads, states, hyper, nesterov=nesterov, copies=copies, check=False)


class LambRule(UpdateRule):
    """LAMB: a trust ratio per parameter, whose norms are added up over its pieces."""

    elementwise = False

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """A part of a parameter cannot be updated before its norms are known."""
        return None

    def update(self, segments: Sequence[Segment], scale: float = 1.0, combine: Combine | None = None) -> None:
        """Take one step; `combine` is called once, also without any segment."""
        # Norms of all first: no weight may change before the ratio of its whole parameter is known.
        parts = [(part, *self._direct(part, scale)) for part in _uniform(segments)]
        ordered = [segment for part, _, _ in parts for segment in part]
        # Also without a segment: `combine` is a collective, for which other ranks may wait.
        sums = torch.cat([torch.zeros(0, 2, dtype=torch.float64), *(found for _, _, found in parts)])
        whole = sums if combine is None else combine(ordered, sums)
        for (part, hyper, _), norms in zip(parts, whole.split([len(part) for part, _, _ in parts]), strict=True):
            ops.lamb_apply_(
                [segment.param for segment in part],
                _states(part, "exp_avg"),
                _states(part, "exp_avg_sq"),
                hyper,
                ops.lamb_rates(norms, hyper),
                copies=_copies(part),
            )

    def _direct(self, segments: Sequence[Segment], scale: float) -> tuple[Tensor, Tensor]:
        """Hyper-parameters, and sums of squares of parameters and directions."""
        for segment in segments:
            if "exp_avg" not in segment.state:
                _check_new(segment, "exp_avg")
                segment.state["step"] = torch.tensor(0.0)
                segment.state["exp_avg"] = _moment(segment)
                segment.state["exp_avg_sq"] = _moment(segment)
        hyper = _table(adam_rows(segments, scale))
        params, grads = [segment.param for segment in segments], [segment.grad for segment in segments]
        moments, squares = _states(segments, "exp_avg"), _states(segments, "exp_avg_sq")
        return hyper, ops.lamb_direction_(params, grads, moments, squares, hyper, check=False)


_RULES: dict[type[Optimizer], UpdateRule] = {
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(),
    torch.optim.SGD: SGDRule(),
    torch.optim.Adagrad: AdagradRule(),
}
"""Classes of `torch.optim` whose algorithm a rule has."""


def rule_of_class(optimizer: Optimizer) -> UpdateRule | None:
    """The rule with the algorithm of an optimizer's class, whatever its options are; None: there is none."""
    # Torch's by the exact class: a subclass may have a step of its own.
    rule = getattr(optimizer, "update_rule", None) or _RULES.get(type(optimizer))
    return rule if isinstance(rule, UpdateRule) else None


def rule_for(optimizer: Optimizer, *, any_implementation: bool = False, fused: bool = False) -> UpdateRule | None:
    """The rule that may take the optimizer's steps, or None.

    A group with `foreach` or `fused` set has chosen an implementation; it is left to it unless `any_implementation`.
    With `fused` a rule is an implementation of `fused=True`, too.
    """
    rule = rule_of_class(optimizer)
    if rule is None:
        return None
    for group in optimizer.param_groups:
        asked = group.get("fused")
        chosen = group.get("foreach") is not None or (asked is not None and not (asked and fused))
        if rule.refuses(group) or (chosen and not any_implementation):
            return None
    return rule


def rule_in_memory(
    optimizer: Optimizer, *, fused_optimizers: bool, devices: Iterable[str], masters: bool
) -> UpdateRule | None:
    """The rule that takes the optimizer's steps where its state is in memory, or None.

    `fused=True` is taken, too, in one pass with clipping and copies: torch's fused kernels round otherwise in pieces of
    a parameter than in all of it, and know neither low-precision gradients of float32 weights nor copies. Without
    native ops they are the faster ones, and keep it but for `masters`.

    Args:
        optimizer: The optimizer.
        fused_optimizers: The setting: whether rules take the steps of torch's optimizers.
        devices: Of the parameters; native ops are loaded for them if `fused=True` asks for it.
        masters: Whether some parameters are float32 master weights of low-precision ones.
    """
    if not (fused_optimizers or isinstance(getattr(optimizer, "update_rule", None), UpdateRule)):
        return None
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused:
        native = [ops.ensure(device).path is not None for device in devices]
        fused = all(native) or masters
    return rule_for(optimizer, fused=fused)


class DummyOptim:
    """Shows parameters as one group, and keeps and steps nothing.

    For code that walks `param_groups`: an engine itself needs no optimizer, and trains without one if it is None.

    Args:
        params: The parameters.

    Attributes:
        param_groups: One group: `{"params": params}`.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        chosen = params if isinstance(params, list) else list(params)  # a generator is to be read more than once
        self.param_groups: list[dict[str, Any]] = [{"params": chosen}]


_LOW = (torch.bfloat16, torch.float16)
_NOT_OURS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of torch's optimizers that a state dict for them must have."""


class FusedOptimizer(Optimizer):
    """Common base of the fused optimizers.

    Args:
        params: Parameters or param groups; float32, bfloat16 or float16, dense.
        defaults: Hyper-parameters.

    Raises:
        TypeError: If a parameter has another dtype.
        ValueError: If a hyper-parameter is out of range.
    """

    update_rule: UpdateRule = UpdateRule()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, **_NOT_OURS})
        for device in {parameter.device.type for group in self.param_groups for parameter in group["params"]}:
            ops.ensure(device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters and options are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_range(group)
        if group.get("state_bits") == 8 and not self.update_rule.coded_states:
            raise ValueError(f"state_bits is 8, and {type(self).__name__} keeps states of 32 bits alone")
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype not in (torch.float32, *_LOW):
                raise TypeError(
                    f"parameter {index} of group {len(self.param_groups) - 1} is {parameter.dtype}: fused optimizers "
                    "take float32, bfloat16 and float16"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the model again and returns the loss.
            grad_scale: What gradients are multiplied by in the same pass: 1 / loss scale, a clipping coefficient.

        Returns:
            The closure's result, or None.

        Raises:
            TypeError: If grad_scale is no number.
            ValueError: If a group has an option that is not supported.
            RuntimeError: If a gradient is sparse.
        """
        if not isinstance(grad_scale, (int, float)):
            raise TypeError(f"grad_scale must be a number, not {type(grad_scale).__name__}; of a tensor take float()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        segments, written = [], []
        self._apart: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            refused = self.update_rule.refuses(group)
            if refused:
                raise ValueError(f"{type(self).__name__} does not support {refused}; use the torch.optim class")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    segments.append(self._segment(group, parameter))
                    written.append(parameter)
        self.update_rule.update(segments, grad_scale)
        for parameter, values in self._apart:
            parameter.copy_(values)
        self._apart.clear()
        if written:
            torch.autograd.graph.increment_version(written)  # a backward through the old values is an error
        return loss

    def _segment(self, group: dict[str, Any], parameter: Tensor) -> Segment:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError(f"{type(self).__name__} takes dense gradients; use SparseAdam, or sparse=False")
        state, coded = self.state[parameter], is_coded(group.get("state_bits"), 32, parameter.numel())
        if coded and not parameter.is_contiguous():  # blocks are of elements in the order of the shape, not of memory
            whole, parameter = parameter, parameter.detach().contiguous()
            self._apart.append((whole, parameter))
        if parameter.dtype not in _LOW:
            ordered = in_memory_order(parameter), _ordered_as(parameter, gradient)
            return Segment(group, *ordered, state, parameter, coded=coded)
        if "master" not in state:
            # In the parameter's memory order: the kernels go through the memory of both, one element after the other.
            state["master"] = parameter.detach().to(torch.float32, copy=True, memory_format=torch.preserve_format)
        elif coded:
            state["master"] = state["master"].contiguous()
        return Segment(
            group,
            in_memory_order(state["master"]),
            _ordered_as(parameter, gradient),
            state,
            like=parameter,
            copy=in_memory_order(parameter),
            coded=coded,
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state; the float32 state of low-precision parameters stays float32, which torch would round.

        A group whose saved options say nothing of `bias_correction`, as those of `torch.optim`, keeps its own. Each
        group keeps its own `state_bits`: the next step brings states of others into that form.
        """
        # Taken before: torch replaces the groups by those of the file.
        before = [group.get("bias_correction") for group in self.param_groups]
        bits = [group.get("state_bits") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, corrected in zip(self.param_groups, before, strict=True):
            if corrected is not None:
                group.setdefault("bias_correction", corrected)
        for group, own_bits in zip(self.param_groups, bits, strict=True):
            group.pop("state_bits", None)
            if own_bits is not None:
                group["state_bits"] = own_bits
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and is_coded_key(
                    key
                ):  # torch makes numbers of the parameter's dtype of it
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
            if parameter.dtype in _LOW and number in state_dict["state"]:
                for key, value in state_dict["state"][number].items():
                    if (
                        isinstance(value, Tensor)
                        and value.is_floating_point()
                        and key != "step"
                        and not is_coded_key(key)
                    ):
                        # Float16 becomes float32; bfloat16 may stay, since `moment_dtype` has it.
                        wide = value.to(parameter.device, torch.promote_types(value.dtype, torch.bfloat16), copy=True)
                        self.state[parameter][key] = wide
        for group in self.param_groups:
            # A file of torch's may say capturable=True, which the next step would refuse.
            for option, value in _NOT_OURS.items():
                group[option] = value


class FusedAdam(FusedOptimizer):
    """Adam (Kingma and Ba 2015); `weight_decay` is added to the gradient.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the decay.
        maximize: Ascend.
        moment_dtype: "float32", or "bfloat16" to halve the moments' memory (rounded to nearest each step).
        bias_correction: False leaves the moments as they are, as BERT's Adam does: early steps are smaller.
        state_bits: 8 for moments as codes, with a scale for each 256 elements, of parameters of 4096 elements or more
            (`ops.dynamic_codes`); 32; None: as the engine's setting `optimizer.state_bits` says, else 32. May be set
            for a param group.
    """

    update_rule = AdamRule()
    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
        bias_correction: bool = True,
        state_bits: int | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        form = {"amsgrad": False, "decoupled_weight_decay": self._decoupled, "moment_dtype": moment_dtype}
        bits = _bits(state_bits)
        super().__init__(params, {**options, **form, "bias_correction": bool(bias_correction), **bits})


class FusedAdamW(FusedAdam):
    """AdamW (Loshchilov and Hutter 2019): decay apart from the gradient; 0.01 by default, as in torch."""

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
        bias_correction: bool = True,
        state_bits: int | None = None,
    ) -> None:
        form: dict[str, Any] = {"moment_dtype": moment_dtype, "bias_correction": bias_correction}
        form["state_bits"] = state_bits
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, **form)


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023)."""

    update_rule = LionRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
        state_bits: int | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        form = {"maximize": maximize, "moment_dtype": moment_dtype, **_bits(state_bits)}
        super().__init__(params, {**options, **form})


class FusedAdagrad(FusedOptimizer):
    """Adagrad (Duchi et al. 2011); as `torch.optim.Adagrad`, but its state is made in the first step."""

    update_rule = AdagradRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "initial_accumulator_value": initial_accumulator_value})


class FusedSGD(FusedOptimizer):
    """SGD with momentum and Nesterov's form; as `torch.optim.SGD`."""

    update_rule = SGDRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_bits: int | None = None,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov=True needs a momentum and dampening=0")
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**options, "nesterov": nesterov, "maximize": maximize, **_bits(state_bits)})


class FusedLamb(FusedOptimizer):
    """LAMB (You et al. 2020); the trust ratio is |p| / |update|, or 1 where either is 0."""

    update_rule = LambRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        moment_dtype: str = "float32",
        bias_correction: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        form = {"moment_dtype": moment_dtype, "bias_correction": bool(bias_correction)}
        super().__init__(params, {**options, "maximize": maximize, **form})


def _ordered_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient's elements in the order of the parameter's memory."""
    if gradient.stride() != parameter.stride() and not (parameter.is_contiguous() and gradient.is_contiguous()):
        gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return in_memory_order(gradient)


def _bits(state_bits: int | None) -> dict[str, int]:
    """The option as groups have it: not at all where nobody asks for it."""
    return {} if state_bits is None else {"state_bits": state_bits}


def _check_range(group: dict[str, Any]) -> None:
    bounds: dict[str, tuple[float, float]] = {"momentum": (0.0, 1.0)}
    for name in ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "momentum"):
        low, high = bounds.get(name, (0.0, float("inf")))
        if name in group and not low <= float(group[name]) <= high:
            raise ValueError(f"{name} must be at least 0{' and at most 1' if high == 1 else ''}, not {group[name]}")
    for index, beta in enumerate(group.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] must be in [0, 1), not {beta}")
    if group.get("moment_dtype", "float32") not in ("float32", "bfloat16"):
        raise ValueError(f"moment_dtype must be 'float32' or 'bfloat16', not {group['moment_dtype']!r}")
    bits = group.get("state_bits")
    if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int)):
        raise TypeError(f"state_bits must be 8, 32 or None, not {bits!r}")
    if bits not in (None, 8, 32):
        raise ValueError(f"state_bits must be 8, 32 or None, not {bits}")
    if bits == 8 and group.get("moment_dtype", "float32") != "float32":
        raise ValueError("state_bits=8 codes the moments: leave moment_dtype at 'float32'")
