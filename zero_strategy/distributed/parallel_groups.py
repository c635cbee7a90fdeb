"""The process groups of a run that has more axes than data parallelism: `ParallelGroups`.

Scripts that divide weights among tensor- or expert-parallel ranks tell the functions that must know (slices of a
batch, sharded tensors of a checkpoint, logging once per stage) which groups there are: as a device mesh with named
axes, or group by group. An axis that is not there is None: a group of one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_strategy.distributed.mesh_names import contains_submesh, flattened_axes

ProcessGroup = dist.ProcessGroup


@dataclass(frozen=True)
class ParallelGroups:
    """Groups that this process is in.

    Attributes:
        tensor: Ranks among which a layer's weights are divided (tp).
        expert_tensor: The same for the weights of experts.
        pipeline: Ranks that hold the stages of one pipeline (pp).
        context: Ranks among which a sequence is divided (cp).
        data: Ranks with the same weights and other samples (dp).
        data_context: Ranks with the same weights: data and context together (dp_cp).
        expert: Ranks among which experts are divided (ep).
    """

    tensor: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    context: ProcessGroup | None = None
    data: ProcessGroup | None = None
    data_context: ProcessGroup | None = None
    expert: ProcessGroup | None = None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None) -> ParallelGroups:
        """The groups of a mesh whose axes have the usual names.

        Args:
            mesh: Axes among "tp", "pp", "cp", "dp" and "dp_cp" (which may be flattened of the last two); without
                "dp_cp", the data-parallel ranks are taken for it where there is no "cp", and the other way round.
            expert_mesh: Axes "ep", "tp" or "expt_tp" of the experts.

        Raises:
            ValueError: If there are both "dp" and "cp", and nothing that joins them.
        """
        data, context = group_of(mesh, "dp"), group_of(mesh, "cp")
        both = group_of(mesh, "dp_cp")
        if both is None and data is not None and context is not None:
            raise ValueError(
                "the mesh has axes 'dp' and 'cp', but not both together; call mesh['dp', 'cp']._flatten('dp_cp') first"
            )
        return cls(
            tensor=group_of(mesh, "tp"),
            expert_tensor=group_of(expert_mesh, "expt_tp") or group_of(expert_mesh, "tp"),
            pipeline=group_of(mesh, "pp"),
            context=context,
            data=data,
            data_context=both or data or context,
            expert=group_of(expert_mesh, "ep"),
        )


def group_of(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    """The group of this process along an axis, which may be a flattened one; None if the mesh has none of the name."""
    if mesh is None or not contains_submesh(mesh, axis):
        return None
    return submesh(mesh, (axis,)).get_group()


def submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """`mesh[names]`, also where they name a flattened axis: torch means to give that up, and warns."""
    if len(names) == 1 and (flat := flattened_axes(mesh).get(names[0])) is not None:
        return flat
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        found: DeviceMesh = mesh[names[0] if len(names) == 1 else tuple(names)]
    return found


def tensor_parallel_group(
    tp_group: ProcessGroup | None, groups: ParallelGroups, is_expert: bool = False, check_initialized: bool = True
) -> ProcessGroup | None:
    """`tp_group`, or the run's own with a deprecation warning.

    Args:
        tp_group: What the caller was given.
        groups: The run's.
        is_expert: The group of the experts' weights.
        check_initialized: A run without such a group is an error.

    Returns:
        The group; None without `torch.distributed` being initialized.

    Raises:
        ValueError: If neither is there, and that is to be checked.
    """
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    if dist.get_rank() == 0:
        warnings.warn(
            "tp_group is None, so the run's own tensor-parallel group is taken; pass tp_group",
            DeprecationWarning,
            stacklevel=3,
        )
    found = groups.expert_tensor if is_expert else groups.tensor
    if found is None and check_initialized:
        kind = "expert_tensor" if is_expert else "tensor"
        raise ValueError(
            f"there is no {kind}-parallel group; pass tp_group, or set ParallelGroups({kind}=...) with "
            "integrations.megatron.set_parallel_groups()"
        )
    return found
