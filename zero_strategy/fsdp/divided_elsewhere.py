"""Models that others have divided already: transformers, by its `DistributedConfig`, and torch's `fully_shard`.

    from_pretrained(..., distributed_config=DistributedConfig(ep_size=2, fsdp_size=2))

Loading so makes each weight a `DTensor` on transformers' own meshes (experts on one with the dimension "ep"), wraps
modules by `fully_shard`, and replaces forwards of layers of experts, which send tokens from then on. An `ep_size` needs
as many ranks of `fsdp_size` or `tp_size`, so no model is loaded with one and stays whole. A model that is not loaded
stays whole, but its `save_pretrained` gathers weights by itself, whatever it is given.

What `tp_size` alone has divided is taken as layers that ranks divide (`mesh.tensor`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

_SIZES = ("dp_replicate_size", "fsdp_size", "tp_size", "pp_size", "ep_size")
_SENDS = "_is_expert_parallel"
"""Attribute of a layer of experts that is true once transformers has divided it."""
_FSDP = "FSDPModule"
"""The class that torch's `fully_shard` adds to a module's bases."""


def check_not_divided(module: nn.Module) -> None:
    """Raise if somebody has divided a model, in another way than its layers, or was asked to.

    Args:
        module: A model, or a module with some.

    Raises:
        ValueError: Naming the model, the sizes and the setting to use instead.
    """
    for name, child in module.named_modules():
        found = getattr(vars(child).get("config"), "distributed_config", None)
        sizes = sizes_of({} if found is None else found)
        if any(ranks > 1 for size, ranks in sizes.items() if size != "tp_size"):
            raise ValueError(_refusal(child, sizes))
        if any(
            base.__module__.startswith("torch.distributed") and base.__name__ == _FSDP for base in type(child).__mro__
        ):
            raise ValueError(
                f"{name or type(child).__name__} was divided by fully_shard: make the model without it, since this "
                "engine divides it"
            )
        if vars(child).get(_SENDS):
            raise ValueError(
                f"{name or type(child).__name__} sends tokens to the experts of other ranks already, by transformers' "
                "own expert parallelism, and mesh.expert would do so once more: make the model without that, and set "
                "mesh.expert to the number of ranks"
            )


def _refusal(model: Any, sizes: dict[str, int]) -> str:
    owner = type(model).__name__.removeprefix("FSDP")  # which fully_shard puts before the name of a class
    asked = "DistributedConfig(" + ", ".join(f"{size}={ranks}" for size, ranks in sizes.items() if ranks > 1) + ")"
    if getattr(model, "is_distributed_loading_by_transformers", False):
        text = (
            f"{owner} was loaded with {asked}, so transformers has divided it already: load it without "
            "distributed_config, since this engine divides it"
        )
    else:
        text = (
            f"{owner}.config.distributed_config is {asked}, which does nothing but let save_pretrained leave out the "
            "weights that it is given: set it to None, since this engine divides the model"
        )
    return text + instead_of(sizes)


def instead_of(sizes: dict[str, int]) -> str:
    """The settings that mean what sizes of a `DistributedConfig` do, as the end of a sentence."""
    ways, experts, tensor = list[str](), sizes["ep_size"], sizes["tp_size"]
    if experts > 1:
        ways += [f"set mesh.expert to {experts}", "an ep_plan of your own is model.ep_plan"]
    if sizes["dp_replicate_size"] > 1:
        ways.append(f"set mesh.replicate to {sizes['dp_replicate_size']}")
    if tensor > 1 and sizes["fsdp_size"] % experts:
        ways.append("leave mesh.tensor at 1, since ranks that divide experts have data of their own")
    elif tensor > 1:
        ways.append(f"set mesh.tensor to {tensor}")
    if sizes["pp_size"] > 1:
        ways.append("stages of a pipeline are a PipelineEngine's")
    return "".join(f"; {way}" for way in ways)


def sizes_of(distributed_config: Any) -> dict[str, int]:
    """{size: ranks} of a `DistributedConfig`, or of the dict of one."""
    given = distributed_config if isinstance(distributed_config, dict) else vars(distributed_config)
    return {size: given.get(size) or 1 for size in _SIZES}
