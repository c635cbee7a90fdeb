"""A checkpoint seen as a model of the averages that were saved with it, as `WeightAverage` keeps them.

    reader = averages_of(open_checkpoint("run/step-100"))
    engine.load_weights(reader)             # or reader.full(name)

What has no average, such as frozen parameters, is as it is. Averages are float32, also of weights in low precision.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from zero_strategy.checkpoint.contents import AVERAGE_BUFFERS_FILE
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import FileKind
from zero_strategy.checkpoint.reader import StateReader, Wanted, check_out
from zero_strategy.optim.averaging import AVERAGE

OWN = "zero_strategy"
"""Key of the engine's own entry in the manifest's user metadata."""


def has_averages(reader: StateReader) -> bool:
    """True if averages of the weights were saved with a checkpoint."""
    return reader.has_manifest and AVERAGE in reader.manifest.user.get(OWN, {})


def averages_of(reader: StateReader) -> StateReader:
    """The same checkpoint with the averages in place of the weights; its optimizers' state is as it was.

    Raises:
        ValueError: If none were saved with it.
    """
    if not has_averages(reader):
        raise ValueError(
            f"{reader.directory}: holds no averages of the weights; they are saved with the optimizer's state where "
            "engine.average_weights(...) or an averaging callback keeps them"
        )
    return AveragedReader(reader)


def average_buffers(reader: StateReader) -> dict[str, torch.Tensor]:
    """The averages of buffers in a checkpoint, by name."""
    if AVERAGE_BUFFERS_FILE not in reader.manifest.files:
        return {}
    found: dict[str, torch.Tensor] = torch.load(io.BytesIO(reader.extra(AVERAGE_BUFFERS_FILE)), weights_only=True)
    return found


class AveragedReader(StateReader):
    """See `averages_of`."""

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self.directory, self.aliases, self.block = reader.directory, reader.aliases, reader.block
        self._manifest = reader.manifest
        self._kinds: dict[str, FileKind] = {}
        specs = dict(reader.weights)
        for optimizer in reader.manifest.optimizers:
            for name, spec in reader.states(optimizer).get(AVERAGE, {}).items():
                if name in specs:
                    self._kinds[name], specs[name] = (optimizer, AVERAGE), spec
        self._buffers = {name: values for name, values in average_buffers(reader).items() if name in specs}
        for name, values in self._buffers.items():
            specs[name] = TensorSpec(name, values.dtype, tuple(values.shape))
        self._weights = specs

    def states(self, optimizer: str) -> dict[str, Mapping[str, TensorSpec]]:
        """See `StateReader.states`."""
        return self._reader.states(optimizer)

    def spec(self, name: str, kind: FileKind = "model") -> TensorSpec:
        """See `StateReader.spec`."""
        stored = self.stored_name(name, self._weights)
        return self._weights[stored] if kind == "model" and stored in self._weights else self._reader.spec(name, kind)

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        out: torch.Tensor | None = None,
        kind: FileKind = "model",
    ) -> torch.Tensor:
        """See `StateReader.read`."""
        stored = self.stored_name(name, self._weights)
        if kind != "model" or stored not in self._buffers:
            return self._reader.read(stored, start, stop, out, self._kind(stored, kind))
        values = self._buffers[stored].reshape(-1)[start:stop]
        if out is None:
            return values.clone()
        check_out(name, values.dtype, values.numel(), out)
        return out.copy_(values)

    def read_many(self, wanted: Sequence[Wanted]) -> None:
        """See `StateReader.read_many`."""
        stored = [replace(item, name=self.stored_name(item.name, self._weights)) for item in wanted]
        small = [item for item in stored if item.kind == "model" and item.name in self._buffers]
        super().read_many(small)
        others = (item for item in stored if not (item.kind == "model" and item.name in self._buffers))
        self._reader.read_many([replace(item, kind=self._kind(item.name, item.kind)) for item in others])

    def extra(self, path: str) -> bytes:
        """See `StateReader.extra`."""
        return self._reader.extra(path)

    def file_of(self, name: str, kind: FileKind = "model") -> str:
        """See `StateReader.file_of`."""
        return self._reader.file_of(name, self._kind(self.stored_name(name, self._weights), kind))

    def identity(self) -> str:
        """See `StateReader.identity`."""
        return f"averages of {self._reader.identity()}"

    def _kind(self, stored: str, kind: FileKind) -> FileKind:
        return self._kinds.get(stored, kind) if kind == "model" else kind
