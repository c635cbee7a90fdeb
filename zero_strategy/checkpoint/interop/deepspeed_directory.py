"""The files of one DeepSpeed checkpoint (`<root>/<tag>/`) by the ranks in their names, and the grid that saved them.

    mp_rank_{mp:02d}_model_states.pt                                    stages 0 to 2, and every pipeline rank
    zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt                  stage 3; "pp" in the name means data rank
    [bf16_|fp16_]zero_pp_rank_{dp}_mp_rank_{mp:02d}[_]optim_states.pt   stages 1 to 3
    layer_{layer:02d}[-model_{tp:02d}]-model_states.pt                  pipelines
    layer_{L}_expert_{E}_..., expp_rank_...                             mixtures of experts

mp is `pp * tp_degree + tp`. The names are parsed, not globbed: rank 10 comes after rank 9.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from zero_strategy.checkpoint.interop.parallel_grid import Degrees

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_STAGE3 = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-[a-z]+_(\d+))?[-_]model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_.*\.pt|expp_rank_.*\.pt")
K = TypeVar("K")


class DeepSpeedDirectory:
    """A checkpoint's files.

    Args:
        path: The directory of one tag.

    Attributes:
        path: The same.
        model_files: mp rank -> `mp_rank_*` file.
        stage3_files: (data rank, mp rank) -> model file of stage 3.
        optimizer_files: (data rank, mp rank) -> optimizer file.
        layer_files: Layer -> tensor rank -> file.
        expert_files: All files of experts.

    Raises:
        ValueError: If it is no directory, has no model files, or has two files for one rank.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a directory")
        names = sorted(entry.name for entry in self.path.iterdir() if not entry.is_dir())
        self.model_files = self._numbered(names, _MODEL, lambda mp: mp)
        self.stage3_files = self._numbered(names, _STAGE3, lambda dp, mp: (dp, mp))
        self.optimizer_files = self._numbered(names, _OPTIMIZER, lambda dp, mp: (dp, mp))
        self.layer_files: dict[int, dict[int, Path]] = {}
        for (layer, tp), file in self._numbered(names, _LAYER, lambda layer, tp: (layer, tp)).items():
            self.layer_files.setdefault(layer, {})[tp] = file
        self.expert_files = [self.path / name for name in names if _EXPERT.fullmatch(name)]
        if not self.model_files and not self.stage3_files:
            raise ValueError(
                f"{self.path} is not a DeepSpeed checkpoint: it has neither mp_rank_*_model_states.pt nor "
                "zero_pp_rank_*_mp_rank_*_model_states.pt; name the directory of one tag, not its parent"
            )

    @property
    def is_pipeline(self) -> bool:
        """Whether weights are stored layer by layer."""
        return bool(self.layer_files)

    @property
    def mp_ranks(self) -> list[int]:
        """Model-parallel ranks that have a model file."""
        return sorted(self.model_files or {mp for _, mp in self.stage3_files})

    def first_model_file(self, mp: int) -> Path:
        """The model file of a model-parallel rank, of data rank 0 under stage 3.

        Raises:
            ValueError: If there is none.
        """
        found = self.model_files.get(mp) or self.stage3_files.get((0, mp))
        if found is None:
            raise ValueError(f"{self.path} has no model file of mp rank {mp}")
        return found

    @cached_property
    def degrees(self) -> Degrees:
        """The grid that saved it: from `checkpoint_parallel_dimensions`, and in older ones from the files' names.

        Raises:
            ValueError: If files are missing or contradict each other, naming them.
        """
        tp, pp = self._model_degrees()
        ranks = self.mp_ranks
        if missing := sorted(set(range(tp * pp)) - set(ranks)):
            raise ValueError(f"{self.path}: model files of mp ranks {missing} are missing (pp {pp}, tp {tp})")
        if len(ranks) != tp * pp:
            raise ValueError(f"{self.path}: {len(ranks)} mp ranks have model files, pp {pp} and tp {tp} make {tp * pp}")
        dp = 1 + max((dp for dp, _ in [*self.optimizer_files, *self.stage3_files]), default=0)
        for what, files in (("optimizer", self.optimizer_files), ("model", self.stage3_files)):
            wanted = {(d, m) for d in range(dp) for m in ranks} if files else set()
            if missing_pairs := sorted(wanted - files.keys()):
                raise ValueError(f"{self.path}: {what} files of (data rank, mp rank) {missing_pairs} are missing")
        for layer, files in self.layer_files.items():
            if gaps := sorted(set(range(tp)) - files.keys()):
                raise ValueError(f"{self.path}: layer {layer} lacks the files of tensor ranks {gaps}")
        return Degrees(pp, tp, dp)

    def load(self, file: Path) -> Any:
        """Load a file with the restricted unpickler."""
        from zero_strategy.checkpoint.interop.pickles import load_restricted

        return load_restricted(file)

    def _model_degrees(self) -> tuple[int, int]:
        """(tensor, pipeline) degrees."""
        recorded = self._recorded(self.load(self.first_model_file(self.mp_ranks[0])))
        if recorded is not None:
            return recorded
        count = len(self.mp_ranks)
        if not self.layer_files:
            return count, 1
        tp = len(next(iter(self.layer_files.values())))
        if count % tp:
            raise ValueError(f"{self.path}: {count} model files do not belong to {tp} tensor ranks of each layer")
        return tp, count // tp

    def _recorded(self, state: Mapping[str, Any]) -> tuple[int, int] | None:
        dimensions = state.get("checkpoint_parallel_dimensions")
        if dimensions is None:
            return None
        found = dimensions if isinstance(dimensions, Mapping) else {}
        tp, pp = found.get("tp_degree"), found.get("pp_degree")
        if type(tp) is not int or type(pp) is not int or tp < 1 or pp < 1:
            raise ValueError(f"{self.path}: checkpoint_parallel_dimensions is {dimensions!r}, expected counts")
        return tp, pp

    def _numbered(self, names: Iterable[str], pattern: re.Pattern[str], key: Any) -> dict[Any, Path]:
        found: dict[Any, Path] = {}
        for name in names:
            if matched := pattern.fullmatch(name):
                rank = key(*(int(number or 0) for number in matched.groups()))
                if rank in found:
                    raise ValueError(f"{self.path}: {found[rank].name} and {name} are of the same rank {rank}")
                found[rank] = self.path / name
        return dict(sorted(found.items()))
