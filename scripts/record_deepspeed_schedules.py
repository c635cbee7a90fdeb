"""Writes what the real DeepSpeed's pipeline schedules generate, as facts to test ours against.

    DS_ACCELERATOR=cpu python scripts/record_deepspeed_schedules.py tests/pipeline/data/deepspeed_schedules.json

Needs deepspeed (see make_deepspeed_checkpoints.py). A few schedules are written in full, and a digest of the text of
each over a larger grid: of all stages, with the number of buffers and every step's instructions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

CLASSES = ("TrainSchedule", "InferenceSchedule", "DataParallelSchedule")
IN_FULL = ((1, 2), (2, 1), (3, 4))
"""(stages, micro-batches)."""
GRID = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in range(1, 13)] + [(16, 5), (16, 64)]


def lines(schedule_class: Any, stages: int, micro_batches: int) -> list[str]:
    """Instructions of all stages' schedules: a line for the buffers of each stage, and one for each step."""
    found = []
    for stage in range(stages):
        schedule = schedule_class(micro_batches, stages, stage)
        found.append(f"stage {schedule.stage}: {schedule.num_pipe_buffers()} buffers")
        found += [", ".join(map(repr, step)) for step in schedule]
    return found


def digest(schedule_class: Any, stages: int, micro_batches: int) -> str:
    """Of these lines."""
    return hashlib.sha256("\n".join(lines(schedule_class, stages, micro_batches)).encode()).hexdigest()[:16]


def main() -> None:
    import deepspeed
    from deepspeed.runtime.pipe import schedule as theirs

    facts = {
        "deepspeed": deepspeed.__version__,
        "in_full": {f"{name} {s} {m}": lines(getattr(theirs, name), s, m) for name in CLASSES for s, m in IN_FULL},
        "digests": {name: {f"{s} {m}": digest(getattr(theirs, name), s, m) for s, m in GRID} for name in CLASSES},
    }
    Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
