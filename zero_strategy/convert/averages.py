"""Averages of weights in checkpoints: those that one was saved with, and the mean of several.

    reader = averages_of("run/step-100")
    engine.load_weights(reader)             # or reader.full(name)

What has no running average, such as frozen parameters, is as it is. Running averages are float32, also of weights in
low precision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import AVERAGE, FileKind
from zero_strategy.checkpoint.plan import DEFAULT_MAX_FILE_BYTES
from zero_strategy.checkpoint.reader import StateReader, Wanted, average_buffers, check_out
from zero_strategy.convert.convert import NATIVE, free_place, open_any, read_state, write_state
from zero_strategy.convert.portable import OWN_KEY, PortableState, Progress, StoredTensor, loaded, portable_of


def has_averages(reader: StateReader) -> bool:
    """True if averages of the weights were saved with a checkpoint."""
    return reader.has_manifest and AVERAGE in reader.manifest.user.get(OWN_KEY, {})


def averages_of(source: str | os.PathLike[str] | StateReader) -> StateReader:
    """A checkpoint with the averages in place of the weights; its optimizers' state is as it was.

    Args:
        source: The checkpoint, or its open reader.

    Raises:
        ValueError: If none were saved with it.
    """
    reader = source if isinstance(source, StateReader) else open_any(source)
    if not has_averages(reader):
        raise ValueError(
            f"{reader.directory}: holds no averages of the weights; they are saved with the optimizer's state where "
            "engine.average_weights(...) or an averaging callback keeps them"
        )
    return AveragedReader(reader)


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


def average(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    shares: Sequence[float] | None = None,
    to_format: str = NATIVE,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    progress: Callable[[int], Progress] | None = None,
) -> PortableState:
    """Writes the mean of the weights of several checkpoints; the target appears whole or not at all.

    Args:
        sources: Of any format, with weights of the same names, shapes and dtypes; of one alone, the running averages
            that were saved with it become the weights.
        target: The new one, without optimizer states; nothing of that name exists.
        shares: Positive, one per source; divided by their sum. Default: equal.
        to_format, dtype, max_file_bytes, progress: See `convert`.

    Returns:
        What was written. Sums are taken in float64, of fp32 master weights where a source has them. Of weights that are
        no floating-point numbers the last source's are taken.

    Raises:
        ValueError: If sources differ, naming the weight; if one alone holds no averages; if shares do not fit; else as
            `convert`.
        OSError: If the file system fails.
    """
    place = free_place(target, to_format)
    given = [1.0] * len(sources) if shares is None else list(shares)
    if len(given) != len(sources) or not all(0 < share < float("inf") for share in given):
        raise ValueError(f"shares {given} must be {len(sources)} positive numbers, one per checkpoint")
    if len(sources) == 1:
        averaged = portable_of(averages_of(sources[0]))
        named = [(os.fspath(sources[0]), replace(averaged, optimizers=[]))]
    else:
        named = [(os.fspath(source), read_state(source, None, {}, weights_only=False)) for source in sources]
    _check_alike(named)
    first = named[0][1]
    factors = [share / sum(given) for share in given]
    weights = {
        name: _mean(tensor.spec, [_finest(state, name) for _, state in named], factors, dtype)
        for name, tensor in first.weights.items()
    }
    state = PortableState(weights=weights, aliases=first.aliases)
    total = sum(tensor.spec.nbytes for tensor in state.weights.values())
    write_state(state, place, to_format, max_file_bytes, progress(total) if progress else None, Path(sources[0]))
    return state


def _check_alike(named: Sequence[tuple[str, PortableState]]) -> None:
    (source, first), *others = named
    for other, state in others:
        if missing := sorted(first.weights.keys() ^ state.weights.keys()):
            where, lacking = (source, other) if missing[0] in first.weights else (other, source)
            raise ValueError(f"weight {missing[0]!r} is in {where} and not in {lacking}")
        for name, tensor in first.weights.items():
            a, b = tensor.spec, state.weights[name].spec
            if (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
                raise ValueError(
                    f"weight {name!r} is {a.dtype} of shape {list(a.shape)} in {source}, {b.dtype} of shape "
                    f"{list(b.shape)} in {other}"
                )


def _finest(state: PortableState, name: str) -> StoredTensor:
    """A weight, or its fp32 master weight where there is one."""
    masters = (optimizer.kinds.get("master", {}).get(name) for optimizer in state.optimizers)
    return next((master for master in masters if master is not None), state.weights[name])


def _mean(
    spec: TensorSpec, tensors: Sequence[StoredTensor], factors: Sequence[float], dtype: torch.dtype | None
) -> StoredTensor:
    """The mean of tensors; real ones in `dtype`, where it is given."""
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return tensors[-1]
    if dtype is not None and spec.dtype.is_floating_point:
        spec = TensorSpec(spec.name, dtype, spec.shape)
    wide = torch.complex128 if spec.dtype.is_complex else torch.float64

    def load() -> torch.Tensor:
        total = torch.zeros(tuple(spec.shape), dtype=wide)
        for tensor, factor in zip(tensors, factors, strict=True):
            total.add_(loaded(tensor).to(wide), alpha=factor)
        return total.to(spec.dtype)

    return StoredTensor(spec, load)
