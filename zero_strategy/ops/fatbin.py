"""Contents of a CUDA library: the devices for which it has code, and the driver that it needs, read from its file.

nvcc lays the code for each architecture into a section of the library. NVIDIA does not document it; the layout below is
what its compilers have written since CUDA 5, and what tools that take such files apart read.

    section .nv_fatbin    containers one after the other, each on 8 bytes
    container             magic u32 (0xBA55ED50), version u16, header u16 (bytes), size u64 (of all entries), entries
    entry                 kind u16 (1: PTX, 2: machine code), u16, header u32, size u64, 12 bytes, architecture u32, ...

The entry's size counts its code, compressed or not, and not its header. The architecture is 90 for compute capability
9.0. Machine code for X.Y runs on every X.Z with Z >= Y; PTX for X.Y is compiled by the driver for X.Y and all that came
later.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SECTION = ".nv_fatbin"
_MAGIC = 0xBA55ED50
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIII")
_PTX, _MACHINE_CODE = 1, 2
_RUNTIME = re.compile(rb"zero_strategy: CUDA runtime (\d+)\0")
"""`kRuntime` in cpp/cuda/binding.cpp."""


@dataclass(frozen=True)
class CudaCode:
    """Code of one library.

    Attributes:
        machine: Architectures with machine code, such as 80.
        ptx: Those with PTX.
        runtime: Version of the CUDA with which it was built, such as 12080 for 12.8.
    """

    machine: tuple[int, ...]
    ptx: tuple[int, ...]
    runtime: int

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures by nvcc's names, such as "sm_80" and "compute_100"."""
        return (*(f"sm_{each}" for each in self.machine), *(f"compute_{each}" for each in self.ptx))

    def reason_against(self, capabilities: Sequence[tuple[int, int]], driver: int) -> str:
        """Why it cannot run on devices of these compute capabilities under a driver of this CUDA version; "": it can.

        A driver runs machine code of its own major version of CUDA and of older ones, and compiles PTX of its own
        version and of older ones.
        """
        if driver // 1000 < self.runtime // 1000:
            return f"it needs a driver of CUDA {_shown(self.runtime // 1000 * 1000)}, this one is of {_shown(driver)}"
        for major, minor in capabilities:
            if any(each // 10 == major and each % 10 <= minor for each in self.machine):
                continue
            if not any(each <= 10 * major + minor for each in self.ptx):
                return f"it has no code for compute capability {major}.{minor}, but {', '.join(self.architectures)}"
            if driver < self.runtime:
                return (
                    f"compute capability {major}.{minor} needs a driver of CUDA {_shown(self.runtime)}, this one is of "
                    f"{_shown(driver)}"
                )
        return ""


def code_of(library: Path) -> CudaCode:
    """Code in a library's file.

    Raises:
        ValueError: If it is no 64-bit ELF file, or its section of code is not laid out as above.
    """
    data = library.read_bytes()
    found: dict[int, set[int]] = {_PTX: set(), _MACHINE_CODE: set()}
    section = _section(data)
    place = 0
    while place + _CONTAINER.size <= len(section):
        magic, _, header, size = _CONTAINER.unpack_from(section, place)
        if magic != _MAGIC:
            if section[place : place + 8] != bytes(8):
                raise ValueError(f"{library}: byte {place} of {_SECTION} begins no container of code")
            place += 8  # between containers of two objects
            continue
        entry, end = place + header, place + header + size
        while entry + _ENTRY.size <= end:
            kind, _, entry_header, entry_size, _, _, _, architecture = _ENTRY.unpack_from(section, entry)
            found.setdefault(kind, set()).add(architecture)
            entry += entry_header + entry_size
        place = -(-end // 8) * 8
    runtime = _RUNTIME.search(data)
    return CudaCode(tuple(sorted(found[_MACHINE_CODE])), tuple(sorted(found[_PTX])), int(runtime[1]) if runtime else 0)


def driver_version(library: str = "libcuda.so.1") -> int:
    """Newest CUDA that this machine's driver runs, such as 12080 for 12.8; 0 without a driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def _section(data: bytes) -> memoryview:
    """The section of code; empty if there is none."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, sections + number * size) for number in range(count)]
    start_of_names = headers[names][4]
    for name, _, _, _, start, length in headers:
        begin = start_of_names + name
        if data[begin : data.index(b"\0", begin)] == _SECTION.encode():
            return memoryview(data)[start : start + length]
    return memoryview(b"")


def _shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
