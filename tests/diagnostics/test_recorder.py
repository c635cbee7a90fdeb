"""Records of steps: they add up, agree with the counters, and change nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.models import build, loss_fn, make_batch
from zero_strategy.config import load_config
from zero_strategy.diagnostics.recorder import StepRecorder, install_diagnostics, record
from zero_strategy.diagnostics.run_files import RecordedRun, read_run
from zero_strategy.engine import ZeroEngine
from zero_strategy.survive.history import History, Left

STEPS, ACCUMULATION, WAIT = 3, 2, 0.02


@dataclass(frozen=True)
class Trained:
    weights: dict[str, Tensor]
    wall: float
    """Seconds from before the first forward to the end of the last `step()`."""
    last_write: float
    """Of those at most so many are after what was measured."""
    bytes: dict[str, int]
    losses: list[float]


def train(
    config: dict[str, Any], steps: int = STEPS, *, wait: float = 0.0, evaluate: bool = False, save: Path | None = None
) -> Trained:
    model = build("transformer")
    engine = ZeroEngine(model, load_config(**config, units={"min_numel": 0}))
    install_diagnostics(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.attach(optimizer)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses, last_step = [], 0.0
    engine.counters.reset()
    begin = time.perf_counter()
    for step in range(steps):
        if step:
            time.sleep(wait)
        found = []
        for index in range(ACCUMULATION):
            batch = make_batch("transformer", 10 * step + index, 4)[2 * rank : 2 * rank + 2]
            with contextlib.nullcontext() if index else engine.no_sync():
                loss = loss_fn(model, batch)
                engine.check_loss(loss)
                (loss / ACCUMULATION).backward()
            found.append(loss.item())
        losses.append(sum(found) / len(found))
        engine.clip_grad_norm_(1.0)
        last_step = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                model(make_batch("transformer", 1, 2).inputs)
                time.sleep(wait)
        if save is not None:
            engine.save(save / str(step))
    sent = dict(engine.counters.bytes)
    if isinstance(recorder := engine.observed.observer, StepRecorder):
        recorder.close()
        assert engine.observed.observer is None
    return Trained(engine.full_state_dict(), end - begin, end - last_step, sent, losses)


def check_adds_up(run: RecordedRun, trained: Trained, rank: int = 0) -> None:
    records = run.steps[rank]
    for found in records:
        assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=1e-6)
        assert min(found.parts.values()) >= 0
    # From the first forward to the end of the last step, nothing left out; writing down the last one is not in it.
    total = sum(found.seconds for found in records)
    assert total <= trained.wall <= total + trained.last_write + 0.05 * trained.wall + 0.05


CONFIGS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero3": {"stage": 3},
    "nvme": {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "probe_seconds": 0.0}},
}


def recorded(config: dict[str, Any], directory: Path) -> Trained:
    return train(config | {"diagnostics": {"run_dir": str(directory), "memory_every_n_steps": 2}})


def train_all(directory: Path) -> tuple[dict[str, Trained], Trained]:
    """Names of recorded figures, and one that is not recorded."""
    found = {}
    for name, config in CONFIGS.items():
        if name == "nvme":
            config = {**config, "offload": {**config["offload"], "nvme_path": [str(directory)]}}
        found[name] = recorded(config, directory / name)
    return found, train(CONFIGS["zero3"])


def check_records(run: RecordedRun, rank: int, trained: Trained) -> None:
    check_adds_up(run, trained, rank)
    records = run.steps[rank]
    for kind in ("all_gather", "reduce_scatter", "control"):
        written = sum(one.flows[kind].nbytes for one in records if kind in one.flows)
        assert written == trained.bytes.get(kind, 0) > 0, kind
    assert [one.loss for one in records] == pytest.approx(trained.losses, rel=1e-6)
    assert [one.tokens for one in records] == [ACCUMULATION * 2 * 12] * STEPS
    assert {one.operations for one in records} == {records[0].operations} and records[0].operations
    assert all("reduce_scatter" in one.parts and "all_gather" in one.parts for one in records)
    assert [one.memory is not None for one in records] == [True, False, True]
    assert run.traces[rank].keys() == {1, 2, 3}


def test_two_ranks_record_what_they_sent_and_train_the_same(ranks: Launcher, tmp_path: Path) -> None:
    for rank, (found, plain) in enumerate(ranks(2)(train_all, tmp_path)):
        for tensor, value in plain.weights.items():
            assert torch.equal(found["zero3"].weights[tensor], value), tensor
        for name in CONFIGS:
            run = read_run(tmp_path / name)
            assert list(run.steps) == [0, 1] and run.facts["ranks"]["world"] == 2
            check_records(run, rank, found[name])
            check_disk(run, rank, name == "nvme")


def check_disk(run: RecordedRun, rank: int, used: bool) -> None:
    records = run.steps[rank]
    assert used == any(one.flows["disk_read"].nbytes > 0 for one in records if "disk_read" in one.flows)
    assert used == any("disk" in one.parts for one in records)
    memory = records[0].memory
    assert memory is not None and memory.resident > 0 and ("nvme" in memory.tiers) == used


def test_what_comes_from_host_memory_is_copied(tmp_path: Path) -> None:
    trained = recorded({"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}, tmp_path)
    run = read_run(tmp_path)
    check_adds_up(run, trained)
    for one in run.steps[0]:
        assert one.parts["copies"] > 0 and one.flows["copy"].nbytes > 0 and "all_gather" not in one.parts


def test_waiting_evaluating_and_saving_are_parts_of_their_own(tmp_path: Path) -> None:
    config = {"stage": 0, "diagnostics": {"run_dir": str(tmp_path / "run"), "trace_steps": 1}}
    train(config, wait=WAIT, evaluate=True, save=tmp_path)
    run = read_run(tmp_path / "run")
    first, second, _ = run.steps[0]
    assert "evaluation" not in first.parts and "checkpoint" not in first.parts
    assert second.parts["evaluation"] >= WAIT and second.parts["checkpoint"] > 0
    assert second.parts["compute"] > 0 and second.parts["optimizer"] > 0
    assert second.seconds == pytest.approx(sum(second.parts.values()))
    assert run.traces[0].keys() == {1}
    metrics = second.metrics()
    assert metrics["zero/step_time/total"] == second.seconds
    assert metrics["zero/step_time/evaluation"] == second.parts["evaluation"]
    assert metrics["zero/tokens_per_second"] == pytest.approx(2 * 2 * 12 / second.seconds)
    assert first.metrics()["zero/memory/device/parameters"] > 0
    assert "zero/mfu" not in metrics


def test_data_that_is_waited_for_is_told(tmp_path: Path) -> None:
    config = {"stage": 2, "diagnostics": {"run_dir": str(tmp_path), "peak_tflops": 0.001}}
    trained = train(config, wait=WAIT)
    run = read_run(tmp_path)
    check_adds_up(run, trained)
    assert all(one.parts["data_wait"] >= WAIT for one in run.steps[0][1:])
    assert all(one.mfu == pytest.approx(one.operations / (1e9 * one.seconds)) for one in run.steps[0] if one.operations)


def test_one_step_in_several_and_a_run_that_goes_on(tmp_path: Path) -> None:
    config = {"stage": 3, "diagnostics": {"run_dir": str(tmp_path), "every_n_steps": 2, "trace_steps": 0}}
    train(config, steps=5)
    assert read_run(tmp_path).numbers == [2, 4]
    with (tmp_path / "steps-0.jsonl").open("a") as file:
        file.write('{"step": 6, "ra')  # killed in the middle of a line
    assert read_run(tmp_path).numbers == [2, 4]
    train(config, steps=7)
    run = read_run(tmp_path)
    assert run.numbers == [2, 4, 6] and not run.traces
    (tmp_path / "steps-0.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"steps-0\.jsonl, line 1: no record of a step"):
        read_run(tmp_path)


def test_closures_optimizers_and_errors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = ZeroEngine(model, load_config(stage=1, diagnostics={"run_dir": str(tmp_path)}))
    install_diagnostics(engine)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    engine.attach(*optimizers)
    with pytest.raises(ValueError, match="observed already"):
        record(engine)
    other = ZeroEngine(nn.Linear(2, 2), load_config(diagnostics={"run_dir": str(tmp_path)}))
    install_diagnostics(other)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(2, 4)).mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizers[0].step(closure)
        optimizers[1].step()
    copied = copy.deepcopy(model)
    copied(torch.ones(2, 4))
    recorder = engine.observed.observer
    assert isinstance(recorder, StepRecorder) and recorder.last is not None
    assert recorder.last.step == 2 and recorder.last.parts["optimizer"] > 0 and recorder.last.parts["compute"] > 0
    assert recorder.take_metrics() and recorder.take_metrics() is None
    assert (tmp_path / "engine-2").is_dir()
    assert other.observed.observer is not None


def test_a_history_goes_to_the_file_and_to_loggers(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    config = load_config(stage=1, diagnostics={"run_dir": str(tmp_path), "every_n_steps": 2})
    engine = ZeroEngine(model, config)
    install_diagnostics(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    history = History()
    history.begin(1.0, 2, ["000000:a", "000001:a"], Left("", torn=False))
    for number in range(1, 5):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        metrics = engine.step_metrics()
        if number == 3:
            history.begin(4.0, 1, ["000000:a"], Left("rank 1 is gone", torn=True))
        told = history.copied(number, 2.0 * number)
        engine.observed.mark("copied", (told, history))
        assert bool(metrics) == (number % 2 == 0)
    # After the third copy, at 6: 2 of 4 s.
    assert [metrics[f"zero/{name}"] for name in ("deaths", "stall_seconds", "goodput")] == [1.0, 2.0, 0.5]
    assert [(each.number, each.went) for each in read_run(tmp_path).beginnings] == [(1, []), (2, [1])]


def test_a_recorder_goes_with_its_engine(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    engine = ZeroEngine(model, load_config(stage=3, diagnostics={"run_dir": str(tmp_path)}))
    install_diagnostics(engine)
    model(torch.ones(2, 4)).mean().backward()
    gone = [weakref.ref(engine), weakref.ref(engine.observed.observer)]
    del engine, model
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert not read_lines(tmp_path / "steps-0.jsonl")


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_nothing_is_loaded_or_done_unless_it_is_asked_for() -> None:
    engine = ZeroEngine(nn.Linear(2, 2), load_config())
    install_diagnostics(engine)
    assert engine.observed.observer is None
    assert engine.observed.span("disk") is engine.observed.span("clip")
    assert engine.observed.transfer("disk_read", 1) is None
    with pytest.raises(ValueError, match=r"diagnostics\.run_dir is empty"):
        record(engine)


def test_settings_that_nobody_carries_out_are_an_error_at_the_first_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    engine = ZeroEngine(model, load_config(diagnostics={"run_dir": str(tmp_path)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"diagnostics\.run_dir is .*install_diagnostics\(engine\)"):
        optimizer.step()
    install_diagnostics(engine)
    optimizer.step()
    assert len(read_lines(tmp_path / "steps-0.jsonl")) == 1


def test_lines_are_plain_json(tmp_path: Path) -> None:
    train({"stage": 0, "diagnostics": {"run_dir": str(tmp_path)}}, steps=2)
    lines = [json.loads(line) for line in (tmp_path / "steps-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"step", "rank", "time", "seconds", "parts", "flows", "loss", "tokens", "samples"} <= lines[0].keys()
    traced = [json.loads(line) for line in (tmp_path / "trace-0.jsonl").read_text().splitlines()]
    for one, next_one in itertools.pairwise(row for row in traced[1]["intervals"] if row[1] == "phase"):
        assert one[2] <= one[3] <= next_one[2] + 1e-6
