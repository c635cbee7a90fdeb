"""The dataclasses by themselves: defaults, checks, documentation, OmegaConf and the import path."""

import ast
import dataclasses
import inspect
import itertools
import subprocess
import sys
import typing

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from zero_strategy.config import (
    ActivationCheckpointingConfig,
    AutoConfig,
    CheckpointConfig,
    CommunicationConfig,
    DiagnosticsConfig,
    LossScaleConfig,
    MeshConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    ReproducibleConfig,
    SurviveConfig,
    UnitsConfig,
    WatchdogConfig,
    ZeroConfig,
    load_config,
    schema,
)
from zero_strategy.config.section import default_of, typed_fields

SECTIONS = {
    "units": UnitsConfig,
    "mesh": MeshConfig,
    "communication": CommunicationConfig,
    "precision": PrecisionConfig,
    "optimizer": OptimizerConfig,
    "loss_scale": LossScaleConfig,
    "offload": OffloadConfig,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "pipeline": PipelineConfig,
    "checkpoint": CheckpointConfig,
    "watchdog": WatchdogConfig,
    "diagnostics": DiagnosticsConfig,
    "reproducible": ReproducibleConfig,
    "survive": SurviveConfig,
    "auto": AutoConfig,
}

DEFAULTS = {
    "stage": 3,
    "units.classes": [],
    "units.patterns": [],
    "units.min_numel": 8192,
    "units.may_skip": False,
    "mesh.replicate": 1,
    "mesh.shard": None,
    "mesh.tensor": None,
    "mesh.sequence": 1,
    "mesh.ulysses": None,
    "mesh.expert": 1,
    "communication.parameters": "values",
    "precision.master_weights": True,
    "precision.gradient_dtype": "float32",
    "precision.reduce_dtype": "float32",
    "optimizer.state_bits": 32,
    "optimizer.keep_32_bits": [],
    "gradient_reduction": None,
    "uneven_batches": "error",
    "broadcast_buffers": True,
    "nonfinite_gradients": "ignore",
    "prefetch": 1,
    "mmap_threshold": 0,
    "reshard_after_forward": True,
    "reshard_after_backward": True,
    "loss_scale.initial": 65536.0,
    "loss_scale.growth_factor": 2.0,
    "loss_scale.backoff_factor": 0.5,
    "loss_scale.growth_interval": 2000,
    "loss_scale.growth_delay": 0,
    "loss_scale.minimum": 1.0,
    "loss_scale.hysteresis": 1,
    "loss_scale.consecutive_hysteresis": False,
    "offload.optimizer": "none",
    "offload.optimizer_ratio": 1.0,
    "offload.gradients": None,
    "offload.parameters": "none",
    "offload.activations": "none",
    "offload.nvme_path": [],
    "offload.staging_bytes": 256 << 20,
    "offload.resident_bytes": 0,
    "offload.checksums": False,
    "offload.probe_seconds": 1.5,
    "activation_checkpointing.mode": "none",
    "activation_checkpointing.every_n": 2,
    "activation_checkpointing.budget": None,
    "activation_checkpointing.tile_tokens": 0,
    "pipeline.stages": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.chunks": None,
    "pipeline.micro_batches": None,
    "pipeline.partition": "parameters",
    "pipeline.gather": "per_micro_batch",
    "pipeline.gather_bytes": None,
    "pipeline.timeline": "",
    "checkpoint.max_file_bytes": 5_000_000_000,
    "checkpoint.layout": "auto",
    "checkpoint.asynchronous": True,
    "checkpoint.format": "directory",
    "checkpoint.while_saving": "wait",
    "checkpoint.bytes_per_second": 0,
    "checkpoint.timeout_seconds": 300.0,
    "checkpoint.keep_last": 0,
    "checkpoint.keep_every": 0,
    "checkpoint.frozen": "include",
    "checkpoint.random_state": True,
    "checkpoint.preemption_signals": ["SIGTERM", "SIGUSR1"],
    "checkpoint.verify": True,
    "watchdog.mode": "default",
    "watchdog.wait_seconds": 3.0,
    "watchdog.silence_seconds": 5.0,
    "watchdog.unheard_seconds": 60.0,
    "diagnostics.run_dir": "",
    "diagnostics.every_n_steps": 1,
    "diagnostics.memory_every_n_steps": 10,
    "diagnostics.trace_steps": 5,
    "diagnostics.flops": True,
    "diagnostics.peak_tflops": 0.0,
    "diagnostics.measure_peak": False,
    "diagnostics.log": True,
    "diagnostics.journal": True,
    "diagnostics.journal_weights_every_n_steps": 100,
    "diagnostics.journal_elements": 64,
    "diagnostics.journal_factory": "",
    "reproducible.slots": 0,
    "reproducible.seed": None,
    "survive.enabled": False,
    "survive.wait_seconds": 600.0,
    "auto.enabled": False,
    "auto.global_batch": 0,
    "auto.margin": 0.1,
    "elementwise_optimizers": [],
    "matrix_optimizers": [],
    "matrix_parameters": [],
    "fused_optimizers": True,
    "timeout_seconds": 1800.0,
    "barrier_seconds": 60.0,
}

BAD_VALUES = [
    ("stage", 4),
    ("stage", -1),
    ("units.classes", [""]),
    ("units.patterns", [" "]),
    ("units.min_numel", -1),
    ("mesh.replicate", 0),
    ("mesh.shard", 0),
    ("mesh.tensor", 0),
    ("mesh.expert", 0),
    ("precision.gradient_dtype", "bfloat16"),
    ("precision.reduce_dtype", "fp32"),
    ("optimizer.state_bits", 5),
    ("optimizer.keep_32_bits", [""]),
    ("gradient_reduction", "per_epoch"),
    ("uneven_batches", "drop"),
    ("nonfinite_gradients", "drop"),
    ("checkpoint.preemption_signals", ["SIGKILL"]),
    ("prefetch", -1),
    ("mmap_threshold", -1),
    ("loss_scale.initial", 0.0),
    ("loss_scale.initial", 0.5),
    ("loss_scale.initial", float("inf")),
    ("loss_scale.initial", 10**400),
    ("loss_scale.growth_factor", 1.0),
    ("loss_scale.backoff_factor", 1.0),
    ("loss_scale.backoff_factor", 0.0),
    ("loss_scale.growth_interval", 0),
    ("loss_scale.growth_delay", -1),
    ("loss_scale.minimum", 0.0),
    ("loss_scale.hysteresis", 0),
    ("offload.activations", "nvme"),
    ("activation_checkpointing.mode", "some"),
    ("activation_checkpointing.every_n", 0),
    ("activation_checkpointing.tile_tokens", -1),
    ("activation_checkpointing.budget", 0.0),
    ("activation_checkpointing.budget", 1.5),
    ("pipeline.stages", 0),
    ("pipeline.schedule", "1F1B"),
    ("pipeline.schedule", "csv:"),
    ("pipeline.chunks", 0),
    ("pipeline.micro_batches", 0),
    ("pipeline.partition", " "),
    ("pipeline.gather", "never"),
    ("pipeline.gather_bytes", -1),
    ("checkpoint.max_file_bytes", 0),
    ("elementwise_optimizers", ["Lion", ""]),
    ("timeout_seconds", 0.0),
    ("timeout_seconds", float("nan")),
    ("barrier_seconds", -1.0),
]

BAD_TYPES = [
    ("stage", "3", "expected int"),
    ("stage", True, "expected int"),
    ("stage", 2.0, "expected int"),
    ("stage", None, "expected int"),
    ("units.classes", ("Block",), "expected list[str]"),
    ("units.classes", [UnitsConfig], "expected str"),
    ("mesh.shard", "8", "expected int | None"),
    ("mesh.shard", False, "expected int | None"),
    ("precision.master_weights", 1, "expected bool"),
    ("precision.master_weights", "true", "expected bool"),
    ("precision.gradient_dtype", 32, "expected str"),
    ("gradient_reduction", 0, "expected str | None"),
    ("reshard_after_forward", 0, "expected bool"),
    ("reshard_after_backward", "no", "expected bool"),
    ("timeout_seconds", "60", "expected float"),
    ("timeout_seconds", True, "expected float"),
    ("loss_scale.minimum", None, "expected float"),
]


def construct(key: str, value: object) -> ZeroConfig:
    """Builds a config in Python with one value set."""
    section, _, name = key.rpartition(".")
    return ZeroConfig(**{section: SECTIONS[section](**{name: value})}) if section else ZeroConfig(**{name: value})


def test_defaults():
    assert {key: setting.value for key, setting in ZeroConfig().settings()} == DEFAULTS
    assert load_config() == ZeroConfig()


def test_default_lists_are_not_shared():
    ZeroConfig().units.classes.append("Block")
    assert ZeroConfig().units.classes == []


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_value_out_of_range(key, value):
    with pytest.raises(ValueError) as error:
        construct(key, value)
    message = str(error.value)
    assert message.startswith(key)
    assert "accepted: " in message
    assert repr(value[-1] if isinstance(value, list) else value) in message


@pytest.mark.parametrize(("key", "value", "expected"), BAD_TYPES)
def test_wrong_type(key, value, expected):
    with pytest.raises(TypeError) as error:
        construct(key, value)
    message = str(error.value)
    assert message.startswith(key)
    assert repr(value[0] if expected == "expected str" and isinstance(value, list) else value) in message
    assert message.endswith(expected)


def test_a_section_must_be_its_dataclass():
    with pytest.raises(TypeError, match=r"mesh is .*expected MeshConfig .load_config accepts a mapping"):
        ZeroConfig(mesh={"replicate": 2})
    with pytest.raises(TypeError, match=r"expected MeshConfig"):
        ZeroConfig(mesh=UnitsConfig())


def test_int_for_a_float_is_stored_as_a_float():
    config = ZeroConfig(timeout_seconds=30)
    assert type(config.timeout_seconds) is float and config.timeout_seconds == 30.0


def test_several_accepted_values_are_listed():
    with pytest.raises(ValueError, match=r"accepted: 'per_step', 'per_micro_batch' or None"):
        ZeroConfig(gradient_reduction="never")
    with pytest.raises(ValueError, match=r"stage is 9; accepted: 0, 1, 2, 3"):
        ZeroConfig(stage=9)


def test_loss_scale_starts_no_lower_than_its_minimum():
    with pytest.raises(ValueError, match=r"loss_scale.initial is 2.0; accepted: loss_scale.minimum \(4.0\)"):
        LossScaleConfig(initial=2, minimum=4)
    assert LossScaleConfig(initial=4, minimum=4).initial == 4


@pytest.mark.parametrize("section", [ZeroConfig, *SECTIONS.values()])
def test_every_field_has_a_docstring(section):
    body = ast.parse(inspect.getsource(section)).body[0].body
    documented = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
    assert {field.name for field in dataclasses.fields(section)} <= documented


@pytest.mark.parametrize("name", SECTIONS)
def test_prefix_is_the_place_in_the_config(name):
    assert SECTIONS[name].prefix == f"{name}."
    assert isinstance(getattr(ZeroConfig(), name), SECTIONS[name])


@pytest.mark.parametrize("source", [ZeroConfig, ZeroConfig(stage=1, mesh=MeshConfig(replicate=2))])
def test_omegaconf_structured_sees_the_settings_only(source):
    node = OmegaConf.structured(source)
    assert set(node) == {field.name for field in dataclasses.fields(ZeroConfig)}
    assert set(node.mesh) == {"replicate", "shard", "tensor", "sequence", "ulysses", "expert"}
    built = OmegaConf.to_object(node)
    assert isinstance(built, ZeroConfig)
    assert built == (ZeroConfig() if source is ZeroConfig else source)


def test_omegaconf_structured_is_typed():
    node = OmegaConf.structured(ZeroConfig)
    with pytest.raises(ValidationError):
        node.stage = "two"
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(node, {"mesh": {"replicat": 2}})


def test_range_is_checked_when_omegaconf_builds_the_object():
    node = OmegaConf.merge(OmegaConf.structured(ZeroConfig), {"mesh": {"replicate": -2}})
    with pytest.raises(ValueError, match=r"mesh.replicate is -2"):
        OmegaConf.to_object(node)


def test_types_are_of_the_kinds_that_are_checked():
    for section in [ZeroConfig, *SECTIONS.values()]:
        for field, hint in typed_fields(section):
            plain = {int, float, bool, str, list[str], int | None, float | None, str | None}
            assert hint in plain or hint in SECTIONS.values(), field.name
            assert default_of(field) == getattr(section(), field.name)
    assert typing.get_type_hints(schema.ZeroConfig)["mesh"] is MeshConfig


def test_import_needs_omegaconf_and_the_standard_library_only():
    code = """
import sys
import zero_strategy.config
loaded = {"torch", "lightning", "accelerate", "numpy", "hydra"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_one_stage_has_no_chunks():
    with pytest.raises(ValueError, match=r"pipeline\.chunks is 2 and pipeline\.stages is 1"):
        load_config(pipeline={"chunks": 2})
