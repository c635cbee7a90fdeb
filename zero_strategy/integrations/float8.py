"""Conversion of linear layers to torchao's float8 layers, before their module is sharded. Shared by integrations.

A `Float8Linear` has the parameters of the layer that it replaces, the same objects. So nothing of sharding changes:
weights are gathered whole in the dtype that they have, and each rank casts them, and its own rows of inputs and
gradients, to float8 as one process would.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from zero_strategy.quantized.float8 import is_float8_layer

Choice = Callable[[nn.Module, str], bool]
"""Torchao's `module_filter_fn`: whether to convert a linear layer, from the layer and its name."""

_MULTIPLE = 16
"""Float8 kernels take matrices whose sizes are multiples of this."""


def check_torchao(asked: str) -> None:
    """Raise where torchao is not installed.

    Args:
        asked: The setting that needs it.

    Raises:
        ImportError: Naming the setting, and what to install.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ImportError(f"{asked} needs torchao: pip install 'zero-strategy[float8]' (or torchao)")


def check_gather(config: Any, asked: str) -> None:
    """Raise for a config that asks for float8 all-gathers, which only FSDP2 does.

    Args:
        config: A `Float8LinearConfig`.
        asked: Where it was given.

    Raises:
        ValueError: Naming the setting.
    """
    if config.enable_fsdp_float8_all_gather:
        raise ValueError(
            f"{asked} has enable_fsdp_float8_all_gather=True, which is for torch's FSDP2. Here "
            "communication.parameters='float8' gathers weights in float8 at stage 3: set that, and this to False"
        )


def multiples_of_16(module: nn.Module, name: str) -> bool:
    """True for a linear layer whose sizes float8 kernels take."""
    return isinstance(module, nn.Linear) and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)


class Float8Layers:
    """Linear layers of a module that are to multiply in float8.

    Args:
        recipe: The name of a recipe of torchao ("tensorwise", "rowwise", "rowwise_with_gw_hp"), or a
            `Float8LinearConfig`.
        chosen: Which of them; by default those whose sizes are multiples of 16.
        asked: The setting that asks for them, for errors.

    Attributes:
        config: The `Float8LinearConfig`.

    Raises:
        ImportError: If torchao is not installed; names what to install.
        ValueError: If there is no such recipe, or the config is for FSDP2 alone.
        TypeError: If it is neither a name nor a config.
    """

    def __init__(self, recipe: Any, chosen: Choice | None = None, asked: str = "float8") -> None:
        check_torchao(asked)
        library: Any = importlib.import_module("torchao.float8")
        self._chosen, self._asked = chosen or multiples_of_16, asked
        if isinstance(recipe, str):
            names: list[str] = [one.value for one in library.Float8LinearRecipeName]
            if recipe not in names:
                raise ValueError(f"{asked}={recipe!r} is no recipe of torchao; accepted: {', '.join(map(repr, names))}")
            recipe = library.Float8LinearConfig.from_recipe_name(recipe)
        if not isinstance(recipe, library.Float8LinearConfig):
            raise TypeError(
                f"{asked} is a {type(recipe).__name__}; accepted are the name of a recipe and a Float8LinearConfig"
            )
        check_gather(recipe, asked)
        self.config = recipe

    def lacking(self, module: nn.Module) -> list[str]:
        """Names of the chosen layers that do not multiply by this recipe yet.

        Raises:
            ValueError: If no layer is chosen.
        """
        layers = list(self._layers(module))
        if not layers:
            raise ValueError(
                f"{self._asked}: {type(module).__name__} has no linear layer to convert, of those that float8_layers "
                "chooses (by default such whose in_features and out_features are multiples of 16)"
            )
        return [name for name, layer in layers if not is_float8_layer(layer) or layer.config != self.config]

    def convert(self, module: nn.Module) -> nn.Module:
        """Replace the chosen layers by such that have the same parameters.

        Returns:
            The module; its successor where it is such a layer itself.
        """
        library: Any = importlib.import_module("torchao.float8")
        chosen, config = self._chosen, self.config
        converted: nn.Module = library.convert_to_float8_training(module, module_filter_fn=chosen, config=config)
        return converted

    def _layers(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and self._chosen(layer, name):
                yield name, layer
