"""Accelerate's `mixed_precision="fp8"`: torchao's layers, in models that are sharded afterwards.

Accelerate converts a model's linear layers in `prepare`, but the first and the last one and such whose sizes are no
multiples of 16, and runs forwards under autocast to bf16. Its default recipe asks for float8 all-gathers, which it
ignores unless FSDP2 shards; so it is here. A config of the user's own that asks for them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from zero_strategy.integrations.float8 import check_gather, check_torchao
from zero_strategy.pipeline.module import PipelineModule

_OTHERS = {
    "te_recipe_handler": "Transformer Engine",
    "msamp_recipe_handler": "MS-AMP",
    "fp8_recipe_handler": "FP8RecipeKwargs",
}
"""Attributes of an Accelerator, and the library that its float8 is of where one is set."""
_THIRD = 2
"""Place of `mixed_precision` among an Accelerator's arguments."""


def check_installed(arguments: Sequence[Any], keywords: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Raise if an Accelerator would train in float8, and torchao is not installed.

    Args:
        arguments: What the Accelerator was given.
        keywords: Likewise.
        environment: The environment's variables.

    Raises:
        ImportError: Naming what to install.
    """
    given = arguments[_THIRD] if len(arguments) > _THIRD else keywords.get("mixed_precision")
    if str(given or environment.get("ACCELERATE_MIXED_PRECISION", "no")).lower() == "fp8":
        check_torchao("mixed_precision='fp8'")


def check_recipe(accelerator: Any) -> None:
    """Raise for float8 of another library than torchao, or that only another way of sharding has.

    Raises:
        ValueError: Naming the recipe, and the one to take.
    """
    if not getattr(accelerator, "fp8_enabled", False):  # as in Accelerate's before it had float8
        return
    for attribute, library in _OTHERS.items():
        if getattr(accelerator, attribute, None) is not None:
            raise ValueError(
                f"mixed_precision='fp8' by {library}: its layers keep float8 copies and scales of whole weights, which "
                f"would not follow sharded ones. {type(accelerator).__name__} takes torchao's: "
                "kwargs_handlers=[AORecipeKwargs()], or the variable ACCELERATE_FP8_BACKEND=AO"
            )
    recipe = accelerator.ao_recipe_handler
    if not _is_default(recipe):
        check_gather(recipe.config, "AORecipeKwargs(config=...)")


def convert(accelerator: Any, model: nn.Module) -> None:
    """Convert a model that is not sharded, as Accelerate does.

    Raises:
        ValueError: If it is a pipeline, whose layers are not built yet.
    """
    if isinstance(model, PipelineModule):
        raise ValueError(
            "mixed_precision='fp8' converts a model's layers before it is sharded, and a pipeline builds its own "
            "later: call torchao's convert_to_float8_training in the layers' own factories, and take "
            "mixed_precision='bf16'"
        )
    # Here, as the first releases that this package takes have no such module.
    from accelerate.utils.ao import convert_model_to_fp8_ao

    recipe = accelerator.ao_recipe_handler
    config = replace(recipe.config, enable_fsdp_float8_all_gather=False)
    convert_model_to_fp8_ao(model, config=config, module_filter_func=recipe.module_filter_func)


def _is_default(recipe: Any) -> bool:
    """True if Accelerate has made the recipe's config, whose float8 all-gathers nobody has asked for."""
    made = recipe.pad_inner_dim, recipe.enable_fsdp_float8_all_gather
    return made == (recipe.config.pad_inner_dim, recipe.config.enable_fsdp_float8_all_gather)
