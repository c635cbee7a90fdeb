"""Pipelines under the Trainer: what they train is what plain Lightning trains in one process."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import zero_strategy
from tests.integrations.lightning.pipelines import (
    CLOSE,
    VOCABULARY,
    WIDTH,
    Block,
    Module,
    Plain,
    layers,
    loader,
    pipeline,
)
from tests.integrations.lightning.test_registration import cli
from tests.integrations.lightning.trainers import PLAIN, error, join, trainer, weights
from tests.launcher import Launcher
from zero_strategy.integrations.lightning.namespaces import pipeline_strategy_class
from zero_strategy.pipeline.building import pipeline_layers
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.simulator import read_timeline


class Case(NamedTuple):
    copies: int = 1
    zero: int = 1
    schedule: str = "1f1b"
    precision: Any = "32-true"
    accumulate: int = 1


class Found(NamedTuple):
    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, Tensor]


def fit(module: Module, strategy: Any, case: Case, copies: int) -> Found:
    flags = {"gradient_clip_val": 0.3, "accumulate_grad_batches": case.accumulate, "precision": case.precision}
    run = trainer(strategy, **flags)
    run.fit(module, loader(copies=copies), loader(16, seed=1, copies=copies))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return Found(module.losses, metrics, run.strategy.lightning_module_state_dict())


def fit_pipeline(cases: list[Case]) -> list[Found]:
    found = []
    for case in cases:
        result = fit(Module(), pipeline(zero=case.zero, schedule=case.schedule), case, case.copies)
        found.append(result._replace(weights=dict(result.weights)))
    return found


def fit_plain(cases: list[Case]) -> list[Found]:
    return [fit(Plain(), "auto", case, 1) for case in cases]


def check(ranks: Launcher, cases: list[Case], close: float = CLOSE) -> None:
    (plain,) = ranks(1)(fit_plain, cases)
    for results in ranks(2 * cases[0].copies)(fit_pipeline, cases):
        for case, found, expected in zip(cases, results, plain, strict=True):
            assert found.losses == pytest.approx(expected.losses, rel=close), case
            assert found.metrics == pytest.approx(expected.metrics, rel=close), case
            assert error(found.weights, expected.weights) < 20 * close, case


def test_one_pipeline(ranks: Launcher) -> None:
    """Tied weights, clipping over stages, a schedule of learning rates, validation, accumulation."""
    check(ranks, [Case(), Case(zero=0, accumulate=2), Case(schedule="gpipe"), Case(schedule="zbv", accumulate=2)])


def test_copies_of_a_pipeline(ranks: Launcher) -> None:
    check(ranks, [Case(2, 3), Case(2, 2, accumulate=2)])


def test_pipeline_strategy_low_precision(ranks: Launcher) -> None:
    """Layers in the precision's context; micro-batches round as the whole batch does, but sums of them do not."""
    check(ranks, [Case(precision="bf16-mixed"), Case(precision="16-mixed")], close=2e-2)


def bf16_weights() -> tuple[bool, list[float]]:
    module = Module()
    fit(module, pipeline(), Case(precision="bf16-true"), 1)
    return all(p.dtype == torch.bfloat16 for p in module.parameters()), module.losses


def test_bf16_true(ranks: Launcher) -> None:
    (plain,) = ranks(1)(fit_plain, [Case()])
    for low, losses in ranks(2)(bf16_weights):
        assert low and losses == pytest.approx(plain[0].losses, rel=3e-2)


# ---- checkpoints, other loops ----


def save_and_go_on(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two epochs in a row, and the second one resumed from the checkpoint of the first; the weights."""
    found = []
    for epochs, path in ((2, None), (1, None), (2, f"{folder}/1/epoch=0-step=4.ckpt")):
        checkpoint = ModelCheckpoint(f"{folder}/{len(found)}", save_top_k=-1)
        run = trainer(pipeline(), max_epochs=epochs, enable_checkpointing=True, callbacks=[checkpoint])
        run.fit(Module(), loader(), ckpt_path=path)
        found.append(dict(run.strategy.lightning_module_state_dict()))
    return found[0], found[2]


def load_again(path: str, stages: int, schedule: str) -> dict[str, Tensor]:
    """One epoch more with another number of stages."""
    run = trainer(pipeline(stages, schedule=schedule), max_epochs=2)
    run.fit(Module(), loader(), ckpt_path=path)
    return dict(run.strategy.lightning_module_state_dict())


def load_plainly(path: str) -> list[str]:
    module = zero_strategy.load_from_checkpoint(Plain, path)
    return list(module.state_dict())


def test_checkpoints_know_no_stages(ranks: Launcher, tmp_path: Path) -> None:
    (whole, resumed), _ = ranks(2)(save_and_go_on, str(tmp_path))
    assert error(whole, resumed) == 0
    path = str(tmp_path / "1" / "epoch=0-step=4.ckpt")
    for stages, schedule, world in ((1, "1f1b", 1), (2, "zbv", 2), (4, "gpipe", 4)):
        for found in ranks(world)(load_again, path, stages, schedule):
            assert error(found, whole) < 1e-5, stages
    (names,) = ranks(1)(load_plainly, path)
    assert set(names) == set(whole) and all(name.startswith("pipeline.") for name in names)


def evaluate(shape: str) -> tuple[float, Any, Any, dict[str, Any]]:
    strategy = pipeline(None, schedule=shape)
    module, run = Module(), trainer(strategy)
    tested = run.test(module, loader(20, 8), verbose=False)[0]["test_loss"]  # the last batch has 4 rows
    predicted = run.predict(module, loader(19, 8))  # 3 rows for 4 micro-batches

    class Everywhere(Module):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.pipeline.outputs(batch[0], everywhere=True)

    everywhere = trainer(pipeline(None)).predict(Everywhere(), loader(19, 8))
    return tested, predicted, everywhere, strategy.distributed_sampler_kwargs


def evaluate_plainly() -> tuple[float, Any]:
    module, run = Plain(), trainer("auto")
    return run.test(module, loader(20, 8), verbose=False)[0]["test_loss"], run.predict(module, loader(19, 8))


class Inference(Module):
    """Evaluates as Lightning does where ranks talk by NCCL."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.inference_mode():
            loss = self.pipeline.loss(batch)
        self.log("val_loss", loss.clone(), sync_dist=True)


def fit_between_evaluations() -> list[list[float]]:
    found = []
    for zero in (1, 3):
        module = Inference()
        trainer(pipeline(zero=zero), val_check_interval=2, limit_val_batches=1).fit(module, loader(), loader(2))
        found.append(module.losses)
    return found


def test_inference_mode_leaves_nothing_behind(ranks: Launcher) -> None:
    (plain,) = ranks(1)(fit_plainly)
    for found in ranks(2)(fit_between_evaluations):
        assert found == [pytest.approx(plain, rel=CLOSE)] * 2


def fit_plainly() -> list[float]:
    module = Plain()
    trainer("auto").fit(module, loader())
    return module.losses


def test_evaluation(ranks: Launcher) -> None:
    ((loss, outputs),) = ranks(1)(evaluate_plainly)
    results = ranks(2)(evaluate, "1f1b")
    assert [predicted for _, predicted, _, _ in results[:1]] == [[None] * 3]
    for tested, _, everywhere, sampler in results:
        assert tested == pytest.approx(loss, rel=1e-6)
        assert sampler == {"num_replicas": 1, "rank": 0}
        torch.testing.assert_close(everywhere, outputs)
    torch.testing.assert_close(results[1][1], outputs)


def predict_by_copies(rows: int) -> Any:
    """Copies have batches of different sizes at the end, or none."""
    run = trainer(pipeline(2, 3), use_distributed_sampler=True)
    return run.predict(Module(), loader(rows, 4))


def predict_plainly(rows: int) -> Any:
    return trainer("auto").predict(Plain(), loader(rows, rows))


def test_copies_with_different_batches(ranks: Launcher) -> None:
    for rows in (17, 19):
        ((expected,),) = ranks(1)(predict_plainly, rows)
        results = ranks(4)(predict_by_copies, rows)
        for copy in range(2):
            assert len(results[copy]) == len(results[2 + copy]) and not any(x is not None for x in results[copy])
            torch.testing.assert_close(torch.cat(results[2 + copy]), expected[copy::2])


# ---- settings ----


def test_pipeline_strategy_settings() -> None:
    strategy = zero_strategy.PipelineStrategy(stages=2, schedule="zbv", micro_batches=8, zero_stage=2, prefetch=3)
    config = strategy.config
    assert (config.stage, config.prefetch) == (2, 3)
    assert (config.pipeline.stages, config.pipeline.schedule, config.pipeline.micro_batches) == (2, "zbv", 8)
    merged = zero_strategy.PipelineStrategy({"pipeline": {"stages": 4, "gather": "per_step"}}, stages=2).config
    assert (merged.stage, merged.pipeline.stages, merged.pipeline.gather) == (1, 2, "per_step")
    assert zero_strategy.PipelineStrategy({"stage": 3}).config.stage == 3
    with pytest.raises(ValueError, match=r"zero_stage=1 and stage=2"):
        zero_strategy.PipelineStrategy(zero_stage=1, stage=2)
    copied = pickle.loads(pickle.dumps(strategy))
    assert type(copied) is type(strategy) and copied.config == strategy.config


def test_pipeline_strategy_command_line() -> None:
    flags = ["--trainer.strategy=zero_strategy.PipelineStrategy", "--trainer.strategy.stages=1"]
    flags += ["--trainer.strategy.schedule=gpipe", "--trainer.strategy.zero_stage=2", "--trainer.strategy.prefetch=4"]
    config = cli(*flags).strategy.config
    assert (config.pipeline.schedule, config.stage, config.prefetch) == ("gpipe", 2, 4)


def stages_of_names() -> list[tuple[int, str]]:
    found = []
    for value in (None, "1"):
        os.environ.pop("ZERO_STRATEGY_PIPELINE_STAGES", None)
        if value is not None:
            os.environ["ZERO_STRATEGY_PIPELINE_STAGES"] = value
        for namespace in (pl, pytorch_lightning):
            join()
            run = namespace.Trainer(strategy="pipeline", devices=2, **PLAIN)
            settings = dict(run.strategy._resolve().settings())
            found.append((settings["pipeline.stages"].value, settings["pipeline.stages"].origin))
    return found


def test_registered_name(ranks: Launcher) -> None:
    for found in ranks(2)(stages_of_names):
        assert found[:2] == [(2, "derived: all ranks")] * 2
        assert found[2:] == [(1, "ZERO_STRATEGY_PIPELINE_STAGES")] * 2


# ---- other files, other namespaces ----


def from_ddp(folder: str) -> dict[str, Tensor]:
    """A checkpoint file of plain Lightning, loaded into two stages and saved again in a folder."""
    run = trainer(pipeline(2, schedule="zbv"))
    (tested,) = run.test(Module(), loader(), ckpt_path=f"{folder}/plain.ckpt", verbose=False)
    run.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    again = trainer(pipeline(2)).test(Module(), loader(), ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    assert again == [tested]
    resumed = trainer(pipeline())  # an epoch that is over; with optimizer state: see test_pipeline_files.py
    resumed.fit(Module(), loader(), ckpt_path=f"{folder}/plain.ckpt")
    assert resumed.global_step == 4
    return dict(run.strategy.lightning_module_state_dict())


def save_plainly(folder: str) -> dict[str, Tensor]:
    run = trainer("auto")
    run.fit(Plain(), loader())
    run.save_checkpoint(f"{folder}/plain.ckpt")
    return weights(run.lightning_module)


class OfTheOther(pytorch_lightning.LightningModule):
    pipeline: PipelineModule
    configure_pipeline = Module.configure_pipeline
    pipeline_loss = Module.pipeline_loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.pipeline.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-2)


def other_namespace() -> float:
    join()
    strategy = pipeline_strategy_class("pytorch_lightning")(stages=2, micro_batches=4)
    flags = {**PLAIN, "devices": 2, "max_epochs": 1, "enable_checkpointing": False, "use_distributed_sampler": False}
    run = pytorch_lightning.Trainer(strategy=strategy, **flags)
    run.fit(OfTheOther(), loader())
    return float(run.callback_metrics["train_loss"])


def given_module(timeline: str) -> tuple[float, int]:
    """A PipelineModule and the loss function that it brings along; an epoch more with the same module."""

    class Given(Module):
        def configure_pipeline(self) -> Any:
            torch.manual_seed(0)
            return PipelineModule(layers(), 2, loss_fn=super().pipeline_loss, partition_method="uniform")

    module = Given()
    for _ in range(2):
        run = trainer(zero_strategy.PipelineStrategy(micro_batches=4, timeline=timeline))
        run.fit(module, loader())
    assert run.callback_metrics["train_loss"] == module.losses[-1]
    return module.losses[3], len(module.losses)


def test_other_ways_in(ranks: Launcher, tmp_path: Path) -> None:
    (plain,) = ranks(1)(save_plainly, str(tmp_path))
    assert all(error(found, plain) == 0 for found in ranks(2)(from_ddp, str(tmp_path)))
    expected = ranks(1)(fit_plainly)[0][-1]
    timeline = tmp_path / "timeline.jsonl"
    assert ranks(2)(given_module, str(timeline)) == [(pytest.approx(expected, rel=1e-6), 8)] * 2
    written = read_timeline([timeline])
    assert written.steps == [*range(1, 9)], "one engine trains the same module on"
    assert sum(event.kind == "B" for event in written.events) == 2 * 4 * 8
    assert {event.micro_batch for event in written.of_step(2).computations(1)} == {0, 1, 2, 3}
    assert ranks(2)(other_namespace) == [pytest.approx(expected, rel=5e-2)] * 2


class Net(nn.Module):
    """A model that is no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight


class Wrapped(Module):
    def configure_pipeline(self) -> Any:
        torch.manual_seed(0)
        return pipeline_layers(Net(), "blocks", embedding="embed", head="out")


class WrappedPlainly(Plain):
    def configure_model(self) -> None:
        self.pipeline = PipelineModule(Wrapped().configure_pipeline(), 1, loss_fn=self.pipeline_loss, rank=0)


def fit_recipe(plain: bool) -> tuple[list[float], list[str]]:
    module = WrappedPlainly() if plain else Wrapped()
    run = trainer("auto" if plain else pipeline(schedule="auto"))
    run.fit(module, loader())
    return module.losses, sorted(run.strategy.lightning_module_state_dict())


def test_recipe_and_schedule_by_measurement(ranks: Launcher) -> None:
    ((losses, names),) = ranks(1)(fit_recipe, True)
    assert "pipeline.blocks.3.linear.weight" in names
    assert ranks(2)(fit_recipe, False) == [(pytest.approx(losses, rel=CLOSE), names)] * 2
