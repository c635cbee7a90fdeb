"""Our classes of DeepSpeed's names against what DeepSpeed itself generated (scripts/record_deepspeed_schedules.py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from zero_strategy.pipeline import DataParallelSchedule, InferenceSchedule, PipeSchedule, TrainSchedule
from zero_strategy.pipeline.instructions import BufferOpInstruction, ForwardPass, PipeInstruction, ReduceGrads

FACTS = json.loads((Path(__file__).parent / "data" / "deepspeed_schedules.json").read_text(encoding="utf-8"))
CLASSES: dict[str, type[PipeSchedule]] = {
    "TrainSchedule": TrainSchedule,
    "InferenceSchedule": InferenceSchedule,
    "DataParallelSchedule": DataParallelSchedule,
}


def lines(name: str, stages: int, micro_batches: int) -> list[str]:
    found = []
    for stage in range(stages):
        schedule = CLASSES[name](micro_batches, stages, stage)
        found.append(f"stage {schedule.stage}: {schedule.num_pipe_buffers()} buffers")
        found += [", ".join(map(repr, step)) for step in schedule]
    return found


@pytest.mark.parametrize("case", FACTS["in_full"])
def test_sequences_in_full(case: str) -> None:
    name, stages, micro_batches = case.split()
    assert lines(name, int(stages), int(micro_batches)) == FACTS["in_full"][case]


@pytest.mark.parametrize("name", CLASSES)
def test_sequences_of_the_grid(name: str) -> None:
    for numbers, expected in FACTS["digests"][name].items():
        stages, micro_batches = map(int, numbers.split())
        text = "\n".join(lines(name, stages, micro_batches))
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected, f"{name} {numbers}:\n{text}"


def test_properties_and_iteration() -> None:
    schedule = TrainSchedule(micro_batches=8, stages=4, stage_id=1)
    assert (schedule.stage, schedule.num_stages, schedule.num_micro_batches) == (1, 4, 8)
    assert (schedule.prev_stage, schedule.next_stage) == (0, 2)
    assert not schedule.is_first_stage and not schedule.is_last_stage
    assert TrainSchedule(8, 4, 0).is_first_stage and TrainSchedule(8, 4, 3).is_last_stage
    assert [schedule._valid_micro_batch(at) for at in (-1, 0, 7, 8)] == [False, True, True, False]
    assert [schedule._valid_stage(at) for at in (-1, 0, 3, 4)] == [False, True, True, False]
    assert [schedule._buffer_idx(at) for at in range(5)] == [0, 1, 2, 0, 1]
    first = repr(next(iter(schedule)))
    rest = list(map(repr, list(schedule)))  # iter() begins anew
    assert rest[0] == first and len(rest) == 2 * (8 + 4 - 1)


def test_a_schedule_of_ones_own() -> None:
    class Mine(PipeSchedule):
        def steps(self) -> Any:
            for at in range(self.micro_batches):
                yield [ForwardPass(self._buffer_idx(at))]

    assert Mine(3, 2, 0).num_pipe_buffers() == 3
    assert [repr(step) for step in Mine(2, 2, 0)] == ["[ForwardPass(buffer_id=0)]", "[ForwardPass(buffer_id=1)]"]
    with pytest.raises(TypeError, match="abstract"):
        PipeSchedule(1, 1, 0)  # type: ignore[abstract]


def test_instructions_have_their_keywords_as_members() -> None:
    instruction: Any = PipeInstruction(stage=2, what="x")
    assert (instruction.stage, instruction.what, instruction.name) == (2, "x", "PipeInstruction")
    assert instruction.kwargs == {"stage": 2, "what": "x"}
    assert repr(instruction) == "PipeInstruction(stage=2, what='x')" and repr(ReduceGrads()) == "ReduceGrads()"
    forward: Any = ForwardPass(3, phase=1)
    assert isinstance(forward, BufferOpInstruction) and (forward.buffer_id, forward.phase) == (3, 1)
    assert repr(forward) == "ForwardPass(buffer_id=3, phase=1)"
    with pytest.raises(TypeError):
        ForwardPass()  # type: ignore[call-arg]


@pytest.mark.parametrize("numbers", [(0, 2, 0), (4, 2, 2), (4, 2, -1), (4, 0, 0)])
def test_deepspeed_schedules_no_such_schedule(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"micro-batch|stage"):
        TrainSchedule(*numbers)
