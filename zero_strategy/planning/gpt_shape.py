"""The shape of a GPT of plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

from zero_strategy.planning.model_shape import ModelShape, NamedShapes, ParameterShape, TokenCosts, UnitShape


def gpt_shape(
    hidden: int, layers: int, vocabulary: int, *, positions: int = 0, intermediate: int | None = None
) -> ModelShape:
    """A GPT: attention and a two-matrix MLP per layer with biases and norms, embedding tied to the head.

    Args:
        hidden: Width.
        layers: Blocks; each is a unit.
        vocabulary: Rows of the embedding.
        positions: Rows of the position embedding; 0 for none.
        intermediate: Width of the MLP; default: 4 x hidden.

    Returns:
        layers x (4 h^2 + 2 h i + 9 h + i) + (vocabulary + positions) h + 2 h parameters.

    Raises:
        ValueError: If a size is not positive.
    """
    inner = 4 * hidden if intermediate is None else intermediate
    sizes = {"hidden": hidden, "layers": layers, "vocabulary": vocabulary, "intermediate": inner}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; a GPT needs 1 or more")
    root: list[tuple[str, tuple[int, ...]]] = [("positions.weight", (positions, hidden))] if positions else []
    root += _norm("norm", hidden)
    embedding = ("embedding.weight", ParameterShape((vocabulary, hidden), tied=True))
    units = [UnitShape("", (embedding, *_named("", root)))]
    block = [
        *_norm("norm1", hidden),
        *_linear("attention.qkv", hidden, 3 * hidden),
        *_linear("attention.out", hidden, hidden),
        *_norm("norm2", hidden),
        *_linear("mlp.up", hidden, inner),
        *_linear("mlp.down", inner, hidden),
    ]
    units += [UnitShape(f"blocks.{layer}", _named(f"blocks.{layer}.", block)) for layer in range(layers)]
    # Two norms' inputs and outputs, q, k, v, what attention gives; the MLP's width before and after its function.
    costs = TokenCosts(
        layers,
        8 * hidden + 2 * inner,
        hidden,
        vocabulary,
        products=6 * hidden + inner,
        inner=2 * inner,
        heads=4 * hidden,
    )
    divided = {"embedding.weight": 0}
    for layer in range(layers):
        divided.update({f"blocks.{layer}.{name}": dim for name, dim in _DIVIDED.items()})
    title = f"GPT: {layers} layers, hidden {hidden}, vocabulary {vocabulary}"
    return ModelShape(tuple(units), {}, title, costs, divided)


GPT_LINEARS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
"""Linear layers of a block."""
_DIVIDED = {
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
}
"""{parameter of a block: the dimension that ranks of `mesh.tensor` divide}."""


def _linear(name: str, inputs: int, outputs: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))]


def _norm(name: str, width: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def _named(prefix: str, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> NamedShapes:
    layers = {name: name.rpartition(".")[0] for name, _ in shapes}
    casts = {name: "autocast" if layer in GPT_LINEARS else "" for name, layer in layers.items()}
    return tuple((prefix + name, ParameterShape(shape, cast_as=casts[name])) for name, shape in shapes)
