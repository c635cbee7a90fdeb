"""`verify` of pipelines passes what is right, at every stage, schedule and precision, and names the stage if not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launcher import Launcher
from tests.verify.defects import PIPELINE_DEFECTS
from tests.verify.subjects import layered
from zero_strategy.config import load_config
from zero_strategy.verify import verify, verify_here
from zero_strategy.verify.compare import VerifyReport
from zero_strategy.verify.pipeline import PipelineRun
from zero_strategy.verify.subject import VerifySettings

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Config, its section of pipelines, settings."""


def verified(cases: list[Case]) -> list[VerifyReport]:
    return [
        verify_here(layered, load_config({**config, "pipeline": {"stages": 2, **pipeline}}), VerifySettings(**settings))
        for config, pipeline, settings in cases
    ]


def check(ranks: Launcher, count: int, cases: list[Case]) -> list[VerifyReport]:
    everyone = ranks(count, timeout=150)(verified, cases)
    for case, report in zip(cases, everyone[0], strict=True):
        assert report.passed, f"{case}\n{report}"
        assert all(phase.equal == phase.compared for phase in report.phases), f"{case}\n{report}"
        assert (report.ranks, report.pipeline_stages, report.steps) == (count, 2, case[2].get("steps", 2))
        counts = {phase.phase: phase.compared for phase in report.phases}
        # embedding, 4 x (shift, unused, norm, up, down), norm: the tied one has one name
        assert counts["parameter"] == (1 + 4 * 8 + 2) * report.steps and counts["gradient"] == counts["parameter"]
        assert counts["loss"] == case[1].get("micro_batches", 2) * report.steps
        assert counts["mean loss"] == report.steps
        assert counts["buffer"] == 4 * report.steps
    assert all(reports == everyone[0] for reports in everyone)
    return everyone[0]


TWO: dict[str, Any] = {"steps": 2, "clip_norm": 0.5}


def test_two_stages(ranks: Launcher) -> None:
    three = {"micro_batches": 3}
    cases: list[Case] = [
        *(({"stage": stage}, three, TWO) for stage in range(4)),
        ({"stage": 1}, {"schedule": "gpipe", "micro_batches": 3}, TWO),
        ({"stage": 2}, {"schedule": "interleaved_1f1b", "micro_batches": 4}, TWO),
        ({"stage": 1}, {"schedule": "zb_h1", "micro_batches": 3}, TWO),
        ({"stage": 3}, {"schedule": "zbv"}, TWO),
        ({"stage": 2}, three, {**TWO, "compute_dtype": torch.bfloat16}),
        ({"stage": 1}, {}, {"steps": 1, "autocast": torch.bfloat16, "tolerance": 8.0}),
        ({"stage": 1, "offload": {"optimizer": "cpu"}}, {}, TWO),
        ({"stage": 2, "loss_scale": {"initial": 1024.0}}, {}, {**TWO, "compute_dtype": torch.float16}),
    ]
    check(ranks, 2, cases)


def test_two_stages_in_two_copies(ranks: Launcher) -> None:
    cases: list[Case] = [
        *(({"stage": stage}, {"micro_batches": 3}, TWO) for stage in (1, 2, 3)),
        ({"stage": 2}, {"schedule": "interleaved_1f1b", "chunks": 2}, {**TWO, "compute_dtype": torch.bfloat16}),
    ]
    reports = check(ranks, 4, cases)
    assert "stage 1 on 4 rank(s), 2 pipeline stages, against plain torch" in str(reports[0])


class OldWeightsInOneCopy(PipelineRun):
    """A rank does not get the new weights of the other one of its stage."""

    def update(self) -> None:
        before = [bucket.flat.clone() for bucket in self.engine.model.buckets]
        super().update()
        for bucket, values in zip(self.engine.model.buckets, before, strict=True):
            if self.control.rank == 3:
                bucket.flat[: bucket.slice.start] = values[: bucket.slice.start]


def with_old_weights() -> VerifyReport:
    config = load_config(stage=1, pipeline={"stages": 2})
    return verify_here(layered, config, VerifySettings(steps=1), OldWeightsInOneCopy)


def test_the_rank_and_its_stage_are_named(ranks: Launcher) -> None:
    found = ranks(4)(with_old_weights)[0].first
    assert found is not None and (found.step, found.phase, found.rank) == (0, "parameter", 3)
    assert "rank 3 (stage 1): " in str(found) and "another rank has other values" in str(found)


def with_defects(tolerance: float | None, names: list[str]) -> dict[str, VerifyReport]:
    found = {}
    for name in names:
        case = PIPELINE_DEFECTS[name]
        config = load_config(pipeline={"stages": 2, "micro_batches": 3}, **case.config)
        settings = VerifySettings(steps=2, tolerance=tolerance, **case.settings)
        found[name] = verify_here(layered, config, settings, case.run)
    return found


@pytest.mark.parametrize("tolerance", [None, 8.0], ids=["by bits", "within rounding"])
def test_pipeline_verify_every_defect_is_caught(ranks: Launcher, tolerance: float | None) -> None:
    assert len(PIPELINE_DEFECTS) >= 3
    first, second = ranks(2, timeout=150)(with_defects, tolerance, list(PIPELINE_DEFECTS))
    assert first == second
    wrong = {}
    for name, report in first.items():
        case, found = PIPELINE_DEFECTS[name], report.first
        if found is None or found.phase != case.phase or case.name not in found.name or found.rank not in case.ranks:
            wrong[name] = f"{report}, wanted {case.phase} of {case.name!r} on {case.ranks}"
        elif found.times is not None and found.times < 50:
            wrong[name] = f"only {found.times:.3g} times what re-ordered summation explains: {found}"
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())


def whole_model() -> Any:
    _, optimizer, batches, loss = layered()
    return torch.nn.Linear(2, 2), optimizer, batches, loss


def no_pairs() -> Any:
    layers, optimizer, batches, loss = layered()
    return layers, optimizer, [inputs for inputs, _ in batches], loss


def refused() -> list[str]:
    found = []
    for factory, pipeline, settings in [
        (whole_model, {}, {}),
        (no_pairs, {}, {}),
        (layered, {"schedule": "auto"}, {}),
        (layered, {"micro_batches": 3}, {"accumulation": 2}),
    ]:
        try:
            verify(factory, {"stage": 1, "pipeline": {"stages": 2, **pipeline}}, steps=1, **settings)  # type: ignore[arg-type]
        except ValueError as error:
            found.append(str(error))
    return found


def test_pipeline_verify_what_does_not_fit_is_refused(ranks: Launcher) -> None:
    for found in ranks(2)(refused):
        assert "the factory's layers are a Linear" in found[0] and "return (layers, optimizer" in found[0]
        assert "a Tensor among them, not pairs" in found[1]
        assert "pipeline.schedule is 'auto'" in found[2]
        assert "accumulation is 2, but pipeline.micro_batches is 3" in found[3]


class Lightning(torch.nn.Module):
    """Parts of a LightningModule, of which nothing else is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.made, _, self.pipeline_loss = layered()

    def configure_pipeline(self) -> Any:
        return self.layers

    def configure_optimizers(self) -> Any:
        return self.made(self)

    def pipeline_batch(self, batch: dict[str, torch.Tensor]) -> Any:
        return batch["inputs"], batch["labels"]


def lightning_module() -> Any:
    module = Lightning()
    return module, [{"inputs": inputs, "labels": labels} for inputs, labels in layered()[2]]


def of_a_lightning_module() -> VerifyReport:
    return verify(lightning_module, {"stage": 2, "pipeline": {"stages": 2}}, steps=1)


def test_pipeline_verify_lightning_module(ranks: Launcher) -> None:
    report = ranks(2)(of_a_lightning_module)[0]
    assert report.passed and (report.stage, report.pipeline_stages) == (2, 2), report
