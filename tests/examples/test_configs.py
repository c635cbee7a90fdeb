"""Every preset composes, and is of the size that its name says."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from gpt_lightning import GPTModule
from gpt_model import GPT, GPTConfig
from train_gpt import trainer_arguments

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {
    "gpt-2m": 1_822_080,
    "gpt-10m": 10_725_120,
    "gpt-50m": 47_952_000,
    "gpt-125m": 127_655_424,
    "gpt-350m": 352_700_416,
    "gpt-1b": 1_007_325_184,
}


def composed(*overrides: str) -> DictConfig:
    """The configuration of a run with these command-line arguments."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train_gpt", list(overrides))


def presets(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_every_model_preset_has_a_size() -> None:
    assert presets("model") == sorted(SIZES)


@pytest.mark.parametrize("name", presets("model"))
def test_model_preset_is_as_large_as_its_name_says(name: str) -> None:
    config = composed(f"model={name}")
    with torch.device("meta"):
        model = GPT(GPTConfig(**config.model))
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


@pytest.mark.parametrize("name", presets("strategy"))
def test_strategy_preset_names_a_strategy(name: str) -> None:
    config = composed(f"strategy={name}")
    stage = int(name[4]) if name.startswith("zero") else None
    assert config.strategy.get("stage") == stage
    assert config.strategy._target_.endswith("Strategy")


@pytest.mark.parametrize("name", presets("trainer"))
def test_trainer_preset_is_complete(name: str) -> None:
    config = composed(f"trainer={name}", "trainer.max_steps=7")
    arguments = trainer_arguments(config.trainer)
    assert arguments["max_steps"] == 7 and arguments["val_check_interval"] == 14
    assert arguments["gradient_clip_val"] == 1.0


def test_auto_means_two_processes_on_the_cpu() -> None:
    assert trainer_arguments(composed("trainer.accelerator=cpu").trainer)["devices"] == 2
    assert trainer_arguments(composed("trainer=cpu2", "trainer.devices=4").trainer)["devices"] == 4


def test_module_is_built_from_the_composed_configuration() -> None:
    plain = OmegaConf.to_container(composed())
    assert isinstance(plain, dict)
    module = GPTModule(model=plain["model"], optim=plain["optim"])
    assert module.model is None, "the model is built where the strategy may shard it"
    module.configure_model()
    assert isinstance(module.model, GPT)
