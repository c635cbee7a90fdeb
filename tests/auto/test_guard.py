"""A run whose memory runs short in the first steps goes on with the same bits, and all ranks compute units again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.auto.guarded import BLOCKS, trained
from tests.launcher import Launcher
from zero_strategy.auto.guard import is_out_of_memory

UNITS = {"min_numel": 0, "classes": ["Block"]}


def chosen(stage: int) -> dict[str, Any]:
    return {"stage": stage, "units": UNITS, "auto": {"enabled": True}, "activation_checkpointing": {}}


def pinned(stage: int, mode: str = "none") -> dict[str, Any]:
    return {"stage": stage, "units": UNITS, "activation_checkpointing": mode}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("short", ["", "fails", "no room"])
def test_a_run_goes_on_with_the_same_bits(ranks: Launcher, stage: int, short: str) -> None:
    found = ranks(2)(trained, chosen(stage), short)
    plain = ranks(2)(trained, pinned(stage))
    for one, other in zip(found, plain, strict=True):
        assert one["guarded"] and not other["guarded"]
        assert (one["digest"], one["losses"]) == (other["digest"], other["losses"])
        assert one["again"] == (BLOCKS if short else 0)
        assert one["mode"] == (
            ("full", "memory ran short: auto.enabled") if short else ("none", "chosen: auto.enabled")
        )
        assert bool(one["measured"]) == (not short)
    if short:
        (said,) = found[0]["said"]
        assert "rank 1: " in said and "rank 0" not in said and " dropped" in said
        assert ("says the test" in said) == (short == "fails")
    assert not found[1]["said"]


def test_a_limit_of_the_process_is_kept(fresh_ranks: Launcher) -> None:
    """Units keep twelve blocks of 4 MiB each at least, and the process may take hardly more than two units."""
    settings = {**chosen(0), "mmap_threshold": 65536}
    (found,) = fresh_ranks(1)(trained, settings, "limited", 3, 4096)
    (plain,) = fresh_ranks(1)(trained, {**pinned(0), "mmap_threshold": 65536}, "", 3, 4096)
    assert found["guarded"] and found["said"] and found["again"] == BLOCKS
    assert (found["digest"], found["losses"]) == (plain["digest"], plain["losses"])


def test_what_a_user_has_set_is_not_guarded(ranks: Launcher) -> None:
    (found,) = ranks(1)(trained, {**chosen(1), "activation_checkpointing": "none"}, "", 1)
    assert not found["guarded"]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("memory"), False),
    ],
)
def test_errors_of_memory_are_known(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one
