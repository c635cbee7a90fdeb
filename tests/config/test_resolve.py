"""Provenance and resolution: where values come from, what is derived, and the table that says so."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from zero_strategy.config import Fact, MeshConfig, ZeroConfig, batch_fact, load_config, resolve


def rows(table: str) -> dict[str, tuple[str, str]]:
    """Splits a table at the columns that its head line shows."""
    head, *lines = table.splitlines()
    value_at, origin_at = head.index("value"), head.index("origin")
    return {line[:value_at].strip(): (line[value_at:origin_at].strip(), line[origin_at:]) for line in lines}


# Provenance


def test_origins(tmp_path):
    path = tmp_path / "zero.yaml"
    path.write_text("stage: 2\nmesh: {replicate: 2}\nunits: {classes: []}\n")
    config = load_config(path, mesh={"shard": 4}, prefetch=0)
    origins = {key: setting.origin for key, setting in config.settings()}
    assert origins.pop("stage") == origins.pop("mesh.replicate") == f"user: {path}"
    # Set by the user, though to the default value.
    assert origins.pop("units.classes") == f"user: {path}"
    assert origins.pop("mesh.shard") == origins.pop("prefetch") == "user: keyword"
    assert set(origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("source", "origin"),
    [
        ({"stage": 2}, "user: mapping"),
        (OmegaConf.create({"stage": 2}), "user: DictConfig"),
        (ZeroConfig(stage=2), "user: Python"),
        (load_config(stage=2), "user: keyword"),
    ],
)
def test_origin_of_each_kind_of_source(source, origin):
    config = load_config(source, prefetch=2)
    assert config.origin_of("stage") == origin
    assert config.origin_of("prefetch") == "user: keyword"
    assert config.origin_of("mesh.replicate") == "default"


def test_structured_dictconfig_tells_settings_from_defaults():
    node = OmegaConf.merge(OmegaConf.structured(ZeroConfig), {"stage": 2})
    config = load_config(node)
    assert config.origin_of("stage") == "user: DictConfig"
    assert config.origin_of("mesh.replicate") == "default"


def test_later_layer_takes_the_origin():
    assert load_config({"stage": 2}, stage=2).origin_of("stage") == "user: keyword"


def test_unknown_key_has_no_origin():
    with pytest.raises(KeyError):
        ZeroConfig().origin_of("mesh")


def test_assignment_replaces_the_origin():
    config = load_config({"stage": 2, "prefetch": 3, "units": {"classes": ["A"]}})
    config.stage = 1
    config.prefetch = 1
    config.units.classes.append("B")
    assert config.origin_of("stage") == config.origin_of("units.classes") == "user: Python"
    assert config.origin_of("prefetch") == "default"


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, load_config, lambda c: pickle.loads(pickle.dumps(c))])
def test_origins_survive_copies(clone):
    config = load_config({"stage": 2, "mesh": {"replicate": 2}}, units={"classes": ["A"]})
    second = clone(config)
    assert second is not config and second == config
    assert list(second.settings()) == list(config.settings())


def test_a_copy_has_its_own_origins():
    config = load_config(stage=2)
    second = copy.copy(config)
    second.record("stage", 1, "derived: test")
    assert config.origin_of("stage") == "user: keyword" and second.origin_of("stage") == "derived: test"


def test_dataclasses_replace():
    config = load_config({"mesh": {"replicate": 2}, "prefetch": 3})
    second = dataclasses.replace(config, stage=1)
    assert (second.stage, second.prefetch, second.mesh) == (1, 3, config.mesh)
    assert second.origin_of("stage") == second.origin_of("prefetch") == "user: Python"
    # Sections bring their origins along.
    assert second.origin_of("mesh.replicate") == "user: mapping"
    with pytest.raises(ValueError, match=r"stage is 8"):
        dataclasses.replace(config, stage=8)


def test_origins_take_no_part_in_equality():
    assert load_config(stage=2) == load_config({"stage": 2}) == ZeroConfig(stage=2)


def test_explain_without_derivation():
    table = rows(load_config({"stage": 2}, timeout_seconds=5).explain())
    assert table["stage"] == ("2", "user: mapping")
    assert table["timeout_seconds"] == ("5.0", "user: keyword")
    assert table["mesh.shard"] == ("None", "default")
    assert list(table) == [key for key, _ in ZeroConfig().settings()]


# Resolution


@pytest.mark.parametrize(
    ("stage", "reduction"), [(0, "per_step"), (1, "per_step"), (2, "per_micro_batch"), (3, "per_micro_batch")]
)
def test_gradient_reduction_follows_the_stage(stage, reduction):
    resolved = resolve(ZeroConfig(stage=stage), 2)
    assert resolved.gradient_reduction == resolved.config.gradient_reduction == reduction
    assert resolved.config.origin_of("gradient_reduction") == f"derived: stage {stage}"


@pytest.mark.parametrize(("stage", "tier", "reason"), [(1, "none", "wait for"), (2, "cpu", "offload.optimizer")])
def test_gradients_follow_the_optimizer_once_they_are_reduced(stage, tier, reason):
    resolved = resolve(load_config(stage=stage, offload={"optimizer": "cpu"}), 2)
    assert resolved.config.offload.gradients == tier
    assert reason in resolved.config.origin_of("offload.gradients")


def test_what_is_set_is_not_derived():
    mesh, offload = {"shard": 4, "replicate": 2, "tensor": 1, "ulysses": 1}, {"gradients": "none"}
    pipeline = {"chunks": 1, "micro_batches": 3, "gather_bytes": 5}
    config = load_config(
        stage=1,
        gradient_reduction="per_micro_batch",
        mesh=mesh,
        offload=offload,
        pipeline=pipeline,
        activation_checkpointing={"budget": 0.5},
        reproducible={"seed": 3},
    )
    resolved = resolve(config, 8)
    assert resolved.config == config
    assert resolved.config.origin_of("mesh.shard") == "user: keyword"
    assert resolved.gradient_reduction == "per_micro_batch"


def test_pipelines_divide_the_ranks():
    resolved = resolve(load_config(pipeline={"stages": 3, "schedule": "zbv"}), 12)
    assert (resolved.shard, resolved.config.pipeline.chunks, resolved.config.pipeline.micro_batches) == (4, 2, 3)
    assert "world size 12 / pipeline.stages 3" in resolved.config.origin_of("mesh.shard")
    with pytest.raises(ValueError, match=r"pipeline.stages is 3 .*a divisor of the world size 8: 1, 2, 4, 8"):
        resolve(load_config(pipeline={"stages": 3}), 8)
    with pytest.raises(ValueError, match=r"mesh.replicate is 3 .*data-parallel ranks .*pipeline.stages 2.* 4: 1, 2, 4"):
        resolve(load_config(pipeline={"stages": 2}, mesh={"replicate": 3}), 8)


@given(replicate=st.integers(1, 12), world_size=st.integers(1, 48))
@settings(max_examples=60, deadline=None)
def test_mesh_makes_the_world_size_or_is_refused(replicate, world_size):
    config = load_config(mesh={"replicate": replicate})
    if world_size % replicate:
        with pytest.raises(ValueError, match=rf"mesh.replicate is {replicate} .user: keyword.*divisor"):
            resolve(config, world_size)
        return
    resolved = resolve(config, world_size)
    assert resolved.shard * replicate == world_size
    assert resolved.config.mesh.shard == resolved.shard
    assert resolved.config.origin_of("mesh.shard") == f"derived: world size {world_size} / replicate {replicate}"


def test_replicate_that_does_not_divide_lists_what_does():
    with pytest.raises(ValueError) as error:
        resolve(load_config(mesh={"replicate": 3}), 8)
    expected = "mesh.replicate is 3 [user: keyword]; accepted: a divisor of the world size 8: 1, 2, 4, 8"
    assert str(error.value) == expected


def test_shard_that_does_not_fit():
    with pytest.raises(ValueError) as error:
        resolve(load_config(mesh={"shard": 4}), 8)
    message = str(error.value)
    assert "mesh.shard is 4 [user: keyword] and mesh.replicate is 1 [default], 4 ranks" in message
    assert "the world size is 8; accepted: 8, None" in message


def test_ranks_of_experts_divide_those_that_shard():
    assert resolve(load_config(mesh={"expert": 2, "replicate": 2}), 8).config.mesh.expert == 2
    with pytest.raises(ValueError) as error:
        resolve(load_config({"expert_parallel": {"enabled": True, "autoep_size": 3}, "train_batch_size": 8}), 8)
    message = str(error.value)
    assert message.startswith("mesh.expert is 3 [user: mapping: expert_parallel.autoep_size]; accepted: a divisor")
    assert message.endswith("the 8 ranks that shard: 1, 2, 4, 8")
    with pytest.raises(ValueError, match=r"a divisor of the 2 ranks that shard: 1, 2"):
        resolve(load_config(mesh={"expert": 4, "replicate": 2, "tensor": 2}), 8)


def test_resolve_leaves_its_argument_alone():
    config = load_config(stage=2)
    before = copy.deepcopy(config)
    resolved = resolve(config, 4)
    resolved.config.units.classes.append("A")
    assert config == before and list(config.settings()) == list(before.settings())


def test_resolve_checks_what_was_assigned():
    config = ZeroConfig()
    config.mesh = MeshConfig(replicate=2)
    config.mesh.replicate = "2"
    with pytest.raises(TypeError, match=r"mesh.replicate is '2'"):
        resolve(config, 4)


@pytest.mark.parametrize(
    ("world_size", "error"), [(0, ValueError), (-1, ValueError), ("2", TypeError), (True, TypeError)]
)
def test_world_size_is_a_positive_int(world_size, error):
    with pytest.raises(error, match=r"world_size is"):
        resolve(ZeroConfig(), world_size)


def test_no_value_is_left_open():
    values = dict(resolve(ZeroConfig(), 2).config.settings())
    assert not [key for key, setting in values.items() if setting.value is None]


# Facts


def test_explain():
    facts = {
        "accumulate_grad_batches": Fact(4, "Trainer(accumulate_grad_batches=4)"),
        "samples_per_step": batch_fact(8, 2, 4),
    }
    resolved = resolve(load_config({"stage": 3, "mesh": {"replicate": 2}}), world_size=8, facts=facts)
    table = rows(resolved.explain())
    assert table["stage"] == ("3", "user: mapping")
    assert table["mesh.shard"] == ("4", "derived: world size 8 / replicate 2")
    assert table["gradient_reduction"] == ("per_micro_batch", "derived: stage 3")
    assert table["world_size"] == ("8", "process group")
    assert table["accumulate_grad_batches"] == ("4", "Trainer(accumulate_grad_batches=4)")
    assert table["samples_per_step"] == ("64", "derived: 8 ranks x 2 x 4")
    assert table["prefetch"] == ("1", "default")
    assert resolved.facts["samples_per_step"].value == 64


def test_explain_marks_what_has_no_effect():
    table = rows(resolve(load_config(stage=2, prefetch=4), 2).explain())
    assert table["prefetch"] == ("4", "user: keyword (no effect: stage 2 keeps parameters whole)")
    assert "no effect" in table["reshard_after_forward"][1]
    assert "no effect" in table["reshard_after_backward"][1]
    assert "no effect" not in resolve(load_config(stage=3, prefetch=4), 2).explain()


def test_explain_keeps_one_line_per_row():
    resolved = resolve(ZeroConfig(), 1, {"note": Fact("a\n  b", "test")})
    assert rows(resolved.explain())["note"] == ("a b", "test")


def test_fact_about_the_world_size():
    origin = "Trainer(devices=4, num_nodes=2)"
    resolved = resolve(ZeroConfig(), 8, {"world_size": Fact(8, origin)})
    assert rows(resolved.explain())["world_size"] == ("8", origin)
    assert resolved.explain().count("world_size") == 1
    with pytest.raises(ValueError, match=r"world_size is 4 \[.*the process group has 8 ranks"):
        resolve(ZeroConfig(), 8, {"world_size": Fact(4, origin)})


def test_fact_with_the_name_of_a_setting():
    with pytest.raises(ValueError, match=r"fact 'stage' \[Trainer\] is also a setting"):
        resolve(ZeroConfig(), 1, {"stage": Fact(2, "Trainer")})


def test_batch_fact():
    assert batch_fact(ranks=7, micro_batch=2, accumulation=18) == Fact(252, "derived: 7 ranks x 2 x 18")
    with pytest.raises(ValueError, match=r"micro_batch is 0; accepted: 1 or more"):
        batch_fact(7, 0, 18)
    with pytest.raises(TypeError, match=r"ranks is 7.0"):
        batch_fact(7.0, 2, 18)


def test_resolved_config_is_frozen_and_pickles():
    resolved = resolve(load_config(stage=2), 4, {"samples_per_step": batch_fact(4, 2, 1)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.world_size = 8
    second = pickle.loads(pickle.dumps(resolved))
    assert second == resolved and second.explain() == resolved.explain()


def test_explain_marks_numbers_of_another_activation_mode():
    config = load_config(activation_checkpointing={"mode": "full", "every_n": 3, "budget": 0.5})
    table = rows(resolve(config, 1).explain())
    assert table["activation_checkpointing.every_n"][1].endswith("(no effect: mode is 'full')")
    assert table["activation_checkpointing.budget"][1].endswith("(no effect: mode is 'full')")
    table = rows(resolve(load_config(activation_checkpointing={"mode": "every_n", "every_n": 3}), 1).explain())
    assert "no effect" not in table["activation_checkpointing.every_n"][1]


def test_a_death_is_noticed_soon_where_others_go_on_after_it():
    watchdog = resolve(load_config(survive=True), 2).config.watchdog
    assert (watchdog.wait_seconds, watchdog.silence_seconds) == (0.6, 2.0)
    assert resolve(load_config(survive=True), 2).config.origin_of("watchdog.wait_seconds").startswith("derived: ")
    watchdog = resolve(load_config(survive={"enabled": True}, watchdog={"wait_seconds": 3.0}), 2).config.watchdog
    assert (watchdog.wait_seconds, watchdog.silence_seconds) == (3.0, 2.0)
    assert resolve(load_config(survive=False), 2).config.watchdog.wait_seconds == 3.0
    with pytest.raises(ValueError, match=r"survive\.enabled is True .*watchdog\.mode is 'off'"):
        resolve(load_config(survive=True, watchdog="off"), 2)
    with pytest.raises(TypeError, match=r"survive is 'yes'"):
        load_config(survive="yes")
