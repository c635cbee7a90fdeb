"""`deepspeed.zero`: building and touching sharded parameters, with DeepSpeed's arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zero_strategy import fsdp as sharding
from zero_strategy.comm.process_group import init_distributed

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]


class Init(sharding.Init):
    """Build a model of which each rank keeps its slices alone; see `zero_strategy.sharding.Init`.

    The process group is started on entry where it is not yet, as DeepSpeed does.

    Args:
        module: None; a module that exists already is sharded by `initialize`.
        data_parallel_group: None; the mesh is made of all ranks.
        mem_efficient_linear: Accepted; linear layers keep no gathered weights here in any case.
        remote_device: None, "none" or "cpu"; nothing is on a device yet.
        pin_memory: Accepted; there is no memory to pin yet.
        config_dict_or_path: Accepted; the config that counts is that of `initialize`.
        config: The same under an old name.
        enabled: Do nothing if False.
        dtype: None; `bf16` and `fp16` of the config decide.
        mpu: None.

    Raises:
        ValueError: If one of them asks for what is not done; names it and the way out.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        refused = {
            "module": (module, "pass it to initialize(), which shards a module that exists"),
            "data_parallel_group": (data_parallel_group, "lay the ranks out with the config's 'mesh'"),
            "dtype": (dtype, "set bf16.enabled or fp16.enabled in the config"),
            "mpu": (mpu, "leave it out; layers are divided by torch's parallelize_module"),
        }
        if remote_device not in (None, "none", "cpu"):
            raise ValueError(f"zero.Init(remote_device={remote_device!r}) is not done here; leave it out")
        for name, (value, way_out) in refused.items():
            if enabled and value is not None:
                raise ValueError(f"zero.Init({name}=...) has no effect here: {way_out}")
        super().__init__(enabled)

    def __enter__(self) -> None:
        if self._enabled and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            init_distributed()
        super().__enter__()


class GatheredParameters(sharding.GatheredParameters):
    """Whole parameters inside a `with` block; see `zero_strategy.sharding.GatheredParameters`.

    Args:
        params: One parameter, or any iterable of them.
        modifier_rank: The rank whose changes are kept.
        fwd_module: Accepted; which module uses a parameter is noticed without.
        enabled: Do nothing if False.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__(params, modifier_rank, enabled)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted without effect: a unit that shares a parameter with another one is found without being told.

    Raises:
        TypeError: If it is called with something else than a module and a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter takes a module and a parameter, not {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )


unregister_external_parameter = register_external_parameter
