"""Observers of a DeepSpeed JSON: events in files, messages, and the profile of a forward."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.compat.scripts.old_script import data, net
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.config import load_config
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine

LR, MICRO, ACCUMULATION = 0.01, 2, 2


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def start(model: nn.Module, stage: int = 2, **sections: Any) -> ScriptEngine:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        **sections,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: ScriptEngine, steps: int) -> list[float]:
    losses = []
    for x, y in list(engine.deepspeed_io(data()))[: steps * ACCUMULATION]:
        loss = engine(x, y)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def written(folder: str) -> list[float]:
    engine = start(net(), 3, csv_monitor={"enabled": True, "output_path": folder, "job_name": "run"})
    losses = train(engine, 3)
    engine.destroy()
    return losses


def test_a_file_for_each_event(ranks: Launcher, tmp_path: Path) -> None:
    losses, _ = ranks(2)(written, str(tmp_path))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "Train_Samples_train_loss.csv", "Train_Samples_lr.csv",
    }  # fmt: skip
    header, *found = rows(tmp_path / "run/Train_Samples_train_loss.csv")
    samples = MICRO * ACCUMULATION * 2
    assert header == ["step", "train_loss"] and [int(step) for step, _ in found] == [samples, 2 * samples, 3 * samples]
    means = [sum(losses[i : i + ACCUMULATION]) / ACCUMULATION for i in range(0, len(losses), ACCUMULATION)]
    assert [float(value) for _, value in found] == pytest.approx(means, rel=1e-6)
    rates = [[str(samples * step), "0.01"] for step in (1, 2, 3)]
    assert rows(tmp_path / "run/Train_Samples_lr.csv") == [["step", "lr"], *rates]


def test_fp16_writes_the_loss_scale_and_a_batch_size_may_change(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    model = nn.Linear(4, 1)
    engine = start(model, fp16=fp16, csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4).half()).float().mean())
        engine.step()
    found = rows(tmp_path / "DeepSpeedJobName/Train_Samples_loss_scale.csv")
    assert found == [["step", "loss_scale"], ["4", "256.0"]]
    engine.set_train_batch_size(8)
    assert engine.monitor is not None and engine.monitor.samples_per_step == 8


def test_pipelines_write_their_loss(tmp_path: Path) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    model = deepspeed.PipelineModule([nn.Linear(4, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
    engine = start(model, 1, csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    loss = engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 1))] * ACCUMULATION))
    _, (samples, value) = rows(tmp_path / "DeepSpeedJobName/Train_Samples_train_loss.csv")
    assert samples == "4" and float(value) == pytest.approx(float(loss))
    engine.destroy()
    with pytest.raises(ValueError, match=r"flops_profiler.* a pipeline has no forward of the whole module"):
        start(
            deepspeed.PipelineModule([nn.Linear(4, 1)], num_stages=1, loss_fn=nn.functional.mse_loss),
            flops_profiler={"enabled": True},
        )


def test_engines_without_scripts_write_too(tmp_path: Path) -> None:
    file = {"zero_optimization": {"stage": 2}, "csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    model = net()
    engine = ZeroEngine(model, load_config(file))
    install_diagnostics(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine.attach(optimizer)
    x, y = data()[:4]
    for _ in range(2):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    assert rows(tmp_path / "DeepSpeedJobName/Train_Samples_lr.csv") == [["step", "lr"], ["1", "0.01"], ["2", "0.01"]]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=f"{package}.enabled is true .*pip install {package}"):
        start(net(), **{package: {"enabled": True}})


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = start(net(), tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    losses = train(engine, 2)
    engine.destroy()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = events.Scalars("Train/Samples/train_loss")
    assert [event.step for event in found] == [4, 8]
    means = [sum(losses[i : i + ACCUMULATION]) / ACCUMULATION for i in (0, ACCUMULATION)]
    assert [event.value for event in found] == pytest.approx(means, rel=1e-6)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    engine = start(net(), wandb={"enabled": True, "project": "tried", "group": "one"})
    train(engine, 2)
    assert (wandb.run.project, wandb.run.group) == ("tried", "one")
    assert wandb.run.summary["Train/Samples/lr"] == LR
    engine.destroy()
    assert list(tmp_path.rglob("*.wandb"))


# ---- messages ----


def messages(options: dict[str, Any]) -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        engine = start(net(), 3, comms_logger={"enabled": True, **options})
        train(engine, 2)
        deepspeed.comm.log_summary()
        sent = engine.zero.counters.bytes["all_gather"]
        engine.destroy()
    return f"{sent}\n{out.getvalue()}"


def test_messages_are_summed_up(ranks: Launcher) -> None:
    first, second = ranks(2)(messages, {})
    assert "comms_logger: sent by rank 0" in first and "reduce_scatter" in first and "step" not in first
    assert "comms_logger" not in second


def test_messages_of_each_step_and_kind(ranks: Launcher) -> None:
    first, _ = ranks(2)(messages, {"verbose": True, "prof_all": False, "prof_ops": ["all_gather"]})
    lines = [line for line in first.splitlines() if line.startswith("comms_logger: step")]
    assert len(lines) == 2 and "all_gather" in lines[0] and "reduce_scatter" not in first


def test_times_are_elsewhere() -> None:
    with pytest.raises(ValueError, match="zero-strategy report"):
        deepspeed.comm.log_summary(show_straggler=True)


# ---- operations ----


def products() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_profile_of_a_forward(capsys: pytest.CaptureFixture[str], stage: int) -> None:
    model = products()
    engine = start(model, stage, flops_profiler={"enabled": True, "profile_step": 1})
    for number in range(3 * ACCUMULATION):
        before = capsys.readouterr().out
        assert ("flops_profiler: step 1" in before) == (number == ACCUMULATION + 1), number
        if number == ACCUMULATION + 1:
            report = before
        engine.backward(engine(torch.ones(5, 8)).sum())
        engine.step()
    lines = {line[:38].strip(): line[38:] for line in report.splitlines()}
    forward = 2 * 5 * (8 * 16 + 16 * 16 + 16 * 4)
    assert lines["operations of the forward"] == f"{forward / 1000:.4g} K"
    assert lines["parameters"] == str(sum(parameter.numel() for parameter in products().parameters()))
    assert lines["operations of both"] == f"{(3 * forward - 2 * 5 * 8 * 16) / 1000:.4g} K", "inputs take no gradient"
    assert f"  2: Sequential  340 (70.2 %), {2 * 5 * (16 * 16 + 16 * 4) / 1000:.4g} K (71.4 %)" in report
    assert "depth 2: parameters  Linear 340" in report
    assert len(model[0]._forward_hooks) <= 2


def test_the_profile_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"profile_step": 0, "detailed": False, "module_depth": 0, "output_file": str(tmp_path / "in/profile.txt")}
    engine = start(products(), 2, flops_profiler={"enabled": True, "recompute_fwd_factor": 1.0, **options})
    train_one = engine(torch.ones(5, 8)).sum()
    engine.backward(train_one)
    text = (tmp_path / "in/profile.txt").read_text()
    assert "modules:" not in text and "depth 1" not in text and "flops_profiler" not in capsys.readouterr().out
    forward = 2 * 5 * (8 * 16 + 16 * 16 + 16 * 4)
    assert f"{(4 * forward - 2 * 5 * 8 * 16) / 1000:.4g} K" in text
