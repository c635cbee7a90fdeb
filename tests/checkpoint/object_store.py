"""An fsspec file system over a directory that can do what an object store can: put, get, list and delete whole objects.

Nothing is there before it is closed, nothing can be changed in place or renamed. A put can be made to fail, or to end
the process, and requests are counted.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem, register_implementation
from fsspec.spec import AbstractBufferedFile

SCHEME = "bucket"


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """`bucket://name/...` is what lies under $OBJECT_STORE_ROOT/name.

    Attributes:
        faults: What to do at the put of an object whose path ends so.
        requests: (what, path) of all requests that read.
    """

    protocol = SCHEME
    cachable = False
    faults: dict[str, str] = {}
    requests: list[tuple[str, str]] = []

    def _place(self, path: str) -> Path:
        return Path(os.environ["OBJECT_STORE_ROOT"]) / self._strip_protocol(path).strip("/")

    def _fault(self, path: str) -> None:
        for end, what in self.faults.items():
            if path.endswith(end):
                if what == "kill":
                    os._exit(9)
                raise OSError(f"the store says {what}")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self.requests.append(("list", path))
        path = self._strip_protocol(path).strip("/")
        place = self._place(path)
        if not place.exists():
            raise FileNotFoundError(path)
        places = [place] if place.is_file() else sorted(place.iterdir())
        root = os.environ["OBJECT_STORE_ROOT"]
        found = [
            {
                "name": os.path.relpath(each, root),
                "size": each.stat().st_size if each.is_file() else 0,
                "type": "file" if each.is_file() else "directory",
            }
            for each in places
            if not each.name.startswith(".put-")
        ]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self.requests.append(("head", path))
        place = self._place(path)
        if not place.exists():
            raise FileNotFoundError(path)
        kind = "file" if place.is_file() else "directory"
        return {"name": path, "size": place.stat().st_size if place.is_file() else 0, "type": kind}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self.requests.append(("get", path))
        with open(self._place(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._fault(path)
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".put-{uuid.uuid4().hex}")
        temporary.write_bytes(value)
        os.replace(temporary, place)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        place = self._place(path)
        if not place.exists():
            raise FileNotFoundError(path)
        for each in [place] if place.is_file() else sorted(place.rglob("*"), reverse=True):
            self._fault(f"rm:{each.name}")
            each.rmdir() if each.is_dir() else each.unlink()
        if place.is_dir():
            place.rmdir()

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("objects cannot be renamed")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no directories."""

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "wb":
            raise OSError("objects are put whole, and read by range")
        return _Upload(self, path, mode="wb", block_size=1 << 16)


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self._parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self._parts.append(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, b"".join(self._parts))
        return True

    def discard(self) -> None:
        self.closed = True


def register(root: Path) -> str:
    """Makes the store known and gives the URL of a bucket in it."""
    os.environ["OBJECT_STORE_ROOT"] = str(root)
    register_implementation(SCHEME, ObjectStore, clobber=True)
    ObjectStore.faults.clear()
    ObjectStore.requests.clear()
    return f"{SCHEME}://run"
