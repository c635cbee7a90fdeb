"""`deepspeed.checkpoint.ZeROCheckpoint`: the optimizer files of a checkpoint, for any smaller grid of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_strategy.compat.deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, model_3d_desc
from zero_strategy.compat.deepspeed.checkpoint.reshape_utils import merge_state
from zero_strategy.convert.deepspeed import DeepSpeedDirectory

_OPTIMIZER = "optimizer_state_dict"
_PADDINGS = "group_paddings"
_COUNTS = "partition_count"


class ZeROCheckpoint:
    """The optimizer files of one checkpoint.

    Args:
        dir: The directory of one tag.

    Attributes:
        dir: The same.
        file_list: Optimizer files, by data rank and then by model-parallel rank.
        num_files: How many.
        src_3d: The degrees that saved it.
        target_3d: The degrees that states are asked for.

    Raises:
        ValueError: If it is no DeepSpeed checkpoint, or has no optimizer files, or some are missing.
    """

    def __init__(self, dir: str | os.PathLike[str]) -> None:
        self.dir = os.fspath(dir)
        self._files = DeepSpeedDirectory(dir)
        degrees = self._files.degrees
        self.file_list = [str(file) for file in self._files.optimizer_files.values()]
        self.num_files = len(self.file_list)
        if not self.file_list:
            raise ValueError(f"{self.dir}: has no ZeRO optimizer files ([bf16_]zero_pp_rank_*_optim_states.pt)")
        self.src_3d = model_3d_desc(degrees.pp, degrees.tp, degrees.dp)
        self.reshape(model_3d_desc(degrees.pp, degrees.tp, degrees.dp))

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Ask for states of another grid from now on.

        Raises:
            ValueError: If files would have to be divided, saying where.
        """
        self._maps: list[meg_2d_parallel_map] = self.src_3d.reshape(target_3d_desc)
        self.target_3d = target_3d_desc

    def get_src_world_size(self) -> int:
        """Ranks that saved."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Tensor-parallel ranks that saved."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Pipeline stages that saved."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Data-parallel ranks that saved."""
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Numbers in `file_list` of the files of one rank of the target grid.

        Raises:
            ValueError: If there is no such rank.
        """
        if not 0 <= dp_index < len(self._maps):
            raise ValueError(f"dp index {dp_index} is not within the dp degree {len(self._maps)}")
        return self._maps[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Those files."""
        return [self.file_list[number] for number in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """The optimizer state of one rank of the target grid: its files' flat tensors one after the other.

        Args:
            pp_index: Pipeline stage.
            tp_index: Tensor-parallel rank.
            dp_index: Data-parallel rank.
            keys_to_ignore: Keys at the top to leave out.
            strip_tensor_paddings: Cut what pads the flat moments at their ends.

        Raises:
            ValueError: If there is no such rank, or the states do not have the same structure.
        """
        merged: dict[str, Any] | None = None
        for file in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = {key: value for key, value in self._files.load(Path(file)).items() if key not in keys_to_ignore}
            optimizer = state.get(_OPTIMIZER)
            if strip_tensor_paddings and isinstance(optimizer, Mapping):
                _strip(optimizer)
            merged = state if merged is None else merge_state(merged, state)
        assert merged is not None
        optimizer = merged.get(_OPTIMIZER)
        if isinstance(optimizer, MutableMapping):
            if isinstance(optimizer.get(_COUNTS), list):
                optimizer[_COUNTS] = [self.target_3d.dp_degree] * len(optimizer[_COUNTS])
            if strip_tensor_paddings and optimizer.get(_PADDINGS):
                optimizer[_PADDINGS] = [0] * len(optimizer[_PADDINGS])
        return merged

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Print which files each rank takes, by number."""
        print(f"3D index map: {tag or ''}")
        for number, grid in enumerate(self._maps):
            grid.print_data(f"dp = {number}")

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Print which files each rank takes, by name."""
        print(f"3D file map: {tag or ''}")
        for dp, grid in enumerate(self._maps):
            for pp in range(grid.pp_degree):
                for tp in range(grid.tp_degree):
                    print(f"{pp}, {tp}, {dp} => {self.get_files_for_rank(pp, tp, dp)}")


def _strip(optimizer: Mapping[str, Any]) -> None:
    """Cuts the padding of the base optimizer's flat tensors, in place."""
    base, paddings = optimizer.get("base_optimizer_state"), optimizer.get(_PADDINGS)
    if not isinstance(base, Mapping) or not paddings:
        return  # an elastic checkpoint: it has none
    for group, state in base.get("state", {}).items():
        for key, value in state.items():
            if paddings[group] and isinstance(value, torch.Tensor) and value.dim():
                state[key] = value[: value.numel() - paddings[group]].clone()
