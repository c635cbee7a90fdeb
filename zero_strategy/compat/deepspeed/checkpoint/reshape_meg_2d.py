"""`deepspeed.checkpoint`'s reshaping of Megatron grids, over `checkpoint.interop.parallel_grid`.

Names and arguments are DeepSpeed's; where it asserts, these raise ValueError and say why.
"""

from __future__ import annotations

from os import PathLike

from zero_strategy.convert import merge_ranks as parallel_grid
from zero_strategy.convert.merge_ranks import Degrees


class meg_2d_parallel_map:
    """Data of each (pipeline, tensor) position, usually numbers of files.

    Args:
        pp_degree: Pipeline stages.
        tp_degree: Tensor-parallel ranks.

    Attributes:
        map: "pp,tp" -> list.
    """

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[int]] = {}

    def simple_init(self) -> None:
        """Give every position its own number, pipeline-major."""
        own = Degrees(self.pp_degree, self.tp_degree)
        self._set(parallel_grid.model_files(own, own))

    def add_data(self, pp_index: int, tp_index: int, data: list[int]) -> None:
        """Append to a position.

        Raises:
            TypeError: If `data` is no list.
            ValueError: If there is no such position.
        """
        if not isinstance(data, list):
            raise TypeError(f"data of a position must be a list, got {type(data).__name__}")
        self._check(pp_index, tp_index)
        self.map.setdefault(f"{pp_index},{tp_index}", []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """The data of a position, or of a row or column or of all, where an index is None.

        Raises:
            ValueError: If there is no such position.
        """
        self._check(pp_index, tp_index)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [item for pp in stages for tp in ranks for item in self.map.get(f"{pp},{tp}", [])]

    def print_data(self, tag: str) -> None:
        """Print all of it."""
        print(tag)
        for position, data in self.map.items():
            print(f"{position} = {data}")

    @classmethod
    def _of(cls, degrees: Degrees, cells: parallel_grid.Cells) -> meg_2d_parallel_map:
        made = cls(degrees.pp, degrees.tp)
        made._set(cells)
        return made

    def _set(self, cells: parallel_grid.Cells) -> None:
        self.map = {f"{pp},{tp}": list(data) for (pp, tp), data in cells.items()}

    def _check(self, pp_index: int | None, tp_index: int | None) -> None:
        for name, index, degree in (("pp", pp_index, self.pp_degree), ("tp", tp_index, self.tp_degree)):
            if index is not None and not 0 <= index < degree:
                raise ValueError(f"{name} index {index} is not within the {name} degree {degree}")


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """Which old model files each position of a smaller grid merges.

    Raises:
        ValueError: If a degree would grow, or is no multiple of the new one.
    """
    target = Degrees(new_pp_degree, new_tp_degree)
    made = meg_2d_parallel_map._of(target, parallel_grid.model_files(Degrees(old_pp_degree, old_tp_degree), target))
    if verbose:
        made.print_data(f"2d map of pp {old_pp_degree}, tp {old_tp_degree} -> pp {new_pp_degree}, tp {new_tp_degree}")
    return made


class model_3d_desc:
    """Degrees of a grid of ranks."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """Which optimizer files each position of a smaller grid merges, one map per data rank.

        Raises:
            ValueError: If the grids do not fit, saying where.
        """
        target = target_3d_desc._degrees()
        made = [
            meg_2d_parallel_map._of(target, cells) for cells in parallel_grid.optimizer_files(self._degrees(), target)
        ]
        if verbose:
            for number, grid in enumerate(made):
                grid.print_data(f"dp = {number}")
        return made

    def get_desc(self) -> str:
        """For printing."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is such a rank, and if not, why."""
        indices = (("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree))
        found = [f"{name} index {index} is not within {size}" for name, index, size in indices if index >= size]
        return not found, found

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether files can be merged for this grid, and if not, why."""
        found = parallel_grid.obstacles(self._degrees(), target_3d_desc._degrees())
        return not found, found

    def _degrees(self) -> Degrees:
        return Degrees(self.pp_degree, self.tp_degree, self.dp_degree)


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """Put the files of all data ranks of each position in a row.

    Args:
        meg_2d_map: Numbers of data rank 0.
        src_2d_size: Files of one data rank.
        dp_degree: Data ranks.
    """
    made = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for pp in range(made.pp_degree):
        for tp in range(made.tp_degree):
            row = [number + dp * src_2d_size for number in meg_2d_map.get_data(pp, tp) for dp in range(dp_degree)]
            made.add_data(pp, tp, row)
    return made


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """Cut the row of each position into equal parts, one per data rank.

    Raises:
        ValueError: If the parts would not be equal.
    """
    made = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for pp in range(meg_2d_map.pp_degree):
        for tp in range(meg_2d_map.tp_degree):
            cut = parallel_grid.parts(meg_2d_map.get_data(pp, tp), dp_degree, "files of a position")
            for grid, part in zip(made, cut, strict=True):
                grid.add_data(pp, tp, part)
    return made


def get_mpu_ranks(
    tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, virtual_pp_size: int | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Ranks of all (tensor, pipeline, data) groups in Megatron's order. `virtual_pp_size` has no effect."""
    return parallel_grid.groups_of(Degrees(pp_size, tp_size, dp_size))


def get_model_3d_descriptor(dir: str | PathLike[str]) -> model_3d_desc:
    """The degrees that a checkpoint directory was saved with.

    Raises:
        ValueError: If the directory is no DeepSpeed checkpoint or its files contradict each other.
    """
    from zero_strategy.convert.deepspeed import DeepSpeedDirectory

    degrees = DeepSpeedDirectory(dir).degrees
    return model_3d_desc(degrees.pp, degrees.tp, degrees.dp)
