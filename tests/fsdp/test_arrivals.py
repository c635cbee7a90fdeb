"""The gather after a step at stages 1 and 2 goes on beside what comes next; whatever uses a parameter waits for it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from zero_strategy.comm.collectives import PendingWork
from zero_strategy.comm.transport import HostCollectives, Job
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp import param_bucket
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.runtime.torch_private import compiled_frames

SECONDS = 0.05
NAME = "blocks.1.up.weight"


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def in_a_context(model: Any, parameter: nn.Parameter) -> Tensor:
    with GatheredParameters(list(model.parameters())):
        return parameter.detach().clone()


def written(parameter: nn.Parameter) -> Tensor:
    with torch.no_grad():
        return parameter.mul_(1)


def replaced(parameter: nn.Parameter) -> Tensor:
    parameter.data = parameter.data * 1
    return parameter


READS: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "multiplied": lambda model, p: p * 1,
    "by a linear": lambda model, p: nn.functional.linear(torch.eye(p.shape[1]), p).T,
    "by its module": lambda model, p: (
        (model.blocks[1].up(torch.eye(p.shape[1])) - model.blocks[1].up(torch.zeros(1, p.shape[1]))).T
    ),
    "data": lambda model, p: p.data,
    "detached": lambda model, p: p.detach(),
    "numpy": lambda model, p: torch.from_numpy(p.detach().numpy()),
    "address": lambda model, p: p if p.data_ptr() else None,
    "a list": lambda model, p: torch._foreach_mul([p], 1)[0],
    "written": lambda model, p: written(p),
    "replaced": lambda model, p: replaced(p),
    "copied": lambda model, p: copy.deepcopy(model).get_parameter(NAME),
    "pickled": lambda model, p: pickle.loads(pickle.dumps(p)),
    "saved": lambda model, p: saved(p),
    "state dict": lambda model, p: model.state_dict()[NAME],
    "state dict, kept": lambda model, p: model.state_dict(keep_vars=True)[NAME] * 1,
    "in a context": in_a_context,
    "in a vector": lambda model, p: nn.utils.parameters_to_vector([p]).view_as(p),
    "mapped": lambda model, p: torch.func.vmap(lambda x: p * x)(torch.ones(2))[0],
}


def as_a_device(patch: pytest.MonkeyPatch) -> None:
    """Gathers of a thread are waited for like those of a device, which nobody has to carry out."""
    patch.setattr(PendingWork, "holds_host", False)


def delayed(patch: pytest.MonkeyPatch, seconds: float = SECONDS) -> None:
    """Let every gather take its time."""
    gather = HostCollectives.all_gather

    def late(self: HostCollectives, flat: Tensor) -> Job:
        job = gather(self, flat)

        def run() -> Any:
            time.sleep(seconds)
            return job.run()

        return Job(run, job.then)

    patch.setattr(HostCollectives, "all_gather", late)
    as_a_device(patch)


def stepped(stage: int, dtype: torch.dtype | None, step: Callable[[Any, Any], Any]) -> tuple[Any, Any, bool]:
    """The result of `step` just after an optimizer's step, the values after it, and whether all were on their way."""
    model: Any = net()
    config = load_config(stage=stage, units={"min_numel": 0})
    engine = ZeroEngine(model, config, compute_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    engine.attach(optimizer)
    for _ in range(2):
        loss_of(model(torch.ones(2, 6, dtype=dtype)).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    arriving = [bucket.arriving for bucket in engine.model.buckets]
    found = step(engine, model)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close()
    return found, whole, all(arriving)


def read(
    stage: int, dtype: torch.dtype | None, ways: Sequence[str] = tuple(READS), seconds: float = SECONDS
) -> list[str]:
    """The ways of reading that gave other values than there are after a while."""
    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        delayed(patch, seconds)
        for way, reads in ((way, READS[way]) for way in ways):

            def look(engine: ZeroEngine, model: Any, reads: Any = reads) -> Tensor:
                parameter = model.get_parameter(NAME)
                found: Tensor = reads(model, parameter)
                return found.detach().float().clone()

            if way in ("by a linear", "by its module", "numpy", "mapped") and dtype is not None:
                continue
            found, whole, arriving = stepped(stage, dtype, look)
            if not torch.allclose(found, whole[NAME].float(), atol=1e-6) or not arriving:
                wrong.append(way)
    return wrong


# The stages differ in what they do to gradients, not in how they gather: each has one dtype.
@pytest.mark.parametrize("stage, dtype", [(1, None), (2, torch.bfloat16)])
def test_every_read_waits(ranks: Launcher, stage: int, dtype: torch.dtype | None) -> None:
    assert ranks(2)(read, stage, dtype) == [[], []]


def read_early() -> list[str]:
    """The same where nobody waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(param_bucket._Arrival, "wait", lambda self: None)
        as_a_device(patch)
        return read(1, None, SOME, seconds=0.5)


SOME = ["multiplied", "data", "a list", "state dict"]


def test_these_reads_would_be_too_early(ranks: Launcher) -> None:
    assert ranks(2)(read_early) == [SOME] * 2


def shared_by_others(stage: int) -> list[bool]:
    """For each way of holding a bucket's memory: whether its values are on their way after a step."""
    with pytest.MonkeyPatch.context() as patch:
        as_a_device(patch)
        return _held_in_each_way(stage)


def _held_in_each_way(stage: int) -> list[bool]:
    found = []
    for take in (lambda p: p[0], lambda p: p.data, lambda p: p.detach().numpy(), lambda p: p.detach().view(-1)):
        model: Any = net()
        engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        engine.attach(optimizer)
        with torch.no_grad():
            held = take(model.get_parameter(NAME))
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()
        place = engine.model.place(model.get_parameter(NAME))
        assert place is not None
        found.append(place[0].arriving)
        arriving = [bucket.arriving for bucket in engine.model.buckets]
        assert sum(arriving) == len(arriving) - 1, (arriving, len(found), compiled_frames())
        del held
        engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_waits_where_somebody_holds_the_memory(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(shared_by_others, stage) == [[False] * 4] * 2


def dropped(stage: int) -> bool:
    """An engine that nobody holds any more: its module has all values."""
    with pytest.MonkeyPatch.context() as patch:
        delayed(patch)
        model: Any = net()
        engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach(optimizer)
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()
        assert all(bucket.arriving for bucket in engine.model.buckets)
        del engine, optimizer
        gc.collect()
        before = [p * 1 for p in model.parameters()]
        time.sleep(10 * SECONDS)
        return all(map(torch.equal, before, model.parameters()))


def test_an_engine_waits_before_it_goes(ranks: Launcher) -> None:
    assert ranks(2)(dropped, 2) == [True, True]


def steps_without_a_forward(stage: int) -> dict[str, Tensor]:
    """Two optimizers' steps one after the other, and a step of which nobody sees the values before the next one."""
    with pytest.MonkeyPatch.context() as patch:
        delayed(patch)

        def more(engine: ZeroEngine, model: Any) -> None:
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.ones(parameter.shape)
                engine.optimizers[0].optimizer.step()

        return {name: value for name, value in stepped(stage, None, more)[1].items()}


def test_a_step_waits_for_the_values_of_the_one_before(ranks: Launcher) -> None:
    wanted = ranks(2)(steps_without_a_forward, 0)[0]
    for stage in (1, 2):
        for found in ranks(2)(partial(steps_without_a_forward), stage):
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def never_closed() -> int:
    """Engines in cycles that nobody has closed, with nothing after their last step: collecting them ends."""
    for _ in range(3):
        model: Any = net()
        engine = ZeroEngine(model, load_config(stage=2, units={"min_numel": 0}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach(optimizer)
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()
        model.cycle = [engine, optimizer, model]
        del model, engine, optimizer
    gc.collect()
    return len(gc.garbage)


def test_collecting_an_engine_that_nobody_has_closed_ends(ranks: Launcher) -> None:
    assert ranks(2)(never_closed) == [0, 0]
