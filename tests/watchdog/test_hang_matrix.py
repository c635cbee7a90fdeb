"""One rank does something else: training goes on right, or every other rank raises within seconds and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faulty import die
from tests.launcher import Failure, Launcher, RankError
from tests.watchdog import faults
from tests.watchdog.faults import PATIENCE, QUICK, Told, play_all, play_to_the_end
from zero_strategy.watchdog.watchdog import EXIT_CODE

STAGES = [0, 1, 2, 3]


def check(told: Told, *words: str) -> None:
    assert told.kind == "DesyncError", told
    assert told.seconds < PATIENCE, told
    for word in words:
        assert word in told.text, told


def test_a_rank_that_raises(ranks: Launcher) -> None:
    wanted = {
        "raise_in_forward": ("FloatingPointError", "FloatingPointError: no number today (forward, faulty.py:"),
        "raise_in_backward": ("ArithmeticError", "has left a backward with an exception"),
        "raise_in_step": ("OSError", "has left an optimizer step with an exception"),
    }
    scripts = [faults.raise_in_forward, faults.raise_in_backward, faults.raise_in_step]
    healthy, faulty = ranks(2, timeout=120)(play_all, scripts, STAGES, {**QUICK, "silence_seconds": 0.3})
    for (name, stage), told in healthy.items():
        kind, words = wanted[name]
        check(told, f"rank 1 {'raised ' if name == 'raise_in_forward' else ''}{words}", "; rank 0 waits in ")
        assert faulty[name, stage].kind == kind, faulty[name, stage]


def test_a_rank_that_is_elsewhere(ranks: Launcher) -> None:
    """It asks for a whole state while the others train."""
    healthy, faulty = ranks(2)(play_all, [faults.state_dict_alone], [3])
    for told in (healthy["state_dict_alone", 3], faulty["state_dict_alone", 3]):
        check(told, "ranks wait for each other", "rank 1 waits in state_dict() of a sharded module (faults.py:")


def test_ranks_that_run_other_units(ranks: Launcher) -> None:
    """Below stage 3 absent gradients count as zeros; at stage 3 other units are gathered."""
    scripts = [faults.skip_a_unit, faults.other_branch]
    healthy, faulty = ranks(2)(play_all, scripts, STAGES)
    for (name, stage), told in healthy.items():
        for each in (told, faulty[name, stage]):
            if stage < 3:
                assert each.kind == "nothing", each
            else:
                check(each, "ranks came to different collectives", "rank 1 began all_gather of `")
                check(each, "different layers (LayerDrop, or", "set units.may_skip: true")


def test_a_rank_that_is_late_is_waited_for(ranks: Launcher) -> None:
    for found in ranks(2)(play_all, [faults.come_late, faults.recover], [0, 3]):
        for (name, stage), told in found.items():
            assert told.kind == "nothing" or (name, stage) == ("recover", 3), (stage, told)


def end(ranks: Launcher, world: int, fault: Callable[[faults.Training], Any], stage: int) -> dict[int, Failure]:
    """Ends of the ranks if rank 1 does not come back."""
    with pytest.raises(RankError) as caught:
        ranks(world, timeout=60, grace=PATIENCE)(play_to_the_end, fault, stage)
    for rank, failure in caught.value.failures.items():
        assert failure.kind == "raised" or rank == 1, failure
    return caught.value.failures


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_is_killed(ranks: Launcher, stage: int) -> None:
    failures = end(ranks, 3, die, stage)
    assert failures[1].kind == "died"
    for rank in (0, 2):
        assert "DesyncError" in failures[rank].text, failures[rank].text
        assert "rank 1 is gone: its process has ended" in failures[rank].text, failures[rank].text


def test_a_script_that_ends_with_an_exception(ranks: Launcher) -> None:
    failures = end(ranks, 2, faults.end_script, 1)
    assert "DesyncError after" in failures[0].text
    assert "rank 1 raised LookupError: no such sample (faults.py:" in failures[0].text
    assert "and has ended" in failures[0].text


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_is_stopped(ranks: Launcher, stage: int) -> None:
    failures = end(ranks, 3, faults.stop, stage)
    for rank in (0, 2):
        assert "rank 1 is stopped: its process has not run for 0.8 s (SIGSTOP)" in failures[rank].text, failures


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_has_run_out_of_batches(ranks: Launcher, stage: int) -> None:
    """It waits in a collective that is not ours, which nobody can end but with the process."""
    failures = end(ranks, 2, faults.barrier, stage)
    assert failures[1].kind == "died" and f"exit code {EXIT_CODE}" in failures[1].text
    words = "rank 1 waits in torch.distributed.barrier (faults.py:"
    assert words in failures[1].log, failures[1].log
    assert "waits in torch.distributed.barrier, which cannot end" in failures[1].log
    assert "ranks wait for each other: rank 0 waits in" in failures[0].text and words in failures[0].text
