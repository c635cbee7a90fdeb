"""Pipelines of several copies: a module that one rank skips; a failure in one copy reaches all, naming the stage."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.faulty import die, no_number
from tests.launcher import Launcher, RankError
from tests.pipeline.test_engine import VOCABULARY, WIDTH, Block, Case, batches, config_of, loss_of, module_of
from tests.watchdog.faults import PATIENCE, QUICK, linger
from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.watchdog.diagnosis import DesyncError

# ----------------------------------------------------------------------------------------- a rank skips a module


class Sometimes(nn.Module):
    """A layer around a unit, which it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.skips = Block(), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x if self.skips else self.inner(x)
        return out


class Words(nn.Embedding):
    """A tied module, whose last use may give no gradient."""

    quiet = False


def _read_out(words: Words, x: Tensor) -> Tensor:
    return nn.functional.linear(x, words.weight.detach() if words.quiet else words.weight)


def _layers() -> list[Any]:
    first = TiedLayerSpec("words", Words, VOCABULARY, WIDTH)
    last = TiedLayerSpec("words", Words, VOCABULARY, WIDTH, forward_fn=_read_out)
    return [first, *(LayerSpec(Sometimes) for _ in range(4)), last]


def _module(stages: int, **more: Any) -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule(_layers(), stages, loss_fn=loss_of, partition_method=[0, 3, 6][:: 3 - stages], **more)


SKIPPED, STEPS, MICRO_BATCHES = "4", 3, 2
"""The layer, of stage 1, that the first copy leaves out from the second step on."""


def _leave_out(module: nn.Module, skips: bool) -> None:
    module.get_submodule(SKIPPED).skips = skips  # type: ignore[assignment]
    module.get_submodule("tied_modules.words").quiet = skips  # type: ignore[assignment]


def _skip(zero: int) -> dict[str, Tensor]:
    module = _module(2)
    config = {"stage": zero, "pipeline": {"stages": 2, "micro_batches": MICRO_BATCHES}, "watchdog": QUICK}
    engine = PipelineEngine(module, {**config, "units": {"patterns": ["*.inner"], "min_numel": 0}})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.attach(optimizer)
    grid = module.mpu()
    for step in range(STEPS):
        if step == 1 and (grid.stage_id, grid.data_parallel_id) == (1, 0):
            _leave_out(module, True)
        engine.forward_backward(batches(step, MICRO_BATCHES, grid.data_parallel_id))
        optimizer.step()
        optimizer.zero_grad()
    return engine.full_state_dict()


def _skip_at(stages: list[int]) -> list[dict[str, Tensor]]:
    return [_skip(zero) for zero in stages]


def test_a_rank_that_skips_a_module_below_stage_three(ranks: Launcher) -> None:
    """Its gradients count as zeros, as in one process."""
    module = _module(1, rank=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        for copy in range(2):
            _leave_out(module, step > 0 and copy == 0)
            for inputs, labels in batches(step, MICRO_BATCHES, copy):
                (loss_of(module(inputs), labels) / (2 * MICRO_BATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(4)(_skip_at, [0, 1, 2]):
        for weights in found:
            for name, tensor in module.state_dict().items():
                torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- a rank fails


def _run(case: Case, dies: bool) -> None:
    """The rank of stage 1 in the first copy fails in its second step."""
    module = module_of(case)
    engine = PipelineEngine(module, {**config_of(case), "watchdog": QUICK})
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


def test_a_rank_that_skips_a_module_at_stage_three(ranks: Launcher) -> None:
    """It gathers other units than its other copy: an error everywhere."""
    with pytest.raises(RankError) as caught:
        ranks(4, timeout=60, grace=PATIENCE)(_skip, 3)
    failures = caught.value.failures
    assert len(failures) == 4 and all(failure.kind == "raised" for failure in failures.values()), str(caught.value)
    for failure in failures.values():
        assert "stage 1 (rank " in failure.text, failure.text
        assert f"`{SKIPPED}.inner`" in failure.text or "different modules" in failure.text, failure.text
