"""Hugging Face models whose layers ranks divide, by the plan that a model brings along, or a user's.

The styles of transformers' `tp_plan` are those of torch's `parallelize_module` under other names:

    colwise                          ColwiseParallel()
    rowwise                          RowwiseParallel()
    colwise_gather_output            ColwiseParallel(output_layouts=Replicate())
    embedding_rowwise                RowwiseParallel(input_layouts=Replicate())
    replicated_with_grad_allreduce   SequenceParallel(sequence_dim=2): norms of heads, of which a rank has some
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zero_strategy.checkpoint.deferred import make_replaceable
from zero_strategy.config import ZeroConfig
from zero_strategy.fsdp.dtensor import tensor_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Plan = Mapping[str, Any]
"""{pattern of module names: a style of transformers by its name, or one of torch}."""


def divide_layers(module: nn.Module, mesh: DeviceMesh, plan: Plan | None = None) -> dict[nn.Parameter, nn.Parameter]:
    """Divide the layers of the Hugging Face models in a module among the ranks of a mesh.

    Integrations call it where `mesh.tensor` is more than one and nothing is divided yet. Parameters are new objects, so
    call it before optimizers are made; the former ones lose their values. Tied weights stay tied.

    Args:
        module: A model of transformers, or a module with some; weights of `from_pretrained` may be yet to be read.
        mesh: Of one dimension.
        plan: For names of modules in each model; None: the model's own.

    Returns:
        {parameter that was replaced: its `DTensor`}.

    Raises:
        ValueError: If a model has no plan, one with a style that is not known, or heads that cannot be divided; or it
            has dropout, and ranks would draw different masks.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for _, model in hugging_face_models(module):
        styles = _styles(model, model.tp_plan if plan is None else plan, mesh)
        before = dict(model.named_parameters(remove_duplicate=False))
        _check_dropout(model, mesh)
        follow = make_replaceable(module)
        for path, style in styles.items():
            parallelize_module(model.get_submodule(path), mesh, style)
        model.tie_weights()
        after = dict(model.named_parameters(remove_duplicate=False))
        changed = {old: after[name] for name, old in before.items() if after[name] is not old}
        follow(changed)
        for old in changed:
            old.data = old.data.new_empty(0)  # else whoever looks for it by its identity keeps its memory
        replaced.update(changed)
    return replaced


def divide_if_asked(
    module: nn.Module, config: ZeroConfig, mesh: Callable[[], DeviceMesh]
) -> dict[nn.Parameter, nn.Parameter]:
    """`divide_layers` where `mesh.tensor` is more than one, and the module has Hugging Face models as they were made.

    Args:
        module: It.
        config: The settings.
        mesh: Makes the mesh of ranks that divide layers.
    """
    if (config.mesh.tensor or 1) == 1 or tensor_ranks(module) is not None or not hugging_face_models(module):
        return {}
    return divide_layers(module, mesh())


def use_replaced(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer that was made before layers were divided hold their parameters.

    Raises:
        ValueError: If it has state of the former ones.
    """
    for group in optimizer.param_groups:
        if not any(parameter in replaced for parameter in group["params"]):
            continue
        if any(parameter in optimizer.state for parameter in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} has state of layers that mesh.tensor divides now: prepare the model "
                "before its first step, or load the state afterwards"
            )
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]


def hugging_face_models(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Outermost models of transformers in a module, each with what is called: itself, or PEFT's around it."""
    transformers, peft = sys.modules.get("transformers"), sys.modules.get("peft")  # nobody has one without them
    if transformers is None:
        return []
    if isinstance(module, transformers.PreTrainedModel):
        return [(module, module)]
    if peft is not None and isinstance(module, peft.PeftModel):
        inner = module.get_base_model()
        return [(module, inner)] if isinstance(inner, transformers.PreTrainedModel) else []
    return [found for child in module.children() for found in hugging_face_models(child)]


def _styles(model: Any, plan: Plan, mesh: DeviceMesh) -> dict[str, Any]:
    """{path: torch's style}, in the order of the model's modules."""
    name, ways = type(model).__name__, mesh.size()
    if not plan:
        raise ValueError(
            f"mesh.tensor is {ways}, and {name} has no tp_plan: divide its layers by divide_layers(model, mesh, plan), "
            "or leave mesh.tensor at 1"
        )
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % ways:
            raise ValueError(f"mesh.tensor is {ways}, which does not divide {name}'s {heads} {key}")
    found: dict[str, Any] = {}
    for path, child in model.named_modules():
        for pattern, style in plan.items():
            if path and fnmatch.fnmatchcase(path, pattern):
                if not isinstance(child, (nn.Linear, nn.Embedding)) and style in ("colwise", "rowwise"):
                    kind = f"{type(child).__module__}.{type(child).__qualname__}"
                    raise ValueError(
                        f"mesh.tensor: {name}'s {path} is a {kind}, and only torch's Linear and Embedding are divided "
                        "(adapters are not); leave mesh.tensor at 1"
                    )
                found[path] = _style(style, f"{name}'s tp_plan for {pattern}")
    missing = [pattern for pattern in plan if not any(fnmatch.fnmatchcase(path, pattern) for path in found)]
    if missing and len(missing) == len(plan):
        raise ValueError(f"no module of {name} has a name as in the plan: {', '.join(missing)}")
    return found


def _check_dropout(model: Any, mesh: DeviceMesh) -> None:
    """Raise if ranks that have the same activations would drop different ones of them."""
    config = model.config.get_text_config()
    drops = any(isinstance(child, nn.Dropout) and child.p > 0 for child in model.modules())
    if not drops and not getattr(config, "attention_dropout", 0.0):
        return
    states: list[Any] = [None] * mesh.size()
    state = torch.get_rng_state() if mesh.device_type == "cpu" else torch.cuda.get_rng_state()
    dist.all_gather_object(states, crc32(state.numpy().tobytes()), group=mesh.get_group())
    if len(set(states)) > 1:
        raise ValueError(
            f"{type(model).__name__} has dropout, and the {mesh.size()} ranks that divide its layers have different "
            "random states: they would drop different activations. Seed all ranks alike (seed_everything, set_seed, "
            "torch.manual_seed) before the model is prepared, or set its dropout to 0"
        )


def _style(style: Any, where: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

    if isinstance(style, ParallelStyle):
        return style
    known: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    if style not in known:
        raise ValueError(
            f"{where} is {style!r}; accepted: {', '.join(known)}, or a style of torch.distributed.tensor.parallel. "
            "Leave mesh.tensor at 1 for this model, or give a plan of your own to divide_layers"
        )
    return known[style]()
