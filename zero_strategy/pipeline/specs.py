"""Layer specs: a layer's class and arguments before it is built, and the seed that it is built with.

Layer i is built with the generators seeded with s + i, and they are put back afterwards. So a layer has the same
initial weights whichever layers are built beside it, and what the script draws later does not depend on the stages
either.

its class and arguments.

LayerSpec(nn.Linear, 8, 8)                       built on the ranks of its stage, and only there
TiedLayerSpec("embed", nn.Embedding, 50, 8)      one module for all layers of the key "embed", wherever they are
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from zero_strategy.runtime.terminal import report

_SEEDS = 2**31
"""Below it are seeds that every generator takes, and room for layers above."""


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch (CPU and current CUDA device) back at the end."""
    if torch.cuda.is_available() and torch.get_default_device().type == "cuda":
        torch.cuda.init()  # what is built will draw there
    python, numpy, host = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


def seed_generators(seed: int) -> None:
    """Seed what `random_state_kept` puts back. Unlike `torch.manual_seed`, leaves no seed for a CUDA start later on."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def draw_seed() -> int:
    """A number from torch's CPU generator, which moves on by one draw."""
    return int(torch.randint(_SEEDS, (), device="cpu").item())


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


class ModelLayer:
    """A layer made of modules of a larger model, which keep the names of their parameters there.

    Args:
        modules: The modules by their names in the model, in the order of use.
        function: Called with the modules and then the input; None: the modules are called one after the other.
        name: In messages; None: the modules' names.

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
