"""Layers of experts in a model: which parameters hold their experts, and calls of them once ranks hold some each.

A layer of experts takes tokens, the numbers of the experts of each, and their weights:

    forward(tokens, chosen, weights)        (tokens, width), (tokens, k) integers, (tokens, k)  ->  (tokens, width)

Once it is divided, a hook before the forward sends the tokens to the ranks of their experts and lets the forward run on
what has arrived: for each row one expert, counted from the first one here, and the weight one. A hook after it brings
the results back and adds them up with the weights. The layer's own code stays as it is.

Layers are found by what a model says: the `ep_plan` of transformers, the interface of its experts, or the three methods
of `DivisibleExperts`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from zero_strategy.experts.adapters import AdapterCalls, base_of, wrappers_of
from zero_strategy.experts.load import ExpertLoad
from zero_strategy.experts.routing import ExpertGroup, Route
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.torch_private import in_backward


@runtime_checkable
class DivisibleExperts(Protocol):
    """A module of experts that ranks may divide. Its forward is that of a layer of experts, see this module."""

    def expert_parameters(self) -> Sequence[str]:
        """Names of its parameters that hold all experts, one after the other along the first dimension."""

    def number_of_experts(self) -> int:
        """Number of experts that it has."""

    def hold_experts(self, count: int) -> None:
        """Have `count` experts from now on: chosen ones are numbers from 0 to `count` - 1."""


_DISPATCH, _STACKED = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers' plans: of a layer of experts, and of a parameter that holds them."""
_INTERFACE = "_is_expert_parallel"
"""Attribute of modules that transformers' experts interface runs."""


class ExpertLayer:
    """One layer of experts.

    Args:
        name: Of its module in the model.
        module: The module.
        parameters: Names in the module of those that hold experts.
        experts: Number of experts.
        wrappers: PEFT's modules around it, which adapt its parameters.
    """

    def __init__(
        self, name: str, module: nn.Module, parameters: Sequence[str], experts: int, wrappers: Sequence[nn.Module] = ()
    ) -> None:
        self.name, self.module, self.experts, self._wrappers = name, module, experts, wrappers
        self.parameters = [module.get_parameter(each) for each in parameters]
        for each, parameter in zip(parameters, self.parameters, strict=True):
            if parameter.dim() == 0 or parameter.shape[0] != experts:
                raise ValueError(
                    f"mesh.expert: {name}.{each} has shape {tuple(parameter.shape)}, and the layer {experts} experts, "
                    "which must be its first dimension"
                )
        others = [key for key, each in module.named_parameters() if all(each is not mine for mine in self.parameters)]
        if others:
            raise ValueError(
                f"mesh.expert: {name} has parameters {others} beside those that hold its experts. Ranks with other "
                "experts would get other gradients of them: leave mesh.expert at 1, or move them out of the layer"
            )
        for key, buffer in module.named_buffers():
            if buffer.dim() and buffer.shape[0] == experts:
                raise ValueError(
                    f"mesh.expert: {name} has a buffer {key!r} with a value for each of its {experts} experts, which "
                    "would stay whole: make it a parameter with requires_grad=False that expert_parameters() names, or "
                    "leave mesh.expert at 1"
                )
        self._calls: ExpertCalls | None = None
        self._adapters: list[AdapterCalls] = []

    def divide(self, group: ExpertGroup) -> None:
        """Let the layer hold the experts of this rank, and tokens travel. Its parameters are for others to cut."""
        self._hold(len(group.held(self.experts)))
        self._calls = ExpertCalls(self, group)
        held = group.held(self.experts)
        self._adapters = [AdapterCalls(each, held, self.experts) for each in self._wrappers]

    def take_rows(self) -> list[int]:
        """Rows of all ranks of the group for each expert, in training, since the last call; empty: not divided."""
        return [] if self._calls is None else self._calls.load.take()

    def undivide(self) -> None:
        """Let it hold all experts again."""
        if self._calls is not None:
            self._calls.remove()
            for adapters in self._adapters:
                adapters.remove()
            self._hold(self.experts)
            self._calls = None

    def _hold(self, count: int) -> None:
        module: Any = self.module
        if isinstance(module, DivisibleExperts):
            module.hold_experts(count)
        else:
            # As transformers' own expert parallelism does: its functions of experts look there.
            module.num_experts = count


class ExpertCalls(EphemeralHook):
    """The hooks of one divided layer, before its forward and after it.

    Args:
        layer: The layer.
        group: Ranks that divide its experts.

    Attributes:
        load: Rows of its experts in training.
    """

    def __init__(self, layer: ExpertLayer, group: ExpertGroup) -> None:
        self._name, self._experts, self._group = layer.name, layer.experts, group
        self._signature = inspect.signature(type(layer.module).forward)
        self._call: _Call | None = None
        group.know(layer.name)
        self.load = ExpertLoad(layer.name, layer.experts, group.rank, group.size)
        before = layer.module.register_forward_pre_hook(self, with_kwargs=True)
        # First: hooks of others see the results of this rank's tokens, whenever they were registered.
        after = layer.module.register_forward_hook(_After(self), prepend=True)
        self._handles = [before, after]

    def check_copy(self, call: str) -> None:
        """See `EphemeralHook`.

        Raises:
            RuntimeError: Always: the copy would have this rank's experts and take them for all.
        """
        raise RuntimeError(
            f"{call} of a model whose experts are divided (mesh.expert): layer {self._name} has this rank's experts "
            "only. Copy it before the engine is made, or after close(gather=True); engine.full_state_dict() has all "
            "experts"
        )

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Send the tokens away, and give the forward those that have come.

        Raises:
            TypeError: If the forward is not called as that of a layer of experts.
            ValueError: If a router chose an expert that is not there.
        """
        tokens, chosen, weights, rebuild = self._arguments(module, args, kwargs)
        shape = tokens.shape
        flat = tokens.reshape(-1, shape[-1])
        if chosen.shape != weights.shape or chosen.numel() != len(flat) * chosen.shape[-1]:
            raise TypeError(
                f"mesh.expert: {self._name} was called with {len(flat)} tokens, choices {tuple(chosen.shape)} and "
                f"weights {tuple(weights.shape)}; a layer of experts takes k choices of each token, and their weights"
            )
        chosen, weights = (each.reshape(len(flat), chosen.shape[-1]) for each in (chosen, weights))
        arrived, route = self._group.dispatch(flat, chosen, self._experts, self._name)
        if torch.is_grad_enabled() and not in_backward():  # there a forward is computed again
            self.load.add(route.counts)
        rows, numbers = arrived, route.experts.unsqueeze(1)
        if not len(rows):
            # A row of ones for the first expert: code of experts need not work for none, and the graph of a backward
            # goes through the parameters on all ranks. Its result is dropped. Not of zeros, whose norm has no gradient.
            rows, numbers = arrived.sum(dim=0, keepdim=True) + 1, numbers.new_zeros(1, 1)
        self._call = _Call(arrived, weights, route, shape)
        return rebuild(rows, numbers, weights.new_ones(numbers.shape))

    def finish(self, results: Any) -> Tensor:
        """Bring the results back.

        Raises:
            TypeError: If they are not one row for each row given.
        """
        call, self._call = self._call, None
        assert call is not None, "the hook after a forward follows the one before it"
        wanted = max(1, len(call.arrived))
        if not isinstance(results, Tensor) or results.shape[:1] != (wanted,) or results.dim() != 2:
            shape = tuple(results.shape) if isinstance(results, Tensor) else type(results).__name__
            raise TypeError(f"mesh.expert: {self._name} gave {shape} for {wanted} rows; expected one row for each")
        results = results[: len(call.arrived)]
        found = self._group.combine(results, call.arrived, call.weights, call.route)
        return found.to(results.dtype).view(*call.shape[:-1], found.shape[-1])

    def _arguments(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Tokens, choices and weights of a call, and a function that makes such arguments of others."""
        bound = self._signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        whole = [key for key, value in tensors.items() if not value.is_floating_point()]
        others = [key for key in tensors if key not in whole]
        if (
            len(tensors) != 3
            or len(whole) != 1
            or any(tensors[key] is not value for key, value in given.items() if key in tensors)
        ):
            raise TypeError(
                f"mesh.expert: {self._name} was called with {', '.join(given) or 'nothing'}; a layer of experts takes "
                "tokens, the numbers of their experts (integers) and their weights, and nothing else"
            )
        (tokens, weights), (chosen,) = others, whole

        def rebuild(rows: Tensor, numbers: Tensor, ones: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
            bound.arguments.update({tokens: rows, chosen: numbers.to(tensors[chosen].dtype), weights: ones})
            return bound.args[1:], bound.kwargs

        return tensors[tokens], tensors[chosen], tensors[weights], rebuild


class _Call:
    """A forward under way: the rows that have arrived, the weights and the route of this rank's tokens, their shape."""

    def __init__(self, arrived: Tensor, weights: Tensor, route: Route, shape: torch.Size) -> None:
        self.arrived, self.weights, self.route, self.shape = arrived, weights, route, shape


class _After(EphemeralHook):
    def __init__(self, calls: ExpertCalls) -> None:
        self._calls = calls

    def __call__(self, module: nn.Module, args: Any, results: Any) -> Tensor:
        return self._calls.finish(results)


def find_layers(root: nn.Module) -> list[ExpertLayer]:
    """The layers of experts of a model, in the order of its modules.

    Raises:
        ValueError: If a plan has an unknown style, or a layer cannot be divided; names it.
    """
    planned = _planned(root)
    found, inside = list[ExpertLayer](), set[int]()
    for name, module in root.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, DivisibleExperts):
            held, number = module.expert_parameters(), module.number_of_experts()
            found.append(ExpertLayer(name, cast(nn.Module, module), held, number))
            continue
        base = base_of(module)
        if name in planned or _INTERFACE in vars(base):
            inside.update(id(each) for each in module.modules())
            experts = getattr(base, "num_experts", None)
            if not isinstance(experts, int):
                raise ValueError(f"mesh.expert: {name}, a {type(base).__name__}, does not say its num_experts")
            names = planned.get(name) or [key for key, _ in base.named_parameters()]
            found.append(ExpertLayer(name, base, names, experts, wrappers_of(module)))
    return found


def _planned(root: nn.Module) -> dict[str, list[str]]:
    """{name of a layer of experts: names in it of what holds them}, by the plans of models of transformers."""
    found: dict[str, list[str]] = {}
    for prefix, model, plan in _plans(root):
        owner = type(model).__name__
        for pattern, style in plan.items():
            if style not in (_DISPATCH, _STACKED):
                raise ValueError(
                    f"{owner}'s ep_plan for {pattern} is {style!r}; accepted: {_DISPATCH} of a layer of experts, and "
                    f"{_STACKED} of its parameters. Give the model such a plan, or leave mesh.expert at 1"
                )
        names = [name for name, _ in model.named_modules() if _matches(name, plan, _DISPATCH)]
        for name in names:
            base = base_of(model.get_submodule(name))
            stacked = [key for key, _ in base.named_parameters() if _matches(f"{name}.{key}", plan, _STACKED)]
            found[f"{prefix}{name}"] = stacked
    return found


def _plans(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Outermost modules with an `ep_plan`, with their names and plans."""
    plan = getattr(module, "ep_plan", None) if hasattr(type(module), "ep_plan") or "ep_plan" in vars(module) else None
    if plan:
        yield prefix, module, dict(plan)
        return
    for name, child in module.named_children():
        yield from _plans(child, f"{prefix}{name}.")


def _matches(name: str, plan: dict[str, Any], style: str) -> bool:
    return any(wanted == style and fnmatchcase(name, pattern) for pattern, wanted in plan.items())
