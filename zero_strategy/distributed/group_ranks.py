"""Size and ranks of a process group, where there may be none: `get_pg_size`, `get_pg_rank`, `get_pg_src_rank`.

None stands for a group of this process alone, as it does for an axis that a run does not have (`tp_group=None`), with
or without a default process group. The default group itself is `torch.distributed.group.WORLD`.
"""

from __future__ import annotations

import torch.distributed as dist

ProcessGroup = dist.ProcessGroup


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Ranks of a group; 1 for None, and without `torch.distributed` being initialized.

    Raises:
        ValueError: If this process is no member of the group.
    """
    return dist.get_world_size(_member(group, "size")) if group is not None and dist.is_initialized() else 1


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """This process in a group; 0 for None, and without `torch.distributed` being initialized.

    Raises:
        ValueError: If this process is no member of the group.
    """
    return dist.get_rank(_member(group, "rank")) if group is not None and dist.is_initialized() else 0


def get_pg_src_rank(group: ProcessGroup | None = None) -> int:
    """Global rank of a group's first rank; 0 for None, and without `torch.distributed` being initialized.

    Raises:
        ValueError: If this process is no member of the group.
    """
    if group is None or not dist.is_initialized():
        return 0
    return dist.get_process_group_ranks(_member(group, "first rank"))[0]


def _member(group: ProcessGroup, what: str) -> ProcessGroup:
    """The group; `new_group` gives a number in its place to processes that are not in it."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"rank {dist.get_rank()} asks for the {what} of a group that it is not a member of; only its members may"
        )
    return group
