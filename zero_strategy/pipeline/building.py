"""Building a rank's layers: from specs, from a model's blocks, divided among tensor-parallel ranks.

| layer | its module is called |
| --- | --- |
| a spec, a module or a function in a list | its number in the list, as in the `nn.Sequential` of that list |
| a member of an `nn.Sequential` | its name there |
| a `TiedLayerSpec` | tied_modules.KEY |
| a `ModelLayer` | as in its model, each of its modules |

The names are those of the whole model on every rank.

A model's blocks are found by their names, without tracing:

    pipeline_layers(model, "transformer.h",
                    embedding=model_layer(model, ["transformer.wte", "transformer.wpe"], embed),
                    head=["transformer.ln_f", "lm_head"])

    embedding | block 0 | block 1 | ... | head          each a ModelLayer: parameters keep their names in the model

Weights that the model ties, such as a head's and an embedding's, stay tied wherever the layers are.

A `LayerSpec` has a layer's class and arguments before it is built, and the seed that it is built with.

Layer i is built with the generators seeded with s + i, and they are put back afterwards. So a layer has the same
initial weights whichever layers are built beside it, and what the script draws later does not depend on the stages
either.

LayerSpec(nn.Linear, 8, 8)                       built on the ranks of its stage, and only there
TiedLayerSpec("embed", nn.Embedding, 50, 8)      one module for all layers of the key "embed", wherever they are
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.deferred import hand_over, make_replaceable
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.transport import break_group
from zero_strategy.fsdp.dtensor import divided_alike
from zero_strategy.fsdp.tensor_plan import division_by, own_plan
from zero_strategy.runtime.compute_device import current_gpu
from zero_strategy.runtime.terminal import report
from zero_strategy.runtime.torch_private import children_of, non_persistent_buffers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_SEEDS = 2**31
"""Below it are seeds that every generator takes, and room for layers above."""


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch (CPU and current CUDA device) back at the end."""
    if torch.cuda.is_available() and torch.get_default_device().type == "cuda":
        torch.cuda.init()  # what is built will draw there
    python, numpy, host = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    # Asking for the state would start CUDA; where nothing has started it, there is none to put back.
    gpu = current_gpu() if torch.cuda.is_initialized() else None
    device = None if gpu is None else torch.cuda.get_rng_state(gpu)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if gpu is not None and device is not None:
            torch.cuda.set_rng_state(device, gpu)


def seed_generators(seed: int) -> None:
    """Seed what `random_state_kept` puts back. Unlike `torch.manual_seed`, leaves no seed for a CUDA start later on."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes no larger ones
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[current_gpu().index].manual_seed(seed)


def draw_seed() -> int:
    """A number from torch's CPU generator, which moves on by one draw."""
    return int(torch.randint(_SEEDS, (), device="cpu").item())  # A default device would draw by its own


class LayerSeeds:
    """Seeds of all layers of a model.

    Args:
        first: Seed of layer 0.
        seed_fn: Seeds the generators with a number; None: `seed_generators`.
    """

    def __init__(self, first: int, seed_fn: Callable[[int], object] | None = None) -> None:
        self.first, self._seed = first, seed_fn or seed_generators

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """The random state of a layer while it is built."""
        with random_state_kept():
            self._seed(self.first + index)
            yield

    @contextmanager
    def forward(self, index: int, base_seed: int, micro_offset: int) -> Iterator[None]:
        """That of a layer's forward: seed base_seed x micro_offset + index, as DeepSpeed's `seed_layers` has it."""
        with random_state_kept():
            self._seed(base_seed * micro_offset + index)
            yield


_log = logging.getLogger(__name__)


class LayerSpec:
    """A layer that is built later.

    Args:
        typename: The module's class.
        *module_args: For it.
        **module_kwargs: For it.

    Raises:
        TypeError: If `typename` is no class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        given: object = typename
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            hint = "an instance" if isinstance(given, nn.Module) else "a function"
            raise TypeError(
                f"{type(self).__name__} takes a class of torch.nn.Module and its arguments, not {given!r}; {hint} can "
                "be a layer itself, without a spec"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the module; another one at each call.

        Args:
            log: Tell the logger of this module, at INFO; stderr where no logging is set up.
        """
        if log:
            report(_log, "building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        values = [repr(value) for value in self.module_args]
        values += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(values)})"


class TiedLayerSpec(LayerSpec):
    """A layer whose module is that of all other layers with the same key.

    On the ranks of a stage the module exists once, and stages that have it hold copies that stay equal.

    Args:
        key: Names the module among the tied ones.
        typename: The module's class.
        *module_args: For it; all layers of a key have the same.
        forward_fn: Called with (module, input) instead of the module with (input).
        tied_weight_attr: The parameter, or parameters, for which the layers are tied: names in the module, dots
            allowed. All other parameters of the module are kept equal, too, for without a pipeline it is one module.
        **module_kwargs: For it.

    Raises:
        TypeError: If `typename` is no class of modules, or `forward_fn` cannot be called.
        ValueError: If the key cannot be a part of a parameter's name.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key:
            raise ValueError(f"TiedLayerSpec: the key {key!r} must be a word without dots, as part of parameter names")
        if forward_fn is not None and not callable(forward_fn):
            raise TypeError(f"TiedLayerSpec: forward_fn {forward_fn!r} cannot be called; it takes (module, input)")
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def __repr__(self) -> str:
        return f"{super().__repr__()} tied as {self.key!r}"


def layer_class_name(layer: object) -> str:
    """Name of a layer in `partition_method="type:..."` and in messages: its class, or a function's name."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    if isinstance(layer, ModelLayer) and layer.modules:
        return "+".join(type(module).__name__ for module in layer.modules.values())
    return str(getattr(layer, "__name__", type(layer).__name__))


Parallelize = Callable[[nn.Module, str, "DeviceMesh"], object]
"""Divides a layer in place: takes its module, its name in the whole model, and the ranks to divide it among."""


class ModelLayer:
    """A layer made of modules of a larger model, which keep the names of their parameters there.

    Args:
        modules: The modules by their names in the model, in the order of use.
        function: Called with the modules and then the input; None: the modules are called one after the other.
        name: In messages; None: the modules' names.

    Attributes:
        modules, function, name: As passed.
        divide: Divides one of its modules among tensor-parallel ranks, where the model has a plan of that (`tp_plan`).

    Raises:
        TypeError: If one of them is no module.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], function: Callable[..., Any] | None = None, *, name: str | None = None
    ) -> None:
        for module_name, module in modules.items():
            if not isinstance(module, nn.Module):
                raise TypeError(f"ModelLayer: {module_name!r} is a {type(module).__name__}, and no torch.nn.Module")
        self.modules, self.function = dict(modules), function
        self.divide: Parallelize | None = None
        self.name = name or " + ".join(self.modules) or layer_class_name(function)

    def __call__(self, inputs: Any) -> Any:
        """Run the layer."""
        if self.function is not None:
            return self.function(*self.modules.values(), inputs)
        for module in self.modules.values():
            inputs = module(inputs)
        return inputs

    def __repr__(self) -> str:
        return f"ModelLayer({self.name})"


def modules_of(layer: object) -> list[nn.Module]:
    """The modules that a layer brings along; none for functions and for what is not built yet."""
    if isinstance(layer, ModelLayer):
        return list(layer.modules.values())
    return [layer] if isinstance(layer, nn.Module) else []


TIED = "tied_modules"
"""Where modules of `TiedLayerSpec`s are registered, by their keys."""


@dataclass(frozen=True)
class NamedLayer:
    """A layer of the whole model, built or not.

    Attributes:
        index: Its number, from 0.
        name: Of its module, where it has one.
        given: What was passed.
    """

    index: int
    name: str
    given: Any

    @property
    def class_name(self) -> str:
        """The layer's class or function."""
        return layer_class_name(self.given)


@dataclass
class BuiltLayer:
    """A layer on its stage.

    Attributes:
        index: Its number in the whole model.
        class_name: Its class or function.
        call: Runs it: one input, one output.
        modules: Its modules by the names that they have in the whole model.
        module: The module whose state is the layer's; None for functions and for parts of a larger model.
        tie_key: Of a tied layer.
        divide: See `ModelLayer`.
        borrows: It runs a function of its own on a tied module.
    """

    index: int
    class_name: str
    call: Callable[[Any], Any]
    modules: dict[str, nn.Module] = field(default_factory=dict)
    module: nn.Module | None = None
    tie_key: str | None = None
    divide: Parallelize | None = None
    borrows: bool = False

    @property
    def has_parameters(self) -> bool:
        """True if anything in it is trained, or could be."""
        return any(True for module in self.modules.values() for _ in module.parameters())

    def state(self, exclude_frozen: bool = False) -> dict[str, Tensor] | None:
        """The layer's state dict, by names in its module or in the larger model. None: it can have no state."""
        if not self.modules:
            return None
        state: dict[str, Tensor] = {}
        for name, module in self.modules.items():
            prefix = "" if self.module is not None else f"{name}."
            found = {prefix + key: value for key, value in module.state_dict().items()}
            if exclude_frozen:
                frozen = {prefix + key for key, parameter in module.named_parameters() if not parameter.requires_grad}
                found = {key: value for key, value in found.items() if key not in frozen}
            state.update(found)
        return state

    def load_state(self, state: Mapping[str, Tensor], strict: bool) -> None:
        """Take a state of `state()`'s form."""
        if self.module is not None:
            self.module.load_state_dict(state, strict=strict)
            return
        for name, module in self.modules.items():
            start = f"{name}."
            own = {key[len(start) :]: value for key, value in state.items() if key.startswith(start)}
            module.load_state_dict(own, strict=strict)


def name_layers(layers: Iterable[Any]) -> list[NamedLayer]:
    """All layers with their names.

    Raises:
        TypeError: If one cannot be a layer; names it.
        ValueError: If there is none.
    """
    given: Any = layers
    if isinstance(given, nn.Module) and not isinstance(given, (nn.Sequential, nn.ModuleList)):
        raise TypeError(
            f"PipelineModule takes layers in their order: a list, an nn.Sequential or an nn.ModuleList, not a "
            f"{type(given).__name__}; "
            "zero_strategy.pipeline.building.pipeline_layers(model, blocks=...) makes one of a model"
        )
    if isinstance(given, nn.Module):
        # named_children() would leave out a module that is there twice.
        named = [NamedLayer(i, name, module) for i, (name, module) in enumerate(children_of(given).items())]
    else:
        named = [NamedLayer(i, _name(i, layer), layer) for i, layer in enumerate(given)]
    if not named:
        raise ValueError("PipelineModule has no layers")
    for layer in named:
        if not isinstance(layer.given, LayerSpec) and not callable(layer.given):
            raise TypeError(
                f"layer {layer.index} is a {type(layer.given).__name__}; a layer is a LayerSpec, a torch.nn.Module or "
                "a function"
            )
    return named


def _name(index: int, layer: Any) -> str:
    return f"{TIED}.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(index)


def build_layers(own: Sequence[NamedLayer], everyone: Sequence[NamedLayer], seeds: LayerSeeds) -> list[BuiltLayer]:
    """Build this rank's layers, each under its own seed; a tied module once, under that of its first layer.

    Args:
        own: The layers.
        everyone: Those of the whole model.
        seeds: The random states.
    """
    # Of the whole model, so that every rank builds a tied module with one seed, whichever of its layers are there.
    # Reversed, as the dict keeps the last layer of a key.
    first = {layer.given.key: layer.index for layer in reversed(everyone) if isinstance(layer.given, TiedLayerSpec)}
    tied: dict[str, nn.Module] = {}
    built = []
    for layer in own:
        given, one = layer.given, BuiltLayer(layer.index, layer.class_name, layer.given)
        if isinstance(given, ModelLayer):
            one.modules, one.divide = given.modules, given.divide
        # Before LayerSpec, of which it is a subclass.
        elif isinstance(given, TiedLayerSpec):
            if given.key not in tied:
                with seeds.layer(first[given.key]):
                    tied[given.key] = _checked_tie(given, given.build())
            one.module, one.tie_key = tied[given.key], given.key
            one.borrows = given.forward_fn is not None
            one.call = partial(given.forward_fn, one.module) if given.forward_fn is not None else one.module
        elif isinstance(given, LayerSpec):
            with seeds.layer(layer.index):
                one.module = one.call = given.build()
        elif isinstance(given, nn.Module):
            one.module = given
        if one.module is not None:
            one.modules = {layer.name: one.module}
        built.append(one)
    return built


def _checked_tie(spec: TiedLayerSpec, module: nn.Module) -> nn.Module:
    names = dict(module.named_parameters())
    for wanted in spec.tied_weight_attr:
        if wanted not in names and wanted != "weight":  # the default, for modules that may have no such parameter
            raise ValueError(
                f"TiedLayerSpec {spec.key!r}: tied_weight_attr {wanted!r} is no parameter of {type(module).__name__}; "
                f"its parameters: {sorted(names)}"
            )
    return module


def register(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module under a dotted name, with containers on the way; what lies there already must be the same.

    Raises:
        ValueError: If the name is taken by something else.
    """
    *path, last = name.split(".")
    owner = root
    for step, part in enumerate(path):
        inner = children_of(owner).get(part)
        if inner is None:
            follows = [*path, last][step + 1]
            inner = nn.ModuleDict() if follows.isdigit() else nn.Module()
            _add(owner, part, inner, name)
        owner = inner
    if children_of(owner).get(last) is not module:  # A tied module comes with each of its layers
        _add(owner, last, module, name)


def _add(owner: nn.Module, part: str, module: nn.Module, name: str) -> None:
    try:
        owner.add_module(part, module)
    except KeyError as error:
        raise ValueError(
            f"a layer cannot be called {name!r} in a PipelineModule, which uses {part!r} itself: {error}; rename it"
        ) from None


def parallelize_together(
    control: Communicator, layers: Sequence[BuiltLayer], parallelize: Parallelize | None, mesh: DeviceMesh
) -> None:
    """Divide the layers on all ranks; if that fails on one, raise on all. A collective.

    It has collectives of torch's, which distributes parameters over the mesh, and in which the others of a mesh would
    wait for a rank that fails alone until their group times out. So that rank breaks the group's connections.

    Args:
        control: All ranks.
        layers, parallelize, mesh: See `parallelize_layers`.

    Raises:
        Exception: An error of this rank.
        RuntimeError: An error of other ranks; names them and says it.
    """
    error: Exception | None = None
    try:
        parallelize_layers(layers, parallelize, mesh)
    except Exception as caught:
        error = caught
        break_group(mesh.get_group(), mesh.device_type)
    reports = control.all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    failed = {rank: text for rank, text in enumerate(reports) if text is not None}
    # Torch says no more than RuntimeError of a connection that another rank has broken.
    if error is not None and (len(failed) == 1 or not isinstance(error, RuntimeError)):
        raise error
    if failed:
        raise RuntimeError(f"layers cannot be divided; rank(s) failed: {failed}") from error


def parallelize_layers(layers: Sequence[BuiltLayer], parallelize: Parallelize | None, mesh: DeviceMesh) -> None:
    """Divide every module of a rank's layers, once where several of them share it; weights that are tied stay tied.

    Args:
        layers: They may wait for values, and the parameters in the place of theirs wait then.
        parallelize: Divides a module; None: as the models say that layers were made of.
        mesh: The ranks.

    Raises:
        ValueError: If layers shared a parameter and it was divided in two ways; names both of its names.
    """
    # Before anything is divided: each name may have a parameter of its own afterwards.
    before, shared = _named(layers), _names_by_parameter(layers)
    seen: dict[int, Callable[[Mapping[nn.Parameter, nn.Parameter]], None]] = {}
    for layer in layers:
        divide = parallelize or layer.divide
        for name, module in layer.modules.items():
            if divide is not None and id(module) not in seen:
                # First: parameters that wait for values can be replaced by divided ones once they are on the meta
                # device.
                seen[id(module)] = make_replaceable(module)
                divide(module, name, mesh)
    # Before replacements are read, of which a parameter with several names then has one.
    _tie_again(layers, shared)
    now = dict(_named(layers))
    replaced = {parameter: now[name] for name, parameter in before if now[name] is not parameter}
    for follow in seen.values():
        follow(replaced)


def _tie_again(layers: Sequence[BuiltLayer], shared: Mapping[int, list[str]]) -> None:
    now = dict(_named(layers))
    owners = {f"{name}.{path}" if path else name: each for name, path, each in _modules(layers)}
    for first, *others in shared.values():
        for name in others:
            if now[name] is now[first]:
                continue
            if not divided_alike(now[name], now[first]):
                raise ValueError(
                    f"parameters {first!r} and {name!r} were one, and parallelize divided them in two ways: let it "
                    "divide both along the same dimension, or tie them by a TiedLayerSpec, whose module is divided once"
                )
            owner, _, own = name.rpartition(".")
            setattr(owners[owner], own, now[first])


def _modules(layers: Iterable[BuiltLayer]) -> list[tuple[str, str, nn.Module]]:
    """(name of a layer's module, path below it, module)."""
    return [
        (name, path, each)
        for layer in layers
        for name, module in layer.modules.items()
        for path, each in module.named_modules(remove_duplicate=False)
    ]


def _named(layers: Iterable[BuiltLayer]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{name}.{local}", parameter)
        for layer in layers
        for name, module in layer.modules.items()
        for local, parameter in module.named_parameters(remove_duplicate=False)  # Tied ones under each name
    ]


def _names_by_parameter(layers: Iterable[BuiltLayer]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in _named(layers):
        found.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in found.items() if len(set(names)) > 1}


Part = str | Sequence[str] | ModelLayer | None


def model_layer(
    model: nn.Module, names: str | Sequence[str], function: Callable[..., Any] | None = None, *, name: str | None = None
) -> ModelLayer:
    """A layer made of some of a model's modules.

    Args:
        model: The model.
        names: Of the modules.
        function: Called with the modules and the input; None: they are called one after the other.
        name: In messages.

    Raises:
        ValueError: If the model has no such module.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    return ModelLayer({each: _module(model, each) for each in wanted}, function, name=name)


def pipeline_layers(
    model: nn.Module,
    blocks: str | Sequence[str],
    *,
    embedding: Part = None,
    head: Part = None,
    call_block: Callable[[Any, Any], Any] | None = None,
) -> list[ModelLayer]:
    """The layers of a model: the embedding, the blocks, the head.

    Args:
        model: The model. Its modules go into the layers as they are, and on a rank only its own stay.
        blocks: Names of the blocks in order, or of the `nn.ModuleList` or `nn.Sequential` that has them.
        embedding: Before the blocks: a name, names whose modules are called in turn, or a `model_layer` with a
            function.
        head: After the blocks, likewise.
        call_block: Called with (block, input) where `block(input)` is not enough.

    Returns:
        Layers for `PipelineModule`.

    Raises:
        ValueError: If a name is not in the model, or the layers leave parameters or buffers of the model out.
    """
    names = _block_names(model, blocks)
    layers = [model_layer(model, name, call_block) for name in names]
    return finished(model, [*_parts(model, embedding), *layers, *_parts(model, head)])


def finished(model: nn.Module, layers: list[ModelLayer]) -> list[ModelLayer]:
    """See that layers have all of a model's state; weights that are read later wait with them from now on.

    Raises:
        ValueError: If not; names what is left out.
    """
    held = {
        id(tensor)
        for layer in layers
        for module in layer.modules.values()
        for tensor in (*module.parameters(), *module.buffers())
    }
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **_state_buffers(model)}
    # State that no layer has would be neither trained nor saved.
    left = [name for name, tensor in tensors.items() if id(tensor) not in held]
    if left:
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise ValueError(
            f"the layers leave parts of {type(model).__name__} out: {shown}; name their modules in embedding, "
            "blocks or head (a parameter of the model itself has to move into a module)"
        )
    # The layers go on without the model, and would lose what is to be read into it.
    hand_over(model, [module for layer in layers for module in layer.modules.values()])
    if plan := own_plan(model):
        for layer in layers:
            layer.divide = division_by(plan, type(model).__name__, getattr(model, "config", None))
    return layers


def _state_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of the model's state; the model may be one that refuses to make a state dict now."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in non_persistent_buffers(module)
    }


def _parts(model: nn.Module, part: Part) -> list[ModelLayer]:
    if part is None:
        return []
    return [part] if isinstance(part, ModelLayer) else [model_layer(model, part)]


def _block_names(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    if not isinstance(blocks, str):
        return list(blocks)
    container = _module(model, blocks)
    if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or not len(container):
        raise ValueError(
            f"blocks={blocks!r} is a {type(container).__name__}; give the name of a list of blocks, or all their names"
        )
    return [f"{blocks}.{name}" for name, _ in container.named_children()]


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [each for each, _ in model.named_modules() if each and each.count(".") <= name.count(".")]
        shown = ", ".join(known[:12]) + (" ..." if len(known) > 12 else "")
        raise ValueError(f"{type(model).__name__} has no module {name!r}; it has: {shown}") from None
