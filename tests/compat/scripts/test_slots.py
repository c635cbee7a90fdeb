"""Slots in scripts of `initialize`: the bits of the engine on any number of ranks, its resume on others, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler, Subset, WeightedRandomSampler

from tests.launcher import Launcher
from tests.reproducible.samples import Masked, Samples, collate
from tests.reproducible.training import ROWS, SEED, Case, build, digest_of, train
from zero_strategy import initialize
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine

SLOTS = 4
STAGES = (1, 3)


def engine_of(stage: int, data: Any = None, **keys: Any) -> ScriptEngine:
    torch.set_num_threads(1)
    config = {
        "stage": stage,
        "reproducible": {"slots": SLOTS, "seed": SEED},
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.5,
        **keys,
    }
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = initialize(model=model, optimizer=optimizer, training_data=data, collate_fn=collate, config=config)
    return engine


def run(engine: ScriptEngine, loader: Any, plain: bool = False) -> list[float]:
    """The norms of the steps."""
    norms = []
    for tokens in loader:
        loss = engine(tokens)
        if plain:
            loss.backward()
        else:
            engine.backward(loss)
        last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if last:
            norms.append(engine.get_global_grad_norm() or 0.0)
    return norms


def in_order(plain: bool) -> list[tuple[str, list[float]]]:
    """Digests and norms by stage, of samples as the engine's own training has them."""
    found = []
    for stage in STAGES:
        engine, data = engine_of(stage), Samples(SLOTS, 3)
        loader = engine.deepspeed_io(data, data_sampler=SequentialSampler(data), collate_fn=torch.stack)
        norms = run(engine, loader, plain)
        assert engine.train_batch_size() == SLOTS * ROWS and engine.global_steps == 3
        found.append((digest_of(engine.zero), norms))
        engine.destroy()
    return found


def by_the_engine() -> tuple[str, list[float]]:
    torch.set_num_threads(1)
    result = train(Case({"stage": 0}, slots=SLOTS))
    return result.digest, result.norms


@pytest.mark.parametrize("plain", [False, True], ids=["engine.backward", "loss.backward"])
def test_scripts_train_slots_as_the_engine_on_any_ranks(ranks: Launcher, plain: bool) -> None:
    expected = ranks(1)(by_the_engine)[0]
    for world in (1, 2, 4):
        for found in ranks(world)(in_order, plain):
            assert found == [expected] * len(STAGES), world


def part_of(folder: str, until: int, first: bool) -> tuple[str, list[float]]:
    """Steps of a shuffled epoch of four, up to one at which they are saved; or a whole epoch more."""
    data = Masked(Subset(Samples(SLOTS, 4), range(3, 4 * SLOTS * ROWS)))
    engine = engine_of(3, data)
    loader: Any = engine.training_dataloader
    if not first:
        engine.load_checkpoint(folder)
    loader.sampler.start_at(engine.global_steps)
    norms = []
    batches = iter(loader)
    while engine.global_steps < until:
        norms += run(engine, [next(batches) for _ in range(engine.gradient_accumulation_steps())])
    engine.save_checkpoint(folder)
    digest = digest_of(engine.zero)
    engine.destroy()
    return digest, norms


def test_scripts_resume_slots_on_other_ranks(ranks: Launcher, tmp_path: Path) -> None:
    whole, norms = ranks(2)(part_of, str(tmp_path / "whole"), 4, True)[0]
    folder, found, last = str(tmp_path / "parts"), [], ""
    for world, until in ((2, 1), (1, 2), (4, 4)):
        last, more = ranks(world)(part_of, folder, until, until == 1)[0]
        found += more
    assert found == norms and last == whole


def refused(what: str) -> str:
    data = Samples(SLOTS, 2)
    try:
        if what == "accumulation":
            engine_of(1, gradient_accumulation_steps=3)
        elif what == "batch":
            engine_of(1, train_batch_size=4 * ROWS * SLOTS)
        elif what == "set_train_batch_size":
            engine_of(1).set_train_batch_size(4 * ROWS * SLOTS)
        elif what == "join_batches":
            engine_of(1).join_batches([])
        elif what == "sampler":
            engine_of(1).deepspeed_io(data, data_sampler=WeightedRandomSampler([1.0] * len(data), 4))
        else:
            engine = engine_of(1)
            engine.set_gradient_accumulation_boundary(True)
            run(engine, [data[0][None]])
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("what", "kind", "parts"),
    [
        ("accumulation", "ValueError", ["gradient_accumulation_steps is 3", "slots is 4", "set it to 2", "to 6"]),
        ("batch", "ValueError", ["train_batch_size / (", "is 8", "slots is 4"]),
        ("set_train_batch_size", "ValueError", ["16 micro-batches", "set_train_micro_batch_size"]),
        ("join_batches", "RuntimeError", ["join_batches()", "slots is 4"]),
        ("sampler", "ValueError", ["WeightedRandomSampler", "Subset"]),
        ("early step", "RuntimeError", ["after 1 of 2 micro-batches", "slots is 4"]),
    ],
)
def test_scripts_refuse_what_is_no_step_of_slots(ranks: Launcher, what: str, kind: str, parts: list[str]) -> None:
    for found in ranks(2)(refused, what):
        assert found.startswith(kind) and all(part in found for part in parts), found


def test_scripts_derive_the_third_of_batch_sizes() -> None:
    from zero_strategy.compat.deepspeed.scripts.settings import settings_of

    slots = {"stage": 1, "reproducible": 8}
    for given in ({"train_batch_size": 32}, {"train_micro_batch_size_per_gpu": 4}):
        batch = settings_of({**slots, **given}, 2).batch
        assert (batch.train_batch_size, batch.train_micro_batch_size_per_gpu) == (32, 4)
        assert batch.gradient_accumulation_steps == 4
