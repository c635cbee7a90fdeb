"""The plan of a checkpoint's files, a pure function of tensor specs, the same on every rank.

Files in the directory, besides the manifest and the caller's extra files:

    model.safetensors                          or model-00001-of-0000n.safetensors and an index
    optimizer/<state>.safetensors              with one optimizer, for example exp_avg
    optimizer/<optimizer>/<state>.safetensors  with several
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_strategy.checkpoint.layout import (
    FileLayout,
    TensorSpec,
    check_file_name,
    folders_above,
    is_inner_path,
)
from zero_strategy.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    RECEIPTS_NAME,
    FileKind,
    Manifest,
    OptimizerRecord,
    Scalar,
    WeightRecord,
)
from zero_strategy.checkpoint.ranges import FOLDER_PREFIX

# As in huggingface_hub (MAX_SHARD_SIZE, 5 GB).
DEFAULT_MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class CheckpointPlan:
    """Layouts of all tensor files of a checkpoint. Make it with `build`.

    Attributes:
        weights: the model's files.
        states: one file per (optimizer, state kind).
        aliases: tied name -> the name its tensor is stored under.
    """

    weights: tuple[FileLayout, ...]
    states: Mapping[tuple[str, str], FileLayout]
    aliases: Mapping[str, str]

    @classmethod
    def build(
        cls,
        weights: Iterable[TensorSpec],
        states: Mapping[str, Mapping[str, Iterable[TensorSpec]]] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> CheckpointPlan:
        """Plans a checkpoint.

        Args:
            weights: the model's tensors, a tied one once, under its first name.
            states: optimizer name -> state kind -> tensors under their parameters' names. Dtype and shape
                are free: fp32 master weights of bf16 parameters, int8 moments, factored moments.
            aliases: further names of tied tensors -> the first name.
            max_file_bytes: most bytes of tensor data in one weights file.
            metadata: further strings for the headers of the weights files.

        Returns:
            The plan.

        Raises:
            ValueError: if names clash, an alias points nowhere, or an optimizer or state name cannot be
                a file name.
        """
        aliases = dict(aliases or {})
        states = states or {}
        # Sorted: the header is the same on all ranks and in all saves.
        header = {"aliases": json.dumps(aliases, sort_keys=True), **(metadata or {})}
        if metadata and "aliases" in metadata:
            raise ValueError("header metadata 'aliases' is reserved; pass aliases= instead")
        model = tuple(plan_files(weights, max_file_bytes, metadata=header))
        _check_aliases(aliases, {name for layout in model for name in layout.specs})
        files = {
            (optimizer, kind): FileLayout.compute(_state_path(optimizer, kind, len(states) > 1), specs)
            for optimizer, kinds in states.items()
            for kind, specs in kinds.items()
        }
        return cls(model, files, aliases)

    @property
    def layouts(self) -> tuple[FileLayout, ...]:
        """All files with tensors."""
        return (*self.weights, *self.states.values())

    @property
    def generated(self) -> Mapping[str, bytes]:
        """Further files whose content follows from the plan: the index of several weights files."""
        return {INDEX_NAME: index_json(self.weights)} if len(self.weights) > 1 else {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all these files."""
        return sum(layout.size for layout in self.layouts) + sum(map(len, self.generated.values()))

    def sizes(self) -> dict[str, int]:
        """Relative path -> bytes of all these files."""
        generated = {path: len(content) for path, content in self.generated.items()}
        return {layout.path: layout.size for layout in self.layouts} | generated

    def layout_of(self, kind: FileKind, name: str) -> FileLayout:
        """The file that holds a tensor.

        Raises:
            ValueError: if the plan has no such kind or tensor.
        """
        if kind != "model" and kind not in self.states:
            known = ["model", *self.states]
            raise ValueError(f"the checkpoint plan has no file kind {kind!r}; it has {known}")
        for layout in self.weights if kind == "model" else (self.states[kind],):
            if name in layout.specs:
                return layout
        raise ValueError(f"tensor {name!r} is not in the checkpoint plan for {kind!r}")

    def manifest(
        self,
        *,
        world_size: int,
        stage: int,
        scalars: Mapping[str, Mapping[str, Mapping[str, Scalar]]] | None = None,
        param_groups: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        counters: Mapping[str, Scalar] | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Makes the manifest of this plan.

        Args:
            world_size: number of ranks that save, for information.
            stage: ZeRO stage, for information.
            scalars: optimizer -> parameter -> state key -> value, for example the step count.
            param_groups: optimizer -> groups of hyper-parameters, parameters given by name.
            counters: the training loop's counters.
            user: anything that JSON can hold.

        Returns:
            A manifest that lists the planned files.
        """
        scalars, param_groups = scalars or {}, param_groups or {}
        names = dict.fromkeys([*(optimizer for optimizer, _ in self.states), *scalars, *param_groups])
        return Manifest(
            files=self.sizes(),
            weights=self.weight_records(),
            aliases=self.aliases,
            optimizers={
                name: OptimizerRecord(self.state_paths(name), scalars.get(name, {}), list(param_groups.get(name, [])))
                for name in names
            },
            counters=counters or {},
            world_size=world_size,
            stage=stage,
            user=user or {},
        )

    def weight_records(self) -> dict[str, WeightRecord]:
        """Name -> dtype, shape and file of every weight."""
        return {
            spec.name: WeightRecord(spec.dtype, spec.shape, layout.path)
            for layout in self.weights
            for spec in layout.specs.values()
        }

    def state_paths(self, optimizer: str) -> dict[str, str]:
        """State kind -> path of one optimizer's files."""
        return {kind: layout.path for (owner, kind), layout in self.states.items() if owner == optimizer}

    def check_extra_files(self, extra_files: Mapping[str, bytes]) -> None:
        """Raises ValueError if the path of a small file is not free, or leads out of the checkpoint."""
        taken = self.sizes().keys() | {MANIFEST_NAME}
        for path in extra_files:
            if not is_inner_path(path) or path.startswith((RECEIPTS_NAME, FOLDER_PREFIX)) or path in taken:
                raise ValueError(f"extra file {path!r}: not a free relative path inside the checkpoint")
        files = taken | extra_files.keys()
        # Found before a file is made: on the disk the second of the two would fail on one rank alone.
        if clash := sorted({folder for path in files for folder in folders_above(path)} & files):
            raise ValueError(f"extra file: {clash[0]!r} would be both a file and the folder of another one")

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises ValueError if the manifest was made for another self."""
        owners = {optimizer for optimizer, _ in self.states}
        same = dict(manifest.weights) == self.weight_records() and dict(manifest.aliases) == dict(self.aliases)
        # Optimizers without tensors have no files, and are in the manifest all the same.
        same = same and owners <= manifest.optimizers.keys()
        if not same or any(dict(e.states) != self.state_paths(n) for n, e in manifest.optimizers.items()):
            raise ValueError("the manifest does not describe the plan; make it with plan.manifest(...)")


def plan_files(
    specs: Iterable[TensorSpec],
    max_file_bytes: int,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[FileLayout]:
    """Divides tensors among files in the way of Hugging Face.

    Args:
        specs: the tensors; files are filled in this order.
        max_file_bytes: most bytes of tensor data in a file; a larger tensor gets a file of its own.
        stem: beginning of the file names.
        metadata: for each file's header.

    Returns:
        One layout `{stem}.safetensors`, or several `{stem}-00001-of-0000n.safetensors`.

    Raises:
        ValueError: if `max_file_bytes` is not positive or a name appears twice.
    """
    if max_file_bytes <= 0:
        raise ValueError(f"max_file_bytes must be positive, got {max_file_bytes}")
    groups: list[list[TensorSpec]] = [[]]
    seen: set[str] = set()
    filled = 0
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name!r} appears twice")
        seen.add(spec.name)
        # Not behind an empty one: a tensor that is too large for a file has one of its own.
        if groups[-1] and filled + spec.nbytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    if len(groups) == 1:
        return [FileLayout.compute(f"{stem}.safetensors", groups[0], metadata)]
    return [
        FileLayout.compute(f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors", group, metadata)
        for i, group in enumerate(groups, start=1)
    ]


def index_json(files: Sequence[FileLayout]) -> bytes:
    """The text of Hugging Face's `model.safetensors.index.json` for the files of one model."""
    weight_map = {name: layout.path for layout in files for name in layout.specs}
    index = {"metadata": {"total_size": sum(layout.data_bytes for layout in files)}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _check_aliases(aliases: Mapping[str, str], stored: set[str]) -> None:
    for alias, name in aliases.items():
        if alias in stored:
            raise ValueError(f"{alias!r} is both an alias and a stored tensor")
        if name not in stored:
            raise ValueError(f"alias {alias!r} points to {name!r}, which is not a stored tensor")


def _state_path(optimizer: str, kind: str, several: bool) -> str:
    for part in (optimizer, kind):
        check_file_name(part, "optimizer or state", ".safetensors")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", part):
            raise ValueError(f"{part!r} cannot name an optimizer or its state: it must serve as a file name")
    return f"optimizer/{optimizer}/{kind}.safetensors" if several else f"optimizer/{kind}.safetensors"
