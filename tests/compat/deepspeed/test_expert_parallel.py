"""Scripts with `expert_parallel` (AutoEP) in their JSON, against the same model on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.launcher import Launcher
from zero_strategy.compat import deepspeed

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def script(stage: int) -> tuple[int, int, float]:
    """Ranks that divide experts, ranks with the same ones, and the largest difference of a weight."""
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE))
    plain = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        batches = [torch.randint(32, (1, 8)) for _ in range(dist.get_world_size())]
        own = batches[dist.get_rank()]
        engine.backward(engine(input_ids=own, labels=own).loss)
        engine.step()
        losses = torch.stack([plain(input_ids=batch, labels=batch).loss for batch in batches])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.zero.full_state_dict()
    gap = max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    ranks = engine.zero.mesh.expert.size, engine.zero.mesh.expert_reduce.size
    engine.destroy()
    return *ranks, gap


@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_whose_json_divides_experts(ranks: Launcher, stage: int) -> None:
    for divide, share, gap in ranks(4)(script, stage):
        assert (divide, share) == (2, 2) and gap < 1e-6
