"""Tensor parallelism under Lightning: a device mesh for `configure_model`, and data by data-parallel ranks.

The names of the mesh's dimensions are those of Lightning's `ModelParallelStrategy`, so that its users' code runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.config import ZeroConfig

if TYPE_CHECKING:
    from typing import Any as _Base

    from torch.distributed.device_mesh import DeviceMesh
else:
    _Base = object

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
        """For a sampler: ranks that divide the same layers see the same data."""
        if self._device_mesh is None:
            found: dict[str, Any] = super().distributed_sampler_kwargs
            return found
        mesh = self._device_mesh[DATA]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    def make_tensor_mesh(self) -> None:
        """Once the process group is there."""
        if (self.config.mesh.tensor or 1) > 1:
            names, tensor = (DATA, TENSOR), self.config.mesh.tensor or 1
            self._device_mesh = make_device_mesh(self.root_device.type, tensor=tensor, names=names)


def refuse_tensor(config: ZeroConfig, owner: str, instead: str) -> None:
    """Raise for a face whose data loaders and models know no tensor-parallel ranks.

    Raises:
        ValueError: Naming the setting and what to use.
    """
    if (config.mesh.tensor or 1) > 1:
        raise ValueError(
            f"mesh.tensor is {config.mesh.tensor} [{config.origin_of('mesh.tensor')}], and {owner} has no "
            f"tensor-parallel ranks: use {instead}"
        )
