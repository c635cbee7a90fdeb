"""Pipelines in slots under Accelerate: the same bits at any number of stages and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.accelerate.slots import accelerator_of
from tests.integrations.accelerate.training import fresh_state
from tests.launcher import Launcher, RankError
from tests.reproducible.pipelines import digest_of, layers, noisy_loss
from tests.reproducible.training import LENGTH, VOCABULARY
from zero_strategy.pipeline.module import PipelineModule

SLOTS = 4


def _rows() -> TensorDataset:
    tokens = torch.randint(0, VOCABULARY, (22, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _train(stages: int, zero: int, batch: int) -> tuple[str, list[float], list[float]]:
    torch.set_num_threads(1)
    with fresh_state():
        accelerator = accelerator_of(SLOTS, {"stage": zero})
        torch.manual_seed(5)
        module = PipelineModule(layers(3), stages, loss_fn=noisy_loss)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        loader: Any = DataLoader(_rows(), batch_size=batch, shuffle=True)
        model, prepared, loader = accelerator.prepare(module, optimizer, loader)
        losses, norms = [], []
        for pair in loader:
            with accelerator.accumulate(model):
                loss = model.loss(pair)
                accelerator.backward(loss)
                assert accelerator.sync_gradients, "each batch has all slots of a step"
                losses.append(float(loss.detach()))
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                prepared.step()
                prepared.zero_grad()
        return digest_of(accelerator.engine(model), optimizer), losses, norms


def test_accelerates_pipelines_in_slots_have_the_same_bits(ranks: Launcher) -> None:
    """Slots of two rows; the last step is filled up."""
    found = [
        *ranks(1)(_train, 1, 0, 2 * SLOTS),
        *ranks(2)(_train, 2, 1, 2 * SLOTS),
        *ranks(4)(_train, 2, 3, SLOTS),
    ]
    assert len(set(map(str, found))) == 1, found
    assert len(found[0][1]) == 3


def test_rows_that_are_no_slots_of_a_pipeline_are_refused(ranks: Launcher) -> None:
    with pytest.raises(RankError, match="batch_size 6 is no multiple of the 4 micro-batches of a pipeline"):
        ranks(2)(_train, 2, 1, 6)
