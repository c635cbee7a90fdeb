"""Layers of models that were not written as layers; the oracle is the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_model import GPT, GPTConfig, rotary_tables
from zero_strategy.pipeline.building import model_layer, pipeline_layers
from zero_strategy.pipeline.module import PipelineModule


def gpt() -> GPT:
    torch.manual_seed(2)
    return GPT(GPTConfig(vocab_size=17, block_size=8, n_layer=3, n_head=2, d_model=8))


def rotated(block: Any, x: Tensor) -> Tensor:
    return block(x, *rotary_tables(x.shape[1], x.shape[2] // 2, like=x))  # type: ignore[no-any-return]


def gpt_layers(model: GPT) -> list[Any]:
    return pipeline_layers(model, "blocks", embedding="embedding", head=["norm", "head"], call_block=rotated)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_model_by_the_names_of_its_blocks(stages: int) -> None:
    model, ids = gpt(), torch.arange(16).reshape(2, 8)
    parts = [PipelineModule(gpt_layers(model), stages, rank=rank) for rank in range(stages)]
    output: Any = ids
    for part in parts:
        output = part(output)
    assert torch.equal(output, model(ids))
    names = {name for part in parts for name in part.state_dict()}
    assert names == set(model.state_dict())
    assert [bool(part.ties) for part in parts] == [stages > 1, *[False] * (stages - 2), *[True] * (stages > 1)]


def test_layers_are_named_in_the_order_of_use() -> None:
    layers = gpt_layers(gpt())
    assert [layer.name for layer in layers] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm + head"]


class Odd(nn.Module):
    """Blocks that take two arguments, and an embedding of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4), nn.Embedding(3, 4)
        self.first, self.second = nn.Bilinear(4, 4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.second(self.first(x, x), self.first(x, x))  # type: ignore[no-any-return]


def embed(words: Any, places: Any, ids: Tensor) -> Tensor:
    return words(ids) + places(torch.arange(ids.shape[1]))  # type: ignore[no-any-return]


def twice(block: Any, x: Tensor) -> Tensor:
    return block(x, x)  # type: ignore[no-any-return]


def test_functions_for_what_is_more_than_a_call() -> None:
    model, ids = Odd(), torch.tensor([[0, 4, 2]])
    layers = pipeline_layers(
        model, ["first", "second"], embedding=model_layer(model, ["words", "places"], embed), call_block=twice
    )
    assert torch.equal(PipelineModule(layers, 1)(ids), model(ids))


def test_recipes_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"leave parts of GPT out: norm\.weight, norm\.bias; name their modules"):
        pipeline_layers(gpt(), "blocks", embedding="embedding", head="head")
    with pytest.raises(ValueError, match="GPT has no module 'layers'; it has: embedding, blocks, norm, head"):
        pipeline_layers(gpt(), "layers")
    with pytest.raises(ValueError, match="blocks='norm' is a LayerNorm; give the name of a list"):
        pipeline_layers(gpt(), "norm")
    model = nn.Module()
    model.body, model.scale = nn.Sequential(nn.Linear(2, 2)), nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"out: scale; .*\(a parameter of the model itself has to move"):
        pipeline_layers(model, "body")
