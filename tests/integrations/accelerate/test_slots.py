"""Slots under Accelerate: the bits of a training on any number of processes, its resume on others, and refusals."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from tests.integrations.accelerate.slots import Script, Trained, accelerator_of, train_and_save, train_slots
from tests.integrations.accelerate.training import fresh_state
from tests.launcher import Launcher
from tests.reproducible.samples import Masked, Samples, collate
from tests.reproducible.training import ROWS, Case, build, digest_of, train
from zero_strategy.reproducible.loaders import slot_sampler

STAGES: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3}]


def by_engine(slots: int) -> tuple[str, list[float]]:
    torch.set_num_threads(1)
    result = train(Case({"stage": 0}, slots=slots))
    return result.digest, result.norms


def one(found: list[list[list[Trained]]]) -> Trained:
    """The one result of all runs, ranks and configs."""
    every = [each for run in found for rank in run for each in rank]
    assert all(each == every[0] for each in every), [(e.digest[:8], e.losses, e.norms) for e in every]
    return every[0]


def test_accelerate_trains_slots_as_the_engine_on_any_ranks(ranks: Launcher) -> None:
    found = one([ranks(world)(train_slots, 4, STAGES) for world in (1, 2, 4)])
    digest, norms = ranks(1)(by_engine, 4)[0]
    assert (found.digest, found.norms) == (digest, norms)
    assert len(found.norms) == 3 and found.norms[0] > 0.5, "clipping was at work"


def test_accelerate_shuffles_and_draws_by_slots(ranks: Launcher) -> None:
    """Samples and collations with random changes, noise before a forward, a schedule, a last step that is filled."""
    found = one([ranks(world)(train_slots, 4, STAGES, epochs=2, shuffle=True) for world in (1, 2, 4)])
    assert len(found.losses) == 6 and found.losses[:3] != found.losses[3:]
    assert found.rates == pytest.approx([0.01 * 0.9**step for step in range(1, 7)])


def test_accelerate_has_slots_on_three_ranks(ranks: Launcher) -> None:
    one([ranks(world)(train_slots, 12, [{"stage": 3}], shuffle=True, steps=2) for world in (1, 3)])


def test_accelerate_has_slots_in_bf16_and_in_fp16(ranks: Launcher) -> None:
    for precision in ("bf16", "fp16"):
        zero = [{"stage": 2, "loss_scale": {"initial": 1024.0}}]
        one([ranks(world)(train_slots, 4, zero, shuffle=True, mixed_precision=precision) for world in (1, 2)])


def test_accelerate_resumes_slots_on_other_ranks_inside_an_epoch(ranks: Launcher, tmp_path: Path) -> None:
    """Saved by 2 ranks, gone on with by 1, by 4 and by 2 in the end; once by one run on 2 ranks."""
    zero = {"stage": 3}
    whole = ranks(2)(train_and_save, 4, zero, str(tmp_path / "whole"), [5], 0)[0]
    parts, done, last = [], 0, None
    for world, until in ((2, 1), (1, 2), (4, 4), (2, 5)):
        last = ranks(world)(train_and_save, 4, zero, str(tmp_path / "parts"), [until], done)[0]
        parts.append(last)
        done = until
    assert [loss for part in parts for loss in part.losses] == whole.losses
    assert [norm for part in parts for norm in part.norms] == whole.norms
    assert [rate for part in parts for rate in part.rates] == whole.rates
    assert last is not None and last.digest == whole.digest


# ---- refusals ----


def refused_by_accelerate(what: str) -> str:
    zero, data = {"stage": 1}, Samples(4, 2)
    shuffled = DataLoader(data, ROWS, shuffle=True)
    with fresh_state():
        try:
            if what == "accumulation":
                accelerator_of(4, zero, gradient_accumulation_steps=3)
            elif what == "ranks":
                accelerator_of(3, zero)
            elif what in DATA_OPTIONS:
                options = DataLoaderConfiguration(**DATA_OPTIONS[what])
                accelerator_of(4, zero, dataloader_config=options).prepare(shuffled)
            elif what in LOADERS:
                accelerator_of(4, zero).prepare_data_loader(LOADERS[what](data), slots=True)
            else:
                loop(what, Script.of(4, zero))
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"


DATA_OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"split_batches": True},
    "dispatch": {"dispatch_batches": True},
    "uneven": {"even_batches": False},
}
LOADERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "iterable": lambda data: DataLoader(Stream(), ROWS),
    "batches": lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), ROWS, drop_last=True)),
    "weighted": lambda data: DataLoader(data, ROWS, sampler=WeightedRandomSampler([1.0] * len(data), 4)),
    "replacement": lambda data: DataLoader(data, ROWS, sampler=RandomSampler(data, replacement=True)),
}


class Stream(IterableDataset[Tensor]):
    """Samples without indices."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from Samples(4, 1)


def loop(what: str, script: Script) -> None:
    """A mistake in the loop of a script."""
    accelerator, model, optimizer = script.accelerator, script.model, script.optimizer
    if what == "join":
        with accelerator.join_uneven_inputs([model]):
            pass
    elif what == "skip":
        accelerator.skip_first_batches(script.loader, 1)
    elif what == "evaluation loader":
        script.run(Trained(), accelerator.prepare(DataLoader(Samples(4, 2), ROWS)))
    elif what == "metrics":
        model.eval()
        for tokens in script.loader:
            with torch.no_grad():
                accelerator.gather_for_metrics(model(tokens)[None])
    elif what == "changed":
        accelerator.gradient_accumulation_steps = 4
        script.run(Trained())
    for tokens in script.loader:
        if what == "no accumulate":
            accelerator.backward(model(tokens))
            optimizer.step()
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(tokens))
            if what == "two backwards":
                accelerator.backward(model(tokens))


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("accumulation", ["(gradient_accumulation_steps) is 3", "slots is 4", "set it to 2", "slots to 6"]),
        ("ranks", ["slots is 3", "2 data-parallel ranks", "such as 4"]),
        ("split", ["split_batches=True", "slots 4"]),
        ("dispatch", ["dispatch_batches=True", "slots 4"]),
        ("uneven", ["even_batches=False", "drop_last=True"]),
        ("iterable", ["Stream", "length and indices"]),
        ("batches", ["BatchSampler", "batch_size="]),
        ("weighted", ["WeightedRandomSampler", "Subset"]),
        ("replacement", ["RandomSampler", "shuffle=True"]),
        ("join", ["join_uneven_inputs", "slots 4"]),
        ("skip", ["skip_first_batches(..., 1)", "steps x accelerator.gradient_accumulation_steps"]),
        ("evaluation loader", ["by their number", "slots=True"]),
        ("metrics", ["evaluation", "slots=False"]),
        ("changed", ["gradient_accumulation_steps is 4 by now", "leave it at 2"]),
        ("no accumulate", ["optimizer.step() after 1 of 2", "accelerator.accumulate(model)"]),
        ("two backwards", ["begins micro-batch 2 of 2, and 2 backward(s)", "one backward, of the sum"]),
    ],
)
def test_accelerate_refuses_what_is_no_step_of_slots(ranks: Launcher, what: str, parts: list[str]) -> None:
    for found in ranks(2)(refused_by_accelerate, what):
        assert found.split(":")[0] in ("ValueError", "RuntimeError"), found
        assert all(part in found for part in parts), found


# ---- loaders, accumulation and schedules that are told, and parts of a loop ----


def told() -> tuple[str, list[Any]]:
    """Lines of this rank, and sizes of what was prepared."""
    with fresh_state():
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            script = Script.of(8, {"stage": 1}, shuffle=True)
            others = script.accelerator.prepare(DataLoader(Samples(8, 2), ROWS))
        accelerator = script.accelerator
        sampler = slot_sampler(script.loader)
        assert sampler is not None and slot_sampler(others) is None
        sizes = [
            accelerator.gradient_accumulation_steps,
            script.loader.total_batch_size,
            len(script.loader),
            sampler.own,
        ]
        return said.getvalue(), sizes


def test_accelerate_tells_what_slots_decide(ranks: Launcher) -> None:
    (first, sizes), (second, others) = ranks(2)(told)
    assert "(gradient_accumulation_steps) is 4 [derived: reproducible.slots 8 [user: mapping] / 2" in first
    assert first.count("steps once per optimizer step, on any number of processes") == 1
    assert second == ""
    assert sizes == [4, 2 * ROWS, 12, [0, 1, 2, 3]] and others == [4, 2 * ROWS, 12, [4, 5, 6, 7]]


def by_workers(stage: int) -> str:
    """The digest of a training whose samples a worker reads ahead, and in which the model runs twice."""
    torch.set_num_threads(1)
    with fresh_state():
        accelerator, model = accelerator_of(4, {"stage": stage}), build()
        data = Masked(Samples(4, 2))
        loader: Any = DataLoader(data, ROWS, shuffle=True, num_workers=1, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        for tokens in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(tokens) + model(tokens.flip(0)))
                optimizer.step()
                optimizer.zero_grad()
        return digest_of(accelerator.engine(model))


def test_accelerate_has_slots_that_workers_read(ranks: Launcher) -> None:
    assert len({digest for world in (1, 2) for stage in (1, 3) for digest in ranks(world)(by_workers, stage)}) == 1
