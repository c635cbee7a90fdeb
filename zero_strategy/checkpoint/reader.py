"""Open checkpoints: the `StateReader` that the engine asks, and the reader of this package's own format.

`CheckpointReader` reads any element range of any tensor straight into the tensor's memory. Threads take ranges in the
order of the files, and the kernel is told what comes next.

Without that, a disk would wait for each range's checksum and copy before it hears of the next one.
"""

from __future__ import annotations

import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import xxhash

from zero_strategy.checkpoint.folders import locate, parse_aliases
from zero_strategy.checkpoint.layout import FileLayout, TensorSpec, read_layout
from zero_strategy.checkpoint.manifest import AVERAGE_BUFFERS_NAME, FileKind, Manifest
from zero_strategy.checkpoint.ranges import Block
from zero_strategy.quantized.entries import described_weight, is_description
from zero_strategy.runtime.host_bytes import Transfer, checksum_of
from zero_strategy.runtime.regular_files import open_regular, read_regular


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
        of_whole_model: Ranks that train different layers have the same one open.
    """

    directory: Path | str
    aliases: dict[str, str]
    block = 4 << 20
    of_whole_model = True
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
        """Reads a full tensor, in its shape, on the CPU."""
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
                # Tied names may lead to one stored tensor, whose shape is named once.
                if stored is not None and stored.name not in used:
                    used.add(stored.name)
                    if stored.shape != spec.shape:
                        shapes.append(f"{stored.name} (checkpoint {stored.shape}, model {spec.shape})")
        known = _all_names(self.aliases)
        unexpected = [
            _described(spec, known.get(name, ()))
            for name, spec in weights.items()
            if name not in used and not (is_description(name) and described_weight(name) in used)
        ]
        problems = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
        lines = [f"\n  {what} ({len(n)}): " + ", ".join(n) for what, n in problems.items() if n]
        # Said only where that alone is wrong: otherwise it would lead astray.
        if missing and sorted(map(_uncompiled, missing)) == sorted(map(_uncompiled, unexpected)):
            lines.append(
                "\n  These names differ by torch.compile's `_orig_mod.` alone: compile the same parts of the model as "
                "when it was saved, or use `part.compile()`, which leaves names as they are."
            )
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
            # Part by part: an embedding may be large, and both would be in memory.
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


def _uncompiled(name: str) -> str:
    return name.replace("_orig_mod.", "")


def average_buffers(reader: StateReader) -> dict[str, torch.Tensor]:
    """The averages of buffers in a checkpoint, by name."""
    if AVERAGE_BUFFERS_NAME not in reader.manifest.files:
        return {}
    found: dict[str, torch.Tensor] = torch.load(io.BytesIO(reader.extra(AVERAGE_BUFFERS_NAME)), weights_only=True)
    return found


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


# One reads while the other compares and copies.
_THREADS = 2
_AHEAD_BYTES = 64 << 20
"""Announced to the kernel before it is read; it ends up in the page cache for a moment."""
_ANNOUNCED_AT_ONCE = 8 << 20


@dataclass(frozen=True, eq=False)
class ReadJob:
    """A range of an open file.

    Attributes:
        fd, offset, nbytes: The range.
        fill: Reads it, given the descriptor and a `Transfer` of the thread's own.
    """

    fd: int
    offset: int
    nbytes: int
    fill: Callable[[int, Transfer], object]


def run_jobs(jobs: Sequence[ReadJob], chunk_bytes: int) -> None:
    """Carries jobs out; raises the first error."""
    # As they lie on the disk.
    queue = _Queue(sorted(jobs, key=lambda job: (job.fd, job.offset)))

    def work() -> None:
        transfer = Transfer(chunk_bytes)
        while (job := queue.next()) is not None:
            try:
                job.fill(job.fd, transfer)
            # A Ctrl-C in the caller's share, too: its threads end before anybody closes the files.
            except BaseException as error:
                queue.fail(error)

    # The caller is one of them.
    threads = [threading.Thread(target=work, name="checkpoint-read", daemon=True) for _ in range(_THREADS - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if queue.error is not None:
        raise queue.error


class _Queue:
    """Jobs in order, some bytes of them announced ahead."""

    def __init__(self, jobs: list[ReadJob]) -> None:
        self._jobs, self._lock = jobs, threading.Lock()
        self._taken = self._announced = 0
        self._ahead = 0
        self.error: BaseException | None = None

    def next(self) -> ReadJob | None:
        with self._lock:
            if self.error is not None or self._taken == len(self._jobs):
                return None
            job = self._jobs[self._taken]
            self._taken += 1
            # Under the lock, and before the job is read: the announcements keep the order of the files.
            self._announce()
            self._ahead -= job.nbytes
            return job

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def _announce(self) -> None:
        while self._announced < len(self._jobs) and (self._ahead < _AHEAD_BYTES or self._announced < self._taken):
            job = self._jobs[self._announced]
            self._announced += 1
            self._ahead += job.nbytes
            # Not on macOS; it is a hint only.
            if hasattr(os, "posix_fadvise"):
                for begin in range(0, min(job.nbytes, _AHEAD_BYTES), _ANNOUNCED_AT_ONCE):
                    size = min(_ANNOUNCED_AT_ONCE, job.nbytes - begin)
                    os.posix_fadvise(job.fd, job.offset + begin, size, os.POSIX_FADV_WILLNEED)


class CheckpointReader(LayoutReader):
    """A checkpoint, or plain weights, open for reading. It keeps no file open between calls.

    Args:
        directory: a checkpoint, its parent with a `latest` file, a Hugging Face model directory, or one
            safetensors file. The last two have weights only, and no manifest.
        chunk_bytes: most bytes read at once, and the host memory used for tensors on other devices.
        verify: compare the checksums of all that is read with the manifest's; a block of a tensor is read whole
            where a part of it is asked for. Plain weights have none.

    Raises:
        ValueError: naming the file and what is wrong, if anything is missing, truncated or inconsistent.
    """

    directory: Path

    def __init__(self, directory: str | os.PathLike[str], *, chunk_bytes: int = 32 << 20, verify: bool = True) -> None:
        location = locate(directory)
        self.directory = location.directory
        self._manifest = location.manifest
        self._verified = location.manifest if verify else None
        self._transfer = Transfer(chunk_bytes)
        self._layouts: dict[str, FileLayout] = {}
        self._identities: dict[str, tuple[int, int, int, int]] = {}
        self._weight_files = self._open_weights(location.weight_files, location.weight_map)
        self._weights = {name: self._layouts[file].specs[name] for name, file in self._weight_files.items()}
        # Behind the weights: plain files may name ties to tensors that they do not have.
        self.aliases = self._read_aliases(location.weight_files)
        self._check_weight_records()
        self._check_states()

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
            name: the tensor, or an alias of it.
            start: first element.
            stop: one past the last element; None for the tensor's end.
            out: 1-D, contiguous, of the stored dtype, with stop - start elements, on any device. None makes
                a new tensor on the CPU.
            kind: "model", or (optimizer, state kind).

        Returns:
            `out`, filled.

        Raises:
            ValueError: if there is no such tensor or range, `out` has another size, or the file is damaged
                or was replaced after this reader was opened.
            TypeError: if `out` has another dtype or is not 1-D and contiguous.
        """
        layout, stored = self._find(name, kind)
        stop = layout.specs[stored].numel if stop is None else stop
        fd = self._reopen(layout.path)
        try:
            return self._read(fd, self._transfer, layout, stored, start, stop, out)
        finally:
            os.close(fd)

    def read_many(self, wanted: Sequence[Wanted]) -> None:
        """Reads ranges in the order of the files, by several threads, the disk's work a little ahead of them."""
        files: dict[str, int] = {}
        try:
            jobs = []
            for item in wanted:
                layout, stored = self._find(item.name, item.kind)
                offset, nbytes = layout.span(stored, item.start, item.stop)
                if layout.path not in files:
                    # One descriptor a file: jobs are in the order of descriptors, so a file is read from end to end.
                    files[layout.path] = self._reopen(layout.path)
                jobs.append(ReadJob(files[layout.path], offset, nbytes, partial(self._fill, layout, stored, item)))
            run_jobs(jobs, self._transfer.chunk_bytes)
        finally:
            for fd in files.values():
                os.close(fd)

    def _fill(self, layout: FileLayout, stored: str, item: Wanted, fd: int, transfer: Transfer) -> None:
        item.take(self._read(fd, transfer, layout, stored, item.start, item.stop, item.out))

    def _read(
        self,
        fd: int,
        transfer: Transfer,
        layout: FileLayout,
        stored: str,
        start: int,
        stop: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        spec = layout.specs[stored]
        offset, _ = layout.span(stored, start, stop)
        if out is None:
            out = torch.empty(stop - start, dtype=spec.dtype)
        check_out(stored, spec.dtype, stop - start, out)
        try:
            if self._verified is None:
                transfer.read(fd, out, offset)
            else:
                self._read_checked(fd, transfer, layout, stored, start, stop, out)
        except EOFError as error:
            path = self.directory / layout.path
            raise ValueError(f"{path}: truncated inside tensor {stored!r}: {error}") from None
        return out

    def file_of(self, name: str, kind: FileKind = "model") -> str:
        """See `StateReader.file_of`."""
        return self._find(name, kind)[0].path

    def extra(self, path: str) -> bytes:
        """Content of a file that the manifest lists, such as one that was given to `commit`.

        Raises:
            ValueError: if the manifest lists no such file.
        """
        if path not in self.manifest.files:
            raise ValueError(f"{self.directory}: the manifest lists no file {path!r}")
        content = read_regular(self.directory / path)
        # Of files with tensors the manifest has the checksum of the header.
        if self._verified is not None and path not in self._layouts:
            self._verified.checksums.check_file(path, content, self.directory / path)
        return content

    def _read_checked(
        self, fd: int, transfer: Transfer, layout: FileLayout, name: str, start: int, stop: int, out: torch.Tensor
    ) -> None:
        """Reads all blocks that have elements of [start, stop), and checks them."""
        assert self._verified is not None
        size = layout.specs[name].dtype.itemsize
        target = out.view(torch.uint8)
        for block in self._verified.checksums.overlapping(layout.path, name, start, stop):
            begin, end = max(start, block.start), min(stop, block.stop)
            part = target[(begin - start) * size : (end - start) * size]
            # A block that is wanted whole needs no memory of its own.
            if (begin, end) == (block.start, block.stop):
                self._read_block(fd, transfer, layout, name, block, part)
            else:
                whole = torch.empty((block.stop - block.start) * size, dtype=torch.uint8)
                self._read_block(fd, transfer, layout, name, block, whole)
                part.copy_(whole[(begin - block.start) * size : (end - block.start) * size])

    def _read_block(
        self, fd: int, transfer: Transfer, layout: FileLayout, name: str, block: Block, out: torch.Tensor
    ) -> None:
        checksum = xxhash.xxh3_64()
        offset, _ = layout.span(name, block.start, block.stop)
        transfer.read(fd, out, offset, checksum.update)
        block.check(checksum.hexdigest(), name, self.directory / layout.path)

    def _layout(self, path: str) -> FileLayout:
        """Reads a file's header at first use."""
        if path not in self._layouts:
            fd = open_regular(self.directory / path)
            try:
                layout = read_layout(fd, path, str(self.directory / path))
                # Of the descriptor that the header was read from: what is there later must be the same file.
                self._identities[path] = _identity(fd)
            finally:
                os.close(fd)
            if self._verified is not None:
                self._verified.checksums.check_file(path, layout.header, self.directory / path)
                sizes = {name: spec.numel for name, spec in layout.specs.items()}
                self._verified.checksums.check_cover(path, sizes, str(self.directory / path))
            self._layouts[path] = layout
        return self._layouts[path]

    def _reopen(self, path: str) -> int:
        fd = open_regular(self.directory / path)
        if _identity(fd) != self._identities[path]:
            os.close(fd)
            raise ValueError(f"{self.directory / path}: was replaced or changed while it was being read")
        return fd

    def _open_weights(self, files: Iterable[str], weight_map: Mapping[str, str] | None) -> dict[str, str]:
        """Reads the headers of all weights files; returns name -> file."""
        found: dict[str, str] = {}
        for file in files:
            for name in self._layout(file).specs:
                if name in found:
                    raise ValueError(f"{self.directory}: tensor {name!r} is in {found[name]} and in {file}")
                found[name] = file
        for name, file in (weight_map or {}).items():
            if found.get(name) != file:
                raise ValueError(f"{self.directory / file}: has no tensor {name!r}, which should be there")
        return found

    def _read_aliases(self, files: Iterable[str]) -> dict[str, str]:
        if self._manifest is not None:
            return dict(self._manifest.aliases)
        aliases: dict[str, str] = {}
        for file in files:
            aliases |= parse_aliases(self._layout(file).metadata, file)
        return {alias: name for alias, name in aliases.items() if name in self._weight_files}

    def _check_weight_records(self) -> None:
        records = self._manifest.weights if self._manifest is not None else {}
        for name, record in records.items():
            spec = self._layouts[record.file].specs[name]
            if (spec.dtype, spec.shape) != (record.dtype, record.shape):
                raise ValueError(
                    f"{self.directory / record.file}: tensor {name!r} is {spec.dtype} {spec.shape}, "
                    f"the manifest says {record.dtype} {record.shape}"
                )
        if self._manifest is not None and (unlisted := self._weight_files.keys() - records.keys()):
            raise ValueError(f"{self.directory}: the manifest does not list {sorted(unlisted)}")

    def _check_states(self) -> None:
        """Reads the headers of the optimizers' files: what has no checksum is refused before anything is loaded."""
        if self._verified is not None:
            for record in self._verified.optimizers.values():
                for path in record.states.values():
                    self._layout(path)


def _identity(fd: int) -> tuple[int, int, int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
