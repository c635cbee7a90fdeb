"""Models with transformers' own `DistributedConfig`: which it has divided, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig

from tests.integrations.accelerate.training import fresh_state
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.compat import deepspeed
from zero_strategy.fsdp.divided_elsewhere import check_not_divided
from zero_strategy.fsdp.dtensor import is_dtensor
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.integrations.transformers import from_pretrained

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mixtral(asked: DistributedConfig | None = None) -> transformers.MixtralForCausalLM:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SHAPE)
    if asked is not None:
        config.distributed_config = asked
    return transformers.MixtralForCausalLM(config)


def refused(call: Any) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    mixtral().save_pretrained(tmp_path / "experts")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "dense")
    return tmp_path


def loaded_in_parts(path: Path, sizes: dict[str, int]) -> tuple[bool, list[str]]:
    asked = DistributedConfig(**sizes)
    model = transformers.MixtralForCausalLM.from_pretrained(path / "experts", distributed_config=asked)
    experts = model.model.layers[0].mlp.experts
    divided = is_dtensor(experts.gate_up_proj) and "ep" in experts.gate_up_proj.device_mesh.mesh_dim_names
    said = [refused(lambda: ZeroEngine(model, {"stage": 2, "mesh": {"expert": sizes.get("ep_size", 1)}}))]
    said.append(refused(lambda: ZeroEngine(nn.ModuleDict({"inner": model}), {"stage": 3})))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    said.append(refused(lambda: deepspeed.initialize(model=model, config=config)))
    fresh_state()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    said.append(refused(lambda: ZeroAccelerator(cpu=True, zero_config={"stage": 2}).prepare(model, optimizer)))
    return divided, said


@pytest.mark.parametrize(
    "sizes, divided, way",
    [
        ({"fsdp_size": 2, "ep_size": 2}, True, "; set mesh.expert to 2; an ep_plan of your own is model.ep_plan"),
        ({"tp_size": 2, "ep_size": 2}, True, "model.ep_plan; leave mesh.tensor at 1, since ranks"),
        ({"fsdp_size": 2}, False, "load it without distributed_config, since this engine divides it"),
        ({"dp_replicate_size": 2}, False, "since this engine divides it; set mesh.replicate to 2"),
    ],
)
def test_what_transformers_has_divided_is_refused(
    ranks: Launcher, saved: Path, sizes: dict[str, int], divided: bool, way: str
) -> None:
    """Such weights were taken as tensor parallelism where their mesh has one dimension."""
    shown = ", ".join(f"{key}={value}" for key, value in sizes.items())
    for found, said in ranks(2)(loaded_in_parts, saved, sizes):
        assert found == divided
        for each in said:
            assert each.startswith(f"MixtralForCausalLM was loaded with DistributedConfig({shown}), so"), each
            assert way in each


def of_layers(path: Path) -> int | None:
    asked = DistributedConfig(tp_size=2)
    model = transformers.LlamaForCausalLM.from_pretrained(path / "dense", distributed_config=asked)
    engine = ZeroEngine(model, {"stage": 1})
    engine.close()
    return engine.config.config.mesh.tensor


def test_layers_that_transformers_has_divided_are_taken(ranks: Launcher, saved: Path) -> None:
    assert ranks(2)(of_layers, saved) == [2, 2]


def test_a_distributed_config_that_nothing_was_divided_by(tmp_path: Path) -> None:
    """`save_pretrained` gathers by itself then, and writes none of the weights that it is given."""
    model = mixtral(DistributedConfig(ep_size=2, fsdp_size=2))
    said = refused(lambda: ZeroEngine(model, {"stage": 2}))
    assert said.startswith("MixtralForCausalLM.config.distributed_config is DistributedConfig(fsdp_size=2, ep_size=2)")
    assert "set it to None" in said and "set mesh.expert to 2" in said
    model.config.distributed_config = None
    ZeroEngine(model, {"stage": 2}).close()
    for harmless in (DistributedConfig(), None):
        check_not_divided(mixtral(harmless))


def test_tokens_that_are_sent_already() -> None:
    model = mixtral()
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    said = refused(lambda: ZeroEngine(model, {"stage": 2}))
    assert said.startswith("model.layers.0.mlp.experts sends tokens to the experts of other ranks already")
    assert "set mesh.expert to the number of ranks" in said


def test_our_own_loading_names_the_settings(saved: Path) -> None:
    asked = DistributedConfig(ep_size=2, fsdp_size=2, dp_replicate_size=4)
    both = refused(
        lambda: from_pretrained(
            transformers.MixtralForCausalLM, saved / "experts", distributed_config={"ep_size": 2, "tp_size": 2}
        )
    )
    assert both.endswith("leave mesh.tensor at 1, since ranks that divide experts have data of their own")
    for given in (asked, asked.to_dict(), {"ep_size": 2, "fsdp_size": 2, "dp_replicate_size": 4}):
        said = refused(
            lambda given=given: from_pretrained(
                transformers.MixtralForCausalLM, saved / "experts", distributed_config=given
            )
        )
        assert said.startswith("distributed_config=") and "; drop it; set mesh.expert to 2; an ep_plan" in said
        assert said.endswith("; set mesh.replicate to 4")
