"""Hugging Face models whose layers ranks divide, by the plan that a model brings along, or a user's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.checkpoint.deferred import make_replaceable
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.config import ZeroConfig
from zero_strategy.fsdp.dtensor import is_dtensor, tensor_ranks
from zero_strategy.fsdp.tensor_plan import Plan, check_heads, own_plan, parallelize, styles_of
from zero_strategy.quantized.scales import keeps_dtype
from zero_strategy.quantized.wrapped import is_wrapped
from zero_strategy.runtime.compute_device import current_gpu

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        ValueError: If a model has no plan, one with a style that is not known, or heads that cannot be divided; if it
            has dropout, and ranks would draw different masks; if weights are quantised.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for _, model in hugging_face_models(module):
        # What refuses a model comes before anything of it is changed.
        _check_plain(model)
        styles = _styles(model, own_plan(model) if plan is None else plan, mesh)
        before = dict(model.named_parameters(remove_duplicate=False))
        _check_dropout(model, mesh)
        # Weights that are yet to be read are known by the parameters that are replaced now.
        follow = make_replaceable(module)
        parallelize(model, styles, mesh)
        _copy_undivided(model, mesh)
        # Each name has got a parameter of its own.
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
        stateful = [each for each in group["params"] if each in replaced and each in optimizer.state]
        # All are looked at before any is changed, since each may be refused.
        for former, state in [(each, _first_state(optimizer, each, replaced[each])) for each in stateful]:
            del optimizer.state[former]
            optimizer.state[replaced[former]] = state
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]


def _first_state(optimizer: Optimizer, former: nn.Parameter, parameter: nn.Parameter) -> dict[str, Any]:
    """The state that an optimizer such as Adagrad makes with itself, for a parameter that was divided since.

    Raises:
        ValueError: If it has taken a step.
    """
    found: dict[str, Any] = {}
    for key, value in optimizer.state[former].items():
        first = value.flatten()[0] if isinstance(value, Tensor) and value.numel() else None
        if first is not None and not value.dim() and first == 0:  # no step yet
            found[key] = value
        elif first is not None and value.dim() and (value == first).all():
            found[key] = torch.full_like(parameter.detach(), float(first), dtype=value.dtype)
        else:
            raise ValueError(
                f"{type(optimizer).__name__} has state of layers that mesh.tensor divides now: prepare the model "
                "before its first step, or load the state afterwards"
            )
    return found


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
    """{path: style}, in the order of the model's modules."""
    name, ways = type(model).__name__, mesh.size()
    if not plan:
        raise ValueError(
            f"mesh.tensor is {ways}, and {name} has no tp_plan: divide its layers by divide_layers(model, mesh, plan), "
            "or leave mesh.tensor at 1"
        )
    check_heads(name, model.config, ways)
    found = styles_of(model, plan, name)
    if not found:
        raise ValueError(f"no module of {name} has a name as in the plan: {', '.join(plan)}")
    return found


def _copy_undivided(model: Any, mesh: DeviceMesh) -> None:
    """Give all ranks the first one's values of what is not divided, as they have its parts of the rest.

    Adapters, say, are drawn from random states that nobody made alike.
    """
    # There is no engine yet, whose groups could be used.
    ranks = Communicator(mesh.get_group(), CommunicationCounters())
    try:
        for tensor in [*model.parameters(), *model.buffers()]:
            if not is_dtensor(tensor) and not tensor.is_meta:
                own = tensor.detach()
                values = own.to(mesh.device_type).contiguous()
                ranks.broadcast(values, 0, "layers that are not divided")
                if values.data_ptr() != own.data_ptr() and not torch.equal(values.to(own.device), own):
                    own.copy_(values)
    finally:
        ranks.close()


def _check_plain(model: nn.Module) -> None:
    """Refuse quantised weights: a part of one would begin and end inside of the blocks that share a scale."""
    if found := [
        name for name, parameter in model.named_parameters() if keeps_dtype(parameter) or is_wrapped(parameter)
    ]:
        raise ValueError(
            f"mesh.tensor divides no quantised weights, such as {found[0]!r}: leave mesh.tensor at 1, where stage 3 "
            "divides their bytes, or load the model without quantization_config"
        )


def _check_dropout(model: Any, mesh: DeviceMesh) -> None:
    """Raise if ranks that have the same activations would drop different ones of them."""
    config = model.config.get_text_config()
    drops = any(isinstance(child, nn.Dropout) and child.p > 0 for child in model.modules())
    if not drops and not getattr(config, "attention_dropout", 0.0):
        return
    states: list[Any] = [None] * mesh.size()
    state = torch.get_rng_state() if mesh.device_type == "cpu" else torch.cuda.get_rng_state(current_gpu())
    dist.all_gather_object(states, crc32(state.numpy().tobytes()), group=mesh.get_group())
    if len(set(states)) > 1:
        raise ValueError(
            f"{type(model).__name__} has dropout, and the {mesh.size()} ranks that divide its layers have different "
            "random states: they would drop different activations. Seed all ranks alike (seed_everything, set_seed, "
            "torch.manual_seed) before the model is prepared, or set its dropout to 0"
        )
