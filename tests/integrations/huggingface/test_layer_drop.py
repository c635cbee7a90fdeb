"""LayerDrop of transformers at stage 3: told to run all layers, or ranks skip as plain replicas do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.trainings import PlainTraining, Setting, play
from tests.launcher import Launcher

STEPS = 4


def wav2vec() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_kernel=(8, 8), conv_stride=(4, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8, apply_spec_augment=False, layerdrop=0.5,
        hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return Wav2Vec2ForSequenceClassification(config)


def m2m100() -> nn.Module:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    config = M2M100Config(
        vocab_size=32, d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_layerdrop=0.5, decoder_layerdrop=0.5,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return M2M100ForConditionalGeneration(config)


def skips(training: PlainTraining, name: str) -> None:
    model = (wav2vec if name == "wav2vec2" else m2m100)()
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.05))
    model.train()
    for step in range(STEPS):
        data = training.data(step, 2, 200)
        inputs: dict[str, Any] = {"input_values": data, "labels": torch.tensor([0, 1])}
        if name != "wav2vec2":
            tokens = data[:, :6].abs().mul(10).long().clamp(3, 31)
            inputs = {"input_ids": tokens, "labels": tokens}
        torch.manual_seed(100 * step + training.rank)
        loss = model(**inputs).loss
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("name", ["wav2vec2", "m2m100"])
def test_ranks_of_transformers_skip_layers_as_plain_replicas(ranks: Launcher, name: str) -> None:
    setting = Setting(3, "per_micro_batch", {"units": {"min_numel": 1, "may_skip": True}})
    for wrong in ranks(2)(play, _Skips(name), [setting], tolerance=1e-5):
        assert not wrong


class _Skips:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, training: PlainTraining) -> None:
        skips(training, self.name)


def marked() -> list[Any]:
    """Losses of this rank without `units.may_skip`, and what was warned of."""
    from zero_strategy.config import load_config
    from zero_strategy.engine import ZeroEngine

    model, losses = wav2vec(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 1}))
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(STEPS):
        rank = engine.mesh.rank
        torch.manual_seed(100 * step + rank)
        loss = model(torch.ones(2, 200), labels=torch.tensor([0, 1])).loss
        loss.backward()
        losses.append(loss.item())
    told = [str(one.message) for one in caught if "LayerDrop" in str(one.message)]
    engine.close()
    return [losses, told, [name for name, module in model.named_modules() if "_is_fsdp_managed_module" in vars(module)]]


def test_models_of_transformers_run_all_layers_where_ranks_may_not_skip(ranks: Launcher) -> None:
    plain = wav2vec().eval()
    expected = plain(torch.ones(2, 200), labels=torch.tensor([0, 1])).loss.item()
    for losses, told, left in ranks(2)(marked):
        assert losses == pytest.approx([expected] * STEPS, rel=1e-5)
        assert not left
        assert len(told) == 1 and "layerdrop=0.5" in told[0] and "units.may_skip: true" in told[0]
