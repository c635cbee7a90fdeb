"""DeepSpeed 0.3's API, chapters 1 to 3, row by row: names, signatures, defaults, module paths, what comes back."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy.compat.deepspeed as deepspeed

PACKAGE = deepspeed.__name__
BATCH = {"train_batch_size": 4}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """`initialize` starts a process group of one, which other tests shall not see."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def data() -> TensorDataset:
    return TensorDataset(torch.arange(24.0).reshape(8, 3), torch.ones(8, 1))


# ---- signatures, as the documentation prints them ----

SIGNATURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "add_config_arguments": (deepspeed.add_config_arguments, {"parser": inspect.Parameter.empty}),
    "initialize": (
        deepspeed.initialize,
        dict.fromkeys(("args", "model", "optimizer", "model_parameters", "training_data"))
        | dict.fromkeys(("lr_scheduler", "mpu", "dist_init_required", "collate_fn")),
    ),
    "init_distributed": (
        deepspeed.init_distributed,
        {
            "dist_backend": None,  # "nccl" there; here what suits the machine, which is nccl where there are GPUs
            "auto_mpi_discovery": True,
            "distributed_port": 29500,
            "verbose": True,
            "timeout": timedelta(minutes=30),
            "init_method": None,
        },
    ),
    "backward": (
        deepspeed.DeepSpeedEngine.backward,
        {"self": inspect.Parameter.empty, "loss": inspect.Parameter.empty}
        | {"allreduce_gradients": True, "release_loss": False},
    ),
    "step": (deepspeed.DeepSpeedEngine.step, {"self": inspect.Parameter.empty, "lr_kwargs": None}),
    "is_gradient_accumulation_boundary": (
        deepspeed.DeepSpeedEngine.is_gradient_accumulation_boundary,
        {"self": inspect.Parameter.empty},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_deepspeed_arguments_come_in_the_documented_order_with_the_documented_defaults(name: str) -> None:
    function, documented = SIGNATURES[name]
    found = inspect.signature(function).parameters
    assert {key: found[key].default for key in list(found)[: len(documented)]} == documented
    assert list(found)[: len(documented)] == list(documented)


# ---- module paths ----

PATHS = {
    "": [
        *("DeepSpeedEngine", "PipelineEngine", "PipelineModule", "DeepSpeedTransformerLayer"),
        *("initialize", "init_distributed", "add_config_arguments"),
    ],
    "config": ["Config", "TrainingConfig", "BatchConfig", "FP16Config"],
    "checkpoint": ["DeepSpeedCheckpoint", "model_3d_desc", "reshape_meg_2d_parallel", "ZeROCheckpoint", "merge_state"],
    "checkpoint.deepspeed_checkpoint": ["DeepSpeedCheckpoint"],
    "checkpoint.zero_checkpoint": ["ZeROCheckpoint"],
    "checkpoint.reshape_meg_2d": ["meg_2d_parallel_map", "reshape_meg_2d_parallel"],
    "checkpoint.reshape_3d_utils": ["model_3d_desc", "get_model_3d_descriptor"],
    "checkpoint.reshape_utils": ["merge_state", "partition_data"],
    "checkpoint.ds_to_universal": ["main", "parse_arguments"],
    "runtime.state_dict_factory": ["SDLoaderFactory", "SDLoaderBase", "MegatronSDLoader"],
    "runtime.model_checkpointing.data_parallel_writer_factory": ["DataParallelWriterFactory"],
    "runtime.zero": ["Init", "GatheredParameters"],
    "checkpointing": ["configure", "checkpoint", "CudaRNGStatesTracker"],
    "runtime.activation_checkpointing.checkpointing": ["checkpoint", "reset"],
    "ops.transformer": ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"],
    "pipe": ["PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology"],
    "runtime.pipe": ["PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology"],
    "runtime.pipe.engine": ["PipelineEngine"],
    "runtime.pipe.module": ["PipelineModule", "PipelineError"],
    "runtime.pipe.topology": ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid"],
    "runtime.dataloader": ["RepeatingLoader"],
    "utils": ["RepeatingLoader"],
}
ABSENT = {
    "runtime.swap_tensor": ["AsyncPartitionedParameterSwapper"],
    "runtime.utils": ["CheckOverflow"],
}


def imported(path: str, name: str) -> Any:
    """As `from deepspeed.path import name` does it."""
    scope: dict[str, Any] = {}
    exec(f"from {PACKAGE}{'.' * bool(path)}{path} import {name} as found", scope)
    return scope["found"]


@pytest.mark.parametrize("path", PATHS)
def test_a_script_s_imports_find_their_names(path: str) -> None:
    for name in PATHS[path]:
        found = imported(path, name)
        assert found.__module__.startswith("zero_strategy.") and callable(found)
        assert getattr(importlib.import_module(f"{PACKAGE}{'.' * bool(path)}{path}"), name) is found
    with pytest.raises(ImportError, match="cannot import name 'no_such'"):
        imported(path, "no_such")


@pytest.mark.parametrize("path", ABSENT)
def test_what_is_not_here_says_so_by_name(path: str) -> None:
    for name in ABSENT[path]:
        full = ".".join(part for part in ("deepspeed", path, name) if part)
        with pytest.raises(ImportError, match=rf"{full} is not here: .* not part of this version; \w+") as caught:
            imported(path, name)
        assert type(caught.value) is ImportError
    module = importlib.import_module(f"{PACKAGE}{'.' * bool(path)}{path}")
    assert not hasattr(module, "__no_such__")  # Python's own questions are answered


# ---- chapter 1: arguments, initialize and its four results, the process group ----


def parsed(path: Path, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert deepspeed.add_config_arguments(parser) is parser
    return parser.parse_args(["--deepspeed", "--deepspeed_config", str(path), *argv])


def test_arguments_lead_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**BATCH, "gradient_clipping": 0.25}))
    args = parsed(tmp_path / "ds.json", "--local_rank", "0")
    assert args.deepspeed is True and args.deepspeed_config == str(tmp_path / "ds.json")
    for given in (args, vars(args)):  # a namespace, or "a dictionary" as the documentation has it
        engine, *_ = deepspeed.initialize(given, net())
        assert engine.gradient_clipping() == 0.25 and engine.local_rank == 0


def test_what_is_not_asked_for_is_none() -> None:
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=net(), config=BATCH)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert optimizer is None and loader is None and scheduler is None
    assert dist.is_initialized()  # started, since nobody had


def test_what_the_json_names_is_made() -> None:
    config = {
        **BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 2}},
    }
    result = deepspeed.initialize(None, net(), None, None, data(), None, None, None, len, config)
    assert isinstance(result, tuple)
    engine, optimizer, loader, scheduler = result
    assert isinstance(optimizer, torch.optim.Optimizer) and engine.optimizer is optimizer
    assert isinstance(loader, DataLoader) and list(loader) == [4, 4]  # `collate_fn` made the batches
    assert scheduler is engine.lr_scheduler and type(scheduler).__name__ == "WarmupLR"


class Halving:
    """A scheduler of the user's own: an object with the four methods, of no class of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.seen, self.told = optimizer, 0, []  # type: ignore[var-annotated]

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, by: float = 0.5) -> None:
        self.seen += 1
        self.told.append(by)
        for group in self.optimizer.param_groups:
            group["lr"] *= by

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_any_object_with_the_four_methods_is_a_scheduler(tmp_path: Path) -> None:
    model = net()
    mine = torch.optim.SGD(model.parameters(), lr=1.0)
    halving = Halving(mine)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=mine, lr_scheduler=halving, config={**BATCH, "gradient_accumulation_steps": 2}
    )
    assert optimizer is mine and scheduler is halving
    for number in range(4):
        engine.backward(engine(torch.ones(2, 3)).sum(), release_loss=True)
        engine.step(lr_kwargs={"by": 0.25} if number > 1 else None)
        assert engine.is_gradient_accumulation_boundary() == (number % 2 == 0)
    assert halving.told == [0.5, 0.25] and engine.get_lr() == [0.125]
    engine.save_checkpoint(tmp_path)
    halving.seen = 7
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert halving.seen == 7
    engine.load_checkpoint(tmp_path)
    assert halving.seen == 2


def test_names_that_differ_load_only_if_that_is_asked_for(tmp_path: Path) -> None:
    config = {**BATCH, "zero_optimization": {"stage": 2}}
    saved, *_ = deepspeed.initialize(model=net(), config=config)
    saved.save_checkpoint(tmp_path)
    larger = nn.Sequential(*net(), nn.Linear(1, 1))
    engine, *_ = deepspeed.initialize(model=larger, config=config)
    own = larger[-1].weight.detach().clone()
    with pytest.raises(ValueError, match=r"3\.weight"):
        engine.load_checkpoint(tmp_path)
    path, _ = engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    assert path is not None and torch.equal(larger[0].weight, saved.module[0].weight)
    assert torch.equal(larger[-1].weight, own)


@pytest.mark.parametrize("required", [None, True])
def test_the_process_group_is_started_when_it_is_needed(required: bool | None) -> None:
    deepspeed.initialize(model=net(), config=BATCH, dist_init_required=required)
    assert dist.is_initialized() and dist.get_world_size() == 1
    group = dist.group.WORLD
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # there is one: left alone
    assert dist.group.WORLD is group


def test_nccl_becomes_gloo_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    deepspeed.init_distributed("nccl", auto_mpi_discovery=False, distributed_port=29501, timeout=timedelta(seconds=9))
    assert dist.get_backend() == "gloo" and "gloo is used" in capsys.readouterr().out


# ---- chapter 2: the config objects ----


def test_config_objects_are_those_of_chapter_2() -> None:
    kinds = deepspeed.config
    config = kinds.Config(verbose=True)
    assert config.verbose is True and config["verbose"] is True
    assert kinds.Config.from_dict({"verbose": True}).verbose is True
    assert config.resolve() is None and config.is_valid() is True
    for cls, names in (
        (kinds.TrainingConfig, ["batch", "fp16"]),
        (kinds.BatchConfig, ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]),
        (kinds.FP16Config, ["enabled", "clip"]),
    ):
        assert issubclass(cls, kinds.Config)
        assert {name: getattr(cls(), name) for name in names} == dict.fromkeys(names)  # all None, as documented
        assert cls(**dict.fromkeys(names)) == cls() == cls.from_dict({})


WHOLE = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("missing", WHOLE)
def test_a_batch_is_complete_from_any_two(missing: str) -> None:
    batch = deepspeed.config.BatchConfig(**{key: value for key, value in WHOLE.items() if key != missing})
    assert batch[missing] is None
    batch.resolve()
    assert batch.settings() == WHOLE and batch.is_valid()
    assert deepspeed.config.TrainingConfig(batch=batch, fp16={"enabled": False}).is_valid()


# ---- chapter 3: the engine is the model ----


def test_the_engine_is_called_like_the_model() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) * scale
            return out

    model = Pair()
    engine, *_ = deepspeed.initialize(model=model, config={**BATCH, "zero_optimization": {"stage": 3}})
    x = torch.ones(2, 3)
    assert engine.module is model and torch.equal(engine(x, scale=2.0), engine.forward(x, scale=2.0))
    assert torch.equal(engine(x, scale=2.0), 2 * model(x))
    assert [id(p) for p in engine.parameters()] == [id(p) for p in model.parameters()]
    assert {name: tuple(value.shape) for name, value in engine.state_dict().items()} == {
        "linear.weight": (1, 3),
        "linear.bias": (1,),
    }
