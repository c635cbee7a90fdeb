"""A failure in one copy of a pipeline reaches all copies, naming the stage."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faulty import die, no_number
from tests.guard.faults import PATIENCE, QUICK, linger
from tests.launcher import Launcher, RankError
from tests.pipeline.test_engine import Case, batches, config_of, module_of
from zero_strategy.distributed.desync import DesyncError
from zero_strategy.pipeline_engine import PipelineEngine


def _run(case: Case, dies: bool) -> None:
    """The rank of stage 1 in the first copy fails in its second step."""
    module = module_of(case)
    engine = PipelineEngine(module, {**config_of(case), "guard": QUICK})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    engine.attach(optimizer)
    grid = module.mpu()
    faulty = (grid.stage_id, grid.data_parallel_id) == (1, 0)
    started = 0.0
    store: Any = dist.distributed_c10d._get_default_store()
    store.add("to tell", int(not faulty))
    try:
        for step in range(3):
            engine.forward_backward(batches(step, case.micro_batches, grid.data_parallel_id))
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            started = time.monotonic()
            if step == 0 and faulty:
                module.get_submodule(module.unit_names()[0]).register_forward_hook(die if dies else no_number)
    except Exception as error:
        assert time.monotonic() - started < PATIENCE
        if faulty:
            linger()  # it is there, and comes no more
        else:
            store.add("told", 1)
        assert isinstance(error, FloatingPointError if faulty else DesyncError), repr(error)
        raise


@pytest.mark.parametrize(("zero", "dies"), [(1, False), (3, True)])
def test_a_failure_in_one_copy_reaches_the_others(ranks: Launcher, zero: int, dies: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4, timeout=60, grace=PATIENCE)(_run, Case(2, 2, zero, tied=False), dies)
    failures = caught.value.failures
    kinds = sorted(failure.exception.rpartition(".")[2] for failure in failures.values())
    assert len(failures) == 4 and kinds.count("PipelineError") + kinds.count("DesyncError") == 3, str(caught.value)
    for failure in failures.values():
        last = failure.text.splitlines()[-1]
        assert failure.kind == "died" or "stage 1 (rank " in failure.text, last
        assert dies or "no number today" in failure.text, last
