"""Several ranks on one device, over gloo and over NCCL: exactly one process's training, and no silent hang."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.test_streams import OFFLOADED, PLACEMENTS
from tests.faulty import Fault, die, no_number
from tests.gpu import shared_device
from tests.gpu.shared_device import (
    Trained,
    collectives,
    late_values,
    lose_a_rank,
    resume,
    shares_a_device,
    train,
    train_all,
)
from tests.launcher import Launcher, RankError
from tests.pipeline import test_engine as pipelines

pytestmark = pytest.mark.gpu

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    *PLACEMENTS,
    *OFFLOADED,
    {"stage": 1, "mesh": {"replicate": 2}},
    {"stage": 3, "mesh": {"replicate": 2}},
    {"stage": 3, "activation_checkpointing": "full"},
    {"stage": 3, "activation_checkpointing": "selective", "offload": {"activations": "cpu"}},
    {"stage": 2, "offload": {"activations": "cpu"}},
]


@pytest.fixture(scope="module", params=["gloo", "cpu:gloo,cuda:nccl"])
def ranks_of_one_device(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    if "nccl" in request.param and not shares_a_device():
        pytest.skip("needs NCCL >= 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
    launcher = Launcher(request.param)
    yield launcher
    launcher.close()


def check(found: Trained | str, expected: Trained, case: Any) -> None:
    assert isinstance(found, Trained), (case, found)
    assert found.losses == pytest.approx(expected.losses[-len(found.losses) or 99 :], rel=1e-5), case
    assert found.norms == pytest.approx(expected.norms[-len(found.norms) :], rel=1e-5), case
    bound = 1e-8 if next(iter(found.weights.values())).dtype is torch.float64 else 1e-4
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=bound, atol=bound, msg=f"{case} {name}")


@pytest.mark.parametrize("world", [2, 3])
def test_every_collective(ranks_of_one_device: Launcher, world: int) -> None:
    for found in ranks_of_one_device(world, timeout=90)(collectives):
        assert not [name for name, right in found.items() if not right]


def test_what_is_not_computed_yet_is_waited_for(ranks_of_one_device: Launcher) -> None:
    assert all(ranks_of_one_device(2, timeout=90)(late_values))


@pytest.mark.parametrize("world", [2, 4])
def test_every_mode_trains_as_one_process(ranks_of_one_device: Launcher, world: int) -> None:
    by_dtype = {dtype: shared_device.plain(world, dtype) for dtype in (torch.float64, torch.float32)}
    wrong = []
    for results in ranks_of_one_device(world, timeout=150)(train_all, CASES):
        for case, found in zip(CASES, results, strict=True):
            try:
                check(found, by_dtype[shared_device.dtype_of(case)], case)
            except AssertionError as error:
                wrong.append(f"{case}: {str(error)[:600]}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 3}], ids=str)
def test_a_save_in_the_background_is_what_it_was(
    ranks_of_one_device: Launcher, tmp_path: Path, settings: dict[str, Any]
) -> None:
    expected = shared_device.plain(2)
    for found in ranks_of_one_device(2, timeout=90)(train, settings, str(tmp_path)):
        check(found, expected, settings)
    for found in ranks_of_one_device(2, timeout=90)(resume, settings, str(tmp_path)):
        check(found, expected, settings)


@pytest.mark.parametrize(("fault", "words"), [(die, "rank 1 is gone"), (no_number, "rank 1 raised FloatingPointError")])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_is_lost_is_named(ranks_of_one_device: Launcher, stage: int, fault: Fault, words: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks_of_one_device(2, timeout=60, grace=15.0)(lose_a_rank, {"stage": stage}, fault)
    told = caught.value.failures[0]
    assert told.kind == "raised" and words in told.text, told
    found = re.search(r"DesyncError after ([\d.]+) s", told.text)
    assert found and float(found[1]) <= 10.0, told


PIPELINES = [
    pipelines.Case(2, 1, 0),
    pipelines.Case(2, 1, 1, "interleaved_1f1b", 2, 4),
    pipelines.Case(2, 1, 2, "zb_h1", 1, 4),
    pipelines.Case(2, 1, 3, "zbv", 2, 4),
    pipelines.Case(2, 1, 1, tied=False),
]


@pytest.mark.parametrize("cases", [PIPELINES, [pipelines.Case(2, 2, 3)]], ids=["two stages", "two stages twice"])
def test_pipelines_train_as_one_process(ranks_of_one_device: Launcher, cases: list[pipelines.Case]) -> None:
    if "nccl" not in ranks_of_one_device.backend:
        pytest.skip("tensors go between stages by NCCL, whatever connects the ranks")
    expected = {
        case: pipelines.plain(case.copies, case.micro_batches, case.tied, shared_device.DEVICE) for case in cases
    }
    results = ranks_of_one_device(cases[0].stages * cases[0].copies, timeout=150)(
        pipelines.train_cases, cases, shared_device.DEVICE
    )
    for number, case in enumerate(cases):
        for found in (each[number] for each in results):
            assert found.losses == pytest.approx(expected[case].losses, rel=1e-4), case
            assert found.norms == pytest.approx(expected[case].norms, rel=1e-3), case
            for name, value in found.weights.items():
                torch.testing.assert_close(
                    value.cpu(), expected[case].weights[name].cpu(), rtol=1e-3, atol=1e-4, msg=f"{case} {name}"
                )
