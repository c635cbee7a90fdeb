"""load_config: its sources, how they merge, and what it says about mistakes."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from zero_strategy.config import (
    Layer,
    LossScaleConfig,
    MeshConfig,
    OffloadConfig,
    ZeroConfig,
    load_config,
    load_layers,
    preset,
)
from zero_strategy.runtime.shown import shown as on_one_line

YAML = """
stage: 2
units:
  classes: [Block, Embedding]
mesh: {replicate: 2}
loss_scale:
  initial: 1e3
timeout_seconds: 60
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "zero.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# Sources


def test_yaml_file(write):
    path = write(YAML)
    config = load_config(path)
    assert config == load_config(str(path))
    assert (config.stage, config.units.classes, config.mesh.replicate) == (2, ["Block", "Embedding"], 2)
    assert (config.loss_scale.initial, config.timeout_seconds) == (1000.0, 60.0)


def test_mapping_and_dictconfig_read_alike():
    values = {"stage": 1, "mesh": {"replicate": 2}, "units": {"patterns": ["layers.*"]}}
    config = load_config(values)
    assert config == load_config(OmegaConf.create(values)) == load_config(**values)
    assert (config.stage, config.mesh.replicate, config.units.patterns) == (1, 2, ["layers.*"])


def test_the_source_is_not_changed_nor_shared():
    values = {"units": {"classes": ["Block"]}, "mesh": {"replicate": 2}}
    config = load_config(values, mesh={"shard": 4})
    config.units.classes.append("Other")
    assert values == {"units": {"classes": ["Block"]}, "mesh": {"replicate": 2}}
    copied = load_config(config, stage=1)
    copied.units.classes.append("Third")
    assert config.units.classes == ["Block", "Other"] and config.stage == 3


def test_overrides_merge_key_by_key_and_replace_lists(write):
    config = load_config(write(YAML), stage=3, mesh={"shard": 4}, units={"classes": ["Layer"]})
    assert (config.stage, config.mesh.replicate, config.mesh.shard) == (3, 2, 4)
    assert config.units.classes == ["Layer"] and config.loss_scale.initial == 1000.0


def test_a_section_instance_replaces_the_section(write):
    config = load_config(write(YAML), mesh=MeshConfig(shard=8), loss_scale=LossScaleConfig())
    assert (config.mesh.replicate, config.mesh.shard, config.loss_scale.initial) == (1, 8, 65536.0)


def test_empty_file_and_comments_are_the_defaults(write):
    assert load_config(write("")) == load_config(write("# stage: 2\n")) == load_config({}) == ZeroConfig()


def test_json_is_yaml(write):
    assert load_config(write(json.dumps({"stage": 1}), "zero.json")).stage == 1


def test_interpolation_in_a_file(write, monkeypatch):
    monkeypatch.setenv("NODES", "4")
    config = load_config(write("mesh: {replicate: '${oc.decode:${oc.env:NODES}}'}\nprefetch: ${stage}\nstage: 2\n"))
    assert (config.mesh.replicate, config.prefetch) == (4, 2)


def test_plain_strings_are_not_interpolated():
    assert load_config(units={"patterns": ["${x}"]}).units.patterns == ["${x}"]


def test_node_of_a_larger_dictconfig():
    root = OmegaConf.create({"nodes": 2, "strategy": {"mesh": {"replicate": "${nodes}"}, "units": {"classes": ["A"]}}})
    assert load_config(root.strategy).mesh.replicate == 2
    # As hydra.utils.instantiate passes them: sections are nodes, keywords are not.
    config = load_config(stage=1, mesh=root.strategy.mesh, units={"classes": root.strategy.units.classes})
    assert (config.mesh.replicate, config.units.classes, type(config.units.classes)) == (2, ["A"], list)


def test_hydra_compose(write, tmp_path):
    write("defaults: [zero_schema, _self_]\nstage: 2\n", "zero.yaml")
    ConfigStore.instance().store(name="zero_schema", node=ZeroConfig)
    with initialize_config_dir(config_dir=str(tmp_path), version_base=None):
        node = compose("zero", overrides=["mesh.replicate=2", "units.classes=[Block]"])
    config = load_config(node)
    assert (config.stage, config.mesh.replicate, config.units.classes) == (2, 2, ["Block"])
    assert config.origin_of("stage") == config.origin_of("mesh.replicate") == "user: DictConfig"
    assert config.origin_of("prefetch") == "default"


def test_presets():
    assert [preset(f"zero{n}") for n in (1, 2, 3)] == [{"stage": 1}, {"stage": 2}, {"stage": 3}]
    preset("zero1")["stage"] = 7
    assert preset("zero1") == {"stage": 1}
    with pytest.raises(ValueError, match=r"unknown strategy name 'zero4'; accepted: 'zero1', 'zero2', 'zero3'"):
        preset("zero4")


def test_layers_name_their_origin():
    config = load_layers(
        [
            Layer(preset("zero2"), 'Trainer(strategy="zero2")'),
            Layer({"mesh": {"replicate": 2}}, "user: keyword"),
        ]
    )
    assert config.stage == 2 and config.origin_of("stage") == 'Trainer(strategy="zero2")'
    assert load_layers([]) == ZeroConfig()
    with pytest.raises(ValueError, match=r"stage is 9 .here.; accepted"):
        load_layers([Layer({"stage": 9}, "here"), Layer({"stage": 1}, "later")])


# Mistakes in the source


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config file.*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(FileNotFoundError, match=r"'zero2' is a strategy name; as a config it is \{'stage': 2\}"):
        load_config("zero2")


@pytest.mark.parametrize("text", ["- stage\n- 2\n", "stage\n", "3\n", "null\n", '"stage: 2"\n'])
def test_file_that_is_no_mapping(write, text):
    with pytest.raises(TypeError, match=r"zero\.yaml holds a (sequence|scalar); expected a mapping"):
        load_config(write(text))


@pytest.mark.parametrize("text", ["stage: [", "stage: 1\nstage: 2\n", "a: 1\n---\nb: 2\n", "prefetch: ${oops\n"])
def test_file_that_cannot_be_read(write, text):
    with pytest.raises(ValueError, match=r"zero\.yaml"):
        load_config(write(text))


def test_file_that_is_not_text(tmp_path):
    (tmp_path / "zero.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"zero\.yaml: is no text in UTF-8"):
        load_config(tmp_path / "zero.yaml")


@pytest.mark.parametrize("source", [3, ["stage"], OmegaConf.create([1]), ZeroConfig])
def test_source_of_another_type(source):
    with pytest.raises(TypeError, match=r"expected a ZeroConfig, a mapping, a DictConfig or the path"):
        load_config(source)


def test_unresolvable_dictconfig():
    with pytest.raises(ValueError, match=r"stage \[user: DictConfig\] cannot be resolved"):
        load_config(OmegaConf.create({"stage": "???"}))
    with pytest.raises(ValueError, match=r"mesh.shard \[user: DictConfig\] cannot be resolved: .*nodes"):
        load_config(OmegaConf.create({"mesh": {"shard": "${nodes}"}}))
    with pytest.raises(ValueError, match=r"\[user: keyword\] cannot be resolved"):
        load_config(mesh=OmegaConf.create({"shard": "${nodes}"}))


# Mistakes in keys


@pytest.mark.parametrize(
    ("values", "key", "meant"),
    [
        ({"stagee": 2}, "stagee", "did you mean 'stage'?"),
        ({"mesh": {"replicat": 2}}, "mesh.replicat", "did you mean 'mesh.replicate'?"),
        ({"loss_scale": {"groth_factor": 2}}, "loss_scale.groth_factor", "'loss_scale.growth_factor'?"),
        ({"replicate": 2}, "replicate", """'mesh.replicate', spelled {"mesh": {"replicate": ...}}?"""),
        ({"mesh": {"stage": 2}}, "mesh.stage", "did you mean 'stage'?"),
        ({"mesh": {"prefetch_": 2}}, "mesh.prefetch_", "did you mean 'prefetch'?"),
        ({"banana": 2}, "banana", "the config has: stage, units, mesh"),
        ({"mesh": {"banana": 2}}, "mesh.banana", "'mesh' has: replicate, shard, tensor"),
    ],
)
def test_settings_unknown_key(values, key, meant):
    for source, origin in [((values,), "user: mapping"), ((OmegaConf.create(values),), "user: DictConfig")]:
        with pytest.raises(ValueError) as error:
            load_config(*source)
        assert str(error.value).startswith(f"unknown key '{key}' [{origin}]; ")
        assert meant in str(error.value)


@pytest.mark.parametrize("value", ["off", "auto"])
def test_a_setting_that_was_removed_and_asks_for_nothing_is_a_warning(value):
    with pytest.warns(UserWarning, match=r"offload.early_step was removed \[user: mapping\]: .*; leave it out"):
        config = load_config({"offload": {"optimizer": "cpu", "early_step": value}})
    assert config.offload.optimizer == "cpu" and "early_step" not in vars(config.offload)


def test_a_setting_that_was_removed_and_asks_for_something_is_an_error():
    reason = r"offload.early_step was removed, and is 'on' \[user: mapping\]: .*leave it out"
    with pytest.raises(ValueError, match=reason):
        load_config({"offload": {"optimizer": "cpu", "early_step": "on"}})


def test_unknown_key_names_the_file(write):
    path = write("mesh:\n  shards: 2\n")
    with pytest.raises(ValueError) as error:
        load_config(path)
    assert str(error.value) == f"unknown key 'mesh.shards' [user: {path}]; did you mean 'mesh.shard'?"


def test_dotted_key():
    with pytest.raises(ValueError) as error:
        load_config({"mesh.replicate": 2})
    assert str(error.value).endswith('is not accepted; nest it: {"mesh": {"replicate": ...}}')
    with pytest.raises(ValueError, match=r'nest it: \{"mesh": \{"a": \{"b": \.\.\.\}\}\}'):
        load_config({"mesh": {"a.b": 2}})


def test_key_that_is_no_string():
    with pytest.raises(TypeError, match=r"a key is 3 \(int\) \[user: mapping\]; expected str"):
        load_config({3: 2})
    with pytest.raises(TypeError, match=r"a key of 'mesh' is True"):
        load_config({"mesh": {True: 2}})


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ("gradient_accumulation_steps accumulate_grad_batches", "Trainer(accumulate_grad_batches=...)"),
        ("gradient_clipping gradient_clip_val max_grad_norm", "Trainer(gradient_clip_val=...)"),
        ("train_batch_size train_micro_batch_size_per_gpu batch_size", "DataLoader(batch_size=...)"),
        ("bf16 fp16 mixed_precision", "Accelerator(mixed_precision=...)"),
        ("lr learning_rate optimizer weight_decay", "configure_optimizers"),
        ("scheduler lr_scheduler", "configure_optimizers"),
        ("world_size", "Trainer(devices=..., num_nodes=...)"),
    ],
)
def test_key_that_a_framework_owns(keys, place):
    for key in keys.split():
        # Alone, some of them would be DeepSpeed's JSON.
        for values, shown in [({"stage": 2, key: {"x": 1}}, key), ({"mesh": {key: 1}}, f"mesh.{key}")]:
            with pytest.raises(ValueError) as error:
                load_config(values)
            assert str(error.value).startswith(f"'{shown}' [user: mapping] cannot be set here: ")
            assert "owned by" in str(error.value) and place in str(error.value)


@pytest.mark.parametrize("value", ["bf16-mixed", "32", 16])
def test_precision_of_the_computation_is_owned_by_the_framework(value):
    with pytest.raises(ValueError, match=r"'precision' \[user: keyword\] cannot be set here.*Trainer\(precision="):
        load_config(precision=value)
    assert load_config(precision={"master_weights": False}).precision.master_weights is False


def test_deepspeed_json(write):
    text = json.dumps({"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    path = write(text, "ds.json")
    config = load_config(path)
    assert config.stage == 2 and config.origin_of("stage") == f"user: {path}: zero_optimization.stage"
    with pytest.raises(ValueError, match=r"read as a whole: give it as the config itself"):
        load_config(zero_optimization=True)


# Mistakes in values


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"stage": "3"}, TypeError, "stage is '3' (str) [user: mapping]; expected int"),
        (
            {"mesh": {"shard": 2.0}},
            TypeError,
            "mesh.shard is 2.0 (float) [user: mapping]; expected int | None",
        ),
        (
            {"reshard_after_forward": 1},
            TypeError,
            "reshard_after_forward is 1 (int) [user: mapping]; expected bool",
        ),
        (
            {"units": {"classes": ["A", 3]}},
            TypeError,
            "units.classes[1] is 3 (int) [user: mapping]; expected str",
        ),
        ({"mesh": {"replicate": 0}}, ValueError, "mesh.replicate is 0 [user: mapping]; accepted: 1 or more"),
        ({"stage": 5}, ValueError, "stage is 5 [user: mapping]; accepted: 0, 1, 2, 3"),
        (
            {"mesh": None},
            TypeError,
            "mesh is None (NoneType) [user: mapping]; expected a mapping with keys among "
            "replicate, shard, tensor, sequence, ulysses, expert",
        ),
    ],
)
def test_wrong_value(values, error, message):
    with pytest.raises(error) as raised:
        load_config(values)
    assert str(raised.value) == message


def test_wrong_value_is_reported_even_if_overridden():
    with pytest.raises(TypeError, match=r"user: mapping"):
        load_config({"stage": "3"}, stage=2)


def test_a_config_changed_in_python_is_checked_again():
    config = ZeroConfig()
    config.mesh.replicate = 0
    with pytest.raises(ValueError, match=r"mesh.replicate is 0"):
        load_config(config)
    with pytest.raises(ValueError, match=r"mesh.replicate is 0"):
        load_config(mesh=config.mesh)


@given(
    key=st.text(max_size=20),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
)
@settings(max_examples=60, deadline=None)
def test_any_mistake_is_a_value_or_type_error_that_names_the_key(key, value):
    for values, named in [({key: value}, key), ({"mesh": {key: value}}, f"mesh.{key}")]:
        try:
            load_config(values)
        except (ValueError, TypeError) as error:
            assert on_one_line(named) in str(error)


@given(
    stage=st.integers(0, 3),
    replicate=st.integers(1, 64),
    shard=st.none() | st.integers(1, 64),
    classes=st.lists(st.text(min_size=1).filter(str.strip), max_size=3),
    timeout=st.floats(min_value=1e-3, max_value=1e9),
)
@settings(max_examples=30, deadline=None)
def test_round_trip_through_omegaconf(stage, replicate, shard, classes, timeout):
    config = load_config(
        stage=stage,
        mesh={"replicate": replicate, "shard": shard},
        elementwise_optimizers=classes,
        timeout_seconds=timeout,
    )
    assert load_config(config) == config
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    assert load_config(plain) == config


# Short forms


def test_one_string_is_a_list_of_one(tmp_path: Path):
    config = load_config(
        offload={"optimizer": "nvme", "nvme_path": tmp_path}, units={"classes": "Block"}, elementwise_optimizers="Own"
    )
    assert config.offload.nvme_path == [str(tmp_path)]
    assert (config.units.classes, config.elementwise_optimizers) == (["Block"], ["Own"])
    assert OffloadConfig(optimizer="nvme", nvme_path="/local").nvme_path == ["/local"]
    with pytest.raises(ValueError, match=r"offload\.nvme_path\[0\] is ' '"):
        load_config(offload={"nvme_path": " "})


@pytest.mark.parametrize("value, mode", [("full", "full"), (True, "full"), (False, "none"), ("budget", "budget")])
def test_activation_checkpointing_in_one_word(write, value, mode):
    assert load_config(activation_checkpointing=value).activation_checkpointing.mode == mode
    assert load_config(write(f"activation_checkpointing: {value}")).activation_checkpointing.mode == mode


def test_offload_in_one_word_is_what_the_strategy_names_mean(write):
    for stage in (0, 1, 2, 3):
        config = load_config(write(f"stage: {stage}\noffload: cpu"))
        assert (config.offload.optimizer, config.offload.parameters) == ("cpu", "cpu" if stage == 3 else "none")
    for stage in (2, 3):
        named = load_layers([Layer(preset(f"zero{stage}_offload"), "a name")])
        assert load_config({"offload": "cpu"}, stage=stage).offload == named.offload
    assert "derived: offload: cpu" in load_config(offload="cpu").origin_of("offload.parameters")
    assert load_config({"offload": "cpu"}, offload={"parameters": "none"}).offload.parameters == "none"
    assert load_config(write("offload: off")).offload == OffloadConfig()


def test_offload_to_nvme_in_one_word_takes_the_environments_directories(monkeypatch):
    with pytest.raises(ValueError, match=r"nvme_path is empty.*ZERO_STRATEGY_NVME_PATH"):
        load_config(offload="nvme")
    monkeypatch.setenv("ZERO_STRATEGY_NVME_PATH", "/a:/b")
    config = load_config(offload="nvme")
    assert (config.offload.parameters, config.offload.nvme_path) == ("nvme", ["/a", "/b"])


def test_short_forms_name_their_mistakes():
    with pytest.raises(ValueError, match=r"activation_checkpointing\.mode is 'ful' \[user: keyword\]; accepted:"):
        load_config(activation_checkpointing="ful")
    with pytest.raises(ValueError, match=r"offload\.optimizer is 'disk'"):
        load_config(offload="disk")


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_options_of_ddp_are_said_to_be_unneeded(name):
    with pytest.raises(ValueError, match=f"'{name}'.*option of DistributedDataParallel.*leave it out"):
        load_config({name: True})
