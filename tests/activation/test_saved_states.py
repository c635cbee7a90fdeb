"""Named random states in checkpoints: exactly as they were, or by a rule at another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher import Launcher
from zero_strategy.activation.functional import PROCESS, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from zero_strategy.checkpoint import random_state
from zero_strategy.engine import ZeroEngine


def draws(name: str) -> list[float]:
    with get_cuda_rng_tracker().fork(name):
        return torch.rand(3).tolist()


def test_a_captured_state_has_the_named_states_and_their_seeds() -> None:
    model_parallel_cuda_manual_seed(4)
    tracker = get_cuda_rng_tracker()
    tracker.add("other", 9)
    draws("other")
    content = random_state.capture()
    wanted = [draws("other"), draws("model-parallel-rng"), draws("other")]
    PROCESS.clear()  # a new process, in which nobody has added anything yet
    random_state.restore(content)
    assert [draws("other"), draws("model-parallel-rng"), draws("other")] == wanted
    with pytest.raises(ValueError, match=r"seed 9 .* is that of 'other'"):
        get_cuda_rng_tracker().add("third", 9)
    random_state.restore(content)
    get_cuda_rng_tracker().add("later", 11)
    random_state.restore(content)  # a name that was not saved stays
    assert get_cuda_rng_tracker().names() == ["model-parallel-rng", "other", "later"]


def test_states_of_checkpoints_without_them_still_load() -> None:
    old = random_state.capture()
    assert "named" not in json.loads(old)  # nobody has a tracker: what earlier versions wrote
    model_parallel_cuda_manual_seed(4)
    wanted = draws("model-parallel-rng")
    model_parallel_cuda_manual_seed(4)
    random_state.restore(old)
    assert draws("model-parallel-rng") == wanted


def test_states_of_another_kind_of_device_are_drawn_from_their_seeds() -> None:
    model_parallel_cuda_manual_seed(4)
    state = json.loads(random_state.capture())
    state["named"]["device"] = "another"
    content = json.dumps(state).encode()
    found = []
    for seed in (4, 4, 5):
        model_parallel_cuda_manual_seed(seed)
        random_state.restore(content)
        found.append(draws("model-parallel-rng"))
    assert found[0] == found[1] != found[2]


def saved(folder: Path, load: bool) -> dict[str, list[float]]:
    """Ranks share `common`, and each has a state of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = nn.Linear(3, 3)
    engine = ZeroEngine(model, {"stage": 2})
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    PROCESS.clear()
    tracker = get_cuda_rng_tracker()
    tracker.add("common", 7)
    tracker.add("own", 100 + rank)
    if load:
        engine.load(folder / "c")
    else:
        draws("common"), draws("own")
        tracker.add("unknown when it is loaded", 5)
        engine.save(folder / "c").wait()
    found = {name: draws(name) for name in tracker.names()}
    PROCESS.clear()
    return found


def test_named_states_are_part_of_every_checkpoint(tmp_path: Path, ranks: Launcher) -> None:
    before = ranks(2)(saved, tmp_path, False)
    assert ranks(2)(saved, tmp_path, True) == before  # as many ranks: each has its own
    alone = saved(tmp_path, True)
    assert alone == saved(tmp_path, True)
    assert alone["common"] == before[0]["common"] and alone["own"] == before[0]["own"]
    assert alone["unknown when it is loaded"] not in [found["unknown when it is loaded"] for found in before]
    three = ranks(3)(saved, tmp_path, True)
    assert three == ranks(3)(saved, tmp_path, True)
    assert all(found["common"] == before[0]["common"] for found in three)  # what ranks share they share again
    assert len({tuple(found["own"]) for found in three}) == 3  # and what differs differs
    assert three[0]["own"] == before[0]["own"] and three[1]["own"] != before[1]["own"]
