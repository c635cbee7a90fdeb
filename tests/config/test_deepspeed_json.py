"""DeepSpeed's JSON: every key's fate, the files in circulation, and what mistakes are told."""

from __future__ import annotations

import base64
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.config import (
    DeepSpeedSettings,
    PrecisionConfig,
    inspect_deepspeed,
    load_config,
    read_deepspeed,
    resolve,
)
from zero_strategy.config.deepspeed.keys import ROOT, TOP_LEVEL, Group
from zero_strategy.config.deepspeed.settings import BatchSettings

DATA = Path(__file__).parent / "data"
PLAIN = ("hf_zero2", "hf_zero3")
ZERO = "zero_optimization"
ON = {"enabled": True}
OFFLOADING = ("hf_zero2_offload", "hf_zero3_offload", "hf_zero3_nvme")


def listed() -> list[tuple[str, Any, str]]:
    lines = (DATA / "deepspeed_keys.txt").read_text().splitlines()[1:]
    rows = [[part.strip() for part in line.split(" | ")] for line in lines]
    return [(key, json.loads(value), verdict) for key, value, verdict in rows]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def leaves(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value and prefix != "optimizer.params." and prefix != "scheduler.params.":
        for name, inner in value.items():
            yield from leaves(inner, f"{prefix}{name}.")
    else:
        yield prefix[:-1]


def quietly(source: Any) -> DeepSpeedSettings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_deepspeed(source)


# ---- every key ----


@pytest.mark.parametrize(("key", "value", "verdict"), listed(), ids=lambda value: str(value)[:60])
def test_every_listed_key_is_classified(key: str, value: Any, verdict: str) -> None:
    config = nested(key, value)
    if key.startswith("optimizer.legacy"):
        config["optimizer"]["type"] = "Adam"
    found = inspect_deepspeed(config)
    report = next(report for report in found.found if report.path == key or report.path.startswith(key + "."))
    assert report.classification == verdict
    assert report.note or report.ours, "each key says why, or what it becomes"
    if verdict == "rejected":
        with pytest.raises(ValueError, match=r"asks for what is not done here") as error:
            read_deepspeed(config)
        assert report.path in str(error.value) and report.note in str(error.value)
    elif verdict == "accepted without effect":
        with pytest.warns(UserWarning, match="why nothing is lost") as caught:
            read_deepspeed(config)
        assert report.path in str(caught[0].message)


def test_ranks_that_divide_layers_or_sequences() -> None:
    found = load_config(
        {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    )
    assert (found.mesh.tensor, found.mesh.sequence) == (2, 1)
    assert "tensor_parallel.autotp_size" in found.origin_of("mesh.tensor")
    found = load_config({"train_batch_size": 8, "sequence_parallel_size": 4})
    assert (found.mesh.tensor, found.mesh.sequence, found.mesh.ulysses) == (None, 4, 4)
    with pytest.raises(ValueError, match=r"tensor_parallel\.preset_model.*tp_plan"):
        load_config({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}})


def test_ranks_that_divide_experts_in_deepspeeds_json() -> None:
    found = load_config({"train_batch_size": 8, "expert_parallel": {"enabled": True, "autoep_size": 4}})
    assert found.mesh.expert == 4 and "expert_parallel.autoep_size" in found.origin_of("mesh.expert")
    for idle in ({"enabled": False, "autoep_size": 4}, {"autoep_size": 4}, {"enabled": True}):
        assert quietly({"train_batch_size": 8, "expert_parallel": idle}).zero.get("mesh.expert") is None, idle
    with pytest.raises(ValueError, match=r"autoep_size is 0|mesh\.expert is 0"):
        load_config({"train_batch_size": 8, "expert_parallel": {"enabled": True, "autoep_size": 0}})
    with pytest.raises(ValueError, match=r"'expert_parallel\.ep_size'.*did you mean 'expert_parallel\.autoep_size'"):
        load_config({"train_batch_size": 8, "expert_parallel": {"enabled": True, "ep_size": 2}})


@pytest.mark.parametrize(
    ("key", "value", "way"),
    [
        ("top_k", 4, "router"),
        ("score_func", "sigmoid", "router"),
        ("routed_scaling_factor", 2.5, "router"),
        ("load_balance_coeff", 0.01, "auxiliary loss"),
        ("expert_activation", "gelu", "own forward"),
        ("expert_tensor_parallel_size", 2, "leave it at 1"),
    ],
)
def test_keys_of_experts_that_would_change_a_model(key: str, value: Any, way: str) -> None:
    section = {"enabled": True, "autoep_size": 2, key: value}
    with pytest.raises(ValueError, match=rf"'expert_parallel\.{key}: .*{way}"):
        read_deepspeed({"train_batch_size": 8, "expert_parallel": section})


def test_a_section_of_experts_with_deepspeeds_defaults() -> None:
    section = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral", "top_k": "auto", "score_func": "auto"}
    section |= {"route_scale": 1.0, "load_balance_coeff": None, "moe_layer_pattern": r"layers\.\d+\.mlp"}
    with pytest.warns(UserWarning, match=r"'expert_parallel\.preset_model': .*ep_plan"):
        found = read_deepspeed({"train_batch_size": 8, "expert_parallel": section})
    assert found.zero["mesh.expert"].value == 2


def test_the_list_and_the_table_have_the_same_keys() -> None:
    named = {key for key, _, _ in listed()}
    named |= {path for key, value, _ in listed() for path in leaves(nested(key, value))}

    def known(group: Group, prefix: str = "") -> Iterator[str]:
        for name, key in group.keys.items():
            yield from known(key, f"{prefix}{name}.") if isinstance(key, Group) else [prefix + name]

    of_others = {"autotuning.metric_path", "autotuning.model_info_path", "deepspeed_defaults", "fp32_allreduce"}
    of_others |= {f"compile.{name}" for name in ("disable", "backend", "mode", "kwargs", "fullgraph", "dynamic")}
    missing = {key for key in known(ROOT) if key not in named} - of_others
    assert missing <= {f"{name}.enabled" for name in TOP_LEVEL}, missing


@pytest.mark.parametrize("name", ["autotuning", "elasticity", "tensorboard", "flops_profiler", "wandb", "amp"])
def test_a_section_that_is_off_asks_for_nothing(name: str) -> None:
    found = quietly({name: {"enabled": False}, "zero_optimization": {"stage": 1}})
    assert [report.idle for report in found.found] == [True, False] and found.zero["stage"].value == 1


def test_rejected_keys_are_all_named_at_once() -> None:
    config = {ZERO: {"zero_quantized_weights": True, "zero_hpz_partition_size": 4}, "sparse_attention": {"a": 1}}
    with pytest.raises(ValueError) as error:
        read_deepspeed(config)
    for word in ("ZeRO++", "mesh.replicate", "zero_hpz_partition_size: 4", "scaled_dot_product_attention"):
        assert word in str(error.value)


# ---- the files in circulation ----


@pytest.mark.parametrize("name", PLAIN)
def test_files_of_hugging_faces_documentation(name: str) -> None:
    path = DATA / f"{name}.json"
    with pytest.warns(UserWarning, match="why nothing is lost"):
        config = load_config(path)
    assert config.stage == int(name[-1]) and config.deepspeed is not None
    assert config.origin_of("stage") == f"user: {path}: zero_optimization.stage"
    found = config.deepspeed
    assert found.batch == BatchSettings() and found.gradient_clipping.value is None and found.precision.value is None
    assert found.optimizer is not None and found.optimizer.type == "AdamW"
    assert found.optimizer.params == dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    assert found.scheduler is not None and found.scheduler.type == "WarmupLR"
    assert set(found.owned) == {"optimizer", "scheduler"} and not found.rejected()
    # fp16 may yet be chosen: DeepSpeed's settings for its scale are taken over.
    assert (config.loss_scale.growth_interval, config.loss_scale.hysteresis, config.prefetch) == (1000, 2, 1)
    assert {report.path for report in found.found} == set(leaves(json.loads(path.read_text())))


@pytest.mark.parametrize("name", OFFLOADING)
def test_files_that_offload(name: str) -> None:
    path = DATA / f"{name}.json"
    offload = quietly(path).zero
    tier = "nvme" if "nvme" in name else "cpu"
    assert offload["offload.optimizer"].value == tier
    assert offload["offload.optimizer"].origin == f"user: {path}: zero_optimization.offload_optimizer.device"
    assert ("offload.parameters" in offload) == ("zero3" in name)
    assert "zero3" not in name or offload["offload.parameters"].value == tier
    config = load_config(path)
    assert (config.offload.optimizer, config.offload.nvme_path) == (tier, ["/local_nvme"] if tier == "nvme" else [])


def test_spellings_of_offloading() -> None:
    def found(**zero: object) -> dict[str, object]:
        settings = quietly({"zero_optimization": {"stage": 3, **zero}}).zero
        return {key: setting.value for key, setting in settings.items() if key.startswith("offload.")}

    assert found(cpu_offload=True) == {"offload.optimizer": "cpu"}
    assert found(offload_param={"device": "none"}, cpu_offload=False) == {}
    assert found(offload_param={"device": "auto", "nvme_path": "auto"}) == {}
    two = {"device": "nvme", "nvme_path": "/a"}, {"device": "nvme", "nvme_path": "/b"}
    assert found(offload_optimizer=two[0], offload_param=two[1])["offload.nvme_path"] == ["/a", "/b"]
    assert found(offload_optimizer=two[0], offload_param=two[1])["offload.resident_bytes"] == 4 * 10**9
    few = two[1] | {"max_in_cpu": 5}
    assert found(offload_optimizer=two[0], offload_param=few)["offload.resident_bytes"] == 20
    low = quietly({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_param": few}}).zero
    assert low["offload.resident_bytes"].value == 10
    unused = {"device": "cpu", "nvme_path": "/a"}
    assert found(offload_optimizer=unused) == {"offload.optimizer": "cpu"}


def test_a_part_of_the_optimizer_is_offloaded() -> None:
    found = load_config({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})
    assert (found.offload.optimizer, found.offload.optimizer_ratio) == ("cpu", 0.5)


def test_parameters_that_are_offloaded_bring_the_optimizer_along() -> None:
    found = load_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert (found.offload.optimizer, found.offload.parameters) == ("cpu", "cpu")
    assert found.origin_of("offload.optimizer").startswith("needed by user: ")


def test_offloading_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"offload\.optimizer_ratio is 0\.5 and offload\.optimizer is 'none'"):
        load_config(stage=2, offload={"optimizer_ratio": 0.5})
    with pytest.raises(ValueError, match=r"offload\.optimizer_ratio.*1\.5.*0 to 1"):
        load_config(stage=2, offload={"optimizer": "cpu", "optimizer_ratio": 1.5})
    with pytest.raises(ValueError, match=r"offload\.parameters is 'cpu' and offload\.optimizer is 'none'"):
        load_config(stage=3, offload={"parameters": "cpu"})
    with pytest.raises(ValueError, match=r"offload\.nvme_path is empty"):
        load_config({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}})


# ---- sources ----

COMMENTED = """{
  // a line, and a URL in a string: "http://x"
  "zero_optimization": {"stage": 2, /* several
     lines */ "reduce_bucket_size": 5e8,},  # a third kind
  "wandb": {"enabled": false, "project": "http://x//y#z, }"},
}"""


def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(COMMENTED)
    found = quietly(tmp_path / "ds.json")
    assert found.zero["stage"].value == 2
    values = {report.path: report.value for report in found.found}
    assert values["zero_optimization.reduce_bucket_size"] == 500000000
    assert values["wandb.project"] == "http://x//y#z, }"


def test_base64_yaml_and_mapping_read_alike(tmp_path: Path) -> None:
    values = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}
    text = json.dumps(values).encode()
    (tmp_path / "ds.yaml").write_text("zero_optimization: {stage: 2}\ntrain_batch_size: 8\n")
    sources = [values, base64.b64encode(text).decode(), base64.urlsafe_b64encode(text).decode(), tmp_path / "ds.yaml"]
    for source in sources:
        config = load_config(source)
        assert config.stage == 2 and config.deepspeed is not None and config.deepspeed.batch.train_batch_size == 8
    assert load_config(sources[1]).origin_of("stage") == "user: base64: zero_optimization.stage"


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"ds_config\.json"):
        read_deepspeed("ds_config.json")
    with pytest.raises(FileNotFoundError, match=r"abcdefgh"):
        load_config("abcdefgh")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"fp16": {"enabled": true}, "fp16": {}}', ValueError, "the key 'fp16' is there twice"),
        ('{"fp16": {"enabled": true, "enabled": false}}', ValueError, r"'enabled' is there twice .*\(True and False\)"),
        ("{stage: 2}", ValueError, "names without quotes"),
        ('{"fp16": {"enabled": true}\n"a": 1}', ValueError, "line 2 column 1"),
        ('{"gradient_clipping": NaN}', ValueError, "NaN is no JSON number"),
        ('{"gradient_clipping": Infinity}', ValueError, "Infinity is no JSON number"),
        ('{"optimizer": {"params": {"betas": [0.9, NaN]}}}', ValueError, "NaN is no JSON number"),
        ('{"steps_per_print": -Infinity}', ValueError, "-Infinity is no JSON number"),
        ("[1]", TypeError, "holds a list; expected a mapping"),
    ],
)
def test_text_that_cannot_be_read(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    for read in (read_deepspeed, load_config):
        with pytest.raises(error, match=message) as raised:
            read(tmp_path / "ds.json")
        assert "ds.json" in str(raised.value)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("config", "key", "meant"),
    [
        ({"zero_optimisation": {"stage": 2}, "fp16": {}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stages": 2}}, "zero_optimization.stages", "zero_optimization.stage"),
        ({"zero_optimization": {"offload_optimizer": {"buffer_size": 1}}}, "buffer_size", "buffer_count"),
        ({"stage3_max_live_parameters": 1, "fp16": {}}, "stage3_max_live_parameters", f"{ZERO}.stage3_max_live"),
        ({"fp16": {"loss_scale_windows": 5}}, "fp16.loss_scale_windows", "fp16.loss_scale_window"),
        ({"optimizer": {"type": "AdamW", "params": {"bettas": 1}}}, "optimizer.params.bettas", "'betas'"),
        ({"checkpoint": {"keep_last": 1}, "fp16": {}}, "checkpoint.keep_last", "has: tag_validation"),
        ({"optimizer": {"name": "AdamW"}, "fp16": {}}, "optimizer.name", "'optimizer' has: type, params"),
        ({"fp16": {}, "offload_optimizer": {}}, "'offload_optimizer'", f"did you mean '{ZERO}.offload_optimizer'?"),
        ({"fp16": {}, "device": "cpu"}, "'device'", f"{ZERO}.offload_param.device' or '{ZERO}.offload_optimizer.d"),
        ({"fp16": {}, "overlap_com": True}, "'overlap_com'", f"did you mean '{ZERO}.overlap_comm'?"),
    ],
)
def test_json_unknown_key(config: dict[str, Any], key: str, meant: str) -> None:
    with pytest.raises(ValueError, match="unknown key") as error:
        read_deepspeed(config)
    assert key in str(error.value) and meant in str(error.value).split(";")[1]


def test_comet_says_which_loggers_there_are() -> None:
    ways = r"CometLogger\(\).*log_with=.comet_ml.*tensorboard, wandb or csv_monitor"
    with pytest.raises(ValueError, match=rf"'comet.enabled: True'.*{ways}"):
        read_deepspeed({"fp16": {}, "comet": {"enabled": True, "project": "mine"}})


@pytest.mark.parametrize(
    "key",
    [
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
        "fp16.loss_scale",
        "fp16.hysteresis",
        "tensorboard.enabled",
        "steps_per_print",
        "optimizer.type",
        "gradient_predivide_factor",
        "communication_data_type",
    ],
)
def test_auto_where_nobody_decides(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(key)} is 'auto' \[user: mapping\], but no framework"):
        read_deepspeed(nested(key, "auto"))


@pytest.mark.parametrize(
    "key",
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "amp.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_max_live_parameters",  # DeepSpeed takes its default for these
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.sub_group_size",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_optimizer.nvme_path",
    ],
)
def test_auto_where_a_framework_decides(key: str) -> None:
    found = quietly(nested(key, "auto"))
    assert found.found[0].value == "auto" and not found.owned


def test_auto_among_parameters_of_an_optimizer() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.params\.amsgrad is 'auto'"):
        read_deepspeed({"optimizer": {"type": "Adam", "params": {"amsgrad": "auto"}}})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"zero_optimization": {"stage": "2"}}, TypeError, "stage is '2' (str) [user: mapping]; expected int"),
        ({"zero_optimization": {"stage": True}}, TypeError, "stage is True (bool)"),
        ({"zero_optimization": {"stage": 4}}, ValueError, "stage is 4 [user: mapping]; accepted: 0, 1, 2, 3"),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, TypeError, "expected int or 'auto'"),
        ({"zero_optimization": 2}, TypeError, "expected a mapping with keys among stage"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, ValueError, "accepted: 'none', 'cpu', 'nvme'"),
        ({"fp16": ON, "bf16": ON}, ValueError, "fp16.enabled and bf16.enabled are both true"),
        ({"bf16": {}, "bfloat16": {}, "fp16": {"enabled": 1}}, TypeError, "fp16.enabled is 1 (int)"),
        ({"bf16": ON, "bfloat16": ON}, ValueError, "'bf16.enabled' and 'bfloat16.enabled'"),
        ({"train_batch_size": 0}, ValueError, "train_batch_size is 0; accepted: 1 or more"),
        ({"gradient_clipping": -1.0}, ValueError, "gradient_clipping is -1.0"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, ValueError, "hysteresis is 0 [user: mapping: fp16.hysteresis]"),
        ({ZERO: {"prefetch_bucket_size": -1}}, ValueError, "prefetch is -1 [user: mapping: zero_optimization.prefetch"),
        ({"fp16": {"enabled": True, "initial_scale_power": 99}}, ValueError, "accepted: 0 to 64"),
        ({"deepspeed_defaults": "0.9.0", "fp16": {}}, ValueError, "whose defaults are known is '0.19.8'"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, ValueError, "use gradient_clipping"),
        ({"optimizer": {"type": "Adom"}}, ValueError, "did you mean 'Adam'?"),
        ({"scheduler": {"type": "Cosine"}}, ValueError, "no scheduler that is known by name"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, ValueError,
         "scheduler.params.warmup_type is 'cosine' [user: mapping: scheduler]; accepted: 'log', 'linear'. DeepSpeed"),
        ({"optimizer": {"params": {"lr": 1.0}}}, ValueError, "name the type"),
        ({"fp16": {}, 3: 1}, TypeError, "a key is 3 (int)"),
        ({"stage": 2, ZERO: {}}, ValueError, "'zero_optimization' is a key of DeepSpeed's JSON and 'stage'"),
        ({"stage": 2, "bf16": {"enabled": True}}, ValueError, "'bf16' [user: mapping] cannot be set here"),
    ],
)  # fmt: skip
def test_wrong_values(config: dict[Any, Any], error: type[Exception], message: str) -> None:
    for read in (read_deepspeed, load_config):
        with pytest.raises(error) as raised:
            read(config)
        assert message in str(raised.value)


# ---- translation ----


def test_defaults_are_those_of_the_named_version() -> None:
    found = read_deepspeed({"deepspeed_defaults": "0.19.8", "train_batch_size": 8})
    assert found.zero["stage"] == (0, "default of DeepSpeed 0.19.8: zero_optimization.stage")
    assert found.gradient_clipping == (1.0, "default of DeepSpeed 0.19.8: gradient_clipping")
    assert found.precision.value == "fp32" and set(found.owned) == {"train_batch_size"}


def test_loss_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 3, "min_loss_scale": 2}
    config = load_config({"fp16": fp16})
    scale = config.loss_scale
    assert (scale.initial, scale.growth_interval, scale.hysteresis, scale.minimum) == (256.0, 50, 3, 2.0)
    assert scale.growth_delay == 1 and not scale.consecutive_hysteresis
    assert load_config({"fp16": {**fp16, "consecutive_hysteresis": True}}).loss_scale.consecutive_hysteresis
    assert config.origin_of("loss_scale.initial") == "user: mapping: fp16.initial_scale_power"
    assert load_config({"fp16": {"enabled": False, "hysteresis": 9}}).loss_scale.hysteresis == 1
    static = load_config({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 2}}).loss_scale
    assert (static.initial, static.minimum, static.hysteresis) == (128.0, 128.0, 1) and static.growth_interval > 2**60


def test_dtypes_of_state() -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert load_config({"bf16": bf16}).precision == PrecisionConfig(False, "parameter", "float32")
    config = {"bf16": ON, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bfloat16"}
    assert load_config(config).precision == PrecisionConfig(True, "parameter", "gradient")
    with pytest.raises(ValueError, match=r"communication_data_type: 'fp16'.*use fp32"):
        load_config({"bf16": ON, "communication_data_type": "fp16"})
    with pytest.raises(ValueError, match="are summed in fp32"):
        load_config({**config, "data_types": {"grad_accum_dtype": "fp32"}})


def test_stage_3_spellings_and_prefetch() -> None:
    with pytest.warns(UserWarning, match=r"zero_optimization\.max_live_parameters"):
        config = load_config({ZERO: {"stage": 3, "prefetch_bucket_size": 0, "max_live_parameters": 10}})
    assert config.prefetch == 0
    assert config.origin_of("prefetch") == "user: mapping: zero_optimization.prefetch_bucket_size"
    assert load_config({"zero_optimization": {"stage3_prefetch_bucket_size": 5e7}}).prefetch == 1
    assert load_config({"checkpoint": {"use_node_local_storage": True}, "fp16": {}}).checkpoint.layout == "pieces"


def test_adam_decouples_weight_decay_by_default() -> None:
    for params, kind in [({}, "AdamW"), ({"adam_w_mode": False}, "Adam"), ({"torch_adam": True, "lr": 1.0}, "AdamW")]:
        found = read_deepspeed({"optimizer": {"type": "adam", "params": params}}).optimizer
        assert found is not None and found.type == kind and set(found.params) <= {"lr"}


def test_settings_that_files_in_circulation_have(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"steps_per_print": math.inf, "zero_allow_untested_optimizer": 1, ZERO: True}))
    assert '"steps_per_print": Infinity' in file.read_text(), "as Accelerate's default is written"
    found = quietly(str(file))
    assert found.zero["stage"].value == 1 and found.zero["stage"].origin == f"user: {file}: zero_optimization"
    assert quietly({ZERO: False}).zero["stage"].value == 0
    assert quietly({"steps_per_print": 10**30}).found[0].value == 10**30
    with pytest.raises(TypeError, match=r"zero_allow_untested_optimizer is 2 \(int\)"):
        read_deepspeed({"zero_allow_untested_optimizer": 2})
    aio = {"aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1}}
    quietly({**aio, ZERO: {"stage": 3, **aio}})


def test_names_of_deepspeeds_optimizer_classes() -> None:
    names = {"FusedAdam": "AdamW", "DeepSpeedCPUAdam": "AdamW", "FusedLamb": "Lamb", "CPULion": "Lion"}
    for name, kind in names.items():
        made = quietly({"optimizer": {"type": name, "params": {"lr": 0.1}}}).optimizer
        assert made is not None and made.type == kind


def test_max_grad_norm_that_says_the_same() -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 1.0}}, "gradient_clipping": 1.0}
    made = quietly(config).optimizer
    assert made is not None and dict(made.params) == {"lr": 0.1}
    with pytest.raises(ValueError, match="use gradient_clipping"):
        read_deepspeed({**config, "gradient_clipping": 0.5})


def test_keywords_and_copies_keep_what_the_file_said() -> None:
    config = load_config({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}, stage=1)
    assert config.stage == 1 and config.origin_of("stage") == "user: keyword"
    for kept in (load_config(config, prefetch=2), resolve(config, 4).config):
        assert kept.deepspeed is not None and kept.deepspeed.owned["gradient_clipping"].value == 0.5
    assert load_config(stage=1).deepspeed is None


# ---- batch sizes ----


@given(micro=st.integers(1, 64), steps=st.integers(1, 64), world=st.integers(1, 64))
def test_any_two_numbers_give_the_third(micro: int, steps: int, world: int) -> None:
    whole = BatchSettings(micro * steps * world, micro, steps)
    total = whole.train_batch_size
    for given_two in (
        whole,
        BatchSettings(None, micro, steps),
        BatchSettings(total, None, steps),
        BatchSettings(total, micro, None),
    ):
        assert given_two.resolve(world) == whole
    assert BatchSettings(None, micro, None).resolve(world) == BatchSettings(micro * world, micro, 1)
    assert BatchSettings(micro * world, None, None).resolve(world) == BatchSettings(micro * world, micro, 1)


@given(total=st.integers(1, 999), micro=st.integers(1, 9), steps=st.integers(1, 9), world=st.integers(1, 9))
def test_numbers_that_disagree_spell_out_the_arithmetic(total: int, micro: int, steps: int, world: int) -> None:
    if total == micro * steps * world:
        return
    with pytest.raises(ValueError) as error:
        BatchSettings(total, micro, steps).resolve(world)
    product = f"{micro} x gradient_accumulation_steps {steps} x {world} ranks = {micro * steps * world}"
    assert product in str(error.value)
    if math.gcd(total, micro * world) != micro * world:
        with pytest.raises(ValueError, match=rf"train_batch_size {total} / \(train_micro_batch_size_per_gpu {micro} x"):
            BatchSettings(total, micro, None).resolve(world)


def test_accumulation_alone_is_too_little() -> None:
    with pytest.raises(ValueError, match="neither train_batch_size nor train_micro_batch_size_per_gpu"):
        BatchSettings(None, None, 4).resolve(2)
    assert read_deepspeed({"train_step_batch_size": 4}).batch.resolve(2).train_batch_size == 8


# ---- anything else ----

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "none", "fp16", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)


@given(st.lists(st.tuples(st.sampled_from([key for key, _, _ in listed()]), ANYTHING), min_size=1, max_size=4))
def test_any_value_of_any_key_is_read_or_a_value_or_type_error(pairs: list[tuple[str, Any]]) -> None:
    config: dict[str, Any] = {}
    for key, value in pairs:
        *sections, name = key.split(".")
        place = config
        for section in sections:
            inner = place.setdefault(section, {})
            place = inner if isinstance(inner, dict) else {}
        place[name] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = load_config(config)
        except (ValueError, TypeError) as error:
            assert str(error)
        else:
            assert loaded.deepspeed is not None and not loaded.deepspeed.rejected()


# ---- pipelines ----


def test_a_section_that_both_spellings_have_is_told_by_the_rest() -> None:
    both = {"stages": 2, "partition": "type:Block"}
    for config in (
        {"pipeline": both, "train_batch_size": 8},
        {"pipeline": {**both, "seed_layers": False}},
        {"pipeline": both, ZERO: {"stage": 0}},
    ):
        found = quietly(config)
        assert found.zero["pipeline.stages"].value == 2 and found.zero["pipeline.partition"].value == "type:Block"
        loaded = load_config(config)
        assert loaded.deepspeed is not None and loaded.pipeline.partition == "type:Block" and loaded.stage == 0
    for ours in ({"pipeline": both, "stage": 1}, {"pipeline": {**both, "schedule": "gpipe"}}, {"pipeline": both}):
        assert load_config(ours).deepspeed is None and load_config(ours).pipeline.stages == 2
    with pytest.raises(ValueError, match=r"pipeline\.schedule"):
        load_config({"pipeline": {**both, "schedule": "gpipe"}, ZERO: {"stage": 1}})


def test_what_a_pipeline_section_leaves_to_the_module() -> None:
    found = quietly({"pipeline": {"stages": "auto", "partition": "best", "use_reentrant": False}, ZERO: {"stage": 1}})
    assert not [key for key in found.zero if key.startswith("pipeline.")]
    assert found.pipeline == {"stages": "auto", "partition": "best", "use_reentrant": False}
    with pytest.raises(ValueError, match=r"pipeline\.stages is 0"):
        quietly({"pipeline": {"stages": 0}, ZERO: {"stage": 1}})
    with pytest.raises(TypeError, match=r"pipeline\.stages is '2'"):
        quietly({"pipeline": {"stages": "2"}, ZERO: {"stage": 1}})


@pytest.mark.parametrize("section", ["", "zero_optimization"])
def test_keys_that_begin_with_an_underscore_are_comments(section: str) -> None:
    values: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    (values[section] if section else values)["_comment"] = {"anything": [1, "x"]}
    with pytest.warns(UserWarning, match="_comment"):
        assert load_config(values).stage == 2


# The last three are similar to, or the same as, names of sections where they are not meant.
@pytest.mark.parametrize(
    "key", ["comms_config", "monitor_config", "cuda_visible_devices", "banana", "moe", "enable", "mode"]
)
def test_keys_that_deepspeed_does_not_have_are_told(key: str) -> None:
    with pytest.warns(UserWarning, match=f"'{key}': DeepSpeed has no such key"):
        assert load_config({"zero_optimization": {"stage": 2}, key: {"enabled": True}}).stage == 2


@pytest.mark.parametrize(("wrong", "meant"), [("zero_optimisation", "zero_optimization"), ("bf_16", "bf16")])
def test_keys_that_are_nearly_right_are_errors(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        load_config({"zero_optimization": {"stage": 2}, wrong: {"enabled": True}})


def test_a_compile_section_is_the_callers() -> None:
    with pytest.warns(UserWarning, match=r"'compile.backend': the caller compiles"):
        load_config({"zero_optimization": {"stage": 2}, "compile": {"disable": False, "backend": "inductor"}})
