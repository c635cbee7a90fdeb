"""Contents of a script's config, and what is said about mistakes in it; batch arithmetic."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_strategy.compat.deepspeed.optimizers import make_optimizer
from zero_strategy.compat.deepspeed.scripts.settings import BatchConfig, Config, FP16Config, TrainingConfig, settings_of
from zero_strategy.config import ZeroConfig, load_config
from zero_strategy.config.deepspeed.settings import BatchSettings, Named


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ((32, 4, None), (32, 4, 2)),
        ((32, None, 2), (32, 4, 2)),
        ((None, 4, 2), (32, 4, 2)),
        ((32, None, None), (32, 8, 1)),
        ((None, 8, None), (32, 8, 1)),
        ((32, 4, 2), (32, 4, 2)),
        ((None, None, 3), (None, None, 3)),
        ((None, None, None), (None, None, 1)),
    ],
)
def test_the_third_follows_from_two(given: tuple[Any, ...], derived: tuple[Any, ...]) -> None:
    assert BatchSettings(*given).derive(4) == BatchSettings(*derived)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((32, 4, 3), "train_batch_size is 32, but train_micro_batch_size_per_gpu 4 x .*steps 3 x 4 ranks = 48"),
        ((30, 4, None), r"30 / \(train_micro_batch_size_per_gpu 4 x 4 ranks\) = 1\.875, .* use a multiple of 16"),
        ((30, None, None), r"30 / \(gradient_accumulation_steps 1 x 4 ranks\)"),
        ((None, 0, None), "train_micro_batch_size_per_gpu is 0; accepted: 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_named(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSettings(*given).derive(4)


def test_sizes_are_integers() -> None:
    with pytest.raises(TypeError, match=r"train_batch_size is 8\.0 \(float\)"):
        BatchSettings(8.0, None, None)  # type: ignore[arg-type]


def test_both_spellings_say_the_same() -> None:
    script = {
        "train_batch_size": 8, "gradient_clipping": 0.5, "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "scheduler": {"type": "WarmupLR"},
    }  # fmt: skip
    ours = settings_of({"stage": 2, **script}, 2)
    theirs = settings_of({"zero_optimization": {"stage": 2}, **script}, 2)
    for found in (ours, theirs):
        assert found.zero.stage == 2 and found.batch == BatchSettings(8, 4, 1) and found.clipping == 0.5
        assert found.compute_dtype == torch.bfloat16
        assert found.scheduler == Named("WarmupLR", {}, "user: mapping: scheduler")
    place = "user: mapping: optimizer"
    assert ours.optimizer == Named("Adam", {"lr": 0.1}, place)
    assert theirs.optimizer == Named("AdamW", {"lr": 0.1}, place), "DeepSpeed's Adam is AdamW by adam_w_mode's default"


def test_adam_without_decoupled_decay() -> None:
    params = {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": False}
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": params}}
    named = settings_of({"train_batch_size": 2, **config}, 1).optimizer
    assert named is not None
    made = make_optimizer(named, [torch.nn.Parameter(torch.ones(2))])
    assert type(made).__name__ == "FusedAdam" and made.param_groups[0]["weight_decay"] == 0.5


def test_defaults_depend_on_the_spelling() -> None:
    assert settings_of({"train_batch_size": 8}, 1).zero.stage == 0  # as in DeepSpeed
    assert settings_of({"train_batch_size": 8}, 1).clipping == 1.0  # of 0.19.8
    fp16 = settings_of({"train_batch_size": 8, "fp16": {"enabled": True}}, 1).zero.loss_scale
    assert fp16.growth_interval == 1000 and fp16.hysteresis == 2
    assert "0.19.8" in settings_of({"train_batch_size": 8}, 1).zero.origin_of("stage")
    assert settings_of({"prefetch": 2}, 1).zero.stage == 3 and ZeroConfig().loss_scale.growth_interval == 2000
    assert settings_of({"stage": 1}, 1).clipping == 0.0
    assert settings_of(load_config(stage=1), 1).zero.stage == 1
    assert settings_of(ZeroConfig(), 1).batch == BatchSettings(None, None, 1)


def test_base64_as_a_launcher_passes_it() -> None:
    text = base64.b64encode(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 4}).encode()).decode()
    assert settings_of(text, 1).zero.stage == 2 and settings_of(text, 1).batch.train_batch_size == 4


def test_files(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}))
    found = settings_of(str(tmp_path / "ds.json"), 1)
    assert found.zero.stage == 1 and found.compute_dtype == torch.float16
    assert found.zero.origin_of("stage") == f"user: {tmp_path / 'ds.json'}: zero_optimization.stage"
    (tmp_path / "ours.yaml").write_text("stage: 2\ntrain_batch_size: 4\n")
    assert settings_of(tmp_path / "ours.yaml", 2).batch.train_micro_batch_size_per_gpu == 2
    (tmp_path / "twice.json").write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    with pytest.raises(ValueError, match="'train_batch_size' is there twice"):
        settings_of(tmp_path / "twice.json", 1)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json cannot be read as JSON"):
        settings_of(tmp_path / "broken.json", 1)
    with pytest.raises(FileNotFoundError):
        settings_of(tmp_path / "none.json", 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_sise": 1}, "unknown key 'train_batch_sise'.*; did you mean 'train_batch_size'"),
        ({"stage": 1, "train_batch_sise": 1}, "train_batch_sise"),
        ({"stage": 1, "zero_optimization": {"stage": 1}}, "'stage' .* and 'zero_optimization'"),
        ({"zero_optimization": {"stag": 1}}, "did you mean 'zero_optimization.stage'"),
        ({"zero_optimization": {"stage": 4}}, "stage"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled"),
        ({"fp16": {"enable": True}}, "did you mean 'fp16.enabled'"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1.0 .*accepted: finite, 0"),
        ({"train_batch_size": "auto"}, "a script has none: give 'train_batch_size'"),
        ({"bf16": {"enabled": "auto"}}, "give 'bf16.enabled'"),
        ({"bfloat16": {"enabled": "auto"}}, "give 'bfloat16.enabled'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "give 'optimizer.params.lr'"),
        ({"optimizer": {"type": "Adam", "lr": 1}}, "unknown key 'optimizer.lr'"),
    ],
)
def test_script_config_mistakes_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(config, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_clipping": "1"}, "gradient_clipping is '1' .*expected number"),
        ({"fp16": True}, "fp16 is True .*expected a mapping"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled is 1 .*expected bool"),
        ({"stage": 1, "optimizer": {"params": {}}}, "optimizer.type must be a name"),
        (7, "config must be a mapping, a path or a config object, not int"),
    ],
)
def test_types_are_named(config: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        settings_of(config, 1)


# ---- config objects ----


def test_a_config_is_a_struct() -> None:
    config = Config(verbose=True)
    assert config.verbose is True and config["verbose"] is True and "verbose" in config
    assert Config.from_dict({"verbose": True}) == config != Config(verbose=False)
    config["level"] = 3
    assert config.level == 3 and config.is_valid() and repr(config) == "Config(verbose=True, level=3)"
    with pytest.raises(KeyError):
        config["none"]
    with pytest.raises(ValueError, match="'resolve' cannot be a setting of Config"):
        Config(resolve=True)
    with pytest.raises(TypeError, match=r"Config.from_dict takes a mapping of settings, not \[1\]"):
        Config.from_dict([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"TrainingConfig.batch takes a BatchConfig or a mapping .*, not 3"):
        TrainingConfig(batch=3)


class Inner(Config):
    size: int | None

    def resolve(self) -> None:
        self.size = 2 * self.size if self.size else 1

    def is_valid(self) -> bool:
        return super().is_valid() and self.size != 13


class Outer(Config):
    name = "outer"
    inner: Inner | None = None

    def title(self) -> str:
        return self.name.title()


def test_subclasses_group_settings_and_are_resolved_and_checked_below() -> None:
    config = Outer.from_dict({"inner": {"size": 4}})
    assert isinstance(config.inner, Inner) and config.title() == "Outer"
    config.resolve()
    assert config.inner.size == 8
    assert not Outer(inner=Flawed()).is_valid() and Outer().is_valid()
    with pytest.raises(ValueError, match="Outer has no setting 'nam'; did you mean 'name'"):
        Outer(nam="x")


class Flawed(Inner):
    def is_valid(self) -> bool:
        return False


def test_batches_resolve_from_two() -> None:
    config = BatchConfig(train_batch_size=8, gradient_accumulation_steps=2)
    assert config.is_valid() and config.train_micro_batch_size_per_gpu == 4 == config["train_micro_batch_size_per_gpu"]
    config = BatchConfig(train_step_batch_size=4, train_batch_size=8)
    assert config.train_step_batch_size == 4 and config.is_valid() and config.gradient_accumulation_steps == 2
    config.train_step_batch_size = 2
    assert config.train_micro_batch_size_per_gpu == 2 and not config.is_valid()


def test_batches_that_cannot_be_resolved() -> None:
    one = BatchConfig(train_batch_size=8)
    one.resolve()
    assert one.train_micro_batch_size_per_gpu is None and not one.is_valid() and not BatchConfig().is_valid()
    wrong = BatchConfig(train_batch_size=8, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="train_batch_size is 8, but"):
        wrong.resolve()
    assert not wrong.is_valid() and not TrainingConfig(batch=wrong).is_valid()
    with pytest.raises(ValueError, match="two names of one setting"):
        BatchConfig(train_micro_batch_size_per_gpu=3, train_step_batch_size=2)


def test_the_whole_config_is_one_for_a_script() -> None:
    config = TrainingConfig.from_dict(
        {"batch": {"train_batch_size": 8, "gradient_accumulation_steps": 2}, "fp16": {"enabled": True, "clip": 0.5}}
    )
    assert isinstance(config.fp16, FP16Config) and config.is_valid()
    found = settings_of(config, 1)
    assert found.batch == BatchSettings(8, 4, 2) and found.clipping == 0.5 and found.compute_dtype == torch.float16
    assert not FP16Config(clip=-1.0).is_valid() and not FP16Config(enabled="yes").is_valid()
    assert settings_of(TrainingConfig(batch={"train_batch_size": 2}), 1).clipping == 0.0
