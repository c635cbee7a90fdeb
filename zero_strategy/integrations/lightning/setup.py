"""Settings of the framework beside those of the strategy, and checks of what the Trainer or Fabric set up.

The mesh of `mesh.tensor` has the names of dimensions of Lightning's `ModelParallelStrategy`, so that its users' code
runs. Under automatic optimization the Trainer steps schedulers; a `training_step` that does so, too, is an error.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import torch
import torch.distributed as dist

from zero_strategy.aliases import moved
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.config import (
    Fact,
    ZeroConfig,
    ZeroSettings,
    batch_fact,
    load_config,
)

if TYPE_CHECKING:
    from typing import Any as _Base

    from torch.distributed.device_mesh import DeviceMesh

else:
    _Base = object

F = TypeVar("F", bound=Callable[..., None])


def shows_settings(init: F) -> F:
    """Shows `**settings` of a constructor as what they are: keywords of its signature, with types and descriptions.

    For `help`, editors and LightningCLI; type checkers read `ZeroSettings`.
    """
    shown: Any = init
    signature = inspect.signature(init)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(ZeroSettings)
    settings = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in hints.items()]
    shown.__signature__ = signature.replace(parameters=[*own, *settings])
    described = (inspect.getdoc(ZeroSettings) or "").partition("Args:\n")[2]
    if init.__doc__:  # there is none under `python -OO`
        shown.__doc__ = f"{inspect.cleandoc(init.__doc__)}\n{textwrap.indent(textwrap.dedent(described), '    ')}"
    return init


def read_settings(config: Any, timeout: Any, keywords: Mapping[str, Any]) -> ZeroConfig:
    """The config with keywords on top; None means not given.

    Raises:
        ValueError: If the timeout is given twice, or a setting is not accepted.
        TypeError: If a value is not of its type.
    """
    settings = load_config(config, **{key: value for key, value in keywords.items() if value is not None})
    if timeout is None:
        return settings
    if not isinstance(timeout, timedelta):
        kind = type(timeout).__name__
        raise TypeError(f"timeout is {timeout!r} ({kind}); expected a timedelta, or timeout_seconds in seconds")
    if settings.origin_of("timeout_seconds") != "default":
        raise ValueError(
            f"timeout={timeout} and timeout_seconds={settings.timeout_seconds} "
            f"[{settings.origin_of('timeout_seconds')}] set the same thing; give one of them"
        )
    return load_config(settings, timeout_seconds=timeout.total_seconds())


def check_device(device: torch.device, owner: str) -> None:
    """Raise unless the device has the collectives that sharding needs.

    Raises:
        ValueError: Naming the device and the way out.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f'device {device} has no collectives for sharding; use {owner}(accelerator="cpu") or "cuda", or a '
            "single-device strategy"
        )


def count_processes(strategy: Any) -> int:
    """Number of processes of a job: of its process group, else as its launcher's environment counts them."""
    if dist.is_initialized():
        return dist.get_world_size()
    return _launched(strategy)


def _launched(strategy: Any) -> int:
    """Number of processes that the cluster environment of Lightning tells, or the flags where it tells none."""
    flags: int = strategy.num_nodes * strategy.num_processes
    environment = strategy.cluster_environment
    if environment is None:
        return flags
    # Lightning's own environment believes it; those of launchers know better, and ignore it.
    environment.set_world_size(flags)
    return int(environment.world_size())


def check_world_size(strategy: Any, owner: str) -> None:
    """Raise, on all ranks, unless flags, launcher and process group have one number of processes.

    Args:
        strategy: One of the Trainer or of Fabric.
        owner: Which of them, for the message.

    Raises:
        ValueError: Naming the numbers.
    """
    nodes, processes, launched = strategy.num_nodes, strategy.num_processes, _launched(strategy)
    group = dist.get_world_size() if dist.is_initialized() else launched
    if nodes * processes == launched == group:
        return
    flags = f"{owner}(devices={processes}, num_nodes={nodes}) means {nodes * processes} process(es)"
    counts = f"{type(strategy.cluster_environment).__name__} has {launched}"
    if group != launched:
        counts += f" and the process group {group}"
    if nodes * processes == launched:  # then the flags are right, and what is wrong is how the group was made
        raise ValueError(f"{counts}; make the process group of all processes that were launched")
    raise ValueError(f"{flags}, but {counts}; set devices and num_nodes to what was launched")


def trainer_facts(trainer: Any, world_size: int, alike: int = 1) -> dict[str, Fact]:
    """The Trainer's settings that decide how steps are taken.

    Args:
        trainer: A Trainer of either namespace.
        world_size: Number of ranks.
        alike: Those of them that see the same data.
    """
    devices, nodes = trainer.num_devices, trainer.num_nodes
    facts = {
        "world_size": Fact(world_size, f"Trainer(devices={devices}, num_nodes={nodes})"),
        "accumulate_grad_batches": _flag("accumulate_grad_batches", trainer.accumulate_grad_batches),
        "gradient_clip_val": _flag("gradient_clip_val", trainer.gradient_clip_val),
        "gradient_clip_algorithm": _flag("gradient_clip_algorithm", _text(trainer.gradient_clip_algorithm)),
        "training_precision": _flag("precision", trainer.precision),
        "max_steps": _flag("max_steps", trainer.max_steps),
        "max_epochs": _flag("max_epochs", trainer.max_epochs),
    }
    # The origin would name flags that do not give this number.
    if devices * nodes != world_size:
        facts.pop("world_size")
    micro_batch = _micro_batch(trainer)
    if micro_batch is not None:
        facts["micro_batch_per_rank"] = Fact(micro_batch, "train_dataloader.batch_size")
        copies = max(1, world_size // alike)
        facts["samples_per_step"] = batch_fact(copies, micro_batch, trainer.accumulate_grad_batches)
    return facts


def _flag(name: str, value: Any) -> Fact:
    return Fact(value, f"Trainer({name}={value!r})")


def _text(algorithm: Any) -> str | None:
    return None if algorithm is None else str(getattr(algorithm, "value", algorithm))


def _micro_batch(trainer: Any) -> int | None:
    """Batch size of the training loader, where there is one loader that has a batch size."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


@contextmanager
def schedulers_left_alone(module: Any) -> Iterator[None]:
    """Raise if what runs inside steps a scheduler that the Trainer steps.

    Args:
        module: The LightningModule; with manual optimization its schedulers are its own, and nothing is watched.

    Raises:
        RuntimeError: Then; names the scheduler and both who step it.
    """
    schedulers = [config.scheduler for config in module.trainer.lr_scheduler_configs]
    if not module.automatic_optimization or not schedulers:
        yield
        return
    before = [_count(scheduler) for scheduler in schedulers]
    yield
    for scheduler, count in zip(schedulers, before, strict=True):
        if _count(scheduler) != count:
            kind = type(scheduler).__name__
            raise RuntimeError(
                f"both the Trainer and {type(module).__name__}.training_step step the {kind}: the Trainer does it at "
                "the interval that configure_optimizers gives. Drop scheduler.step() from training_step, or set "
                "automatic_optimization = False"
            )


def _count(scheduler: Any) -> Any:
    """Number of times a scheduler was stepped, where it tells."""
    return getattr(scheduler, "last_epoch", None)


DATA, TENSOR = "data_parallel", "tensor_parallel"


class TensorMesh(_Base):
    """Common part of strategies of the Trainer and of Fabric where `mesh.tensor` is more than one."""

    config: ZeroConfig
    _device_mesh: DeviceMesh | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks, with the dimensions "data_parallel" and "tensor_parallel".

        Raises:
            RuntimeError: If there is none (yet); says why.
        """
        if self._device_mesh is None:
            raise RuntimeError(
                "there is a device mesh where mesh={'tensor': N} is given, once processes have started: in "
                "configure_model() under a Trainer, after launch() under Fabric"
            )
        return self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For a sampler: ranks that divide the same layers, or tokens of sequences, see the same data."""
        found: dict[str, Any] = super().distributed_sampler_kwargs
        if self._device_mesh is not None:
            mesh = self._device_mesh[DATA]
            found = {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}
        # Ranks that divide a sequence are neighbours.
        sequence = self.config.mesh.sequence
        return {"num_replicas": found["num_replicas"] // sequence, "rank": found["rank"] // sequence}

    def make_tensor_mesh(self) -> None:
        """Once the process group is there."""
        if (self.config.mesh.tensor or 1) > 1:
            names, tensor = (DATA, TENSOR), self.config.mesh.tensor or 1
            self._device_mesh = make_device_mesh(self.root_device.type, tensor=tensor, names=names)


if not TYPE_CHECKING:
    __getattr__ = moved(
        {
            "OtherStrategy": "integrations.lightning.module_engine",
            "_EngineSlot": "integrations.lightning.module_engine",
            "engine_for": "integrations.lightning.module_engine",
            "engine_of": "integrations.lightning.module_engine",
            "move_to": "integrations.lightning.module_engine",
        }
    )
