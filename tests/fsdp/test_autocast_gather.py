"""Weights are gathered in autocast's dtype, with the bits that autocast makes of gathered values."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.trainings import PlainTraining, Setting, play
from tests.launcher import Launcher

AUTOCAST: dict[str, Any] = {"communication": {"parameters": "autocast"}}
SETTINGS = {
    "plain": AUTOCAST,
    "kept after a forward": {**AUTOCAST, "reshard_after_forward": False},
    "recomputed": {**AUTOCAST, "activation_checkpointing": "full"},
    "recomputed in part": {**AUTOCAST, "activation_checkpointing": "selective"},
    "activations on the host": {**AUTOCAST, "offload": {"activations": "cpu"}},
    "state on the host": {**AUTOCAST, "offload": {"optimizer": "cpu", "gradients": "cpu"}},
}


class Mixed(nn.Module):
    """Layers of all kinds that autocast casts, and others beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Part(nn.Module):
    """A unit: a convolution, attention, a norm, layers with and without a bias, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.twice = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y + self.mix(y.transpose(1, 2)).transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.down(torch.tanh(self.twice(torch.tanh(self.twice(y))))) * self.scale
        return out


def mixed() -> Mixed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mixed()


def trained(training: PlainTraining, dtype: torch.dtype, how: str) -> None:
    """Steps of two micro-batches under autocast, evaluations within autocast and without it."""
    model = mixed()
    if how == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("twice" in name or "norm" in name)
    training.shard(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training.attach(torch.optim.AdamW(trainable, lr=0.02, foreach=False))
    tokens = torch.arange(24).reshape(2, 12) % 11
    for step in range(3):
        for micro in range(2):
            batch = (tokens + step + 3 * micro + training.rank) % 11
            with torch.autocast("cpu", dtype, cache_enabled=how == "cached"):
                loss = nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())
            training.note(loss)
            training.backward(loss, sync=micro == 1)
        training.step()
        training.zero_grad()
        for again in (torch.autocast("cpu", dtype, cache_enabled=False), nullcontext()):
            with torch.no_grad(), again:
                training.note(model(tokens))
    training.note(*(value.clone() for value in training.module.state_dict().values()))


@pytest.mark.parametrize("name", SETTINGS)
def test_autocast_gathers_have_the_bits_of_one_process(ranks: Launcher, name: str) -> None:
    setting = Setting(3, "per_micro_batch", SETTINGS[name])
    for wrong in ranks(2)(play, partial(trained, dtype=torch.bfloat16, how="trained"), [setting]):
        assert not wrong


@pytest.mark.parametrize(("dtype", "how"), [(torch.float16, "trained"), (torch.bfloat16, "frozen")])
def test_autocast_gathers_of_float16_and_of_frozen_weights(ranks: Launcher, dtype: torch.dtype, how: str) -> None:
    settings = [Setting(3, "per_micro_batch", SETTINGS[name]) for name in ("plain", "recomputed")]
    for wrong in ranks(3)(play, partial(trained, dtype=dtype, how=how), settings):
        assert not wrong


def test_with_autocasts_cache_values_are_gathered(ranks: Launcher) -> None:
    """A weight that is used twice has one copy in the cache, whose gradients are summed up in 16 bits."""
    for wrong in ranks(2)(
        play, partial(trained, dtype=torch.bfloat16, how="cached"), [Setting(3, "per_micro_batch", AUTOCAST)]
    ):
        assert not wrong
