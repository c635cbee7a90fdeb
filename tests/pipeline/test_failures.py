"""Error on every rank when one rank of a pipeline cannot go on: within seconds, naming the stage and the cause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.faulty import Fault, Faulty, Torn, die, no_number
from tests.launcher import Launcher, RankError
from tests.pipeline.pipelines import Case, build_stages, data_of, expected, loss_fn, micro_batches
from zero_strategy.pipeline import Placement
from zero_strategy.pipeline.executor import Executor
from zero_strategy.pipeline.transport import DataEndedError

_SECONDS = 8.0


class Told(NamedTuple):
    """Message to a rank, and the result of a later run."""

    kind: str
    text: str
    seconds: float
    attributes: tuple[int, ...] = ()
    later: float | None = None


def _break_backward(found: Any) -> Any:
    return {**found, "x": Torn.apply(found["x"])}


def _other_structure(found: Any) -> Any:
    return [found["x"], found["mask"]]


def _unsendable(found: Any) -> Any:
    return {**found, "depth": {1}}


def _stop(found: Any) -> Any:
    raise StopIteration("of an iterator of the stage's own")


def _sleep(found: Any) -> Any:
    time.sleep(2.0)
    return found


def _run(case: Case, faulty: int, fault: Fault | None, short: int | None = None) -> Told:
    """Train once with a fault in rank `faulty`'s first chunk at its third call, or data that ends early; then again."""
    rank = dist.get_rank()
    stages = build_stages(case, rank)
    healthy = list(stages)
    if rank == faulty and fault is not None:
        stages[0] = Faulty(stages[0], fault, at=3)
    executor = Executor(stages, case.placement(), loss_fn=loss_fn, timeout=1.0 if fault is _sleep else 60.0)
    schedule, data = case.schedules()[rank], data_of(case, rank)
    if rank == faulty and short is not None:
        data = _shortened(case, short)
    started = time.monotonic()
    try:
        executor.run(schedule, data)
    except Exception as error:
        kind, seconds = type(error).__name__, time.monotonic() - started
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        attributes: tuple[int, ...] = ()
        if isinstance(error, DataEndedError):
            attributes = error.stage, error.micro_batch, error.needed
    else:
        raise AssertionError("nothing happened")
    if fault is _sleep:
        time.sleep(1.5)
    for chunk, module in zip(executor.chunks, healthy):
        chunk.module = module
    loss = executor.run(schedule, data_of(case, rank)).loss
    assert loss is not None
    return Told(kind, text, seconds, attributes, float(loss))


def _shortened(case: Case, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(micro_batches(case.micro_batches, case.uneven)[:count])


_FOUR = Case("1f1b", 4, 1, 6, False)
_TWO = Case("zbv", 2, 2, 4, False)
_THREE = Case("1f1b", 2, 1, 3, False)
"""The backward of stage 0 at its third micro-batch is the end of the batch: no other rank waits for what it gives."""


@pytest.mark.parametrize(("case", "faulty", "stage"), [(_FOUR, 0, 0), (_FOUR, 3, 3), (_TWO, 0, 0)], ids=str)
def test_data_that_ends_early(ranks: Launcher, case: Case, faulty: int, stage: int) -> None:
    for told in ranks(case.ranks)(_run, case, faulty, None, 3):
        assert told.kind == "DataEndedError" and told.seconds < _SECONDS
        assert f"stage {stage} ended before micro-batch 3; a batch needs {case.micro_batches}" in told.text
        assert told.attributes == (stage, 3, case.micro_batches)
        assert told.later == pytest.approx(expected(case)[0], abs=1e-6)
    assert issubclass(DataEndedError, StopIteration)


@pytest.mark.parametrize(
    ("case", "faulty", "fault", "kind", "words"),
    [
        (_FOUR, 1, no_number, "FloatingPointError", "forward of micro-batch 2 in stage 1"),
        (_FOUR, 2, _break_backward, "ArithmeticError", "backward of micro-batch 2 in stage 2"),
        (_TWO, 1, _break_backward, "ArithmeticError", "input half of the backward of micro-batch 2 in stage 1"),
        (_THREE, 0, _break_backward, "ArithmeticError", "backward of micro-batch 2 in stage 0"),
        (_FOUR, 0, _unsendable, "TypeError", "outputs['depth'] is a builtins.set"),
        (_THREE, 1, _stop, "StopIteration", "forward of micro-batch 2 in stage 1"),
    ],
)
def test_a_stage_that_raises(ranks: Launcher, case: Case, faulty: int, fault: Fault, kind: str, words: str) -> None:
    for rank, told in enumerate(ranks(case.ranks)(_run, case, faulty, fault)):
        assert told.kind == (kind if rank == faulty else "PipelineError"), told
        assert words in told.text and f"(rank {faulty})" in told.text and told.seconds < _SECONDS
        assert told.later == pytest.approx(expected(case)[0], abs=1e-6)


def test_a_structure_that_a_stage_cannot_take(ranks: Launcher) -> None:
    results = ranks(4)(_run, _FOUR, 1, _other_structure)
    for rank, told in enumerate(results):
        assert told.kind == ("TypeError" if rank == 2 else "PipelineError"), told
        assert "forward of micro-batch 2 in stage 2" in told.text and told.seconds < _SECONDS
        words = "what stage 2 was given has changed its structure from {x: T, mask: T, places: (T, None), depth: "
        assert words in told.text and "} to [T, T]" in told.text


def test_a_rank_that_does_not_get_on(ranks: Launcher) -> None:
    for rank, told in enumerate(ranks(2)(_run, Case("gpipe", 2, 1, 4, False), 0, _sleep)):
        assert told.kind == "PipelineError" and told.seconds < _SECONDS, told
        assert "stage 1 (rank 1) has waited 1 s for the activation of micro-batch 2, and stage 0 (ra" in told.text
        assert told.later is not None, rank


def _absent(seconds: float) -> tuple[str, str, float]:
    """Rank 1 comes to its second batch late, and the others wait for a while only."""
    rank, case = dist.get_rank(), Case("1f1b", 4, 1, 2, False)
    executor = Executor(build_stages(case, rank), case.placement(), loss_fn=loss_fn, timeout=60.0, patience=seconds)
    executor.run(case.schedules()[rank], data_of(case, rank))
    started = time.monotonic()
    if rank == 1:
        time.sleep(seconds + 1.0)
    try:
        executor.run(case.schedules()[rank], data_of(case, rank))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("nothing happened")


def test_a_rank_that_does_not_come(ranks: Launcher) -> None:
    for kind, text, seconds in ranks(4)(_absent, 1.0):
        assert kind == "PipelineError" and seconds < _SECONDS
        assert "stage 1 (rank 1) has not come to batch 2 of the pipeline while stage " in text


def _confused(case: Case, odd: Case | None) -> tuple[str, str, float]:
    """Rank 1 runs another case, or evaluates, while the others train."""
    rank = dist.get_rank()
    executor = Executor(build_stages(case, rank), case.placement(), loss_fn=loss_fn, timeout=60.0)
    schedules = case.schedules()
    if rank == 1:
        schedules = case.inference() if odd is None else odd.schedules()
    started = time.monotonic()
    try:
        executor.run(schedules[rank], data_of(case, rank))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("nothing happened")


@pytest.mark.parametrize("odd", [None, Case("1f1b", 4, 1, 5, False), Case("gpipe", 4, 1, 6, False)], ids=str)
def test_a_rank_that_runs_something_else(ranks: Launcher, odd: Case | None) -> None:
    for kind, text, seconds in ranks(4)(_confused, _FOUR, odd):
        assert kind == "OutOfStepError" and "is out of step: it runs another schedule" in text and seconds < _SECONDS
        assert "(rank 1)" in text


def test_a_rank_that_dies(ranks: Launcher) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(4, grace=_SECONDS)(_run, _FOUR, 1, die)
    failures = caught.value.failures
    assert failures.pop(1).kind == "died" and time.monotonic() - started < 3 * _SECONDS
    assert len(failures) == 3
    for failure in failures.values():
        assert failure.exception.endswith("PipelineError")
        assert "stage 1 (rank 1) is gone: its connection broke while" in failure.text
        assert "without it the pipeline cannot go on" in failure.text  # said by the next run


def test_calls_that_cannot_work() -> None:
    case = Case("1f1b", 1, 1, 2, False)
    with pytest.raises(ValueError, match=r"2 stages for a rank that has 1 chunks"):
        Executor([nn.Identity(), nn.Identity()], case.placement())
    with pytest.raises(ValueError, match="a pipeline of 2 ranks"):
        Executor([nn.Identity()], Placement(2))
    executor = Executor(build_stages(case, 0), case.placement(), loss_fn=loss_fn)
    with pytest.raises(ValueError, match="the schedule is for rank 0 of Placement"):
        executor.run(Case("1f1b", 2, 1, 2, False).schedules()[0], data_of(case, 0))
    with pytest.raises(ValueError, match="was given no data iterator"):
        executor.run(case.schedules()[0])
    with pytest.raises(TypeError, match="gives Tensor; a pipeline takes pairs"):
        executor.run(case.schedules()[0], iter([torch.ones(2)] * 2))
    executor.loss_fn = None
    with pytest.raises(ValueError, match="returned Tensor and there is no loss_fn"):
        executor.run(case.schedules()[0], data_of(case, 0))
