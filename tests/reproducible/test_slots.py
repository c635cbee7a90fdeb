"""Bits of training in slots: of the order that is promised, at every number of ranks, stage, tier and reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launcher import Launcher
from tests.reproducible.training import Case, Result, plain_gradients, train

ORDERS = ("per_step", "per_micro_batch")


def _runs(cases: list[Case], gradients: bool = False) -> list[Result]:
    torch.set_num_threads(1)
    return [train(case, gradients=gradients) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_of_slots_are_those_of_one_plain_process(ranks: Launcher, world: int) -> None:
    """Over all stages and times of reduction, to the last bit."""
    cases = [
        Case({"stage": stage, "gradient_reduction": order}, steps=1, clip=None)
        for stage in range(4)
        for order in ORDERS
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wanted, losses = plain_gradients(cases[0])
    torch.set_num_threads(threads)
    for results in ranks(world)(_runs, cases, True):
        for case, result in zip(cases, results, strict=True):
            assert result.losses == [losses], case
            assert result.gradients.keys() == wanted.keys(), case
            for name, value in wanted.items():
                assert torch.equal(result.gradients[name], value), (case, name)


def _one_digest(ranks: Launcher, cases: dict[int, list[Case]]) -> None:
    found: dict[tuple[int, str], Any] = {}
    for world, own in cases.items():
        for results in ranks(world)(_runs, own):
            for case, result in zip(own, results, strict=True):
                found[world, str(case)] = (result.digest, result.losses, result.norms)
    kinds = sorted({str(value) for value in found.values()})
    assert len(kinds) == 1, "\n".join(f"{kinds.index(str(value))} {key}" for key, value in found.items())


@pytest.mark.parametrize("optimizer", ["AdamW", "MuonAdamW"])
def test_weights_and_states_are_the_same_bits_on_any_ranks(ranks: Launcher, optimizer: str) -> None:
    cases = {
        world: [
            Case({"stage": stage, "gradient_reduction": order}, optimizer=optimizer)
            for stage in range(4)
            for order in ORDERS
        ]
        for world in (1, 2, 3, 4)
    }
    cases[4].append(Case({"stage": 3, "mesh": {"replicate": 2}}, optimizer=optimizer))
    cases[4].append(Case({"stage": 0, "mesh": {"replicate": 2}}, optimizer=optimizer))
    cases[4].append(Case({"stage": 1, "mesh": {"replicate": 2}}, optimizer=optimizer))
    _one_digest(ranks, cases)


def _tiers(folder: str) -> list[dict[str, Any]]:
    return [
        {"stage": 1, "offload": {"optimizer": "cpu"}},
        {"stage": 2, "offload": {"optimizer": "cpu"}},
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
        {"stage": 2, "offload": {"optimizer": "nvme", "nvme_path": [folder], "probe_seconds": 0.0}},
        {
            "stage": 3,
            "offload": {"optimizer": "nvme", "parameters": "nvme", "nvme_path": [folder], "probe_seconds": 0.0},
        },
    ]


@pytest.mark.parametrize("optimizer", ["AdamW", "MuonAdamW"])
def test_tiers_have_the_same_bits_in_slots(ranks: Launcher, tmp_path: Any, optimizer: str) -> None:
    cases = {}
    for world in (1, 2, 3):
        folder = tmp_path / str(world)
        folder.mkdir()
        cases[world] = [Case(config, optimizer=optimizer) for config in _tiers(str(folder))]
    cases[2].append(Case({"stage": 3}, optimizer=optimizer))
    _one_digest(ranks, cases)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.bfloat16},
        {"config": {"activation_checkpointing": "full"}},
        {"config": {"optimizer": {"state_bits": 8}}},
        {"config": {"communication": {"parameters": "delta"}, "stage": 2}},
        {"config": {"reshard_after_backward": False}},
        {"optimizer": "SGD", "settings": {"momentum": 0.9}},
        {"optimizer": "Adagrad"},
        {"optimizer": "RMSprop"},
    ],
    ids=str,
)
def test_settings_keep_the_same_bits_in_slots(ranks: Launcher, settings: dict[str, Any]) -> None:
    own = dict(settings)
    config = {"stage": 3, **own.pop("config", {})}
    cases = {world: [Case(config, slots=4, **own)] for world in (1, 2, 4)}
    if "communication" not in config:
        cases[2].append(Case({**config, "stage": 1, "reshard_after_backward": True}, slots=4, **own))
    _one_digest(ranks, cases)
