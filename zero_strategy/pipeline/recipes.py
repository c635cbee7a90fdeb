"""Layers for a `PipelineModule` out of a model that is not written as one: by the names of its blocks, without tracing.

    pipeline_layers(model, "transformer.h",
                    embedding=model_layer(model, ["transformer.wte", "transformer.wpe"], embed),
                    head=["transformer.ln_f", "lm_head"])

    embedding | block 0 | block 1 | ... | head          each a ModelLayer: parameters keep their names in the model

Weights that the model ties, such as a head's and an embedding's, stay tied wherever the layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from zero_strategy.deferred import hand_over
from zero_strategy.pipeline.specs import ModelLayer
from zero_strategy.runtime.torch_private import non_persistent_buffers

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
    left = [name for name, tensor in tensors.items() if id(tensor) not in held]
    if left:
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise ValueError(
            f"the layers leave parts of {type(model).__name__} out: {shown}; name their modules in embedding, "
            "blocks or head (a parameter of the model itself has to move into a module)"
        )
    hand_over(model, [module for layer in layers for module in layer.modules.values()])
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
