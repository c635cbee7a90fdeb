"""File names of DeepSpeed checkpoints, and tensors in pieces of several ranks' flat buffers.

    ROOT/latest                                       text: the tag
    ROOT/TAG/mp_rank_MM_model_states.pt               stages 0 to 2
    ROOT/TAG/zero_pp_rank_D_mp_rank_MM_model_states.pt  stage 3, one per data-parallel rank
    ROOT/TAG/[bf16_|fp16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   one per data-parallel rank
    ROOT/TAG/layer_LL[-model_TT]-model_states.pt      pipelines
    ROOT/TAG/offloaded_tensors/rankRR/*.tensor.swp    optimizer state kept on NVMe

"pp_rank" in these names is the data-parallel rank D, without leading zeros; MM is the model-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.convert.portable import StoredTensor
from zero_strategy.runtime.regular_files import read_text

LATEST = "latest"
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_expert_|expp_rank_)")


@dataclass
class ModelRank:
    """The files of one model-parallel rank (of a tensor-parallel rank of one pipeline stage).

    Attributes:
        number: The rank.
        model: Data-parallel rank -> file of model states; up to stage 2 only 0.
        optimizer: Data-parallel rank -> file of optimizer states; none at stage 0.
    """

    number: int
    model: dict[int, Path] = field(default_factory=dict)
    optimizer: dict[int, Path] = field(default_factory=dict)


@dataclass
class CheckpointFiles:
    """The files of one tag.

    Attributes:
        directory: The tag's directory.
        ranks: By model-parallel rank; 0 alone without tensor parallelism and pipelines.
        layers: (layer, tensor-parallel rank) -> file, of a pipeline.
    """

    directory: Path
    ranks: dict[int, ModelRank] = field(default_factory=dict)
    layers: dict[tuple[int, int], Path] = field(default_factory=dict)

    @classmethod
    def find(cls, directory: Path) -> CheckpointFiles:
        """The files of a tag's directory, complete or not.

        Raises:
            ValueError: If it has experts of a mixture, or files of one rank under two names.
        """
        found = cls(directory)
        for path in sorted(directory.iterdir()):
            if _EXPERT.match(path.name):
                raise ValueError(f"{path}: mixtures of experts (expert-parallel checkpoints) are not read")
            if match := _MODEL.fullmatch(path.name):
                _put(found.rank(int(match[1])).model, 0, path)
            elif match := _ZERO_MODEL.fullmatch(path.name):
                _put(found.rank(int(match[2])).model, int(match[1]), path)
            elif match := _OPTIMIZER.fullmatch(path.name):
                _put(found.rank(int(match[2])).optimizer, int(match[1]), path)
            elif match := _LAYER.fullmatch(path.name):
                found.layers[int(match[1]), int(match[2] or 0)] = path
        return found

    def all(self) -> list[Path]:
        """Every file of torch.save among them."""
        of_ranks = [path for rank in self.ranks.values() for path in (*rank.model.values(), *rank.optimizer.values())]
        return [*of_ranks, *self.layers.values()]

    def rank(self, number: int) -> ModelRank:
        """The files of a model-parallel rank, added if it was not known."""
        return self.ranks.setdefault(number, ModelRank(number))


def _put(files: dict[int, Path], number: int, path: Path) -> None:
    if number in files:
        other = files[number].name
        raise ValueError(f"{path.parent}: {other} and {path.name} are of the same rank; remove the older one")
    files[number] = path


def complete(files: dict[int, Path], count: int, what: str, source: Path) -> list[Path]:
    """The files of ranks 0 to count - 1, in this order.

    Args:
        files: Rank -> file.
        count: How many ranks saved.
        what: What the files are, for errors.
        source: The file that says so.

    Raises:
        ValueError: Naming the ranks that are missing or too many.
    """
    if missing := sorted(set(range(count)) - files.keys()):
        raise ValueError(
            f"{source.parent}: {what} of data-parallel rank(s) {_listed(missing)} are missing ({source.name} says that "
            f"{count} ranks saved); copy all files, or take an earlier tag"
        )
    if spare := sorted(files.keys() - set(range(count))):
        names = ", ".join(files[number].name for number in spare[:3])
        raise ValueError(
            f"{source.parent}: {source.name} says that {count} ranks saved, but there are {what} of rank(s) "
            f"{_listed(spare)}, left over from another save: remove {names}{' ...' if spare[3:] else ''}"
        )
    return [files[number] for number in range(count)]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (" ..." if numbers[20:] else "")


# ---- tags ----


def is_tag(directory: Path) -> bool:
    """True if a directory holds files of one save."""
    if not directory.is_dir():
        return False
    patterns = (_MODEL, _ZERO_MODEL, _LAYER, _OPTIMIZER)
    return any(pattern.fullmatch(path.name) for path in directory.iterdir() for pattern in patterns)


def _tags(root: Path) -> list[str]:
    return sorted((path.name for path in root.iterdir() if is_tag(path)), key=natural)


def natural(name: str) -> list[tuple[int, str]]:
    """Key that sorts "step9" before "step10"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def find_tag(path: Path, tag: str | None = None) -> Path:
    """The directory of a tag.

    Args:
        path: What was given as `save_dir`, or the tag's directory itself.
        tag: Which; by default the one that `latest` names.

    Raises:
        ValueError: If there is none such; lists those there are.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no directory")
    if tag is None and is_tag(path):
        return path
    named, source = tag, "tag"
    if named is None and (path / LATEST).is_file():
        named, source = read_text(path / LATEST).strip(), f"{path / LATEST}: tag"
    there = _tags(path)
    if named is None:
        if len(there) == 1:
            return path / there[0]
        raise ValueError(f"{path}: has no file {LATEST}; name one of the tags {_names(there)}")
    if named not in there:
        raise ValueError(f"{source} {named!r} is not in {path}; there are {_names(there)}")
    return path / named


def _names(tags: Iterable[str]) -> str:
    return ", ".join(map(repr, tags)) or "none"


Source = Callable[[], torch.Tensor]
"""Gives a rank's flat buffer: a mapped view, or what is read from a file of its own."""


class Flat:
    """One flat vector, divided among the ranks in this order.

    Args:
        parts: The ranks' buffers, 1-D, of one dtype.
        lengths: Their elements.
        dtype: Their dtype.
    """

    def __init__(self, parts: Sequence[Source], lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.parts = parts
        self.lengths = lengths
        self.dtype = dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Flat:
        """One whose buffers are mapped tensors."""
        return cls([_giving(tensor) for tensor in tensors], [t.numel() for t in tensors], tensors[0].dtype)

    def __len__(self) -> int:
        return sum(self.lengths)

    def stored(self, name: str, shape: Sequence[int], start: int) -> StoredTensor:
        """A tensor that begins at an element of the whole vector, whichever ranks it lies on."""
        return self._stored(name, shape, lambda: self._run(start, start + prod(shape)))

    def stored_by_rank(self, name: str, shape: Sequence[int], start: int) -> StoredTensor:
        """A tensor of which every rank has an equal piece, beginning at the same element; the last are padded."""
        numel = prod(shape)
        piece = -(-numel // len(self.parts))
        return self._stored(name, shape, lambda: [part()[start : start + piece] for part in self.parts])

    def _stored(self, name: str, shape: Sequence[int], pieces: Callable[[], list[torch.Tensor]]) -> StoredTensor:
        numel = prod(shape)

        def load() -> torch.Tensor:
            return torch.cat(pieces())[:numel].view(tuple(shape)) if numel else torch.empty(shape, dtype=self.dtype)

        return StoredTensor(TensorSpec(name, self.dtype, tuple(shape)), load)

    def _run(self, start: int, stop: int) -> list[torch.Tensor]:
        pieces, begin = [], 0
        for part, length in zip(self.parts, self.lengths, strict=True):
            low, high = max(start, begin), min(stop, begin + length)
            if low < high:
                pieces.append(part()[low - begin : high - begin])
            begin += length
        return pieces


def _giving(tensor: torch.Tensor) -> Source:
    return lambda: tensor


def cast(stored: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """The same tensor, rounded to another dtype."""
    spec = TensorSpec(stored.spec.name, dtype, stored.spec.shape)
    return StoredTensor(spec, lambda: stored.load().to(dtype))


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """A shape as the file has it.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, (tuple, list)) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{where}: {value!r} is no shape")
    return tuple(value)
