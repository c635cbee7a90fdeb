"""Layers under ZeRO, each a unit of its own: the bits of plain data parallelism at every stage."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import seeded
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.sequence.tiling import linear_cross_entropy

WIDTH, TOKENS, DEPTH = 8, 20, 3
SAVING = {"normalize_invertible": True, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}
DROPOUT = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.1}
LLAMA = {"norm": "rms_norm", "activation": "swiglu", "position": "rotary", "bias": False}


class LanguageModel(nn.Module):
    """Embedding, layers, and the loss over the embedding's own weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        given = {"causal": True, "initializer_range": 0.2, **DROPOUT, **options}
        config = TransformerConfig(hidden_size=WIDTH, heads=2, num_hidden_layers=DEPTH, **given)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return linear_cross_entropy(x, self.embedding.weight, tokens[:, 1:], chunk_size=4)


def script(training: PlainTraining, options: dict[str, Any], compiled: bool = False) -> None:
    torch._dynamo.reset()
    model = seeded(LanguageModel, **options)
    if compiled and isinstance(training, ShardedTraining):
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile(backend="aot_eager")
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + training.rank)
        torch.manual_seed(step)
        loss = model(torch.randint(TOKENS, (2, 6), generator=generator))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("options", [SAVING, LLAMA], ids=["saving", "llama"])
def test_every_stage_trains_bit_equal(ranks: Launcher, options: dict[str, Any]) -> None:
    for wrong in ranks(2)(play, partial(script, options=options), DEFAULTS):
        assert not wrong


def test_compiled_layers_train_the_same_at_stage_3(ranks: Launcher) -> None:
    settings = [Setting(3, "per_micro_batch")]
    for wrong in ranks(2, timeout=120)(play, partial(script, options=SAVING, compiled=True), settings, tolerance=1e-5):
        assert not wrong


def test_a_layer_is_a_unit_and_is_made_where_it_is_sharded() -> None:
    with torch.device("meta"):
        model = seeded(LanguageModel)
    assert all(parameter.is_meta for parameter in model.layers.parameters())  # type: ignore[union-attr]
    torch.manual_seed(0)
    engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}))
    assert [unit.name for unit in engine.model.units] == ["", *(f"layers.{number}" for number in range(DEPTH))]
    state = engine.full_state_dict()
    assert float(state["layers.0.attn_qkvw"].std()) == pytest.approx(0.2, rel=0.2)
    assert (state["layers.2.norm_w"] == 1).all() and not state["layers.2.attn_ob"].any()
