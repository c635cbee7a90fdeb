"""Which axes a device mesh has, by name: `get_mesh_names`, `contains_submesh`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from zero_strategy.runtime.torch_private import flattened_meshes


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """Names of a mesh's axes, then those of axes that were flattened of several.

    Args:
        device_mesh: The mesh; None has no names.
        only_submesh_dims: Leave flattened ones out.
    """
    if device_mesh is None:
        return []
    names = list(device_mesh.mesh_dim_names or ())
    return names if only_submesh_dims else names + list(flattened_axes(device_mesh))


def flattened_axes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """The meshes of one axis that were made of several axes of this one, by name."""
    found = flattened_meshes(mesh)
    own, ranks = mesh.mesh_dim_names or (), set(mesh.mesh.flatten().tolist())
    return {
        name: flat for name, flat in found.items() if name not in own and ranks.issuperset(flat.mesh.flatten().tolist())
    }


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Whether a mesh has all axes of these names, flattened ones included.

    Args:
        device_mesh: The mesh; None has no axes.
        submesh_names: One name, or several; None and an empty sequence name nothing, which no mesh contains.
    """
    if device_mesh is None or not submesh_names:
        return False
    wanted = (submesh_names,) if isinstance(submesh_names, str) else tuple(submesh_names)
    names = get_mesh_names(device_mesh)
    return all(name in names for name in wanted)
