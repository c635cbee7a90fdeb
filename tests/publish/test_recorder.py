"""Changes of weights of any origin reach readers, and those of optimizer steps as changes, not as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from tests.publish.test_publish import assert_shown
from zero_strategy import ZeroEngine, subscribe
from zero_strategy.comm import delta
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.optim import MuonAdamW, split_matrices
from zero_strategy.optim.full_state import safe_set_full_fp32_param
from zero_strategy.publish import recorder

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    "torch's": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True),
    "muon": lambda model: MuonAdamW(split_matrices(model), muon={"lr": 1e-3}, adamw={"lr": 1e-4}),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3),
}


class Run:
    """A training that publishes, and a reader of it."""

    def __init__(self, folder: str, stage: int, kind: str = "fused", **options: Any) -> None:
        self.model = net(width=32)
        dtype = options.pop("compute_dtype", None)
        settings = {"stage": stage, "units": {"min_numel": 1}, "nonfinite_gradients": "skip", **options}
        self.engine = ZeroEngine(self.model, settings, compute_dtype=dtype)
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.engine.attach(self.optimizer)
        self.dtype = dtype or torch.float32
        self.published, self.reader = self.engine.publish(folder), subscribe(folder)

    def step(self, factor: float = 1.0) -> None:
        rows = torch.randn(6, 32, generator=torch.Generator().manual_seed(self.engine.steps.taken)).to(self.dtype)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model(rows)) * factor
            loss.backward()
            return loss

        self.optimizer.step(closure)

    def compare(self) -> None:
        self.published.update()
        assert self.reader.update()
        assert_shown(self.reader.tensors, self.engine.full_state_dict())


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Payloads by their kind, and the most values that were kept from before a step."""
    found = {"coded": 0, "dense": 0, "former": 0}
    encode, dense, before = recorder.encode, recorder.dense, recorder.ChangeRecorder.before

    def watched(self: Any, buckets: Any) -> None:
        before(self, buckets)
        kept = sum(words.nbytes for log in self._logs.values() for words in log.former)
        found["former"] = max(found["former"], kept)

    def counting(name: str, call: Any, *args: Any) -> bytes:
        found[name] += 1
        payload: bytes = call(*args)
        return payload

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(recorder, "encode", partial(counting, "coded", encode))
        patch.setattr(recorder, "dense", partial(counting, "dense", dense))
        patch.setattr(recorder.ChangeRecorder, "before", watched)
        yield found


def steps(folder: str, stage: int, kind: str, options: dict[str, Any]) -> dict[str, int]:
    run = Run(folder, stage, kind, **options)
    with counted() as found:
        for number in (0, 1, 1):
            for _ in range(number):
                run.step()
            run.step(factor=float("inf"))  # skipped
            run.compare()
    for _ in range(3):  # several steps per version
        run.step()
    run.compare()
    return found | {
        "bytes": max(sum(each.numel for each in log.ranges) for log in run.published._changes._logs.values())
    }


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_of_any_optimizer(ranks: Launcher, tmp_path: Path, stage: int, kind: str) -> None:
    for found in ranks(2)(steps, str(tmp_path), stage, kind, {}):
        assert found["coded"] and not found["dense"]
        if kind == "fused":  # of one bucket at a time
            assert 0 < found["former"] <= 4 * found["bytes"]


@pytest.mark.parametrize("options", [{"compute_dtype": torch.bfloat16}, {"offload": {"optimizer": "cpu"}}], ids=str)
def test_masters_and_tiers(ranks: Launcher, tmp_path: Path, options: dict[str, Any]) -> None:
    for found in ranks(2)(steps, str(tmp_path), 2, "fused", options):
        assert found["coded"] and not found["dense"]


def edits(folder: str, stage: int) -> None:
    run = Run(f"{folder}/published", stage)
    run.step()
    run.engine.save(f"{folder}/saved")
    run.compare()
    weight = run.model.head.weight

    def gathered() -> None:
        with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.mul_(2.0)

    changes: list[Callable[[], object]] = [
        gathered,
        lambda: safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.5)),
        lambda: run.engine.load(f"{folder}/saved"),
    ]
    if stage < 3:
        changes.append(lambda: weight.detach().mul_(3.0))
    for change in changes:
        for around in (False, True):  # by itself, and between two steps of one version
            with counted() as found:
                if around:
                    run.step()
                change()
                if around:
                    run.step()
                run.compare()
                run.step()
                run.compare()
            assert found["dense"] and found["coded"]
    average = run.engine.average_weights(0.5)
    run.step()
    run.compare()
    with average.applied():
        run.compare()
    run.compare()
    average.copy_to_model()
    run.compare()


@pytest.mark.parametrize("stage", [1, 3])
def test_changes_that_no_step_makes(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    ranks(2)(edits, str(tmp_path), stage)


def test_payloads_that_follow_each_other() -> None:
    chance = torch.Generator().manual_seed(0)
    values = [torch.randn(300, generator=chance).bfloat16() for _ in range(2)]
    values.append(values[1].clone())
    values[2][7] = 1.0
    words = [delta.words_of(each) for each in values]
    payload = delta.encode(words[0], words[1]) + delta.encode(words[1], words[2]) + delta.dense(words[0])
    found = delta.words_of(values[0].clone())
    assert delta.apply(payload, found) == delta.changed_of(payload) == 299 + 1 + 300
    assert (found == words[0]).all()


@pytest.mark.parametrize("steps_before", [1, 3])
def test_an_error_of_the_thread_is_raised_and_the_next_version_is_whole(tmp_path: Path, steps_before: int) -> None:
    run = Run(str(tmp_path), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "encode", lambda *_: 1 / 0)
        for _ in range(steps_before):
            run.step()
        with pytest.raises(ZeroDivisionError):
            run.published.update()
    run.step()
    assert run.published.update().anchor
    run.step()
    run.compare()
    run.engine.close()


def held(run: Run) -> int:
    """Bytes of the changes that wait for the next version."""
    changes = run.published._changes
    changes._wait()
    return sum(len(data) for log in changes._logs.values() for data in (log.payloads or {}).values())


def test_changes_of_many_steps_take_no_more_memory_than_the_values(tmp_path: Path) -> None:
    run = Run(str(tmp_path), 2)
    dense, most = run.published.last.dense, 0
    for _ in range(12):
        run.step()
        most = max(most, held(run))
    assert 0 < most <= dense
    with counted() as found:
        run.compare()
    assert found["dense"]
    with counted() as found:
        run.step()
        run.compare()
    assert found["coded"] and not found["dense"]
    run.engine.close()


def test_nothing_is_recorded_once_the_publisher_is_closed(tmp_path: Path) -> None:
    run = Run(str(tmp_path), 2)
    run.step()
    run.published.close()
    with counted() as found:
        run.step()
    assert found == {"coded": 0, "dense": 0, "former": 0} and held(run) == 0
    run.engine.close(gather=True)
    run.published.close()  # a second time, without a model
