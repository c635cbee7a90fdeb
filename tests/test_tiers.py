"""Choice of `make test`: each heading of the documentation that describes a feature, and each file of tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiers import Choice

ROOT = Path(__file__).resolve().parent.parent

FEATURES = {
    "README.md": {
        "In your own Trainer": "integrations/test_training.py",
        "Under Fabric and LightningCLI": "integrations/test_fabric.py",
        "Under Accelerate": "integrations/accelerate_face/test_training.py",
        "Pipelines": "integrations/test_pipeline.py",
        "Will it fit?": "planning/test_command.py",
        "Is it right?": "diagnostics/test_verify_faces.py",
        "Where time and memory go": "diagnostics/test_faces.py",
        "Checkpoints": "integrations/test_checkpoints.py",
        "The example": "examples/test_configs.py",
    },
    "docs/usage.md": {
        "Which stage?": "engine/test_exactness.py",
        "Notebooks": "integrations/test_registration.py",
        "Accelerate": "integrations/accelerate_face/test_prepare.py",
        "The transformers Trainer": "integrations/transformers_face/test_training.py",
        "Models too large for one process": "integrations/transformers_face/test_pretrained.py",
        "PEFT": "integrations/transformers_face/test_adapters.py",
        "Checkpoints": "integrations/test_checkpoints.py",
        "Saving without waiting": "saving/test_background.py",
        "In a loop of one's own: tags, own state, retention": "saving/test_retention.py",
        "Hosts without a shared file system, object stores": "checkpoint/test_remote.py",
        "Going on exactly where a run stopped": "integrations/test_resume.py",
        "Preemption": "integrations/test_preemption.py",
        "From DeepSpeed": "checkpoint/interop/test_deepspeed.py",
        "Pipelines, tensor parallelism and universal checkpoints of DeepSpeed": "checkpoint/interop/test_universal.py",
        "From and to other formats": "checkpoint/test_commands.py",
        "After training": "integrations/test_ends.py",
        "Different numbers of batches per rank": "integrations/test_uneven.py",
        "When ranks get out of step": "watchdog/test_desync.py",
        "Several hosts": "cluster/test_manifests.py",
        "Parameters in your own code (stage 3)": "engine/test_gathered_writes.py",
        "Models that fit no rank": "engine/test_init.py",
        "Gradients in your own code (stages 1 to 3)": "engine/test_gradients.py",
        "Optimizers": "engine/test_optimizers.py",
        "Offloading": "engine/test_offload.py",
        "Activation checkpointing": "activation/test_units.py",
        "Will it fit?": "memory/test_plan.py",
        "Is it right?": "diagnostics/test_verify_rounding.py",
        "Where time and memory go": "diagnostics/test_report.py",
        "Which rank is slow?": "diagnostics/test_straggler.py",
        "Do replicas agree?": "diagnostics/test_replica_check.py",
        "Gradients that are not finite": "engine/test_nonfinite_steps.py",
        "Where does the NaN come from?": "diagnostics/test_nonfinite.py",
        "Is the machine well?": "diagnostics/test_doctor.py",
        "Pipeline schedules": "pipeline/test_schedule_command.py",
        "Pipelines with Lightning": "integrations/test_pipeline.py",
        "Tensor parallelism": "engine/test_tensor_parallel.py",
        "Native ops": "ops/test_functions.py",
        "Transformer layers": "transformer/test_layer.py",
        "Models as pipelines": "pipeline/test_module.py",
        "In a loop of one's own": "pipeline/test_engine.py",
        "Pipelines with Accelerate": "integrations/accelerate_face/test_pipelines.py",
        "DeepSpeed JSON": "config/test_deepspeed_json.py",
        "DeepSpeed scripts": "scripts/test_engine.py",
        "Pipelines in scripts": "integrations/deepspeed/test_pipe_rows.py",
        "Activation checkpointing and random states": "activation/test_rng.py",
        "Utilities": "integrations/megatron/test_on_ranks.py",
        "Settings": "config/test_schema.py",
    },
}
NOT_FEATURES = {"Install", "Try it", "Dive into the code", "Documentation", "License"}


@pytest.mark.parametrize("page", FEATURES)
def test_each_heading_of_the_documentation_has_a_test(page: str) -> None:
    """A new section needs an entry in FEATURES, and so a test in `make test`."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    headings = re.findall(r"^##+ (.*)$", text, flags=re.M)
    assert sorted(FEATURES[page]) == sorted(heading for heading in headings if heading not in NOT_FEATURES)


def test_make_test_reaches_every_feature_and_every_file(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("tier") not in ("all", "quick") or request.config.args != ["tests"]:
        pytest.skip("sees the choice only where all files are collected")
    quick = Choice()
    run = {item.nodeid for item in request.session.items if item in quick}
    files = {name.partition("::")[0] for name in run}
    wanted = {f"tests/{file}" for page in FEATURES.values() for file in page.values()}
    assert not wanted - files
    assert not quick.listed - run, "tests/quick.txt names tests that are gone: run `python -m tests.choose_quick` again"
