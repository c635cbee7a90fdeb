"""`initialize`: engine, optimizer, data loader and scheduler from a module and a config; arguments.

They go from a module and a config to an engine, an optimizer, a data loader and a scheduler.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from zero_strategy.checkpoint.deferred import is_deferred
from zero_strategy.comm.process_group import default_group, discover, init_distributed, require_group, world_size
from zero_strategy.compat.deepspeed.optimizers import make_optimizer, make_scheduler
from zero_strategy.compat.deepspeed.scripts.data import OptimizerOwner, PlainBackward, check_scheduler_of
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine, forward_context
from zero_strategy.compat.deepspeed.scripts.pipeline import ScriptPipelineEngine
from zero_strategy.compat.deepspeed.scripts.settings import ScriptSettings, settings_of
from zero_strategy.config import ResolvedConfig, ZeroConfig, check_no_sequence, load_config, resolve
from zero_strategy.config.deepspeed.settings import ACCUMULATION
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.divided_elsewhere import check_not_divided
from zero_strategy.fsdp.dtensor import tensor_ranks
from zero_strategy.optim.loss_scale import LossScaler
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.runtime.compute_device import bound_device, gpu_of_local_rank, occupy
from zero_strategy.runtime.torch_private import map_tensors


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a parser, and return it.

    `--deepspeed` is for the script itself to look at; `--deepspeed_config FILE` is what `initialize(args=...)` reads.
    `--deepspeed_mpi` is accepted: how ranks find each other is found out (`init_distributed`). `--deepscale` and
    `--deepscale_config` are old spellings.

    Raises:
        argparse.ArgumentError: If the parser has one of them already.
    """
    group = parser.add_argument_group("DeepSpeed", "settings of sharded training")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="config file, JSON or YAML")
    group.add_argument("--deepscale", action="store_true", help="old spelling of --deepspeed")
    group.add_argument("--deepscale_config", metavar="FILE", default=None, help="old spelling of --deepspeed_config")
    group.add_argument("--deepspeed_mpi", action="store_true", help="accepted; MPI's ranks are found in any case")
    return parser


def config_of(args: Any, config: Any, config_params: Any) -> Any:
    """The one config among those that `initialize` may be given.

    Args:
        args: A namespace or mapping, or None.
        config: The argument of that name.
        config_params: The same under an old name.

    Raises:
        ValueError: If there is none, or more than one; names them.
    """
    sources = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": argument(args, "deepspeed_config"),
        "args.deepscale_config": argument(args, "deepscale_config"),
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given, which are sources of one config; drop all but one")
    if not given:
        raise ValueError(
            "no config: pass initialize(config=...), a mapping or a path, or --deepspeed_config FILE through args"
        )
    if given[0] == "args.deepscale_config":
        warnings.warn("--deepscale_config is an old spelling; use --deepspeed_config", stacklevel=3)
    return sources[given[0]]


def argument(args: Any, name: str) -> Any:
    """An argument of a namespace or a mapping; None if it is not there."""
    if args is None:
        return None
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
) -> tuple[ScriptEngine, Optimizer | None, Iterable[Any] | None, Any]:
    """Shard a module, and give a script what it trains with. All ranks call it.

    Args:
        args: A namespace or mapping with `deepspeed_config` (a path), which is read when `config` is None, and
            `local_rank`; each may be missing.
        model: The module; it stays the same object and is moved to this rank's device. A `PipelineModule` is trained by
            a `ScriptPipelineEngine`.
        optimizer: An optimizer over the module's parameters, or a callable that makes one of `model_parameters`; wins
            over the config's, with a warning. None: the config's; without one there the engine only evaluates.
        model_parameters: Parameters or param groups to be optimized; None: all trainable ones. Those that an optimizer
            object does not have stay as they are, with a warning.
        training_data: A dataset with a length. None: no loader is made.
        lr_scheduler: An object with `step()` and state dicts, or a callable that makes one of the optimizer. None: the
            config's `scheduler`; without one there, none.
        mpu: A model-parallel unit; its model-parallel world size must be 1, or that of the device mesh on which
            `parallelize_module` has divided the model. A pipeline has its own.
        dist_init_required: None: start the process group if there is none. True: the same. False: leave it alone.
        collate_fn: Makes a batch of a list of samples.
        config: See `settings_of`: ours or DeepSpeed's keys, or a path.
        config_params: `config` under an old name.

    Returns:
        (engine, optimizer, data loader, scheduler); None for what there is none of. The optimizer is the given object.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If two sources say one thing (names both), or a parameter is not the model's.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize(model=...) must be a torch module, not {type(model).__name__}")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise TypeError(f"initialize(model=...) averages gradients itself: pass the .module of {type(model).__name__}")
    if dist_init_required not in (None, True, False):
        raise TypeError(f"dist_init_required must be None, True or False, not {dist_init_required!r}")
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be callable, not {collate_fn!r}")
    chosen = config_of(args, config, config_params)
    local_rank = _local_rank(args)
    if dist_init_required is False:
        require_group("dist_init_required=False")
    else:
        init_distributed()
    ranks = _data_parallel_ranks(model, mpu)
    settings = settings_of(chosen, ranks, pipeline=isinstance(model, PipelineModule))
    _check_sources(settings, optimizer, lr_scheduler)
    device = occupy(_device_of(local_rank), default_group())
    if not is_deferred(model):  # what is not read yet, or on the meta device, becomes real in the engine
        _move(model, device)
    plain = PlainBackward(settings.batch.gradient_accumulation_steps or 1, scaled=settings.scales_loss)
    zero = _zero_engine(model, settings, device, plain)
    if settings.scales_loss and zero.scaler is None:  # autocast to fp16 over parameters of another dtype
        zero.use_loss_scaler(LossScaler(zero.config.config.loss_scale))
    monitor = install_diagnostics(zero).monitor
    parameters = None if model_parameters is None else list(model_parameters)
    used = _optimizer(settings, model, optimizer, parameters)
    watchdog = None if used is None else OptimizerOwner(used)
    if used is not None:
        zero.attach(used)
        zero.untrained = _left_out(used, parameters)
    options: dict[str, Any] = {
        "optimizer": used,
        "watchdog": watchdog,
        "lr_scheduler": _scheduler(settings, used, lr_scheduler),
        "device": device,
        "local_rank": local_rank,
        "collate_fn": collate_fn,
        "monitor": monitor,
        "plain": plain,
    }
    engine: ScriptEngine
    if isinstance(zero, PipelineEngine):
        engine = ScriptPipelineEngine(zero, settings, **options)
    else:
        engine = ScriptEngine(zero, settings, **options)
    if training_data is not None:
        engine.take_training_data(training_data)
    return engine, used, engine.training_dataloader, engine.lr_scheduler


def _zero_engine(model: nn.Module, settings: ScriptSettings, device: torch.device, plain: PlainBackward) -> ZeroEngine:
    if isinstance(model, PipelineModule):
        resolved = _of_pipeline(settings, model)
        context = None if settings.autocast is None else partial(forward_context, settings.autocast, device)
        engine = PipelineEngine(model, resolved, compute_dtype=settings.compute_dtype, device=device, autocast=context)
        if context is not None and (loss_fn := engine.executor.loss_fn) is not None:
            engine.executor.loss_fn = torch.autocast(device.type, enabled=False)(loss_fn)  # forwards alone are cast
        return engine
    check_no_sequence(settings.zero, "initialize()")
    config = load_config(settings.zero)  # a copy
    _take_tensor_ranks(config, _tensor_ranks(model), "the device mesh of the model's DTensors")
    resolved = resolve(config, world_size())
    dtype, divisor = settings.compute_dtype, plain.divisor
    return ZeroEngine(model, resolved, compute_dtype=dtype, device=device, divisor=divisor)


def _move(model: nn.Module, device: torch.device) -> None:
    """Bring a model to its device; one that is there stays untouched, for torch would make its DTensors anew."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(not tensor.is_meta and tensor.device != device for tensor in tensors):
        map_tensors(model, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _tensor_ranks(model: nn.Module) -> int:
    """Among how many ranks `parallelize_module` has divided a model."""
    check_not_divided(model)
    return len(tensor_ranks(model) or [0])


def _take_tensor_ranks(config: ZeroConfig, ways: int, source: str) -> None:
    if config.mesh.tensor is None:
        config.mesh.record("tensor", ways, f"derived: {source}")


def _of_pipeline(settings: ScriptSettings, model: PipelineModule) -> ResolvedConfig:
    """The config of a pipeline's engine: the module says how it is divided, the batch sizes into how many parts."""
    config = load_config(settings.zero)  # a copy
    pipeline, steps = config.pipeline, settings.batch.gradient_accumulation_steps
    if pipeline.stages == 1:
        pipeline.record("stages", model.num_stages, "derived: the PipelineModule")
    if pipeline.chunks is None:
        pipeline.record("chunks", model.chunks, "derived: the PipelineModule")
    if pipeline.micro_batches not in (None, steps):
        raise ValueError(
            f"pipeline.micro_batches is {pipeline.micro_batches} [{config.origin_of('pipeline.micro_batches')}] and "
            f"{ACCUMULATION} {steps}, which are one number in a script; leave one of them out"
        )
    pipeline.record("micro_batches", steps, ACCUMULATION)
    _take_tensor_ranks(config, model.mpu().slice_parallel_size, "the PipelineModule's topology")
    return resolve(config, world_size())


def _local_rank(args: Any) -> int:
    """This process on its host, by the environment; a launcher's `--local_rank` must be the same."""
    place = discover(os.environ)
    said = argument(args, "local_rank")
    try:
        given = -1 if said is None else int(said)  # a string, where the script's parser has no type=int
    except (TypeError, ValueError):
        raise TypeError(f"args.local_rank must be an integer, not {said!r}") from None
    if given < 0:
        return 0 if place is None else place.local_rank
    if "LOCAL_RANK" in os.environ and int(os.environ["LOCAL_RANK"]) != given:
        raise ValueError(f"args.local_rank is {given}, the variable LOCAL_RANK {os.environ['LOCAL_RANK']}; drop one")
    if place is not None:
        os.environ["LOCAL_RANK"] = str(given)  # of launchers that only give the argument
    return given


def _device_of(local_rank: int) -> torch.device:
    """The GPU of this rank: that of the process group if it has been made for one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return bound_device(default_group()) or gpu_of_local_rank(local_rank)


def _data_parallel_ranks(model: nn.Module, mpu: Any) -> int:
    """Among how many ranks a batch is divided.

    Raises:
        TypeError, ValueError: If the `mpu` says something else.
    """
    if not isinstance(model, PipelineModule):
        ways = _tensor_ranks(model)
        if mpu is not None:
            _check_mpu(mpu, ways)
        return max(1, world_size() // ways)
    if mpu not in (None, model.mpu()):
        raise ValueError("a PipelineModule says itself where ranks are: leave mpu out, and give the module a topology")
    return model.mpu().data_parallel_size


def _check_mpu(mpu: Any, ways: int) -> None:
    # The second is what Megatron has called it since it has had pipelines as well.
    names = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    name = next((name for name in names if hasattr(mpu, name)), None)
    if name is None:
        raise TypeError(f"mpu must have {names[0]}() or {names[1]}(), and {type(mpu).__name__} has neither")
    size = getattr(mpu, name)()
    if size != ways:
        raise ValueError(
            f"mpu.{name}() is {size}, and the model's parameters are divided among {ways} rank(s): tensor parallelism "
            "is that of torch's parallelize_module here, which makes them DTensors; else use one model-parallel rank "
            "and shard parameters with stage 3"
        )
    copies = max(1, world_size() // ways)
    replicas = mpu.get_data_parallel_world_size() if hasattr(mpu, "get_data_parallel_world_size") else copies
    if replicas != copies:
        raise ValueError(
            f"mpu.get_data_parallel_world_size() is {replicas}, and there are {world_size()} ranks, of which {ways} "
            "divide each layer: all others are data-parallel here, unless the model is a PipelineModule"
        )


def _check_sources(settings: ScriptSettings, optimizer: Any, lr_scheduler: Any) -> None:
    if optimizer is not None and settings.optimizer is not None:
        warnings.warn(
            f"initialize(optimizer=...) wins; the config's optimizer {settings.optimizer.type!r} has no effect",
            stacklevel=3,
        )
    if lr_scheduler is not None and settings.scheduler is not None:
        raise ValueError(
            f"initialize(lr_scheduler=...) and the config's scheduler {settings.scheduler.type!r} are both given; drop "
            "one"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise TypeError(f"optimizer must be a torch optimizer or a callable, not {type(optimizer).__name__}")


def _optimizer(
    settings: ScriptSettings, model: nn.Module, optimizer: Any, model_parameters: list[Any] | None
) -> Optimizer | None:
    if isinstance(optimizer, Optimizer):
        _check_held(optimizer, model_parameters)
        return optimizer
    if optimizer is None and settings.optimizer is None:
        return None
    parameters = (
        [parameter for parameter in model.parameters() if parameter.requires_grad]
        if model_parameters is None
        else model_parameters
    )
    if not parameters and isinstance(model, PipelineModule):
        parameters = [{"params": []}]  # functions alone on this rank, or weights that others own
    if not parameters:
        empty = "model_parameters is empty (a generator gives its parameters only once)"
        empty = "the model has no trainable parameters" if model_parameters is None else empty
        raise ValueError(f"{empty}, so there is nothing to optimize; drop the optimizer to evaluate only")
    if optimizer is None:
        assert settings.optimizer is not None
        return make_optimizer(settings.optimizer, parameters)
    made = optimizer(parameters)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer, a callable, returned a {type(made).__name__}; it must make a torch optimizer")
    return made


def _parameters_of(model_parameters: list[Any] | None) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for entry in model_parameters or ():
        group = entry["params"] if isinstance(entry, dict) else entry
        for parameter in [group] if isinstance(group, torch.Tensor) else group:
            found[id(parameter)] = parameter
    return found


def _check_held(optimizer: Optimizer, model_parameters: list[Any] | None) -> None:
    asked = _parameters_of(model_parameters)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if asked and not held <= asked.keys():  # an exhausted generator, which made the optimizer, says nothing
        raise ValueError(
            f"model_parameters has {len(asked)} parameters and the optimizer {len(held - asked.keys())} other ones: "
            "two sources for what is trained; drop model_parameters"
        )


def _left_out(optimizer: Optimizer, model_parameters: list[Any] | None) -> frozenset[int]:
    """Ids of trainable parameters of `model_parameters` that the optimizer leaves as they are; says how many."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    asked = _parameters_of(model_parameters)
    left = frozenset(key for key, parameter in asked.items() if parameter.requires_grad and key not in held)
    if left:
        warnings.warn(
            f"{len(left)} trainable parameter(s) of model_parameters are in no group of the {type(optimizer).__name__} "
            "and stay as they are; freeze them with requires_grad_(False) to save their gradients",
            stacklevel=3,
        )
    return left


def _scheduler(settings: ScriptSettings, optimizer: Optimizer | None, lr_scheduler: Any) -> Any:
    if lr_scheduler is None and settings.scheduler is None:
        return None
    if optimizer is None:
        raise ValueError("there is a scheduler, but no optimizer; pass one to initialize(), or name one in the config")
    if lr_scheduler is None:
        assert settings.scheduler is not None
        return make_scheduler(settings.scheduler, optimizer)
    if isinstance(lr_scheduler, type) or (callable(lr_scheduler) and not hasattr(lr_scheduler, "step")):
        lr_scheduler = lr_scheduler(optimizer)
    if not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(f"lr_scheduler must have step(), and {type(lr_scheduler).__name__} has none")
    check_scheduler_of(lr_scheduler, optimizer)
    return lr_scheduler
