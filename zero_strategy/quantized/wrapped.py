"""Quantised weights of torchao: what is inside of a weight as frozen parameters of its module.

torchao keeps a quantised weight in a parameter without memory of its own, which holds tensors: `qdata` and `scale`
(`Int8Tensor` and others), `quantized_data` and four more (`NF4Tensor`). Here each of these becomes a parameter of the
weight's module (`weight.qdata`, `weight.scale`), and the weight becomes a plain attribute that holds them. Layers go on
reading the attribute, and find in it what the engine has gathered.

A function of torch that gets such a weight at rest asks its parameters first, which gather or raise as any parameter
does; torchao's own code would compute with what is not there.

torchao is recognised by the modules of its classes: nothing of it is imported.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.quantized.scale import Scale, scale
from zero_strategy.runtime.metadata_calls import METADATA, STRIDES
from zero_strategy.runtime.torch_private import is_traceable_wrapper_subclass, parameters_of, tree_leaves, tree_map_only

_LIBRARY = "torchao."
_TRAINED = ("WeightWithDynamicFloat8CastTensor",)
"""Classes of torchao that hold a weight in its own precision."""
PACKED = ("qdata", "quantized_data")
"""Names of the tensors that hold the values, and tell a quantised weight's parts among names."""
_OF_FOUR_BITS = ("weight.absmax", "weight.nested_absmax")
"""Parts of another library's weights, whose names look alike."""
_PLAIN = nn.Parameter.__torch_function__
_HANDLES, _PREFIX = "_zero_strategy_parts", "_zero_strategy_parts_prefix"


def is_wrapped(parameter: object) -> bool:
    """True for a parameter, or an attribute that has taken its place, that torchao quantises."""
    kinds = type(parameter).__mro__
    if not any(kind.__module__.startswith(_LIBRARY) for kind in kinds) or kinds[0].__name__ in _TRAINED:
        return False
    held: Any = parameter
    return is_traceable_wrapper_subclass(held) and any(hasattr(held, name) for name in PACKED)


class HoldsParameters:
    """Base of weights whose parts are parameters."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Have the parts there, then show the weight to torchao as one of its own class, whose results it compares."""
        kwargs = kwargs or {}
        if func in METADATA or func in STRIDES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, HoldsParameters):
                _ask_parts(each)
        args, kwargs = tree_map_only(HoldsParameters, _of_own_class, (args, kwargs))
        types = tuple(own_class(kind) for kind in types)
        return own_class(cls).__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = {name: copy.deepcopy(part, memo) for name, part in inner_tensors(self).items()}
        made = memo[id(self)] = holding(self, copied)
        return made

    def __repr__(self, **_: Any) -> str:
        held: Any = self
        parts = ", ".join(f"{name} {tuple(part.shape)}" for name, part in inner_tensors(self).items())
        return f"{type(self).__name__} of shape {tuple(held.shape)}, {held.dtype}, of parameters: {parts}"


def _ask_parts(weight: Any) -> None:
    for part in inner_tensors(weight).values():
        if type(part).__torch_function__ is not _PLAIN:
            part.is_set_to(part)  # the cheapest question about values: gathers them, or raises and names the part


@functools.cache
def _holding(kind: type) -> type:
    # Under the plain class's name, by which PEFT knows it. torchao's tables of functions are inherited.
    return type(kind.__name__, (HoldsParameters, kind), {})


def own_class(kind: type) -> type:
    """torchao's class of a weight that holds parameters; another class itself."""
    return kind.__mro__[2] if issubclass(kind, HoldsParameters) else kind  # after itself and `HoldsParameters`


def _of_own_class(weight: Any) -> Any:
    context = weight.__tensor_flatten__()[1]
    return _rebuilt(weight, inner_tensors(weight), context)


def inner_tensors(weight: Any) -> dict[str, Any]:
    """Tensors inside of a weight, by name."""
    return {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}


def wrapped_weights(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Weights of a module itself that torchao quantises, by name; those that hold parameters already too."""
    for name, value in [*parameters_of(module).items(), *vars(module).items()]:
        if (isinstance(value, (nn.Parameter, HoldsParameters))) and is_wrapped(value):
            yield name, value


def parts_of(name: str, module: nn.Module, made: dict[int, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that a module's wrapped weights come apart into, by key.

    Args:
        name: Of the module, for errors.
        module: Its own parameters are looked at.
        made: Parameters of tensors inside of weights, by `id`; gets those that are made here, for layers that share a
            weight.

    Raises:
        ValueError: If a weight requires a gradient, or has another name than `weight`; names it.
    """
    found: dict[str, nn.Parameter] = {}
    for key, weight in wrapped_weights(module):
        if key != "weight":
            raise ValueError(
                f"{name}.{key} is a {type(weight).__name__}: of weights that torchao quantises those named weight are "
                "divided, as linear layers and embeddings have them. Leave this one as it is"
            )
        if weight.requires_grad:
            raise ValueError(
                f"{name}.{key} is quantised ({type(weight).__name__}) and requires a gradient: freeze it "
                "(requires_grad_(False)) and train an adapter, or train the weight before it is quantised"
            )
        for inner, tensor in inner_tensors(weight).items():
            if id(tensor) not in made:
                made[id(tensor)] = tensor if isinstance(tensor, Scale) else scale(tensor)
            found[f"{key}.{inner}"] = made[id(tensor)]
    return found


def attach_parts(root: nn.Module) -> None:
    """Make parameters of what is inside of all wrapped weights below `root`; those that are so already stay.

    Raises:
        ValueError: If a weight requires a gradient; names it.
    """
    # All of them before anything changes: a refusal leaves the module as it was.
    memo: dict[int, nn.Parameter] = {}
    found = [(module, parts_of(name, module, memo)) for name, module in root.named_modules()]
    shared: dict[int, tuple[Any, dict[str, nn.Parameter]]] = {}
    for module, parts in found:
        for key, weight in list(wrapped_weights(module)):
            own = {name: part for name, part in parts.items() if name.startswith(f"{key}.")}
            # Layers that share a weight share its parts.
            inner = {name.rpartition(".")[2]: part for name, part in own.items()}
            if id(weight) not in shared:
                shared[id(weight)] = (holding(weight, inner), own)
            made, own = shared[id(weight)]
            parameters_of(module).pop(key, None)
            _drop_parts(module)  # of another weight that this one has replaced
            vars(module)[key] = made
            parameters_of(module).update(own)
            _load_parts(module)


def holding(weight: Any, parts: dict[str, Any]) -> Any:
    """The weight with these parameters inside of it, by the names that they have there, where they are now."""
    names, context = weight.__tensor_flatten__()
    made = _rebuilt(weight, {name: parts[name] for name in names}, context)
    kind: Any = type(weight)
    made.__class__ = kind if issubclass(kind, HoldsParameters) else _holding(kind)
    return made


def where_parts_are(module: nn.Module) -> Any:
    """A module's weight that holds parameters; made anew where these have moved, since it notes a device."""
    weight: Any = module.weight
    parts = inner_tensors(weight)
    if next(iter(parts.values())).device != weight.device:
        weight = vars(module)["weight"] = holding(weight, parts)
    return weight


def detach_parts(root: nn.Module) -> None:
    """Undo `attach_parts`: weights are parameters again, with the values that their parts have now."""
    shared: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for key, weight in list(wrapped_weights(module)):
            if isinstance(weight, HoldsParameters):
                if id(weight) not in shared:
                    names, context = weight.__tensor_flatten__()  # type: ignore[attr-defined]
                    inner = {name: getattr(weight, name).detach().as_subclass(Tensor) for name in names}
                    made = _rebuilt(weight, inner, context)
                    shared[id(weight)] = nn.Parameter(made, requires_grad=False)
                del vars(module)[key]
                parameters_of(module)[key] = shared[id(weight)]
        _drop_parts(module)  # also where another weight has replaced the one that held them


def _drop_parts(module: nn.Module) -> None:
    for name, part in list(parameters_of(module).items()):
        if isinstance(part, Scale) and name.startswith("weight.") and name not in _OF_FOUR_BITS:
            del parameters_of(module)[name]
    for handle in vars(module).pop(_HANDLES, ()):
        handle.remove()


def _load_parts(module: nn.Module) -> None:
    """Have `load_state_dict` take a whole weight apart, and take names with a dot for no submodule's."""
    before = module.register_load_state_dict_pre_hook(_take_apart)
    vars(module)[_HANDLES] = [before, module.register_load_state_dict_post_hook(_expect)]


def _take_apart(module: nn.Module, entries: Any, prefix: str, *_: object) -> None:
    vars(module)[_PREFIX] = prefix
    weight = entries.get(f"{prefix}weight")
    if weight is not None and is_wrapped(weight):
        del entries[f"{prefix}weight"]
        entries.update({f"{prefix}weight.{name}": part for name, part in inner_tensors(weight).items()})


def _expect(module: nn.Module, incompatible: Any) -> None:
    prefix = vars(module).pop(_PREFIX, "")
    known = {f"{prefix}{name}" for name in parameters_of(module)}
    incompatible.unexpected_keys[:] = [key for key in incompatible.unexpected_keys if key not in known]


def leave_wrapped(groups: Iterable[dict[str, Any]]) -> None:
    """Take weights that have come apart out of an optimizer's groups: they are frozen, and would stay whole there."""
    for group in groups:
        if any(is_wrapped(parameter) for parameter in group["params"]):
            group["params"] = [parameter for parameter in group["params"] if not is_wrapped(parameter)]


def _rebuilt(weight: Any, inner: dict[str, Tensor], context: Any) -> Any:
    device = next(iter(inner.values())).device
    if "tensor_meta" in context:  # of NF4Tensor, which notes its device
        context["tensor_meta"] = replace(context["tensor_meta"], device=device)
    kind = next(kind for kind in type(weight).__mro__ if kind.__module__.startswith(_LIBRARY))
    return kind.__tensor_unflatten__(inner, context, weight.size(), weight.stride())  # type: ignore[attr-defined]


def is_holding(module: nn.Module) -> bool:
    """True for a module whose weight holds parameters."""
    return isinstance(vars(module).get("weight"), HoldsParameters)


def kept_names(names: Iterable[str]) -> set[str]:
    """Names, among those of a state, of parts of wrapped weights, which mean nothing in another dtype."""
    listed = list(names)
    stems = {name.rpartition(".")[0] for name in listed if name.rpartition(".")[2] in PACKED}
    return {name for name in listed if name.rpartition(".")[0] in stems}


def hollow_weight(weight: Any) -> Tensor:
    """A tensor on the meta device of a weight's shape and dtype."""
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def weight_values(weight: Any) -> Tensor:
    """The values of a weight whose parts are whole just now, as its layer computes with them."""
    found: Tensor = weight.get_original_weight() if hasattr(weight, "get_original_weight") else weight.dequantize()
    return found
