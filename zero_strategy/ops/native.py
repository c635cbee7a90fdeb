"""Loading the native libraries: at the first use or on request, once per process, and never a requirement.

`ZERO_STRATEGY_NATIVE=0` leaves them out; `ZERO_STRATEGY_NATIVE=cached` loads built ones and builds nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_strategy.ops import library
from zero_strategy.ops.build import BuildError, obtain

NATIVE_VARIABLE = "ZERO_STRATEGY_NATIVE"
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


@dataclass(frozen=True)
class Status:
    """State of one library in this process.

    Attributes:
        name: "cpu" or "cuda".
        path: Where it was loaded from, or None.
        reason: Why it was not loaded, or "".
    """

    name: str
    path: Path | None
    reason: str = ""


class NativeLibraries:
    """The libraries of this process. There is one object (`libraries`), as there is one dispatcher."""

    def __init__(self) -> None:
        self._status: dict[str, Status] = {}
        self._lock = threading.Lock()

    def ensure(self, device_type: str) -> Status:
        """Load the library for tensors on "cpu" or "cuda", building it if need be; cheap from the second call on.

        Without a compiler, or if it fails, one line says so and the references run.
        """
        name = device_type if device_type in _KEYS else "cpu"
        with self._lock:
            if name not in self._status:
                self._status[name] = self._load(name)
            return self._status[name]

    def status(self, name: str) -> Status | None:
        """State of a library; None if nobody asked for it."""
        return self._status.get(name)

    def _load(self, name: str) -> Status:
        mode = os.environ.get(NATIVE_VARIABLE, "1").lower()
        if mode in ("0", "false", "no", "off"):
            return _reference(name, f"{NATIVE_VARIABLE}={mode}", say=False)
        if name == "cuda" and not torch.cuda.is_available():
            return _reference(name, "this torch sees no CUDA device", say=False)
        try:
            path = obtain(name, mode)
            torch.ops.load_library(str(path))
        except (BuildError, OSError) as error:
            return _reference(name, str(error).splitlines()[0] if str(error) else type(error).__name__)
        return Status(name, path)


def _reference(name: str, reason: str, *, say: bool = True) -> Status:
    if say:
        print(f"zero_strategy: no native {name} ops ({reason}); plain torch runs instead", file=sys.stderr, flush=True)
    return Status(name, None, reason)


libraries = NativeLibraries()


def ops_report(device_type: str) -> list[tuple[str, str]]:
    """For every op: its name, and "native" or why the reference runs on that device type."""
    status = libraries.ensure(device_type)
    key = _KEYS[status.name]
    return [
        (name, "native" if library.has_kernel(name, key) else f"reference: {status.reason or 'no kernel for ' + key}")
        for name in library.op_names()
    ]
