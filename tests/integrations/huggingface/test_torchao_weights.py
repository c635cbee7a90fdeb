"""Weights that torchao quantises: transformers' own values, trained with adapters, read by slices or whole."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.huggingface.test_pretrained import saved
from tests.integrations.huggingface.test_quantised import TWENTY_STEPS, makes, trained_plainly
from tests.integrations.huggingface.training import difference, run
from tests.launcher import Launcher
from tests.quantized.layers import apart, same_bits
from zero_strategy.integrations.transformers import from_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
HOW = "torchao-int8"


def beside_ddp(kind: str, path: str, how: str) -> Any:
    """A plain model; `DistributedDataParallel` refuses such weights unless it is told to leave them alone."""
    model = makes(kind, path, how, ours=False)
    left = [name for name, value in model.state_dict().items() if hasattr(value, "__tensor_flatten__")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left)
    return model


@pytest.fixture(scope="module")
def plain_training(ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained_plainly(ranks, tmp_path_factory.mktemp("torchao"), HOW, beside_ddp)


@pytest.mark.parametrize("memory", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_adapters_on_torchao_s_weights(
    ranks: Launcher, plain_training: Any, tmp_path: Path, memory: str, stage: int
) -> None:
    path, plain = plain_training
    offload = {"optimizer": memory, **({"parameters": memory} if stage == 3 else {})}
    made = functools.partial(makes, path=path, how=HOW, ours=True)
    ours = ranks(2, timeout=120)(
        run, stage, "llama", str(tmp_path), zero={"offload": offload}, make=made, **TWENTY_STEPS
    )[0]
    assert len(ours[0]) > 20 and difference(plain[0], ours[0]) < 1e-5
    trained = {name for name in plain[1] if "lora_" in name}
    assert trained and max(float((plain[1][n] - ours[1][n]).abs().max()) for n in trained) < 2e-6


def loaded(path: str, stage: int, ours: bool) -> list[str]:
    transformers.logging.set_verbosity_error()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    plain = AutoModelForCausalLM.from_pretrained(path, **options)
    with fresh_state():
        # Whole on every rank, or in slices.
        model = from_pretrained(AutoModelForCausalLM, path, **options) if ours else plain
        expected = {name: value.clone() for name, value in apart(plain.state_dict()).items()}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        accelerator: Any = make(stage)
        accelerator.prepare(model)
        return same_bits(accelerator.engine(model).full_state_dict(), expected)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_those_that_torchao_makes(ranks: Launcher, tmp_path: Path, stage: int, ours: bool) -> None:
    for world in (2, 3):
        for wrong in ranks(world)(loaded, saved(tmp_path, "llama"), stage, ours):
            assert not wrong


def refused(path: str) -> None:
    transformers.logging.set_verbosity_error()
    with fresh_state(), pytest.raises(ValueError, match=r"TorchAoConfig\(FqnToConfig\): all linear weights"):
        config = TorchAoConfig(FqnToConfig({"_default": Int8WeightOnlyConfig()}))
        from_pretrained(AutoModelForCausalLM, path, quantization_config=config)


def test_torchao_settings_that_differ_by_layer_are_refused(ranks: Launcher, tmp_path: Path) -> None:
    ranks(1)(refused, saved(tmp_path, "llama"))
