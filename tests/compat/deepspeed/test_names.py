"""The names that scripts import of DeepSpeed: each does what it does there, or is refused with a reason."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed.names import OTHERS, TABLE, Refused
from zero_strategy.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.fsdp.layout import find_units

MODULES = (Path(__file__).parents[3] / "docs/reference/deepspeed_modules.md").read_text()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in TABLE.items() for name in names])
def test_every_name_of_the_table(place: str, name: str) -> None:
    entry, module = TABLE[place][name], ".".join([deepspeed.__name__, place]).rstrip(".")
    if isinstance(entry, Refused):
        with pytest.raises(ImportError) as error:
            exec(f"from {module} import {name}")
        assert entry.reason in str(error.value) and name in str(error.value)
    else:
        found: dict[str, Any] = {}
        exec(f"from {module} import {name}", found)
        source, _, there = entry.partition(":")
        assert found[name] is getattr(import_module(source), there or name)


def test_places_are_documented() -> None:
    for place in TABLE:
        assert not place or f"`{place}" in MODULES, place


def test_names_that_nobody_has() -> None:
    for place in TABLE:
        module = import_module(".".join([deepspeed.__name__, place]).rstrip("."))
        others = OTHERS.get(place)
        error, said = (ImportError, others.reason) if isinstance(others, Refused) else (AttributeError, "no_such")
        with pytest.raises(error, match=re.escape(said)):
            _ = module.no_such
        with pytest.raises(AttributeError, match="__no_such__"):
            _ = module.__no_such__
        with pytest.raises(ImportError):
            exec(f"from {module.__name__} import no_such")


def test_modules_of_the_table() -> None:
    for place in TABLE:
        module = import_module(".".join([deepspeed.__name__, place]).rstrip("."))
        below = {other for other in TABLE if other.startswith(f"{place}.".lstrip(".")) and other}
        children = {other.removeprefix(f"{place}.".lstrip(".")) for other in below}
        assert hasattr(module, "__path__") == bool(children), place
        offered = {name for name, entry in TABLE[place].items() if not isinstance(entry, Refused)}
        assert offered | {child for child in children if "." not in child} <= set(dir(module)), place
        assert not {name for name in TABLE[place] if name not in offered} & set(dir(module)), place
        assert module.__doc__ and set(module.__all__) <= offered, place
        assert import_module(module.__name__.replace("compat", "integrations", 1)) is module


def test_a_name_hides_the_module_of_the_same_name() -> None:
    module = import_module(f"{deepspeed.__name__}.utils.z3_leaf_module")
    assert deepspeed.utils.z3_leaf_module is module.z3_leaf_module


def test_importing_a_module_imports_none_of_its_names() -> None:
    code = (
        "import sys, zero_strategy.compat.deepspeed.runtime.zero.partition_parameters, "
        "zero_strategy.compat.deepspeed.ops.adam as adam; "
        "assert not [m for m in sys.modules if m.startswith(('zero_strategy.compat.deepspeed.zero', "
        "'zero_strategy.compat.deepspeed.optimizers', 'zero_strategy.optim'))]; adam.FusedAdam"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("package", ["compat", "integrations"])
def test_a_module_with_a_main_is_a_command(package: str) -> None:
    module = f"zero_strategy.{package}.deepspeed.checkpoint.ds_to_universal"
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--inject_missing_state" in done.stdout, done.stderr


# ---- the first script of DeepSpeed's documentation ----


def test_the_first_script(tmp_path: Path) -> None:
    from zero_strategy.compat.deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)
    get_accelerator().set_device(0)
    device = torch.device(get_accelerator().device_name(), get_accelerator().current_device())
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=filter(lambda parameter: parameter.requires_grad, model.parameters()),
        training_data=torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(2, (16,))),
        config={
            "train_batch_size": 4,
            "steps_per_print": 2000,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 10}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
        },
    )
    assert loader is not None
    for x, y in loader:
        loss = nn.functional.cross_entropy(engine(x.to(device)), y.to(device))
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 4 and engine.save_checkpoint(tmp_path)
    assert get_accelerator().memory_allocated() > 0 and get_accelerator() is deepspeed.get_accelerator()


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = deepspeed.get_accelerator()
    assert (found.device_name(), found.current_device_name(), found.device_count()) == ("cpu", "cpu", 1)
    assert found.is_available() and found.communication_backend_name() == "gloo" and found.is_bf16_supported()
    assert torch.float16 in found.supported_dtypes() and found.on_accelerator(torch.ones(1))
    assert found.max_memory_allocated() >= found.memory_allocated() > 0 and found.total_memory() > 0
    assert found.available_memory() > 0 and "allocated_bytes.all.peak" in found.memory_stats()
    found.synchronize(), found.empty_cache(), found.reset_peak_memory_stats(), found.range_push("x"), found.range_pop()
    with found.stream(found.Stream()), found.device(0):
        assert torch.ones(1).device.type == "cpu"
    state = found.get_rng_state()
    found.manual_seed(1)
    first = torch.rand(2)
    found.manual_seed_all(1)
    assert torch.equal(first, torch.rand(2)) and found.initial_seed() == 1
    found.set_rng_state(state)
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(ValueError, match="DS_ACCELERATOR is 'xpu'"):
        deepspeed.get_accelerator()


# ---- parts of parameters, gradients and states ----


def start(model: nn.Module, stage: int, **more: Any) -> ScriptEngine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def together(part: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts)


def parts_of_a_run() -> None:
    utils = deepspeed.utils
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        engine = start(model, stage)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 5)).sum())
            engine.step()
        engine.backward(engine(torch.ones(2, 5)).sum())
        for parameter in model.parameters():
            part, gradient = utils.safe_get_local_fp32_param(parameter), utils.safe_get_local_grad(parameter)
            moment = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
            assert part.dim() == 1 and part.shape == gradient.shape == moment.shape
            assert torch.equal(together(part), utils.safe_get_full_fp32_param(parameter).flatten())
            assert torch.equal(together(gradient), utils.safe_get_full_grad(parameter).flatten())
            whole = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
            assert torch.equal(together(moment), whole.flatten())
            utils.safe_set_local_fp32_param(parameter, part * 2)
            utils.safe_set_local_grad(parameter, gradient * 3)
            utils.safe_set_local_optimizer_state(parameter, moment * 4, "exp_avg")
            assert torch.equal(utils.safe_get_full_fp32_param(parameter).flatten(), together(part) * 2)
            assert torch.equal(utils.safe_get_full_grad(parameter).flatten(), together(gradient) * 3)
            assert torch.equal(utils.safe_get_full_optimizer_state(parameter, "exp_avg"), whole * 4)
            with pytest.raises(ValueError, match="this rank's part of the parameter has"):
                utils.safe_set_local_fp32_param(parameter, torch.ones(1000))
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for parameter in model.parameters():
                assert torch.equal(parameter, utils.safe_get_full_fp32_param(parameter))
        engine.step()
        engine.destroy()


def test_parts_put_together_are_the_whole(ranks: Launcher) -> None:
    ranks(2)(parts_of_a_run)


# ---- modules that are gathered as one ----


class Mixture(nn.Module):
    """Experts of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts[dist.get_rank() % 2](x)
        return out


def mixtures() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Mixture(), nn.Linear(4, 2))


def test_modules_that_are_gathered_as_one() -> None:
    utils, model = deepspeed.utils, mixtures()
    names = lambda: [unit.name for unit in find_units(model)]  # noqa: E731
    before = names()
    assert "1.experts.0" in before
    assert utils.set_z3_leaf_modules(model, [Mixture]) == [model[1]] == utils.get_z3_leaf_modules(model)
    assert utils.z3_leaf_module(model[1]) and not utils.z3_leaf_module(model[0])
    assert names() == ["", "0", "1", "2"]
    assert utils.unset_z3_leaf_modules(model, ["Mixture"]) == [model[1]] and names() == before
    assert utils.set_z3_leaf_modules_by_name(model, ["1"]) == [model[1]] and "1" in names()
    with pytest.raises(ValueError, match="no module of Sequential has the classes"):
        utils.set_z3_leaf_modules(model, ["Mixtur"])
    assert utils.set_z3_leaf_modules(model, ["Mixtur"], raise_if_not_found=False) == []


def experts_by_rank() -> list[float]:
    model = mixtures()
    deepspeed.utils.set_z3_leaf_modules(model, [Mixture])
    engine = start(model, 3, gradient_clipping=0.0)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    return [float(value.double().sum()) for value in engine.state_dict().values()]


def test_experts_by_rank_in_modules_that_are_gathered_as_one(ranks: Launcher) -> None:
    first, second = ranks(2)(experts_by_rank)
    assert first == second


# ---- configs ----


def test_the_section_as_an_object() -> None:
    enum = import_module(f"{deepspeed.__name__}.runtime.zero.offload_config").OffloadDeviceEnum
    made = DeepSpeedZeroConfig(stage=3, offload_param={"device": enum.cpu}, prefetch_bucket_size=10)
    assert (made.stage, made.stage3_prefetch_bucket_size, made.reduce_bucket_size) == (3, 10, 5 * 10**8)
    assert made.offload_param.device == enum.cpu == "cpu" and made.offload_optimizer is None
    assert made.model_dump()["offload_param"]["device"] == "cpu"
    engine = start(nn.Linear(2, 2), 3, zero_optimization={"stage": 3, "offload_optimizer": {"device": enum.cpu}})
    assert engine.zero.config.config.offload.optimizer == "cpu"
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"did you mean 'zero_optimization\.stage'"):
        DeepSpeedZeroConfig(stge=3)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="accepted: 0, 1, 2, 3"):
        start(nn.Linear(2, 2), 4)


def test_models_are_built_on_a_device() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(3, 3)
    assert model.weight.is_meta and model.weight.dtype == torch.bfloat16
    with deepspeed.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert nn.Linear(1, 1).weight.dtype == torch.float32 == torch.get_default_dtype()


def test_lines_of_some_ranks(ranks: Launcher) -> None:
    assert ranks(2)(logged_ranks) == [["[Rank 0] both", "[Rank 0] first"], ["[Rank 1] both"]]


def logged_ranks() -> list[str]:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Kept()
    deepspeed.logger.addHandler(handler)
    deepspeed.log_dist("both", ranks=[-1])
    deepspeed.log_dist("first", ranks=[0])
    deepspeed.log_dist("nobody")
    deepspeed.logger.removeHandler(handler)
    groups = deepspeed.utils.groups
    assert groups._get_data_parallel_world_size() == 2 and groups._get_data_parallel_rank() == dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total, group=groups._get_data_parallel_group())
    assert total.item() == 2
    return lines


# ---- profiles, experts ----


def test_the_profile_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from zero_strategy.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    operations, parameters = 2 * 5 * (8 * 16 + 16 * 4), 8 * 16 + 16 + 16 * 4 + 4
    assert get_model_profile(model, (5, 8), as_string=False) == (operations, operations // 2, parameters)
    assert "  2: Linear  68 (32.1 %)" in capsys.readouterr().out
    shown = get_model_profile(model, args=[torch.ones(5, 8)], print_profile=False)
    assert shown == ("1.92 KFLOPS", "960 MACs", "212") and not capsys.readouterr().out
    profiler = FlopsProfiler(model)
    for step in range(3):
        if step == 1:
            profiler.start_profile()
        model(torch.ones(5, 8)).sum().backward()
        if step == 1:
            profiler.stop_profile()
            assert profiler.get_total_flops() == operations and profiler.get_total_duration() > 0
            profiler.print_model_profile(output_file=str(tmp_path / "profile.txt"), detailed=False)
            profiler.end_profile()
    assert "operations of the forward" in (tmp_path / "profile.txt").read_text()
    assert not model[0]._forward_hooks and not profiler.get_total_flops()
    with pytest.raises(ValueError, match="ignore_modules"):
        get_model_profile(model, (5, 8), ignore_modules=[nn.ReLU])
    with pytest.raises(ValueError, match="needs inputs"):
        get_model_profile(model)


def test_models_without_experts_in_parallel() -> None:
    from zero_strategy.compat.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    group = {"params": list(nn.Linear(2, 2).parameters()), "name": "parameters"}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert not deepspeed.moe.utils.is_moe_param(group["params"][0])
    with pytest.raises(ImportError, match=r"zero_strategy\.experts\.DivisibleExperts.* mesh\.expert .*autoep_size"):
        _ = deepspeed.moe.layer.MoE
    for name in ("_get_expert_parallel_group", "_get_expert_data_parallel_group", "_get_max_expert_size"):
        with pytest.raises(ImportError, match=r"autoep_size.*engine\.zero\.mesh\.expert"):
            getattr(deepspeed.utils.groups, name)
    assert deepspeed.__version__ == "0.19.8"


# ---- optimizers ----


@pytest.mark.parametrize(
    ("place", "name", "plain"),
    [
        ("ops.adagrad", "DeepSpeedCPUAdagrad", torch.optim.Adagrad),
        ("ops.lion", "DeepSpeedCPULion", None),
        ("ops.lion", "FusedLion", None),
        ("ops.lamb", "FusedLamb", None),
    ],
)
def test_optimizers_step(place: str, name: str, plain: type[torch.optim.Optimizer] | None) -> None:
    weights = torch.linspace(-1, 1, 12)
    ours, other = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = getattr(import_module(f"{deepspeed.__name__}.{place}"), name)([ours], lr=0.05, weight_decay=0.1)
    ours.grad = torch.sin(weights)
    optimizer.step()
    if plain is not None:
        other.grad = torch.sin(weights)
        plain([other], lr=0.05, weight_decay=0.1).step()  # type: ignore[call-arg]
        assert torch.allclose(ours, other, atol=1e-7)
    if "Lion" in name:
        expected = weights * (1 - 0.05 * 0.1) - 0.05 * torch.sign(torch.sin(weights))
        assert torch.allclose(ours, expected, atol=1e-6)
    assert not torch.equal(ours, weights)
    if name != "FusedLion":
        option = "amsgrad" if "Lion" not in name else None
        if option:
            with pytest.raises(ValueError, match="amsgrad=True"):
                type(optimizer)([ours], amsgrad=True)


# ---- the engine ----


def test_batch_sizes_may_change() -> None:
    engine = start(nn.Linear(2, 2), 1, gradient_accumulation_steps=2)
    assert engine.train_batch_size() == 4
    engine.set_train_batch_size(8)
    assert (engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()) == (4, 2)
    loss = engine(torch.ones(2, 2)).sum()
    assert torch.equal(engine.backward(loss), loss / 4)
    with pytest.raises(ValueError, match="no multiple of train_micro_batch_size_per_gpu 2 x 1"):
        engine.set_train_batch_size(7)
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (12, 3, 4) and (engine.dp_world_size, engine.mp_world_size) == (1, 1)
    assert engine.cur_scale == 1.0 and not engine.dynamic_loss_scale() and not engine.zero_cpu_offload()


def of_the_engine(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    engine = start(model, 3, bf16={"enabled": True}, gradient_clipping=0.0)
    loss = engine(torch.randn(2, 3).bfloat16()).float().sum()
    engine.backward(loss, allreduce_gradients=False)
    engine.allreduce_gradients()
    engine.step()
    engine.empty_partition_cache()
    assert engine.save_16bit_model(folder) and engine.save_16bit_model(folder, "trained.bin", True)
    whole = engine.state_dict()
    found = torch.load(Path(folder, "pytorch_model.bin"), weights_only=True)
    assert list(found) == list(whole) and found["0.weight"].dtype == torch.bfloat16
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in whole.items())
    trained = torch.load(Path(folder, "trained.bin"), weights_only=True)
    assert set(whole) - set(trained) == {"0.weight"}
    engine.offload_states()
    engine.reload_states()
    engine.save_checkpoint(Path(folder, "run"), tag="first")
    masters = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(masters, Path(folder, "masters.pt"))


def test_whole_weights_of_a_checkpoint(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(of_the_engine, str(tmp_path))
    from zero_strategy.compat.deepspeed.utils import zero_to_fp32

    masters = torch.load(tmp_path / "masters.pt", weights_only=True)
    for tag in (None, "first"):
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", tag)
        assert all(torch.equal(found[name], value) for name, value in masters.items())
        assert found["1.running_mean"].dtype == torch.float32 and found["1.num_batches_tracked"].item() == 1
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", exclude_frozen_parameters=True)
    assert set(trained) == set(masters) - {"0.weight"}
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(model, tmp_path / "run") is model
    assert all(torch.equal(parameter, masters[name]) for name, parameter in model.named_parameters())
    for safe in (True, False):
        for size, files in (("5GB", 1), ("40B", 3)):
            out = tmp_path / f"out-{safe}-{size}"
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", out, size, safe)
            shards = sorted(out.glob("model*.safetensors" if safe else "pytorch_model*.bin"))
            assert len(shards) >= files and (len(shards) == 1) == (files == 1)
            tensors: dict[str, Tensor] = {}
            for shard in shards:
                tensors |= load_file(shard) if safe else torch.load(shard, weights_only=True)
            assert set(tensors) == set(model.state_dict()) and torch.equal(tensors["0.weight"], masters["0.weight"])
            if files > 1 and not safe:
                index = json.loads((out / "pytorch_model.bin.index.json").read_text())
                assert set(index["weight_map"]) == set(tensors)
