"""Shapes of a model, of its optimizer's state and of its activations: all that a plan needs to know of them.

They are taken from a module on any device, the meta device included, or made of the plain numbers of a GPT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from zero_strategy.config import DEFAULT_BUDGET, ActivationCheckpointingConfig, UnitsConfig, ZeroConfig
from zero_strategy.experts.layers import ExpertCalls, find_layers
from zero_strategy.fsdp.autocast_gather import weights_cast_by_autocast
from zero_strategy.fsdp.divided_experts import check_divisible, setting_of
from zero_strategy.fsdp.dtensor import held_by, is_dtensor, tensor_ranks
from zero_strategy.fsdp.layout import aliases, find_units
from zero_strategy.fsdp.tensor_plan import divided_dimensions, models_with_plans, own_plan, styles_of
from zero_strategy.quantized.float8 import weights_cast_whole
from zero_strategy.quantized.foreseen import unpacked_numel, with_scales
from zero_strategy.quantized.scales import keeps_dtype
from zero_strategy.runtime.torch_private import forward_pre_hooks_of, non_persistent_buffers
from zero_strategy.sequence.tiling import loss_tile

_ANYWHERE = torch.device("cpu")


@dataclass(frozen=True)
class ParameterShape:
    """A parameter without memory.

    Attributes:
        shape: Its logical shape.
        dtype: The dtype that it is built in.
        requires_grad: Whether it is trained.
        device: Where it is; parameters of different devices share no bucket.
        tied: It has several names, so that autograd adds up several gradients of it.
        keeps_dtype: A computation in another dtype leaves it as it is: a quantised weight or a scale of one.
        unpacked: Elements of the weight that quantised values stand for; 0: they are its elements.
        cast_as: What `communication.parameters` has to be for it to be gathered as its layer casts it; "": no such.
        expert_ranks: Ranks that divide the experts which it holds, `shape` being that of one rank; 1: none do.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    device: torch.device = _ANYWHERE
    tied: bool = False
    keeps_dtype: bool = False
    unpacked: int = 0
    cast_as: str = ""
    expert_ranks: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def meant(self) -> int:
        """Number of elements of the weight, if it is quantised, before; of its scales none."""
        return self.unpacked if self.keeps_dtype else self.numel


class ExpertsShape(NamedTuple):
    """A layer of experts."""

    name: str
    """Of its module."""
    experts: int
    """How many it has."""
    parameters: tuple[str, ...]
    """First names of those that hold them, one after the other along the first dimension."""
    by_tensor: bool = False
    """Whether they are `DTensor`s, which ranks of `mesh.tensor` divide."""


class BufferShape(NamedTuple):
    """A buffer of a module."""

    numel: int
    """Elements."""
    dtype: torch.dtype
    """As it is built."""
    persistent: bool = True
    """Whether checkpoints hold it."""


GRADIENTS = 8
"""Of a block in its backward, beside the inside of an MLP: norms, queries, keys, values, outputs; in model widths."""
MESSAGES = 10
"""Of attention over divided sequences: what is sent, what arrives, and the same of gradients."""


class TokenCosts(NamedTuple):
    """Elements that a forward of a transformer keeps for backward, per token; no matrix of attention scores."""

    layers: int
    """Blocks."""
    per_layer: int
    """Inside a block."""
    boundary: int
    """Between blocks: all that stays of a block which is recomputed."""
    logits: int
    """At the end; kept in the parameters' dtype, and in float32 as probabilities and as their gradient."""

    products: int = 0
    """Inside a block: results of matrix products and of attention."""
    inner: int = 0
    """Inside a block's MLP, between its input and its output."""
    heads: int = 0
    """Inside a block: queries, keys, values and what attention gives."""

    def of_tensor_rank(self, ways: int) -> TokenCosts:
        """The shape of a rank that has a part of the heads and of the inside of the MLP."""
        heads, inner = -(-self.heads // ways), -(-self.inner // ways)
        return self._replace(
            per_layer=self.per_layer - self.heads - self.inner + heads + inner,
            products=self.products - self.heads - self.inner // 2 + heads + inner // 2,
            inner=inner,
            heads=heads,
        )

    def nbytes(self, tokens: int, itemsize: int, *, recompute: bool = False) -> int:
        """Bytes for a micro-batch of `tokens`; `recompute`: every block is run again in backward."""
        return sum(self.in_tiers(tokens, itemsize, ActivationCheckpointingConfig("full" if recompute else "none")))

    def in_tiers(
        self,
        tokens: int,
        itemsize: int,
        settings: ActivationCheckpointingConfig,
        *,
        offload: bool = False,
        divided: bool = False,
    ) -> tuple[int, int]:
        """Bytes for a micro-batch of `tokens`, on the device and on the host.

        Args:
            tokens: Of a rank's micro-batch.
            itemsize: Of the dtype that is computed in.
            settings: What is run again in backward.
            offload: What autograd keeps of blocks waits on the host; two blocks' part of it is on the device.
            divided: Ranks divide sequences; `tokens` are those of one.
        """
        costs = self._replace(per_layer=self.per_layer - self.inner, inner=0) if settings.tile_tokens else self
        moving, staying, again = costs._blocks(settings)
        here = min(moving, 2 * -(-moving // self.layers)) if offload else moving
        last_norm = 2 * self.boundary
        kept = tokens * itemsize * (here + staying + last_norm)
        # The loss is done with before the backward of a block, with gradients and messages of its attention.
        backward = again + (GRADIENTS + (MESSAGES if divided else 0)) * self.boundary
        moment = max(self._loss(tokens, itemsize, settings), tokens * itemsize * backward)
        return kept + moment, tokens * itemsize * moving if offload else 0

    def _loss(self, tokens: int, itemsize: int, settings: ActivationCheckpointingConfig) -> int:
        """Bytes of logits and what is made of them; in tiles, of one tile, and of the gradients that the loss makes."""
        if not settings.tile_tokens:
            return tokens * self.logits * (itemsize + 2 * 4)
        tile = min(tokens, settings.tile_tokens)
        gradients = (4 * self.logits + itemsize * tokens) * self.boundary  # of the head's weight, and of its inputs
        logits = loss_tile(tile, self.logits) * self.logits * (4 + (itemsize if itemsize < 4 else 0))
        return max(gradients + logits, 2 * itemsize * tile * self.inner)

    def _blocks(self, settings: ActivationCheckpointingConfig) -> tuple[int, int, int]:
        """Elements per token that autograd keeps of blocks, that checkpoints keep, and of a block that is run again."""
        whole = self.layers * self.per_layer
        if settings.mode == "none":
            return whole, 0, 0
        if settings.mode == "budget":  # at any moment
            return int((settings.budget or DEFAULT_BUDGET) * whole), 0, 0
        again = -(-self.layers // settings.every_n) if settings.mode == "every_n" else self.layers
        kept = again * self.boundary + (self.layers - again) * self.per_layer
        products = self.layers * self.products if settings.mode == "selective" else 0
        return kept, products, self.per_layer - (self.products if settings.mode == "selective" else 0)


NamedShapes = tuple[tuple[str, ParameterShape], ...]


@dataclass(frozen=True)
class UnitShape:
    """A unit: what is gathered and reduced together.

    Attributes:
        name: Module name, "" for the root.
        parameters: (first name, shape), in registration order.
    """

    name: str
    parameters: NamedShapes


@dataclass(frozen=True)
class ModelShape:
    """All units of a model, the root first, in the order in which a forward uses them.

    Attributes:
        units: The units.
        buffers: Module buffers by name.
        title: What the model is called in reports.
        costs: Of activations, where they are known.
        divided: {first name of a parameter: the dimension that ranks of `mesh.tensor` divide}; empty where no plan of
            tensor parallelism is known.
        ways: Ranks that divide layers already: shapes are of the largest part.
        undivided: Why ranks cannot divide its layers, where it has a plan of that; "": they can.
        experts: Layers of experts.
        unknown_experts: Why it is not known which layers are of experts; "": it is.
    """

    units: tuple[UnitShape, ...]
    buffers: Mapping[str, BufferShape] = field(default_factory=dict)
    title: str = "model"
    costs: TokenCosts | None = None
    divided: Mapping[str, int] = field(default_factory=dict)
    ways: int = 1
    undivided: str = ""
    experts: tuple[ExpertsShape, ...] = ()
    unknown_experts: str = ""

    @property
    def parameters(self) -> int:
        """Elements of all parameters; tied ones count once, a quantised weight as before, its scales not."""
        return sum(shape.meant for unit in self.units for _, shape in unit.parameters)

    @property
    def trainable(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(shape.numel for unit in self.units for _, shape in unit.parameters if shape.requires_grad)

    @property
    def largest_quantised(self) -> int:
        """Elements of the largest quantised weight; 0 if there is none."""
        return max((shape.unpacked for unit in self.units for _, shape in unit.parameters), default=0)

    @classmethod
    def of(cls, module: nn.Module, units: UnitsConfig | None = None, title: str | None = None) -> ModelShape:
        """The shape of a module, which may be on the meta device; it is not changed.

        Parameters that are `DTensor`s have the shapes of this rank's parts.

        Raises:
            ValueError: If a class or pattern of `units` matches no module, a parameter has no shape yet, or an engine
                has divided the experts of a layer; names it.
        """
        _check_whole_experts(module)
        experts, unknown = _experts_of(module)
        with with_scales(module):
            shape = cls._of(module, units or UnitsConfig(), title or type(module).__name__)
        return replace(shape, experts=experts, unknown_experts=unknown)

    @classmethod
    def _of(cls, module: nn.Module, chosen: UnitsConfig, title: str) -> ModelShape:
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(f"parameter {name!r} is lazy and has no shape yet: give its module its sizes")
        found = find_units(module, classes=chosen.classes, patterns=chosen.patterns, min_numel=chosen.min_numel)
        ties = set(aliases(module).values())
        cast = dict.fromkeys(weights_cast_by_autocast(module), "autocast") | dict.fromkeys(
            weights_cast_whole(module), "float8"
        )
        made = tuple(
            UnitShape(
                spec.name,
                tuple(
                    (name, shape_of(p, tied=name in ties, cast_as=cast.get(id(p), ""))) for name, p in spec.parameters
                ),
            )
            for spec in found
        )
        divided, undivided = _divided_by_plan(module)
        ways = len(tensor_ranks(module) or [0])
        return cls(made, _buffers_of(module), title, divided=divided, ways=ways, undivided=undivided)

    def of_tensor_rank(self, ways: int) -> ModelShape:
        """The shapes of the largest part that one of the ranks has which divide layers.

        Args:
            ways: Those ranks.

        Raises:
            ValueError: If nobody knows which layers are divided.
        """
        if ways == self.ways:
            return self
        if self.ways > 1:
            raise ValueError(f"mesh.tensor is {ways}, but {self.title}'s layers are divided among {self.ways} ranks")
        if self.largest_quantised:
            raise ValueError(
                f"mesh.tensor is {ways}, and {self.title} has quantised weights, whose packed values have no rows or "
                "columns to divide: leave mesh.tensor at 1; stage 3 divides them among all ranks"
            )
        if self.undivided:
            raise ValueError(self.undivided)
        if not self.divided:
            raise ValueError(
                f"mesh.tensor is {ways}, and {self.title} has no plan of which layers are divided (a Hugging Face "
                "model's tp_plan): plan the model as parallelize_module has divided it, or leave mesh.tensor at 1"
            )
        units = tuple(
            replace(unit, parameters=tuple((name, self._part(name, shape, ways)) for name, shape in unit.parameters))
            for unit in self.units
        )
        costs = None if self.costs is None else self.costs.of_tensor_rank(ways)
        return replace(self, units=units, costs=costs, ways=ways)

    def of_expert_rank(self, config: ZeroConfig) -> ModelShape:
        """The shapes of a rank that has some experts of each layer, as `mesh.expert` says.

        Raises:
            ValueError: If there are no layers of experts, or ranks do not divide them; names the layer and the setting.
        """
        ranks = config.mesh.expert
        if ranks == 1:
            return self
        if self.costs is not None:
            raise ValueError(
                f"{setting_of(config)}, and plain numbers (--params) stand for a GPT without experts: plan a model "
                "that has them (a factory, or a Hugging Face config.json), or leave mesh.expert at 1"
            )
        if self.unknown_experts:
            raise ValueError(self.unknown_experts)
        divided = set(self.divided) if self.ways > 1 else set[str]()
        by_tensor = [each.name for each in self.experts if each.by_tensor or divided.intersection(each.parameters)]
        piped = config.pipeline.stages > 1
        check_divisible(self.experts, config, self.title, by_tensor=by_tensor, elsewhere=piped)
        held = {name for each in self.experts for name in each.parameters}

        def part(name: str, shape: ParameterShape) -> ParameterShape:
            if name not in held:
                return shape
            experts, *rest = shape.shape
            return replace(shape, shape=(experts // ranks, *rest), expert_ranks=ranks)

        units = tuple(
            replace(unit, parameters=tuple((name, part(name, shape)) for name, shape in unit.parameters))
            for unit in self.units
        )
        return replace(self, units=units)

    def _part(self, name: str, shape: ParameterShape, ways: int) -> ParameterShape:
        if name not in self.divided:
            return shape
        sizes = list(shape.shape)
        sizes[self.divided[name]] = -(-sizes[self.divided[name]] // ways)
        return replace(shape, shape=tuple(sizes))


def _divided_by_plan(module: nn.Module) -> tuple[dict[str, int], str]:
    """Dimensions by the names that tied parameters have first; and why there are none, where a layer forbids it."""
    first, found = aliases(module), dict[str, int]()
    for prefix, model in models_with_plans(module):
        if tensor_ranks(model) is not None:
            continue
        try:
            dims = divided_dimensions(model, styles_of(model, own_plan(model), type(model).__name__))
        except ValueError as error:  # of no concern to a plan in which nobody divides layers
            return {}, str(error)
        named = {f"{prefix}.{name}" if prefix else name: dim for name, dim in dims.items()}
        found.update({first.get(name, name): dim for name, dim in named.items()})
    return found, ""


def _check_whole_experts(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if any(isinstance(hook, ExpertCalls) for hook in forward_pre_hooks_of(layer)):
            raise ValueError(
                f"ranks divide the experts of {name} already, so that its shapes are those of a part: plan the model "
                "before its engine is made, or another one of the same shapes, built on the meta device"
            )


def _experts_of(module: nn.Module) -> tuple[tuple[ExpertsShape, ...], str]:
    """Layers of experts, with the names that tied parameters have first; or why they are not known."""
    try:
        layers = find_layers(module)
    except ValueError as error:  # of no concern to a plan in which nobody divides experts
        return (), str(error)
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    made = (
        ExpertsShape(
            layer.name,
            layer.experts,
            tuple(first[id(parameter)] for parameter in layer.parameters),
            any(map(is_dtensor, layer.parameters)),
        )
        for layer in layers
    )
    return tuple(made), ""


def shape_of(parameter: nn.Parameter, *, tied: bool = False, cast_as: str = "") -> ParameterShape:
    """The shape of a parameter; of a `DTensor`, that of this rank's part."""
    device = _ANYWHERE if parameter.is_meta else parameter.device  # as the engine will make it
    return ParameterShape(
        tuple(held_by(parameter).shape),
        parameter.dtype,
        parameter.requires_grad,
        device,
        tied,
        keeps_dtype(parameter),
        unpacked_numel(parameter),
        cast_as,
    )


def _buffers_of(module: nn.Module) -> dict[str, BufferShape]:
    fleeting = {
        id(buffer)
        for child in module.modules()
        for key, buffer in child.named_buffers(recurse=False)
        if key in non_persistent_buffers(child)
    }
    return {
        name: BufferShape(buffer.numel(), buffer.dtype, id(buffer) not in fleeting)
        for name, buffer in module.named_buffers()
    }


def averaged_dtype(own: torch.dtype) -> torch.dtype:
    """Dtype of a running average of floating-point numbers."""
    return torch.promote_types(own, torch.float32)


_SCALAR_BYTES = 4
"""Step counts and the like are 0-d float32 tensors on the CPU."""


@dataclass(frozen=True)
class OptimizerState:
    """State of an elementwise optimizer.

    Attributes:
        name: Class name.
        moments: Tensors per parameter with an entry per element.
        scalars: 0-d tensors per parameter, or per piece of one.
        dtype: Of the moments; None: that of what the optimizer updates (fp32 where there are master weights).
        average: A running average of the weights is kept besides, see `WeightAverage`.
        codable: Its moments can have 8 bits.
        bits: What its param groups ask for, 8 or 32; None: `optimizer.state_bits` decides.
    """

    name: str
    moments: int
    scalars: int
    dtype: torch.dtype | None = None
    average: bool = False
    codable: bool = False
    bits: int | None = None

    def average_bytes(self, updated: torch.dtype) -> int:
        """Bytes per element of the running average, if there is one."""
        return averaged_dtype(updated).itemsize if self.average else 0

    @property
    def scalar_bytes(self) -> int:
        """Bytes of the 0-d tensors of one piece."""
        return self.scalars * _SCALAR_BYTES


_STATES: dict[str, tuple[int, int]] = {
    "adadelta": (2, 1),
    "adagrad": (1, 1),
    "adam": (2, 1),
    "adamax": (2, 1),
    "adamw": (2, 1),
    "asgd": (1, 3),
    "lamb": (2, 1),
    "lion": (1, 0),
    "muon": (1, 0),
    "nadam": (2, 2),
    "radam": (2, 1),
    "rmsprop": (1, 1),
    "rprop": (2, 1),
    "sgd": (0, 0),
}
"""(moments, scalars) of a class with its default options."""
_CODABLE = ("adam", "adamw", "lion", "sgd")


def optimizer_state(name: str, **options: Any) -> OptimizerState:
    """The state of an optimizer by class name.

    Args:
        name: Such as "AdamW", "sgd", "FusedLion"; upper and lower case are alike.
        **options: Hyper-parameters that change the state: `momentum`, `amsgrad`, `centered`, `moment_dtype`.

    Raises:
        ValueError: If the name is not known; names those that are.
    """
    key = name.lower().removeprefix("fused")
    if key not in _STATES:
        known = ", ".join(sorted(_STATES))
        raise ValueError(
            f"optimizer {name!r} is not known to the planner; known: {known}. For another one give "
            "OptimizerState(name, moments, scalars), on the command line --optimizer-bytes PER_ELEMENT"
        )
    moments, scalars = _STATES[key]
    if key == "sgd" and options.get("momentum"):
        moments += 1
    if key == "rmsprop":
        moments += bool(options.get("momentum")) + bool(options.get("centered"))
    if key in ("adam", "adamw") and options.get("amsgrad"):
        moments += 1
    dtype = options.get("moment_dtype")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    codable = key in _CODABLE and not options.get("amsgrad")
    return OptimizerState(name, moments, scalars, dtype, codable=codable, bits=options.get("state_bits"))


def check_bits(state: OptimizerState, setting: int) -> None:
    """Raise if an optimizer that is known cannot have states of 8 bits, and the setting asks for them.

    Raises:
        ValueError: Naming it.
    """
    if 8 in (setting, state.bits) and not state.codable and state.name.lower().removeprefix("fused") in _STATES:
        raise ValueError(
            f"optimizer.state_bits is 8, and {state.name} keeps states that have no form of 8 bits: plan AdamW, Adam, "
            "Lion or SGD, or leave optimizer.state_bits out"
        )


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The state that a torch optimizer will keep, all its groups having the options of the first.

    Raises:
        ValueError: If its class is not known, or the groups' options lead to different states.
    """
    name = type(optimizer).__name__
    found = {optimizer_state(name, **{**optimizer.defaults, **_plain(group)}) for group in optimizer.param_groups}
    if len(found) != 1:
        raise ValueError(
            f"the param groups of this {name} keep different states ({sorted(map(str, found))}); plan them one by one"
        )
    return found.pop()


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
