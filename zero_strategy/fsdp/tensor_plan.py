"""Plans of tensor parallelism: a style for patterns of module names, as a model's `tp_plan` or a user gives them.

The styles of transformers are those of torch's `parallelize_module` under other names:

    style                            of torch                                         divides (Linear; Embedding)
    colwise                          ColwiseParallel()                                weight 0, bias 0; weight 1
    rowwise                          RowwiseParallel()                                weight 1; weight 0
    colwise_gather_output            ColwiseParallel(output_layouts=Replicate())      as colwise
    embedding_rowwise                RowwiseParallel(input_layouts=Replicate())       as rowwise
    replicated_with_grad_allreduce   SequenceParallel(sequence_dim=2)                 nothing: norms of heads, of which
                                                                                      a rank has some

In a layer of LoRA the style is that of the layer and of B (columns) or A (rows); the other of the two stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Plan = Mapping[str, Any]
"""{pattern of module names: a style of transformers by its name, or one of torch}."""

_COLUMNS, _ROWS, _NOTHING = "columns", "rows", "nothing"
_DIVIDES = {
    "colwise": _COLUMNS,
    "rowwise": _ROWS,
    "colwise_gather_output": _COLUMNS,
    "embedding_rowwise": _ROWS,
    "replicated_with_grad_allreduce": _NOTHING,
    "ColwiseParallel": _COLUMNS,
    "RowwiseParallel": _ROWS,
    "SequenceParallel": _NOTHING,
    "PrepareModuleInput": _NOTHING,
    "PrepareModuleOutput": _NOTHING,
}


def own_plan(model: Any) -> dict[str, Any]:
    """The plan that a model of transformers brings along; empty if it has none, as one of PEFT's around it."""
    if not (hasattr(type(model), "tp_plan") or "tp_plan" in vars(model)):  # PEFT's show what theirs have
        return {}
    return dict(model.tp_plan or {})


def models_with_plans(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Outermost modules in a module that have a plan, with their names."""
    if own_plan(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from models_with_plans(child, f"{prefix}.{name}" if prefix else name)


def check_heads(owner: str, config: Any, ways: int) -> None:
    """Raise if ranks cannot have equal numbers of a model's heads.

    Args:
        owner: The model's class, for messages.
        config: The model's; None, or any object, says nothing of heads.
        ways: Ranks.

    Raises:
        ValueError: Naming model, number and setting.
    """
    # Composite models keep these numbers in the configuration of their text part.
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % ways:
            raise ValueError(f"mesh.tensor is {ways}, which does not divide {owner}'s {heads} {key}")


def styles_of(module: nn.Module, plan: Plan, owner: str, prefix: str = "") -> dict[str, Any]:
    """Styles of the modules that a plan names.

    Args:
        module: A model, or one of its modules.
        plan: For names in the model.
        owner: The model's class, for messages.
        prefix: The module's name in the model; "": it is the model.

    Returns:
        {name in `module`, "" for itself: style}, in the order of the modules; a later pattern wins.

    Raises:
        ValueError: If a style is not known, or of a module that cannot be divided; names it.
    """
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        name = ".".join(part for part in (prefix, path) if part)
        for pattern, style in plan.items():
            if name and fnmatchcase(name, pattern):  # a pattern means a module in the model, not the model
                _check_known(style, f"{owner}'s tp_plan for {pattern}")
                cuts = _divides(style) in (_COLUMNS, _ROWS)
                inner = _of_peft(child, style) if cuts else []
                if cuts and not inner and not isinstance(child, (nn.Linear, nn.Embedding)):
                    kind = f"{type(child).__module__}.{type(child).__qualname__}"
                    raise ValueError(
                        f"mesh.tensor: {owner}'s {name} is a {kind}, and only torch's Linear and Embedding, and plain "
                        "LoRA of a Linear, are divided; leave mesh.tensor at 1"
                    )
                for part in inner or [""]:
                    found[".".join(each for each in (path, part) if each)] = style
    return found


def _of_peft(layer: nn.Module, style: Any) -> list[str]:
    """Modules to be divided in a layer of PEFT's: of LoRA, or one that is trained beside its original; else none.

    In LoRA of columns B has those of the layer, and A is whole; of rows A has those of the layer, and B is whole.
    """
    parts: Any = layer
    if isinstance(getattr(layer, "original_module", None), (nn.Linear, nn.Embedding)):
        return ["original_module", *(f"modules_to_save.{name}" for name in parts.modules_to_save)]
    if not isinstance(getattr(layer, "base_layer", None), nn.Linear) or not hasattr(layer, "lora_A"):
        return []
    # DoRA and other variants compute more than the product of A and B: the caller refuses them.
    if parts.lora_variant or len(parts.lora_magnitude_vector):
        return []
    low = "lora_B" if _divides(style) == _COLUMNS else "lora_A"
    return ["base_layer", *(f"{low}.{name}" for name in getattr(parts, low))]


def parallelize(module: nn.Module, styles: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Divide the layers of a module in place, by torch's `parallelize_module`.

    Args:
        module: It.
        styles: Of `styles_of`.
        mesh: Of one dimension.
    """
    # Here, as the import takes seconds.
    from torch.distributed.tensor.parallel import parallelize_module

    for path, style in styles.items():
        layer = module.get_submodule(path)
        frozen = [name for name, parameter in layer.named_parameters() if not parameter.requires_grad]
        parallelize_module(layer, mesh, _of_torch(style))
        for name in frozen:  # torch's SequenceParallel lets them train
            layer.get_parameter(name).requires_grad_(False)


def division_by(plan: Plan, owner: str, config: Any = None) -> Callable[[nn.Module, str, DeviceMesh], None]:
    """A function that divides a module of a model in place: takes it, its name in the model, and the ranks.

    Args:
        plan: For names in the model.
        owner: The model's class, for messages.
        config: Of a model of transformers.
    """

    def divide(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        check_heads(owner, config, mesh.size())
        parallelize(module, styles_of(module, plan, owner, name), mesh)

    return divide


def divided_dimensions(module: nn.Module, styles: Mapping[str, Any]) -> dict[str, int]:
    """{name of a parameter that styles divide: the dimension of which ranks have parts}.

    Raises:
        ValueError: If it does not follow from a style.
    """
    found: dict[str, int] = {}
    for path, style in styles.items():
        divides = _divides(style)
        if divides is None:
            raise ValueError(f"the style {type(style).__name__} of {path} says nothing of what it divides")
        layer, before = module.get_submodule(path), f"{path}." if path else ""
        if divides != _NOTHING:
            # A Linear's weight is (outputs, inputs), an Embedding's (rows, outputs).
            found[f"{before}weight"] = int((divides == _ROWS) != isinstance(layer, nn.Embedding))
        # Of rows the bias is added to the sum over ranks, and stays whole.
        if divides == _COLUMNS and getattr(layer, "bias", None) is not None:
            found[f"{before}bias"] = 0
    return found


def _divides(style: Any) -> str | None:
    return _DIVIDES.get(style if isinstance(style, str) else type(style).__name__)


def _check_known(style: Any, where: str) -> None:
    known = [name for name in _DIVIDES if name[0].islower()]  # the others are classes of torch
    if isinstance(style, str) and style not in known:
        raise ValueError(
            f"{where} is {style!r}; accepted: {', '.join(known)}, or a style of torch.distributed.tensor.parallel. "
            "Leave mesh.tensor at 1 for this model, or give a plan of your own"
        )


def _of_torch(style: Any) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    known: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    return known[style]() if isinstance(style, str) else style
