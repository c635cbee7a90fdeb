"""Former import paths, and names in files, which must not change with the layout."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from zero_strategy.aliases import FORMER, present_path
from zero_strategy.compat.deepspeed.scripts.engine import COUNTERS_KEY
from zero_strategy.integrations.lightning.checkpoint_dict import EXTRA_KEY
from zero_strategy.integrations.lightning.uneven import STATE_KEY


@pytest.mark.parametrize("former", FORMER)
def test_a_former_path_is_the_module_of_today(former: str) -> None:
    module = import_module(f"zero_strategy.{former}")
    assert module is import_module(f"zero_strategy.{FORMER[former]}")
    assert module.__spec__ is not None and module.__spec__.name == module.__name__ == f"zero_strategy.{FORMER[former]}"


def test_what_lies_below_a_former_path_comes_with_it() -> None:
    assert present_path("zero_strategy.sharding.released") == "zero_strategy.fsdp.released"
    assert present_path("zero_strategy.fsdp.released") is None and present_path("torch.sharding") is None


def test_nothing_is_loaded_twice_under_two_names() -> None:
    script = (
        "import zero_strategy.sharding.model, zero_strategy.fsdp.model, sys\n"
        "assert sys.modules['zero_strategy.sharding.model'] is sys.modules['zero_strategy.fsdp.model']\n"
        "import zero_strategy.integrations.deepspeed as deepspeed\n"
        "assert deepspeed.initialize is zero_strategy.initialize"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_keys_in_checkpoints_keep_their_names() -> None:
    assert (STATE_KEY, EXTRA_KEY, COUNTERS_KEY) == (
        "zero_strategy.joined", "zero_strategy.extra_state", "zero_strategy.script"
    )  # fmt: skip


def test_megatron_s_norms_are_found_in_optim_as_before() -> None:
    from zero_strategy.compat.megatron import gradients
    from zero_strategy.optim import clip_grad_norm_, get_grad_norm

    assert clip_grad_norm_ is gradients.clip_grad_norm_ and get_grad_norm is gradients.get_grad_norm


@pytest.mark.parametrize(
    "name",
    [
        "strategy_setup._EngineSlot", "strategy_setup.engine_of", "accelerate_models.ZeroOptimizer",
        "accelerate_models.AgreedGradScaler", "pipeline_runs.AcceleratorRunner", "precision.TrainerPrecision",
    ],
)  # fmt: skip
def test_a_name_that_pickles_of_earlier_versions_hold_is_found(name: str) -> None:
    module, _, attribute = name.partition(".")
    assert getattr(import_module(f"zero_strategy.integrations.{module}"), attribute).__name__ == attribute
    with pytest.raises(AttributeError, match="nothing"):
        import_module(f"zero_strategy.integrations.{module}").nothing  # noqa: B018
