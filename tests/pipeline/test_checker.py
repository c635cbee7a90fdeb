"""Lowered tables pass the checker and run with blocking sends; damaged ones are refused, with the place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tests.pipeline.carrying_out import carry_out, expected_gradient
from tests.pipeline.check_all import check_one, check_row
from tests.pipeline.schedules import named
from zero_strategy.pipeline import (
    Action,
    DataParallelSchedule,
    InferenceSchedule,
    Kind,
    PipeSchedule,
    Placement,
    Table,
    TableSchedule,
    TrainSchedule,
    build_table,
    inference,
    lower,
)
from zero_strategy.pipeline.check import check
from zero_strategy.pipeline.instructions import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    ScheduleError,
    SendActivation,
    read_ops,
)

NUMBERS = [(1, 1), (1, 5), (2, 1), (2, 3), (3, 2), (4, 4), (4, 7), (5, 13)]


@pytest.mark.parametrize(("stages", "micro_batches"), [*NUMBERS, (7, 20), (16, 15)])
def test_all_schedules_pass(stages: int, micro_batches: int) -> None:
    schedules, instructions = check_row(stages, micro_batches)
    assert schedules == len(list(named())) + 2 and instructions > schedules * stages * micro_batches


def test_the_largest_pass() -> None:
    assert check_one("interleaved_1f1b", 16, 64, 2) > 0 and check_one("zbv", 16, 64, 2) > 0


def test_a_whole_model_passes() -> None:
    check([DataParallelSchedule(4, 1, 0)])


@pytest.mark.parametrize("placement", [Placement(1), Placement(4), Placement(3, 2), Placement(3, 2, "v")])
def test_inference_passes(placement: Placement) -> None:
    for micro_batches in (1, 2, 5, 9):
        check(lower(inference(placement, micro_batches)))


@pytest.mark.parametrize(("name", "chunks"), [*named(3)])
def test_they_compute_what_they_should(name: str, chunks: int) -> None:
    for stages, micro_batches in NUMBERS:
        table = build_table(name, stages, micro_batches, chunks)
        for rank in carry_out(lower(table)):
            for stage, added in rank.gradients.items():
                expected = [expected_gradient(stage, stages * chunks, at) for at in range(micro_batches)]
                assert added == expected  # each once, and in the order of micro-batches


def test_deepspeeds_compute_what_they_should() -> None:
    for rank in carry_out([TrainSchedule(5, 3, stage) for stage in range(3)]):
        stage = rank.schedule.stage
        assert rank.gradients == {stage: [expected_gradient(stage, 3, at) for at in range(5)]}


@pytest.mark.parametrize("placement", [Placement(3), Placement(2, 2), Placement(2, 2, "v")])
def test_inference_computes_what_it_should(placement: Placement) -> None:
    ranks = carry_out(lower(inference(placement, 4)))
    way = "".join(f">{stage}" for stage in range(placement.stages))
    assert [output for rank in ranks for output in rank.outputs] == [f"x{at}{way}?y{at}" for at in range(4)]
    assert carry_out([InferenceSchedule(4, 3, stage) for stage in range(3)])[-1].outputs[3] == "x3>0>1>2?y3"


def test_steps_of_a_lowered_table() -> None:
    first, second = lower(build_table("1f1b", 2, 2))
    assert [[type(one).__name__ for one in step] for step in second] == [
        ["RecvActivation", "LoadMicroBatch", "ForwardPass"],
        ["RecvActivation", "BackwardPass", "SendGrad"],
        ["LoadMicroBatch", "ForwardPass"],
        ["BackwardPass", "SendGrad", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"],
    ]
    assert repr(next(iter(first))[1]) == "ForwardPass(buffer_id=0, micro_batch=0, chunk=0)"
    assert first.is_first_stage and not first.is_last_stage and second.is_last_stage
    bottom, top = lower(build_table("zbv", 2, 2))
    assert bottom.is_first_stage and bottom.is_last_stage and not top.is_first_stage and not top.is_last_stage


@pytest.mark.parametrize(("name", "chunks"), [*named(3)])
def test_instructions_are_what_is_checked(name: str, chunks: int) -> None:
    """The checker reads the numbers of a lowered table, an engine its instructions: they say the same."""
    for stages, micro_batches in NUMBERS:
        for schedule in lower(build_table(name, stages, micro_batches, chunks)):
            assert read_ops(schedule).tuples() == schedule.ops.tuples()


@pytest.mark.parametrize("micro_batches", [1, 3, 16])
def test_buffers_of_1f1b(micro_batches: int) -> None:
    """One more than are in flight, for what comes in meanwhile: independent of the number of micro-batches."""
    buffers = [schedule.num_pipe_buffers() for schedule in lower(build_table("1f1b", 4, micro_batches))]
    assert all(count <= min(4 - stage + 1, micro_batches) for stage, count in enumerate(buffers))


def test_rows_that_wait_for_each_other() -> None:
    forwards = Action(Kind.FORWARD, 0), Action(Kind.FORWARD, 1)
    backwards = Action(Kind.BACKWARD, 0), Action(Kind.BACKWARD, 1)
    rows = ((forwards[0], backwards[0], forwards[1], backwards[1]), (*forwards, *backwards))
    with pytest.raises(ValueError, match=r"rank 0 at its action 1 \(B0.0\), rank 1 at its action 1 \(F1.0\)"):
        lower(Table("mine", 2, Placement(2), rows))
    rows = ((backwards[0], forwards[0]),) * 2
    with pytest.raises(ValueError, match="what comes later in their own row"):
        lower(Table("mine", 1, Placement(2), rows))


class Listed(PipeSchedule):
    """Steps of one instruction each."""

    def __init__(self, like: TableSchedule) -> None:
        super().__init__(like.micro_batches, like.stages, like.stage_id)
        self.listed = list(like.instructions)
        self.buffers = like.num_pipe_buffers()
        self.like = like

    @property
    def placement(self) -> Placement:
        return self.like.placement

    def steps(self):  # type: ignore[no-untyped-def]
        return ([instruction] for instruction in self.listed)

    def num_pipe_buffers(self) -> int:
        return self.buffers


def listed(schedules: Sequence[TableSchedule]) -> list[Listed]:
    return [Listed(schedule) for schedule in schedules]


def place(schedule: Listed, kind: type[PipeInstruction], number: int = 0) -> int:
    return [at for at, one in enumerate(schedule.listed) if type(one) is kind][number]


Change = Callable[[list[Listed]], None]


def swap(rank: int, a: type[PipeInstruction], b: type[PipeInstruction]) -> Change:
    def change(schedules: list[Listed]) -> None:
        own = schedules[rank]
        i, j = place(own, a), place(own, b)
        own.listed[i], own.listed[j] = own.listed[j], own.listed[i]

    return change


def without(rank: int, kind: type[PipeInstruction]) -> Change:
    def change(schedules: list[Listed]) -> None:
        del schedules[rank].listed[place(schedules[rank], kind)]

    return change


def twice(rank: int, kind: type[PipeInstruction]) -> Change:
    def change(schedules: list[Listed]) -> None:
        at = place(schedules[rank], kind)
        schedules[rank].listed.insert(at, schedules[rank].listed[at])

    return change


def instead(rank: int, kind: type[PipeInstruction], new: PipeInstruction) -> Change:
    def change(schedules: list[Listed]) -> None:
        schedules[rank].listed[place(schedules[rank], kind)] = new

    return change


def fewer_buffers(schedules: list[Listed]) -> None:
    schedules[0].buffers -= 1


def receives_in_another_order(schedules: list[Listed]) -> None:
    own = schedules[1]
    own.listed.insert(place(own, RecvActivation, 0), own.listed.pop(place(own, RecvActivation, 1)))


def sends_that_cross(schedules: list[Listed]) -> None:
    """Fine with a transport that stores messages, a deadlock with one that waits."""
    own = schedules[0]
    own.listed.insert(place(own, SendActivation, 1), own.listed.pop(place(own, RecvGrad)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(0, ForwardPass), r"rank 0, step 1, SendActivation\(.*\): comes before its forward, for micro-batch 0"),
        (without(1, BackwardPass), "rank 1, step .*SendGrad.*: comes before its backward, or the input half"),
        (without(0, RecvGrad), "rank 0, step .*BackwardPass.*: comes before receiving its gradient"),
        (without(1, LoadMicroBatch), "rank 1, step 1, ForwardPass.*: comes before loading it"),
        (without(1, RecvActivation), "rank 1, step .*ForwardPass.*: comes before receiving its inputs"),
        (without(0, SendActivation), "rank 0, step .*RecvGrad.*: comes before sending its outputs"),
        (without(0, OptimizerStep), "rank 0 at its end: the batch ends without OptimizerStep"),
        (without(1, ReduceTiedGrads), "rank 1, step .*: the end of the batch is another one on rank 0"),
        (swap(0, ReduceGrads, ReduceTiedGrads), "rank 0, step .*ReduceTiedGrads.*: is out of order"),
        (swap(1, ForwardPass, BackwardPass), "rank 1, step .*BackwardPass.*: comes before its forward"),
        (swap(0, BackwardPass, OptimizerStep), "rank 0, step .*: is out of order at the end of the batch"),
        (twice(0, OptimizerStep), "rank 0, step .*OptimizerStep.*: is out of order at the end of the batch"),
        (twice(0, ForwardPass), "rank 0, step 2, ForwardPass.*: micro-batch 0 had that before"),
        (twice(1, RecvActivation), "rank 1, step 1, RecvActivation.*had that before"),
        (instead(0, RecvGrad, RecvActivation(0, micro_batch=0)), "RecvActivation.*: the stage has no need of it"),
        (instead(0, LoadMicroBatch, LoadMicroBatch(0, micro_batch=9)), "there are 4 micro-batches .* micro-batch 9"),
        (instead(0, LoadMicroBatch, LoadMicroBatch(1, micro_batch=0)), "ForwardPass.*: micro-batch 0 .* in buffer 1"),
        (instead(1, ReduceGrads, PipeInstruction(what=1)), r"rank 1: PipeInstruction\(what=1\) is no instruction"),
        (fewer_buffers, "rank 0, step .*: the rank has 1 buffers"),
        (receives_in_another_order, "deadlock: .*rank 0, step 2, SendActivation.*rank 1, step 0, RecvActivation"),
        (sends_that_cross, "deadlock: .*rank 0, step .*RecvGrad.*rank 1, step .*RecvActivation"),
    ],
)
def test_checker_damage_is_found(change: Callable[[list[Listed]], None], message: str) -> None:
    schedules = listed(lower(build_table("1f1b", 2, 4)))
    check(schedules)
    change(schedules)
    with pytest.raises(ScheduleError, match=message):
        check(schedules)


def test_a_buffer_that_is_taken_too_soon() -> None:
    schedules = listed(lower(build_table("gpipe", 2, 2)))
    for rank in schedules:
        for at, one in enumerate(rank.listed):
            if getattr(one, "micro_batch", None) == 1:
                rank.listed[at] = type(one)(**{**one.kwargs, "buffer_id": 0})
    with pytest.raises(ScheduleError, match=r"rank 0, step 3, LoadMicroBatch.*: the buffer still holds micro-batch 0"):
        check(schedules)


def test_not_all_ranks() -> None:
    schedules = lower(build_table("1f1b", 3, 4))
    for wrong in (schedules[:2], schedules[::-1]):
        with pytest.raises(ScheduleError, match="needed is one for every rank, in order"):
            check(wrong)
    with pytest.raises(ScheduleError, match="no schedules"):
        check([])


def test_random_damage_is_found_or_harmless() -> None:
    """Instructions change places with the next one: what the checker lets pass computes what it should."""
    generator = random.Random(0)
    passed = 0
    for _ in range(150):
        name, chunks = generator.choice([("1f1b", 1), ("zb_h1", 1), ("zbv", 2), ("interleaved_1f1b", 2)])
        damaged = listed(lower(build_table(name, 2, 3, chunks)))
        own = damaged[generator.randrange(2)].listed
        at = generator.randrange(len(own) - 1)
        own[at], own[at + 1] = own[at + 1], own[at]
        try:
            check(damaged)
        except ScheduleError:
            continue
        passed += 1
        for one in carry_out(damaged):
            for stage, added in one.gradients.items():
                assert sorted(added) == [expected_gradient(stage, 2 * chunks, mb) for mb in range(3)]
    assert 10 < passed < 140
