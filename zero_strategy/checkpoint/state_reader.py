"""The interface of an open checkpoint, as the engine asks it, whatever wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from zero_strategy.checkpoint.layout import FileLayout, TensorSpec
from zero_strategy.checkpoint.manifest import FileKind, Manifest
from zero_strategy.runtime.host_bytes import checksum_of


@dataclass(frozen=True, eq=False)
class Wanted:
    """A range to be read with others.

    Attributes:
        name, start, stop, kind: See `StateReader.read`.
        out: Where it goes; None: into memory of its own.
        then: Is given what was read, in any thread.
    """

    name: str
    start: int
    stop: int
    kind: FileKind = "model"
    out: torch.Tensor | None = None
    then: Callable[[torch.Tensor], object] | None = None

    def take(self, values: torch.Tensor) -> None:
        """Give what was read to `then`."""
        if self.then is not None:
            with torch.no_grad():
                self.then(values)


class StateReader(ABC):
    """Weights and optimizer state, open for reading by element range.

    Attributes:
        directory: Where they are; a text if it is a URL.
        aliases: Further name of a tied tensor -> the name it is stored under.
        block: Elements that are best read at once where a tensor is gone through.
    """

    directory: Path | str
    aliases: dict[str, str]
    block = 4 << 20
    _manifest: Manifest | None = None
    _weights: Mapping[str, TensorSpec]

    @property
    def manifest(self) -> Manifest:
        """State besides tensors.

        Raises:
            ValueError: If these are plain weights.
        """
        if self._manifest is None:
            raise ValueError(f"{self.directory}: plain weights, not a checkpoint with a manifest")
        return self._manifest

    @property
    def has_manifest(self) -> bool:
        """False for plain weights."""
        return self._manifest is not None

    @property
    def weights(self) -> Mapping[str, TensorSpec]:
        """Name -> spec of every stored weight, without aliases."""
        return MappingProxyType(self._weights)

    @abstractmethod
    def states(self, optimizer: str) -> dict[str, Mapping[str, TensorSpec]]:
        """Tensor state of an optimizer.

        Returns:
            State kind -> parameter name -> spec.

        Raises:
            ValueError: If the checkpoint has no such optimizer.
        """

    @abstractmethod
    def spec(self, name: str, kind: FileKind = "model") -> TensorSpec:
        """Spec of a tensor; its name is the stored one where `name` is an alias.

        Raises:
            ValueError: If there is no such tensor.
        """

    @abstractmethod
    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        out: torch.Tensor | None = None,
        kind: FileKind = "model",
    ) -> torch.Tensor:
        """Reads elements [start, stop) of a row-major flattened tensor.

        Args:
            name: The tensor, or an alias of it.
            start: First element.
            stop: One past the last element; None for the tensor's end.
            out: 1-D, contiguous, of the stored dtype, with stop - start elements, on any device. None makes a new
                tensor on the CPU.
            kind: "model", or (optimizer, state kind).

        Returns:
            `out`, filled.

        Raises:
            ValueError: If there is no such tensor or range, `out` has another size, or the file is damaged.
            TypeError: If `out` has another dtype or is not 1-D and contiguous.
        """

    @abstractmethod
    def extra(self, path: str) -> bytes:
        """Content of a file that the manifest lists, such as one that was given to `commit`.

        Raises:
            ValueError: If the manifest lists no such file.
        """

    def file_of(self, name: str, kind: FileKind = "model") -> str:
        """Path of the file that holds a tensor, relative to the directory; empty where that is not known."""
        return ""

    def read_many(self, wanted: Sequence[Wanted]) -> None:
        """Reads ranges, in whatever order is fastest.

        Raises:
            ValueError, TypeError: as `read`.
        """
        for item in wanted:
            item.take(self.read(item.name, item.start, item.stop, item.out, item.kind))

    def name_parameters(self, optimizer: str, names: Sequence[str]) -> None:  # noqa: B027 (most know the names)
        """Tells the names of an optimizer's parameters, through its groups, to a checkpoint that does not know them.

        Raises:
            ValueError: If the optimizer in the checkpoint has other parameters.
        """

    def identity(self) -> str:
        """A digest that differs where the content does, as far as that is known without reading all of it."""
        return checksum_of(repr((list(self.weights.values()), self.manifest if self.has_manifest else None)).encode())

    def full(self, name: str, kind: FileKind = "model") -> torch.Tensor:
        """Reads a whole tensor, in its shape, on the CPU."""
        return self.read(name, kind=kind).view(self.spec(name, kind).shape)

    def check_against(self, specs: Iterable[TensorSpec], tied: Mapping[str, str] | None = None) -> None:
        """Checks that a model's tensors are those of the checkpoint.

        Tied tensors may be given under any or all of their names, and stored under any or all of them. Dtypes may
        differ: a model can be loaded in another precision than it was saved in.

        Args:
            specs: All tensors of the model.
            tied: Further name of a tensor of the model -> its name in `specs`.

        Raises:
            ValueError: Listing every missing, unexpected and wrongly shaped name.
        """
        weights = self.weights
        names = _all_names(tied or {})
        missing, shapes, used = [], [], set()
        for spec in specs:
            found = [weights.get(self.stored_name(name, weights)) for name in (spec.name, *names.get(spec.name, ()))]
            if not any(found):
                missing.append(_described(spec, names.get(spec.name, ())))
            for stored in found:
                if stored is not None and stored.name not in used:
                    used.add(stored.name)
                    if stored.shape != spec.shape:
                        shapes.append(f"{stored.name} (checkpoint {stored.shape}, model {spec.shape})")
        known = _all_names(self.aliases)
        unexpected = [_described(spec, known.get(name, ())) for name, spec in weights.items() if name not in used]
        problems = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
        lines = [f"\n  {what} ({len(n)}): " + ", ".join(n) for what, n in problems.items() if n]
        if lines:
            raise ValueError(f"{self.directory}: not a checkpoint of this model:" + "".join(lines))

    def sources(self, names: Iterable[str], tied: Mapping[str, str]) -> dict[str, str]:
        """Under which names a model's tensors can be read.

        Args:
            names: The model's.
            tied: See `check_against`.

        Returns:
            Name -> itself, or another name of the same tensor that is stored; without those that are not there.
        """
        others = _all_names(tied)
        found = {}
        for name in names:
            for other in (name, *others.get(name, ())):
                if self.stored_name(other, self.weights) in self.weights:
                    found[name] = other
                    break
        return found

    def check_ties(self, tied: Mapping[str, str]) -> None:
        """Checks that tensors which the model ties, and which are stored twice, are equal.

        Args:
            tied: See `check_against`.

        Raises:
            ValueError: Naming two that differ.
        """
        for alias, name in tied.items():
            stored = [self.stored_name(n, self.weights) for n in (name, alias)]
            if stored[0] == stored[1] or not all(n in self.weights for n in stored):
                continue
            numel = self.spec(name).numel
            for start in range(0, numel, self.block):
                stop = min(start + self.block, numel)
                parts = [self.read(n, start, stop) for n in stored]
                if parts[0].dtype != parts[1].dtype or not torch.equal(*(p.view(torch.uint8) for p in parts)):
                    raise ValueError(
                        f"{self.directory}: the model ties {name!r} and {alias!r}, which differ in the checkpoint; it "
                        "is one of a model without this tie"
                    )

    def stored_name(self, name: str, stored: Mapping[str, object]) -> str:
        """The name itself where it is stored, else what it is an alias of."""
        return name if name in stored else self.aliases.get(name, name)


class LayoutReader(StateReader):
    """A checkpoint of safetensors files, whose layouts tell where each element is."""

    _weight_files: Mapping[str, str]
    """Name of a weight -> its file."""

    @abstractmethod
    def _layout(self, path: str) -> FileLayout:
        """Layout of a file."""

    def states(self, optimizer: str) -> dict[str, Mapping[str, TensorSpec]]:
        """See `StateReader.states`."""
        record = self.manifest.optimizers.get(optimizer)
        if record is None:
            known = sorted(self.manifest.optimizers)
            raise ValueError(f"{self.directory}: has no optimizer {optimizer!r}; it has {known}")
        return {kind: self._layout(path).specs for kind, path in record.states.items()}

    def spec(self, name: str, kind: FileKind = "model") -> TensorSpec:
        """See `StateReader.spec`."""
        layout, stored = self._find(name, kind)
        return layout.specs[stored]

    def _find(self, name: str, kind: FileKind) -> tuple[FileLayout, str]:
        """The file that holds a tensor, and the tensor's name there."""
        if kind == "model":
            stored = self.stored_name(name, self._weight_files)
            if stored not in self._weight_files:
                raise ValueError(f"{self.directory}: has no tensor {name!r}")
            return self._layout(self._weight_files[stored]), stored
        optimizer, state = kind
        record = self.manifest.optimizers.get(optimizer)
        path = record.states.get(state) if record else None
        if path is None:
            raise ValueError(f"{self.directory}: has no state {state!r} of an optimizer {optimizer!r}")
        layout = self._layout(path)
        stored = self.stored_name(name, layout.specs)
        if stored not in layout.specs:
            raise ValueError(f"{self.directory}/{path}: has no tensor {name!r}")
        return layout, stored


def _all_names(tied: Mapping[str, str]) -> dict[str, list[str]]:
    """Name -> further names."""
    names: dict[str, list[str]] = {}
    for alias, name in tied.items():
        names.setdefault(name, []).append(alias)
    return names


def _described(spec: TensorSpec, others: Iterable[str]) -> str:
    """A name, and what would otherwise be looked for in vain."""
    notes = [f"tied to {other}" for other in others if other != spec.name] + ["no elements"] * (spec.numel == 0)
    return f"{spec.name} ({', '.join(notes)})" if notes else spec.name


def check_out(name: str, dtype: torch.dtype, numel: int, out: torch.Tensor) -> None:
    """Checks what is given to `StateReader.read` as `out`.

    Raises:
        ValueError: If it has another size.
        TypeError: If it has another dtype or is not 1-D and contiguous.
    """
    if out.dtype != dtype:
        raise TypeError(f"tensor {name!r} is stored as {dtype}, out has {out.dtype}")
    if out.dim() != 1 or not out.is_contiguous() or out.device.type == "meta":
        raise TypeError(f"out for tensor {name!r} must be 1-D, contiguous and not on the meta device")
    if out.numel() != numel:
        raise ValueError(f"out for {numel} elements of tensor {name!r} has {out.numel()}")
