"""The names of DeepSpeed's module tree, as scripts import them, and what stands behind them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_strategy
import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher
from zero_strategy import fsdp as sharding
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.fsdp.released import ShardedParameter

TREE = {
    "": ("initialize", "init_distributed", "add_config_arguments", "DeepSpeedEngine", "zero", "comm", "utils", "ops"),
    ".zero": ("Init", "GatheredParameters", "register_external_parameter", "unregister_external_parameter"),
    ".runtime.zero": ("Init", "GatheredParameters"),
    ".runtime.zero.stage_1_and_2": ("estimate_zero2_model_states_mem_needs_all_live",),
    ".runtime.zero.stage3": ("estimate_zero3_model_states_mem_needs_all_live",),
    ".runtime.lr_schedules": ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    ".runtime.dataloader": ("RepeatingLoader",),
    ".runtime.config": ("TrainingConfig",),
    ".runtime.engine": ("DeepSpeedEngine",),
    ".config": ("Config", "TrainingConfig", "BatchConfig", "FP16Config"),
    ".utils": (
        "RepeatingLoader",
        *(f"safe_{verb}_full_{what}" for verb in ("get", "set") for what in ("fp32_param", "grad", "optimizer_state")),
    ),
    ".comm": ("init_distributed", "get_rank", "get_world_size", "barrier", "all_reduce", "get_local_rank"),
    ".ops.adam": ("FusedAdam", "DeepSpeedCPUAdam"),
}


@pytest.mark.parametrize("module", TREE)
def test_every_name_is_there(module: str) -> None:
    found = import_module(deepspeed.__name__ + module)
    for name in TREE[module]:
        assert getattr(found, name) is not None
    with pytest.raises(AttributeError, match="no_such"):
        _ = found.no_such


def test_names_are_the_package_s_own() -> None:
    assert deepspeed.initialize is zero_strategy.initialize
    assert deepspeed.DeepSpeedEngine is ScriptEngine
    assert deepspeed.runtime.zero.Init is deepspeed.zero.Init and issubclass(deepspeed.zero.Init, sharding.Init)
    assert deepspeed.ops.adam.FusedAdam.__mro__[1] is zero_strategy.FusedAdam
    assert {"initialize", "zero", "comm"} <= set(dir(deepspeed))


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = (
        "import sys, zero_strategy; assert not [m for m in sys.modules if m.startswith(('zero_strategy.compat', "
        "'lightning', 'accelerate', 'transformers', 'deepspeed'))]; zero_strategy.initialize; "
        "assert not [m for m in sys.modules if m.startswith(('lightning', 'accelerate', 'transformers', 'deepspeed'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("decoupled", "plain"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_adam_classes_take_torch_s_steps(decoupled: bool, plain: type[torch.optim.Optimizer]) -> None:
    weights = torch.linspace(-1, 1, 12)
    ours, cpu, torchs = (nn.Parameter(weights.clone()) for _ in range(3))
    options = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizers = [
        deepspeed.ops.adam.FusedAdam([ours], adam_w_mode=decoupled, **options),
        deepspeed.ops.adam.DeepSpeedCPUAdam([cpu], adamw_mode=decoupled, **options),
        plain([torchs], foreach=False, **options),
    ]
    for step in range(3):
        for parameter, optimizer in zip((ours, cpu, torchs), optimizers, strict=True):
            parameter.grad = torch.sin(weights + step)
            optimizer.step()
    assert torch.allclose(ours, torchs, atol=1e-7) and torch.equal(ours, cpu)


@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_an_adam_option_that_is_not_done_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="amsgrad=True"):
        getattr(deepspeed.ops.adam, name)([nn.Parameter(torch.ones(1))], amsgrad=True)


def inside_of_a_run() -> None:
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 2, "gradient_clipping": 0.0}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Linear(4, 4)
    assert isinstance(model.weight, ShardedParameter)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    deepspeed.zero.register_external_parameter(model, model.weight)
    deepspeed.zero.unregister_external_parameter(model, model.weight)
    with deepspeed.zero.GatheredParameters(model.weight, 0, None):
        if deepspeed.comm.get_rank() == 0:
            model.weight.data.fill_(2.0)
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(model.weight), torch.full((4, 4), 2.0))
    deepspeed.utils.safe_set_full_fp32_param(model.weight, torch.full((4, 4), 3.0))
    with deepspeed.zero.GatheredParameters([model.weight], enabled=True):
        assert torch.equal(model.weight, torch.full((4, 4), 3.0))
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert torch.equal(deepspeed.utils.safe_get_full_grad(model.weight), torch.ones(4, 4))
    engine.step()
    total = torch.ones(1)
    deepspeed.comm.all_reduce(total)
    deepspeed.comm.barrier()
    assert total.item() == deepspeed.comm.get_world_size() == dist.get_world_size()


def test_in_a_run_of_two_ranks(ranks: Launcher) -> None:
    ranks(2)(inside_of_a_run)


@pytest.mark.parametrize(
    "arguments", [{"dtype": torch.float16}, {"remote_device": "nvme"}, {"module": nn.Linear(1, 1)}, {"mpu": object()}]
)
def test_init_names_what_it_does_not_do(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"zero.Init\\({next(iter(arguments))}="):
        deepspeed.zero.Init(**arguments)


def test_external_parameters_are_parameters() -> None:
    with pytest.raises(TypeError, match="not Linear and Tensor"):
        deepspeed.zero.register_external_parameter(nn.Linear(1, 1), torch.ones(1))
