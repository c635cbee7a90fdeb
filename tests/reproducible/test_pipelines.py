"""Bits of pipelines in slots: those of one plain engine, at any number of stages and copies, stage and schedule."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.launcher import Launcher
from tests.reproducible.pipelines import Found, Run, pair_of, train
from tests.reproducible.training import VOCABULARY, WIDTH
from zero_strategy.config import load_config, resolve
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import SCHEDULES

ORDERS = ("per_step", "per_micro_batch")


def _runs(runs: list[Run]) -> list[Found]:
    torch.set_num_threads(1)
    return [train(run) for run in runs]


def _one_digest(ranks: Launcher, runs: dict[int, list[Run]]) -> None:
    found: dict[tuple[int, str], Any] = {}
    for world, own in runs.items():
        for rank, results in enumerate(ranks(world)(_runs, own)):
            found |= {(world, f"{rank} {run}"): result for run, result in zip(own, results, strict=True)}
    kinds = sorted({str(value) for value in found.values()})
    told = {f"{key} {value}" for key, value in found.items() if key[1].startswith("0")}
    assert len(kinds) == 1, "\n".join(sorted(told))


@pytest.mark.parametrize("optimizer", ["AdamW", "MuonAdamW"])
def test_pipelines_have_the_bits_of_one_plain_engine(ranks: Launcher, optimizer: str) -> None:
    """Over numbers of stages and copies, ZeRO stages, times of reduction, and recomputation."""

    def run(stages: int, stage: int, order: str, interval: int = 0, **more: Any) -> Run:
        config = {"stage": stage, "gradient_reduction": order, **more}
        return Run(stages, config=config, interval=interval, steps=2, optimizer=optimizer)

    step, micro = ORDERS
    _one_digest(
        ranks,
        {
            1: [run(0, 3, step), run(1, 2, micro)],
            2: [run(2, 0, step), run(2, 1, micro, 1), run(2, 3, micro, 2), run(0, 3, micro), run(1, 1, step)],
            4: [run(2, 1, step), run(2, 3, micro), run(2, 0, micro, mesh={"replicate": 2}), run(4, 3, step)],
        },
    )


@pytest.mark.parametrize("slots", [4, 12])
@pytest.mark.parametrize("order", ORDERS)
def test_schedules_have_the_bits_of_one_plain_engine(ranks: Launcher, order: str, slots: int) -> None:
    """Over all schedules, with one slot for each rank or several, and recomputation."""

    def run(stages: int, name: str, interval: int = 0, **config: Any) -> Run:
        return Run(stages, name, {"gradient_reduction": order, **config}, interval, slots, 2)

    runs = {1: [run(0, "")], 2: [run(2, name, 1, stage=3) for name in SCHEDULES]}
    if slots == 4:
        runs[4] = [run(2, "zbv", stage=1), run(2, "interleaved_zb", stage=2), run(4, "interleaved_1f1b")]
    _one_digest(ranks, runs)


def test_low_precision_tiers_and_chosen_schedules_have_one_digest(ranks: Launcher) -> None:
    def run(stages: int, name: str, **config: Any) -> Run:
        return Run(stages, name, config, steps=2, dtype=torch.bfloat16)

    tiers = {"optimizer": "cpu", "parameters": "cpu"}
    _one_digest(
        ranks,
        {
            1: [run(0, "")],
            2: [run(2, "zbv", stage=3, offload=tiers), run(2, "1f1b", stage=1, pipeline={"schedule": "auto"})],
            4: [run(2, "interleaved_1f1b", stage=2, activation_checkpointing={"mode": "full"})],
        },
    )


def _first_half(run: Run, folder: str) -> Found:
    torch.set_num_threads(1)
    return train(run, end=lambda engine: engine.save(folder))


def _second_half(run: Run, folder: str) -> Found:
    torch.set_num_threads(1)
    return train(run, begin=lambda engine: engine.load(folder), first=run.steps)


def test_training_goes_on_in_the_same_bits_at_other_stages(ranks: Launcher, tmp_path: Path) -> None:
    """From each of these to each other; the seed of random numbers is the first run's."""
    kinds = {"one": (1, Run(0, steps=1)), "two": (2, Run(2, "zbv", {"stage": 3}, steps=1))}
    kinds["copies"] = (4, Run(2, config={"stage": 1}, steps=1))
    wanted = ranks(1)(_runs, [Run(0, steps=2)])[0][0]
    for name, (world, run) in kinds.items():
        ranks(world)(_first_half, run, str(tmp_path / name))
    for source, target in (("one", "two"), ("two", "copies"), ("copies", "one")):
        world, run = kinds[target]
        for digest, losses, norms in ranks(world)(_second_half, run, str(tmp_path / source)):
            assert (digest, losses, norms) == (wanted[0], wanted[1][1:], wanted[2][1:]), (source, target)


def _module(layers: list[Any] | None = None, **more: Any) -> PipelineModule:
    torch.manual_seed(5)
    first, last = LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY)
    return PipelineModule(layers or [first, last], 2, loss_fn=_loss, **more)


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def _head(embedding: Any, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def _refusals() -> dict[str, str]:
    found = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    slots = {"reproducible": {"slots": 4}}
    tied = [TiedLayerSpec("words", nn.Embedding, VOCABULARY, WIDTH) for _ in range(2)]
    tied[1].forward_fn = _head
    note("ties", lambda: PipelineEngine(_module(list(tied)), slots))
    batch_norm = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.BatchNorm1d, 8)]
    note("statistics", lambda: PipelineEngine(_module(list(batch_norm)), slots))
    micro = {**slots, "pipeline": {"micro_batches": 3}}
    note("micro-batches", lambda: PipelineEngine(_module(), micro))
    with PipelineEngine(_module(), {"stage": 1, **slots}) as engine:
        batches = [pair_of(0, slot) for slot in range(4)]
        note("another number", lambda: engine.forward_backward(iter(batches), 2))
        engine.forward_backward(iter(batches))
        note("once more", lambda: engine.forward_backward(iter(batches)))
        engine.model.reducer.drop()
        engine.forward_backward(iter(batches))
    return found


def test_what_pipelines_cannot_do_in_slots_is_refused_by_name(ranks: Launcher) -> None:
    told = {
        "ties": "reproducible.slots is 4 .*, and stages 0, 1 share the tied weight 'words'.*one stage",
        "statistics": "reproducible.slots is 4, and '1' is a BatchNorm1d.*GroupNorm",
        "micro-batches": "pipeline.micro_batches is 3 .*: micro-batches are slots; leave it out, or set it to 4",
        "another number": "micro_batches is 2, and reproducible.slots is 4: .* is 4 micro-batches, one per slot",
        "once more": "reproducible.slots is 4: on 1 rank\\(s\\) a step is 4 micro-batch\\(es\\) each",
    }
    for found in ranks(2)(_refusals):
        assert found.keys() == told.keys()
        for name, text in told.items():
            assert re.search(text, found[name]), (name, found[name])


def _reentrant(function: Any, *inputs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=True)


def _with_reentrant_checkpoints(schedule: str) -> list[Tensor] | str:
    module = _module(
        [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2))],
        activation_checkpoint_interval=1,
        activation_checkpoint_func=_reentrant,
        checkpointable_layers=["Linear"],
        partition_method=[0, 1, 3],
    )
    with PipelineEngine(module, {"reproducible": {"slots": 2}, "pipeline": {"schedule": schedule}}) as engine:
        try:
            engine.forward_backward(pair_of(0, slot) for slot in range(2))
        except Exception as error:
            return str(error)
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_reentrant_checkpoints_go_with_whole_backwards(ranks: Launcher) -> None:
    assert [len(found) for found in ranks(2)(_with_reentrant_checkpoints, "1f1b")] == [1, 4]
    told = ranks(2)(_with_reentrant_checkpoints, "zb_h1")
    assert any("comes in the input half of a backward" in str(found) for found in told)


def _after_an_early_end(slots: int) -> list[bool]:
    """Gradients after a batch that ended early and a whole one, compared with those of the whole one alone."""
    found = []
    for ends_early in (False, True):
        with PipelineEngine(_module(), {"reproducible": {"slots": slots}}) as engine:
            batches = [pair_of(0, slot) for slot in engine.slots.own]
            if ends_early:
                with pytest.raises(StopIteration):
                    engine.forward_backward(iter(batches[:-1]))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                engine.forward_backward(iter(batches))
            assert any("the last batch failed" in str(one.message) for one in told) == ends_early
            found.append([p.grad.clone() for p in engine.module.parameters() if p.grad is not None])
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


def test_a_batch_that_ended_early_leaves_nothing_of_its_slots(ranks: Launcher) -> None:
    assert all(same and all(same) for same in ranks(2)(_after_an_early_end, 4))


def test_micro_batches_of_any_number_of_stages_are_slots() -> None:
    for stages, world, wanted in ((1, 2, 6), (2, 2, 12), (2, 4, 6), (4, 4, 12)):
        asked = load_config({"reproducible": 12, "pipeline": {"stages": stages}})
        assert resolve(asked, world).config.pipeline.micro_batches == wanted


def _streams() -> tuple[bool, bool, bool]:
    """A layer's draws: equal for a slot again; for another slot; without a seed after the engine's end."""
    module = PipelineModule([nn.Dropout(0.5), nn.Linear(4, 4)], 1)
    with ZeroEngine(module, {"reproducible": {"slots": 2, "seed": 3}}) as engine:
        drawn = []
        for _ in range(2):
            with engine.micro_batch():
                for _ in range(2):
                    torch.rand(3)
                    drawn.append(module(torch.ones(2, 4)).detach())
                module(torch.ones(2, 4)).sum().backward()
    torch.manual_seed(0)
    one = module(torch.ones(2, 4))
    return torch.equal(drawn[0], drawn[1]), torch.equal(drawn[1], drawn[2]), torch.equal(one, module(torch.ones(2, 4)))


def test_streams_of_layers_end_with_the_engine(ranks: Launcher) -> None:
    assert ranks(1)(_streams) == [(True, False, False)]
