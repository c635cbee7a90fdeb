"""Pipelines prepared by `ZeroAccelerator`: what they train is what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.accelerate.training import fresh_state
from tests.launcher import Launcher
from tests.pipeline.test_engine import LENGTH, VOCABULARY, layers, loss_of
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.pipeline import PipelineModule

ROWS, BATCH, CLIP = 24, 4, 0.3


def data() -> TensorDataset:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def pipeline(stages: int, **more: Any) -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule(layers(True), stages, loss_fn=loss_of, **more)


def plain(copies: int, accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    """The batches that the copies see at a time, in one process."""
    model = pipeline(1, rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs, labels = data().tensors
    losses, rows = [], BATCH * copies
    for number in range(ROWS // rows):
        here = slice(number * rows, (number + 1) * rows)
        loss = loss_of(model(inputs[here]), labels[here])
        losses.append(float(loss.detach()))
        (loss / accumulation).backward()
        if (number + 1) % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def accelerator_of(stage: int, accumulation: int = 1, **more: Any) -> ZeroAccelerator:
    config = {"stage": stage, "pipeline": {"micro_batches": 2}}
    return ZeroAccelerator(zero_config=config, gradient_accumulation_steps=accumulation, **more)


def train(stage: int, accumulation: int, zero_late: bool, folder: str | None) -> tuple[list[float], Any]:
    losses = []
    with fresh_state():
        accelerator = accelerator_of(stage, accumulation)
        model: Any = pipeline(2)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        loader: Any = DataLoader(data(), batch_size=BATCH)
        loader, optimizer, model = accelerator.prepare(loader, optimizer, model)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model.loss(batch)
                if zero_late:
                    optimizer.zero_grad()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                if not zero_late:
                    optimizer.zero_grad()
            losses.append(float(loss))
        if folder is not None:
            accelerator.save_state(folder)
            accelerator.wait_for_saves()
            saved = accelerator.engine(model).full_state_dict()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(folder)
            loaded = accelerator.engine(model).full_state_dict()
            assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())
        return losses, accelerator.engine(model).full_state_dict()


@pytest.mark.parametrize("copies", [1, 2])
def test_training(ranks: Launcher, tmp_path: Path, copies: int) -> None:
    for stage, accumulation, zero_late in [(1, 1, False), (2, 1, True), (3, 3 if copies == 1 else 1, False)]:
        folder = str(tmp_path / str(stage)) if stage == 2 else None
        expected, weights = plain(copies, accumulation)
        for losses, found in ranks(2 * copies)(train, stage, accumulation, zero_late, folder):
            assert losses == pytest.approx(expected, rel=1e-6), (stage, accumulation, zero_late)
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


def low_precision(precision: str) -> tuple[list[float], list[bool]]:
    with fresh_state():
        accelerator = accelerator_of(1, mixed_precision=precision)
        model, loader = accelerator.prepare(pipeline(2), DataLoader(data(), batch_size=BATCH))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        losses, skipped = [], []
        for batch in loader:
            loss = model.loss(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            skipped.append(accelerator.optimizer_step_was_skipped)
        with torch.no_grad():
            evaluated = [float(model.loss(batch)) for batch in loader]
        assert max(evaluated) < losses[0]
        return losses, skipped


def test_mixed_precision(ranks: Launcher) -> None:
    expected, _ = plain(1, 1)
    for losses, skipped in ranks(2)(low_precision, "bf16"):
        assert losses == pytest.approx(expected, rel=0.03) and not any(skipped)
    for losses, skipped in ranks(2)(low_precision, "fp16"):
        taken = skipped.index(False)  # until the loss scale fits
        assert losses[0] == pytest.approx(expected[0], rel=0.01) and taken < len(losses) - 1


def refused() -> list[str]:
    found = []
    with fresh_state():
        accelerator = accelerator_of(1, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        model = accelerator.prepare(pipeline(2))
        for call in (
            lambda: accelerator.prepare(DataLoader(data(), batch_size=BATCH)),
            lambda: accelerator.join_uneven_inputs([model], even_batches=False).__enter__(),
            lambda: model.loss((torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH, dtype=torch.int64))),
        ):
            try:
                call()
            except ValueError as error:
                found.append(str(error))
    return found


def test_accelerate_pipeline_what_is_refused(ranks: Launcher) -> None:
    for found in ranks(2)(refused):
        assert len(found) == 3
        assert "dispatch_batches=False" in found[0] and "not for pipelines" in found[1] and "1 row(s)" in found[2]


def gone_on(failure: str) -> tuple[list[str], dict[str, Tensor]]:
    """Errors of a loop of two batches, of which the first fails, and the weights after a step on the second."""
    with fresh_state():
        accelerator = accelerator_of(1)
        model, loader = accelerator.prepare(pipeline(2), DataLoader(data(), batch_size=BATCH))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        first, second, *_ = list(loader)
        errors = []
        for batch in [first, second, second] if failure else [second]:
            try:
                loss = model.loss(batch)
                if failure == "loss" and batch is first:
                    raise ArithmeticError("between loss and backward")
                accelerator.backward(loss.detach() if failure == "backward" and batch is first else loss)
                optimizer.step()
            except (ArithmeticError, RuntimeError) as error:
                errors.append(str(error))
            optimizer.zero_grad()
            if accelerator.engine(model).steps.taken:
                break
        return errors, accelerator.engine(model).full_state_dict()


@pytest.mark.parametrize("failure", ["loss", "backward"])
def test_a_loop_goes_on_after_a_batch_that_failed(ranks: Launcher, failure: str) -> None:
    _, expected = ranks(2)(gone_on, "")[0]
    for errors, found in ranks(2)(gone_on, failure):
        # A loss without a backward is told once, since its gradients are in the sum.
        assert len(errors) == (2 if failure == "loss" else 1), errors
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
