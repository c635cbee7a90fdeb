"""The weights of a model that are gathered as their layers cast them (`communication.parameters`)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import ZeroConfig
from zero_strategy.fsdp.autocast_gather import GatheredAutocast, weights_cast_by_autocast
from zero_strategy.fsdp.float8_gather import gather_in_float8
from zero_strategy.fsdp.gathered_codes import CodedBucket
from zero_strategy.fsdp.layout import Placement
from zero_strategy.quantized.float8 import weights_cast_whole


class CodedWeights:
    """The weights, which lie in buckets of their own, and what is gathered of these.

    Args:
        module: Unsharded.
        config: Its `communication.parameters` says which.
        placement: What is divided.
        compute_dtype: The dtype that parameters will have; None: their own.
        mesh: Ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        placement: Placement,
        compute_dtype: torch.dtype | None,
        mesh: Mesh,
    ) -> None:
        self._kind, self._mesh = config.communication.parameters, mesh
        self._float8: dict[int, nn.Module] = {}
        self._cast: set[int] = set()
        tells = mesh.world_group.rank == 0
        if self._kind == "float8":
            self._float8 = weights_cast_whole(module)
            if not self._float8 and tells:
                warnings.warn(
                    f"communication.parameters is 'float8', and no layer of {type(module).__name__} casts its weight "
                    "by one scale: all parameters are gathered in the dtype that they have. Convert linear layers with "
                    "torchao's recipe 'tensorwise' before the module is sharded",
                    stacklevel=5,
                )
        elif self._kind == "autocast":
            if compute_dtype in (None, torch.float32):
                self._cast = weights_cast_by_autocast(module)
            if not self._cast and tells:
                warnings.warn(
                    f"communication.parameters is 'autocast', and no linear or convolutional layer of "
                    f"{type(module).__name__} has a float32 weight of its own for autocast to cast: all parameters are "
                    "gathered in the dtype that they have",
                    stacklevel=5,
                )
        if not placement.shard_parameters or placement.in_place:  # nothing is gathered
            self._float8, self._cast = {}, set()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._float8 or id(parameter) in self._cast

    def gather(self, buckets: Sequence[CodedBucket]) -> None:
        """Let their buckets be gathered so from now on."""
        gather_in_float8(buckets, self._float8, self._mesh.gather)
        for bucket in buckets:
            if id(bucket.parameters[0]) in self._cast and bucket.dtype == torch.float32:
                bucket.codes = GatheredAutocast(bucket)
