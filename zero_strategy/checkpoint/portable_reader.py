"""A portable state behind the interface of an open checkpoint: the engine loads foreign directories as its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import Manifest, OptimizerRecord, WeightRecord
from zero_strategy.checkpoint.plan import FileKind
from zero_strategy.checkpoint.portable import OWN_KEY, PortableState, StoredTensor, client_state_file, loaded
from zero_strategy.checkpoint.state_reader import StateReader, check_out


class PortableReader(StateReader):
    """A portable state, open for reading.

    It keeps the tensor that was read last, since ranks and blocks ask for parts of one after the other.

    Args:
        state: The state.
        directory: Where it came from, for errors.
    """

    block = sys.maxsize  # any part costs as much as the whole

    def __init__(self, state: PortableState, directory: Path) -> None:
        self.state = state
        self.directory = directory
        self.aliases = dict(state.aliases)
        self._tensors = self._by_kind()
        self._weights = MappingProxyType({name: tensor.spec for name, tensor in state.weights.items()})
        self._files = {**state.extra_files, **client_state_file(state)}
        self._last: tuple[FileKind, str, torch.Tensor] | None = None
        self._manifest = self._described()

    @property
    def manifest(self) -> Manifest:
        """Records without files: of the files, the manifest lists those that `extra` gives."""
        return self._manifest

    @property
    def has_manifest(self) -> bool:
        """True."""
        return True

    @property
    def weights(self) -> Mapping[str, TensorSpec]:
        """Name -> spec of every stored weight, without aliases."""
        return self._weights

    def states(self, optimizer: str) -> dict[str, Mapping[str, TensorSpec]]:
        """See `StateReader.states`."""
        if optimizer not in self._manifest.optimizers:
            known = sorted(self._manifest.optimizers)
            raise ValueError(f"{self.directory}: has no optimizer {optimizer!r}; it has {known}")
        kinds = self.state.optimizers[int(optimizer)].kinds
        return {kind: {name: tensor.spec for name, tensor in tensors.items()} for kind, tensors in kinds.items()}

    def name_parameters(self, optimizer: str, names: Sequence[str]) -> None:
        """See `StateReader.name_parameters`."""
        number = int(optimizer)
        if not self.state.optimizers[number].unnamed:
            return
        try:
            self.state.optimizers[number] = self.state.optimizers[number].with_names(names, self.state.weights)
        except ValueError as error:
            raise ValueError(f"{self.directory}: optimizer {optimizer}: {error}") from None
        self._tensors, self._manifest = self._by_kind(), self._described()

    def spec(self, name: str, kind: FileKind = "model") -> TensorSpec:
        """See `StateReader.spec`."""
        return self._find(name, kind).spec

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        out: torch.Tensor | None = None,
        kind: FileKind = "model",
    ) -> torch.Tensor:
        """See `StateReader.read`."""
        tensor = self._find(name, kind)
        spec = tensor.spec
        stop = spec.numel if stop is None else stop
        if not 0 <= start <= stop <= spec.numel:
            raise ValueError(
                f"{self.directory}: elements [{start}, {stop}) are not within tensor {name!r} "
                f"of shape {spec.shape} ({spec.numel} elements)"
            )
        if out is None:
            out = torch.empty(stop - start, dtype=spec.dtype)
        check_out(name, spec.dtype, stop - start, out)
        return out.copy_(self._whole(tensor, kind)[start:stop])

    def extra(self, path: str) -> bytes:
        """See `StateReader.extra`."""
        if path not in self._files:
            raise ValueError(f"{self.directory}: has no file {path!r}; it has {sorted(self._files)}")
        return self._files[path]

    def _find(self, name: str, kind: FileKind) -> StoredTensor:
        tensors = self._tensors.get(kind)
        if tensors is None:
            raise ValueError(f"{self.directory}: has no optimizer state {kind!r}")
        stored = self.stored_name(name, tensors)
        if stored not in tensors:
            what = "tensor" if kind == "model" else f"state {kind!r} of"
            raise ValueError(f"{self.directory}: has no {what} {name!r}")
        return tensors[stored]

    def _whole(self, tensor: StoredTensor, kind: FileKind) -> torch.Tensor:
        if self._last is None or self._last[:2] != (kind, tensor.spec.name):
            self._last = None  # before the next one is loaded, so that there is never more than one
            self._last = (kind, tensor.spec.name, loaded(tensor).contiguous().reshape(-1))
        return self._last[2]

    def _by_kind(self) -> dict[FileKind, Mapping[str, StoredTensor]]:
        found: dict[FileKind, Mapping[str, StoredTensor]] = {"model": self.state.weights}
        for number, optimizer in enumerate(self.state.optimizers):
            found |= {(str(number), kind): tensors for kind, tensors in optimizer.kinds.items()}
        return found

    def _described(self) -> Manifest:
        state = self.state
        own = {
            **state.user.get(OWN_KEY, {}),
            "scalar_dtypes": [optimizer.scalar_dtypes for optimizer in state.optimizers],
            "loss_scaler": state.loss_scaler,
        }
        return Manifest(
            files={path: len(content) for path, content in self._files.items()},
            weights={name: WeightRecord(spec.dtype, spec.shape, "") for name, spec in self._weights.items()},
            aliases=self.aliases,
            optimizers={
                str(number): OptimizerRecord(dict.fromkeys(entry.kinds, ""), entry.scalars, entry.param_groups)
                for number, entry in enumerate(state.optimizers)
            },
            counters=state.counters,
            user={**state.user, OWN_KEY: own},
        )
