"""`verify` passes what trains as one process does, at every stage and tier, and compares all there is."""

from __future__ import annotations

from typing import Any

import torch

from tests.launcher import Launcher
from tests.verify.defects import FP16, OVERFLOWS
from tests.verify.subjects import tiny
from zero_strategy.config import load_config
from zero_strategy.verify import verify_here
from zero_strategy.verify.compare import VerifyReport
from zero_strategy.verify.subject import VerifySettings

UNITS = {"min_numel": 0}


def verified(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[VerifyReport]:
    return [
        verify_here(tiny, load_config(units=UNITS, **config), VerifySettings(**settings)) for config, settings in cases
    ]


def test_what_is_right_passes(ranks: Launcher, tmp_path: Any) -> None:
    nvme = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": [str(tmp_path)]}
    several = {"steps": 3, "accumulation": 2, "clip_norm": 0.8}
    bf16 = {**several, "compute_dtype": torch.bfloat16}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({"stage": stage}, several) for stage in range(4)),
        ({"stage": 3, "gradient_reduction": "per_step", "mesh": {"replicate": 2}}, several),
        ({"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}, several),
        ({"stage": 2, "offload": {"optimizer": "cpu"}}, bf16),
        ({"stage": 3, "offload": nvme}, bf16),
        ({"stage": 3, "activation_checkpointing": {"mode": "full"}}, {"steps": 2, "autocast": torch.bfloat16}),
        ({"stage": 1}, {"steps": 2, "tolerance": 8.0}),
        *(({"stage": stage, "loss_scale": OVERFLOWS}, {**several, "compute_dtype": torch.float16}) for stage in (1, 3)),
        ({"stage": 2, "offload": {"optimizer": "cpu"}, "loss_scale": OVERFLOWS}, {**several, **FP16, "tolerance": 8.0}),
        ({"stage": 2, "loss_scale": OVERFLOWS}, {**several, "autocast": torch.float16}),
    ]
    for reports in ranks(2, timeout=120)(verified, cases):
        for (config, settings), report in zip(cases, reports, strict=True):
            assert report.passed, f"{config}, {settings}\n{report}"
            counts = {phase.phase: phase for phase in report.phases}
            assert all(phase.equal == phase.compared for phase in report.phases), report
            assert report.steps == settings["steps"] and report.ranks == 2 and not report.reason
            # blocks 2 x 6, embedding, position, scale, unused, sometimes; the head is another name
            assert counts["gradient"].compared == 17 * report.steps
            assert counts["parameter"].compared == 18 * report.steps
            assert ("clipped gradient" in counts) == ("clip_norm" in settings)
            assert ("master weight" in counts) == ("compute_dtype" in settings)
            scaled = torch.float16 in settings.values()
            assert ("loss scale" in counts) == scaled
            if "norm" in counts:  # a step that overflows is skipped
                assert counts["norm"].compared == report.steps - scaled
            assert counts["buffer"].compared == report.steps
