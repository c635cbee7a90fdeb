"""Publishing the weights of a training: each rank codes what changed in its slices, and no rank gathers the model.

`engine.publish(to=folder)` writes an anchor, a whole checkpoint that every rank writes its part of. From then on each
optimizer step codes what it changes (`recorder`, `delta`), and `update()` writes the changes since the last version.
Every `anchor_every` versions there is an anchor again, from which readers that come or that have fallen behind begin.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.exports import config_files
from zero_strategy.checkpoint.layout import FileLayout, TensorSpec
from zero_strategy.checkpoint.preemption import CheckpointingEngine
from zero_strategy.comm.store import together
from zero_strategy.fsdp.shard_storage import PARAMETERS
from zero_strategy.publish.folder import RECORD, Directory, Version, record_of, target_of
from zero_strategy.publish.recorder import ChangeRecorder
from zero_strategy.publish.server import VersionServer
from zero_strategy.quantized.scales import keeps_dtype
from zero_strategy.runtime.shown import shown


@dataclass(frozen=True)
class Published:
    """Sizes of a version.

    Attributes:
        number: Of the version.
        anchor: It is an anchor.
        changed: Elements that have changed, of all ranks; of an anchor all.
        elements: Elements of the model.
        nbytes: Bytes of the ranks' files.
        dense: Bytes of all values.
    """

    number: int
    anchor: bool
    changed: int
    elements: int
    nbytes: int
    dense: int


class Publisher:
    """Publishes versions of a model's weights in a folder; all ranks make it and call it together.

    Args:
        engine: Whose.
        to: A folder, which is made if need be, or the URL of one in an object store ("s3://bucket/run"). One with
            versions is gone on with.
        dtype: Of floating-point weights; None: the parameters'.
        anchor_every: Versions from one anchor to the next.
        keep: Anchors that are kept, with the changes after them; older versions are removed.

    Raises:
        TypeError: If `dtype` is not one of floating point.
        ImportError: If fsspec, or what it needs for the URL's scheme, is not installed.
        ValueError: If `to` cannot be written to, or another training publishes there, a count is not positive, or
            tensor parallelism divides the model.
    """

    def __init__(
        self,
        engine: CheckpointingEngine,
        to: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        anchor_every: int = 100,
        keep: int = 2,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype={dtype!r}: must be a floating-point torch.dtype, such as torch.bfloat16")
        for name, count in (("anchor_every", anchor_every), ("keep", keep)):
            if type(count) is not int or count < 1:
                raise ValueError(f"{name}={count!r}: must be a whole number of at least 1")
        if engine.mesh.tensor.size > 1 or engine.is_part:
            raise ValueError(
                "publish() follows models that one data-parallel group trains; with tensor parallelism or pipeline "
                "stages iterate engine.weights(), or save checkpoints"
            )
        if packed := next((name for name, p in engine.model.names() if keeps_dtype(p)), None):
            raise ValueError(
                f"publish() sends weights as they are stored, and {packed!r} is quantised: iterate engine.weights(), "
                "which gives values with adapters merged, or save the adapter"
            )
        wider = [p.dtype for _, p in engine.model.names() if dtype is not None and _is_narrower(p.dtype, dtype)]
        if wider:
            raise ValueError(
                f"dtype={dtype}: parameters have {wider[0]}, and values are published as the forward has them"
            )
        self._engine, self._target = engine, target_of(to)
        self._dtype, self._anchor_every, self._keep = dtype, anchor_every, keep
        self._changes = ChangeRecorder(engine, dtype)
        # Replicas have the same values: one of them writes.
        self._writes = engine.mesh.replicate.rank == 0
        # Before the lock is taken: it must not be held for a publisher that never comes about.
        engine.mesh.barrier.wait_for_all(f"publish(to={shown(to)})")
        first = engine.mesh.world_group.rank == 0
        self._lock = together(engine.mesh.control, lambda: self._target.lock() if first else None)
        self._closed = False
        self._session: str
        self._number: int
        last = together(engine.mesh.control, lambda: self._target.last() if first else -1)
        # Rank 0's words count; a folder that others write to may look different a moment later.
        self._session, self._number = engine.mesh.control.all_gather_objects((secrets.token_hex(8), last))[0]
        self._known = False
        self._server: VersionServer | None = None
        self.last = self._begin()

    @property
    def version(self) -> int:
        """Number of the last version."""
        return self._number

    @property
    def release(self) -> Callable[[], None]:
        """A function that lets other trainings publish in the folder; it does not refer to this object."""
        return _nothing if self._lock is None else self._lock.release_later

    def close(self) -> None:
        """Publish no more: the server ends, and others may publish in the folder. A second call does nothing."""
        # First: no version is begun in a folder that others may take.
        self._closed = True
        # Or steps would go on to code changes that nobody takes.
        self._changes.end()
        if self._server is not None:
            # Before the lock goes: this server would give out another training's versions.
            self._server.close()
        self.release()

    def serve(self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None) -> VersionServer | None:
        """Serve the folder over TCP until this object is gone, for readers that do not see it; see `VersionServer`.

        On the first rank alone; others get None. Without arguments only this host can connect.

        Raises:
            OSError: If the address cannot be listened on.
            ValueError: If the token is too short, or versions are in an object store.
        """
        if self._engine.mesh.world_group.rank:
            return None
        if not isinstance(self._target, Directory):
            raise ValueError(f"{self._target.where}: readers of an object store subscribe to its URL")
        self._server = VersionServer(Path(self._target.where), host, port, token)
        return self._server

    def update(self) -> Published:
        """Publish the weights as they are now, as a new version; all ranks call it, between steps.

        Raises:
            BarrierError: If ranks do not come.
            OSError: On all ranks, if one cannot write; that version does not count, and the next begins anew.
            RuntimeError: After `close`.
            ValueError: If another training has published in the folder meanwhile.
        """
        engine = self._engine
        if self._closed:
            raise RuntimeError(f"this publisher of {shown(self._target.where)} is closed")
        engine.mesh.barrier.wait_for_all("publishing weights")
        # No rank begins to write the next version before rank 0 has looked for what is there.
        together(engine.mesh.control, self._check)
        self.last = self._change() if self._known else self._begin()
        return self.last

    def _check(self) -> None:
        self._engine.model.moved.check("publishing weights", (PARAMETERS,))
        last = self._target.last() if self._engine.mesh.world_group.rank == 0 else self._number
        if last > self._number:
            raise ValueError(
                f"{shown(self._target.where)}: version {last} is there, which this training has not published: "
                "another one publishes there"
            )

    def _begin(self) -> Published:
        """The first version, or the first after a failure: an anchor and no change."""
        # Also before a failure: a number that readers may have seen a part of is never used again.
        self._number += 1
        control = self._engine.mesh.control

        def begin() -> str:
            if not self._writes:
                return ""
            # Before the values are read: what steps change afterwards is the first change.
            self._changes.begin()
            return self._changes.digest()

        # Together: a rank without memory for its copies would leave the others in the gather.
        digests = [found for found in control.all_gather_objects(together(control, begin)) if found]
        self._sizes = elements, dense = self._changes.sizes()
        self._write_anchor(digests)
        # Only now: after an anchor that failed the next version must be one, too.
        self._known = True
        return Published(self._number, True, elements, elements, dense, dense)

    def _version(self, files: dict[str, str], digests: list[str], slices: list[list[list[object]]]) -> Version:
        dtype = "" if self._dtype is None else str(self._dtype).removeprefix("torch.")
        return Version(self._number, self._session, self._engine.steps.taken, dtype, files, digests, slices)

    def _write_anchor(self, digests: list[str]) -> None:
        engine, first = self._engine, self._engine.mesh.world_group.rank == 0
        slices = engine.mesh.control.all_gather_objects(self._changes.places() if self._writes else None)
        version = self._version({}, digests, [found for found in slices if found is not None])
        files = config_files(engine.module, self._dtype) | {RECORD: record_of(version)}
        path = self._target.anchor(self._number)
        options: dict[str, Any] = {"optimizers": False, "update_latest": False, "frozen": "store"}
        engine.save(path, extra_files=files, weights_dtype=self._dtype, **options).finish()
        self._anchored = self._number

        def look() -> None:
            # On every rank: one that sees another folder would write its changes where no reader looks.
            if not self._target.has_anchor(self._number):
                raise ValueError(f"{path} is not there on this rank: weights are published in a folder that all see")
            # Behind the anchor: readers of what is removed now find the new one.
            if first:
                self._target.prune(self._keep)

        together(engine.mesh.control, look)

    def _change(self) -> Published:
        control = self._engine.mesh.control
        self._number += 1
        name = f"rank-{control.rank}.safetensors"

        def write() -> tuple[str, str, str, int, int] | None:
            if not self._writes:
                return None
            payloads, changed = self._changes.take()
            header = {"session": self._session, "version": str(self._number)}
            specs = [TensorSpec(key, torch.uint8, (len(data),)) for key, data in payloads.items()]
            content = b"".join([FileLayout.compute(name, specs, header).header, *payloads.values()])
            self._target.write(self._number, name, content)
            return name, hashlib.sha256(content).hexdigest(), self._changes.digest(), changed, len(content)

        try:
            everyone = [one for one in control.all_gather_objects(together(control, write)) if one is not None]
            digests = [one[2] for one in everyone]
            version = self._version({one[0]: one[1] for one in everyone}, digests, [])
            # Behind the gather: with its record the version counts, so all ranks' files must be there.
            together(control, lambda: self._target.finish(version) if control.rank == 0 else None)
            # Behind the change of the same number: followers have no use for the anchor.
            if self._number - self._anchored >= self._anchor_every:
                self._write_anchor(digests)
        except BaseException:
            self._known = False  # what readers have
            raise
        changed, nbytes = sum(one[3] for one in everyone), sum(one[4] for one in everyone)
        return Published(self._number, False, changed, self._sizes[0], nbytes, self._sizes[1])


def _is_narrower(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < wanted.itemsize


def _nothing() -> None:
    """Stands for the release of a lock where there is none."""
