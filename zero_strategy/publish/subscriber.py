"""Following published weights from another process or host: whole tensors, bit by bit those of the trainer.

    weights = zero_strategy.subscribe("/shared/run-7")                              # or a URL
    while weights.wait():
        model.load_state_dict(weights.tensors)         # or server.load_weights(weights.tensors.items())

A reader begins with the newest anchor and applies changes in order. What it shows is always one version: all files of a
change are read and compared with their digests before the first value is touched, and the values with the trainer's
digests afterwards. A reader that falls behind what is kept begins with a newer anchor.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.storage import is_remote
from zero_strategy.comm.delta import apply, elements_of, words_of
from zero_strategy.convert.convert import open_any
from zero_strategy.publish.folder import (
    MOST_RECORD_BYTES,
    RECORD,
    Digest,
    Version,
    VersionFolder,
    missing_change,
    payloads_of,
    read_delta_file,
    read_record,
)
from zero_strategy.publish.mirror import Mirror, source_of
from zero_strategy.runtime.shown import brief, checked_path
from zero_strategy.runtime.shown import shown as on_one_line

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
        ValueError: If the folder's path is empty or the URL cannot be one, or a server's token is missing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        token: str | None = None,
        mirror: str | os.PathLike[str] | None = None,
    ) -> None:
        checked_path(directory, "subscribe(...)")
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
            ConnectionError: If a server cannot be reached, does not answer in time, or with something else than it
                should; what is shown stays.
            FileNotFoundError: If files go while they are read, three times in a row.
            OSError: If there is no room for copies of what comes from a URL.
            PermissionError: If it refuses the token.
            ValueError: If a file is damaged, or a change is lost, and there is no newer anchor to go on from; names it.
                The version before stays shown, or none if the damage showed itself in the values.
        """
        return self._update(math.inf)

    def _update(self, end: float) -> bool:
        before = (self._shown.session, self._shown.number) if self._shown is not None else None
        for last in (False, False, True):  # what is pruned while it is read is not there any more
            try:
                if self._mirror is not None:
                    self._mirror.fetch(self._shown, end)
                self._go_on_or_fall_back(end)
                break
            except FileNotFoundError:
                if last:
                    raise
        changed = self._shown is not None and (self._shown.session, self._shown.number) != before
        if not changed and self._mirror is not None and self._mirror.lost:
            raise ValueError(f"{on_one_line(self._name)}: {self._mirror.lost}")
        return changed

    def wait(self, timeout: float | None = None, *, poll: float | None = None) -> bool:
        """Return True when there is a newer version and it is shown; False after `timeout` seconds (None: never).

        What has come of a version when the time is over is kept: the next call goes on with it.
        It looks every `poll` seconds; None: 0.05 in a folder, 1 behind a URL, where a look is a request.

        Raises:
            Exception: See `update`.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._updated_before(end):
            if time.monotonic() >= end:
                return False
            time.sleep(poll if poll is not None else 0.05 if self._mirror is None else 1.0)
        return True

    def _updated_before(self, end: float) -> bool:
        try:
            return self._update(end)
        except ConnectionError:
            if time.monotonic() >= end:  # by which the connection was ended
                return False
            raise

    def _go_on_or_fall_back(self, end: float) -> None:
        if self._mirror is None:
            self._go_on()
            return
        try:
            self._go_on()
        except ValueError:  # perhaps it was damaged on its way
            self._mirror.drop()
            self._mirror.fetch(self._shown, end)
            try:
                self._go_on()
            except ValueError:
                # Earlier anchors would lead back from what is shown.
                if self._shown is not None or not self._mirror.bring_earlier_anchors():
                    self._mirror.drop()
                    raise
                self._go_on()
        if self._shown is not None:
            self._mirror.drop(self._shown.number)

    def _go_on(self) -> None:
        anchors = self._folder.anchors()
        began = shown = self._shown
        if shown is None or (anchors and not self._continues(shown, anchors[-1])):
            if not anchors:
                return
            shown = self._read_newest(anchors)
        # One after the other: a change holds of the version before it alone.
        while (path := self._folder.delta(shown.number + 1)) and (path / RECORD).is_file():
            try:
                shown = self._read_change(path, shown)
            except ValueError:
                # An anchor behind the damage has the values that the change would have led to.
                newer = [number for number in self._folder.anchors() if number > shown.number]
                if not newer:
                    raise
                shown = self._read_newest(newer)
        if self._mirror is None and shown is began:
            self._check_next(shown)

    def _check_next(self, shown: Version | None) -> None:
        """Raises ValueError if the next change is lost: without a word a reader would stay where it is."""
        if shown is None:
            return
        # First what is there, then the next change: one that is finished in between is no lost one.
        found = self._folder.finished()
        said = missing_change(found, shown.number)
        if said and not (self._folder.delta(shown.number + 1) / RECORD).is_file():
            raise ValueError(f"{on_one_line(self._name)}: {said}")

    def _continues(self, shown: Version, newest: int) -> bool:
        """True if the changes after what is shown are there, and no anchor of another session is newer."""
        if newest <= shown.number:
            return True
        # A training that began anew goes on with other values under higher numbers.
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
            # By the file that counts: a removal and damage look alike otherwise.
            if (path / MANIFEST_NAME).is_file():
                raise
            raise FileNotFoundError(path) from None  # removed while it was read
        flat = {name: tensor.view(-1) for name, tensor in tensors.items()}
        places = [[(str(name), int(start), int(numel)) for name, start, numel in rank] for rank in version.slices]
        # Before anything of it is shown.
        self._compare(path, version, flat, places)
        tensors |= {alias: tensors[name] for alias, name in reader.aliases.items() if name in tensors}
        # Together, at the end: what was shown before stays whole until then.
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
            # All files before the first value: a change is applied whole or not at all.
            contents = {
                path / name: read_delta_file(path / name, digest, self._most_bytes())
                for name, digest in version.files.items()
            }
        except FileNotFoundError as error:
            if not (path / RECORD).is_file():
                raise  # removed while it was read
            raise ValueError(f"{error.filename} is missing, beside its record") from None
        self._shown = None  # for now; if this fails half-way the next reading begins with an anchor
        for file, content in contents.items():
            for name, start, data in payloads_of(content, str(file)):
                if name not in self._flat:
                    raise ValueError(f"{path} changes {brief(name)}, which is no weight of the anchor")
                try:
                    apply(data, words_of(self._flat[name][start : start + elements_of(data)]))
                except (ValueError, OverflowError) as error:
                    raise ValueError(f"{file} changes {brief(name)} at {start}: {error}") from None
        # The trainer's own digests: whatever went wrong on the way shows in them.
        self._compare(path, version, self._flat, self._places)
        self._shown = version
        return version

    def _most_bytes(self) -> int:
        """A bound on a rank's file of a change: all values, or what codes them, and a header."""
        return 2 * sum(tensor.nbytes for tensor in self._flat.values()) + MOST_RECORD_BYTES

    @staticmethod
    def _compare(path: Path, version: Version, flat: Mapping[str, Tensor], places: Sequence[Sequence[Place]]) -> None:
        found = []
        for rank in places:
            digest = Digest()
            for key, (name, start, numel) in sorted((f"{place[0]}@{place[1]}", place) for place in rank):
                if name not in flat or start + numel > flat[name].numel():
                    raise ValueError(f"{path}: its record has values of {brief(name)} that the anchor does not have")
                digest.add(key, words_of(flat[name][start : start + numel]))
            found.append(digest.text())
        if flat and not any(places):
            raise ValueError(f"{path}: its record has no digest of its values")
        if found != version.digests:
            wrong = [rank for rank, pair in enumerate(zip(found, version.digests, strict=False)) if pair[0] != pair[1]]
            raise ValueError(f"{path}: the values of rank(s) {wrong} are not those that the trainer has")


def subscribe(
    directory: str | os.PathLike[str], *, token: str | None = None, mirror: str | os.PathLike[str] | None = None
) -> Subscriber:
    """Follow the weights that a training publishes in a folder or serves; see `Subscriber`."""
    return Subscriber(directory, token=token, mirror=mirror)
