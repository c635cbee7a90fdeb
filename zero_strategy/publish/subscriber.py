"""Following published weights from another process or host: whole tensors, bit by bit those of the trainer.

    weights = zero_strategy.subscribe("/shared/run-7")                              # or a URL
    while weights.wait():
        model.load_state_dict(weights.tensors)         # or server.load_weights(weights.tensors.items())

A reader begins with the newest anchor and applies changes in order. What it shows is always one version: all files of a
change are read and compared with their digests before the first value is touched, and the values with the trainer's
digests afterwards. A reader that falls behind what is kept begins with a newer anchor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from torch import Tensor

from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.storage import is_remote
from zero_strategy.comm.delta import apply, elements_of, words_of
from zero_strategy.convert.convert import open_any
from zero_strategy.publish.folder import (
    RECORD,
    Digest,
    Version,
    VersionFolder,
    payloads_of,
    read_delta_file,
    read_record,
)
from zero_strategy.publish.mirror import Mirror, source_of

Place = tuple[str, int, int]
"""Name, first element and elements."""


class Subscriber:
    """The newest published weights of a folder, in host memory.

    Memory is the model's and one change's. No torch.distributed is needed, nor an engine.

    Args:
        directory: The folder that `ZeroEngine.publish` writes, which may come later; or its URL: "http://host:port" of
            `Publisher.serve`, or of an object store ("s3://bucket/run").
        token: Of such a server.
        mirror: Parent of a folder for copies of what comes from a URL; None: the system's for temporary files.

    Raises:
        ImportError: If fsspec, or what it needs for the URL's scheme, is not installed.
        ValueError: If the URL cannot be one, or a server's token is missing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        token: str | None = None,
        mirror: str | os.PathLike[str] | None = None,
    ) -> None:
        source = source_of(os.fspath(directory), token) if is_remote(directory) else None
        self._mirror = None if source is None else Mirror(source, mirror)
        self._folder = VersionFolder(directory if self._mirror is None else self._mirror.directory)
        self._name = os.fspath(directory)
        self._shown: Version | None = None
        self._tensors: dict[str, Tensor] = {}
        self._flat: dict[str, Tensor] = {}
        self._places: list[list[Place]] = []

    @property
    def version(self) -> int | None:
        """Number of the version that is shown; None: none yet."""
        return None if self._shown is None else self._shown.number

    @property
    def step(self) -> int | None:
        """Optimizer steps that the trainer had taken."""
        return None if self._shown is None else self._shown.step

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Whole weights and buffers by name; the same objects until an anchor is read. Write to none of them.

        Raises:
            RuntimeError: If there are none yet.
        """
        if self._shown is None:
            raise RuntimeError(f"{self._name} has shown no version yet; call update() or wait()")
        return self._tensors

    def update(self) -> bool:
        """Go on to the newest version; True if there was a newer one than is shown.

        Raises:
            ConnectionError: If a server cannot be reached; what is shown stays.
            FileNotFoundError: If files go while they are read, three times in a row.
            PermissionError: If it refuses the token.
            ValueError: If a file is damaged and there is no newer anchor to go on from; names it. The version before
                stays shown, or none if the damage showed itself in the values.
        """
        before = (self._shown.session, self._shown.number) if self._shown is not None else None
        for last in (False, False, True):  # what is pruned while it is read is not there any more
            try:
                if self._mirror is not None:
                    self._mirror.fetch(self._shown)
                self._go_on_or_fall_back()
                break
            except FileNotFoundError:
                if last:
                    raise
        return self._shown is not None and (self._shown.session, self._shown.number) != before

    def wait(self, timeout: float | None = None, *, poll: float | None = None) -> bool:
        """Return True when there is a newer version and it is shown; False after `timeout` seconds (None: never).

        It looks every `poll` seconds; None: 0.05 in a folder, 1 behind a URL, where a look is a request.

        Raises:
            ValueError: See `update`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.update():
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(poll if poll is not None else 0.05 if self._mirror is None else 1.0)
        return True

    def _go_on_or_fall_back(self) -> None:
        if self._mirror is None:
            self._go_on()
            return
        try:
            self._go_on()
        except ValueError:  # perhaps it was damaged on its way
            self._mirror.drop()
            self._mirror.fetch(self._shown)
            try:
                self._go_on()
            except ValueError:
                if self._shown is not None or not self._mirror.bring_earlier_anchors():
                    self._mirror.drop()
                    raise
                self._go_on()
        if self._shown is not None:
            self._mirror.drop(self._shown.number)

    def _go_on(self) -> None:
        anchors = self._folder.anchors()
        shown = self._shown
        if shown is None or (anchors and not self._continues(shown, anchors[-1])):
            if not anchors:
                return
            shown = self._read_newest(anchors)
        while (path := self._folder.delta(shown.number + 1)) and (path / RECORD).is_file():
            try:
                shown = self._read_change(path, shown)
            except ValueError:
                newer = [number for number in self._folder.anchors() if number > shown.number]
                if not newer:
                    raise
                shown = self._read_newest(newer)

    def _continues(self, shown: Version, newest: int) -> bool:
        """True if the changes after what is shown are there, and no anchor of another session is newer."""
        if newest <= shown.number:
            return True
        if read_record(self._folder.anchor(newest)).session != shown.session:
            return False
        return (self._folder.delta(shown.number + 1) / RECORD).is_file()

    def _read_newest(self, anchors: Sequence[int]) -> Version:
        """The newest anchor that is not damaged: changes lead from an earlier one to the same values."""
        errors = []
        for number in reversed(anchors):
            try:
                return self._read_anchor(number)
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def _read_anchor(self, number: int) -> Version:
        path = self._folder.anchor(number)
        try:
            version, reader = read_record(path), open_any(path)
            tensors = {name: reader.full(name) for name in reader.weights}
        except ValueError:
            if (path / MANIFEST_NAME).is_file():
                raise
            raise FileNotFoundError(path) from None  # removed while it was read
        flat = {name: tensor.view(-1) for name, tensor in tensors.items()}
        places = [[(str(name), int(start), int(numel)) for name, start, numel in rank] for rank in version.slices]
        self._compare(path, version, flat, places)
        tensors |= {alias: tensors[name] for alias, name in reader.aliases.items() if name in tensors}
        self._tensors, self._flat, self._places, self._shown = tensors, flat, places, version
        return version

    def _read_change(self, path: Path, shown: Version) -> Version:
        """Apply a change to what is shown.

        Raises:
            ValueError: If it is damaged, or not one of what is shown.
        """
        version = read_record(path)
        if (version.session, version.number) != (shown.session, shown.number + 1):
            raise ValueError(f"{path} is a change of another session's values than those that are shown")
        try:
            contents = [read_delta_file(path / name, digest) for name, digest in version.files.items()]
        except FileNotFoundError as error:
            if not (path / RECORD).is_file():
                raise  # removed while it was read
            raise ValueError(f"{error.filename} is missing, beside its record") from None
        self._shown = None  # for now; if this fails half-way the next reading begins with an anchor
        for key, data in chain.from_iterable(map(payloads_of, contents)):
            name, _, start = key.rpartition("@")
            if name not in self._flat:
                raise ValueError(f"{path} changes {name!r}, which is no weight of the anchor")
            apply(data, words_of(self._flat[name][int(start) : int(start) + elements_of(data)]))
        self._compare(path, version, self._flat, self._places)
        self._shown = version
        return version

    @staticmethod
    def _compare(path: Path, version: Version, flat: Mapping[str, Tensor], places: Sequence[Sequence[Place]]) -> None:
        found = []
        for rank in places:
            digest = Digest()
            for key, (name, start, numel) in sorted((f"{place[0]}@{place[1]}", place) for place in rank):
                digest.add(key, words_of(flat[name][start : start + numel]))
            found.append(digest.text())
        if found != version.digests:
            wrong = [rank for rank, pair in enumerate(zip(found, version.digests, strict=False)) if pair[0] != pair[1]]
            raise ValueError(f"{path}: the values of rank(s) {wrong} are not those that the trainer has")


def subscribe(
    directory: str | os.PathLike[str], *, token: str | None = None, mirror: str | os.PathLike[str] | None = None
) -> Subscriber:
    """Follow the weights that a training publishes in a folder or serves; see `Subscriber`."""
    return Subscriber(directory, token=token, mirror=mirror)
