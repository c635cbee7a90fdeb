"""Choice of `make test`: each page of the documentation that describes a feature, and each file of tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tiers import Choice

ROOT = Path(__file__).resolve().parent.parent

FEATURES = {
    "quickstart/lightning.md": ["integrations/lightning/test_training.py", "integrations/lightning/test_fabric.py"],
    "quickstart/accelerate.md": [
        "integrations/accelerate/test_training.py", "integrations/accelerate/test_prepare.py",
    ],
    "quickstart/transformers.md": ["integrations/huggingface/test_training.py"],
    "quickstart/scripts.md": ["engine/test_exactness.py"],
    "guides/activation_checkpointing.md": ["activation/test_units.py", "activation/test_budget.py"],
    "guides/averages.md": [
        "optim/test_averages.py", "integrations/lightning/test_averaging.py",
        "integrations/huggingface/test_averages.py",
    ],
    "guides/checkpoints.md": [
        "integrations/lightning/test_checkpoints.py", "checkpoint/test_background_saves.py",
        "checkpoint/test_removals.py",
        "checkpoint/test_remote.py",
        "cli/test_diff.py",
        "cli/test_diff_runs.py",
    ],
    "guides/deepspeed_json.md": ["config/test_deepspeed_json.py"],
    "guides/deepspeed_scripts.md": [
        "compat/scripts/test_engine.py", "compat/deepspeed/test_pipe_rows.py", "activation/test_rng.py",
    ],
    "guides/experts.md": [
        "experts/test_training.py", "experts/test_routing.py", "experts/test_checkpoints.py",
        "integrations/huggingface/test_experts.py", "planning/test_expert_plan.py",
    ],
    "guides/export.md": ["integrations/huggingface/test_pretrained.py"],
    "guides/hangs.md": ["watchdog/test_desync.py"],
    "guides/inference_servers.md": [
        "publish/test_weights.py", "publish/test_publish.py", "publish/test_recorder.py", "publish/test_served.py",
    ],
    "guides/large_models.md": ["fsdp/test_init.py", "integrations/huggingface/test_pretrained.py"],
    "guides/long_context.md": [
        "sequence/test_attention.py",
        "sequence/test_training.py",
        "integrations/huggingface/test_sequence.py",
    ],
    "guides/float8.md": ["engine/test_float8.py"],
    "guides/lora.md": ["integrations/huggingface/test_adapters.py"],
    "guides/qlora.md": ["integrations/huggingface/test_quantised.py", "quantized/test_engine.py"],
    "guides/measuring.md": [
        "diagnostics/test_integrations.py", "diagnostics/test_report.py", "compat/megatron/test_straggler.py",
        "cli/test_doctor.py",
    ],
    "guides/memory.md": ["planning/test_command.py", "planning/test_plan.py", "planning/test_finetuning.py"],
    "guides/migrating.md": ["compat/deepspeed/test_names.py"],
    "guides/multi_node.md": ["cluster/test_manifests.py", "fsdp/test_changed_values.py"],
    "guides/nans.md": ["diagnostics/test_nonfinite.py", "compat/megatron/test_replica_check.py"],
    "guides/notebooks.md": ["integrations/lightning/test_registration.py"],
    "guides/offloading.md": ["offload/test_state_in_files.py"],
    "guides/ops.md": ["ops/test_functions.py", "compat/transformer/test_layer.py"],
    "guides/optimizers.md": [
        "optim/test_optimizers.py", "optim/test_matrix_optimizers.py", "optim/test_lbfgs.py",
    ],
    "guides/other_libraries.md": ["optim/test_matrix_optimizers.py"],
    "guides/other_checkpoints.md": [
        "convert/interop/test_deepspeed.py", "convert/interop/test_universal.py", "cli/test_checkpoint_commands.py",
    ],
    "guides/parameters_and_gradients.md": [
        "fsdp/test_gathered_writes.py", "fsdp/test_gradients.py", "integrations/test_ends.py",
    ],
    "guides/pipelines.md": [
        "integrations/lightning/test_pipeline.py", "pipeline/test_module.py", "pipeline/test_engine.py",
        "integrations/accelerate/test_pipelines.py",
    ],
    "guides/precision.md": ["optim/test_nonfinite_steps.py"],
    "guides/preemption.md": ["integrations/lightning/test_preemption.py", "integrations/lightning/test_resume.py"],
    "guides/ray.md": ["integrations/lightning/test_launched_counts.py", "integrations/ray/test_reports.py"],
    "guides/reproducible.md": [
        "reproducible/test_slots.py", "reproducible/test_refusals.py", "integrations/lightning/test_slots.py",
    ],
    "guides/replay.md": ["replay/test_runs.py"],
    "guides/schedules.md": ["pipeline/test_schedule_command.py"],
    "guides/stages.md": ["engine/test_exactness.py"],
    "guides/auto.md": ["auto/test_choice.py"],
    "guides/survive.md": ["survive/test_copies.py"],
    "guides/tensor_parallelism.md": ["fsdp/test_tensor_parallel.py", "integrations/huggingface/test_tensor_models.py"],
    "guides/uneven_batches.md": ["integrations/lightning/test_uneven.py"],
    "guides/utilities.md": ["compat/megatron/test_on_ranks.py"],
    "guides/verify.md": [
        "verify/test_calls.py", "verify/test_rounding.py", "verify/test_against_calls.py",
    ],
    "reference/settings.md": ["config/test_schema.py"],
    "../README.md": ["examples/test_configs.py"],
}  # fmt: skip
"""Files of tests by the page that describes the feature."""


def test_each_page_of_the_documentation_that_describes_a_feature_has_a_test() -> None:
    """A new page needs an entry in FEATURES, and so a test in `make test`."""
    pages = [path for folder in ("quickstart", "guides") for path in (ROOT / "docs" / folder).glob("*.md")]
    assert {str(path.relative_to(ROOT / "docs")) for path in pages} <= FEATURES.keys()
    assert all((ROOT / "docs" / page).is_file() for page in FEATURES)


def test_folders_are_those_of_the_package_or_named_here() -> None:
    packages = {path.name for path in (ROOT / "zero_strategy").iterdir() if (path / "__init__.py").is_file()}
    others = {"attack", "benchmarks", "cluster", "conformance", "device", "engine", "examples", "gpu"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert folders <= packages | others


def test_no_two_tests_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                files.setdefault(node.name, []).append(path.name)
    assert not {name: found for name, found in files.items() if len(found) > 1}


def test_make_test_reaches_every_feature_and_every_file(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("tier") not in ("all", "quick") or request.config.args != ["tests"]:
        pytest.skip("sees the choice only where all files are collected")
    quick = Choice()
    run = {item.nodeid for item in request.session.items if item in quick}
    chosen = {name.partition("::")[0] for name in run}
    wanted = {f"tests/{file}" for files in FEATURES.values() for file in files}
    assert not wanted - chosen
    assert not quick.listed - run, "tests/quick.txt names tests that are gone: run `python -m tests.choose_quick` again"
